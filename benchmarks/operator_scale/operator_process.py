"""The real operator as a process, and what the kernel reports about it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.operator_scale.control_plane import ControlPlane, free_ports
from benchmarks.operator_scale.subject import Subject
from benchmarks.start_up import cpu_seconds
from tests.cluster.harness import processes

_NAME: Final = "operator"
_GRACE: Final = 30.0
"""Seconds for an orderly end: the watches are closed and the Lease is released."""


class OperatorProcess:
    """A running operator.

    started: Monotonic time of its start.
    """

    def __init__(self, plane: ControlPlane, subject: Subject) -> None:
        self._places = plane.places
        self.started = time.monotonic()
        ports = zip(subject.port_flags, free_ports(len(subject.port_flags)), strict=True)
        self._pid = processes.spawn(
            plane.places,
            _NAME,
            (*subject.command, *(f"{flag}{port}" for flag, port in ports)),
            {
                "KUBECONFIG": str(plane.operator_kubeconfig),
                # Our modules are those of this process, wherever they were found.
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )

    @property
    def log(self) -> Path:
        """Its log, and that of those before it."""
        return self._places.logs / f"{_NAME}.log"

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return processes.start_time(self._pid) is not None

    def cpu_seconds(self) -> float:
        """Return its user and system time so far."""
        return cpu_seconds(self._pid)

    def peak_mib(self) -> float:
        """Return the most memory that was resident so far."""
        return self._memory("VmHWM")

    def resident_mib(self) -> float:
        """Return the memory that is resident now."""
        return self._memory("VmRSS")

    def stop(self) -> None:
        """Stop it as the kubelet does."""
        processes.stop(self._places, _NAME, _GRACE)

    def _memory(self, field: str) -> float:
        for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
        raise ProcessLookupError(f"the operator has ended; its log is {self.log}")


@contextmanager
def running_operator(plane: ControlPlane, subject: Subject) -> Iterator[OperatorProcess]:
    """Run the operator during the block."""
    operator = OperatorProcess(plane, subject)
    try:
        yield operator
    finally:
        operator.stop()
