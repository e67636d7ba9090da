"""The figures as lines. Pure."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Final

from benchmarks.operator_scale.measure import Result
from benchmarks.operator_scale.poll import PollResult

PEER: Final = (
    "training-operator v1 (tuned, n=1000, two cores, published with the targets and not run here): "
    "children_s=74 p99_s=10.0 last_child_s=13.6 requests=5 rss_mib=98 cpu_s=4.4 complete_s=68"
)


def lines_of(result: Result) -> Iterator[str]:
    """Yield what was measured of one N, each line on its own subject."""
    n, jobs = f"n={result.jobs}", result.jobs
    yield f"{n} machine: cores={os.cpu_count()} load_before={result.load:.1f}"
    yield (
        f"{n} floor: last_child_s={result.floor_last_child:.2f} "
        f"children_s={jobs / result.floor_last_child:.0f} complete_s={result.floor_complete:.1f}"
    )
    yield (
        f"{n} {result.subject}: last_child_s={result.last_child:.2f} "
        f"children_s={jobs / result.last_child:.1f} p50_s={result.p50:.2f} "
        f"p99_s={result.p99:.2f} complete_s={result.complete:.1f} cpu_s={result.cpu:.1f} "
        f"rss_mib={result.peak_mib:.0f}"
    )
    yield f"{n} requests per job until Running: {_each(result.until_running, jobs)}"
    yield f"{n} requests per job over its life: {_each(result.life, jobs)}"
    yield (
        f"{n} settled, for {result.settled_seconds:.0f} s: requests a second "
        f"{_each(result.settled_requests, result.settled_seconds)}; for each event "
        f"{_each(result.event_requests, result.events or 1)}"
    )
    yield (
        f"{n} restart: child_s={result.restart:.2f} rss_mib={result.restarted_mib:.0f} "
        f"writes about unchanged jobs {_each(result.restart_writes, 1)}"
    )
    agents = ", ".join(f"{name!r} {count}" for name, count in result.user_agents.most_common())
    yield f"{n} user agents: {agents}"


def closing_line(result: Result) -> str:
    """Return the last line for one N."""
    return (
        f"bench-{result.subject}: n={result.jobs} last_child_s={result.last_child:.2f} "
        f"p99_s={result.p99:.2f} requests={result.life.total() / result.jobs:.2f} "
        f"rss_mib={result.peak_mib:.0f} complete_ratio={result.complete_ratio:.2f} "
        f"restart_s={result.restart:.2f}"
    )


def poll_lines(result: PollResult) -> Iterator[str]:
    """Yield what running jobs cost."""
    yield f"running={result.jobs} requests a second {_each(result.requests, result.seconds)}"
    yield (
        f"bench-operator: running={result.jobs} requests_s={result.requests_per_second:.1f} "
        f"cores={result.cores:.2f} reports_s={result.reports / result.seconds:.1f} "
        f"rss_mib={result.peak_mib:.0f}"
    )


def objects_line(objects: int, result: Result) -> str:
    """Return the last line for a number of objects of all kinds."""
    return (
        f"bench-operator: objects={objects} rss_mib={result.restarted_mib:.0f} "
        f"peak_rss_mib={result.peak_mib:.0f} restart_s={result.restart:.2f}"
    )


def _each(counts: Counter[str], divisor: float) -> str:
    """Return the sum over ``divisor``, and its parts in brackets."""
    parts = ", ".join(f"{name} {count / divisor:.2f}" for name, count in counts.most_common())
    return f"{counts.total() / divisor:.2f}" + (f" ({parts})" if parts else "")
