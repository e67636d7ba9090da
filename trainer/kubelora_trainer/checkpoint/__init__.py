"""Checkpoints: state, directories, saving, loading and rollback."""
