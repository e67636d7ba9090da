"""Imports torch, transformers and diffusers in the least time: most of what a short run takes.

Python's collector rests meanwhile: it would walk over a million young objects again and again, and
none of them is garbage. And diffusers, transformers and peft import whatever they find of the
libraries for quantised models, which are never trained here: they add seconds and print advice.
"""

import atexit
import gc
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FOR_QUANTISED_MODELS = ("bitsandbytes", "torchao")


def import_heavy_libraries(module: str = "kubelora_trainer.run") -> None:
    """Import ``module`` and all that it needs; later imports of it cost nothing."""
    with _collector_at_rest(), not_found(FOR_QUANTISED_MODELS):
        importlib.import_module(module)


@contextmanager
def not_found(packages: Sequence[str]) -> Iterator[None]:
    """Packages that are not imported yet can't be found; afterwards they can.

    A library that looks for one of them only once, at its own import, does without it for good.
    """
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: it isn't there
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """No garbage collection; what is made meanwhile is left out of all later ones.

    At exit it is handed back: triton takes objects that nobody collects for leaks, and says so.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if was_on:
            gc.enable()
