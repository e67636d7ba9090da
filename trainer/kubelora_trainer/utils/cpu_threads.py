"""How many CPU threads torch may use.

torch takes every core of the node, whatever the pod's limit; threads that wait for a share of one
core make a step many times slower. Small models gain nothing from threads at all.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SMALL_MODEL_PARAMETERS = 100_000_000
"""Below this a kernel is too short to be worth waking a second thread."""


def thread_count(
    parameters: int,
    environment: Mapping[str, str],
    cores: int,
    quota: float | None,
) -> int | None:
    """Threads to use; None leaves the choice to OMP_NUM_THREADS.

    cores: cores this process may run on. quota: CPUs of the control group's limit, if it has one.
    """
    if environment.get("OMP_NUM_THREADS"):
        return None
    if parameters < SMALL_MODEL_PARAMETERS:
        return 1
    return cores if quota is None else max(1, min(cores, int(quota)))


def usable_cores() -> int:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs that the control group grants (version 2, then 1); None without a limit."""
    unified = _numbers(root / "cpu.max")
    if unified is not None:
        return unified[0] / unified[1] if len(unified) == 2 else None
    for folder in (root / "cpu", root / "cpu,cpuacct"):
        quota = _numbers(folder / "cpu.cfs_quota_us")
        period = _numbers(folder / "cpu.cfs_period_us")
        if quota and period and quota[0] > 0:
            return quota[0] / period[0]
    return None


def _numbers(path: Path) -> list[float] | None:
    """Numbers in a one-line file, ``max`` left out; None where there is no such file."""
    try:
        return [float(word) for word in path.read_text().split() if word != "max"]
    except OSError:
        return None
