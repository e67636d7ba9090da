"""The working-copy scheme: same weights as fp32 under autocast, and sums that lose nothing."""

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kubelora_api.spec import Adapter
from kubelora_api.training_spec import Optimizer
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.lora.adapter import AdapterModule, add_adapter
from kubelora_trainer.models.pipeline import load_unet
from kubelora_trainer.optim.adamw import FlatAdamW
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.training.setup import factors_of
from kubelora_trainer.utils.errors import NumericalError

BF16, FP32 = torch.bfloat16, torch.float32
DEFAULT = PrecisionPlan(compute=BF16, accumulator=FP32, masters=FP32)
PLANS = [
    PrecisionPlan(compute, accumulator, masters)
    for compute in (BF16, FP32)
    for accumulator in (BF16, FP32)
    for masters in (BF16, FP32)
]


def factor(values: list[float], name: str = "layer", group: str = "down.lora_A") -> Factor:
    return Factor(name, group, nn.Parameter(torch.tensor([values])))


def unet_inputs(folder: Path, seed: int) -> dict[str, object]:
    unet = load_unet(folder, variant=None, dtype=BF16, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    config = unet.config
    pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
    return {
        "sample": torch.randn(1, 4, 8, 8, generator=generator).to(BF16),
        "timestep": torch.tensor([seed * 37 % 1000]),
        "encoder_hidden_states": torch.randn(
            1, 7, config.cross_attention_dim, generator=generator
        ).to(BF16),
        "added_cond_kwargs": {
            "text_embeds": torch.randn(1, pooled, generator=generator).to(BF16),
            "time_ids": torch.tensor([[64.0, 64, 0, 0, 64, 64]]),
        },
    }


def adapted_unet(
    folder: Path, adapter: Adapter, checkpointing: bool
) -> tuple[nn.Module, tuple[AdapterModule, ...]]:
    unet = load_unet(folder, variant=None, dtype=BF16, device=torch.device("cpu"))
    if checkpointing:
        unet.enable_gradient_checkpointing()
    return unet, add_adapter(unet, adapter, seed=3)


def loss_of(unet: nn.Module, inputs: dict[str, object]) -> Tensor:
    with torch.autocast("cpu", dtype=BF16):
        output = unet(**inputs).sample
    loss: Tensor = output.float().square().mean()
    return loss


@pytest.mark.parametrize(
    ("adapter", "checkpointing", "steps"),
    [
        (Adapter(rank=4), False, 20),
        (Adapter(rank=4, targets="all", rs_lora=True, rank_pattern={"conv1": 3}), True, 6),
        (Adapter(rank=4, dora=True), False, 12),
        (Adapter(rank=4, targets="all", dora=True, alpha_pattern={"to_q": 9}), True, 6),
    ],
    ids=[
        "attention",
        "all with convolutions, checkpointing",
        "DoRA",
        "DoRA with convolutions, checkpointing",
    ],
)
def test_steps_equal_fp32_parameters_under_autocast_bit_by_bit(
    demo: DemoPaths, adapter: Adapter, checkpointing: bool, steps: int
) -> None:
    inputs = [unet_inputs(demo.model, seed) for seed in range(4)]
    plain_unet, plain_modules = adapted_unet(demo.model, adapter, checkpointing)
    flat_unet, flat_modules = adapted_unet(demo.model, adapter, checkpointing)
    parameters = {f.name: f.parameter for f in factors_of(plain_modules)}
    magnitudes = [f.parameter for f in factors_of(plain_modules) if f.is_magnitude]
    matrices = [p for m in plain_modules for p in (m.lora_a, m.lora_b)]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": magnitudes, "weight_decay": 0}]
    reference = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    buffers = AdapterBuffers(factors_of(flat_modules), DEFAULT)
    optimizer = FlatAdamW(buffers, Optimizer())
    for step in range(steps):
        for micro_step in range(2):
            loss_of(plain_unet, inputs[(2 * step + micro_step) % 4]).backward()
            loss_of(flat_unet, inputs[(2 * step + micro_step) % 4]).backward()
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.div_(2)
        reference.step()
        reference.zero_grad(set_to_none=False)
        buffers.normalise(2)
        optimizer.step(1e-3, non_finite=torch.zeros(()))
        buffers.zero_gradient()
    for slot in buffers.slots:
        expected = parameters[slot.factor.name].detach()
        assert torch.equal(slot.of(buffers.masters), expected), slot.factor.name
        seen = expected if slot.factor.is_magnitude else expected.to(BF16)
        assert torch.equal(buffers.compute_view(slot), seen)
        if slot.factor.name.endswith("lora_B"):
            assert slot.of(buffers.masters).abs().max() > 1e-3


def test_fp32_accumulator_holds_what_bf16_drops() -> None:
    # 256 + 1 is 257 in fp32; in bf16 (8 bits of mantissa) 257 lies half way between 256 and 258
    # and rounds to the even one, 256. So one hundred further ones vanish too.
    sums = {}
    for accumulator in (FP32, BF16):
        plan = PrecisionPlan(compute=BF16, accumulator=accumulator, masters=FP32)
        one = factor([0.0])
        buffers = AdapterBuffers([one], plan)
        (one.parameter * 256.0).sum().backward()
        for _ in range(100):
            (one.parameter * 1.0).sum().backward()
        sums[accumulator] = float(buffers.gradient)
    assert sums == {FP32: 356.0, BF16: 256.0}


def test_the_gradient_is_the_sum_of_the_micro_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = factor([0.5, -1.0, 2.0])
    buffers = AdapterBuffers([weight], PrecisionPlan(FP32, FP32, FP32))
    xs = torch.randn(16, 3, generator=generator)
    expected = torch.zeros(3, dtype=torch.float64)
    for x in xs:
        # d/dw of (w·x)² is 2 (w·x) x
        (weight.parameter * x).sum().square().backward()
        w = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
        expected += 2 * (w @ x.double()) * x.double()
    torch.testing.assert_close(buffers.gradient.double(), expected, rtol=1e-6, atol=1e-6)


def test_gradients_are_normalised_by_the_samples_seen() -> None:
    weight = factor([1.0])
    buffers = AdapterBuffers([weight], DEFAULT)
    for _ in range(3):  # a tail window of 3 samples where 8 were configured
        (weight.parameter * 6.0).sum().backward()
    buffers.normalise(3)
    assert float(buffers.gradient) == 6.0
    with pytest.raises(ValueError, match="without samples"):
        buffers.normalise(0)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_gives_the_types_it_names(plan: PrecisionPlan) -> None:
    weight = factor([1.0, 2.0])
    buffers = AdapterBuffers([weight], plan)
    optimizer = FlatAdamW(buffers, Optimizer())
    (weight.parameter * 4.0).sum().backward()
    assert weight.parameter.dtype == plan.compute
    assert weight.parameter.grad is not None
    assert weight.parameter.grad.dtype == plan.accumulator
    assert buffers.master_parameters[0].dtype == plan.masters
    assert optimizer.first_moment.dtype == plan.masters
    optimizer.step(0.1, non_finite=torch.zeros(()))
    # The first AdamW step moves by lr·sign(g) after a decay of lr·0.01: 1 - 0.001 - 0.1 = 0.899
    tolerance = 2**-8 if BF16 in (plan.compute, plan.masters) else 1e-6
    assert float(weight.parameter.detach()[0, 0]) == pytest.approx(0.899, abs=tolerance)
    buffers.assert_bound()


def held_bytes() -> int:
    """Bytes of all tensors that are alive, each storage once."""
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    "plan", [DEFAULT, PrecisionPlan(FP32, FP32, FP32), PrecisionPlan(BF16, FP32, BF16)], ids=str
)
def test_the_memory_that_is_told_at_the_start_is_what_the_tensors_hold(
    plan: PrecisionPlan,
) -> None:
    """Of the adapter's own fp32 parameters nothing is left; AdamW counts steps in 4 bytes each."""
    before = held_bytes()
    factors = [
        Factor("layer", f"{block}.{name}", nn.Parameter(torch.zeros(64, 1000)))
        for block in ("down", "up")
        for name in ("lora_A", "lora_B", "lora_magnitude_vector")
    ]
    buffers = AdapterBuffers(factors, plan)
    optimizer = FlatAdamW(buffers, Optimizer())
    held = held_bytes() - before - 4 * len(factors)
    told = sum(buffers.copy_bytes().values()) + optimizer.state_bytes
    assert buffers.numel == 384_000
    assert held == told


