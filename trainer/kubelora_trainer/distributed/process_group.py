"""The process group of a run: distribution of micro-steps, and one all-reduce per step.

Every rank keeps its own weights and optimizer and takes the same step with the same gradient, so
weights stay bit-identical without ever being sent. Whatever else ranks must know of each other
travels in the tail of the gradient buffer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed

from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.data.sampler import ALL_MICRO_STEPS, RankShare
from kubelora_trainer.distributed.missing_ranks import RankMonitor
from kubelora_trainer.distributed.reduce_payload import (
    ControlFlags,
    pack_payload,
    payload_elements,
    unpack_payloads,
)
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.utils.errors import RunEndedError

_T = TypeVar("_T")


@dataclass(frozen=True)
class ReducedWindow:
    """A window after the all-reduce, equal on all ranks.

    Attributes:
        position: Position with the samples and losses of all ranks.
        asked: Flags that any rank has set.
        divergence: Maximum minus minimum of the weights' checksum over ranks: 0 if bit-identical,
            NaN for a single rank.
        broken: Ranks whose own part of the gradient is not finite; empty for a single rank.
    """

    position: RunPosition
    asked: ControlFlags
    divergence: float
    broken: tuple[int, ...] = ()


class ProcessGroup(Protocol):
    """All ranks of a run, as seen by one of them."""

    @property
    def share(self) -> RankShare:
        """Which micro-steps this rank computes."""

    def tail_elements(self, sums: int) -> int:
        """Return the number of elements needed behind the gradient for ``sums`` further sums."""

    def between_micro_steps(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``stop`` if it may end a window halfway, else a function that never stops."""

    def adopt(
        self, position: RunPosition, buffers: AdapterBuffers, sums: Sequence[Tensor]
    ) -> RunPosition:
        """Return this rank's part of a resumed position, whose sums are those of all ranks.

        Args:
            position: The checkpoint's position.
            buffers: Flat buffers, whose gradient is the sum over all ranks.
            sums: Further sums over all ranks.
        """

    def exchange(
        self,
        buffers: AdapterBuffers,
        position: RunPosition,
        asked: ControlFlags,
        sums: Sequence[Tensor],
    ) -> ReducedWindow:
        """Sum the window over all ranks.

        Args:
            buffers: Flat buffers; the gradient is changed in place.
            position: This rank's position.
            asked: Flags that this rank sets.
            sums: fp64 sums over samples to add up too, changed in place.

        Raises:
            PeerLostError: A rank is gone.
            PeerTimeoutError: A rank does not respond.
        """

    def broadcast_object(self, value: _T) -> _T:
        """Return rank 0's ``value`` on every rank. Raises PeerLostError, PeerTimeoutError."""

    def all_gather_object(self, value: _T) -> Sequence[_T]:
        """Return every rank's ``value``, by rank. Raises PeerLostError, PeerTimeoutError."""


