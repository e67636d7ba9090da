"""Every number of the telemetry against values worked out by hand or by a naive computation."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from kubelora_api.training_spec import Optimizer
from kubelora_trainer.optim.adamw import FlatAdamW
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.gradient_telemetry import GradientTelemetry
from kubelora_trainer.telemetry.host_transfer import StepFacts
from kubelora_trainer.telemetry.step_metrics import GROUP_FIELDS, StepNumbers
from tests.trainer.fixtures.engine import Engine

BF16, FP32 = torch.bfloat16, torch.float32
DEFAULT = PrecisionPlan(BF16, FP32, FP32)


def measured(
    gradients: dict[str, list[float]],
    plan: PrecisionPlan = DEFAULT,
    judge: bool = True,
    loss_scale: float | None = None,
) -> StepNumbers:
    """Numbers of one step whose gradient, by factor ``block.module.lora_X``, is given."""
    factors = [
        Factor(
            name.rpartition(".")[0],
            f"{name.split('.')[0]}.{name.rpartition('.')[2]}",
            nn.Parameter(torch.ones(1, len(values))),
        )
        for name, values in gradients.items()
    ]
    buffers = AdapterBuffers(factors, plan)
    for slot in buffers.slots:
        values = torch.tensor(gradients[slot.factor.name])
        slot.of(buffers.gradient).copy_(values.view(slot.shape))
    optimizer = FlatAdamW(buffers, Optimizer())
    scale = None if loss_scale is None else torch.tensor(loss_scale)
    telemetry = GradientTelemetry(buffers, optimizer, loss_scale=scale)
    telemetry.begin_window(range(4), 0)
    norm = telemetry.measure_gradient()
    with telemetry.update():
        optimizer.step(1e-3, non_finite=(~torch.isfinite(norm)).float())
    facts = StepFacts(step=4, learning_rate=1e-3, samples=4, judge_updates=judge)
    return telemetry.pack(facts, torch.tensor(10.0, dtype=torch.float64)).read()


def test_norms_zeros_and_the_largest_value_by_group() -> None:
    numbers = measured(
        {"down.a.lora_A": [3.0, 0.0], "down.b.lora_A": [0.0, -4.0], "up.a.lora_B": [12.0]}
    )
    down, up = numbers.groups["down.lora_A"], numbers.groups["up.lora_B"]
    assert (down.grad_norm, down.grad_absmax, down.grad_zero_ratio) == (5.0, 4.0, 0.5)
    assert (up.grad_norm, up.grad_absmax, up.grad_zero_ratio) == (12.0, 12.0, 0.0)
    assert numbers.grad_norm == 13.0
    assert list(numbers.factor_norms) == [3.0, 4.0, 12.0]
    assert numbers.loss == 2.5
    assert numbers.nonfinite == 0


def test_non_finite_elements_are_counted_one_by_one() -> None:
    numbers = measured({"down.a.lora_A": [math.nan, math.inf, 1.0], "up.a.lora_A": [1.0]})
    assert numbers.groups["down.lora_A"].grad_nonfinite == 2
    assert numbers.groups["up.lora_A"].grad_nonfinite == 0
    assert math.isnan(numbers.groups["down.lora_A"].grad_absmax)
    assert not math.isfinite(numbers.grad_norm)


def test_underflow_counts_what_bf16_has_no_number_for() -> None:
    # bf16's smallest subnormal is 2^-133 = 9.18e-41; below half of it values round to zero.
    numbers = measured({"down.a.lora_A": [4e-41, 1e-40, 1.0, 0.0]})
    assert numbers.groups["down.lora_A"].grad_underflow_ratio == pytest.approx(1 / 3)
    in_fp32 = measured({"down.a.lora_A": [4e-41, 1.0]}, PrecisionPlan(FP32, FP32, FP32))
    assert in_fp32.groups["down.lora_A"].grad_underflow_ratio == 0.0


def test_underflow_in_fp16_is_judged_on_scaled_gradients() -> None:
    """fp16's smallest subnormal is 2^-24 = 6e-8: 1e-8 is lost in it, and kept if scaled by 2^16."""
    plan = PrecisionPlan(torch.float16, FP32, FP32)
    values = {"down.a.lora_A": [1e-8, 1e-13, 1.0, 0.0]}
    plain = measured(values, plan).groups["down.lora_A"]
    scaled = measured(values, plan, loss_scale=2.0**16)
    assert plain.grad_underflow_ratio == pytest.approx(2 / 3)
    assert scaled.groups["down.lora_A"].grad_underflow_ratio == pytest.approx(1 / 3)
    assert scaled.loss_scale == 2.0**16


