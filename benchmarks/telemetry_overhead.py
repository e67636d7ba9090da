"""`make bench-telemetry`: what telemetry costs of an optimizer step.

a: steps of this trainer with telemetry and all that it feeds (watchdog, metrics, status, run log,
progress). b: steps without, but for the gradient's norm that clipping needs. They take turns in one
run, on one thread, on the tiny demo model with windows of 8 micro-batches at rank 64; CPU time is
counted, for wall time on a busy machine is noise. Prints the mean of a over the mean of b, with a
bootstrap interval over the rounds.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks import start_up
from benchmarks.paired import measure_rounds, ratio_of
from kubelora_trainer.utils.third_party import import_heavy_libraries

RANK, ACCUMULATION = 64, 8
TARGET = 1.03


def main() -> None:
    """Measure and print; the last line holds the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="each side runs once a round")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        model, photos = start_up.demo_in(Path(folder))
        print(f"{given.rounds} rounds of a and b ...", flush=True)
        times = measure(model, photos, Path(folder), given.rounds)
    for name, seconds in times.items():
        print(f"  {name}: {1000 * statistics.fmean(seconds):.1f} ms of CPU a step on average")
    ratio = ratio_of(times["a"], times["b"])
    print(
        f"bench-telemetry: a/b={ratio} rounds={given.rounds} rank={RANK} "
        f"accumulation={ACCUMULATION} target<={TARGET}"
    )


def measure(model: Path, photos: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each optimizer step of both sides. folder: where their output goes."""
    import_heavy_libraries()
    import torch

    from benchmarks.our_loop import OurLoop

    torch.set_num_threads(1)
    loop = OurLoop(model, photos, folder / "telemetry", rank=RANK, accumulation=ACCUMULATION)
    sides = {"a": loop.step, "b": loop.step_without_telemetry}
    times = measure_rounds(sides, rounds, warm_up=min(5, rounds))
    loop.close()
    return times


if __name__ == "__main__":
    main()
