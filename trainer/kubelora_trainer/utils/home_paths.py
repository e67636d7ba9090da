"""Paths with ``~`` in them, for a user that this machine may not know."""

from pathlib import Path

from kubelora_trainer.utils.errors import ConfigurationError


def expanded(path: str) -> Path:
    """The path with ``~`` written out. Raises ConfigurationError for a user who is not known."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        home = path.split("/")[0]
        raise ConfigurationError(
            f"{path}: {home} is no home folder that is known here; write the path in full."
        ) from None
