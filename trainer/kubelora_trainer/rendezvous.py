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

from kubelora_trainer.errors import ConfigurationError, Interrupted, PeerLost
from kubelora_trainer.gang import ProcessGang
from kubelora_trainer.seats import LOOPBACK, Layout, Seat

GATHERING_SECONDS: Final = 900.0
"""How long the first rank waits for the last: scheduling and image pulls differ by minutes."""
SILENCE: Final = timedelta(minutes=30)
"""How long ranks wait for one that is alive but busy (sample images, a slow disk). One that died
is noticed at once, by its closed connections and by its launcher."""
_ROUND_SECONDS: Final = 0.2


def open_store(layout: Layout) -> TCPStore:
    """The meeting place, kept by node 0's launcher; on a single node for this machine alone.

    Raises ConfigurationError where its port is taken.
    """
    try:
        listener = _listener(layout)
    except OSError as error:
        raise ConfigurationError(
            f"port {layout.port}, where the ranks are to meet, can't be opened ({error.strerror}); "
            "set MASTER_PORT to a free one on every node"
        ) from error
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _listener(layout: Layout) -> socket.socket:
    if layout.nodes == 1:
        return socket.create_server((LOOPBACK, layout.port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", layout.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
        )
    return socket.create_server(("", layout.port), backlog=1024)


def join_gang(seat: Seat, device: torch.device, stop: Callable[[], bool]) -> ProcessGang:
    """Meet all other ranks and become one gang.

    device: where this rank trains; gradients travel by NCCL between GPUs, by gloo else.
    Raises Interrupted on ``stop``, PeerLost where not all ranks come.
    """
    if seat.address == LOOPBACK and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    deadline = time.monotonic() + GATHERING_SECONDS
    _wait(lambda: _answers(seat), stop, deadline, f"nobody answers at {seat.address}:{seat.port}")
    try:
        store = TCPStore(seat.address, seat.port, is_master=False, wait_for_workers=False)
        store.add("joined", 1)
        _wait(
            lambda: store.add("joined", 0) >= seat.size,
            stop,
            deadline,
            f"not all of the {seat.size} ranks came",
        )
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("gang", store),
            rank=seat.rank,
            world_size=seat.size,
            timeout=SILENCE,
        )
    except RuntimeError as error:
        raise PeerLost(
            "another rank of this run went away before training began; the cause is in that "
            "rank's words"
        ) from error
    return ProcessGang(seat.rank, seat.size)


def leave_gang() -> None:
    """Close the connections to the other ranks."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _answers(seat: Seat) -> bool:
    try:
        with socket.create_connection((seat.address, seat.port), timeout=2):
            return True
    except OSError:
        return False


def _wait(
    reached: Callable[[], bool], stop: Callable[[], bool], deadline: float, otherwise: str
) -> None:
    while not reached():
        if stop():
            raise Interrupted("stopped while the ranks gathered; nothing was trained yet")
        if time.monotonic() > deadline:
            raise PeerLost(
                f"{otherwise} within {GATHERING_SECONDS:.0f} s; look at the other ranks' words, "
                "or whether their pods have started"
            )
        time.sleep(_ROUND_SECONDS)
