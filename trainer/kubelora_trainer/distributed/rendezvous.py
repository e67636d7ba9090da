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
from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch.distributed has them untyped

from kubelora_trainer.distributed.missing_ranks import RollCall
from kubelora_trainer.distributed.process_group import ProcessGang
from kubelora_trainer.distributed.topology import LOOPBACK, Layout, Seat
from kubelora_trainer.utils.errors import ConfigurationError, Interrupted, PeerLost
from kubelora_trainer.utils.text import ranks_named

BLOCKING: Final = "TORCH_NCCL_BLOCKING_WAIT"
"""Lets NCCL raise when it waited in vain. Its own way is to abort the process, which would then
look like the cause; the host waits for the device right after the all-reduce anyway."""
GATHERING_SECONDS: Final = 900.0
"""How long the first rank waits for the last: scheduling and image pulls differ by minutes."""
SILENCE: Final = timedelta(minutes=30)
"""How long ranks wait for one that is alive but busy (sample images, a slow disk). One that died
is noticed at once, by its closed connections and by its launcher."""
_ROUND_SECONDS: Final = 0.2


def open_door(layout: Layout) -> socket.socket:
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


def open_store(door: socket.socket) -> TCPStore:
    """The meeting place, kept by node 0's launcher, behind a door that it takes over.

    Its thread looks up names. A process forked meanwhile would find the C library's lock on that
    taken for ever, so ranks are started before.
    """
    port = door.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=door.detach()
    )


def _listener(layout: Layout) -> socket.socket:
    if layout.nodes == 1:
        return socket.create_server((LOOPBACK, layout.port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", layout.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", layout.port), backlog=1024)


def join_gang(
    seat: Seat, device: torch.device, stop: Callable[[], bool], silence: timedelta = SILENCE
) -> ProcessGang:
    """Meet all other ranks and become one gang.

    device: where this rank trains; gradients travel by NCCL between GPUs, by gloo else. silence:
    how long one rank waits for another in a collective.
    Raises Interrupted on ``stop``, PeerLost where not all ranks come.
    """
    os.environ.setdefault(BLOCKING, "1")
    if seat.address == LOOPBACK and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline = time.monotonic() + GATHERING_SECONDS
    nobody = f"nobody answers at {seat.address}:{seat.port}"
    _wait(lambda: _answers(seat), stop, deadline, lambda: nobody)
    try:
        store = TCPStore(seat.address, seat.port, is_master=False, wait_for_workers=False)
        store.set(_joined(seat.rank), "")
        _wait(
            lambda: not _late(store, seat.size),
            stop,
            deadline,
            lambda: f"{ranks_named(_late(store, seat.size), '')} of {seat.size} did not come",
        )
    except RuntimeError as error:
        raise PeerLost(
            "the meeting place of the ranks went away before training began; the cause is in the "
            "words of the first node's ranks"
        ) from error
    roll_call = RollCall(store, seat.rank, seat.size, silence)
    with roll_call.around():
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("gang", store),
            rank=seat.rank,
            world_size=seat.size,
            timeout=silence,
        )
    return ProcessGang(seat.rank, seat.size, roll_call)


def leave_gang() -> None:
    """Close the connections to the other ranks."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _late(store: TCPStore, size: int) -> list[int]:
    """Ranks that have not come to the meeting place."""
    keys = {rank: _joined(rank) for rank in range(size)}
    if store.check(list(keys.values())):
        return []
    return [rank for rank, key in keys.items() if not store.check([key])]


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _answers(seat: Seat) -> bool:
    try:
        with socket.create_connection((seat.address, seat.port), timeout=2):
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
            raise Interrupted("stopped while the ranks gathered; nothing was trained yet")
        if time.monotonic() > deadline:
            raise PeerLost(
                f"{otherwise()} within {GATHERING_SECONDS:.0f} s; look at the other ranks' words, "
                "or whether their pods have started"
            )
        time.sleep(_ROUND_SECONDS)
