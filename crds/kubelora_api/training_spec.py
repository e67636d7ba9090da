"""``spec.training`` and ``spec.precision``: how long, how fast and in which number formats."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kubelora_api.schema import ApiModel, Rule
from kubelora_api.values import FloatType


class Schedule(ApiModel):
    """How the learning rate moves, counted in optimizer steps."""

    name: Literal["constant", "cosine"] = Field(
        "constant", description="constant (default) or cosine (to 0 at the last step)."
    )
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        0,
        description="Optimizer steps over which the rate rises linearly from 0. Default 0.",
    )


class Optimizer(ApiModel):
    """What turns gradients into updates."""

    name: Literal["adamw"] = Field("adamw", description="adamw (default).")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="Decay of the first moment. Default 0.9."
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.999, description="Decay of the second moment. Default 0.999."
    )
    eps: Annotated[float, Field(gt=0, le=1)] = Field(
        1e-8, description="Added to the root of the second moment. Default 1e-8."
    )
    weight_decay: Annotated[float, Field(ge=0, le=1)] = Field(
        0.01, description="Decoupled weight decay. Default 0.01."
    )


class Training(ApiModel):
    """How long and how fast to train."""

    steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None, description="Optimizer steps to train. Exactly one of steps and epochs is set."
    )
    epochs: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="Passes over the dataset. Exactly one of steps and epochs is set."
    )
    batch_size: Annotated[int, Field(ge=1, le=1024)] = Field(
        1, description="Images per micro-batch and GPU. Default 1."
    )
    gradient_accumulation: Annotated[int, Field(ge=1, le=65536)] = Field(
        1, description="Micro-batches per optimizer step. Default 1."
    )
    learning_rate: Annotated[float, Field(gt=0, le=10)] = Field(
        1e-4, description="Peak learning rate. Default 1e-4, above 0."
    )
    schedule: Schedule = Field(default_factory=Schedule)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    max_grad_norm: Annotated[float, Field(ge=0, le=1e6)] = Field(
        1.0, description="Gradients are clipped to this norm; 0 turns clipping off. Default 1."
    )
    min_snr_gamma: Annotated[float, Field(gt=0, le=1000)] | None = Field(
        None,
        description="Min-SNR weighting: a sample's loss is weighted as if its signal-to-noise "
        "ratio were at most this, for epsilon and for v (Hang et al. 2023 use 5). Above 0, up to "
        "1000. Default: no weighting.",
    )
    noise_offset: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Offset noise: standard deviation of what is added to all of a noise channel, "
        "so that very dark and very bright images are learned. Default 0; 0.05 to 0.1 is usual. "
        "Up to 1.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: slower, less memory."
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        0, description="Seed of every random draw. Default 0."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto (default) takes a GPU and, when workers.gpusPerNode is 1 or more, ends "
        "with an error where there is none; cpu says that training on a CPU is meant.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.steps) != has(self.epochs)",
            message="set exactly one of steps and epochs",
            check=lambda t: (t.steps is None) != (t.epochs is None),
            at="steps",
        ),
    )


def _lossless(name: str) -> Rule:
    attribute = {"accumulator": "accumulator", "masterWeights": "master_weights"}[name]
    return Rule(
        cel=f"self.{name} == 'fp32' || self.allowLossyPrecision",
        message=f"{name} in bf16 loses small gradients or updates: use fp32, or set "
        "allowLossyPrecision: true to accept the loss",
        check=lambda p: getattr(p, attribute) == "fp32" or p.allow_lossy_precision,
        at=name,
    )


class Precision(ApiModel):
    """Floating-point types of the adapter's training. Defaults lose no gradient."""

    compute: FloatType = Field(
        "bf16", description="Type of forward and backward passes: bf16 (default) or fp32."
    )
    accumulator: FloatType = Field(
        "fp32",
        description="Type of the buffer that sums gradients over a window: fp32 (default). bf16 "
        "needs allowLossyPrecision.",
    )
    master_weights: FloatType = Field(
        "fp32",
        description="Type of the weights that the optimizer updates: fp32 (default). bf16 needs "
        "allowLossyPrecision: most updates of lora_A vanish in it.",
    )
    allow_lossy_precision: bool = Field(
        False, description="Accept settings that are known to lose gradients. Default false."
    )
    RULES: ClassVar[tuple[Rule, ...]] = (_lossless("accumulator"), _lossless("masterWeights"))
