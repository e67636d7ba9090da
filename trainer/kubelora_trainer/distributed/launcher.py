"""Launcher of this node's ranks, which ends with the exit code of the deciding rank.

torchrun always exits with 1 on failure and kills its workers 30 s after the first one has failed.
Here exit codes are an interface, and a rank that is writing a checkpoint gets time to finish. So
torch starts the processes, and this module supervises them (decision 0009).
"""

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Final, Literal

from torch.multiprocessing.spawn import ProcessContext, start_processes

from kubelora_api.names import ExitCode
from kubelora_trainer.distributed.rendezvous import build_store, listen_for_ranks
from kubelora_trainer.distributed.topology import NodeTopology, RankInfo, rank_info_of
from kubelora_trainer.utils.errors import RunEndedError
from kubelora_trainer.utils.signals import RankStopRequest

logger = logging.getLogger(__name__)

PEER_GRACE_SECONDS: Final = 15.0
"""Time for ranks to notice by themselves that another one has failed, and to report it."""
_ROUND_SECONDS: Final = 0.2
"""How late a stop or a deadline may be noticed; the end of a rank wakes the wait at once."""
_PR_SET_PDEATHSIG: Final = 1
"""From prctl(2)."""
_ORDERLY: Final = (ExitCode.DONE, ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class RankExit:
    """The end of a rank.

    Attributes:
        rank: Number of the rank in the run.
        code: The process's exit code; negative for a signal.
        by_launcher: True if the launcher killed it because another rank had failed.
    """

    rank: int
    code: int
    by_launcher: bool = False


RankFunction = Callable[[RankInfo, RankStopRequest], None]
"""Function that each rank runs. It returns when done and raises RunEndedError otherwise."""


def launch(
    work: RankFunction,
    layout: NodeTopology,
    stop: Callable[[], bool],
    *,
    start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
    grace: float = PEER_GRACE_SECONDS,
) -> tuple[RankExit, ...]:
    """Run ``work`` in every rank of this node.

    Args:
        work: Function of each rank.
        layout: Ranks of the run and of this node.
        stop: Polled; when it returns True, every rank is asked to stop.
        start_method: "fork" shares what is already imported, but cannot be used once CUDA is in
            use.
        grace: Seconds from a failure, or from the end of rank 0, until the remaining ranks are
            killed.

    Returns:
        How each rank ended, in the order of ending.
    """
    listener = listen_for_ranks(layout) if layout.node == 0 else None
    port = listener.getsockname()[1] if listener is not None else layout.port
    context = start_processes(
        _rank,
        (work, layout, port),
        nprocs=layout.ranks_per_node,
        join=False,
        start_method=start_method,
    )
    store = build_store(listener) if listener is not None else None
    ends = _watch(context, stop, grace, layout.node == 0)
    del store  # keep the store alive until here: ranks need it until they end
    first = layout.node * layout.ranks_per_node
    return tuple(
        RankExit(first + local_rank, code, by_launcher) for local_rank, code, by_launcher in ends
    )


def _watch(
    context: ProcessContext, stop: Callable[[], bool], grace: float, leads: bool
) -> list[tuple[int, int, bool]]:
    """Wait for every process, forward a stop, and kill the rest after a failure or rank 0's end.

    leads: True if the first process is rank 0, which is the last one with anything to do.
    """
    running: dict[int, int] = dict(context.sentinels)
    ends: list[tuple[int, int, bool]] = []
    killed: set[int] = set()
    stopping, deadline = False, None
    while running:
        for sentinel in wait(list(running), timeout=_ROUND_SECONDS):
            local_rank = running.pop(sentinel)  # type: ignore[arg-type]
            process = context.processes[local_rank]
            process.join()
            code = process.exitcode
            ends.append((local_rank, code, local_rank in killed))
            over = code not in _ORDERLY or (leads and local_rank == 0)
            if over and deadline is None:
                deadline = time.monotonic() + grace
        interrupted = any(code == ExitCode.INTERRUPTED for _, code, _ in ends)
        if not stopping and (stop() or interrupted):
            stopping = True
            for local_rank in running.values():
                context.processes[local_rank].terminate()
        if deadline is not None and time.monotonic() > deadline:
            for local_rank in running.values():
                killed.add(local_rank)
                context.processes[local_rank].kill()
    return [
        # SIGTERM kills a rank that has not installed its handler yet: that is an interruption.
        (n, ExitCode.INTERRUPTED if stopping and code == -signal.SIGTERM else code, by_launcher)
        for n, code, by_launcher in ends
    ]


def deciding_exit(ends: Sequence[RankExit]) -> RankExit:
    """Return the exit that decides the run's: rank 0's if it is a cause, else the first cause.

    A lost peer and a rank killed by the launcher are causes only if there is no other.
    """

    def is_cause(end: RankExit) -> bool:
        return end.code != ExitCode.PEER_LOST and not end.by_launcher

    for end in ends:
        if end.rank == 0 and is_cause(end):
            return end
    causes = [end for end in ends if is_cause(end) and end.code != ExitCode.DONE]
    lost = [end for end in ends if not end.by_launcher and end.code != ExitCode.DONE]
    return (causes or lost or list(ends))[0]


def exit_code_of(end: RankExit) -> int:
    """Convert to a shell's exit code: 128 plus the signal's number for a signal."""
    return end.code if end.code >= 0 else 128 - end.code


def failure_sentence(end: RankExit, size: int) -> str:
    """Describe the deciding rank of a failed run."""
    who = f"rank {end.rank} of {size}"
    if end.code >= 0:
        return f"{who} ended with exit code {end.code}, which ended the other ranks"
    try:
        name = signal.Signals(-end.code).name
    except ValueError:
        name = f"signal {-end.code}"
    hint = "; SIGKILL often means that memory ran out" if -end.code == signal.SIGKILL else ""
    return f"{who} was killed by {name}, which ended the other ranks{hint}"


def _die_with_launcher() -> None:
    """Have the kernel kill this process when the launcher ends.

    By SIGKILL, because Python handles no signal inside a collective.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _rank(local_rank: int, work: RankFunction, layout: NodeTopology, port: int) -> None:
    """Run one rank's process from start to exit code."""
    _die_with_launcher()
    stop = RankStopRequest()
    stop.install()
    rank_info = rank_info_of(layout, local_rank, port)
    try:
        work(rank_info, stop)
        code = ExitCode.DONE
    except RunEndedError as ended:
        code = ended.exit_code
        reported = (
            ended.same_on_all_ranks or ended.reported_elsewhere or code == ExitCode.INTERRUPTED
        )
        if rank_info.local_rank == 0 or not reported:
            logger.error("%s", ended)
    except Exception:
        logger.exception("unexpected error")
        code = ExitCode.INTERNAL
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip interpreter shutdown: destroying a process group may wait for peers that are gone.
    os._exit(code)
