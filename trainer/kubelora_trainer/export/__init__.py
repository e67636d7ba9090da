"""Adapter files for users: writing, verification and upload."""
