"""`make bench-trainer`: what a step, the memory and the start cost, beside a reference loop.

a: this trainer. b: this trainer without telemetry. c: the reference loop (reference_loop.py). They
take turns in one process on one thread, and CPU time is counted: wall time on a busy machine is
noise. Memory and start-up are those of processes of their own. What telemetry costs is measured
twice: here at rank 8 and accumulation 4, and as in telemetry_overhead.py, where its target stands.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from benchmarks import start_up
from benchmarks.paired import Ratio, measure_rounds, ratio_of
from benchmarks.telemetry_overhead import ACCUMULATION, RANK
from benchmarks.telemetry_overhead import measure as measure_telemetry
from kubelora_trainer.utils.third_party import hidden_packages, import_heavy_libraries

TARGETS = {"c/a": "at least 1.0", "a/b": "at most 1.03", "rss a/c": "at most 1.0"}


def main() -> None:
    """Measure and print; the last line holds the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=250, help="each side runs once a round")
    parser.add_argument("--telemetry-rounds", type=int, default=100, help="of a and b at rank 64")
    parser.add_argument("--starts", type=int, default=3, help="processes started of each kind")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        model, photos = start_up.demo_in(Path(folder))
        say(f"start: {given.starts} processes of each, CPU seconds to the first step ...")
        ours, theirs, memory = _processes(model, photos, Path(folder), given.starts)
        say(f"  kubelora train {_seconds(ours)}; reference {_seconds(theirs)}")
        say(f"memory: peak of a {memory[0] >> 10} MiB, of c {memory[1] >> 10} MiB")
        say(f"steps: {given.rounds} rounds of a, b and c, CPU time ...")
        speed, small = _steps(model, photos, Path(folder), given.rounds)
        say(f"  c/a {speed}, target {TARGETS['c/a']}; a/b {small} at rank 8, accumulation 4")
        say(f"telemetry: {given.telemetry_rounds} rounds of a and b, CPU time ...")
        times = measure_telemetry(model, photos, Path(folder), given.telemetry_rounds)
        telemetry = ratio_of(times["a"], times["b"])
        say(
            f"  a/b {telemetry} at rank {RANK}, accumulation {ACCUMULATION}, "
            f"target {TARGETS['a/b']}"
        )
    print(
        f"bench-trainer: c/a={speed.value:.3f} a/b={telemetry.value:.3f} "
        f"rss a/c={memory[0] / memory[1]:.3f} startup_s={min(ours):.1f} "
        f"a/b_rank8={small.value:.3f}"
    )


def _processes(
    model: Path, photos: Path, folder: Path, starts: int
) -> tuple[list[float], list[float], tuple[int, int]]:
    """Start-up of the command and of the reference, in turn; median peaks of a and c in KiB."""
    start_up.first_step_seconds(model, photos, _empty(folder / "fill"))  # fills the cache
    ours, theirs, peaks = [], [], []
    for number in range(starts):
        ours.append(start_up.first_step_seconds(model, photos, _empty(folder / f"run{number}")))
        peak, seconds = start_up.reference_process(model, photos, steps=20)
        theirs.append(seconds)
        peaks.append((start_up.peak_of_ours(model, photos, steps=20), peak))
    memory = tuple(int(statistics.median(side)) for side in zip(*peaks, strict=True))
    return ours, theirs, (memory[0], memory[1])


def _steps(model: Path, photos: Path, folder: Path, rounds: int) -> tuple[Ratio, Ratio]:
    """c over a, and a over b."""
    import_heavy_libraries()
    import torch

    from benchmarks.our_loop import OurLoop
    from benchmarks.reference_loop import NOT_REQUIRED, ReferenceLoop

    torch.set_num_threads(1)
    ours = OurLoop(model, photos, folder / "a")
    with hidden_packages(NOT_REQUIRED):
        reference = ReferenceLoop(model, photos, rank=8, accumulation=4, edge=64, rate=1e-4)
    sides = {"a": ours.step, "b": ours.step_without_telemetry, "c": reference.step}
    times = measure_rounds(sides, rounds, warm_up=min(10, rounds))
    ours.close()
    for name, seconds in times.items():
        say(f"  {name}: {1000 * statistics.fmean(seconds):.1f} ms a step on average")
    return ratio_of(times["c"], times["a"]), ratio_of(times["a"], times["b"])


def _empty(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder / "out"


def _seconds(times: list[float]) -> str:
    return f"{min(times):.1f} s at least, {statistics.median(times):.1f} s in the middle"


def say(sentence: str) -> None:
    """A line at once."""
    print(sentence, flush=True)


if __name__ == "__main__":
    main()
