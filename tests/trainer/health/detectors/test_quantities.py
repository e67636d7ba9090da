"""The quantities that limits are on, each against a value worked out by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from kubelora_api import thresholds
from kubelora_api.thresholds import THRESHOLDS, Threshold
from kubelora_api.training_spec import Training
from kubelora_trainer.health.detectors.quantities import (
    FactorFacts,
    Memory,
    RunFacts,
    at_resume,
    facts_of,
    values_of,
)
from kubelora_trainer.health.detectors.step_limits import StepLimits
from kubelora_trainer.health.watch_state import WatchState, from_json, to_json
from kubelora_trainer.health.watchdog import Watchdog
from kubelora_trainer.lora.factor_names import MAGNITUDE
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.step_metrics import GroupNumbers, StepNumbers
from tests.trainer.fixtures.watching import after, watchdog

A, B, E = "down.lora_A", "down.lora_B", "embed.lora_A"
FACTS = RunFacts(
    compute="bf16",
    max_grad_norm=1.0,
    peak_rate=1e-4,
    total_steps=100,
    dropout=0.0,
    factors=(
        FactorFacts(A, 100, False),
        FactorFacts(B, 50, False),
        FactorFacts(A, 300, True),
        FactorFacts(B, 150, True),
        FactorFacts(E, 10, False),
    ),
)
WELL = GroupNumbers(1.0, 0.1, 0.0, 0, 0.0, 0.0, 0.01, math.nan, 0.4, 0.0, 0.999, 0.003, 4e-5)
STEP = StepNumbers(
    step=8,
    learning_rate=1e-4,
    loss=0.5,
    samples=8,
    grad_norm=4.0,
    groups={A: WELL, B: WELL, E: WELL},
    factor_norms=[1.0] * 5,
    factor_absmax=[0.1] * 5,
    clipped_norm=1.0,
    backward_passes=4,
    micro_steps=4,
)


def group(**fields: float) -> dict[str, GroupNumbers]:
    return {A: replace(WELL, **fields), B: WELL, E: WELL}  # type: ignore[arg-type]


def value(
    threshold: Threshold,
    step: StepNumbers,
    at: str | None = None,
    facts: RunFacts = FACTS,
    memory: Memory | None = None,
) -> float:
    return values_of(threshold, step, facts, memory or Memory())[at]


def test_the_error_of_a_sum_is_judged_by_the_law_of_its_length() -> None:
    # K = 7: the law gives 1.7e-3 * sqrt(4) = 3.4e-3.
    step = replace(STEP, micro_steps=7, groups=group(accumulation_error_ratio=0.0102))
    assert value(thresholds.ACCUMULATION_ERROR, step, A) == pytest.approx(3.0)


def test_zeros_are_counted_in_modules_that_have_a_gradient_and_not_in_embeddings() -> None:
    # 400 elements of lora_A, 300 of them in a module without a gradient; 310 zeros in all.
    step = replace(
        STEP, factor_norms=[1.0, 1.0, 0.0, 1.0, 1.0], groups=group(grad_zero_ratio=310 / 400)
    )
    assert value(thresholds.GRADIENT_UNDERFLOW, step, A) == pytest.approx(0.1)
    assert math.isnan(value(thresholds.GRADIENT_UNDERFLOW, step, E))


def test_only_lora_b_is_judged_by_eps() -> None:
    step = replace(STEP, groups=group(adam_eps_damping_ratio=0.01))
    assert values_of(thresholds.UPDATES_DAMPED, step, FACTS, Memory()) == {B: 0.999}


def test_layers_that_read_the_text_are_no_dead_modules_where_they_are_all_silent() -> None:
    silent = replace(STEP, dead_modules=1, factor_norms=[1.0, 1.0, 0.0, 0.0, 1.0])
    assert math.isnan(value(thresholds.DEAD_MODULES, silent))
    another = replace(STEP, dead_modules=1, factor_norms=[0.0, 0.0, 1.0, 1.0, 1.0])
    assert value(thresholds.DEAD_MODULES, another) == 1.0


def test_silent_doras_that_read_the_text_are_modules_of_three_factors() -> None:
    dora = [FactorFacts(f"down.{name}", 20, True) for name in ("lora_A", "lora_B", MAGNITUDE)]
    facts = replace(FACTS, factors=(*FACTS.factors[:2], *dora, *dora))  # two of them
    silent = replace(STEP, dead_modules=2, factor_norms=[1.0, 1.0, *[0.0] * 6])
    assert math.isnan(value(thresholds.DEAD_MODULES, silent, facts=facts))
    another = replace(silent, dead_modules=3, factor_norms=[0.0, 1.0, *[0.0] * 6])
    assert value(thresholds.DEAD_MODULES, another, facts=facts) == 3.0


def test_backward_passes_are_counted_per_micro_batch() -> None:
    assert value(thresholds.BACKWARD_PASSES_MISSING, replace(STEP, backward_passes=1)) == 0.25


def test_a_rate_of_zero_is_judged_in_the_first_nine_tenths() -> None:
    still = replace(STEP, learning_rate=0.0)
    assert value(thresholds.LEARNING_RATE_ZERO, replace(still, step=90)) == 0.0
    assert math.isnan(value(thresholds.LEARNING_RATE_ZERO, replace(still, step=91)))


def test_a_rate_is_compared_with_its_peak() -> None:
    step = replace(STEP, learning_rate=2e-4)
    assert value(thresholds.LEARNING_RATE_ABOVE_PLAN, step) == pytest.approx(2.0)


def test_a_loss_is_compared_with_the_median_of_the_first_25() -> None:
    memory = Memory(first_losses=(0.1,) * 10 + (0.2,) * 5 + (9.0,) * 10)
    assert value(thresholds.LOSS_DIVERGED, STEP, memory=memory) == pytest.approx(2.5)
    few = Memory(first_losses=(0.1,) * 24)
    assert math.isnan(value(thresholds.LOSS_DIVERGED, STEP, memory=few))


@pytest.mark.parametrize(
    ("dropout", "samples", "rows", "judged"),
    [
        (0.9, 8, 4, False),  # 0.9^32 = 3 % of the columns
        (0.9, 80, 4, True),
        (0.1, 1, 4, True),  # 1e-4
        (0.1, 1, 1, False),  # a layer that reads one vector a sample: 10 %
        (0.1, 4, 1, True),
        (0.0, 1, 1, True),
    ],
)
def test_zeros_of_lora_a_are_not_judged_where_dropout_leaves_columns_without_input(
    dropout: float, samples: int, rows: int, judged: bool
) -> None:
    factors = (*FACTS.factors[:2], replace(FACTS.factors[2], rows=rows), *FACTS.factors[3:])
    facts = replace(FACTS, dropout=dropout, factors=factors)
    step = replace(STEP, samples=samples)
    assert math.isnan(value(thresholds.GRADIENT_UNDERFLOW, step, A, facts)) != judged
    assert value(thresholds.GRADIENT_UNDERFLOW, step, B, facts) == 0.0


def test_the_identity_is_judged_where_its_products_have_four_numbers_or_more() -> None:
    # Sums of squared ranks: one module of rank 1, three of them, four of them, one of rank 2.
    for ranks, judged in (
        ((1,), False),
        ((1, 1, 1), False),
        ((1, 1, 1, 1), True),
        ((2,), True),
    ):
        factors = tuple(
            FactorFacts(group, 100, False, rank=rank)
            for group in ("down.lora_A", "down.lora_B")
            for rank in ranks
        )
        facts = replace(FACTS, factors=factors)
        step = replace(STEP, groups=dict.fromkeys(("down.lora_A", "down.lora_B"), WELL))
        found = value(thresholds.GRADIENT_IMBALANCE, step, "down.lora_A", facts=facts)
        assert math.isnan(found) is not judged


def test_the_rank_of_a_convolution_is_its_channels_between_both_factors() -> None:
    shapes = {"lora_A": (3, 8, 3, 3), "lora_B": (16, 3, 1, 1), "magnitude": (16,)}
    buffers = AdapterBuffers(
        [Factor("conv", f"down.{n}", nn.Parameter(torch.zeros(s))) for n, s in shapes.items()],
        PrecisionPlan(torch.float32, torch.float32, torch.float32),
    )
    assert [f.rank for f in facts_of(Training(steps=1), buffers, 1).factors] == [3, 3, 0]


def test_the_size_of_a_change_is_that_of_the_weights_whatever_rate_a_factor_has() -> None:
    # Two lora_A of rank 4, with 25 and 75 inputs: 100 numbers of 1/75 and 300 of 1/225, squared.
    fresh = math.sqrt((100 / 75 + 300 / 225) / 400)
    for group in (A, B):
        found = value(thresholds.UPDATES_TOO_LARGE, STEP, group)
        assert found == pytest.approx(4e-5 / fresh)


@pytest.mark.parametrize(
    ("norm", "clipped", "most", "off"),
    [
        (4.0, 1.0, 1.0, 0.0),
        (0.5, 0.5, 1.0, 0.0),
        (4.0, 4.0, 0.0, 0.0),  # clipping is off
        (4.0, 1e-4, 1.0, 0.9999),
        (0.5, 1.0, 1.0, 1.0),
        (0.0, 0.0, 1.0, math.nan),
    ],
)
def test_a_clipped_norm_is_compared_with_the_smaller_of_norm_and_limit(
    norm: float, clipped: float, most: float, off: float
) -> None:
    step = replace(STEP, grad_norm=norm, clipped_norm=clipped)
    found = value(thresholds.CLIPPING_WRONG, step, facts=replace(FACTS, max_grad_norm=most))
    assert found == pytest.approx(off, abs=1e-5, nan_ok=True)


def run(*steps: StepNumbers, state: WatchState | None = None) -> WatchState:
    return after(steps, FACTS, state)


def resumed(state: WatchState, facts: RunFacts = FACTS) -> Watchdog:
    return watchdog(StepLimits(facts), saved=from_json(to_json(state)), reason="resumed")


def memory(state: WatchState) -> Any:
    return state.detectors["memory"]


def many(count: int, step: StepNumbers, first: int = 1) -> list[StepNumbers]:
    return [replace(step, step=first + i) for i in range(count)]


BROKEN: dict[str, StepNumbers] = {
    "AccumulationError": replace(STEP, groups=group(accumulation_error_ratio=0.05)),
    "OptimizerStuck": replace(STEP, groups=group(optimizer_stuck_ratio=0.9)),
    "UpdatesDamped": replace(
        STEP, groups={A: WELL, B: replace(WELL, adam_eps_damping_ratio=0.5), E: WELL}
    ),
    "GradientImbalance": replace(STEP, groups=group(lora_balance=0.2)),
    "GradientUnderflow": replace(STEP, groups=group(grad_zero_ratio=0.05)),
    "DeadModules": replace(STEP, dead_modules=2),
    "BackwardPassesMissing": replace(STEP, backward_passes=1),
    "LearningRateZero": replace(STEP, learning_rate=0.0),
    "LearningRateAbovePlan": replace(STEP, learning_rate=3e-4),
    "UpdatesTooLarge": replace(STEP, groups=group(update_rms=0.1)),
    "ClippingWrong": replace(STEP, clipped_norm=1e-4),
    "WorkingCopyStale": replace(STEP, working_copy_stale=1e-4),
    "RanksDiverged": replace(STEP, rank_divergence=1e-9),
}


@pytest.mark.parametrize("finding", BROKEN)
def test_each_fault_gives_its_finding_and_no_other(finding: str) -> None:
    threshold = next(t for t in THRESHOLDS if t.finding == finding)
    needed = threshold.skip_steps + threshold.window
    state = run(*many(needed, BROKEN[finding]))
    assert set(state.found) == {finding}
    assert state.found[finding].since_step == needed
    assert state.found[finding].severity == "critical"
    assert run(*many(needed - 1, BROKEN[finding])).found == {}


def test_a_sound_run_shows_nothing() -> None:
    state = run(*many(30, STEP))
    assert state.found == {}
    assert state.verdict == "Healthy"


def test_a_loss_that_leaves_its_range_is_found_and_one_wild_window_is_not() -> None:
    wild = replace(STEP, loss=500.0)
    assert run(*many(25, STEP), *many(12, wild, 26), *many(25, STEP, 38)).found == {}
    state = run(*many(25, STEP), *many(25, wild, 26))
    assert state.found["LossDiverged"].value == pytest.approx(1000.0)


def test_a_first_handful_of_late_timesteps_is_no_measure_for_the_others() -> None:
    # The best possible loss is 0.004 at the last timestep, 0.1 to 0.7 in the first half.
    late, early = replace(STEP, loss=0.005), replace(STEP, loss=0.3)
    steps = [*many(7, late), *many(3, early, 8), *many(3, late, 11), *many(80, early, 14)]
    assert run(*steps).found == {}


def test_limits_follow_the_compute_type() -> None:
    step = replace(STEP, groups=group(lora_balance=0.02))
    state = after(many(10, step), replace(FACTS, compute="fp32"))
    assert set(state.found) == {"GradientImbalance"}
    assert state.found["GradientImbalance"].threshold == 0.01
    assert run(*many(10, step)).found == {}


def scales(*values: float, first: int) -> list[StepNumbers]:
    steps = []
    for i, value in enumerate(values):
        groups = dict.fromkeys(STEP.groups, replace(WELL, update_scale=value))
        steps.append(replace(STEP, step=first + i, groups=groups))
    return steps


@pytest.mark.parametrize("lost", [True, False])
def test_an_optimizer_that_began_anew_shows_in_the_first_three_steps(lost: bool) -> None:
    again = resumed(run(*many(20, STEP)))
    # Adam from nothing: |m / sqrt(v)| is 1 in its first step, then falls, for noise, as 0.74, 0.62.
    for step in scales(*((1.0, 0.74, 0.62) if lost else (0.45, 0.38, 0.41)), first=21):
        again.on_step(step)
    assert ("OptimizerStateLost" in again.state.found) == lost
    if lost:
        assert again.state.found["OptimizerStateLost"].value == pytest.approx(0.74 / 0.4)


def test_steps_of_an_optimizer_that_finds_its_rate_may_grow_after_a_resume() -> None:
    # Its second moment remembers gradients that were scaled by a smaller rate.
    again = resumed(run(*many(20, STEP)), replace(FACTS, finds_rate=True))
    for step in scales(0.8, 1.0, 1.2, first=21):
        again.on_step(step)
    assert "OptimizerStateLost" not in again.state.found


def test_sizes_that_jump_later_than_at_a_resume_are_no_lost_state() -> None:
    again = resumed(run(*many(20, STEP)))
    for step in scales(0.4, 0.4, 0.4, 1.0, 1.0, 1.0, first=21):
        again.on_step(step)
    assert again.state.found == {}


def test_a_resume_in_the_first_steps_has_nothing_to_compare_with() -> None:
    four, five = (Memory(scales={A: (0.4,) * count}) for count in (4, 5))
    assert (at_resume(four).before, at_resume(five).before) == ({}, {A: 0.4})


def restored(state: WatchState) -> WatchState:
    return from_json(to_json(state))


@pytest.mark.parametrize("change", [restored, lambda s: s], ids=["saved", "kept"])
def test_what_steps_are_compared_with_survives_a_checkpoint(
    change: Callable[[WatchState], WatchState],
) -> None:
    state = change(run(*many(12, STEP)))
    assert memory(state)["first_losses"] == [0.5] * 12
    assert memory(state)["scales"][A] == [0.4] * 5
