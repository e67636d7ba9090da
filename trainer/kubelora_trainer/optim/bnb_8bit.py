"""Telemetry's view of the second moments in bitsandbytes' 8-bit AdamW.

A moment is ``map[code] * scale``: an 8-bit code per element and one fp32 scale (the largest value)
per 256 elements. bitsandbytes can only dequantise entire factors, which costs 4 bytes per adapter
parameter in every step, but telemetry needs only a few thousand elements. Codes and scales of all
factors therefore live in two flat buffers, the library's state is views of them, and single
elements are looked up. Factors too small for 8 bits stay in fp32, as in the library.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kubelora_trainer.optim.flat_buffers import Slot

BLOCK_8BIT = 256
"""Number of elements that share one fp32 scale in bitsandbytes' state."""
SMALLEST_8BIT = 4096
"""Factors with fewer elements than this stay in fp32, as in bitsandbytes."""
CODES, SCALES, MAP = "state2", "absmax2", "qmap2"
"""Keys of bitsandbytes' state; an fp32 moment uses the key of the codes."""


class EightBitMoment:
    """Second moments of all factors, addressed by position in the flat masters.

    Each factor's codes start at a multiple of 256, so that a position's block is a division.

    Args:
        slots: Layout of the factors.
        decay: beta2.
        device: Device of the state.
    """

    def __init__(self, slots: Sequence[Slot], decay: float, device: torch.device) -> None:
        self.decay = decay
        self._slots = slots
        self._in_codes = [slot.stop - slot.start >= SMALLEST_8BIT for slot in slots]
        starts, places = {True: 0, False: 0}, []
        for slot, coded in zip(slots, self._in_codes, strict=True):
            places.append(starts[coded])
            blocks = -(-(slot.stop - slot.start) // BLOCK_8BIT)
            starts[coded] += blocks * BLOCK_8BIT if coded else slot.stop - slot.start
        self._places = places
        self._codes = torch.zeros(max(1, starts[True]), dtype=torch.uint8, device=device)
        self._scales = torch.zeros(max(1, starts[True] // BLOCK_8BIT), device=device)
        self._exact = torch.zeros(max(1, starts[False]), device=device)
        self._map = torch.zeros(256, device=device)
        self._stops = torch.tensor([slot.stop for slot in slots], device=device)
        shifts = [place - slot.start for slot, place in zip(slots, places, strict=True)]
        self._shifts = torch.tensor(shifts, device=device)
        self._coded = torch.tensor(self._in_codes, device=device)
        self._looked_up: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def adopt(self, states: Sequence[dict[str, Tensor]]) -> None:
        """Turn each factor's state into views of the flat buffers, keeping its values.

        states: in slot order. Does nothing if they are views already.
        """
        for slot, state, place, coded in zip(
            self._slots, states, self._places, self._in_codes, strict=True
        ):
            count = slot.stop - slot.start
            flat = self._codes if coded else self._exact
            _keep(state, CODES, flat[place : place + count].view(slot.shape))
            if coded:
                first, blocks = place // BLOCK_8BIT, -(-count // BLOCK_8BIT)
                _keep(state, SCALES, self._scales[first : first + blocks])
                self._map = state[MAP]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Return the moments at these positions in fp32, bit-identical to bitsandbytes' own."""
        assert dim == 0
        if self._looked_up is None or self._looked_up[0] is not index:
            slot = torch.bucketize(index, self._stops, right=True)
            coded, place = self._coded[slot], index + self._shifts[slot]
            self._looked_up = (index, coded, place * coded, place * ~coded)
        _, coded, in_codes, in_exact = self._looked_up
        unpacked = self._map[self._codes[in_codes].int()] * self._scales[in_codes // BLOCK_8BIT]
        return torch.where(coded, unpacked, self._exact[in_exact])


def _keep(state: dict[str, Tensor], name: str, view: Tensor) -> None:
    if state[name].data_ptr() != view.data_ptr():
        view.copy_(state[name])
        state[name] = view