def test_underflow_of_magnitudes_is_judged_in_the_type_they_are_computed_in() -> None:
    """fp32 has numbers down to 1.4e-45; the passes' fp16 ends at 6e-8."""
    plan = PrecisionPlan(torch.float16, FP32, FP32)
    numbers = measured({"down.a.lora_A": [1e-9, 1.0], "down.a.lora_magnitude_vector": [1e-9]}, plan)
    assert numbers.groups["down.lora_A"].grad_underflow_ratio == 0.5
    assert numbers.groups["down.lora_magnitude_vector"].grad_underflow_ratio == 0.0
    assert plan.narrowest_in("down.lora_A") == torch.float16
    assert plan.narrowest_in("down.lora_magnitude_vector") == FP32
    lossy = PrecisionPlan(BF16, BF16, FP32)
    assert lossy.narrowest_in("down.lora_magnitude_vector") == BF16


def test_lost_updates_of_magnitudes_are_told_under_their_own_group() -> None:
    """A magnitude of 1 that moves by the rate, 1e-3, stands still in bf16: it has 1 and 0.996."""
    gradients = {"down.a.lora_A": [1.0], "down.a.lora_magnitude_vector": [1.0, -1.0]}
    lost = {
        masters: measured(gradients, PrecisionPlan(BF16, FP32, masters)).groups
        for masters in (BF16, FP32)
    }
    assert lost[BF16]["down.lora_magnitude_vector"].update_lost_ratio == 1.0
    assert lost[FP32]["down.lora_magnitude_vector"].update_lost_ratio == 0.0
    assert lost[FP32]["down.lora_magnitude_vector"].update_scale == pytest.approx(1.0, rel=1e-3)


def test_the_balance_is_of_the_pair_and_not_of_the_magnitudes() -> None:
    # A = (1, 1) and B = (1): A·gAᵀ = 3 + 4 is gBᵀ·B = 7.
    factors = {
        "down.a.lora_A": [3.0, 4.0],
        "down.a.lora_B": [7.0],
        "down.a.lora_magnitude_vector": [5.0],
    }
    numbers = measured(factors, PrecisionPlan(FP32, FP32, FP32))
    assert numbers.groups["down.lora_A"].lora_balance == pytest.approx(0.0, abs=1e-7)
    assert numbers.groups["down.lora_B"].lora_balance == pytest.approx(0.0, abs=1e-7)
    assert math.isnan(numbers.groups["down.lora_magnitude_vector"].lora_balance)
    assert math.isnan(numbers.factor_balance[2])
    assert numbers.groups["down.lora_magnitude_vector"].grad_norm == 5.0


def test_the_update_ratio_is_void_where_the_rate_is_next_to_nothing() -> None:
    numbers = measured({"down.a.lora_A": [1.0]}, judge=False)
    assert math.isnan(numbers.groups["down.lora_A"].update_lost_ratio)


def test_counts_are_those_of_the_whole_group() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator)
    values[::7] = 0.0
    values[3], values[500] = math.inf, 1e-42
    group = measured({"down.a.lora_A": values.tolist()}).groups["down.lora_A"]
    assert group.grad_zero_ratio == int((values == 0).sum()) / 1000
    assert group.grad_nonfinite == 1
    assert group.grad_underflow_ratio == 1 / (1000 - int((values == 0).sum()))


def test_the_norm_after_clipping_is_measured_on_what_the_optimizer_gets() -> None:
    buffers = AdapterBuffers(
        [Factor("down.a", "down.lora_A", nn.Parameter(torch.ones(1, 2)))], DEFAULT
    )
    optimizer = FlatAdamW(buffers, Optimizer())
    telemetry = GradientTelemetry(buffers, optimizer)
    buffers.gradient.copy_(torch.tensor([3.0, 4.0]))
    telemetry.measure_gradient()
    buffers.scale(torch.tensor(0.1))
    with telemetry.update():
        optimizer.step(1e-3, non_finite=torch.tensor(0.0))
    facts = StepFacts(step=1, learning_rate=1e-3, samples=1, judge_updates=True)
    numbers = telemetry.pack(facts, torch.tensor(0.0), None, torch.tensor(0.25)).read()
    assert numbers.grad_norm == 5.0
    assert numbers.clipped_norm == pytest.approx(0.5)
    assert numbers.rank_divergence == 0.25


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_adams_first_step_has_an_update_scale_of_one(scale: float) -> None:
    # Without decay Adam's first step is rate * sign(g), whatever the gradient's size; a factor
    # with a rate of its own is judged by that rate.
    factor = Factor("down.a", "down.lora_A", nn.Parameter(torch.zeros(1, 4)))
    buffers = AdapterBuffers([factor], PrecisionPlan(FP32, FP32, FP32))
    optimizer = FlatAdamW(buffers, Optimizer(weight_decay=0.0), [scale])
    telemetry = GradientTelemetry(buffers, optimizer, [scale])
    buffers.gradient.copy_(torch.tensor([3.0, -4.0, 0.1, 20.0]))
    telemetry.measure_gradient()
    with telemetry.update():
        optimizer.step(2e-3, non_finite=torch.tensor(0.0))
    facts = StepFacts(1, 2e-3, samples=1, judge_updates=True)
    numbers = telemetry.pack(facts, torch.tensor(0.0)).read()
    group = numbers.groups["down.lora_A"]
    assert group.update_scale == pytest.approx(1.0, rel=1e-6)
    assert numbers.factor_update_scale[0] == pytest.approx(1.0, rel=1e-6)
    assert group.update_rms == pytest.approx(2e-3 * scale, rel=1e-6)  # the weights' own change
    assert group.optimizer_stuck_ratio == 0.0
    # sqrt(v̂) = |g| after one step, so g / (g + 1e-8) is next to 1.
    assert group.adam_eps_damping_ratio == pytest.approx(1.0, rel=1e-6)
    still = telemetry.pack(StepFacts(1, 0.0, 1, judge_updates=False), torch.tensor(0.0)).read()
    assert math.isnan(still.groups["down.lora_A"].update_scale)


