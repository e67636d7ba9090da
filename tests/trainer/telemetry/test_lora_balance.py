"""The chain rule ties both factors' gradients: on real layers, and broken on purpose."""

import math
from collections.abc import Mapping

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.lora_balance import BalanceProbe, Pair, balance, pairs_of, pooled

BF16, FP32 = torch.bfloat16, torch.float32


class Net(nn.Module):
    """A linear layer and convolutions: of a window of three, and of one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.point = nn.Conv2d(6, 8, 1)
        self.linear = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.point(torch.tanh(self.conv(images)))
        answer: Tensor = self.linear(torch.tanh(features).mean(dim=(2, 3)))
        return answer


def adapted(
    options: Mapping[str, object] | None = None, dtype: torch.dtype = FP32
) -> tuple[nn.Module, AdapterBuffers]:
    """A network with filled adapters of rank 4 (2 on the linear layer) and scales other than 1."""
    torch.manual_seed(0)
    settings: dict[str, object] = {
        "r": 4,
        "lora_alpha": 12,
        "target_modules": ["conv", "point", "linear"],
        "rank_pattern": {"linear": 2},
        "init_lora_weights": False,
    }
    net = inject_adapter_in_model(LoraConfig(**(settings | dict(options or {}))), Net().to(dtype))
    factors = [
        Factor(name.split(".lora_")[0], f"down.lora_{name.split('.lora_')[1][0]}", parameter)
        for name, parameter in net.named_parameters()
        if "lora_A" in name or "lora_B" in name
    ]
    return net, AdapterBuffers(factors, PrecisionPlan(dtype, FP32, FP32))


def backward(net: nn.Module, dtype: torch.dtype = FP32, passes: int = 3) -> None:
    for index in range(passes):
        generator = torch.Generator().manual_seed(index)
        images = torch.randn(2, 3, 6, 6, generator=generator)
        net(images.to(dtype)).float().pow(2).sum().backward()


def measured(buffers: AdapterBuffers, chunk_elements: int = 1 << 22) -> float:
    probe = BalanceProbe(buffers, chunk_elements)
    pairs = [(float(off), float(size)) for off, size in probe.measure()]
    return pooled(probe.pairs, pairs)["down"]


def naively(buffers: AdapterBuffers) -> float:
    """The formula in fp64, one pair after the other, on plain matrices."""
    off = size = 0.0
    by_name = {slot.factor.name: slot for slot in buffers.slots}
    for name, down in by_name.items():
        if not name.endswith("lora_A"):
            continue
        up = by_name[name.replace("lora_A", "lora_B")]
        rank = down.shape[0]
        a, ga = (
            down.of(flat).double().reshape(rank, -1) for flat in (buffers.working, buffers.gradient)
        )
        b, gb = (
            up.of(flat).double().reshape(-1, rank) for flat in (buffers.working, buffers.gradient)
        )
        left, right = a @ ga.T, gb.T @ b
        off += float((left - right).norm()) ** 2
        size += float((left.norm() + right.norm()) / 2) ** 2
    return math.sqrt(off / size)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora_dropout": 0.3},
        {"use_rslora": True},
        {"use_dora": True},
    ],
    ids=["plain", "dropout", "rsLoRA", "DoRA"],
)
def test_the_identity_holds_in_fp32_over_an_accumulated_window(options: dict[str, object]) -> None:
    net, buffers = adapted(options)
    backward(net.train())
    assert measured(buffers) < 1e-6


def test_a_bf16_backward_pass_breaks_it_by_its_rounding_alone() -> None:
    net, buffers = adapted(dtype=BF16)
    backward(net, BF16)
    assert 1e-5 < measured(buffers) < 1e-2


def test_the_number_is_that_of_the_formula() -> None:
    net, buffers = adapted()
    backward(net)
    generator = torch.Generator().manual_seed(5)
    buffers.gradient.mul_(1 + 0.1 * torch.randn(buffers.numel, generator=generator))
    assert measured(buffers) > 0.01
    assert measured(buffers) == pytest.approx(naively(buffers), rel=1e-5)
    assert measured(buffers, chunk_elements=1) == pytest.approx(naively(buffers), rel=1e-5)


def test_a_factor_divided_twice_by_eight_reads_as_worked_out() -> None:
    # L and L/8 in place of L and L: (7/8) / ((1 + 1/8) / 2) = 14/9 = 1.56.
    net, buffers = adapted()
    backward(net)
    for slot in buffers.slots:
        if slot.factor.group == "down.lora_A":
            slot.of(buffers.gradient).div_(8)
    assert measured(buffers) == pytest.approx(14 / 9, rel=1e-4)


def test_a_micro_step_lost_on_one_factor_is_seen() -> None:
    net, buffers = adapted()
    backward(net, passes=2)
    kept = {s.factor.name: s.of(buffers.gradient).clone() for s in buffers.slots}
    backward(net, passes=3)
    for slot in buffers.slots:
        if slot.factor.group == "down.lora_A":
            slot.of(buffers.gradient).copy_(kept[slot.factor.name])
    assert measured(buffers) > 0.1


def test_a_sum_that_was_not_zeroed_after_a_step_is_seen() -> None:
    net, buffers = adapted()
    backward(net)
    generator = torch.Generator().manual_seed(9)
    buffers.masters.add_(0.3 * torch.randn(buffers.numel, generator=generator))
    backward(net)
    assert measured(buffers) > 0.05


def test_there_is_nothing_to_compare_while_lora_b_is_zero() -> None:
    net, buffers = adapted({"init_lora_weights": True})
    backward(net)
    assert math.isnan(measured(buffers))
    assert math.isnan(balance(0.0, 0.0))


def test_blocks_are_pooled_each_alone() -> None:
    pairs = [Pair("down", 0, 1), Pair("down", 2, 3), Pair("up", 4, 5)]
    found = pooled(pairs, [(9.0, 16.0), (16.0, 9.0), (1.0, 4.0)])
    assert found == {"down": 1.0, "up": 0.5}


def test_a_factor_without_its_counterpart_forms_no_pair() -> None:
    factors = [
        Factor("down.a", "down.lora_A", nn.Parameter(torch.ones(2, 3))),
        Factor("down.a", "down.lora_B", nn.Parameter(torch.ones(3, 2))),
        Factor("down.a", "down.lora_magnitude", nn.Parameter(torch.ones(3))),
        Factor("up.b", "up.lora_A", nn.Parameter(torch.ones(2, 3))),
    ]
    buffers = AdapterBuffers(factors, PrecisionPlan(FP32, FP32, FP32))
    assert [buffers.slots[p.up].factor.name for p in pairs_of(buffers.slots)] == ["down.a.lora_B"]
