"""`python -m tests.numerics.ranges`: what every metric reads in healthy runs and in faulty ones.

Thresholds are chosen with it, on seeds (from 101) that the benchmark's own runs (1 to 20) never
use. A value is the median of five steps, as the watchdog judges it; a row shows the least and the
largest over all groups and steps after the first three.
"""

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from kubelora_trainer.telemetry.step_metrics import GROUP_FIELDS, STEP_FIELDS, StepNumbers
from tests.numerics.fault_table import FAULTS
from tests.numerics.healthy_table import HEALTHY
from tests.numerics.scene import Scene
from tests.trainer.fixtures.threads import use_one_thread

WINDOW, SKIPPED = 5, 3


def medians(values: Sequence[float]) -> list[float]:
    """Medians of five values in a row that were measured."""
    measured = [v for v in values if not math.isnan(v)]
    return [
        median(measured[end - WINDOW : end]) for end in range(WINDOW, len(measured) + 1)
    ] or measured


def series(numbers: Iterable[StepNumbers]) -> dict[str, list[float]]:
    """Medians of each metric, of all factors of a kind together: ``metric lora_A``."""
    settled = [n for n in numbers if n.step > SKIPPED]
    found: dict[str, list[float]] = defaultdict(list)
    for metric, field in GROUP_FIELDS.items():
        for group in settled[-1].groups if settled else ():
            factor = group.rpartition(".")[2]
            values = [float(getattr(n.groups[group], field)) for n in settled]
            found[f"{metric} {factor}"] += medians(values)
    for metric, field in STEP_FIELDS.items():
        found[metric] += medians([float(getattr(n, field)) for n in settled])
    return found


def main(arguments: Sequence[str]) -> int:
    """Print a line per metric and row."""
    parser = argparse.ArgumentParser(prog="python -m tests.numerics.ranges", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--scene", type=Path, help="folder that keeps model and photographs")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    options = parser.parse_args(arguments)
    use_one_thread()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene.create(options.scene or Path(folder) / "scene")
        output = Path(folder) / "run"
        for seed in range(101, 101 + options.seeds):
            for healthy in HEALTHY:
                if options.only in healthy.name:
                    _print(
                        "healthy", healthy.name, seed, healthy.observe(scene, seed, output).numbers
                    )
            for fault in FAULTS:
                if options.only in fault.name:
                    _print("fault", fault.name, seed, fault.observe(scene, seed, output).numbers)
    return 0


def _print(kind: str, name: str, seed: int, numbers: Iterable[StepNumbers]) -> None:
    for metric, values in series(numbers).items():
        if values:
            print(f"{metric}\t{kind}\t{name}\t{seed}\t{min(values):.4g}\t{max(values):.4g}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
