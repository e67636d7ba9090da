"""The samples of each micro-step, and every random number that goes with them.

Each draw is a pure function of (seed, micro-step, slot): no state is carried from one micro-step to
the next. A run that resumes at micro-step n therefore draws exactly what an uninterrupted run would
have drawn, even in the middle of a window.

Windows: optimizer step k (from 0) sums the micro-steps k*K to (k+1)*K - 1, where K is
gradientAccumulation. A window may span two epochs. A micro-batch has one training size. The last
one of each size in an epoch may be smaller, so that no image is dropped; losses are normalised by
the number of samples actually seen.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kubelora_trainer.data.rng import Purpose, _generator, draw_bits, uniform


@dataclass(frozen=True)
class SampleDraw:
    """One slot of a micro-batch.

    Attributes:
        sample: Index into the dataset.
        across: Horizontal position of the crop, uniform in [0, 1) like all floats here.
        down: Vertical position of the crop.
        timestep: Noise level.
        caption: The caption is dropped if this is below captionDropout.
        flip: The image is mirrored if this is below flip.
        noise_seed: Seed of the noise.
        posterior_seed: Seed of the draw from the VAE's posterior.
        tags_seed: Seed of the order of tags.
        offset_seed: Seed of the noise offset.
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
    """Samples of an epoch (n), and the start and end of each micro-batch among them (m)."""

    samples: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class SampleOrder:
    """The order of ``samples`` samples in micro-batches of ``batch_size``.

    groups: samples that may share a micro-batch, such as those of one training size. A sample
    listed twice is seen twice per epoch. None: all samples, once each.
    """

    seed: int
    samples: int
    batch_size: int
    groups: tuple[tuple[int, ...], ...] | None = None
    _kept: dict[int, _Epoch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def micro_steps_per_epoch(self) -> int:
        """Number of micro-batches that cover every sample once."""
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
        """Return the epoch's order, a pure function of (seed, number); two epochs are cached."""
        kept = self._kept.get(number)
        if kept is None:
            kept = self._shuffled(number)
            for other in [n for n in list(self._kept) if abs(n - number) > 1]:
                self._kept.pop(other, None)
            self._kept[number] = kept
        return kept

    def _shuffled(self, number: int) -> _Epoch:
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
        if len(groups) > 1:  # mix the training sizes instead of one after the other
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
            noise_seed=bits("noise") >> 1,
            posterior_seed=bits("posterior") >> 1,
            tags_seed=bits("tags") >> 1,
            offset_seed=bits("offset") >> 1,
        )


@dataclass(frozen=True)
class Share:
    """The micro-steps of one rank: every ``size``-th of a window.

    A micro-batch is never split, so its samples, its draws and its weight in the window do not
    depend on the number of ranks. Some ranks may have one micro-step more than others, or none.
    """

    rank: int
    size: int

    def of(self, micro_steps: range) -> range:
        """Select this rank's micro-steps among those that a window still needs."""
        return micro_steps[self.rank :: self.size]

    def after(self, micro_step: int, accumulation: int) -> int:
        """Return the micro-step that this rank computes after ``micro_step``."""
        window_end = (micro_step // accumulation + 1) * accumulation
        following = micro_step + self.size
        return following if following < window_end else window_end + self.rank


ALL_MICRO_STEPS = Share(0, 1)


def epoch_permutation(seed: int, epoch: int, samples: int, group: int = 0) -> np.ndarray:
    """Shuffle a group's samples for an epoch.

    Args:
        seed: Seed of the run.
        epoch: Epoch, from 0.
        samples: Number of samples of the group.
        group: Index of the group.

    Returns:
        A permutation that depends only on (seed, epoch, group).
    """
    of_group = f" group {group}" if group else ""
    return _generator(f"epoch {seed} {epoch}{of_group}").permutation(samples)


def groups_of(keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """Group the indices of equal keys, in the order of each group's first member."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return tuple(tuple(group) for group in groups.values())
