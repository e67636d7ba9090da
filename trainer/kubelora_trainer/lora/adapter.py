"""LoRA adapters for the UNet: target layers, ranks and initial weights.

peft builds the layers. Their weights are drawn here, with one generator per module, so that they
depend only on the seed and the module's name and not on any other draw.
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
from kubelora_trainer.lora.dora import channel_norms, use_exact_dora
from kubelora_trainer.lora.factor_names import MAGNITUDE
from kubelora_trainer.lora.target_modules import check_patterns, matching, target_names
from kubelora_trainer.models.sgm_keys import Part
from kubelora_trainer.utils.third_party import QUANTISATION_PACKAGES, hidden_packages

ADAPTER_NAME = "default"
Block = Literal["down", "mid", "up", "embed", "text_encoder", "text_encoder_2"]
Init = Literal["kaiming", "gaussian", "orthogonal"]


@dataclass(frozen=True)
class AdapterModule:
    """The adapter of one layer; it adds ``alpha / rank * lora_b @ lora_a @ input`` to the output.

    Attributes:
        name: Name of the layer within its model.
        group_block: Block the layer belongs to. "embed" is the time and size embedding and the
            outermost convolutions; each text encoder is one block.
        lora_a: Down-projection, (rank, inputs); for a convolution (rank, inputs, height, width).
        lora_b: Up-projection, (outputs, rank); for a convolution (outputs, rank, 1, 1).
        rank: Rank of the update.
        alpha: Numerator of the scale.
        part: Model that the layer belongs to.
        magnitude: DoRA magnitudes, (outputs,); for a convolution (1, outputs, 1, 1). None without
            DoRA.
        base_weight: The frozen weight that is adapted.
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
        """The trainable tensors by peft's names."""
        both = {"lora_A": self.lora_a, "lora_B": self.lora_b}
        return both if self.magnitude is None else both | {MAGNITUDE: self.magnitude}

    @property
    def full_name(self) -> str:
        """The layer's name, unique over all parts; UNet layers keep their own name."""
        return full_name(self.part, self.name)

    @property
    def scale(self) -> float:
        """Factor by which the update is multiplied."""
        return self.alpha / self.rank

    @torch.no_grad()
    def norms(self) -> torch.Tensor:
        """Compute DoRA's norms of the current adapted weight, fp32, shaped like the magnitudes."""
        if self.magnitude is None or self.base_weight is None:
            raise ValueError(f"{self.full_name} has no magnitudes")
        norms = channel_norms(self.base_weight, self.lora_a, self.lora_b, self.scale)
        return norms.view_as(self.magnitude)


@dataclass(frozen=True)
class TrainedLayer:
    """A layer's adapter with the weights to export: master weights in the shapes of its factors."""

    module: AdapterModule
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    magnitude: torch.Tensor | None = None


def trained_layers(
    modules: Sequence[AdapterModule], masters: Mapping[str, torch.Tensor] | None = None
) -> list[TrainedLayer]:
    """Pair modules with the weights to export.

    Args:
        modules: The adapter's modules.
        masters: Master weights by factor name (``module.lora_A``); None uses the modules' own.
    """
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
    """Add a trainable fp32 adapter to the frozen ``unet`` without changing what it computes.

    Args:
        unet: The frozen base model.
        adapter: The job's ``spec.adapter``. If alpha is unset it equals ``adapter.rank``, also for
            modules whose rank comes from rankPattern, as in peft.
        seed: Seed of the initial weights.
        also_adapted: Full names of adapted layers in other parts, which patterns may match too.

    Returns:
        The adapted modules in the order of the UNet's own modules.

    Raises:
        ConfigurationError: A pattern matches no target, or DoRA cannot decompose a layer.
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
    # peft draws weights that are replaced below: forking keeps the caller's random state. Hiding
    # the quantisation libraries saves their slow import.
    with torch.random.fork_rng(devices=[]), hidden_packages(QUANTISATION_PACKAGES):
        unet.add_adapter(config, adapter_name=ADAPTER_NAME)
    return initialised_modules(unet, "unet", adapter.init, seed)


def peft_config(
    adapter: Adapter,
    targets: list[str],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
) -> LoraConfig:
    """Build peft's configuration of an adapter.

    Args:
        adapter: The job's ``spec.adapter``.
        targets: Names of the layers to adapt.
        ranks: Rank by pattern, where it differs from the adapter's.
        alphas: Alpha by pattern, where it differs from the adapter's.
    """
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
    """Initialise the adapters in ``model`` in fp32: random lora_A, zero lora_B, magnitudes = norms.

    Args:
        model: A model that peft has already added layers to.
        part: Which part of the pipeline the model is.
        init: Distribution of lora_A.
        seed: Seed of the run.

    Raises:
        ConfigurationError: DoRA cannot decompose a layer.
    """
    return tuple(
        _initialised(part, name, layer, init, seed)
        for name, layer in list(model.named_modules())
        if isinstance(layer, LoraLayer)
    )


def full_name(part: Part, name: str) -> str:
    """Return a layer's name that is unique over all parts.

    Names in text encoders omit ``text_model``, which only some versions of transformers have.
    """
    return name if part == "unet" else f"{part}.{name.removeprefix('text_model.')}"


def initial_down_projection(init: Init, rank: int, inputs: int, seed: int) -> torch.Tensor:
    """Draw the initial lora_A, fp32 ``(rank, inputs)``.

    Args:
        init: "kaiming": uniform within 1/sqrt(inputs), peft's default (Kaiming with a = sqrt 5).
            "gaussian": standard deviation 1/rank. "orthogonal": orthonormal rows, or columns if
            rank exceeds inputs.
        rank: Number of rows.
        inputs: Number of columns.
        seed: Seed of this module's generator.
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
    # Fixing the signs makes the draw uniform over all rotations (Mezzadri 2007).
    uniform: torch.Tensor = q * torch.sign(torch.diagonal(r))
    return (uniform.T if rank <= inputs else uniform).contiguous().float()


def module_seed(seed: int, name: str) -> int:
    """Derive the seed of one module's generator."""
    digest = hashlib.sha256(f"lora_A {seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _initialised(part: Part, name: str, layer: LoraLayer, init: Init, seed: int) -> AdapterModule:
    """Initialise one layer; lora_B is 0, so that a fresh adapter changes nothing."""
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
    magnitude, base_weight = None, layer.get_base_layer().weight
    if ADAPTER_NAME in layer.lora_magnitude_vector:
        magnitude, base_weight = use_exact_dora(layer, full_name(part, name), ADAPTER_NAME)
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
    """Return the UNet block that a module belongs to."""
    first = name.split(".")[0].split("_")[0]
    for block in get_args(Block):
        if block == first:
            found: Block = block
            return found
    return "embed"


def _plain(alpha: float) -> float:
    """Convert an integral alpha to int, because some loaders expect an int."""
    return int(alpha) if float(alpha).is_integer() else alpha
