"""Puts the LoRA adapter into the UNet: which layers, how wide, how initialised.

peft makes the layers; the numbers in them are drawn here, from a generator of each module's own, so
that they depend on the seed and the module's name alone and not on what else was drawn before.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from kubelora_api.spec import Adapter
from kubelora_trainer.lora.dora import channel_norms, take_over
from kubelora_trainer.lora.factor_names import MAGNITUDE
from kubelora_trainer.lora.target_modules import check_patterns, matching, target_names
from kubelora_trainer.models.sgm_keys import Part
from kubelora_trainer.utils.third_party import FOR_QUANTISED_MODELS, not_found

ADAPTER_NAME = "default"
Block = Literal["down", "mid", "up", "embed", "text_encoder", "text_encoder_2"]
Init = Literal["kaiming", "gaussian", "orthogonal"]


@dataclass(frozen=True)
class AdapterModule:
    """One layer's adapter: the layer's output gains ``alpha / rank * lora_b @ lora_a @ input``.

    part: the model that the layer belongs to. name: of the layer in it. group_block: where it
    stands; embed is the time and size embedding and the outermost convolutions, a text encoder is
    a block of its own.
    lora_a: down-projection, rank x inputs. lora_b: up-projection, outputs x rank. Of a
    convolution: rank x inputs x height x width, and outputs x rank x 1 x 1.
    magnitude: DoRA's, outputs (of a convolution 1 x outputs x 1 x 1); None without DoRA.
    base_weight: what is adapted, frozen; needed for DoRA's norms alone.
    """

    name: str
    group_block: Block
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    rank: int
    alpha: float
    part: Part = "unet"
    magnitude: nn.Parameter | None = None
    base_weight: torch.Tensor | None = None

    @property
    def factors(self) -> dict[str, nn.Parameter]:
        """What is trained, by peft's names."""
        both = {"lora_A": self.lora_a, "lora_B": self.lora_b}
        return both if self.magnitude is None else both | {MAGNITUDE: self.magnitude}

    @property
    def full_name(self) -> str:
        """Unique over all parts: the UNet's layers by their own name."""
        return full_name(self.part, self.name)

    @property
    def scale(self) -> float:
        """What the update is multiplied by."""
        return self.alpha / self.rank

    @torch.no_grad()
    def norms(self) -> torch.Tensor:
        """DoRA's norms of the adapted weight as it now is, fp32, in the magnitudes' shape."""
        if self.magnitude is None or self.base_weight is None:
            raise ValueError(f"{self.full_name} has no magnitudes")
        norms = channel_norms(self.base_weight, self.lora_a, self.lora_b, self.scale)
        return norms.view_as(self.magnitude)


@dataclass(frozen=True)
class TrainedLayer:
    """A layer's adapter with the weights to export: the masters, in the shapes of its factors."""

    module: AdapterModule
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    magnitude: torch.Tensor | None = None


def trained_layers(
    modules: Sequence[AdapterModule], masters: Mapping[str, torch.Tensor] | None = None
) -> list[TrainedLayer]:
    """Modules with their masters, by factor (``module.lora_A``); None: with their own numbers."""
    layers = []
    for module in modules:
        if masters is None:
            found = {name: parameter.detach() for name, parameter in module.factors.items()}
        else:
            found = {name: masters[f"{module.full_name}.{name}"] for name in module.factors}
        layers.append(TrainedLayer(module, found["lora_A"], found["lora_B"], found.get(MAGNITUDE)))
    return layers


def add_adapter(
    unet: UNet2DConditionModel,
    adapter: Adapter,
    seed: int,
    also_adapted: Sequence[str] | None = None,
) -> tuple[AdapterModule, ...]:
    """Add a trainable fp32 adapter to the frozen ``unet``, which computes the same as before.

    also_adapted: full names of other parts' layers, which patterns may mean.
    Modules come in the order of the UNet's own modules. Without alpha it is ``adapter.rank``, for
    modules of another rank by rankPattern too, as in peft.
    Raises ConfigurationError for a pattern that matches no target, and as `initialised_modules`.
    """
    targets = target_names(unet, adapter.targets, adapter.target_patterns)
    adapted = targets if also_adapted is None else [*targets, *also_adapted]
    check_patterns("rankPattern", adapter.rank_pattern, adapted)
    check_patterns("alphaPattern", adapter.alpha_pattern, adapted)
    config = peft_config(
        adapter,
        targets,
        matching(adapter.rank_pattern, targets),
        matching(adapter.alpha_pattern, targets),
    )
    # peft draws numbers that are replaced below, and looks for libraries of quantised layers.
    with torch.random.fork_rng(devices=[]), not_found(FOR_QUANTISED_MODELS):
        unet.add_adapter(config, adapter_name=ADAPTER_NAME)
    return initialised_modules(unet, "unet", adapter.init, seed)


