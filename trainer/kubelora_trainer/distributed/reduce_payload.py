"""Payload of each rank, as bytes behind the gradient in the all-reduce.

Each rank writes to its own slot and leaves zeros in the others, so the sum contains every payload
unchanged: integers up to 255 are exact in every float type. Reading the result is the only time in
a step that the host waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_WHOLE_NUMBERS: Final = 5
"""Integers of a payload: checksum, samples, stop, due, broken. Sums follow; 8 bytes each."""


@dataclass(frozen=True)
class ControlFlags:
    """Requests of a rank to all ranks at the end of a window.

    Attributes:
        stop: Stop in an orderly way.
        due: Evaluate the findings, which may end the run or roll it back.
    """

    stop: bool
    due: bool = False


@dataclass(frozen=True)
class RankPayloads:
    """The payloads of all ranks, by rank.

    Attributes:
        checksums: Checksums of the weights' bits.
        samples: Samples of the window.
        asked: Requests.
        broken: True if the rank's own part of the gradient was not finite.
        sums: Totals of the floating-point sums, fp64 on the CPU.
    """

    checksums: Sequence[int]
    samples: Sequence[int]
    asked: Sequence[ControlFlags]
    broken: Sequence[bool]
    sums: Tensor


def payload_elements(sums: int) -> int:
    """Return the number of elements of one payload with ``sums`` sums in addition to the loss."""
    return 8 * (_WHOLE_NUMBERS + 1 + sums)


def pack_payload(
    masters: Tensor, gradient: Tensor, samples: int, asked: ControlFlags, floats: Sequence[Tensor]
) -> Tensor:
    """Build a rank's payload: uint8 on the device of the masters.

    Args:
        masters: Master weights, for the checksum.
        gradient: The rank's own gradient, which is checked for non-finite values.
        samples: The rank's samples of the window.
        asked: Requests.
        floats: fp64 sums, one-dimensional, the loss first.
    """
    known = torch.tensor([samples, int(asked.stop), int(asked.due)], device=masters.device)
    ends = torch.stack(gradient.aminmax())
    broken = (~torch.isfinite(ends)).any().long().reshape(1)
    whole = torch.cat([checksum(masters).reshape(1), known, broken])
    return torch.cat([whole.view(torch.uint8), torch.cat(list(floats)).view(torch.uint8)])


def unpack_payloads(tail: Tensor) -> RankPayloads:
    """Split the summed ``tail`` (ranks, elements) into payloads; waits for the device."""
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
    """Sum the weights' bit patterns as an int64 scalar: exact in any order of summation."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[masters.element_size()]
    return masters.view(whole).sum(dtype=torch.int64)
