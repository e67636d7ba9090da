"""Draws are pure functions of (seed, micro-step, slot), and no image is dropped."""

import statistics
from collections import Counter

import pytest

from kubelora_api.training_spec import Training
from kubelora_trainer.data.sampler import SampleOrder
from kubelora_trainer.training.plan import TrainingPlan, build_plan


def test_every_epoch_sees_every_sample_once_with_a_short_last_micro_batch() -> None:
    order = SampleOrder(seed=3, samples=10, batch_size=4)
    assert order.micro_steps_per_epoch == 3
    for epoch in range(4):
        batches = [order.samples_of(3 * epoch + n) for n in range(3)]
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert sorted(draw.sample for batch in batches for draw in batch) == list(range(10))


def test_epochs_are_in_different_orders_and_so_are_seeds() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        order = SampleOrder(seed, samples=50, batch_size=1)
        return [order.samples_of(50 * number + n)[0].sample for n in range(50)]

    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != epoch(2, 0)
    assert epoch(1, 0) != list(range(50))


def test_a_micro_step_draws_the_same_whatever_was_asked_before() -> None:
    ahead = [SampleOrder(7, 9, 2).samples_of(step) for step in range(40)]
    order = SampleOrder(7, 9, 2)
    assert [order.samples_of(step) for step in reversed(range(40))] == ahead[::-1]


def test_draws_are_uniform_and_differ_by_purpose_slot_and_micro_step() -> None:
    order = SampleOrder(0, samples=4, batch_size=4)
    draws = [draw for step in range(500) for draw in order.samples_of(step)]
    for values in (
        [draw.across for draw in draws],
        [draw.down for draw in draws],
        [draw.timestep for draw in draws],
        [draw.caption for draw in draws],
    ):
        assert all(0 <= value < 1 for value in values)
        assert statistics.mean(values) == pytest.approx(0.5, abs=4 * (1 / 12 / 2000) ** 0.5)
        assert statistics.pstdev(values) == pytest.approx((1 / 12) ** 0.5, rel=0.05)
        assert len(set(values)) == 2000
    seeds = [s for draw in draws for s in (draw.noise_seed, draw.posterior_seed)]
    assert len(set(seeds)) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert statistics.correlation(
        [draw.across for draw in draws], [draw.timestep for draw in draws]
    ) == pytest.approx(0, abs=0.1)


def test_each_place_of_an_epoch_is_taken_by_all_samples_alike() -> None:
    order = SampleOrder(11, samples=5, batch_size=1)
    first = Counter(order.samples_of(5 * epoch)[0].sample for epoch in range(1000))
    assert all(abs(count - 200) < 5 * (1000 * 0.2 * 0.8) ** 0.5 for count in first.values())


def test_windows_span_epochs_and_epochs_end_with_a_shorter_window() -> None:
    """10 samples by 4 are 3 micro-steps an epoch; 3 epochs are 9, in windows of 4: 4, 4, 1."""
    order = SampleOrder(0, samples=10, batch_size=4)
    plan = build_plan(Training(epochs=3, batch_size=4, gradient_accumulation=4), order)
    assert plan == TrainingPlan(optimizer_steps=3, micro_steps=9, accumulation=4)
    assert [list(plan.window(n)) for n in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_run_by_steps_has_whole_windows() -> None:
    plan = build_plan(Training(steps=5, gradient_accumulation=3), SampleOrder(0, 2, 1))
    assert plan == TrainingPlan(optimizer_steps=5, micro_steps=15, accumulation=3)
    assert plan.window(4) == range(12, 15)
