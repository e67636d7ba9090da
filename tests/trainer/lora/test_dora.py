"""DoRA's layers: the paper's formula on linear layers and convolutions, exact where bf16 is not."""

from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn
from torch.nn import functional

from kubelora_api.spec import Adapter
from kubelora_api.training_spec import Optimizer
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.sampler import SampleOrder
from kubelora_trainer.export.verify_unet import probe
from kubelora_trainer.health.startup_checks import check_dtypes, check_fresh_adapter
from kubelora_trainer.lora.adapter import (
    ADAPTER_NAME,
    AdapterModule,
    add_adapter,
    initialised_modules,
)
from kubelora_trainer.lora.dora import channel_norms, with_peft_dora
from kubelora_trainer.models.pipeline import load_unet
from kubelora_trainer.objective.lora_dropout import AdapterDropout
from kubelora_trainer.optim.adamw import FlatAdamW
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.training.setup import factors_of
from kubelora_trainer.utils.errors import ModelError, NumericalError

BF16, FP32 = torch.bfloat16, torch.float32
DEFAULT = PrecisionPlan(compute=BF16, accumulator=FP32, masters=FP32)
CPU = torch.device("cpu")
LAYERS: list[nn.Module] = [
    nn.Linear(24, 10),
    nn.Linear(24, 10, bias=False),
    nn.Conv2d(6, 10, 3, stride=2, padding=1),
    nn.Conv2d(6, 10, 1, bias=False),
]
NAMES = ["linear", "linear without bias", "convolution", "convolution 1 x 1 without bias"]


def adapted(layer: nn.Module, dropout: float = 0.0) -> tuple[LoraLayer, AdapterModule]:
    """A DoRA of rank 3 and scale 5/3 on ``layer``, as the trainer puts it there, but trained."""
    torch.manual_seed(0)
    base = type(layer)(*_shape_of(layer))
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["0"], use_dora=True, lora_dropout=dropout
    )
    model = inject_adapter_in_model(config, nn.Sequential(base))
    [module] = initialised_modules(model, "unet", "kaiming", 1)
    with torch.no_grad():
        module.lora_b.normal_(0, 0.3)
        assert module.magnitude is not None
        module.magnitude.mul_(1 + 0.2 * torch.randn_like(module.magnitude))
    found = model[0]
    assert isinstance(found, LoraLayer)
    return found.eval(), module


def _shape_of(layer: nn.Module) -> Sequence[object]:
    if isinstance(layer, nn.Linear):
        return (layer.in_features, layer.out_features, layer.bias is not None)
    assert isinstance(layer, nn.Conv2d)
    return (
        *(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding),
        *(1, 1, layer.bias is not None),
    )


