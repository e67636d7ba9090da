"""`make bench-gpu`: images a second, memory and ratios on a GPU, with SDXL's real UNet.

Each row (batch size, gradient checkpointing, torch.compile) has a process of its own, so that one
which runs out of memory, or into a broken compiler, is a row and not the end. Sides of a row take
turns, see gpu_rows.py. Prints a line when a row begins and when it is done, writes all numbers as
JSON, and ends with one line. With --device cpu --layout small the same code runs anywhere, on the
demo's tiny UNet; its figures then say nothing about a GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_rows import DEFAULT_ROWS, Row, RowNumbers, closing_line, outcome, row_of, told
from benchmarks.sdxl_pipeline import LAYOUTS

EDGES = {"sdxl": 1024, "small": 64}
LAST_ROW_SECONDS = 20.0
"""A row that has less than this left is not begun."""


def main() -> None:
    """Measure all rows; exit code 1 where none could be, 2 without a GPU."""
    given = _arguments()
    if given.device == "cuda" and not _has_cuda():
        print(
            "bench-gpu: no usable CUDA GPU here; to try the program without one: "
            "python -m benchmarks.gpu --device cpu --layout small",
            file=sys.stderr,
        )
        raise SystemExit(2)
    deadline = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        say(f"the {given.layout} pipeline is written, with random weights ...")
        _write_pipeline(Path(folder), given)
        rows: list[RowNumbers] = []
        for row in given.rows:
            say(f"{row.name}: row {len(rows) + 1} of {len(given.rows)} ...")
            rows.append(_measured(row, Path(folder), given, deadline))
            for line in told(rows[-1]):
                say(line)
            _write(given.out, given, rows)
    say(f"all numbers: {given.out}")
    say(closing_line(rows))
    if all(row.failed for row in rows):
        raise SystemExit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-gpu", description=main.__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layout", choices=LAYOUTS, default="sdxl")
    parser.add_argument("--rows", type=_rows, default=_rows(DEFAULT_ROWS), help=DEFAULT_ROWS)
    parser.add_argument("--rounds", type=int, default=8, help="each side runs once a round")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60.0, help="rows beyond are left out")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu.json"))
    return parser.parse_args()


def _rows(names: str) -> list[Row]:
    try:
        return [row_of(name) for name in names.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _write_pipeline(folder: Path, given: argparse.Namespace) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.sdxl_pipeline", str(folder)),
            *("--layout", given.layout, "--device", given.device),
            *("--edge", str(EDGES[given.layout])),
        ],
        check=True,
    )


def _measured(row: Row, folder: Path, given: argparse.Namespace, deadline: float) -> RowNumbers:
    """The row's numbers, from a process that ends by the deadline."""
    left = deadline - time.monotonic()
    if left < LAST_ROW_SECONDS:
        return RowNumbers(row.name, "out of time")
    command = [sys.executable, "-m", "benchmarks.gpu_row", row.name, str(folder)]
    command += ["--device", given.device, "--edge", str(EDGES[given.layout])]
    for number in ("rank", "accumulation", "rounds"):
        command += [f"--{number}", str(getattr(given, number))]
    threads = {"OMP_NUM_THREADS": "1"} if given.device == "cpu" else {}
    with (
        tempfile.TemporaryFile("w+") as error,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=error,
            text=True,
            env={**os.environ, **threads},
        ) as process,
    ):
        begun = time.monotonic()
        timer = threading.Timer(left, process.kill)
        timer.start()
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = line.strip()
            if not last.startswith("{"):
                say(f"  {last} ({time.monotonic() - begun:.0f} s)")
        code = process.wait()
        timer.cancel()
        error.seek(0)
        return outcome(row, code, last, error.read(), time.monotonic() >= deadline)


def _write(place: Path, given: argparse.Namespace, rows: Sequence[RowNumbers]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(given, name) for name in ("layout", "rank", "accumulation", "rounds")}
    document = {"settings": settings, "rows": [row.to_json() for row in rows]}
    place.write_text(json.dumps(document, indent=2) + "\n")


def say(sentence: str) -> None:
    """A line at once."""
    print(sentence, flush=True)


if __name__ == "__main__":
    main()
