"""``spec.training`` and ``spec.precision``: how long, how fast and in which number formats."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kubelora_api.schema import MAP_ATOMIC, ApiModel, Rule
from kubelora_api.types import ComputeType, FloatType, PatternKeys


def _only_for(name: str, field: str, attribute: str) -> Rule:
    """``field`` may be set where ``name`` is the group's choice, and nowhere else."""
    return Rule(
        cel=f"!has(self.{field}) || self.name == '{name}'",
        message=f"{field} is a setting of {name} alone: leave it out",
        check=lambda group: getattr(group, attribute) is None or group.name == name,
        at=field,
    )


ScheduleName = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


class Schedule(ApiModel):
    """How the learning rate moves, counted in optimizer steps."""

    name: ScheduleName = Field(
        "constant",
        description="constant (default), linear, cosine, cosine_with_restarts or polynomial; all "
        "but constant fall to 0 at the last step, polynomial to endFactor.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000)] = Field(
        0,
        description="Optimizer steps over which the rate rises linearly from 0. Default 0.",
    )
    cycles: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None,
        description="Of cosine_with_restarts: how often the rate falls from its peak to 0. "
        "Default 1.",
    )
    power: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None,
        description="Of polynomial: the rate falls as this power of what is left, above 0 to 100. "
        "Default 1, a straight line.",
    )
    end_factor: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Of polynomial: share of the peak rate that is reached at the last step, 0 "
        "to below 1. Default 0.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        _only_for("cosine_with_restarts", "cycles", "cycles"),
        _only_for("polynomial", "power", "power"),
        _only_for("polynomial", "endFactor", "end_factor"),
    )


OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "prodigy", "lion"]


class Optimizer(ApiModel):
    """What turns gradients into updates. Masters and state are fp32; adamw8bit keeps its state in
    8 bits. Settings that are left out take the optimizer's own default."""

    name: OptimizerName = Field(
        "adamw",
        description="adamw (default), adamw8bit (state in 8 bits, a quarter of the memory), "
        "adafactor (second moment by rows and columns, next to no memory), prodigy (finds its "
        "learning rate itself) or lion (moves by the sign of its momentum).",
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Decay of the first moment, 0 to below 1; of lion: its share in the sign that "
        "is followed. Default 0.9; adafactor: 0, no first moment.",
    )
    beta2: Annotated[float, Field(ge=0, lt=1)] | None = Field(
        None,
        description="Decay of the second moment, 0 to below 1; of lion: of its only moment. "
        "Default 0.999; lion: 0.99. adafactor has a schedule of its own.",
    )
    eps: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Above 0, at most 1. Added to the root of the second moment (prodigy: times "
        "its rate), default 1e-8; of adafactor to the squared gradient, default 1e-30. lion has "
        "none.",
    )
    weight_decay: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="Decoupled weight decay, 0 to 1, multiplied by the learning rate. Default "
        "0.01; adafactor and prodigy: 0.",
    )
    scale_parameter: bool | None = Field(
        None,
        description="Of adafactor: true multiplies the rate by each factor's own size (root mean "
        "square, at least 1e-3), so that learningRate is relative. Default false.",
    )
    initial_rate: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="Of prodigy: its first guess of the rate (d0), above 0. Default 1e-6.",
    )
    rate_coefficient: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None,
        description="Of prodigy: the rate it finds is multiplied by this (d_coef), above 0 to "
        "100. Default 1.",
    )
    bias_correction: bool | None = Field(
        None, description="Of prodigy: Adam's bias correction. Default false."
    )
    safeguard_warmup: bool | None = Field(
        None,
        description="Of prodigy: keeps the schedule's warm-up out of the estimate of the rate. "
        "Default false.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.eps) || self.name != 'lion'",
            message="lion divides by nothing and has no eps: leave it out",
            check=lambda o: o.eps is None or o.name != "lion",
            at="eps",
        ),
        Rule(
            cel="!has(self.beta2) || self.name != 'adafactor'",
            message="adafactor's second moment decays by a schedule of its own: leave beta2 out",
            check=lambda o: o.beta2 is None or o.name != "adafactor",
            at="beta2",
        ),
        _only_for("adafactor", "scaleParameter", "scale_parameter"),
        _only_for("prodigy", "initialRate", "initial_rate"),
        _only_for("prodigy", "rateCoefficient", "rate_coefficient"),
        _only_for("prodigy", "biasCorrection", "bias_correction"),
        _only_for("prodigy", "safeguardWarmup", "safeguard_warmup"),
    )

    @property
    def finds_rate(self) -> bool:
        """Whether it finds one rate for all factors, which ``learningRate`` then multiplies."""
        return self.name == "prodigy"


