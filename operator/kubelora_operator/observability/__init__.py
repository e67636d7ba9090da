"""The operator's own logs and metrics."""
