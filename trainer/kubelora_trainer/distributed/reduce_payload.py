"""What a rank tells the others of a window, as bytes behind the gradient that all of them sum.

Each rank writes into its own place and zeros stand in the others', so the sum holds every note as
it was written: whole numbers up to 255 are exact in every float type. Reading it is the one time in
a step that the host waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_WHOLE_NUMBERS: Final = 5
"""Of a note: checksum, samples, stop, due, broken. Loss and further sums follow; 8 bytes each."""


@dataclass(frozen=True)
class ControlFlags:
    """What a rank asks of all at a window's end.

    stop: to leave, in order. due: to look at what it found, which may end the run or take it back.
    """

    stop: bool
    due: bool = False


@dataclass(frozen=True)
class RankPayloads:
    """The notes of all ranks, by rank.

    checksums: of the weights' bits. samples: of the window. broken: whether the rank's own part of
    the gradient held anything that is not finite. sums: what floats add up to, fp64 on the CPU.
    """

    checksums: Sequence[int]
    samples: Sequence[int]
    asked: Sequence[ControlFlags]
    broken: Sequence[bool]
    sums: Tensor


def payload_elements(sums: int) -> int:
    """Elements of one rank's note. sums: further sums beside the loss."""
    return 8 * (_WHOLE_NUMBERS + 1 + sums)


def pack_payload(
    masters: Tensor, gradient: Tensor, samples: int, asked: ControlFlags, floats: Sequence[Tensor]
) -> Tensor:
    """A rank's note: uint8 on the masters' device. floats: fp64, one-dimensional, loss first."""
    known = torch.tensor([samples, int(asked.stop), int(asked.due)], device=masters.device)
    ends = torch.stack(gradient.aminmax())
    broken = (~torch.isfinite(ends)).any().long().reshape(1)
    whole = torch.cat([checksum(masters).reshape(1), known, broken])
    return torch.cat([whole.view(torch.uint8), torch.cat(list(floats)).view(torch.uint8)])


def unpack_payloads(tail: Tensor) -> RankPayloads:
    """Take the summed ``tail`` (ranks, elements) apart. Waits for its device."""
    notes = tail.to(torch.uint8).cpu()
    whole, floats = notes.split([8 * _WHOLE_NUMBERS, notes.shape[1] - 8 * _WHOLE_NUMBERS], 1)
    checksums, samples, stop, due, broken = whole.contiguous().view(torch.int64).T.tolist()
    return RankPayloads(
        checksums=checksums,
        samples=samples,
        asked=[ControlFlags(bool(s), bool(d)) for s, d in zip(stop, due, strict=True)],
        broken=[bool(b) for b in broken],
        sums=floats.contiguous().view(torch.float64).sum(0),
    )


def checksum(masters: Tensor) -> Tensor:
    """Sum of the weights' bit patterns, int64 scalar: exact, whatever order a device sums in."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[masters.element_size()]
    return masters.view(whole).sum(dtype=torch.int64)
