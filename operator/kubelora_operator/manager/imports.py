"""Imports that would load the Kubernetes library's synchronous client, which nothing here uses.

``import kubernetes.aio`` first runs the package's own module, which imports the synchronous client
with 300 modules; kopf imports it as well if it can. That is a quarter of the process's CPU time
until it watches, and 16 MiB for ever.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

_PACKAGE: Final = "kubernetes"
_CLIENT: Final = "kubernetes.client"


@contextmanager
def without_synchronous_client() -> Iterator[None]:
    """Let imports in the block find ``kubernetes.aio`` but not ``kubernetes.client``.

    Afterwards both are found as usual. Nothing changes if the package is loaded already.
    """
    specification = importlib.util.find_spec(_PACKAGE)
    if specification is None or _PACKAGE in sys.modules:
        yield
        return
    package = ModuleType(_PACKAGE)
    package.__spec__ = specification
    package.__path__ = list(specification.submodule_search_locations or [])
    hidden: dict[str, ModuleType | None] = {_PACKAGE: package, _CLIENT: None}
    sys.modules.update(hidden)  # type: ignore[arg-type]  # None makes an import fail
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
