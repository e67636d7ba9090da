"""``docs/numerics-results.md``: what was run and what came of it, as the bench itself writes it."""

from collections.abc import Sequence
from dataclasses import dataclass

HEAD = """<!-- Written by `python -m tests.numerics --report`. Do not edit. -->
# The fault benchmark: what was run

What the rows mean, and where the limits come from, is described in [numerics.md](numerics.md).

    {command}
"""


@dataclass(frozen=True)
class FaultRow:
    """One fault. detected: of its runs, in time. step: of the latest detection, None for none."""

    number: int
    name: str
    finding: str
    detected: int
    runs: int
    step: int | None
    limit: int


@dataclass(frozen=True)
class HealthyRow:
    """One configuration. seconds: CPU time of all its runs."""

    name: str
    runs: int
    alarms: int
    seconds: float


def page(command: str, faults: Sequence[FaultRow], healthy: Sequence[HealthyRow]) -> str:
    """The whole document."""
    lines = [HEAD.format(command=command), "## Faults", ""]
    lines += [
        "| fault | | finding | found | in step, at the latest | limit |",
        "|---|---|---|---|---|---|",
    ]
    for f in faults:
        share = f"{f.detected}/{f.runs}"
        found = share if f.detected == f.runs else f"**{share}**"
        lines.append(
            f"| {f.number} | {f.name} | {f.finding} | {found} | {f.step or 'never'} | {f.limit} |"
        )
    runs, alarms = sum(h.runs for h in healthy), sum(h.alarms for h in healthy)
    seconds = sum(h.seconds for h in healthy)
    lines += [
        "",
        "## Healthy runs",
        "",
        f"{runs} runs of {len(healthy)} configurations, {alarms} with an alarm, in {seconds:.0f} s "
        f"of CPU time.{_bound(runs, alarms)}",
        "",
        "| configuration | runs | false alarms | s a run |",
        "|---|---|---|---|",
    ]
    for h in healthy:
        lines.append(f"| {h.name} | {h.runs} | {h.alarms} | {h.seconds / max(1, h.runs):.1f} |")
    return "\n".join(lines) + "\n"


def _bound(runs: int, alarms: int) -> str:
    """Upper bound of the rate at 95 % where there was none: 1 - 0.05^(1/n)."""
    if alarms or not runs:
        return ""
    return f" None in {runs} bounds the rate below {1 - 0.05 ** (1 / runs):.2%} a run (95 %)."
