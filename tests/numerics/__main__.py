"""`make numerics`: runs the faults and the healthy matrix, prints what was found.

    python -m tests.numerics                 every fault, each healthy configuration with one seed
    python -m tests.numerics --seeds 20      the whole matrix
    python -m tests.numerics --only NAME     rows whose name holds NAME

Each run's outcome is appended to ``--record`` at once; runs recorded there are not run again.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.numerics.bench import Observation, observe_run
from tests.numerics.fault_table import FAULTS, Fault
from tests.numerics.healthy_table import HEALTHY, Healthy
from tests.numerics.results_page import FaultRow, HealthyRow, page
from tests.numerics.scene import Scene


@dataclass(frozen=True)
class Verdict:
    """How one run was judged.

    good: a fault was found in time and nothing absurd beside it; a healthy run stayed silent.
    step: of detection, or the run's last one. found: what there was.
    """

    row: str
    seed: int
    good: bool
    step: int | None
    found: tuple[str, ...]
    seconds: float


def judge_fault(fault: Fault, seen: Observation) -> tuple[bool, int | None, tuple[str, ...]]:
    """Whether the fault was found by its limit, and beside it nothing critical that is absurd."""
    expected = seen.findings.get(fault.expected)
    absurd = seen.critical - {fault.expected} - fault.also
    good = expected is not None and expected.step <= fault.limit and not absurd
    return good, expected.step if expected else None, _told(seen)


def judge_healthy(seen: Observation) -> tuple[bool, int | None, tuple[str, ...]]:
    """Whether nothing was found and the run went to its end."""
    return not seen.findings and seen.error is None, seen.steps, _told(seen)


def _told(seen: Observation) -> tuple[str, ...]:
    told = [
        f"{name}@{f.step}" + (f" {f.group}={f.value:.3g}" if f.value is not None else "")
        for name, f in seen.findings.items()
    ]
    return (*told, *([seen.error] if seen.error else []))


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for; 1 where a fault was missed or a healthy run raised an alarm."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene.create(options.scene or Path(folder) / "scene")
        recorded = _read(options.record)
        output = Path(folder) / "run"
        print(f"{'fault':<58} {'finding':<22} {'step':>4} {'limit':>5}")
        faults = [f for f in FAULTS if options.only in f.name and not options.healthy]
        shown = [_show_fault(scene, f, output) for f in faults]
        matrix = [h for h in HEALTHY if options.only in h.name and not options.faults]
        by_row = {h.name: list(_healthy_runs(scene, h, options, recorded, output)) for h in matrix}
    quiet = [verdict for verdicts in by_row.values() for verdict in verdicts]
    detected = {f.number for f in faults} - {
        f.number for f, v in zip(faults, shown, strict=True) if not v.good
    }
    alarms = sum(not v.good for v in quiet)
    print(
        f"numerics: detected {len(detected)}/{len({f.number for f in faults})}, "
        f"false alarms {alarms}/{len(quiet)}"
    )
    if options.report:
        options.report.write_text(_report(arguments, faults, shown, by_row))
    return 1 if alarms or not all(v.good for v in shown) else 0


def _report(
    arguments: Sequence[str],
    faults: Sequence[Fault],
    shown: Sequence[Verdict],
    by_row: Mapping[str, Sequence[Verdict]],
) -> str:
    command = shlex.join(["python", "-m", "tests.numerics", *arguments])
    rows = [
        FaultRow(f.number, f.name, f.expected, v.step, f.limit, v.good)
        for f, v in zip(faults, shown, strict=True)
    ]
    healthy = [
        HealthyRow(name, len(vs), sum(not v.good for v in vs), sum(v.seconds for v in vs))
        for name, vs in by_row.items()
    ]
    return page(command, rows, healthy)


def _show_fault(scene: Scene, fault: Fault, output: Path) -> Verdict:
    begun = time.process_time()
    good, step, found = judge_fault(fault, fault.observe(scene, 1, output))
    verdict = Verdict(fault.name, 1, good, step, found, time.process_time() - begun)
    name = f"{fault.number:>2} {fault.name}"
    print(f"{name:<58} {fault.expected:<22} {step or '-':>4} {fault.limit:>5}", end="")
    print("" if good else f"   MISSED: {'; '.join(found) or 'nothing found'}", flush=True)
    return verdict


def _healthy_runs(
    scene: Scene,
    healthy: Healthy,
    options: argparse.Namespace,
    recorded: dict[tuple[str, int], Verdict],
    output: Path,
) -> Iterable[Verdict]:
    verdicts = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        verdict = recorded.get((healthy.name, seed))
        if verdict is None:
            begun = time.process_time()
            seen = observe_run(scene, healthy.configuration, seed, output, healthy.injection)
            good, step, found = judge_healthy(seen)
            seconds = time.process_time() - begun
            verdict = Verdict(healthy.name, seed, good, step, found, seconds)
            _append(options.record, verdict)
        verdicts.append(verdict)
    alarms = [v for v in verdicts if not v.good]
    seconds = sum(v.seconds for v in verdicts)
    print(f"   healthy: {healthy.name:<50} {len(verdicts):>3} runs {seconds:6.1f} s", end="")
    print(f"   FALSE ALARM: {'; '.join(alarms[0].found)}" if alarms else "", flush=True)
    return verdicts


def _read(record: Path | None) -> dict[tuple[str, int], Verdict]:
    if record is None or not record.is_file():
        return {}
    verdicts = [Verdict(**json.loads(line)) for line in record.read_text().splitlines()]
    return {(v.row, v.seed): v for v in verdicts}


def _append(record: Path | None, verdict: Verdict) -> None:
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.numerics", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each healthy configuration")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--faults", action="store_true", help="faults alone")
    parser.add_argument("--healthy", action="store_true", help="the healthy matrix alone")
    parser.add_argument("--record", type=Path, help="JSON lines of the healthy runs done so far")
    parser.add_argument("--report", type=Path, help="write the outcome as Markdown")
    parser.add_argument("--scene", type=Path, help="folder that keeps model and photographs")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
