"""What is lost in a sum and in an update, against values worked out by hand or naively."""

import math

import pytest
import torch
from torch import Tensor, nn

from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor, GroupRange
from kubelora_trainer.optim.moments import Damping
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.accumulation_probe import AccumulationProbe, absorbed_ratio
from kubelora_trainer.telemetry.element_sampling import GroupSample, SlotSums
from kubelora_trainer.telemetry.update_probe import UpdateProbe

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def one_group(size: int, samples: int = 1 << 20) -> GroupSample:
    return GroupSample([GroupRange("down.lora_A", 0, size, range(1))], CPU, samples)


def test_samples_are_bounded_and_walk_over_every_column() -> None:
    width = 640
    flat = torch.arange(width * 64)
    row = one_group(width * 64, samples=10_000).take(flat)[0]
    assert 3_000 < row.numel() <= 10_000
    assert len(set((row % width).tolist())) == width


def test_groups_of_different_size_are_reduced_each_over_its_own_elements() -> None:
    flat = torch.tensor([1.0, 2.0, 3.0, 10.0])
    sample = GroupSample([GroupRange("a", 0, 3, range(1)), GroupRange("b", 3, 4, range(1, 2))], CPU)
    assert sample.mean(sample.take(flat)).tolist() == [2.0, 10.0]
    assert sample.total(sample.take(flat)).tolist() == [6.0, 10.0]
    sample.put(flat, -sample.take(flat))
    assert flat.tolist() == [-1.0, -2.0, -3.0, -10.0]
    sample.zero(flat)
    assert flat.tolist() == [0.0] * 4


def test_sampled_sums_find_their_slot() -> None:
    slots = buffers_of([1.0, 2.0], [3.0], [4.0, 5.0]).slots
    sample = GroupSample([GroupRange("down.lora_A", 0, 5, range(1))], CPU)
    sums = SlotSums(sample, slots)
    assert sums.of(sample.take(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))).tolist() == [3, 3, 9]
    assert sums.counts.tolist() == [2, 1, 2]


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
    old, new = torch.tensor([before], dtype=BF16), torch.tensor([addend], dtype=BF16)
    assert float(absorbed_ratio(one_group(len(before)), old, new, old + new)[0]) == expected


