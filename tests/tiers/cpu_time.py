"""Runs a command and writes down the processor time of everything that it started.

A process is charged to its parent when the parent waits for it. Daemons have lost theirs: a
kubelet, containerd, the pods below it. Here they are adopted (Linux: `PR_SET_CHILD_SUBREAPER`) and
waited for, so that the time of all that has ended by then is counted. Each command needs a process
of its own for that, because the times of a process's children are one sum.

Not counted: what a daemon that was there before did for the command, and what outlives it.

Run as ``python -m tests.tiers.cpu_time FILE COMMAND...``: the exit code is the command's, and FILE
receives the seconds, those of the user and those of the kernel together.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


def main(file: str, command: Sequence[str]) -> int:
    """Run the command to its end, waiting for each process that ends meanwhile."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command)
    # A terminal's Ctrl-C reaches the command too, which ends as it likes.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = _wait_for_all(process.pid)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    Path(file).write_text(f"{used.ru_utime + used.ru_stime:.2f}\n")
    return code


def _wait_for_all(pid: int) -> int:
    """Wait for the process ``pid`` and for all that ended before it; the exit code of ``pid``."""
    ended, status = 0, 0
    while ended != pid:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
