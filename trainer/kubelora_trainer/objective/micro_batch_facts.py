"""Facts of a micro-batch for whoever watches the data: the objective's side of an observer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class MicroBatchFacts:
    """One micro-batch, sample by sample. Reading it does not wait for the device.

    Attributes:
        micro_step: From 0, over the run.
        samples: Indices into the dataset.
        timesteps: As the noise scheduler counts them.
        noise: The first element of each sample's noise.
        latent: Returns the scaled mean of the i-th sample's latent, fp32 (channels, h, w) on the
            device; computed on each call.
        finite: By input ("latent", "caption's embedding"), whether each sample's is free of NaN
            and infinity: bool (n) on the device.
    """

    micro_step: int
    samples: tuple[int, ...]
    timesteps: tuple[int, ...]
    noise: tuple[float, ...]
    latent: Callable[[int], Tensor]
    finite: Mapping[str, Tensor] = field(default_factory=dict)


def ignore(facts: MicroBatchFacts) -> None:
    """Discard the facts."""
