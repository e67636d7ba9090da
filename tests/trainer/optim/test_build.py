"""Each optimizer against its formula, written out again here in fp64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from kubelora_api.schema import JsonObject
from kubelora_api.training_spec import Optimizer, OptimizerName, Training
from kubelora_trainer.health.startup_checks import check_resumed
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.build import build_optimizer
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.optim.prodigy import rate_warning
from kubelora_trainer.telemetry.host_transfer import PendingNumbers
from kubelora_trainer.telemetry.step_metrics import GROUP_FIELDS, StepNumbers
from kubelora_trainer.training.loop import MicroBatchOutput
from kubelora_trainer.utils.errors import ConfigurationError, NumericalError
from tests.trainer.fixtures.engine import Engine, Loss

BF16, FP32 = torch.bfloat16, torch.float32
PLAN = PrecisionPlan(BF16, FP32, FP32)
NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
FINITE, NOT_FINITE = torch.zeros(()), torch.ones(())
SHAPES = {"down.a.lora_A": (4, 6), "down.a.lora_B": (6, 4), "up.b.lora_A": (64, 64)}
Update = Callable[[Tensor, Sequence[Tensor]], Tensor]


def buffers_of(plan: PrecisionPlan = PLAN) -> AdapterBuffers:
    generator = torch.Generator().manual_seed(1)
    return AdapterBuffers(
        [
            Factor(
                name.rpartition(".")[0],
                f"{name.split('.')[0]}.{name.rpartition('.')[2]}",
                nn.Parameter(torch.randn(shape, generator=generator)),
            )
            for name, shape in SHAPES.items()
        ],
        plan,
    )


def gradients(steps: int, numel: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(numel, generator=generator) * 10.0 ** (i % 3 - 2) for i in range(steps)]


def run(
    buffers: AdapterBuffers, optimizer: AdapterOptimizer, grads: Sequence[Tensor], rate: float
) -> None:
    for gradient in grads:
        buffers.gradient.copy_(gradient)
        optimizer.step(rate, FINITE)


def compare(spec: Optimizer, update: Update, rate: float, *, rtol: float = 1e-5) -> None:
    """Six steps by the optimizer, and by ``update`` for each factor in its true shape."""
    buffers = buffers_of()
    grads = gradients(6, buffers.numel)
    started = buffers.masters.double()
    run(buffers, build_optimizer(buffers, spec), grads, rate)
    for slot in buffers.slots:
        expected = update(slot.of(started).clone(), [slot.of(g).double() for g in grads])
        found = slot.of(buffers.masters).double()
        moved = (expected - slot.of(started)).abs().max()
        assert moved > 0
        torch.testing.assert_close(found, expected, rtol=0, atol=float(moved) * rtol + 3e-7)
        assert torch.equal(slot.factor.parameter, slot.of(buffers.masters).to(BF16))


def test_adamw_is_loshchilovs_formula() -> None:
    rate, beta1, beta2, eps, decay = 1e-2, 0.8, 0.95, 1e-4, 0.1

    def update(p: Tensor, grads: Sequence[Tensor]) -> Tensor:
        m, v = torch.zeros_like(p), torch.zeros_like(p)
        for t, g in enumerate(grads, start=1):
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
            root = (v / (1 - beta2**t)).sqrt() + eps
            p = p * (1 - rate * decay) - rate * m / (1 - beta1**t) / root
        return p

    spec = Optimizer(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay)
    compare(spec, update, rate)


def test_lion_follows_the_sign_of_its_momentum() -> None:
    rate, beta1, beta2, decay = 1e-2, 0.9, 0.99, 0.01  # the defaults

    def update(p: Tensor, grads: Sequence[Tensor]) -> Tensor:
        m = torch.zeros_like(p)
        for g in grads:
            p = p * (1 - rate * decay) - rate * (beta1 * m + (1 - beta1) * g).sign()
            m = beta2 * m + (1 - beta2) * g
        return p

    compare(Optimizer(name="lion"), update, rate)


@pytest.mark.parametrize("relative", [False, True])
def test_adafactor_divides_by_the_root_of_rows_times_columns(relative: bool) -> None:
    # Shazeer and Stern, algorithm 4 with beta2 = 1 - t^-0.8 and d = 1.
    rate = 1e-2

    def rms(x: Tensor) -> float:
        return float(x.square().mean().sqrt())

    def update(p: Tensor, grads: Sequence[Tensor]) -> Tensor:
        rows = torch.zeros(p.shape[0], dtype=torch.float64)
        columns = torch.zeros(p.shape[1], dtype=torch.float64)
        for t, g in enumerate(grads, start=1):
            beta2 = 1 - t**-0.8
            square = g**2 + 1e-30
            rows = beta2 * rows + (1 - beta2) * square.mean(1)
            columns = beta2 * columns + (1 - beta2) * square.mean(0)
            u = g / (torch.outer(rows, columns) / rows.mean()).sqrt()
            size = max(1e-3, rms(p)) if relative else 1.0
            p = p - rate * size * u / max(1.0, rms(u))
        return p

    compare(Optimizer(name="adafactor", scale_parameter=relative), update, rate)


def test_prodigy_finds_its_rate_by_mishchenkos_algorithm() -> None:
    # Algorithm 1 (Adam version) with gamma = 1, no weight decay, over all factors together.
    beta1, beta2, d0 = 0.9, 0.999, 1e-3
    buffers = buffers_of()
    grads = [0.1 * g + 1.0 for g in gradients(6, buffers.numel)]  # all in one direction
    p = p0 = buffers.masters.double()
    m, v, s = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
    r, d = 0.0, d0
    for raw in grads:
        g = raw.double()
        r = math.sqrt(beta2) * r + (1 - math.sqrt(beta2)) * d**2 * float(g @ (p0 - p))
        s = math.sqrt(beta2) * s + (1 - math.sqrt(beta2)) * d**2 * g
        m, v = beta1 * m + (1 - beta1) * d * g, beta2 * v + (1 - beta2) * d**2 * g**2
        rate = d  # a step is taken with the rate that was known when it began
        found = r / float(s.abs().sum())
        d = max(d, found)
        p = p - rate * m / (v.sqrt() + d * 1e-8)
    optimizer = build_optimizer(buffers, Optimizer(name="prodigy", initial_rate=d0))
    run(buffers, optimizer, grads, 1.0)
    torch.testing.assert_close(buffers.masters.double(), p, rtol=1e-5, atol=1e-6)
    assert optimizer.scalars()["groups"][0]["d"] == pytest.approx(d, rel=1e-4)
    assert d > 5 * d0


def test_eight_bits_of_state_stay_near_adamw() -> None:
    # The first step is AdamW's to the last bits (lr·sign(g)); later ones see a state of 8 bits.
    buffers, exact = buffers_of(), buffers_of()
    grads = gradients(20, buffers.numel)
    started = buffers.masters.clone()
    optimizer = build_optimizer(buffers, Optimizer(name="adamw8bit", weight_decay=0.0))
    reference = build_optimizer(exact, Optimizer(weight_decay=0.0))
    run(buffers, optimizer, grads[:1], 1e-2)
    torch.testing.assert_close(started - buffers.masters, 1e-2 * grads[0].sign(), atol=1e-4, rtol=0)
    run(exact, reference, grads[:1], 1e-2)
    run(buffers, optimizer, grads[1:], 1e-2)
    run(exact, reference, grads[1:], 1e-2)
    apart = (buffers.masters - exact.masters).norm() / (exact.masters - started).norm()
    assert 0 < apart < 0.1
    types = {name: tensor.dtype for name, tensor in optimizer.tensors().items()}
    assert types["up.b.lora_A/state1"] == torch.uint8  # 4096 elements; smaller ones stay in fp32
    assert types["down.a.lora_A/state1"] == FP32


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_is_not_finite_moves_neither_weight_nor_state(name: OptimizerName) -> None:
    buffers = buffers_of()
    optimizer = build_optimizer(buffers, Optimizer(name=name))
    first, second = gradients(2, buffers.numel)
    run(buffers, optimizer, [first], 1e-2)
    weights = buffers.masters.clone()
    state = {n: t.clone() for n, t in optimizer.tensors().items()}
    numbers = optimizer.scalars()
    second[7] = math.nan
    buffers.gradient.copy_(second)
    optimizer.step(1e-2, NOT_FINITE)
    assert torch.equal(buffers.masters, weights)
    assert optimizer.scalars() == numbers
    assert optimizer.tensors().keys() == state.keys()
    assert all(torch.equal(t, state[n]) for n, t in optimizer.tensors().items())


@pytest.mark.parametrize("name", NAMES)
def test_a_factors_own_rate_is_a_multiple_of_the_schedules(name: OptimizerName) -> None:
    if name == "prodigy":
        return  # it knows one rate alone
    plain, scaled = buffers_of(), buffers_of()
    started = plain.masters.clone()
    grads = gradients(1, plain.numel)
    spec = Optimizer(name=name, weight_decay=0.0)
    run(plain, build_optimizer(plain, spec), grads, 1e-2)
    run(scaled, build_optimizer(scaled, spec, [0.25, 1.0, 4.0]), grads, 1e-2)
    for slot, scale in zip(plain.slots, (0.25, 1.0, 4.0), strict=True):
        once = slot.of(plain.masters) - slot.of(started)
        often = slot.of(scaled.masters) - slot.of(started)
        torch.testing.assert_close(often, scale * once, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plan", [PLAN, PrecisionPlan(FP32, FP32, FP32)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_state_is_told_as_large_as_it_is(name: OptimizerName, plan: PrecisionPlan) -> None:
    buffers = buffers_of(plan)
    optimizer = build_optimizer(buffers, Optimizer(name=name))
    run(buffers, optimizer, gradients(1, buffers.numel), 1e-2)
    counted = sum(t.nbytes for t in optimizer.tensors().values() if t.ndim)
    assert optimizer.state_bytes == counted
    per_parameter = {"adamw": 8, "prodigy": 16, "lion": 4}
    if name in per_parameter:
        assert counted == per_parameter[name] * buffers.numel


def test_moments_are_read_flat_where_they_are_kept_element_by_element() -> None:
    kept = {}
    for name in NAMES:
        buffers = buffers_of()
        optimizer = build_optimizer(buffers, Optimizer(name=name))
        first, second = optimizer.first_moment, optimizer.second_moment
        kept[name] = (first is not None, second is not None)
        (gradient,) = gradients(1, buffers.numel)
        run(buffers, optimizer, [gradient], 1e-2)
        if second is not None:
            share = 1e-3 * (1e-12 if name == "prodigy" else 1.0)
            mean = second.index_select(0, torch.arange(buffers.numel))
            rtol = 0.7 if name == "adamw8bit" else 1e-5  # below a 1e-5th of the block's largest
            torch.testing.assert_close(mean, share * gradient.square(), rtol=rtol, atol=1e-9)
        if first is not None:  # the same tensor, filled: telemetry holds on to it
            share = {"lion": 0.01, "adamw": 0.1, "prodigy": 0.1 * 1e-6}[name]
            torch.testing.assert_close(first, share * gradient, rtol=1e-5, atol=0)
    assert kept == {
        "adamw": (True, True),
        "adamw8bit": (False, True),
        "adafactor": (False, False),
        "prodigy": (True, True),
        "lion": (True, False),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_counts_the_steps_that_the_state_has_taken_in(
    tmp_path: Path, name: OptimizerName
) -> None:
    Engine(tmp_path, optimizer={"name": name}).train()
    again = Engine(tmp_path, optimizer={"name": name})
    assert again.position.step == 6
    told = check_resumed(again.optimizer, again.position.step, 0, again.position.step)
    assert told == "optimizer state of 6 steps, as in the checkpoint's manifest"
    with pytest.raises(NumericalError, match=r"of step 6, .* taken in 5 gradients, but has 6"):
        check_resumed(again.optimizer, again.position.step, 1, again.position.step - 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_warms_up_from_rate_0_is_resumed_with_every_step_of_its_state(
    name: OptimizerName,
) -> None:
    buffers = buffers_of()
    optimizer = build_optimizer(buffers, Optimizer(name=name))
    first, *others = gradients(3, buffers.numel)
    run(buffers, optimizer, [first], 0.0)
    run(buffers, optimizer, others, 1e-2)
    # Prodigy returns before it counts a step whose rate is 0; the others count each step.
    assert optimizer.steps_done == (2 if name == "prodigy" else 3)
    assert check_resumed(optimizer, 3, 0, moved=2)
    with pytest.raises(NumericalError, match="taken in 4 gradients"):
        check_resumed(optimizer, 4, 0, moved=4)


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_that_leaves_the_optimizer_as_new_is_refused(
    tmp_path: Path, name: OptimizerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(tmp_path, optimizer={"name": name})
    first.train()
    monkeypatch.setattr(type(first.optimizer), "load", lambda *arguments: None)
    again = Engine(tmp_path, optimizer={"name": name})
    assert again.position.step == 6
    with pytest.raises(NumericalError, match="should have taken in 6 gradients, but has 0"):
        check_resumed(again.optimizer, again.position.step, 0, again.position.step)


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_without_the_optimizers_state_is_refused(
    tmp_path: Path, name: OptimizerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(tmp_path, optimizer={"name": name})
    anew: JsonObject = {"factors": {}, "groups": first.optimizer.scalars().get("groups")}
    with monkeypatch.context() as patch:
        patch.setattr(type(first.optimizer), "tensors", lambda optimizer: {})
        patch.setattr(type(first.optimizer), "scalars", lambda optimizer: anew)
        first.train()
    with pytest.raises((ConfigurationError, NumericalError), match=r"missing|but has 0"):
        resume_and_check(tmp_path, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_lacks_a_factor_or_a_number_does_not_fit(name: OptimizerName) -> None:
    buffers = buffers_of()
    trained = build_optimizer(buffers, Optimizer(name=name))
    run(buffers, trained, gradients(2, buffers.numel), 1e-2)
    tensors, scalars = trained.tensors(), trained.scalars()
    lacking = {n: t for n, t in tensors.items() if n.startswith("up.b.lora_A/") or "/" not in n}
    lacking.pop("second_moment", None)
    with pytest.raises(ValueError, match="is missing"):
        build_optimizer(buffers_of(), Optimizer(name=name)).load(lacking, scalars)
    if name == "prodigy":
        without = {**scalars, "groups": [{"d": 1e-6}]}
        with pytest.raises(ValueError, match="the parameter group's d_max is missing"):
            build_optimizer(buffers_of(), Optimizer(name=name)).load(tensors, without)


def test_steps_that_the_loss_scaler_left_out_are_not_expected_of_the_optimizer(
    tmp_path: Path,
) -> None:
    fp16 = PrecisionPlan(torch.float16, FP32, FP32)
    first = Engine(tmp_path, precision=fp16)
    real, poisoned = first.parts.objective, 4  # in the second of six windows

    def objective(micro_step: int) -> MicroBatchOutput:
        batch = real(micro_step)
        return Loss(batch.loss_sum * (1e6 if micro_step == poisoned else 1.0), batch.samples)

    first.parts = replace(first.parts, objective=objective)
    first.train()
    again = Engine(tmp_path, precision=fp16)
    assert again.scaler is not None
    skipped = int(again.scaler.skipped)
    assert skipped >= 1
    assert again.optimizer.steps_done == 6 - skipped
    assert check_resumed(again.optimizer, 6, skipped, 6 - skipped)


def resume_and_check(path: Path, name: OptimizerName) -> None:
    again = Engine(path, optimizer={"name": name})
    check_resumed(again.optimizer, again.position.step, 0, again.position.step)


def test_a_rate_that_prodigy_would_drown_in_is_told() -> None:
    prodigy = Optimizer(name="prodigy")
    assert Training(steps=1, optimizer=prodigy).peak_rate == 1.0
    assert rate_warning(Training(steps=1, optimizer=prodigy)) is None
    sentence = rate_warning(Training(steps=1, optimizer=prodigy, learning_rate=1e-4))
    assert sentence is not None
    assert "learningRate is 0.0001, and prodigy multiplies" in sentence
    assert rate_warning(Training(steps=1, learning_rate=1e-4)) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_watchdog_judges_a_run_of_every_optimizer(tmp_path: Path, name: OptimizerName) -> None:
    engine = Engine(tmp_path, rank=64, width=64, steps=12, optimizer={"name": name})
    engine.train()
    assert engine.reporter.watch.verdict == "Healthy"
    assert "UpdatesLost" in engine.reporter.watch.judged


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(6,), (1, 6, 1, 1)], ids=["linear", "convolution"])
def test_weight_decay_leaves_magnitudes_alone(name: OptimizerName, shape: tuple[int, ...]) -> None:
    """lora_B and the magnitudes have no gradient: decay alone would move them, and moves lora_B."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"lora_A": (4, 6), "lora_B": (6, 4), "lora_magnitude_vector": shape}
    factors = [
        Factor("a", f"down.{name}", nn.Parameter(1 + torch.rand(of, generator=generator)))
        for name, of in shapes.items()
    ]
    buffers = AdapterBuffers(factors, PLAN)
    before = buffers.masters.clone()
    optimizer = build_optimizer(buffers, Optimizer(name=name, weight_decay=0.5))
    buffers.by_factor(buffers.gradient)["a.lora_A"].fill_(1.0)
    optimizer.step(1.0 if name == "prodigy" else 1e-2, FINITE)
    now, was = buffers.by_factor(buffers.masters), buffers.by_factor(before)
    assert bool((now["a.lora_A"] != was["a.lora_A"]).all())
    assert bool((now["a.lora_B"] < was["a.lora_B"]).all())
    assert torch.equal(now["a.lora_magnitude_vector"], was["a.lora_magnitude_vector"])