class Average(ApiModel):
    """A moving average of the weights (EMA), smoother than the weights themselves."""

    enabled: bool = Field(
        False,
        description="true keeps the average, and samples and exported files are made of it. "
        "Default false.",
    )
    decay: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.999,
        description="Share of the old average that each optimizer step keeps, above 0 to below 1. "
        "Default 0.999.",
    )
    warmup: bool = Field(
        True,
        description="true (default) lets the decay grow with the steps done, (1 + n) / (10 + n), "
        "so that the first weights are soon forgotten.",
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
        1, description="Images per micro-batch; a GPU has one at a time. Default 1."
    )
    gradient_accumulation: Annotated[int, Field(ge=1, le=65536)] = Field(
        1,
        description="Micro-batches per optimizer step, of all GPUs together: with more GPUs a step "
        "is faster and its batch the same. Default 1; at least the number of GPUs.",
    )
    learning_rate: Annotated[float, Field(gt=0, le=10)] | None = Field(
        None,
        description="Peak learning rate, above 0 to 10. Default 1e-4. prodigy multiplies the rate "
        "it finds by this: default 1.",
    )
    learning_rates: Annotated[
        dict[str, Annotated[float, Field(gt=0, le=10)]],
        Field(max_length=64),
        MAP_ATOMIC,
        PatternKeys,
    ] = Field(
        default_factory=dict,
        description="Peak learning rate by factor: keys are regular expressions matched against "
        "the end of a factor's name (its layer's, then .lora_A, .lora_B or, of DoRA, "
        ".lora_magnitude_vector), such as text_encoder.*, mid_block.* or .*to_k.lora_B; the first "
        "that matches wins over learningRate. All follow the schedule. Default: none, at most 64.",
    )
    lora_plus_ratio: Annotated[float, Field(gt=0, le=1000)] = Field(
        1.0,
        description="The rate of every lora_B is multiplied by this (LoRA+), above 0 to 1000. "
        "Default 1; LoRA+ recommends about 16.",
    )
    schedule: Schedule = Field(default_factory=Schedule)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    ema: Average = Field(default_factory=Average)
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
        False,
        description="Recompute the UNet's activations in the backward pass: slower, less memory. "
        "Those of text encoders that are trained are kept, 0.13 GB a caption in 16 bit.",
    )
    compile: bool = Field(
        False,
        description="true compiles the UNet (torch.compile; needs a C compiler, which the "
        "trainer's image has). Its first gradient is compared with the uncompiled one; where they "
        "differ, the run goes on without. Default false.",
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
        Rule(
            cel="self.optimizer.name != 'prodigy' || !has(self.learningRates) || "
            "size(self.learningRates) == 0",
            message="prodigy finds one rate for all factors: leave learningRates out",
            check=lambda t: not t.optimizer.finds_rate or not t.learning_rates,
            at="learningRates",
        ),
        Rule(
            cel="self.optimizer.name != 'prodigy' || self.loraPlusRatio == 1.0",
            message="prodigy finds one rate for all factors: leave loraPlusRatio out",
            check=lambda t: not t.optimizer.finds_rate or t.lora_plus_ratio == 1,
            at="loraPlusRatio",
        ),
    )

    @property
    def peak_rate(self) -> float:
        """The learning rate with the optimizer's own default filled in."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1.0 if self.optimizer.finds_rate else 1e-4


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

    compute: ComputeType = Field(
        "bf16",
        description="Type of forward and backward passes: bf16 (default), fp32, or fp16, whose "
        "gradients are kept in range by a loss scale that adjusts itself.",
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
