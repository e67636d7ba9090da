"""Small parts without a domain: files, signals, text, errors."""
