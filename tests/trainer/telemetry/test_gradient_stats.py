"""Both ways to sum a gradient up, on a CPU and on a device, say what a count by hand says."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry import gradient_stats as gradient_sums
from kubelora_trainer.telemetry.gradient_stats import DeviceSums, GradientSums, HostSums

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Open = Callable[[AdapterBuffers, Tensor | None], GradientSums]
both_ways = pytest.mark.parametrize("open_sums", [HostSums, DeviceSums])


def buffers_of(
    *gradients: list[float], compute: torch.dtype = BF16, accumulator: torch.dtype = FP32
) -> AdapterBuffers:
    """Two groups, down.lora_A and up.lora_A, by turns."""
    factors = [
        Factor(f"m{i}", ("down", "up")[i % 2] + ".lora_A", nn.Parameter(torch.zeros(1, len(g))))
        for i, g in enumerate(gradients)
    ]
    buffers = AdapterBuffers(factors, PrecisionPlan(compute, accumulator, FP32))
    for slot in buffers.slots:
        place = int(slot.factor.module[1:])
        slot.of(buffers.gradient).copy_(torch.tensor([gradients[place]]))
    return buffers


@both_ways
def test_norm_and_largest_value_are_of_each_slot_and_counts_of_each_group(open_sums: Open) -> None:
    buffers = buffers_of([3.0, -4.0], [0.0, -12.0, 5.0], [0.0, 0.0], [0.0])
    found = open_sums(buffers, None).measure()
    assert [slot.factor.module for slot in buffers.slots] == ["m0", "m2", "m1", "m3"]
    assert found["norm"].tolist() == [5.0, 0.0, 13.0, 0.0]
    assert found["absmax"].tolist() == [4.0, 0.0, 12.0, 0.0]
    assert found["counts"].tolist() == [[2, 0, 0], [2, 0, 0]]
    assert found["norm"].dtype == found["counts"].dtype == torch.float64


@both_ways
def test_a_value_that_is_not_finite_is_counted_and_shows_in_its_slot_alone(open_sums: Open) -> None:
    found = open_sums(buffers_of([1.0, math.nan], [math.inf, 2.0], [2.0]), None).measure()
    assert math.isnan(found["norm"][0])
    assert math.isnan(found["absmax"][0])
    assert found["norm"].tolist()[1:] == [2.0, math.inf]
    assert found["absmax"].tolist()[1:] == [2.0, math.inf]
    assert found["counts"].tolist() == [[0, 1, 0], [0, 1, 0]]


@both_ways
@pytest.mark.parametrize(("compute", "power"), [(FP16, -24), (BF16, -133)])
def test_what_the_narrowest_type_rounds_to_zero_has_underflowed(
    open_sums: Open, compute: torch.dtype, power: int
) -> None:
    """Half of the type's smallest number is a tie, which goes to the even one, zero."""
    smallest = 2.0**power
    values = [smallest, -smallest * 0.75, smallest / 2, -smallest / 4, 0.0, 1.0]
    found = open_sums(buffers_of(values, compute=compute), None).measure()
    assert found["counts"].tolist() == [[1, 0, 2]]


@both_ways
def test_nothing_underflows_in_fp32_and_a_scaled_gradient_less_than_a_plain_one(
    open_sums: Open,
) -> None:
    tiny = [1e-42, 0.0, 2.0**-26]
    plain = buffers_of(tiny, compute=FP32)
    assert open_sums(plain, None).measure()["counts"].tolist() == [[1, 0, 0]]
    half = buffers_of(tiny, compute=FP16)
    assert open_sums(half, None).measure()["counts"].tolist() == [[1, 0, 2]]
    scale = torch.tensor(2.0**16)
    assert open_sums(half, scale).measure()["counts"].tolist() == [[1, 0, 1]]


@both_ways
def test_a_norm_too_small_for_fp32_squares_is_not_lost_on_a_cpu(open_sums: Open) -> None:
    found = open_sums(buffers_of([3e-30, 4e-30]), None).measure()
    if open_sums is HostSums:
        assert found["norm"].item() == pytest.approx(5e-30, rel=1e-6)
    assert found["absmax"].item() == pytest.approx(4e-30, rel=1e-6)


@pytest.mark.parametrize("accumulator", [FP32, BF16])
@pytest.mark.parametrize("cached", [1, 100, 1 << 17])
def test_parts_of_any_length_give_the_numbers_of_the_whole(
    accumulator: torch.dtype, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_sums, "CACHED_ELEMENTS", cached)
    monkeypatch.setattr(gradient_sums, "CHUNK_ELEMENTS", cached)
    draw = np.random.default_rng(1)
    gradients = [(draw.normal(size=n) * (draw.random(n) > 0.2)).tolist() for n in (7, 90, 1, 250)]
    buffers = buffers_of(*gradients, accumulator=accumulator)
    found = HostSums(buffers, None).measure()
    seen = buffers.gradient.double().numpy()
    by_slot = [seen[slot.start : slot.stop] for slot in buffers.slots]
    assert found["norm"].tolist() == pytest.approx([np.linalg.norm(s) for s in by_slot], rel=1e-12)
    assert found["absmax"].tolist() == [np.abs(s).max() for s in by_slot]
    by_group = [seen[group.start : group.stop] for group in buffers.groups]
    assert found["counts"][:, 0].tolist() == [float((g == 0).sum()) for g in by_group]
    on_device = DeviceSums(buffers, None).measure()
    assert on_device["counts"].tolist() == found["counts"].tolist()
