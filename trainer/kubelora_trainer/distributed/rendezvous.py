"""How ranks find each other: they meet at a store that node 0's launcher keeps.

Waiting is done here in Python, in short rounds, so that a stop is heard while others are still on
their way (a pod that waits for a GPU, an image that is pulled).
"""

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time

from kubelora_trainer.distributed.missing_ranks import RankMonitor
from kubelora_trainer.distributed.process_group import DistributedGroup
from kubelora_trainer.distributed.topology import LOOPBACK, NodeTopology, RankInfo
from kubelora_trainer.utils.errors import ConfigurationError, InterruptedRunError, PeerLostError
from kubelora_trainer.utils.text import ranks_named

BLOCKING: Final = "TORCH_NCCL_BLOCKING_WAIT"
"""Lets NCCL raise when it waited in vain. Its own way is to abort the process, which would then
look like the cause; the host waits for the device right after the all-reduce anyway."""
RENDEZVOUS_SECONDS: Final = 900.0
"""How long the first rank waits for the last: scheduling and image pulls differ by minutes."""
SILENCE: Final = timedelta(minutes=30)
"""How long ranks wait for one that is alive but busy (sample images, a slow disk). One that died
is noticed at once, by its closed connections and by its launcher."""
_ROUND_SECONDS: Final = 0.2


def listen_for_ranks(layout: NodeTopology) -> socket.socket:
    """Where the ranks are to meet: they may knock from now on. On a single node for it alone.

    Raises ConfigurationError where the port is taken.
    """
    try:
        return _listener(layout)
    except OSError as error:
        raise ConfigurationError(
            f"port {layout.port}, where the ranks are to meet, can't be opened ({error.strerror}); "
            "set MASTER_PORT to a free one on every node"
        ) from error


def build_store(listener: socket.socket) -> TCPStore:
    """The meeting place, kept by node 0's launcher, behind a door that it takes over.

    Its thread looks up names. A process forked meanwhile would find the C library's lock on that
    taken for ever, so ranks are started before.
    """
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _listener(layout: NodeTopology) -> socket.socket:
    if layout.nodes == 1:
        return socket.create_server((LOOPBACK, layout.port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", layout.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", layout.port), backlog=1024)


def init_process_group_of(
    rank_info: RankInfo,
    device: torch.device,
    stop: Callable[[], bool],
    silence: timedelta = SILENCE,
) -> DistributedGroup:
    """Meet all other ranks and form one process group with them.

    device: where this rank trains; gradients travel by NCCL between GPUs, by gloo else. silence:
    how long one rank waits for another in a collective.
    Raises InterruptedRunError on ``stop``, PeerLostError where not all ranks come.
    """
    os.environ.setdefault(BLOCKING, "1")
    if rank_info.address == LOOPBACK and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    nobody = f"nobody answers at {rank_info.address}:{rank_info.port}"
    _wait(lambda: _answers(rank_info), stop, deadline, lambda: nobody)
    try:
        store = TCPStore(rank_info.address, rank_info.port, is_master=False, wait_for_workers=False)
        store.set(_joined(rank_info.rank), "")
        _wait(
            lambda: not _late(store, rank_info.size),
            stop,
            deadline,
            lambda: (
                f"{ranks_named(_late(store, rank_info.size), '')} of {rank_info.size} did not come"
            ),
        )
    except RuntimeError as error:
        raise PeerLostError(
            "the meeting place of the ranks went away before training began; the cause is in the "
            "words of the first node's ranks"
        ) from error
    roll_call = RankMonitor(store, rank_info.rank, rank_info.size, silence)
    with roll_call.around():
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("ranks", store),
            rank=rank_info.rank,
            world_size=rank_info.size,
            timeout=silence,
        )
    return DistributedGroup(rank_info.rank, rank_info.size, roll_call)


def _late(store: TCPStore, size: int) -> list[int]:
    """Ranks that have not come to the meeting place."""
    keys = {rank: _joined(rank) for rank in range(size)}
    if store.check(list(keys.values())):
        return []
    return [rank for rank, key in keys.items() if not store.check([key])]


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _answers(rank_info: RankInfo) -> bool:
    try:
        with socket.create_connection((rank_info.address, rank_info.port), timeout=2):
            return True
    except OSError:
        return False


def _wait(
    reached: Callable[[], bool],
    stop: Callable[[], bool],
    deadline: float,
    otherwise: Callable[[], str],
) -> None:
    while not reached():
        if stop():
            raise InterruptedRunError("stopped while the ranks gathered; nothing was trained yet")
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"{otherwise()} within {RENDEZVOUS_SECONDS:.0f} s; look at the other ranks' words, "
                "or whether their pods have started"
            )
        time.sleep(_ROUND_SECONDS)
