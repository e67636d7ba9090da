"""The range of an earlier run: bins, medians, limits, by values worked out by hand."""

import math
from dataclasses import replace

import pytest

from kubelora_trainer.health.baseline_envelope import (
    Envelope,
    Middle,
    Passage,
    bin_of,
    bins_of,
    envelope_of,
    middle_of,
    pass_through,
)
from tests.trainer.health.detectors.test_quantities import STEP, WELL, A, B

FLAT = Envelope(4, {A: (Middle(0.0, 0.0),) * 4, B: (Middle(0.0, 0.0),) * 4})
"""Norm 1 throughout, without any spread."""


@pytest.mark.parametrize(
    ("there", "here", "bins"),
    [(20_000, 20_000, 24), (96, 20_000, 12), (20_000, 24, 3), (23, 500, 0)],
)
def test_bins_hold_eight_steps_of_the_shorter_run_and_are_24_at_most(
    there: int, here: int, bins: int
) -> None:
    assert bins_of(there, here) == bins


def test_bins_are_of_progress_not_of_steps() -> None:
    assert [bin_of(step, 100, 4) for step in (1, 25, 26, 100)] == [0, 0, 1, 3]
    assert [bin_of(step, 1000, 4) for step in (1, 250, 251, 1000)] == [0, 0, 1, 3]


def test_a_middle_is_the_median_of_logarithms_with_its_standard_error() -> None:
    # Median 3; of the steps between neighbours (2 1 2 1) 1.5, which is sqrt(2) deviations.
    middle = middle_of([1.0, 3.0, 2.0, 4.0, 3.0])
    assert middle is not None
    assert middle.log_norm == 3.0
    deviation = 1.4826 * 1.5 / math.sqrt(2)
    assert middle.deviation == pytest.approx(1.2533 * deviation / math.sqrt(5))
    assert middle_of([1.0, 2.0, 3.0]) is None


def test_norms_that_are_zero_or_not_finite_belong_to_no_bin() -> None:
    norms = [(step, A, 2.0) for step in range(1, 33)]
    norms += [(1, A, 0.0), (2, A, math.inf)]
    envelope = envelope_of(norms, 32, 4)
    assert envelope.middles[A] == (Middle(math.log(2.0), 0.0),) * 4


def walk(norm: dict[int, float], steps: int = 32, envelope: Envelope = FLAT) -> list[Passage]:
    """Passages after each step; norms of both groups by bin, 1 where nothing is said."""
    passage, seen = Passage(), []
    for step in range(1, steps + 1):
        value = norm.get(bin_of(step, steps, envelope.bins), 1.0)
        groups = {A: replace(WELL, grad_norm=value), B: WELL}
        passage = pass_through(passage, replace(STEP, step=step, groups=groups), envelope, steps)
        seen.append(passage)
    return seen


def first(passages: list[Passage]) -> int | None:
    return next((i + 1 for i, p in enumerate(passages) if p.departed), None)


def test_two_bins_in_a_row_beyond_twice_are_found_when_the_second_is_whole() -> None:
    passages = walk({1: 0.3, 2: 0.3})
    assert first(passages) == 24
    departed = passages[23].departed
    assert departed is not None
    assert (departed.group, departed.since) == (A, 9)
    assert departed.ratio == pytest.approx(0.3)
    assert departed.allowed == pytest.approx(2.0)
    assert passages[-1].departed is None  # the last bin is well again


@pytest.mark.parametrize("norm", [{1: 0.3}, {1: 0.3, 3: 0.3}, {1: 0.3, 2: 4.0}, {1: 1.9, 2: 0.51}])
def test_one_bin_or_less_than_twice_or_both_ways_is_no_departure(norm: dict[int, float]) -> None:
    assert first(walk(norm)) is None


def test_four_deviations_widen_the_range() -> None:
    # The two runs' deviations add as squares: 4 * 0.4 = 1.6, a factor of 4.95.
    wide = Envelope(4, {A: (Middle(0.0, 0.4),) * 4})
    assert first(walk({1: 0.25, 2: 0.25}, envelope=wide)) is None
    assert first(walk({1: 0.19, 2: 0.19}, envelope=wide)) == 24


def test_a_group_that_the_baseline_lacks_is_not_judged() -> None:
    assert first(walk({1: 0.1, 2: 0.1}, envelope=Envelope(4, {}))) is None


def test_a_bin_keeps_no_more_values_than_a_median_needs() -> None:
    longest = max(len(logs) for p in walk({}, 4000) for logs in p.logs.values())
    assert longest <= 64