@pytest.mark.parametrize(("refreshed", "stale"), [(True, 0.0), (False, 0.75)])
def test_a_working_copy_that_is_not_refreshed_shows_in_every_weight_that_moved(
    refreshed: bool, stale: float
) -> None:
    # Rate 0.5 moves 1 to 0.5, and a gradient of 0 moves nothing.
    factor = Factor("down.a", "down.lora_A", nn.Parameter(torch.ones(1, 4, dtype=torch.bfloat16)))
    buffers = AdapterBuffers([factor], DEFAULT)
    optimizer = FlatAdamW(buffers, Optimizer(weight_decay=0.0))
    telemetry = GradientTelemetry(buffers, optimizer)
    buffers.gradient.copy_(torch.tensor([3.0, -4.0, 0.0, 20.0]))
    telemetry.measure_gradient()
    if not refreshed:
        buffers.publish_masters = lambda: None  # type: ignore[method-assign]
    with telemetry.update():
        optimizer.step(0.5, non_finite=torch.tensor(0.0))
    facts = StepFacts(1, 0.5, samples=1, judge_updates=True)
    assert telemetry.pack(facts, torch.tensor(0.0)).read().working_copy_stale == stale


def test_masters_that_are_the_working_copy_are_never_stale() -> None:
    numbers = measured({"down.a.lora_A": [1.0]}, PrecisionPlan(FP32, FP32, FP32))
    assert numbers.working_copy_stale == 0.0


def test_a_step_that_a_non_finite_gradient_stopped_is_not_judged() -> None:
    numbers = measured({"down.a.lora_A": [math.nan, 1.0]})
    assert math.isnan(numbers.groups["down.lora_A"].update_lost_ratio)
    assert math.isnan(numbers.groups["down.lora_A"].optimizer_stuck_ratio)


def test_memory_of_the_process_is_told_in_bytes() -> None:
    numbers = measured({"down.a.lora_A": [1.0]})
    # This process has torch loaded: more than 100 MiB, less than a terabyte.
    assert 1e8 < numbers.host_memory_peak < 1e12
    assert math.isnan(numbers.device_memory_peak)


@pytest.mark.parametrize("cut", [16, 17, 18])
def test_a_window_resumed_in_its_middle_tells_the_same_numbers(tmp_path: Path, cut: int) -> None:
    lossy = PrecisionPlan(BF16, BF16, FP32)
    whole = Engine(tmp_path / "whole", precision=lossy)
    whole.train()
    Engine(tmp_path / "cut", precision=lossy).train(micro_steps=cut)
    resumed = Engine(tmp_path / "cut", precision=lossy)
    resumed.train()
    for group in whole.buffers.groups:
        for name in GROUP_FIELDS.keys() - {"kubelora_grad_underflow_ratio"}:
            values = [
                engine.registry.get_sample_value(name, {"group": group.name})
                for engine in (whole, resumed)
            ]
            assert values[0] is not None
            assert values[0] == values[1], name
    error = whole.registry.get_sample_value(
        "kubelora_accumulation_error_ratio", {"group": "down.lora_B"}
    )
    assert error is not None
    assert 0 < error < 0.02
    assert resumed.registry.get_sample_value("kubelora_backward_passes") == 3.0
    assert resumed.registry.get_sample_value("kubelora_dead_modules") == 0.0
