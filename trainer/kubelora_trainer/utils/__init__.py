"""General helpers: files, signals, text, errors."""
