"""The ranks of a run as one: who does which micro-steps, and the one all-reduce of a step.

Every rank keeps weights and optimizer of its own and does the same step with the same gradient, so
they stay equal to the bit without ever being sent. What the ranks must know of each other rides in
the tail of the gradient buffer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Final, Protocol, TypeVar, cast

import torch
from torch import Tensor, distributed

from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.data.sampler import ALL_MICRO_STEPS, Share
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
    """A window as all ranks know it.

    position: with the samples and losses of all ranks. asked: what any rank asks for. divergence:
    max - min of the weights' checksum over ranks, 0 where they agree to the bit; NaN for a single
    rank. broken: ranks whose own part of the gradient is not finite; empty for a single rank.
    """

    position: RunPosition
    asked: ControlFlags
    divergence: float
    broken: tuple[int, ...] = ()


class ProcessGroup(Protocol):
    """All ranks of a run, as one of them sees them."""

    @property
    def share(self) -> Share:
        """Which micro-steps are this rank's."""

    def tail_elements(self, sums: int) -> int:
        """Room that the gradient buffer needs behind the gradient. sums: elements of them."""

    def between_micro_steps(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """``stop``, as far as it may end a window in its middle."""

    def adopt(
        self, position: RunPosition, buffers: AdapterBuffers, sums: Sequence[Tensor]
    ) -> RunPosition:
        """This rank's part of a resumed position, whose sums are those of all ranks."""

    def exchange(
        self,
        buffers: AdapterBuffers,
        position: RunPosition,
        asked: ControlFlags,
        sums: Sequence[Tensor],
    ) -> ReducedWindow:
        """Sum the window over all ranks. Raises PeerLostError, PeerTimeoutError.

        sums: fp64, of whatever else is summed over samples; like the gradient changed in place.
        """

    def broadcast_object(self, value: _T) -> _T:
        """Rank 0's ``value``, on every rank. Raises PeerLostError, PeerTimeoutError."""

    def all_gather_object(self, value: _T) -> Sequence[_T]:
        """Return every rank's ``value``, by rank. Raises PeerLostError, PeerTimeoutError."""


class SingleProcess:
    """A run of one rank."""

    share = ALL_MICRO_STEPS

    def tail_elements(self, sums: int) -> int:
        """None."""
        return 0

    def between_micro_steps(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """A single rank can stop after any micro-step."""
        return stop

    def adopt(
        self, position: RunPosition, buffers: AdapterBuffers, sums: Sequence[Tensor]
    ) -> RunPosition:
        """All of it."""
        return position

    def exchange(
        self,
        buffers: AdapterBuffers,
        position: RunPosition,
        asked: ControlFlags,
        sums: Sequence[Tensor],
    ) -> ReducedWindow:
        """Nobody to exchange with."""
        return ReducedWindow(position, asked, math.nan)

    def broadcast_object(self, value: _T) -> _T:
        """The value."""
        return value

    def all_gather_object(self, value: _T) -> Sequence[_T]:
        """The value alone."""
        return (value,)


SINGLE_PROCESS: Final = SingleProcess()


class DistributedGroup:
    """Ranks in processes of their own, over torch's default process group."""

    def __init__(self, rank: int, size: int, roll_call: RankMonitor | None = None) -> None:
        """roll_call: without one, a rank that goes away is not named."""
        self.share = Share(rank, size)
        self._roll_call = roll_call or RankMonitor(None, rank, size, timedelta.max)

    def tail_elements(self, sums: int) -> int:
        """A note per rank."""
        return payload_elements(sums) * self.share.size

    def between_micro_steps(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Never: the ranks agree at the window's end and stop together there."""
        return lambda: False

    def adopt(
        self, position: RunPosition, buffers: AdapterBuffers, sums: Sequence[Tensor]
    ) -> RunPosition:
        """Rank 0 takes the sums of an unfinished window, the others begin theirs at 0."""
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
        """One all-reduce of the gradient and, in its tail, of every rank's note."""
        device = buffers.masters.device
        carried = [position.window_loss.to(device).reshape(1), *(one.flatten() for one in sums)]
        tail = buffers.reduced[buffers.numel :].view(self.share.size, -1)
        tail.zero_()
        tail[self.share.rank] = pack_payload(
            buffers.masters, buffers.gradient, position.window_samples, asked, carried
        )
        with self._roll_call.around():
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
        """A broadcast of any picklable value."""
        box = [value]
        with self._roll_call.around():
            distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def all_gather_object(self, value: _T) -> Sequence[_T]:
        """An all-gather of any picklable value."""
        found = [value] * self.share.size
        with self._roll_call.around():
            distributed.all_gather_object(found, value)
        return found


def run_on_rank0(process_group: ProcessGroup, act: Callable[[], _T]) -> _T:
    """What ``act`` gives on rank 0, which alone does it, on every rank.

    Where it ends the run there, every rank raises the same, and it is said once.
    """
    outcome: _T | RunEndedError | None = None
    if process_group.share.rank == 0:
        try:
            outcome = act()
        except RunEndedError as ended:
            outcome = ended
    told: _T | RunEndedError | None = process_group.broadcast_object(outcome)
    if isinstance(told, RunEndedError):
        told.alike = True
        raise told
    return cast(_T, told)
