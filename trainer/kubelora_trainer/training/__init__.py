"""The training run: setup, loop, publication and lifecycle."""
