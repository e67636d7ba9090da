"""A few elements of every slot, so that no factor is hidden by the others of its group.

Positions move with every step, so that each element of the adapter is looked at now and then.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from kubelora_trainer.optim.flat_buffers import Slot
from kubelora_trainer.optim.moments import Elements

SAMPLES_PER_SLOT: Final = 8
"""Elements of each slot: what is wrong with a slot is wrong with all of them."""
_PACE: Final = 7_919
"""Elements by which positions move from one step to the next: a prime, which no row's width is."""


class SlotSample:
    """Sampled positions of all slots as one matrix (slots, samples); short slots repeat theirs."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        sizes = torch.tensor([slot.stop - slot.start for slot in slots]).unsqueeze(1)
        spread = torch.arange(SAMPLES_PER_SLOT).unsqueeze(0) * sizes // SAMPLES_PER_SLOT
        self._sizes, self._spread = sizes.to(device), spread.to(device)
        self._starts = torch.tensor([[slot.start] for slot in slots]).to(device)
        self.index = self._starts + self._spread
        self._flat = self.index.flatten()

    def move_to(self, step: int) -> None:
        """Take the positions of ``step``."""
        self.index = self._starts + (self._spread + step * _PACE) % self._sizes
        self._flat = self.index.flatten()

    def take(self, flat: Elements) -> Tensor:
        """Return the sampled elements of ``flat``: (slots, samples), in its type."""
        return flat.index_select(0, self._flat).view_as(self.index)
