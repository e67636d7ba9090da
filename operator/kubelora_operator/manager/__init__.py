"""The operator process: command line, options, lifecycle and HTTP server."""
