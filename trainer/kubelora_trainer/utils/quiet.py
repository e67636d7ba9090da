"""Keeps progress bars and advice of the libraries out of a person's terminal and a pod's log."""

from collections.abc import Iterator
from contextlib import contextmanager

from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """No bars and no advice of diffusers and transformers while models load or are written."""
    bar_on = transformers_logging.is_progress_bar_enabled()
    levels = (transformers_logging.get_verbosity(), diffusers_logging.get_verbosity())
    transformers_logging.disable_progress_bar()
    diffusers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    diffusers_logging.set_verbosity_error()
    try:
        yield
    finally:
        diffusers_logging.enable_progress_bar()
        if bar_on:
            transformers_logging.enable_progress_bar()
        transformers_logging.set_verbosity(levels[0])
        diffusers_logging.set_verbosity(levels[1])
