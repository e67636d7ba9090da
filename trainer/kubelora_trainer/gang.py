"""The ranks of a run as one: who does which micro-steps, and the one all-reduce of a step.

Every rank keeps weights and optimizer of its own and does the same step with the same gradient, so
they stay equal to the bit without ever being sent. What the ranks must know of each other rides in
the tail of the gradient buffer, as bytes: whole numbers up to 255 are exact in every float type.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor, distributed

from kubelora_trainer.buffers import AdapterBuffers
from kubelora_trainer.checkpoint import RunPosition
from kubelora_trainer.errors import PeerLost
from kubelora_trainer.order import WHOLE, Share

_WHOLE_NUMBERS: Final = 3
"""Of a rank's note: checksum, samples, stop flag. Loss and further sums follow; 8 bytes each."""
_LOST: Final = (
    "another rank of this run went away, so this one stops; the cause is in that rank's words"
)
T = TypeVar("T")


@dataclass(frozen=True)
class Exchanged:
    """A window as all ranks know it.

    position: with the samples and losses of all ranks. stopping: whether any rank was asked to
    stop. divergence: max - min of the weights' checksum over ranks, 0 where they agree to the bit;
    NaN for a single rank.
    """

    position: RunPosition
    stopping: bool
    divergence: float


class Gang(Protocol):
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
        self, buffers: AdapterBuffers, position: RunPosition, stop: bool, sums: Sequence[Tensor]
    ) -> Exchanged:
        """Sum the window over all ranks. Raises PeerLost.

        sums: fp64, of whatever else is summed over samples; like the gradient changed in place.
        """

    def told_by_first(self, value: T) -> T:
        """Rank 0's ``value``, on every rank. Raises PeerLost."""

    def gathered(self, value: T) -> Sequence[T]:
        """Every rank's ``value``, by rank, on every rank. Raises PeerLost."""


class Alone:
    """A run of one rank."""

    share = WHOLE

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
        self, buffers: AdapterBuffers, position: RunPosition, stop: bool, sums: Sequence[Tensor]
    ) -> Exchanged:
        """Nobody to exchange with."""
        return Exchanged(position, stop, math.nan)

    def told_by_first(self, value: T) -> T:
        """The value."""
        return value

    def gathered(self, value: T) -> Sequence[T]:
        """The value alone."""
        return (value,)


ALONE: Final = Alone()


class ProcessGang:
    """Ranks in processes of their own, over torch's default process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.share = Share(rank, size)

    def tail_elements(self, sums: int) -> int:
        """A note per rank."""
        return 8 * (_WHOLE_NUMBERS + 1 + sums) * self.share.size

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
        self, buffers: AdapterBuffers, position: RunPosition, stop: bool, sums: Sequence[Tensor]
    ) -> Exchanged:
        """One all-reduce of the gradient and, in its tail, of every rank's note."""
        device = buffers.masters.device
        carried = [position.window_loss.to(device).reshape(1), *(one.flatten() for one in sums)]
        tail = buffers.reduced[buffers.numel :].view(self.share.size, -1)
        tail.zero_()
        tail[self.share.rank] = _note(buffers.masters, position.window_samples, stop, carried)
        try:
            distributed.all_reduce(buffers.reduced)
        except RuntimeError as error:
            raise PeerLost(_LOST) from error
        notes = tail.to(torch.uint8).cpu()
        whole, floats = notes.split([8 * _WHOLE_NUMBERS, notes.shape[1] - 8 * _WHOLE_NUMBERS], 1)
        checksums, samples, stops = whole.contiguous().view(torch.int64).T.tolist()
        loss, *others = (
            floats.contiguous()
            .view(torch.float64)
            .sum(0)
            .to(device)
            .split([one.numel() for one in carried])
        )
        for one, total in zip(sums, others, strict=True):
            one.copy_(total.view_as(one))
        return Exchanged(
            replace(position, window_samples=sum(samples), window_loss=loss.reshape(())),
            any(stops),
            float(max(checksums) - min(checksums)),
        )

    def told_by_first(self, value: T) -> T:
        """A broadcast of any picklable value."""
        box = [value]
        try:
            distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        except RuntimeError as error:
            raise PeerLost(_LOST) from error
        return box[0]

    def gathered(self, value: T) -> Sequence[T]:
        """An all-gather of any picklable value."""
        found = [value] * self.share.size
        try:
            distributed.all_gather_object(found, value)
        except RuntimeError as error:
            raise PeerLost(_LOST) from error
        return found


def checksum(masters: Tensor) -> Tensor:
    """Sum of the weights' bit patterns, int64 scalar: exact, whatever order a device sums in."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[masters.element_size()]
    return masters.view(whole).sum(dtype=torch.int64)


def _note(masters: Tensor, samples: int, stop: bool, carried: Sequence[Tensor]) -> Tensor:
    """What the other ranks must know of this one, as bytes: uint8 on the masters' device."""
    known = torch.tensor([samples, int(stop)], device=masters.device)
    whole = torch.cat([checksum(masters).reshape(1), known])
    return torch.cat([whole.view(torch.uint8), torch.cat(list(carried)).view(torch.uint8)])
