"""`make numerics`: runs the faults and the healthy matrix, prints what was found.

    python -m tests.numerics                 every fault, each healthy configuration with one seed
    python -m tests.numerics --seeds 20 --fault-seeds 5      the whole matrix
    python -m tests.numerics --only NAME     rows whose name holds NAME

Each run's outcome is appended to ``--record`` at once; runs recorded there are not run again.
``--recorded`` runs nothing and tells what stands there.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.numerics.bench import Observation
from tests.numerics.fault_table import FAULTS
from tests.numerics.faults import Fault
from tests.numerics.healthy_table import HEALTHY, Healthy
from tests.numerics.results_page import FaultRow, HealthyRow, page
from tests.numerics.scene import Scene
from tests.trainer.fixtures.threads import use_one_thread


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


Outcome = tuple[bool, int | None, tuple[str, ...]]
"""Whether it is as it should be, a step, and what there was: as in `Verdict`."""
Recorded = Mapping[tuple[str, int], Verdict]
"""Verdicts by row and seed."""


def judge_fault(fault: Fault, seen: Observation) -> Outcome:
    """Whether the fault was found by its limit, and beside it nothing critical that is absurd."""
    names = {fault.expected} | fault.sooner
    steps = [seen.findings[name].step for name in names & seen.findings.keys()]
    absurd = seen.critical - names - fault.also
    found = min(steps, default=None)
    good = found is not None and found <= fault.limit and not absurd
    return good, found, _told(seen)


def judge_healthy(seen: Observation) -> Outcome:
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
    use_one_thread()
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene.create(options.scene or Path(folder) / "scene")
        recorded = _read(options.record)
        output = Path(folder) / "run"
        print(f"{'fault':<58} {'finding':<22} {'found':>5} {'step':>4} {'limit':>5}")
        faults = [f for f in FAULTS if options.only in f.name and not options.healthy]
        shown = [_fault_runs(scene, f, options, recorded, output) for f in faults]
        matrix = [h for h in HEALTHY if options.only in h.name and not options.faults]
        quiet = [_healthy_runs(scene, h, options, recorded, output) for h in matrix]
    missed = {f.number for f, vs in zip(faults, shown, strict=True) if not all(v.good for v in vs)}
    numbers = {f.number for f in faults}
    alarms = sum(not v.good for vs in quiet for v in vs)
    print(
        f"numerics: detected {len(numbers - missed)}/{len(numbers)}, "
        f"false alarms {alarms}/{sum(map(len, quiet))}"
    )
    if options.report:
        options.report.write_text(
            _report(
                arguments,
                [_fault_row(f, vs) for f, vs in zip(faults, shown, strict=True)],
                [_healthy_row(h, vs) for h, vs in zip(matrix, quiet, strict=True)],
            )
        )
    return 1 if alarms or missed else 0


def _report(
    arguments: Sequence[str], faults: Sequence[FaultRow], healthy: Sequence[HealthyRow]
) -> str:
    return page(shlex.join(["python", "-m", "tests.numerics", *arguments]), faults, healthy)


def _fault_row(fault: Fault, verdicts: Sequence[Verdict]) -> FaultRow:
    detected = sum(v.good for v in verdicts)
    steps = [v.step for v in verdicts if v.step is not None]
    last = max(steps, default=None)
    return FaultRow(
        fault.number, fault.name, fault.expected, detected, len(verdicts), last, fault.limit
    )


def _healthy_row(healthy: Healthy, verdicts: Sequence[Verdict]) -> HealthyRow:
    alarms, seconds = sum(not v.good for v in verdicts), sum(v.seconds for v in verdicts)
    return HealthyRow(healthy.name, len(verdicts), alarms, seconds)


def _fault_runs(
    scene: Scene,
    fault: Fault,
    options: argparse.Namespace,
    recorded: Recorded,
    output: Path,
) -> list[Verdict]:
    def run(seed: int) -> Outcome:
        return judge_fault(fault, fault.observe(scene, seed, output))

    seeds = _seeds(fault.name, options, options.fault_seeds, recorded)
    verdicts = [_once(fault.name, seed, run, options.record, recorded) for seed in seeds]
    row, missed = _fault_row(fault, verdicts), [v for v in verdicts if not v.good]
    name = f"{row.number:>2} {row.name}"
    found = f"{row.detected}/{row.runs}"
    print(f"{name:<58} {row.finding:<22} {found:>5} {row.step or '-':>4} {row.limit:>5}", end="")
    if missed:
        what = "; ".join(missed[0].found) or "nothing found"
        print(f"   MISSED with seed {missed[0].seed}: {what}", end="")
    print(flush=True)
    return verdicts


def _healthy_runs(
    scene: Scene,
    healthy: Healthy,
    options: argparse.Namespace,
    recorded: Recorded,
    output: Path,
) -> list[Verdict]:
    def run(seed: int) -> Outcome:
        return judge_healthy(healthy.observe(scene, seed, output))

    seeds = _seeds(healthy.name, options, options.seeds, recorded)
    verdicts = [_once(healthy.name, seed, run, options.record, recorded) for seed in seeds]
    alarms = [v for v in verdicts if not v.good]
    seconds = sum(v.seconds for v in verdicts)
    print(f"   healthy: {healthy.name:<50} {len(verdicts):>3} runs {seconds:6.1f} s", end="")
    if alarms:
        print(f"   FALSE ALARM with seed {alarms[0].seed}: {'; '.join(alarms[0].found)}", end="")
    print(flush=True)
    return verdicts


def _seeds(row: str, options: argparse.Namespace, count: int, recorded: Recorded) -> Sequence[int]:
    """The seeds that a row is wanted for."""
    if options.recorded:
        return sorted(seed for name, seed in recorded if name == row)
    return range(options.first_seed, options.first_seed + count)


def _once(
    row: str,
    seed: int,
    run: Callable[[int], Outcome],
    record: Path | None,
    recorded: Recorded,
) -> Verdict:
    """The verdict on a run that is recorded, or on one that is done now."""
    if known := recorded.get((row, seed)):
        return known
    begun = time.process_time()
    good, step, found = run(seed)
    verdict = Verdict(row, seed, good, step, found, time.process_time() - begun)
    _append(record, verdict)
    return verdict


def _read(record: Path | None) -> Recorded:
    if record is None or not record.is_file():
        return {}
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    verdicts = [Verdict(**{**line, "found": tuple(line["found"])}) for line in lines]
    return {(v.row, v.seed): v for v in verdicts}


def _append(record: Path | None, verdict: Verdict) -> None:
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        with record.open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.numerics", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each healthy configuration")
    parser.add_argument("--fault-seeds", type=int, default=1, help="seeds of each fault")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--faults", action="store_true", help="faults alone")
    parser.add_argument("--healthy", action="store_true", help="the healthy matrix alone")
    parser.add_argument("--record", type=Path, help="JSON lines of the runs done so far")
    parser.add_argument("--recorded", action="store_true", help="tell what the record holds")
    parser.add_argument("--report", type=Path, help="write the outcome as Markdown")
    parser.add_argument("--scene", type=Path, help="folder that keeps model and photographs")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
