"""The start-up contract: each way to break it ends with the module's name."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kubelora_api.training_spec import Optimizer
from kubelora_trainer.health.startup_checks import (
    FirstGradients,
    ReachedModules,
    check_dtypes,
    check_finite,
    check_fresh_adapter,
)
from kubelora_trainer.optim.adamw import FlatAdamW
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.step_metrics import GroupNumbers, StepNumbers
from kubelora_trainer.utils.errors import NumericalError
from tests.trainer.fixtures.engine import DEFAULT, Engine, Loss, tiny_factors


def numbers(
    norms: list[float], rate: float = 1e-3, nonfinite: int = 0, loss: float = 1.0
) -> StepNumbers:
    group = GroupNumbers(1.0, 1.0, 0.0, nonfinite, 0.0, 0.0, 0.0)
    total = sum(n * n for n in norms) ** 0.5
    return StepNumbers(
        7, rate, loss, 1, total, {"down.lora_A": group}, norms, norms, step_size=rate
    )


def buffers_of(factors: list[Factor]) -> AdapterBuffers:
    return AdapterBuffers(factors, DEFAULT)


def test_the_types_in_use_are_told() -> None:
    buffers = buffers_of(tiny_factors())
    assert check_dtypes(buffers, FlatAdamW(buffers, Optimizer())) == (
        "working copy bf16, gradients fp32, master weights fp32, optimizer state fp32"
    )


def test_a_gradient_of_another_type_is_refused() -> None:
    buffers = buffers_of(tiny_factors())
    parameter = buffers.slots[0].factor.parameter
    parameter.grad = None
    parameter.grad_dtype = torch.bfloat16
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(NumericalError, match=r"gradients are torch\.bfloat16, but torch\.float32"):
        check_dtypes(buffers, FlatAdamW(buffers, Optimizer()))


def test_a_fresh_adapter_with_a_filled_lora_b_is_refused() -> None:
    factors = tiny_factors()
    check_fresh_adapter(buffers_of(factors))
    factors = tiny_factors()
    factors[3].parameter.data[0, 0] = 1e-8
    with pytest.raises(NumericalError, match=r"up_blocks\.0\.to_q: a fresh adapter"):
        check_fresh_adapter(buffers_of(factors))


def test_a_module_that_no_backward_pass_reaches_is_named() -> None:
    factors = tiny_factors()
    reached = ReachedModules(buffers_of(factors))
    (factors[0].parameter.sum() + factors[1].parameter.sum()).backward()
    with pytest.raises(NumericalError, match=r"^up_blocks\.0\.to_q: no backward pass reached"):
        reached.check()


def test_all_reached_is_silent_and_leaves_no_hooks() -> None:
    factors = tiny_factors()
    reached = ReachedModules(buffers_of(factors))
    sum((f.parameter.sum() for f in factors), torch.zeros(())).backward()
    reached.check()
    reached.check()
    assert not any(f.parameter._post_accumulate_grad_hooks for f in factors)


def test_lora_b_must_have_a_gradient_in_the_first_step_that_moves() -> None:
    slots = buffers_of(tiny_factors()).slots  # down.A, down.B, up.A, up.B
    first = FirstGradients(slots, moved_before=0)
    first.observe(numbers([0.0, 0.0, 0.0, 0.0], rate=0.0))  # warm-up begins with 0
    first.observe(numbers([0.0, 1.0, 0.0, 1.0]))
    first.observe(numbers([1.0, 1.0, 1.0, 1.0]))
    first.observe(numbers([0.0, 0.0, 0.0, 0.0]))  # later on this is the watchdog's business
    broken = FirstGradients(slots, moved_before=0)
    with pytest.raises(NumericalError, match=r"up_blocks\.0\.to_q: the gradient of lora_B"):
        broken.observe(numbers([0.0, 1.0, 0.0, 0.0]))


def test_lora_a_must_have_a_gradient_in_the_second() -> None:
    slots = buffers_of(tiny_factors()).slots
    broken = FirstGradients(slots, moved_before=0)
    broken.observe(numbers([0.0, 1.0, 0.0, 1.0]))
    with pytest.raises(NumericalError, match=r"down_blocks\.0\.to_q: the gradient of lora_A"):
        broken.observe(numbers([0.0, 1.0, 1.0, 1.0]))


def test_lora_a_is_waited_for_while_fp16_rounds_lora_b_to_zero() -> None:
    # The first step of a warm-up to 1e-5 over 1000 steps moves lora_B by 1e-8, which is 0 in fp16.
    slots = buffers_of(tiny_factors()).slots
    first = FirstGradients(slots, moved_before=0, compute=torch.float16)
    for step in range(1, 110):  # 5.995e-5 in all; fp16's smallest normal number is 6.104e-5
        first.observe(numbers([0.0, 1.0, 0.0, 1.0], rate=1e-8 * step))
    first.observe(numbers([0.0, 1.0, 0.0, 1.0], rate=1.10e-6))
    with pytest.raises(NumericalError, match=r"down_blocks\.0\.to_q, up.*gradient of lora_A"):
        first.observe(numbers([0.0, 1.0, 0.0, 1.0], rate=1.11e-6))


def test_magnitudes_must_have_a_gradient_in_the_first_step_and_are_no_business_of_the_second() -> (
    None
):
    slots = buffers_of(tiny_factors(dora=True)).slots  # A, B of down and up, then both magnitudes
    FirstGradients(slots, 0).observe(numbers([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    with pytest.raises(NumericalError, match=r"up_blocks\.0\.to_q: the gradient of lora_magn"):
        FirstGradients(slots, 0).observe(numbers([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]))
    FirstGradients(slots, 1).observe(numbers([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))


def test_a_window_whose_every_weight_is_0_is_not_judged() -> None:
    slots = buffers_of(tiny_factors()).slots
    first = FirstGradients(slots, moved_before=0)
    first.observe(numbers([0.0, 0.0, 0.0, 0.0], loss=0.0))
    with pytest.raises(NumericalError, match="gradient of lora_B"):
        first.observe(numbers([0.0, 0.0, 0.0, 0.0]))


def test_a_resumed_run_counts_the_steps_before() -> None:
    slots = buffers_of(tiny_factors()).slots
    FirstGradients(slots, moved_before=5).observe(numbers([0.0, 0.0, 0.0, 0.0]))


def test_an_infinite_norm_of_finite_gradients_is_told_apart() -> None:
    slots = buffers_of(tiny_factors()).slots
    with pytest.raises(NumericalError, match="too large for fp32"):
        check_finite(slots, numbers([float("inf"), 1.0, 1.0, 1.0]))


@pytest.mark.parametrize("poisoned", [0, 4, 17])
def test_a_nan_ends_the_run_before_it_reaches_a_weight(tmp_path: Path, poisoned: int) -> None:
    # Steps take three micro-steps: the weights must stay as after the last clean step.
    clean = Engine(tmp_path / "clean")
    clean.train(micro_steps=max(1, poisoned // 3 * 3 + 1))
    engine = Engine(tmp_path / "nan")
    objective = engine.parts.objective

    def poisonous(micro_step: int) -> Loss:
        loss = objective(micro_step)
        factor = float("nan") if micro_step == poisoned else 1.0
        return Loss(loss.loss_sum * factor, loss.samples)

    object.__setattr__(engine.parts, "objective", poisonous)
    with pytest.raises(NumericalError, match=r"step \d: \d+ gradient elements are NaN or infinite"):
        engine.train()
    assert torch.equal(engine.buffers.masters, clean.buffers.masters)
    moments = engine.optimizer.tensors()
    assert torch.isfinite(moments["second_moment"]).all()
    assert engine.saved == []
    assert engine.reporter.watch.found["GradientNonFinite"].severity == "critical"


def test_an_unreached_module_ends_a_run(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    down, up = engine.factors[0].parameter, engine.factors[1].parameter

    def half(micro_step: int) -> Loss:
        return Loss((up @ (down @ torch.ones(5, dtype=down.dtype))).float().sum(), 1)

    object.__setattr__(engine.parts, "objective", half)
    with pytest.raises(NumericalError, match=r"up_blocks\.0\.to_q: no backward pass"):
        engine.train()


def test_a_parameter_outside_the_buffers_is_caught(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.factors[0].parameter.data = nn.Parameter(torch.ones(2, 5, dtype=torch.bfloat16)).data
    with pytest.raises(NumericalError, match=r"weight of down_blocks\.0\.to_q\.lora_A"):
        engine.train()


def test_every_precision_plan_trains(tmp_path: Path) -> None:
    for index, plan in enumerate(
        PrecisionPlan(c, a, m)
        for c in (torch.bfloat16, torch.float32)
        for a in (torch.bfloat16, torch.float32)
        for m in (torch.bfloat16, torch.float32)
    ):
        engine = Engine(tmp_path / str(index), precision=plan, learningRate=1e-2)
        engine.train()
        assert engine.buffers.working.dtype == plan.compute
        assert torch.isfinite(engine.buffers.masters).all()
        assert all(s.of(engine.buffers.masters).any() for s in engine.buffers.slots)