class SingleProcess:
    """A run of one rank."""

    share = ALL_MICRO_STEPS

    def tail_elements(self, sums: int) -> int:
        """Return 0: there is nothing to exchange."""
        return 0

    def between_micro_steps(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``stop``: a single rank can stop after any micro-step."""
        return stop

    def adopt(
        self, position: RunPosition, buffers: AdapterBuffers, sums: Sequence[Tensor]
    ) -> RunPosition:
        """Return the entire position. See `ProcessGroup` for the arguments.

        Args:
            position: The checkpoint's position.
            buffers: Unused.
            sums: Unused.
        """
        return position

    def exchange(
        self,
        buffers: AdapterBuffers,
        position: RunPosition,
        asked: ControlFlags,
        sums: Sequence[Tensor],
    ) -> ReducedWindow:
        """Return the window unchanged. See `ProcessGroup` for the arguments.

        Args:
            buffers: Unused.
            position: This rank's position.
            asked: Flags that this rank sets.
            sums: Unused.
        """
        return ReducedWindow(position, asked, math.nan)

    def broadcast_object(self, value: _T) -> _T:
        """Return the value."""
        return value

    def all_gather_object(self, value: _T) -> Sequence[_T]:
        """Return the value alone."""
        return (value,)


SINGLE_PROCESS: Final = SingleProcess()


class DistributedGroup:
    """Ranks in separate processes, over torch's default process group."""

    def __init__(self, rank: int, size: int, monitor: RankMonitor | None = None) -> None:
        """Join as ``rank`` of ``size``. Without ``monitor`` a lost rank is not named."""
        self.share = RankShare(rank, size)
        self._monitor = monitor or RankMonitor(None, rank, size, timedelta.max)

    def tail_elements(self, sums: int) -> int:
        """Return the size of one payload per rank."""
        return payload_elements(sums) * self.share.size

    def between_micro_steps(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Never stop: the ranks agree at the end of the window and stop there together."""
        return lambda: False

    def adopt(
        self, position: RunPosition, buffers: AdapterBuffers, sums: Sequence[Tensor]
    ) -> RunPosition:
        """Give the sums of an unfinished window to rank 0 and start the others at 0.

        Args:
            position: The checkpoint's position.
            buffers: Flat buffers, whose gradient is the sum over all ranks.
            sums: Further sums over all ranks.
        """
        if self.share.rank == 0:
            return position
        buffers.zero_gradient()
        for one in sums:
            one.zero_()
        return replace(
            position, window_samples=0, window_loss=torch.zeros_like(position.window_loss)
        )

    def exchange(
        self,
        buffers: AdapterBuffers,
        position: RunPosition,
        asked: ControlFlags,
        sums: Sequence[Tensor],
    ) -> ReducedWindow:
        """All-reduce the gradient together with every rank's payload in its tail.

        Args:
            buffers: Flat buffers; the gradient is changed in place.
            position: This rank's position.
            asked: Flags that this rank sets.
            sums: fp64 sums over samples to add up too, changed in place.
        """
        device = buffers.masters.device
        carried = [position.window_loss.to(device).reshape(1), *(one.flatten() for one in sums)]
        tail = buffers.reduced[buffers.numel :].view(self.share.size, -1)
        tail.zero_()
        tail[self.share.rank] = pack_payload(
            buffers.masters, buffers.gradient, position.window_samples, asked, carried
        )
        with self._monitor.watching():
            distributed.all_reduce(buffers.reduced)
        notes = unpack_payloads(tail)
        loss, *others = notes.sums.to(device).split([one.numel() for one in carried])
        for one, total in zip(sums, others, strict=True):
            one.copy_(total.view_as(one))
        return ReducedWindow(
            replace(position, window_samples=sum(notes.samples), window_loss=loss.reshape(())),
            ControlFlags(any(a.stop for a in notes.asked), any(a.due for a in notes.asked)),
            float(max(notes.checksums) - min(notes.checksums)),
            tuple(rank for rank, broken in enumerate(notes.broken) if broken),
        )

    def broadcast_object(self, value: _T) -> _T:
        """Broadcast any picklable value from rank 0."""
        box = [value]
        with self._monitor.watching():
            distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, value: _T) -> Sequence[_T]:
        """Gather any picklable value from all ranks."""
        found = [value] * self.share.size
        with self._monitor.watching():
            distributed.all_gather_object(found, value)
        return found


def run_on_rank0(process_group: ProcessGroup, act: Callable[[], _T]) -> _T:
    """Run ``act`` only on rank 0 and return its result on every rank.

    If it ends the run there, every rank raises the same error, which is reported once.
    """
    outcome: _T | RunEndedError | None = None
    if process_group.share.rank == 0:
        try:
            outcome = act()
        except RunEndedError as ended:
            outcome = ended
    shared: _T | RunEndedError | None = process_group.broadcast_object(outcome)
    if isinstance(shared, RunEndedError):
        shared.same_on_all_ranks = True
        raise shared
    return cast(_T, shared)
