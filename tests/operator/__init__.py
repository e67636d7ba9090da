"""The operator's rules, manifests and queue; what needs an API server is in tests/cluster."""