def input_for(layer: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (4, 24) if isinstance(layer, nn.Linear) else (2, 6, 9, 9)
    return torch.randn(shape, generator=generator)


def by_the_paper(
    layer: LoraLayer, module: AdapterModule, x: Tensor, factors: Sequence[Tensor]
) -> Tensor:
    """m · (W + s·B·A) / ‖W + s·B·A‖ applied to x, the norm a constant; all in fp64."""
    base = layer.get_base_layer()
    down, up, magnitude = factors
    weight = base.weight.double().flatten(1) + 5 / 3 * up.flatten(1) @ down.flatten(1)
    norms = weight.square().sum(1).sqrt().detach()
    whole = (magnitude.flatten() / norms)[:, None] * weight
    bias = None if base.bias is None else base.bias.double()
    if isinstance(base, nn.Linear):
        return functional.linear(x.double(), whole, bias)
    return functional.conv2d(
        x.double(), whole.view(base.weight.shape), bias, base.stride, base.padding
    )


@pytest.mark.parametrize("kind", LAYERS, ids=NAMES)
def test_output_and_gradients_are_those_of_the_papers_formula(kind: nn.Module) -> None:
    layer, module = adapted(kind)
    x = input_for(kind)
    assert module.magnitude is not None
    own = [module.lora_a, module.lora_b, module.magnitude]
    twins = [p.detach().double().requires_grad_() for p in own]
    expected = by_the_paper(layer, module, x, twins)
    found = layer(x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    for parameter, twin in zip(own, twins, strict=True):
        assert parameter.grad is not None
        assert twin.grad is not None
        assert twin.grad.norm() > 1
        torch.testing.assert_close(parameter.grad.double(), twin.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", LAYERS, ids=NAMES)
def test_magnitudes_begin_as_the_norms_of_output_channels(kind: nn.Module) -> None:
    torch.manual_seed(0)
    model = inject_adapter_in_model(
        LoraConfig(r=3, target_modules=["0"], use_dora=True),
        nn.Sequential(type(kind)(*_shape_of(kind))),
    )
    [module] = initialised_modules(model, "unet", "kaiming", 1)
    assert module.magnitude is not None
    weight = model[0].get_base_layer().weight.double()
    expected = torch.stack([channel.square().sum().sqrt() for channel in weight])
    torch.testing.assert_close(module.magnitude.flatten().double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_fresh_adapter_changes_nothing_to_the_bit(demo: DemoPaths, dtype: torch.dtype) -> None:
    """peft's own norms in bf16 change the output by a per cent."""
    unet = load_unet(demo.model, variant=None, dtype=dtype, device=CPU)
    before = probe(unet)
    modules = add_adapter(unet, Adapter(rank=4, targets="all", dora=True), seed=1)
    buffers = AdapterBuffers(factors_of(modules), PrecisionPlan(dtype, FP32, FP32))
    assert all(p.dtype == FP32 for m in modules if (p := m.magnitude) is not None)
    assert torch.equal(probe(unet), before)
    check_fresh_adapter(buffers, modules)
    with torch.no_grad():
        changed = modules[3].magnitude
        assert changed is not None
        changed.flatten()[0] *= 1 + 1e-6
    with pytest.raises(NumericalError, match=rf"{modules[3].name}: .* its magnitudes are not"):
        check_fresh_adapter(buffers, modules)


def test_the_norm_is_known_to_fp32_where_pefts_is_known_to_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(64, 320, generator=generator) * 0.03).bfloat16()
    down = (torch.randn(4, 320, generator=generator) * 0.05).bfloat16()
    up = (torch.randn(64, 4, generator=generator) * 0.05).bfloat16()
    exact = (weight.double() + 2 * up.double() @ down.double()).square().sum(1).sqrt()
    ours = channel_norms(weight, down, up, 2.0)
    theirs = DoraLinearLayer(False).get_weight_norm(weight, up @ down, 2.0)
    assert ours.dtype == FP32
    assert float((ours.double() / exact - 1).abs().max()) < 1e-6
    off = (theirs.double() / exact - 1).abs()
    assert float(off.max()) > 1e-3  # half a spacing of bf16 is 2**-9 to 2**-8 of a number
    assert float(off.mean()) > 5e-4


def test_an_update_of_a_magnitude_below_bf16s_spacing_reaches_the_forward_pass(
    demo: DemoPaths,
) -> None:
    """One AdamW step at rate 1e-5 moves each magnitude by 1e-5; bf16 holds none of these moves."""
    unet = load_unet(demo.model, variant=None, dtype=BF16, device=CPU)
    modules = add_adapter(unet, Adapter(rank=4, targets="all", dora=True), seed=1)
    buffers = AdapterBuffers(factors_of(modules), DEFAULT)
    optimizer = FlatAdamW(buffers, Optimizer())
    for slot in buffers.slots:
        if slot.factor.is_magnitude:
            slot.of(buffers.gradient).fill_(-1.0)
    before = {m.name: m.magnitude.detach().clone() for m in modules if m.magnitude is not None}
    gains = {m.name: _gain(unet, m) for m in modules}
    optimizer.step(1e-5, non_finite=torch.zeros(()))
    bf16_moved = total = 0
    for module in modules:
        assert module.magnitude is not None
        moved = module.magnitude.detach()
        step = (moved.double() - before[module.name].double()).flatten()
        torch.testing.assert_close(step, torch.full_like(step, 1e-5), rtol=0.2, atol=0)
        bf16_moved += int((moved.bfloat16() != before[module.name].bfloat16()).sum())
        total += moved.numel()
        # B is 0: the layer gives m / norm · W·x, whose change is step / norm · W·x.
        through, channels = gains[module.name], _gain(unet, module)
        expected = step / before[module.name].flatten().double()
        torch.testing.assert_close(
            (channels - through).double(), expected, rtol=0.2, atol=1e-9, msg=module.name
        )
    assert bf16_moved < 0.02 * total


def _gain(unet: nn.Module, module: AdapterModule) -> Tensor:
    """What a layer's output gains, relative to W·x, by channel, with passes in bf16."""
    layer = unet.get_submodule(module.name)
    assert isinstance(layer, LoraLayer)
    exact = layer.lora_magnitude_vector[ADAPTER_NAME]
    base = layer.get_base_layer()
    shape = (1, base.in_features) if isinstance(base, nn.Linear) else (1, base.in_channels, 5, 5)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    ones = torch.ones_like(base(x))
    if base.bias is not None:
        bias = base.bias if isinstance(base, nn.Linear) else base.bias.view(1, -1, 1, 1)
        ones = ones + bias
    with torch.no_grad():
        gained: Tensor = exact(
            x,
            lora_A=layer.lora_A[ADAPTER_NAME],
            lora_B=layer.lora_B[ADAPTER_NAME],
            scaling=1.0,
            base_layer=base,
            base_result=ones,
        )
    assert gained.dtype == FP32
    without_bias = ones if base.bias is None else ones - bias
    ratio = gained / without_bias
    return ratio[0] if isinstance(base, nn.Linear) else ratio[0, :, 0, 0]


def test_passes_read_magnitudes_as_the_masters_hold_them(demo: DemoPaths) -> None:
    unet = load_unet(demo.model, variant=None, dtype=BF16, device=CPU)
    modules = add_adapter(unet, Adapter(rank=4, dora=True), seed=1)
    buffers = AdapterBuffers(factors_of(modules), DEFAULT)
    for slot in buffers.slots:
        assert slot.factor.parameter.dtype == (FP32 if slot.factor.is_magnitude else BF16)
        assert slot.factor.parameter.grad is not None
        assert slot.factor.parameter.grad.dtype == FP32
    own = [m.magnitude for m in modules if m.magnitude is not None]
    assert buffers.working.numel() + sum(m.numel() for m in own) == buffers.numel
    assert check_dtypes(buffers, FlatAdamW(buffers, Optimizer())) == (
        "working copy bf16, magnitudes fp32, gradients fp32, master weights fp32, "
        "optimizer state fp32"
    )
    buffers.slots[-1].factor.parameter.data = own[0].detach().bfloat16()
    with pytest.raises(NumericalError, match="lora_magnitude_vector is no longer a view"):
        buffers.assert_bound()


def test_other_weights_are_shown_with_their_magnitudes_and_taken_back_to_the_bit(
    demo: DemoPaths,
) -> None:
    """Samples and files are made of an average, in the model itself."""
    unet = load_unet(demo.model, variant=None, dtype=BF16, device=CPU)
    modules = add_adapter(unet, Adapter(rank=4, dora=True), seed=1)
    buffers = AdapterBuffers(factors_of(modules), DEFAULT)
    masters, working = buffers.masters.clone(), buffers.working.clone()
    other = torch.randn(buffers.numel, generator=torch.Generator().manual_seed(0))
    with buffers.using_weights(other):
        for slot in buffers.slots:
            shown = slot.of(other)
            wanted = shown if slot.factor.is_magnitude else shown.bfloat16()
            assert torch.equal(slot.factor.parameter.detach(), wanted)
    assert torch.equal(buffers.masters, masters)
    assert torch.equal(buffers.working, working)


@pytest.mark.parametrize("kind", [LAYERS[0], LAYERS[2]], ids=["linear", "convolution"])
def test_dropout_takes_inputs_from_the_adapter_and_from_what_it_does_to_the_layer(
    kind: nn.Module,
) -> None:
    """As in peft: W·x + b + (q - 1)·W·d(x) + q·s·B·A·d(x), q = m / norm."""
    layer, module = adapted(kind, dropout=0.4)
    x = input_for(kind)
    whole = layer(x)
    draws = SampleOrder(5, 8, 2).samples_of(0)
    AdapterDropout(layer).arm(draws)
    found = layer(x)
    AdapterDropout(layer).arm(draws)
    dropped = layer.lora_dropout[ADAPTER_NAME](x)
    assert module.magnitude is not None
    layer.eval()
    assert torch.equal(layer(x), whole)
    base = layer.get_base_layer()
    factors = [p.detach().double() for p in (module.lora_a, module.lora_b, module.magnitude)]
    bias = torch.zeros(()) if base.bias is None else base.bias.double()
    bias = bias if isinstance(base, nn.Linear) else bias.view(-1, 1, 1)
    base_of_dropped = base(dropped).double() - bias
    adapted_of_dropped = by_the_paper(layer, module, dropped, factors) - bias
    expected = base(x).double() + adapted_of_dropped - base_of_dropped
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert float((found - whole).detach().abs().max()) > 0.05


def test_a_channel_without_weights_is_refused_with_the_layers_name() -> None:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[1] = 0
    config = LoraConfig(r=2, target_modules=["out"], use_dora=True)
    model = inject_adapter_in_model(config, nn.ModuleDict({"out": layer}))
    with pytest.raises(ModelError, match=r"adapter\.dora: 1 of 3 output channels of out"):
        initialised_modules(model, "unet", "kaiming", 1)


def test_a_model_computes_as_its_readers_do_for_a_while_and_then_as_before() -> None:
    layer, _ = adapted(LAYERS[0])
    model = nn.Sequential(layer).bfloat16()
    magnitudes = layer.lora_magnitude_vector[ADAPTER_NAME]
    x = input_for(LAYERS[0]).bfloat16()
    before = model(x)
    with with_peft_dora(model, ADAPTER_NAME):
        theirs = layer.lora_magnitude_vector[ADAPTER_NAME]
        assert type(theirs) is DoraLinearLayer
        assert theirs.weight.dtype == BF16
        model(x)
    assert layer.lora_magnitude_vector[ADAPTER_NAME] is magnitudes
    assert torch.equal(model(x), before)
