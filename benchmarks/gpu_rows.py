"""What `make bench-gpu` measures: rows, what a row's process hands back, and how it is told. Pure.

A row is a way to train: images in a micro-batch, with or without gradient checkpointing and
torch.compile. Its process hands back one line of JSON, or ends otherwise, which is a row too.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks.paired import Ratio

SIDES: Final = {
    "a": "this trainer",
    "b": "this trainer without telemetry",
    "c": "the reference loop",
    "d": "as b, with a bf16 accumulator",
}
RATIOS: Final = {"c/a": ("c", "a"), "a/b": ("a", "b"), "fp32/bf16": ("b", "d")}
"""Speed beside the reference, cost of telemetry, cost of the fp32 accumulator: of mean times."""
TARGETS: Final = "targets c/a>=1.15 a/b<=1.01"


@dataclass(frozen=True)
class Row:
    """A way to train. batch: images in a micro-batch."""

    batch: int
    checkpointing: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """``batch4+checkpointing+compile``."""
        more = "+checkpointing" * self.checkpointing + "+compile" * self.compiled
        return f"batch{self.batch}{more}"


def row_of(name: str) -> Row:
    """The row of that name. Raises ValueError with a sentence."""
    first, *more = name.strip().split("+")
    kind, number = first[:5], first[5:]
    known = kind == "batch" and number.isdecimal() and int(number) > 0
    if not known or not {*more} <= {"checkpointing", "compile"}:
        raise ValueError(
            f"{name!r} is no row: write batchN, and +checkpointing, +compile behind it where wanted"
        )
    return Row(int(number), "checkpointing" in more, "compile" in more)


DEFAULT_ROWS: Final = ",".join(
    Row(batch, checkpointing, compiled).name
    for compiled in (False, True)  # last, for compilers take minutes
    for batch in (1, 4)
    for checkpointing in (False, True)
)


@dataclass(frozen=True)
class SideNumbers:
    """One side of a row. seconds: mean of an optimizer step. peak_gib: of its tensors, its own
    weights included and those of the other sides not; None on a CPU. compiled: whether the UNet is.
    """

    seconds: float
    images_per_second: float
    peak_gib: float | None
    compiled: bool


@dataclass(frozen=True)
class RowNumbers:
    """What became of a row. failed: why there are no numbers; empty where there are."""

    row: str
    failed: str = ""
    device: str = ""
    rounds: int = 0
    sides: dict[str, SideNumbers] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


def row_from(line: str) -> RowNumbers:
    """What `RowNumbers.to_json` gave, from its line."""
    told = json.loads(line)
    told["sides"] = {name: SideNumbers(**side) for name, side in told["sides"].items()}
    told["ratios"] = {name: Ratio(**ratio) for name, ratio in told["ratios"].items()}
    return RowNumbers(**told)


def outcome(row: Row, code: int, last_line: str, error: str, out_of_time: bool) -> RowNumbers:
    """What a row's process left. code: its exit status, negative for a signal's number.

    last_line: of its output. error: all that it wrote to stderr.
    """
    if code == 0 and last_line.startswith("{"):
        return row_from(last_line)
    if out_of_time:
        return RowNumbers(row.name, "out of time")
    lines = [line for line in error.splitlines() if line.strip()]
    what = lines[-1].strip() if lines else "it said nothing"
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return RowNumbers(row.name, f"{how}: {what}"[:300])


def told(row: RowNumbers) -> Iterator[str]:
    """A row for a person, line by line."""
    if row.failed:
        yield f"{row.row}: not measured ({row.failed})"
        return
    ratios = ", ".join(f"{name} {ratio}" for name, ratio in row.ratios.items())
    yield f"{row.row}: {ratios} ({row.rounds} rounds)"
    for name, side in row.sides.items():
        peak = "" if side.peak_gib is None else f", peak {side.peak_gib:.2f} GiB"
        compiled = ", compiled" if side.compiled else ""
        yield (
            f"  {name} ({SIDES[name]}): {side.images_per_second:.2f} images/s, "
            f"{1000 * side.seconds:.1f} ms a step{peak}{compiled}"
        )


def closing_line(rows: Sequence[RowNumbers]) -> str:
    """The last line: figures of the first row that was measured."""
    measured = [row for row in rows if not row.failed]
    count = f"rows={len(measured)}/{len(rows)}"
    if not measured:
        return f"bench-gpu: nothing measured {count}"
    first = measured[0]
    ratios = " ".join(f"{name}={ratio}" for name, ratio in first.ratios.items())
    speed = " ".join(f"images/s_{n}={first.sides[n].images_per_second:.2f}" for n in ("a", "c"))
    peaks = [(n, first.sides[n].peak_gib) for n in ("a", "c")]
    peak = "".join(f" peak_gib_{n}={gib:.2f}" for n, gib in peaks if gib is not None)
    return (
        f"bench-gpu: {ratios} {speed}{peak} row={first.row} {count} device={first.device} {TARGETS}"
    )
