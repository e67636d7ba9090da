"""Third-party libraries: imported in the least time, and kept quiet.

Importing torch, transformers and diffusers takes most of a short run. Python's collector is slowed
down meanwhile: it would walk over a million objects again and again, and few of them are garbage.
And diffusers, transformers, peft and accelerate import whatever they find of libraries that nothing
here uses: these add seconds, megabytes and advice.
"""

import atexit
import gc
import importlib
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FOR_QUANTISED_MODELS = ("bitsandbytes", "torchao")


NEVER_USED = (*FOR_QUANTISED_MODELS, "scipy", "boto3", "torchvision")
"""scipy (53 MiB of memory) is for losses of object detection and for noise schedules that SDXL does
not train with, boto3 (14 MiB) for jobs on SageMaker, torchvision (10 MiB) for models that look at
images."""


FOR_GPUS = ("triton",)
"""It compiles kernels for GPUs alone; without one it is 68 MiB for nothing."""


YOUNG_OBJECTS = 50_000
"""Objects after which the youngest are looked at once; Python's own number is 700 to 2,000."""


def import_heavy_libraries(module: str = "kubelora_trainer.training.run") -> None:
    """Import ``module`` and all that it needs; later imports of it cost nothing."""
    with _seldom_collected(), not_found(NEVER_USED), _no_advice():
        import torch

        with not_found(() if torch.cuda.is_available() else FOR_GPUS):
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
def _no_advice() -> Iterator[None]:
    """No line below an error from any library: what is not found would be recommended."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """Look at each young object once; what is left is left out of all later collections.

    Without any collection 13 MiB of garbage would stay. At exit all is handed back: triton takes
    objects that nobody collects for leaks, and says so.
    """
    usual = gc.get_threshold()
    gc.set_threshold(YOUNG_OBJECTS, 1_000_000, 1_000_000)
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.set_threshold(*usual)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """No bars and no advice of diffusers and transformers while models load or are written."""
    # Imported here: this module is read before the heavy imports that it makes fast.
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

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
