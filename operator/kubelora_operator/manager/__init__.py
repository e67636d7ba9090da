"""The operator's process: command line, options, lifecycle and HTTP server."""
