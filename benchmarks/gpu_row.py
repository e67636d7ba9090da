"""One row of `make bench-gpu`, in a process of its own: all sides in turn on one device.

Times are wall times between two moments at which the device has nothing left to do; on a CPU they
are CPU times, as in the other benchmarks. Prints lines of progress, then one line of JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kubelora_trainer.heavy_imports import import_heavy_libraries

if __name__ == "__main__":
    import_heavy_libraries()

import torch

from benchmarks.gpu_rows import RATIOS, SIDES, Row, RowNumbers, SideNumbers, row_of
from benchmarks.our_loop import OurLoop
from benchmarks.paired import measure_rounds, ratio_of
from benchmarks.reference_loop import NOT_REQUIRED, ReferenceLoop
from benchmarks.sdxl_pipeline import PHOTOGRAPHS
from kubelora_trainer.heavy_imports import not_found

GIB = 2**30


@dataclass(frozen=True)
class Setting:
    """What all rows share. folder: holds model and photos. edge: of the images, in pixels."""

    folder: Path
    device: str
    edge: int
    rank: int
    accumulation: int
    rounds: int


class Side:
    """A loop, and the memory that its tensors take on the device."""

    def __init__(self, loop: OurLoop | ReferenceLoop, before: int, steps: int, cuda: bool) -> None:
        """before: bytes on the device before the loop was built. steps: first ones, taken here."""
        self.loop, self._cuda, self.peak = loop, cuda, 0
        for _ in range(steps):
            loop.step()
        self._own = torch.cuda.memory_allocated() - before if cuda else 0

    def step(self) -> None:
        """One optimizer step."""
        if not self._cuda:
            self.loop.step()
            return
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - self._own
        self.loop.step()
        torch.cuda.synchronize()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)


def measure_row(row: Row, setting: Setting, output: Path) -> RowNumbers:
    """Numbers of one row. Raises torch.OutOfMemoryError where the device has too little."""
    cuda = setting.device == "cuda"
    images = row.batch * setting.accumulation
    first_steps = 1 + -(-PHOTOGRAPHS // images)  # every photograph has been encoded by then
    sides: dict[str, Side] = {}
    for name in SIDES:
        say(f"{row.name}: {name} ({SIDES[name]}) is built")
        before = torch.cuda.memory_allocated() if cuda else 0
        sides[name] = Side(_loop(name, row, setting, output / name), before, first_steps, cuda)
    say(f"{row.name}: {setting.rounds} rounds")
    times = measure_rounds(
        {name: side.step for name, side in sides.items()},
        setting.rounds,
        warm_up=1,
        clock=synchronised if cuda else time.process_time,
    )
    for side in sides.values():
        if isinstance(side.loop, OurLoop):
            side.loop.close()
    return RowNumbers(
        row=row.name,
        device=torch.cuda.get_device_name().replace(" ", "-") if cuda else "cpu",
        rounds=setting.rounds,
        sides={
            name: SideNumbers(
                seconds=(mean := statistics.fmean(times[name])),
                images_per_second=images / mean,
                peak_gib=side.peak / GIB if cuda else None,
                compiled=side.loop.compiled,
            )
            for name, side in sides.items()
        },
        ratios={
            name: ratio_of(times[over], times[under]) for name, (over, under) in RATIOS.items()
        },
    )


def _loop(name: str, row: Row, setting: Setting, output: Path) -> OurLoop | ReferenceLoop:
    model, photos = setting.folder / "model", setting.folder / "photos"
    if name == "c":
        with not_found(NOT_REQUIRED):
            return ReferenceLoop(
                model,
                photos,
                rank=setting.rank,
                accumulation=setting.accumulation,
                edge=setting.edge,
                rate=1e-4,
                batch=row.batch,
                device=setting.device,
                checkpointing=row.checkpointing,
                compiled=row.compiled,
            )
    lossy = {"accumulator": "bf16", "allowLossyPrecision": True}
    return OurLoop(
        model,
        photos,
        output,
        telemetry=name == "a",
        rank=setting.rank,
        accumulation=setting.accumulation,
        more={
            "dataset": {"resolution": setting.edge},
            "training": {
                "batchSize": row.batch,
                "device": setting.device,
                "gradientCheckpointing": row.checkpointing,
                "compile": row.compiled,
            },
            "precision": lossy if name == "d" else {},
        },
    )


def synchronised() -> float:
    """Seconds, once the device has done all that it was given."""
    torch.cuda.synchronize()
    return time.perf_counter()


def say(sentence: str) -> None:
    """A line at once."""
    print(sentence, flush=True)


def guarded(row: Row, measure: Callable[[], RowNumbers]) -> RowNumbers:
    """What ``measure`` gives; too little memory is an outcome of its own."""
    try:
        return measure()
    except torch.OutOfMemoryError as error:
        return RowNumbers(row.name, f"out of memory: {str(error).splitlines()[0]}"[:300])


def main() -> None:
    """Measure one row and print it as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("row", type=row_of)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    for number in ("edge", "rank", "accumulation", "rounds"):
        parser.add_argument(f"--{number}", type=int, required=True)
    given = vars(parser.parse_args())
    row: Row = given.pop("row")
    if given["device"] == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-") as output:
        numbers = guarded(row, lambda: measure_row(row, Setting(**given), Path(output)))
    print(json.dumps(numbers.to_json()), flush=True)


if __name__ == "__main__":
    main()
