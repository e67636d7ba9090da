"""Every number of the telemetry against values worked out by hand or by a naive computation."""

import math

import pytest
import torch
from torch import Tensor, nn

from kubelora_api.training_spec import Optimizer
from kubelora_trainer.buffers import AdapterBuffers, Factor, GroupRange
from kubelora_trainer.optimizer import FlatAdamW
from kubelora_trainer.precision import PrecisionPlan
from kubelora_trainer.probes import AbsorptionProbe, UpdateProbe, absorbed_ratio, sampled_views
from kubelora_trainer.step_numbers import StepNumbers
from kubelora_trainer.telemetry import GradientTelemetry, StepFacts

BF16, FP32 = torch.bfloat16, torch.float32
DEFAULT = PrecisionPlan(BF16, FP32, FP32)


def measured(
    gradients: dict[str, list[float]], plan: PrecisionPlan = DEFAULT, judge: bool = True
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
    telemetry = GradientTelemetry(buffers, optimizer.first_moment)
    telemetry.measure_gradient()
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


def test_the_update_ratio_is_void_where_the_rate_is_next_to_nothing() -> None:
    numbers = measured({"down.a.lora_A": [1.0]}, judge=False)
    assert math.isnan(numbers.groups["down.lora_A"].update_lost_ratio)


def test_chunks_give_the_same_counts_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1000, generator=generator)
    values[::7] = 0.0
    values[3], values[500] = math.inf, 1e-42
    whole = measured({"down.a.lora_A": values.tolist()})
    monkeypatch.setattr("kubelora_trainer.telemetry.CHUNK_ELEMENTS", 64)
    chunked = measured({"down.a.lora_A": values.tolist()})
    group = chunked.groups["down.lora_A"]
    assert group == whole.groups["down.lora_A"]
    assert group.grad_zero_ratio == int((values == 0).sum()) / 1000
    assert group.grad_nonfinite == 1
    assert group.grad_underflow_ratio == 1 / (1000 - int((values == 0).sum()))


@pytest.mark.parametrize(
    ("before", "addend", "expected"),
    [
        # 256 + 1 = 257 rounds back to 256 in bf16: all of the addend's mass is lost.
        ([256.0], [1.0], 1.0),
        # 1 + 256 = 256: the addend survives, all of the old mass is lost.
        ([1.0], [256.0], 1.0),
        # 2 + 1 = 3 is exact.
        ([2.0], [1.0], 0.0),
        # Of the masses 1 and 3 the first is lost.
        ([256.0, 1.0], [1.0, 3.0], 0.25),
        ([0.0, 0.0], [1.0, 3.0], 0.0),
        ([0.0], [0.0], 0.0),
    ],
)
def test_absorbed_mass_both_ways(before: list[float], addend: list[float], expected: float) -> None:
    old, new = torch.tensor(before, dtype=BF16), torch.tensor(addend, dtype=BF16)
    assert float(absorbed_ratio(old, new, old + new)) == expected


def test_the_probe_leaves_the_sum_that_autograd_would_have_made() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(3, 40, generator=generator) * torch.tensor([[300.0], [1.0], [1.0]])
    plain, probed = (torch.zeros(40, dtype=BF16) for _ in range(2))
    probe = AbsorptionProbe(probed, [GroupRange("down.lora_A", 0, 40)], samples=40)
    for index, grad in enumerate(grads.to(BF16)):
        plain += grad
        if index == 2:
            probe.begin()
        probed += grad
        if index == 2:
            probe.end()
    assert torch.equal(plain, probed)
    lost = naive_absorbed(grads.to(BF16))
    assert 0 < lost < 1
    assert float(probe.ratios[0]) == pytest.approx(lost)


def naive_absorbed(grads: Tensor) -> float:
    total = (grads[0] + grads[1]).tolist()
    own = grads[2].tolist()
    after = (grads[0] + grads[1] + grads[2]).tolist()
    new = sum(abs(g) for g, a, s in zip(own, total, after, strict=True) if s == a)
    old = sum(abs(a) for g, a, s in zip(own, total, after, strict=True) if s == g)
    return float(max(new / sum(map(abs, own)), old / sum(map(abs, total))))


def test_updates_below_the_spacing_of_bf16_are_lost() -> None:
    # Below 1.0 bf16 numbers lie 2^-8 apart, so 1e-5 is rounded away; around 1e-4 they lie 2^-21
    # apart, and it arrives. The last element has no momentum and does not count.
    masters = torch.tensor([1.0, 1e-4, 1.0], dtype=BF16)
    moment = torch.tensor([1.0, 1.0, 0.0], dtype=BF16)
    probe = UpdateProbe(masters, moment, [GroupRange("down.lora_A", 0, 3)])
    probe.begin()
    masters.sub_(torch.tensor([1e-5, 1e-5, 0.0], dtype=BF16))
    probe.end()
    assert float(probe.ratios[0]) == pytest.approx(1 / 3)


def test_the_same_update_arrives_in_fp32() -> None:
    masters = torch.tensor([1.0, 1e-4])
    probe = UpdateProbe(masters, torch.ones(2), [GroupRange("down.lora_A", 0, 2)])
    probe.begin()
    masters.sub_(1e-5)
    probe.end()
    assert float(probe.ratios[0]) == 0.0


def test_samples_are_bounded_and_walk_over_every_column() -> None:
    width = 640
    flat = torch.arange(width * 64)
    (view,) = sampled_views(flat, [GroupRange("down.lora_A", 0, width * 64)], samples=10_000)
    assert 3_000 < view.numel() <= 10_000
    assert len(set((view % width).tolist())) == width