def accumulated(
    grads: Tensor, dtype: torch.dtype, start: int = 0
) -> tuple[AccumulationProbe, Tensor]:
    """Probe and buffer after a window of ``grads``, of which the first ``start`` went unseen."""
    flat = torch.zeros(grads.shape[1], dtype=dtype)
    for grad in grads[:start].to(dtype):
        flat += grad
    probe = AccumulationProbe(flat, one_group(grads.shape[1]))
    probe.begin_window(range(len(grads)), complete=start == 0, fresh=start == 0)
    for index in range(start, len(grads)):
        probe.before(index)
        flat += grads[index].to(dtype)
        probe.after(index)
    return probe, flat


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_probe_leaves_the_sum_that_autograd_would_have_made(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(3, 40, generator=generator) * torch.tensor([[300.0], [1.0], [1.0]])
    plain = torch.zeros(40, dtype=dtype)
    for grad in grads.to(dtype):
        plain += grad
    probe, probed = accumulated(grads, dtype)
    assert torch.equal(plain, probed)
    assert float(probe.absorbed[0]) == pytest.approx(naive_absorbed(grads.to(dtype)))


def naive_absorbed(grads: Tensor) -> float:
    total = (grads[0] + grads[1]).tolist()
    own = grads[2].tolist()
    after = (grads[0] + grads[1] + grads[2]).tolist()
    new = sum(abs(g) for g, a, s in zip(own, total, after, strict=True) if s == a)
    old = sum(abs(a) for g, a, s in zip(own, total, after, strict=True) if s == g)
    return float(max(new / sum(map(abs, own)), old / sum(map(abs, total))))


def test_the_error_of_a_bf16_sum_is_told_to_the_last_digit() -> None:
    # 256 + 1 rounds to 256 each time: the sum stays 256 where 259 is right.
    probe, _ = accumulated(torch.tensor([[256.0], [1.0], [1.0], [1.0]]), BF16)
    assert float(probe.error[0]) == pytest.approx(3 / 259, rel=1e-12)


@pytest.mark.parametrize("count", [8, 64])
def test_like_sized_addends_err_by_the_known_law(count: int) -> None:
    # Each of the additions rounds a partial sum; the errors add up like a random walk:
    # 1.7e-3 * sqrt((K + 1) / 2) of the sum, measured for normal gradients.
    grads = torch.randn(count, 20_000, generator=torch.Generator().manual_seed(1)).to(BF16)
    probe, _ = accumulated(grads, BF16)
    law = 1.7e-3 * math.sqrt((count + 1) / 2)
    assert float(probe.error[0]) == pytest.approx(law, rel=0.15)


def test_coherent_addends_drift_far_beyond_the_law() -> None:
    grads = torch.rand(1024, 500, generator=torch.Generator().manual_seed(2)).to(BF16)
    probe, _ = accumulated(grads, BF16)
    assert float(probe.error[0]) > 0.4  # 58 % were measured; the law for K = 1024 says 4 %


def test_a_sum_that_was_not_zeroed_is_an_error_too() -> None:
    flat = torch.full((4,), 2.0, dtype=BF16)
    probe = AccumulationProbe(flat, one_group(4))
    probe.begin_window(range(2), complete=True, fresh=True)
    for index in range(2):
        probe.before(index)
        flat += 1.0
        probe.after(index)
    assert flat.tolist() == [4.0] * 4
    assert float(probe.error[0]) == 1.0  # 4 where 2 is right


def test_no_error_is_told_of_an_fp32_sum_or_of_a_window_half_seen() -> None:
    grads = torch.ones(4, 3)
    assert math.isnan(float(accumulated(grads, FP32)[0].error[0]))
    assert math.isnan(float(accumulated(grads, BF16, start=2)[0].error[0]))
    assert float(accumulated(grads, BF16)[0].error[0]) == 0.0


def test_a_window_of_one_micro_step_absorbs_nothing() -> None:
    assert float(accumulated(torch.ones(1, 3), FP32)[0].absorbed[0]) == 0.0


def buffers_of(*factors: list[float], plan: PrecisionPlan | None = None) -> AdapterBuffers:
    return AdapterBuffers(
        [
            Factor(f"down.{index}", "down.lora_A", nn.Parameter(torch.tensor([values])))
            for index, values in enumerate(factors)
        ],
        plan or PrecisionPlan(FP32, FP32, FP32),
    )


class Memory:
    """An optimizer's state, given by hand."""

    def __init__(
        self,
        first: list[float] | None = None,
        second: list[float] | None = None,
        damping: Damping | None = None,
        dtype: torch.dtype = FP32,
        shadow_decay: float | None = None,
    ) -> None:
        self.shadow_decay = shadow_decay
        self.first_moment = None if first is None else torch.tensor(first, dtype=dtype)
        self.second_moment = None if second is None else torch.tensor(second, dtype=dtype)
        self.damping = damping


def probed_update(
    buffers: AdapterBuffers, memory: Memory, change: list[float], second: list[float] | None = None
) -> UpdateProbe:
    """A step that adds ``change`` to the weights and leaves ``second`` as second moment."""
    sample = GroupSample(buffers.groups, CPU)
    probe = UpdateProbe(buffers, memory, sample)
    probe.before()
    buffers.masters.add_(torch.tensor(change, dtype=buffers.masters.dtype))
    if second is not None and memory.second_moment is not None:
        memory.second_moment.copy_(torch.tensor(second))
    probe.after()
    return probe


def test_updates_below_the_spacing_of_bf16_are_lost() -> None:
    # Below 1.0 bf16 numbers lie 2^-8 apart, so 1e-5 is rounded away; around 1e-4 they lie 2^-21
    # apart, and it arrives. The last element has no momentum and does not count.
    buffers = buffers_of([1.0, 1e-4, 1.0], plan=PrecisionPlan(BF16, BF16, BF16))
    probe = probed_update(buffers, Memory([1.0, 1.0, 0.0]), [-1e-5, -1e-5, 0.0])
    assert float(probe.lost[0]) == pytest.approx(1 / 3)


def test_the_same_update_arrives_in_fp32() -> None:
    probe = probed_update(buffers_of([1.0, 1e-4]), Memory([1.0, 1.0]), [-1e-5, -1e-5])
    assert float(probe.lost[0]) == 0.0


def test_the_change_is_told_as_its_root_mean_square_by_group_and_by_factor() -> None:
    probe = probed_update(buffers_of([0.0, 0.0], [0.0, 0.0]), Memory(), [0.3, -0.3, 0.4, 0.0])
    assert probe.slot_scale.tolist() == pytest.approx([0.3, math.sqrt(0.08)])
    assert float(probe.scale[0]) == pytest.approx(math.sqrt((0.09 + 0.09 + 0.16) / 4))


def test_second_moments_that_keep_their_bits_are_stuck_where_the_gradient_differs() -> None:
    buffers = buffers_of([0.0] * 5)
    buffers.gradient.copy_(torch.tensor([0.1, 2.0, 0.0, 0.0, 1.0]))
    memory = Memory(second=[1.0, 1.0, 1.0, 0.0, 1.0])
    # g² is 0.01, 4, 0, 0 and 1. The first three should move v = 1, and the second alone does;
    # v = g² = 0 and v = g² = 1 need not.
    probe = probed_update(buffers, memory, [0.0] * 5, second=[1.0, 1.003, 1.0, 0.0, 1.0])
    assert float(probe.stuck[0]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("dtype", "expected"), [(BF16, 1.0), (FP32, 0.0)])
def test_a_bf16_second_moment_is_stuck_once_gradients_drop(
    dtype: torch.dtype, expected: float
) -> None:
    # v := 0.999 v + 0.001 g² takes 0.1 % off; bf16 numbers lie 0.4 to 0.8 % apart.
    second = torch.linspace(1e-6, 3e-6, 50).to(dtype)
    after = (second * 0.999).tolist()
    buffers = buffers_of([0.0] * 50)
    buffers.gradient.fill_(1e-6)
    memory = Memory(second=second.tolist(), dtype=dtype)
    probe = probed_update(buffers, memory, [0.0] * 50, second=after)
    assert float(probe.stuck[0]) == expected


def test_a_square_that_underflows_leaves_the_moment_stuck() -> None:
    # (1e-24)² = 1e-48 is below fp32's smallest number.
    buffers = buffers_of([0.0, 0.0])
    buffers.gradient.fill_(1e-24)
    probe = probed_update(buffers, Memory(second=[0.0, 0.0]), [0.0] * 2, second=[0.0, 0.0])
    assert float(probe.stuck[0]) == 1.0


def test_damping_is_the_mean_share_of_the_denominator_that_is_not_eps() -> None:
    # After one step with beta2 0.999: v = 0.001 g², so sqrt(v̂) = |g|. With eps 1e-4:
    # 1e-4 / 2e-4 = 0.5, 3e-4 / 4e-4 = 0.75; the element without a gradient is not counted.
    buffers = buffers_of([0.0] * 3)
    memory = Memory(second=[0.0] * 3, damping=Damping(eps=1e-4, correction=torch.tensor(0.001)))
    probe = probed_update(buffers, memory, [0.0] * 3, second=[1e-11, 9e-11, 0.0])
    assert float(probe.damping[0]) == pytest.approx((0.5 + 0.75) / 2, rel=1e-6)


def test_without_momentum_a_weight_with_a_gradient_was_meant_to_move() -> None:
    # The first moves, the second should have, the third has no gradient.
    buffers = buffers_of([1.0, 1.0, 1.0])
    buffers.gradient.copy_(torch.tensor([1.0, 1.0, 0.0]))
    probe = probed_update(buffers, Memory(), [0.5, 0.0, 0.0])
    assert float(probe.lost[0]) == pytest.approx(1 / 3)


def test_an_optimizer_without_moments_gives_the_change_alone() -> None:
    probe = probed_update(buffers_of([1.0]), Memory(), [0.5])
    assert float(probe.scale[0]) == 0.5
    assert math.isnan(float(probe.stuck[0]))
    assert math.isnan(float(probe.damping[0]))
