"""What a checkpoint carries, as its parts offer it.

Whatever has state that a resumed run needs (weights, optimizer, averaged weights, loss scaler) is
a part; the checkpoint itself knows none of them by name. A part that is new to a run needs a name
in `run.py` and nothing else here.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from kubelora_api.schema import JsonObject


class Stateful(Protocol):
    """State that is saved and taken over again, to the bit."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors to save, on any device, none sharing memory with another."""

    def scalars(self) -> JsonObject:
        """Whatever else, as plain JSON; Python writes and reads its floats exactly."""

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Take over what was saved (tensors on the CPU).

        Raises ValueError, before anything is changed, where it does not fit.
        """


def check_like(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless both have the same names, types and shapes."""
    if wanted.keys() != found.keys():
        odd = sorted(wanted.keys() ^ found.keys())[0]
        raise ValueError(f"{odd} is {'missing' if odd in wanted else 'not known'}")
    for name, like in wanted.items():
        tensor = found[name]
        if tensor.dtype != like.dtype or tensor.shape != like.shape:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, this run needs "
                f"{like.dtype} of shape {tuple(like.shape)}"
            )
