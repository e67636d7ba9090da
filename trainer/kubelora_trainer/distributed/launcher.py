"""Starts this node's ranks by torch's process launcher, and ends with the code that tells most.

torchrun ends with 1 whatever its workers ended with, and kills them 30 s after the first one has
gone; here exit codes are a contract, and a rank that writes a checkpoint is given its time. So the
processes are torch's, and watching over them is done here (decision 0009).
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Final, Literal

from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, start_processes

from kubelora_api.names import ExitCode
from kubelora_trainer.distributed.rendezvous import build_store, listen_for_ranks
from kubelora_trainer.distributed.topology import NodeTopology, RankInfo, rank_info_of
from kubelora_trainer.utils.errors import RunEndedError
from kubelora_trainer.utils.signals import RankStopRequest

PEER_GRACE_SECONDS: Final = 15.0
"""Time that ranks have to notice by themselves that another one has failed, and to say so."""
_ROUND_SECONDS: Final = 0.2
_ORDERLY: Final = (ExitCode.DONE, ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended, in the order of ending.

    code: as a process tells it, negative for a signal. by_us: the launcher killed it, because
    another had failed.
    """

    rank: int
    code: int
    by_us: bool = False


Work = Callable[[RankInfo, RankStopRequest], None]
"""What a rank does. It returns when done and raises RunEndedError else."""


def launch(
    work: Work,
    layout: NodeTopology,
    stop: Callable[[], bool],
    *,
    start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
    grace: float = PEER_GRACE_SECONDS,
) -> tuple[RankEnd, ...]:
    """Run ``work`` in every rank of this node; returns how each ended, the first first.

    stop: when true, every rank is told to stop. grace: seconds from a failure, or from rank 0's
    end, to the end of all.
    start_method: fork shares what is imported, and can't be used once CUDA is in use.
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
    del store  # ranks need it until they end
    first = layout.node * layout.ranks_per_node
    return tuple(RankEnd(first + local_rank, code, by_us) for local_rank, code, by_us in ends)


def _watch(
    context: ProcessContext, stop: Callable[[], bool], grace: float, leads: bool
) -> list[tuple[int, int, bool]]:
    """Wait for every process; pass a stop on, and end all when one has failed or rank 0 is done.

    leads: whether the first process is rank 0, which is the last that has anything to do.
    """
    running: dict[int, int] = dict(context.sentinels)
    ends: list[tuple[int, int, bool]] = []
    killed: set[int] = set()
    told, deadline = False, None
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
        if not told and (stop() or interrupted):
            told = True
            for local_rank in running.values():
                context.processes[local_rank].terminate()
        if deadline is not None and time.monotonic() > deadline:
            for local_rank in running.values():
                killed.add(local_rank)
                context.processes[local_rank].kill()
    return [
        (n, ExitCode.INTERRUPTED if told and code == -signal.SIGTERM else code, by_us)
        for n, code, by_us in ends  # SIGTERM ends a rank that had not begun to listen for it
    ]


def deciding(ends: Sequence[RankEnd]) -> RankEnd:
    """The rank whose end is the run's: rank 0's own, else the first real cause.

    A lost peer, and a rank that the launcher killed, are never the cause where there is another.
    """

    def is_cause(end: RankEnd) -> bool:
        return end.code != ExitCode.PEER_LOST and not end.by_us

    for end in ends:
        if end.rank == 0 and is_cause(end):
            return end
    causes = [end for end in ends if is_cause(end) and end.code != ExitCode.DONE]
    lost = [end for end in ends if not end.by_us and end.code != ExitCode.DONE]
    return (causes or lost or list(ends))[0]


def exit_code_of(end: RankEnd) -> int:
    """The code as a shell tells it: 128 and the signal's number for a signal."""
    return end.code if end.code >= 0 else 128 - end.code


def sentence_of(end: RankEnd, size: int) -> str:
    """What is said of the deciding rank at the end of a run that failed."""
    who = f"rank {end.rank} of {size}"
    if end.code >= 0:
        return f"{who} ended with exit code {end.code}, and the others with it"
    try:
        name = signal.Signals(-end.code).name
    except ValueError:
        name = f"signal {-end.code}"
    hint = "; SIGKILL often means that memory ran out" if -end.code == signal.SIGKILL else ""
    return f"{who} was killed by {name}, and the others were ended with it{hint}"


def _rank(local_rank: int, work: Work, layout: NodeTopology, port: int) -> None:
    """A rank's process, from its first breath to its exit code."""
    # It would not hear a gentler signal while it waits for another rank in a collective.
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    stop = RankStopRequest()
    stop.install()
    rank_info = rank_info_of(layout, local_rank, port)
    try:
        work(rank_info, stop)
        code = ExitCode.DONE
    except RunEndedError as ended:
        code = ended.exit_code
        enough = ended.alike or ended.told_by_another or code == ExitCode.INTERRUPTED
        if rank_info.local_rank == 0 or not enough:
            print(f"rank {rank_info.rank}: error: {ended}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
        code = ExitCode.INTERNAL
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: a process group whose peers are gone may wait for them when it is torn down.
    os._exit(code)
