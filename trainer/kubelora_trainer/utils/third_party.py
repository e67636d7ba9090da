"""Import of third-party libraries: fast, and without their log noise.

Importing torch, transformers and diffusers takes most of the time of a short run. Python's garbage
collector runs less often meanwhile, because it would traverse a million objects repeatedly and free
few of them. diffusers, transformers, peft and accelerate also import optional libraries that are
never used here, which would cost seconds, megabytes and warnings.
"""

import atexit
import gc
import importlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

QUANTISATION_PACKAGES = ("bitsandbytes", "torchao")


UNUSED_PACKAGES = (*QUANTISATION_PACKAGES, "scipy", "boto3", "torchvision")
"""scipy (53 MiB of memory) serves object-detection losses and noise schedules that SDXL does not
train with, boto3 (14 MiB) serves SageMaker, and torchvision (10 MiB) serves vision models."""


GPU_PACKAGES = ("triton",)
"""It compiles GPU kernels; without a GPU it wastes 68 MiB."""


GC_THRESHOLD = 50_000
"""Allocations between collections of the youngest generation; Python's default is 700 to 2,000."""


def import_heavy_libraries(module: str = "kubelora_trainer.training.run") -> None:
    """Import ``module`` and everything it needs; later imports of it are free."""
    with _rare_collections(), hidden_packages(UNUSED_PACKAGES), _logging_disabled():
        import torch

        with hidden_packages(() if torch.cuda.is_available() else GPU_PACKAGES):
            importlib.import_module(module)
    from tqdm import tqdm

    # tqdm's own lock is a semaphore between processes, which multiprocessing reports as leaked,
    # outside of all logging, because ranks skip the interpreter's shutdown.
    tqdm.set_lock(threading.RLock())


@contextmanager
def hidden_packages(packages: Sequence[str]) -> Iterator[None]:
    """Hide packages that are not imported yet for the duration.

    A library that looks for one of them only once, at its own import, never uses it.
    """
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes the import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextmanager
def _logging_disabled() -> Iterator[None]:
    """Suppress log lines below ERROR from all libraries, which recommend what they do not find."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect young objects less often, and exempt the survivors from all later collections.

    Without any collection 13 MiB of garbage would remain. The objects are unfrozen at exit, because
    triton reports objects that are never collected as leaks.
    """
    usual = gc.get_threshold()
    gc.set_threshold(GC_THRESHOLD, 1_000_000, 1_000_000)
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.set_threshold(*usual)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence progress bars and warnings of diffusers and transformers while they load or save."""
    # Imported here, because this module is loaded before the slow imports that it speeds up.
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
