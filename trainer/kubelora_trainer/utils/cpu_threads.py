"""Number of CPU threads for torch.

torch uses every core of the node regardless of the pod's limit. Threads that compete for a fraction
of a core make a step many times slower, and small models gain nothing from threads at all.
"""

import os
from collections.abc import Mapping
from pathlib import Path

SMALL_MODEL_PARAMETERS = 100_000_000
"""In smaller models, kernels are too short to be worth waking a second thread."""


def thread_count(
    parameters: int,
    environment: Mapping[str, str],
    cores: int,
    quota: float | None,
) -> int | None:
    """Choose the number of threads.

    Args:
        parameters: Number of parameters of the model.
        environment: Environment variables.
        cores: Cores this process may run on.
        quota: CPU limit of the control group, if any.

    Returns:
        The number of threads, or None to respect OMP_NUM_THREADS.
    """
    if environment.get("OMP_NUM_THREADS"):
        return None
    if parameters < SMALL_MODEL_PARAMETERS:
        return 1
    return cores if quota is None else max(1, min(cores, int(quota)))


def usable_cores() -> int:
    """Count the cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no sched_getaffinity
        return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Read the CPU limit of the control group (version 2, then 1); None without a limit."""
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
    """Parse the numbers of a one-line file, without ``max``; None if the file does not exist."""
    try:
        return [float(word) for word in path.read_text().split() if word != "max"]
    except OSError:
        return None
