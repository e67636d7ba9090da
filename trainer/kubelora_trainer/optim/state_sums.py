"""Integer sums of weights and optimizer state, at a step's end and at the next one's start.

Between two optimizer steps nothing may write into either. A flipped bit, a stray write, a moment
that something sets to 0: none of them need make a gradient or a loss look wrong, but each changes
the sum of the bit patterns. Sums are exact in any order, so there is no tolerance. They are taken
inside of the optimizer's step, so that what happens directly before or after it is seen, too.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kubelora_trainer.utils.bit_sums import bit_sum


class StateSums:
    """Sums of named tensors, compared from one step's end to the next one's start.

    changed: int64 on the device, by name: 1 where the last step began with other bits than the
    one before it left.
    """

    def __init__(self, named: Callable[[], Sequence[tuple[str, Sequence[Tensor]]]]) -> None:
        """named: returns what is summed, each name's tensors together, as they are now."""
        self._named = named
        self._end: Tensor | None = None
        first = named()[0][1][0]
        self.changed = torch.zeros(len(named()), dtype=torch.int64, device=first.device)

    @property
    def names(self) -> list[str]:
        """What is summed, in the order of ``changed``."""
        return [name for name, _ in self._named()]

    def forget(self) -> None:
        """Accept the tensors as they are: they were restored, or watching begins."""
        self._end = None

    def begin(self) -> None:
        """Compare at a step's start."""
        self.changed = self.compare()

    def finish(self) -> None:
        """Keep the sums of a step's end."""
        self._end = self._sums()

    def compare(self) -> Tensor:
        """Return int64 by name: 1 where the bits are not those of the last step's end."""
        now = self._sums()
        return torch.zeros_like(now) if self._end is None else (now != self._end).long()

    def _sums(self) -> Tensor:
        none = torch.zeros_like(self.changed[0])
        return torch.stack(
            [torch.stack([none, *map(bit_sum, tensors)]).sum() for _, tensors in self._named()]
        )
