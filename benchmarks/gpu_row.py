"""One row of `make bench-gpu`, in a process of its own: all sides in turn on one device.

Times are wall times between two moments at which the device has nothing left to do; on a CPU they
are CPU times, as in the other benchmarks. Prints lines of progress, then one line of JSON.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from kubelora_trainer.utils.third_party import import_heavy_libraries

if __name__ == "__main__":
    import_heavy_libraries()

import torch

from benchmarks.gpu_rows import RATIOS, SIDES, Row, RowNumbers, SideNumbers, row_of
from benchmarks.our_loop import OurLoop
from benchmarks.paired import measure_rounds, ratio_of
from benchmarks.reference_loop import NOT_REQUIRED, ReferenceLoop
from benchmarks.sdxl_pipeline import PHOTOGRAPHS
from kubelora_trainer.utils.third_party import hidden_packages

GIB = 2**30
LOSSY = {"accumulator": "bf16", "allowLossyPrecision": True}
Loop = TypeVar("Loop", OurLoop, ReferenceLoop)


@dataclass(frozen=True)
class Setting:
    """What all rows share. folder: holds model and photos. edge: of the images, in pixels."""

    folder: Path
    device: str
    edge: int
    rank: int
    accumulation: int
    rounds: int


@dataclass(frozen=True)
class Built(Generic[Loop]):
    """A loop, and the bytes that it keeps on the device between its steps."""

    loop: Loop
    own: int


class Side:
    """One way to make steps. peak: the most bytes of tensors meanwhile, other loops' left out."""

    def __init__(self, make_step: Callable[[], None], own: int, cuda: bool) -> None:
        """own: what its loop keeps on the device."""
        self._make_step, self._own, self._cuda, self.peak = make_step, own, cuda, 0

    def step(self) -> None:
        """One optimizer step."""
        if not self._cuda:
            self._make_step()
            return
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - self._own
        self._make_step()
        torch.cuda.synchronize()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated() - others)


def measure_row(row: Row, setting: Setting, output: Path) -> RowNumbers:
    """Numbers of one row. Raises torch.OutOfMemoryError where the device has too little."""
    cuda = setting.device == "cuda"
    ours = _built(row, setting, "a", lambda: _ours(row, setting, output / "a", {}))
    reference = _built(row, setting, "c", lambda: _reference(row, setting))
    lossy = _built(row, setting, "d", lambda: _ours(row, setting, output / "d", LOSSY))
    sides = {
        "a": Side(ours.loop.step, ours.own, cuda),
        "b": Side(ours.loop.step_without_telemetry, ours.own, cuda),
        "c": Side(reference.loop.step, reference.own, cuda),
        "d": Side(lossy.loop.step_without_telemetry, lossy.own, cuda),
    }
    say(f"{row.name}: {setting.rounds} rounds")
    times = measure_rounds(
        {name: side.step for name, side in sides.items()},
        setting.rounds,
        warm_up=1,
        clock=synchronised if cuda else time.process_time,
    )
    compiled = {"c": reference.loop.compiled, "d": lossy.loop.compiled}
    ours.loop.close()
    lossy.loop.close()
    return RowNumbers(
        row=row.name,
        device=torch.cuda.get_device_name().replace(" ", "-") if cuda else "cpu",
        rounds=setting.rounds,
        sides={
            name: SideNumbers(
                seconds=(mean := statistics.fmean(times[name])),
                images_per_second=row.batch * setting.accumulation / mean,
                peak_gib=side.peak / GIB if cuda else None,
                compiled=compiled.get(name, ours.loop.compiled),
            )
            for name, side in sides.items()
        },
        ratios={
            name: ratio_of(times[over], times[under]) for name, (over, under) in RATIOS.items()
        },
    )


def _built(row: Row, setting: Setting, name: str, build: Callable[[], Loop]) -> Built[Loop]:
    """The loop of a side, once every photograph has been encoded and every kernel been chosen."""
    say(f"{row.name}: {name} ({SIDES[name]}) is built")
    cuda = setting.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    loop = build()
    for _ in range(1 + -(-PHOTOGRAPHS // (row.batch * setting.accumulation))):
        loop.step()
    return Built(loop, torch.cuda.memory_allocated() - before if cuda else 0)


def _reference(row: Row, setting: Setting) -> ReferenceLoop:
    with hidden_packages(NOT_REQUIRED):
        return ReferenceLoop(
            setting.folder / "model",
            setting.folder / "photos",
            rank=setting.rank,
            accumulation=setting.accumulation,
            edge=setting.edge,
            rate=1e-4,
            batch=row.batch,
            device=setting.device,
            checkpointing=row.checkpointing,
            compiled=row.compiled,
        )


def _ours(row: Row, setting: Setting, output: Path, precision: Mapping[str, Any]) -> OurLoop:
    return OurLoop(
        setting.folder / "model",
        setting.folder / "photos",
        output,
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
            "precision": precision,
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
