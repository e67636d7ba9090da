"""Interface of the components that a checkpoint saves.

Everything with state that a resumed run needs (weights, optimizer, EMA, loss scaler) implements it.
The checkpoint knows none of them by name; a new component is named in `TrainState.saved_parts`
(``training/train_state.py``).
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kubelora_api.schema import JsonObject


class Stateful(Protocol):
    """State that is saved and restored bit for bit."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors to save, on any device, none sharing memory with another."""

    def scalars(self) -> JsonObject:
        """Return all other state as plain JSON, in which Python writes and reads floats exactly."""

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore saved state (tensors on the CPU).

        Raises ValueError before changing anything if it does not fit.
        """


def check_like(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless both have the same names, types and shapes."""
    if wanted.keys() != found.keys():
        first = sorted(wanted.keys() ^ found.keys())[0]
        raise ValueError(f"{first} is {'missing' if first in wanted else 'not known'}")
    for name, like in wanted.items():
        tensor = found[name]
        if tensor.dtype != like.dtype or tensor.shape != like.shape:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, this run needs "
                f"{like.dtype} of shape {tuple(like.shape)}"
            )
