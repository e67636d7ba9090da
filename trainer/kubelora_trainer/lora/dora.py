"""DoRA layers: peft's formula, with the norms computed in fp32.

DoRA (Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", eq. 5) makes a layer's weight

    m · (W + s·B·A) / ‖W + s·B·A‖

with the norm taken over each output channel and held constant in the backward pass (section 4.3).
It trains the magnitudes m together with A and B. peft computes the norm in the compute type. In
bf16 the norm is known only to 2⁻⁹: a fresh adapter changes the model by 0.2 %, and the effect of A
and B on the norm is lost to rounding. Here norm and quotient are fp32, and products with
activations are rounded once, at the end of the layer. A fresh adapter changes nothing, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.dora import DoraConv2dLayer, DoraLinearLayer
from torch import Tensor, nn
from torch.nn import functional

from kubelora_trainer.utils.errors import ModelError

NO_KOHYA_FILE = (
    "adapter.dora: the adapter is written only in diffusers' format. kohya files store magnitudes "
    "as dora_scale, and readers disagree on what to divide by: ComfyUI and Forge use the norm of "
    "the base model's weight, LyCORIS the norm of the adapted weight (older versions over the "
    "other axis), and diffusers drops the magnitudes"
)
"""Warning shown before training starts, because some users need a kohya file."""


@torch.no_grad()
def channel_norms(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Compute the L2 norm of ``weight + scale * lora_b @ lora_a`` per output channel.

    Under autocast the factors are first rounded to the autocast type, as in the forward pass.

    Args:
        weight: Base weight, (outputs, inputs...).
        lora_a: Down-projection, (rank, inputs...).
        lora_b: Up-projection, (outputs, rank...).
        scale: Factor of the update.

    Returns:
        fp32 norms, (outputs,).
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
        """Compute what is added to the base layer's output: (q - 1)·W·x + q·s·B·A·x.

        q = m / ‖W + s·B·A‖. The signature is peft's.

        Args:
            x: Input of the layer.
            lora_A: Down-projection.
            lora_B: Up-projection.
            scaling: Factor s of the update.
            base_layer: The adapted layer.
            base_result: The base layer's output; None if dropout changed ``x``.
            adapter_name: Unused here; peft passes it.
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
    """Magnitudes of a linear layer, fp32 (outputs,)."""


class ExactDoraConv2d(_ExactNorms, DoraConv2dLayer):  # type: ignore[misc]
    """Magnitudes of a convolution, fp32 (1, outputs, 1, 1)."""


def _without_bias(base: nn.Linear | nn.Conv2d, x: Tensor) -> Tensor:
    if isinstance(base, nn.Linear):
        return functional.linear(x, base.weight)
    return functional.conv2d(
        x, base.weight, None, base.stride, base.padding, base.dilation, base.groups
    )


@contextmanager
def with_peft_dora(model: nn.Module, adapter: str) -> Iterator[None]:
    """Replace the exact layers by peft's in the model's type, as a reader of the file computes."""
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


def use_exact_dora(layer: LoraLayer, name: str, adapter: str) -> tuple[nn.Parameter, Tensor]:
    """Replace peft's DoRA layer by an exact one whose magnitudes are the current weights' norms.

    Args:
        layer: peft's layer.
        name: The layer's full name, for error messages.
        adapter: peft's name of the adapter.

    Returns:
        The magnitudes and the base layer's weight.

    Raises:
        ModelError: All weights of a channel are 0.
    """
    base = layer.get_base_layer()
    kind = ExactDoraConv2d if isinstance(base, nn.Conv2d) else ExactDoraLinear
    exact = kind(fan_in_fan_out=False)
    down, up = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    norms = channel_norms(base.weight, down, up, layer.scaling[adapter])
    if not bool(norms.all()):
        raise ModelError(
            f"adapter.dora: {int((norms == 0).sum())} of {len(norms)} output channels of {name} "
            "have only zero weights and therefore no direction: exclude the layer by "
            "adapter.targets or targetPatterns, or set adapter.dora to false"
        )
    magnitudes = nn.Parameter(norms.view_as(layer.lora_magnitude_vector[adapter].weight))
    exact.weight = magnitudes
    layer.lora_magnitude_vector[adapter] = exact
    return magnitudes, base.weight
