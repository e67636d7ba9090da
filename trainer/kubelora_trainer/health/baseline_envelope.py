"""Comparison of gradients with the range of an earlier run at the same progress. Pure.

A run is cut into bins of progress; of each, the median of the logarithm of every group's gradient
norm is compared with the earlier run's. Two bins in a row beyond the larger of a factor of 2 and
four deviations between seeds are a finding: one may be chance, and the loss may show it days later.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from kubelora_trainer.telemetry.step_metrics import StepNumbers

MOST_BINS: Final = 24
"""A bin is then 4 % of the run: a fault that begins with the run shows after a twelfth of it."""
LEAST_STEPS: Final = 8
"""Steps of a bin; a median of fewer is too noisy."""
FEWEST_BINS: Final = 3
"""Fewer cannot hold `BINS_IN_A_ROW` and a bin to recover in."""
KEPT_VALUES: Final = 64
"""Values of a bin and group that are kept, evenly spread: enough for a median."""
FACTOR: Final = 2.0
"""Healthy runs with other seeds stay within 1.5; a micro-step lost of two halves the gradient."""
DEVIATIONS: Final = 4.0
"""Of a normal value, one in 16,000 is further out."""
BINS_IN_A_ROW: Final = 2
"""One bin may be chance."""
_MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median over that of a mean, for normal values: sqrt(pi / 2)."""
_MAD_TO_DEVIATION: Final = 1.4826
"""Standard deviation over median absolute deviation, for normal values: 1 / 0.6745."""


@dataclass(frozen=True)
class Middle:
    """A bin's middle. log_norm: median of ln(norm). deviation: what another seed's may be off."""

    log_norm: float
    deviation: float


@dataclass(frozen=True)
class Envelope:
    """An earlier run, by group and bin. None where a bin has no gradient to compare with."""

    bins: int
    middles: Mapping[str, tuple[Middle | None, ...]]


@dataclass(frozen=True)
class Departure:
    """A departure from the envelope.

    ratio: of the gradient norms, here over there. allowed: factor in either direction.
    since: first optimizer step of the first bin that was beyond.
    """

    group: str
    ratio: float
    allowed: float
    since: int


@dataclass(frozen=True)
class Passage:
    """The position of a run in the envelope.

    bin: the unfinished one. logs: its ln(norm) by group. beyond: by group, how many bins in a row
    were beyond so far, negative below the baseline. departed: what the newest complete bin shows.
    """

    bin: int = 0
    logs: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    beyond: Mapping[str, int] = field(default_factory=dict)
    departed: Departure | None = None


def bins_of(baseline_steps: int, steps: int) -> int:
    """Return how many bins two runs can be compared in; 0 if they are too short."""
    bins = min(MOST_BINS, min(baseline_steps, steps) // LEAST_STEPS)
    return bins if bins >= FEWEST_BINS else 0


def bin_of(step: int, total_steps: int, bins: int) -> int:
    """Return the bin (from 0) of an optimizer step.

    Args:
        step: Optimizer step, from 1.
        total_steps: Optimizer steps of the run.
        bins: Bins of the run.
    """
    return min(bins - 1, (step - 1) * bins // total_steps)


def envelope_of(norms: Iterable[tuple[int, str, float]], total_steps: int, bins: int) -> Envelope:
    """Compute the envelope of an earlier run.

    Args:
        norms: Its (step, group, gradient norm).
        total_steps: Optimizer steps that it planned.
        bins: Bins to divide it into.
    """
    values: dict[str, list[list[float]]] = {}
    for step, group, norm in norms:
        if norm > 0 and math.isfinite(norm):
            by_bin = values.setdefault(group, [[] for _ in range(bins)])
            by_bin[bin_of(step, total_steps, bins)].append(math.log(norm))
    return Envelope(bins, {g: tuple(middle_of(v) for v in by_bin) for g, by_bin in values.items()})


def middle_of(logs: Sequence[float]) -> Middle | None:
    """Compute the middle of a bin from values in the order of their steps; None for too few.

    The spread is that of neighbours: a trend through the bin, as at the start of lora_A, is none.
    """
    if len(logs) < LEAST_STEPS // 2:
        return None
    middle = median(logs)
    spread = _MAD_TO_DEVIATION * median(abs(b - a) for a, b in pairwise(logs)) / math.sqrt(2)
    return Middle(middle, _MEDIAN_ERROR * spread / math.sqrt(len(logs)))


def pass_through(
    passage: Passage, numbers: StepNumbers, envelope: Envelope, total_steps: int
) -> Passage:
    """Advance the passage by one step; a bin is judged when its last step is done.

    Args:
        passage: The passage so far.
        numbers: The step's numbers.
        envelope: The earlier run.
        total_steps: Optimizer steps of this run.
    """
    here = bin_of(numbers.step, total_steps, envelope.bins)
    width = math.ceil(total_steps / envelope.bins)
    if numbers.step % math.ceil(width / KEPT_VALUES) == 0:
        logs = dict(passage.logs)
        for group, of_group in numbers.groups.items():
            norm = of_group.grad_norm
            if norm > 0 and math.isfinite(norm):
                logs[group] = (*logs.get(group, ()), math.log(norm))
        passage = Passage(here, logs, passage.beyond, passage.departed)
    last = numbers.step >= total_steps
    if not last and bin_of(numbers.step + 1, total_steps, envelope.bins) == here:
        return passage
    return _judged(passage, envelope, here, total_steps)


def _judged(passage: Passage, envelope: Envelope, here: int, total_steps: int) -> Passage:
    beyond: dict[str, int] = {}
    departures: list[Departure] = []
    for group, logs in passage.logs.items():
        there = envelope.middles.get(group, (None,) * envelope.bins)[here]
        own = middle_of(logs)
        if there is None or own is None:
            continue
        off = own.log_norm - there.log_norm
        deviation = math.hypot(own.deviation, there.deviation)
        allowed = max(math.log(FACTOR), DEVIATIONS * deviation)
        if abs(off) <= allowed:
            continue
        sign = 1 if off > 0 else -1
        before = passage.beyond.get(group, 0)
        beyond[group] = before + sign if before * sign > 0 else sign
        if abs(beyond[group]) >= BINS_IN_A_ROW:
            first = here - abs(beyond[group]) + 1
            since = math.ceil(first * total_steps / envelope.bins) + 1
            departures.append(Departure(group, math.exp(off), math.exp(allowed), since))
    worst = max(departures, key=lambda d: abs(math.log(d.ratio)), default=None)
    return Passage(here + 1, {}, beyond, worst)
