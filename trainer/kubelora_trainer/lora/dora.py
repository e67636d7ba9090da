"""DoRA's layers: peft's formula, with the norms that it divides by in fp32.

DoRA (Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", eq. 5) makes a layer's weight

    m · (W + s·B·A) / ‖W + s·B·A‖

with the norm taken over each output channel and held constant in the backward pass (section 4.3),
and trains the magnitudes m beside A and B. peft computes that norm in the type of the passes. In
bf16 it is then known to 2⁻⁹: a fresh adapter changes the model by 0.2 %, and what A and B do to the
norm is lost in steps of that size. Here norm and quotient are fp32, and products with activations
are rounded once, at the layer's end. A fresh adapter changes nothing, to the bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraConv2dLayer, DoraLinearLayer
from torch import Tensor, nn
from torch.nn import functional

from kubelora_trainer.utils.errors import ConfigurationError

NO_KOHYA_FILE = (
    "adapter.dora: the adapter is written in diffusers' format alone. kohya files call magnitudes "
    "dora_scale, and their readers differ in what they divide by: ComfyUI and Forge by the norm of "
    "the base model's weight, LyCORIS by that of the adapted one, in older versions over the other "
    "axis; diffusers drops them"
)
"""Told before training starts, to those who need the other file."""


@torch.no_grad()
def channel_norms(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """L2 norm of ``weight + scale * lora_b @ lora_a`` by output channel, fp32 (outputs,).

    weight: (outputs, inputs...). Under autocast, factors count as rounded as its passes see them.
    """
    device = weight.device.type
    factors = [lora_a.detach(), lora_b.detach()]
    if torch.is_autocast_enabled(device):
        factors = [factor.to(torch.get_autocast_dtype(device)) for factor in factors]
    down, up = (factor.flatten(1).float() for factor in factors)
    with torch.autocast(device, enabled=False):
        adapted = weight.detach().flatten(1).to(torch.float32, copy=True)
        adapted.addmm_(up, down, alpha=scale)
        norms: Tensor = torch.linalg.vector_norm(adapted, dim=1)
    return norms


class _ExactNorms:
    """The forward pass of peft's DoRA layers, with norm, quotient and sum in fp32."""

    weight: nn.Parameter

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Module,
        lora_B: nn.Module,
        scaling: float,
        base_layer: nn.Linear | nn.Conv2d,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """What the base layer's output gains, with q = m / ‖W + s·B·A‖: (q - 1)·W·x + q·s·B·A·x.

        base_result: the base layer's output; None where dropout gave ``x`` other numbers.
        """
        factors = cast(Tensor, lora_A.weight), cast(Tensor, lora_B.weight)
        quotient = self.weight / channel_norms(base_layer.weight, *factors, scaling).view_as(
            self.weight
        )
        if base_result is None:
            base_result = _without_bias(base_layer, x)
        elif base_layer.bias is not None:
            base_result = base_result - base_layer.bias.view_as(quotient)
        gained: Tensor = (quotient - 1) * base_result + (quotient * scaling) * lora_B(lora_A(x))
        return gained


class ExactDoraLinear(_ExactNorms, DoraLinearLayer):  # type: ignore[misc]
    """A linear layer's magnitudes, fp32 (outputs,)."""


class ExactDoraConv2d(_ExactNorms, DoraConv2dLayer):  # type: ignore[misc]
    """A convolution's magnitudes, fp32 (1, outputs, 1, 1)."""


def _without_bias(base: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    if isinstance(base, nn.Linear):
        return functional.linear(x, base.weight)
    return functional.conv2d(
        x, base.weight, None, base.stride, base.padding, base.dilation, base.groups
    )


@contextmanager
def as_readers_compute(model: nn.Module, adapter: str) -> Iterator[None]:
    """Let ``model`` compute as a reader of its adapter does: peft's layers, in the model's type."""
    exact = [
        (layer, layer.lora_magnitude_vector[adapter])
        for layer in model.modules()
        if isinstance(layer, LoraLayer) and adapter in layer.lora_magnitude_vector
    ]
    for layer, own in exact:
        base = layer.get_base_layer()
        kind = DoraConv2dLayer if isinstance(base, nn.Conv2d) else DoraLinearLayer
        theirs = kind(fan_in_fan_out=False)
        theirs.weight = nn.Parameter(own.weight.detach().to(base.weight.dtype))
        layer.lora_magnitude_vector[adapter] = theirs
    try:
        yield
    finally:
        for layer, own in exact:
            layer.lora_magnitude_vector[adapter] = own


def take_over(layer: LoraLayer, name: str, adapter: str) -> tuple[nn.Parameter, Tensor]:
    """Put exact layers in the place of peft's; returns magnitudes and the base layer's weight.

    The magnitudes are the norms of the weights as they now are. name: of the layer, for people.
    Raises ConfigurationError where a channel's weights are all 0.
    """
    base = layer.get_base_layer()
    kind = ExactDoraConv2d if isinstance(base, nn.Conv2d) else ExactDoraLinear
    exact = kind(fan_in_fan_out=False)
    down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    norms = channel_norms(base.weight, down, up, layer.scaling[adapter])
    if not bool(norms.all()):
        raise ConfigurationError(
            f"adapter.dora: {int((norms == 0).sum())} of {len(norms)} output channels of {name} "
            "have no weight but 0, so that they have no direction: leave the layer out by "
            "adapter.targets or targetPatterns, or dora for all"
        )
    magnitudes = nn.Parameter(norms.view_as(layer.lora_magnitude_vector[adapter].weight))
    exact.weight = magnitudes
    layer.lora_magnitude_vector[adapter] = exact
    return magnitudes, base.weight
