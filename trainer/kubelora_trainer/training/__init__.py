"""The training run: set-up, loop, publication and lifecycle."""
