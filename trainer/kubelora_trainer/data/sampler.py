"""Sampling order: the samples of each micro-step, and every random number they need.

Each draw is a pure function of (seed, micro-step, slot): no state is carried from one micro-step to
the next. A run that resumes at micro-step n, even in the middle of a window, therefore draws
exactly what the uninterrupted run drew.

Windows: optimizer step k (from 0) sums the micro-steps k*K to (k+1)*K - 1, where K is
gradientAccumulation. A window may span two epochs. All images of a micro-batch have one training
size; the last micro-batch of each size in an epoch may be smaller than the others, so that no image
is dropped; losses are normalised by the samples seen.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kubelora_trainer.data.rng import Purpose, _generator, draw_bits, uniform


@dataclass(frozen=True)
class SampleDraw:
    """Sample of a micro-batch, with its random numbers.

    sample: index into the dataset. across, down, timestep, caption, flip: uniform in [0, 1), for
    the position of the crop, the noise level, whether the caption is dropped (below captionDropout)
    and whether the image is mirrored (below flip).
    noise_seed, posterior_seed, tags_seed, offset_seed: for the generators of the noise, of the
    VAE's posterior, of the order of tags and of offset noise.
    """

    sample: int
    across: float
    down: float
    timestep: float
    caption: float
    flip: float
    noise_seed: int
    posterior_seed: int
    tags_seed: int
    offset_seed: int


@dataclass(frozen=True)
class _Epoch:
    """Samples of an epoch (n), and the bounds of each micro-batch among them (m)."""

    samples: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class SampleOrder:
    """Order of ``samples`` samples in micro-batches of ``batch_size``.

    groups: samples that may share a micro-batch, such as those of one training size; a sample that
    is listed twice is seen twice per epoch. None: one group of all samples.
    """

    seed: int
    samples: int
    batch_size: int
    groups: tuple[tuple[int, ...], ...] | None = None
    _epochs: dict[int, _Epoch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def micro_steps_per_epoch(self) -> int:
        """Micro-batches in which every entry of the groups is seen once."""
        sizes = [len(group) for group in self.groups] if self.groups else [self.samples]
        return sum(-(-size // self.batch_size) for size in sizes)

    def samples_of(self, micro_step: int) -> tuple[SampleDraw, ...]:
        """Return the draws of a micro-step (from 0): ``batch_size``, or fewer at a group's end."""
        number, position = divmod(micro_step, self.micro_steps_per_epoch)
        epoch = self._epoch(number)
        chosen = epoch.samples[epoch.begins[position] : epoch.ends[position]]
        return tuple(
            self._draw(micro_step, slot, int(sample)) for slot, sample in enumerate(chosen)
        )

    def _epoch(self, number: int) -> _Epoch:
        """Return the epoch's order, a pure function of (seed, number).

        Neighbouring epochs stay in memory: images of the next one are read ahead.
        """
        epoch = self._epochs.get(number)
        if epoch is None:
            epoch = self._shuffle(number)
            for other in [n for n in list(self._epochs) if abs(n - number) > 1]:
                # With a default: the reading thread may have removed it just now.
                self._epochs.pop(other, None)
            self._epochs[number] = epoch
        return epoch

    def _shuffle(self, number: int) -> _Epoch:
        groups = self.groups or (tuple(range(self.samples)),)
        shuffled, begins, ends, start = [], [], [], 0
        for index, group in enumerate(groups):
            order = epoch_permutation(self.seed, number, len(group), index)
            shuffled.append(np.asarray(group, dtype=np.int64)[order])
            edges = np.arange(start, start + len(group), self.batch_size)
            begins.append(edges)
            ends.append(np.minimum(edges + self.batch_size, start + len(group)))
            start += len(group)
        first, last = np.concatenate(begins), np.concatenate(ends)
        if len(groups) > 1:  # mix micro-batches of all sizes instead of one size after the other
            order = _generator(f"batches {self.seed} {number}").permutation(len(first))
            first, last = first[order], last[order]
        return _Epoch(np.concatenate(shuffled), first, last)

    def _draw(self, micro_step: int, slot: int, sample: int) -> SampleDraw:
        def bits(purpose: Purpose) -> int:
            return draw_bits(self.seed, micro_step, slot, purpose)

        return SampleDraw(
            sample=sample,
            across=uniform(bits("across")),
            down=uniform(bits("down")),
            timestep=uniform(bits("timestep")),
            caption=uniform(bits("caption")),
            flip=uniform(bits("flip")),
            # 63 bits: a seed is then a positive number in a signed 64-bit integer too.
            noise_seed=bits("noise") >> 1,
            posterior_seed=bits("posterior") >> 1,
            tags_seed=bits("tags") >> 1,
            offset_seed=bits("offset") >> 1,
        )


@dataclass(frozen=True)
class RankShare:
    """Micro-steps of one rank: every ``size``-th of a window.

    A micro-batch is never split, so its samples, its draws and the weight of the window don't
    depend on the number of ranks. Some ranks may have one more than others, or none.
    """

    rank: int
    size: int

    def of(self, micro_steps: range) -> range:
        """Return this rank's micro-steps among those that a window still needs."""
        return micro_steps[self.rank :: self.size]

    def after(self, micro_step: int, accumulation: int) -> int:
        """Return the micro-step that this rank runs after ``micro_step``."""
        window_end = (micro_step // accumulation + 1) * accumulation
        following = micro_step + self.size
        return following if following < window_end else window_end + self.rank


ALL_MICRO_STEPS = RankShare(0, 1)
"""The share of a single process."""


def epoch_permutation(seed: int, epoch: int, samples: int, group: int = 0) -> np.ndarray:
    """Draw the order of a group's samples in an epoch, from (seed, epoch, group) alone.

    Args:
        seed: Seed of the run.
        epoch: Epoch, from 0.
        samples: Samples in the group.
        group: Index of the group.

    Returns:
        A permutation of range(samples), int64.
    """
    # The first group has no suffix, so that a dataset of one size has the same order with buckets.
    of_group = f" group {group}" if group else ""
    return _generator(f"epoch {seed} {epoch}{of_group}").permutation(samples)


def groups_of(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Group the indices of equal keys; groups are in the order of their first member."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return tuple(tuple(group) for group in groups.values())
