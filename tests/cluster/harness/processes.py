"""Start, recognise and stop the cluster's own processes.

A process is remembered by its id *and* its start time: after a reboot or a crash the same id may be
a stranger's, and a stranger must never be signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .places import Places


def start_time(pid: int) -> int | None:
    """Clock ticks between boot and the process's start; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and brackets, so fields are counted after the last bracket.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def spawn(
    places: Places,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> int:
    """Start a component in a session of its own; its log and pid file are in the state folder."""
    places.logs.mkdir(parents=True, exist_ok=True)
    places.pids.mkdir(parents=True, exist_ok=True)
    with (places.logs / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=places.state,
            env={**os.environ, **(environment or {})},
        )
    (places.pids / name).write_text(f"{process.pid} {start_time(process.pid) or 0}\n")
    return process.pid


def running_pid(places: Places, name: str) -> int | None:
    """The component's process id if it is still the process that `spawn` started."""
    try:
        pid, started = (int(word) for word in (places.pids / name).read_text().split())
    except (OSError, ValueError):
        return None
    return pid if started and start_time(pid) == started else None


def remembered(places: Places) -> list[str]:
    """Names of all components that have a pid file, alive or not."""
    return sorted(p.name for p in places.pids.iterdir()) if places.pids.is_dir() else []


def stop(places: Places, name: str, grace: float = 10.0) -> None:
    """Terminate the component's process group, kill it after `grace` seconds, forget its pid."""
    pid = running_pid(places, name)
    if pid is not None:
        terminate_group(pid, grace)
    (places.pids / name).unlink(missing_ok=True)


def terminate_group(pid: int, grace: float) -> None:
    """SIGTERM, then SIGKILL, to the group that `spawn` made; returns when its leader is gone."""
    for signal_number, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal_number)
        if _gone_within(pid, patience):
            break


def kill_and_wait(pids: Sequence[int], patience: float = 5.0) -> None:
    """SIGKILL single processes (containers, shims) and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        _gone_within(pid, patience)


def _gone_within(pid: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while start_time(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    # Reap it when it is a child of this very process (a pytest session), or it stays a zombie.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    return True


def processes_mentioning(word: str) -> dict[int, str]:
    """Live processes whose command line contains `word`, with that command line."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                line = " ".join(words)
                if word in line and start_time(int(entry.name)) is not None:
                    found[int(entry.name)] = line.strip()
    return found