def peft_config(
    adapter: Adapter,
    targets: list[str],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
) -> LoraConfig:
    """peft's configuration. ranks, alphas: by pattern, where they are not the adapter's own."""
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=_plain(adapter.alpha if adapter.alpha is not None else adapter.rank),
        target_modules=targets,
        rank_pattern=dict(ranks),
        alpha_pattern={key: _plain(value) for key, value in alphas.items()},
        use_rslora=adapter.rs_lora,
        use_dora=adapter.dora,
        lora_dropout=adapter.dropout,
        init_lora_weights=True,
    )


def initialised_modules(
    model: nn.Module, part: Part, init: Init, seed: int
) -> tuple[AdapterModule, ...]:
    """The adapters in ``model``, fp32, lora_A drawn anew and lora_B 0; magnitudes are the norms.

    Raises ConfigurationError for a layer that DoRA can't decompose.
    """
    return tuple(
        _initialised(part, name, layer, init, seed)
        for name, layer in list(model.named_modules())
        if isinstance(layer, LoraLayer)
    )


def full_name(part: Part, name: str) -> str:
    """A layer's name, unique over all parts.

    Of text encoders without ``text_model``, which versions of transformers have or have not.
    """
    return name if part == "unet" else f"{part}.{name.removeprefix('text_model.')}"


def initial_down_projection(init: Init, rank: int, inputs: int, seed: int) -> torch.Tensor:
    """lora_A at the start, fp32 ``(rank, inputs)``.

    kaiming: uniform within 1/sqrt(inputs), peft's default (Kaiming with a = sqrt 5). gaussian:
    deviation 1/rank. orthogonal: orthonormal rows; columns where rank exceeds inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    if init == "kaiming":
        bound = 1 / math.sqrt(inputs)
        return (torch.rand(rank, inputs, generator=generator) * 2 - 1) * bound
    normal = torch.randn(rank, inputs, generator=generator, dtype=torch.float64)
    if init == "gaussian":
        return (normal / rank).float()
    tall = normal.T if rank <= inputs else normal
    q, r = torch.linalg.qr(tall)
    uniform: torch.Tensor = q * torch.sign(torch.diagonal(r))  # over all rotations
    return (uniform.T if rank <= inputs else uniform).contiguous().float()


def module_seed(seed: int, name: str) -> int:
    """Seed of one module's generator."""
    digest = hashlib.sha256(f"lora_A {seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _initialised(part: Part, name: str, layer: LoraLayer, init: Init, seed: int) -> AdapterModule:
    """B stays 0: a fresh adapter changes nothing."""
    for factor in (layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]):
        factor.to(torch.float32)
    down, up = layer.lora_A[ADAPTER_NAME].weight, layer.lora_B[ADAPTER_NAME].weight
    rank, inputs = down.shape[0], down[0].numel()  # a convolution's patches are its inputs
    with torch.no_grad():
        drawn = initial_down_projection(
            init, rank, inputs, module_seed(seed, full_name(part, name))
        )
        down.copy_(drawn.view_as(down))
        up.zero_()
    magnitude = base_weight = None
    if ADAPTER_NAME in layer.lora_magnitude_vector:
        magnitude, base_weight = take_over(layer, full_name(part, name), ADAPTER_NAME)
    return AdapterModule(
        name=name,
        group_block=block_of(name) if part == "unet" else part,
        lora_a=down.requires_grad_(True),
        lora_b=up.requires_grad_(True),
        rank=rank,
        alpha=layer.scaling[ADAPTER_NAME] * rank,
        part=part,
        magnitude=magnitude,
        base_weight=base_weight,
    )


def block_of(name: str) -> Block:
    """Block of the UNet that a module stands in."""
    first = name.split(".")[0].split("_")[0]
    for block in get_args(Block):
        if block == first:
            found: Block = block
            return found
    return "embed"


def _plain(alpha: float) -> float:
    """An int where it is one, so that loaders that expect an int are content."""
    return int(alpha) if float(alpha).is_integer() else alpha
