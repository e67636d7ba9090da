"""`make test`: every tier this machine can run, one line each, and why where one can't.

Tiers that compute run one after another in one lane, the fault benchmark in a second; those that
mostly wait (the cluster's) in a third next to them, so that two cores are enough. Under ``CI=true``
a tier that could not run counts as failed: a green run has run everything. Each line gives the wall
time and the processor time of all that the tier started (see `tests.tiers.cpu_time`).
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.tiers.skips import is_ci

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build" / "test-logs"
PYTHON = sys.executable
BIN = Path(PYTHON).parent


def always() -> str | None:
    """This tier needs nothing but the virtual environment."""
    return None


def cluster_or_means_for_one() -> str | None:
    """Why there can be no cluster here, or None."""
    if os.environ.get("KUBECONFIG"):
        return None
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux to run a kubelet, or KUBECONFIG of a cluster"
    if not shutil.which("go"):
        return "needs Go to build Kubernetes, or KUBECONFIG of a cluster"
    return None


def helm_or_means_for_it() -> str | None:
    """Why `helm` can't be had here, or None."""
    if shutil.which("helm") or shutil.which("go"):
        return None
    return "needs helm, or Go to build it"


def means_to_build() -> str | None:
    """Why the programs that the next two tiers run can't be built here, or None."""
    return None if shutil.which("go") else "needs Go"


@dataclass(frozen=True)
class Tier:
    """A folder of tests, or a command that stands for one."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    lacking: Callable[[], str | None] = always


def pytest(*arguments: str) -> tuple[str, ...]:
    """A pytest call whose slowest tests are named in the log."""
    return (PYTHON, "-m", "pytest", "--durations=5", "-rs", *arguments)


UNIT_ROOMS = ("api", "operator", "tiers", "trainer", "benchmarks")
LANES: tuple[tuple[Tier, ...], ...] = (
    (
        Tier(
            "lint",
            (
                (str(BIN / "ruff"), "check", "."),
                (str(BIN / "ruff"), "format", "--check", "."),
                (str(BIN / "mypy"), "crds", "operator", "trainer", "charts", "tests", "benchmarks"),
                (str(BIN / "lint-imports"),),
            ),
        ),
        Tier("unit", (pytest(*(f"tests/{room}" for room in UNIT_ROOMS)),)),
        Tier("quickstart", (pytest("tests/quickstart"),)),
    ),
    (Tier("numerics", (pytest("tests/numerics"), (PYTHON, "-m", "tests.numerics"))),),
    (
        Tier("builds", ((PYTHON, "-m", "tests.cluster.harness", "build"),), means_to_build),
        Tier("chart", (pytest("tests/chart"),), helm_or_means_for_it),
        Tier("cluster", (pytest("tests/cluster"),), cluster_or_means_for_one),
    ),
)


@dataclass(frozen=True)
class Outcome:
    """How a tier went."""

    tier: str
    ran: bool
    passed: bool
    seconds: float
    cpu_seconds: float
    sentence: str
    counts: Mapping[str, int]

    def line(self) -> str:
        """One line for the person who waits."""
        state = "passed" if self.passed else "FAILED" if self.ran else "not run"
        cost = f"{self.seconds:6.0f} s {self.cpu_seconds / 60:5.1f} CPU min"
        return f"{self.tier:<11} {state:<8} {cost}  {self.sentence}"


def run(tier: Tier) -> Outcome:
    """Run a tier, its output to a log file, and print its line."""
    if reason := tier.lacking():
        outcome = Outcome(tier.name, False, False, 0, 0, reason, {})
    else:
        outcome = _run_commands(tier)
    print(outcome.line(), flush=True)
    return outcome


def _run_commands(tier: Tier) -> Outcome:
    log = LOGS / f"{tier.name}.log"
    started = time.monotonic()
    passed, cpu_seconds = True, 0.0
    with log.open("wb") as output, tempfile.NamedTemporaryFile("r") as cpu:
        for command in tier.commands:
            measured = (PYTHON, "-m", "tests.tiers.cpu_time", cpu.name, *command)
            done = subprocess.run(
                measured, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT
            )
            passed = passed and done.returncode == 0
            cpu.seek(0)
            cpu_seconds += float(cpu.read() or 0)
    seconds = time.monotonic() - started
    counts = count(log.read_text(errors="replace"))
    told = ", ".join(f"{n} {what}" for what, n in counts.items()) or f"{len(tier.commands)} checks"
    told = "; ".join([told, *own_words(tier.name, log.read_text(errors="replace"))])
    sentence = told if passed else f"{told}; see {log.relative_to(ROOT)}"
    return Outcome(tier.name, True, passed, seconds, cpu_seconds, sentence, counts)


def environment() -> dict[str, str]:
    """The environment of a tier's commands."""
    given = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
    # One thread each: lanes share the cores, and tiny models run slower on more.
    # Where PYTHONDONTWRITEBYTECODE is set and the packages were installed without bytecode, each
    # process compiles torch's and diffusers' sources again, which costs more than importing them.
    given.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**given, "PYTHONPYCACHEPREFIX": str(ROOT / "build" / "bytecode")}


def own_words(tier: str, log: str) -> list[str]:
    """What a tier says of itself, in lines that begin with its name."""
    mark = f"{tier}: "
    return [line.removeprefix(mark) for line in log.splitlines() if line.startswith(mark)]


def count(log: str) -> dict[str, int]:
    """Pytest's own counts from the closing lines of a log."""
    counts: dict[str, int] = {}
    for line in log.splitlines():
        if re.search(r"(passed|failed|errors?|skipped|no tests ran).* in [\d.]+s", line):
            for number, what in re.findall(r"(\d+) (passed|failed|error|skipped)", line):
                counts[what] = counts.get(what, 0) + int(number)
    return counts


def main(names: Sequence[str]) -> int:
    """Run the named tiers, or all, and tell the sum."""
    known = [t.name for lane in LANES for t in lane]
    if unknown := [n for n in names if n not in known]:
        print(f"no tier named {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    lanes = [[t for t in lane if not names or t.name in names] for lane in LANES]
    with ThreadPoolExecutor(len(lanes)) as pool:
        outcomes = [o for lane in pool.map(lambda ts: [run(t) for t in ts], lanes) for o in lane]
    for outcome in outcomes:
        if outcome.ran and not outcome.passed:
            _print_end_of(outcome.tier)
    print(f"{sum(o.cpu_seconds for o in outcomes) / 60:.1f} CPU minutes in all")
    strict = is_ci()
    wrong = [o for o in outcomes if not o.passed and (o.ran or strict)]
    tests = sum(o.counts.get("passed", 0) for o in outcomes)
    failed = sum(o.counts.get("failed", 0) + o.counts.get("error", 0) for o in outcomes)
    failed = max(failed, len(wrong))
    print(f"{tests} passed, {failed} failed")
    return 1 if wrong or not tests else 0


def _print_end_of(tier: str) -> None:
    print(f"\n--- {tier} ---")
    print("\n".join((LOGS / f"{tier}.log").read_text(errors="replace").splitlines()[-80:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
