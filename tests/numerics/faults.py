"""A row of the benchmark's faults, and the run that most of them make."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tests.numerics.bench import (
    Configuration,
    Injection,
    Observation,
    Observe,
    observe_run,
    sound,
)
from tests.numerics.scene import Photographs, Scene


@dataclass(frozen=True)
class Fault:
    """One row.

    number: of the fault; several rows may show one. expected: finding that must appear, at
    ``limit`` at the latest. also: other critical findings that follow from the fault, for the
    reason that stands beside them; any other beside the expected one is absurd. sooner: a finding
    that names the fault as well and may end the run before the expected one can come.
    """

    number: int
    name: str
    expected: str
    limit: int
    observe: Observe
    also: frozenset[str] = frozenset()
    sooner: frozenset[str] = frozenset()


def run_with(
    injection: Injection = sound,
    *,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    photographs: Photographs | None = None,
    **spec: dict[str, object],
) -> Observe:
    """A run of the plain job with ``spec``'s fields and an injection."""

    def observe(scene: Scene, seed: int, output: Path) -> Observation:
        configuration = Configuration(spec, photographs or Photographs())
        with around():
            return observe_run(scene, configuration, seed, output, injection)

    return observe
