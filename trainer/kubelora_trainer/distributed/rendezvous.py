"""Rendezvous of the ranks at a TCPStore that node 0's launcher keeps.

Waiting happens in Python, in short rounds, so that a stop request takes effect while other ranks
are still starting (a pod that waits for a GPU, an image that is being pulled).
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
"""Makes NCCL raise on a timeout. By default it aborts the process, which would then look like the
cause. Blocking costs nothing: the host waits for the device right after the all-reduce anyway."""
RENDEZVOUS_SECONDS: Final = 900.0
"""How long the first rank waits for the last; scheduling and image pulls differ by minutes."""
SILENCE: Final = timedelta(minutes=30)
"""How long ranks wait for one that is alive but busy (sample images, a slow disk). A dead rank is
noticed at once, by its closed connections and by its launcher."""
_ROUND_SECONDS: Final = 0.2
"""How late a stop may be noticed while ranks connect."""


def listen_for_ranks(layout: NodeTopology) -> socket.socket:
    """Open the rendezvous port, so that ranks can connect; with one node, only on loopback.

    Raises ConfigurationError if the port is taken.
    """
    try:
        return _listener(layout)
    except OSError as error:
        raise ConfigurationError(
            f"the rendezvous port {layout.port} cannot be opened ({error.strerror}); "
            "set MASTER_PORT to a free port on every node"
        ) from error


def build_store(listener: socket.socket) -> TCPStore:
    """Start the rendezvous store in node 0's launcher, on an open listener.

    The store's thread resolves host names. A process forked at that moment would inherit the C
    library's resolver lock in the locked state, so ranks must be started before.
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
    """Wait for all ranks and form the process group with them.

    Args:
        rank_info: This rank.
        device: Device of this rank; gradients use NCCL between GPUs and gloo otherwise.
        stop: Polled while waiting.
        silence: Timeout of a collective.

    Raises:
        InterruptedRunError: ``stop`` returned True.
        PeerLostError: Not all ranks came.
    """
    os.environ.setdefault(BLOCKING, "1")
    # gloo picks the host name's interface, which may not reach loopback.
    if rank_info.address == LOOPBACK and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    unreachable = f"the rendezvous at {rank_info.address}:{rank_info.port} did not answer"
    _wait(lambda: _answers(rank_info), stop, deadline, lambda: unreachable)
    try:
        store = TCPStore(rank_info.address, rank_info.port, is_master=False, wait_for_workers=False)
        store.set(_joined(rank_info.rank), "")
        _wait(
            lambda: not _late(store, rank_info.size),
            stop,
            deadline,
            lambda: (
                f"{ranks_named(_late(store, rank_info.size), '')} of {rank_info.size} did not join"
            ),
        )
    except RuntimeError as error:
        raise PeerLostError(
            "the rendezvous went away before training began; the cause is in the logs of the first "
            "node"
        ) from error
    monitor = RankMonitor(store, rank_info.rank, rank_info.size, silence)
    with monitor.watching():
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("ranks", store),
            rank=rank_info.rank,
            world_size=rank_info.size,
            timeout=silence,
        )
    return DistributedGroup(rank_info.rank, rank_info.size, monitor)


def _late(store: TCPStore, size: int) -> list[int]:
    """Return the ranks that have not joined yet."""
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
            raise InterruptedRunError("stopped during rendezvous; nothing was trained yet")
        if time.monotonic() > deadline:
            raise PeerLostError(
                f"{otherwise()} within {RENDEZVOUS_SECONDS:.0f} s; check the other ranks' logs, "
                "and that their pods have started"
            )
        time.sleep(_ROUND_SECONDS)