@pytest.mark.parametrize("name", NAMES)
def test_magnitudes_follow_their_gradient(name: OptimizerName) -> None:
    """Of one sign, they grow; as fp32 numbers, also where a step is below bf16's spacing."""
    factors = [
        Factor("a", "down.lora_A", nn.Parameter(torch.ones(4, 6))),
        Factor("a", "down.lora_magnitude_vector", nn.Parameter(torch.full((6,), 1.5))),
    ]
    buffers = AdapterBuffers(factors, PLAN)
    optimizer = build_optimizer(buffers, Optimizer(name=name))
    rate = 1.0 if name == "prodigy" else 1e-4  # of which prodigy makes 1e-6
    run(buffers, optimizer, [torch.full((buffers.numel,), -1.0)] * 3, rate)
    found = buffers.by_factor(buffers.masters)["a.lora_magnitude_vector"]
    assert bool((found > 1.5).all())
    assert torch.equal(found, found[:1].expand(6))
    assert torch.equal(found.bfloat16(), torch.full((6,), 1.5).bfloat16())


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_step_is_measured_but_those_that_an_optimizer_has_no_base_for(
    tmp_path: Path, name: OptimizerName
) -> None:
    # As told in docs/numerics.md: lion has no second moment, adafactor has it factored alone. An
    # fp32 accumulator is not held against an fp32 one.
    engine = Engine(tmp_path, rank=64, width=64, optimizer={"name": name})
    seen: list[StepNumbers] = []
    expect = engine.reporter.expect

    def note(pending: PendingNumbers) -> None:
        expect(pending)
        seen.append(pending.read())

    engine.reporter.expect = note  # type: ignore[method-assign]
    engine.train()
    unknown = {
        field
        for group in seen[-1].groups.values()
        for field in GROUP_FIELDS.values()
        if math.isnan(getattr(group, field))
    }
    moments = {"optimizer_stuck_ratio", "adam_eps_damping_ratio"}
    without = moments if name in ("lion", "adafactor") else set()
    assert unknown == {"accumulation_error_ratio"} | without
