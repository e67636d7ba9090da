"""Which samples a micro-step sees, and every random number that goes with them.

Each draw is a pure function of (seed, micro-step, slot): nothing is carried from one micro-step to
the next. A run that resumes at micro-step n therefore draws exactly what the uninterrupted run
drew, in the middle of a window too.

Windows: optimizer step k (from 0) sums the micro-steps k*K to (k+1)*K - 1, where K is
gradientAccumulation. A window may span two epochs. The last micro-batch of an epoch may be smaller
than the others, so that no image is dropped; losses are normalised by the samples seen.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from kubelora_api.spec import Training

Purpose = Literal["across", "down", "posterior", "noise", "timestep", "caption"]


@dataclass(frozen=True)
class SampleDraw:
    """One place of a micro-batch.

    sample: index into the dataset. across, down, timestep, caption: uniform in [0, 1): where the
    crop lies, how much noise there is, and whether the caption is dropped (below captionDropout).
    noise_seed, posterior_seed: for the generators of the noise and of the VAE's posterior.
    """

    sample: int
    across: float
    down: float
    timestep: float
    caption: float
    noise_seed: int
    posterior_seed: int


@dataclass(frozen=True)
class SampleOrder:
    """The order of ``samples`` samples in micro-batches of ``batch_size``."""

    seed: int
    samples: int
    batch_size: int

    @property
    def micro_steps_per_epoch(self) -> int:
        """Micro-batches in which every sample is seen once."""
        return -(-self.samples // self.batch_size)

    def samples_of(self, micro_step: int) -> tuple[SampleDraw, ...]:
        """Draws of a micro-step (from 0): ``batch_size`` of them, fewer at an epoch's end."""
        epoch, position = divmod(micro_step, self.micro_steps_per_epoch)
        start = position * self.batch_size
        chosen = epoch_permutation(self.seed, epoch, self.samples)
        return tuple(
            self._draw(micro_step, slot, sample)
            for slot, sample in enumerate(chosen[start : start + self.batch_size])
        )

    def _draw(self, micro_step: int, slot: int, sample: int) -> SampleDraw:
        def bits(purpose: Purpose) -> int:
            return draw_bits(self.seed, micro_step, slot, purpose)

        return SampleDraw(
            sample=sample,
            across=uniform(bits("across")),
            down=uniform(bits("down")),
            timestep=uniform(bits("timestep")),
            caption=uniform(bits("caption")),
            noise_seed=bits("noise") >> 1,
            posterior_seed=bits("posterior") >> 1,
        )


@dataclass(frozen=True)
class Plan:
    """How many steps a run has. The last window of a run by epochs may be shorter."""

    optimizer_steps: int
    micro_steps: int
    accumulation: int

    def window(self, optimizer_step: int) -> range:
        """Micro-steps that an optimizer step (from 0) sums."""
        start = optimizer_step * self.accumulation
        return range(start, min(start + self.accumulation, self.micro_steps))


def plan_of(training: Training, order: SampleOrder) -> Plan:
    """Steps to run: as told, or as many as ``epochs`` passes over the samples need."""
    accumulation = training.gradient_accumulation
    if training.steps is not None:
        return Plan(training.steps, training.steps * accumulation, accumulation)
    micro_steps = (training.epochs or 0) * order.micro_steps_per_epoch
    return Plan(-(-micro_steps // accumulation), micro_steps, accumulation)


@lru_cache(maxsize=2)
def epoch_permutation(seed: int, epoch: int, samples: int) -> Sequence[int]:
    """Order of the samples in an epoch: a permutation drawn from (seed, epoch) alone."""
    generator = np.random.Generator(np.random.Philox(_hash(f"epoch {seed} {epoch}")))
    return tuple(int(sample) for sample in generator.permutation(samples))


def draw_bits(seed: int, micro_step: int, slot: int, purpose: Purpose) -> int:
    """64 bits, independent between any two different arguments (SHA-256)."""
    return _hash(f"{purpose} {seed} {micro_step} {slot}")


def uniform(bits: int) -> float:
    """The 53 highest of 64 bits as a number in [0, 1)."""
    return float((bits >> 11) * 2.0**-53)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