def test_memory_is_shared_where_types_agree() -> None:
    assert DEFAULT.bytes_per_parameter() == {
        "working copy": 2,
        "gradients": 4,
        "master weights": 4,
    }
    assert sum(PrecisionPlan(BF16, BF16, BF16).bytes_per_parameter().values()) == 2 + 2
    buffers = AdapterBuffers([factor([1.0])], PrecisionPlan(FP32, FP32, FP32))
    assert buffers.working is buffers.masters
    assert buffers.optimizer_gradient is buffers.gradient


def test_a_group_is_one_contiguous_range() -> None:
    factors = [
        factor([1.0], "a", "up.lora_A"),
        factor([2.0, 3.0], "b", "down.lora_A"),
        factor([4.0], "c", "up.lora_A"),
    ]
    buffers = AdapterBuffers(factors, DEFAULT)
    ranges = {g.name: buffers.masters[g.start : g.stop].tolist() for g in buffers.groups}
    assert ranges == {"down.lora_A": [2.0, 3.0], "up.lora_A": [1.0, 4.0]}


def test_a_detached_gradient_view_is_caught_by_name() -> None:
    weight = factor([1.0], "up_blocks.0.to_q")
    buffers = AdapterBuffers([weight], DEFAULT)
    buffers.assert_bound()
    weight.parameter.grad = None  # what zero_grad() does
    (weight.parameter * 2.0).sum().backward()
    with pytest.raises(NumericalError, match=r"gradient of up_blocks\.0\.to_q\.lora_A"):
        buffers.assert_bound()


def test_a_replaced_weight_is_caught() -> None:
    weight = factor([1.0])
    buffers = AdapterBuffers([weight], DEFAULT)
    weight.parameter.data = weight.parameter.data.clone()
    with pytest.raises(NumericalError, match="the weight of layer"):
        buffers.assert_bound()


def test_a_non_finite_gradient_moves_neither_weight_nor_moment() -> None:
    weight = factor([1.0, 2.0])
    buffers = AdapterBuffers([weight], DEFAULT)
    optimizer = FlatAdamW(buffers, Optimizer())
    (weight.parameter * torch.tensor([[1.0, float("inf")]])).sum().backward()
    optimizer.step(0.1, non_finite=torch.ones(()))
    assert buffers.masters.tolist() == [1.0, 2.0]
    assert optimizer.first_moment.tolist() == [0.0, 0.0]
    assert optimizer.second_moment.tolist() == [0.0, 0.0]
