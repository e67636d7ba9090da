"""``spec.training`` and ``spec.precision``: how long, how fast and in which number formats."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kubelora_api.decides import Decides
from kubelora_api.schema import MAP_ATOMIC, ApiModel, Rule
from kubelora_api.types import ComputeType, FloatType, PatternKeys


def _only_for(name: str, field: str, attribute: str) -> Rule:
    """Build the rule that ``field`` may be set only if the group's name is ``name``.

    Args:
        name: The choice that has this setting.
        field: camelCase name of the setting.
        attribute: Its name in Python.
    """
    return Rule(
        cel=f"!has(self.{field}) || self.name == '{name}'",
        message=f"{field} is only valid for {name}: leave it unset",
        check=lambda group: getattr(group, attribute) is None or group.name == name,
        at=field,
    )


ScheduleName = Literal["constant", "linear", "cosine", "cosine_with_restarts", "polynomial"]


class Schedule(ApiModel):
    """Schedule of the learning rate, in optimizer steps."""

    name: Annotated[ScheduleName, Decides("weights")] = Field(
        "constant",
        description="constant (default), linear, cosine, cosine_with_restarts or polynomial; all "
        "but constant decay to 0 at the last step, polynomial to endFactor.",
    )
    warmup_steps: Annotated[int, Field(ge=0, le=10_000_000), Decides("weights")] = Field(
        0,
        description="Optimizer steps over which the rate rises linearly from 0. Default 0.",
    )
    cycles: Annotated[int, Field(ge=1, le=10_000), Decides("weights")] | None = Field(
        None,
        description="For cosine_with_restarts: number of decays from the peak rate to 0. "
        "Default 1.",
    )
    power: Annotated[float, Field(gt=0, le=100), Decides("weights")] | None = Field(
        None,
        description="For polynomial: exponent of the remaining fraction of steps, above 0, at most "
        "100. Default 1: linear.",
    )
    end_factor: Annotated[float, Field(ge=0, lt=1), Decides("weights")] | None = Field(
        None,
        description="For polynomial: fraction of the peak rate at the last step, 0 to below 1. "
        "Default 0.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        _only_for("cosine_with_restarts", "cycles", "cycles"),
        _only_for("polynomial", "power", "power"),
        _only_for("polynomial", "endFactor", "end_factor"),
    )


OptimizerName = Literal["adamw", "adamw8bit", "adafactor", "prodigy", "lion"]


class Optimizer(ApiModel):
    """The optimizer. Master weights and state are fp32; adamw8bit keeps its state in 8 bits.
    Settings that are unset take the optimizer's own default."""

    name: Annotated[OptimizerName, Decides("weights")] = Field(
        "adamw",
        description="adamw (default), adamw8bit (state in 8 bits, a quarter of the memory), "
        "adafactor (second moment by rows and columns, next to no memory), prodigy (finds its "
        "learning rate itself) or lion (moves by the sign of its momentum).",
    )
    beta1: Annotated[float, Field(ge=0, lt=1), Decides("weights")] | None = Field(
        None,
        description="Decay of the first moment, 0 to below 1; of lion: its share in the sign that "
        "is followed. Default 0.9; adafactor: 0, no first moment.",
    )
    beta2: Annotated[float, Field(ge=0, lt=1), Decides("weights")] | None = Field(
        None,
        description="Decay of the second moment, 0 to below 1; of lion: of its only moment. "
        "Default 0.999; lion: 0.99. adafactor has a schedule of its own.",
    )
    eps: Annotated[float, Field(gt=0, le=1), Decides("weights")] | None = Field(
        None,
        description="Above 0, at most 1. Added to the root of the second moment (prodigy: times "
        "its rate), default 1e-8; of adafactor to the squared gradient, default 1e-30. lion has "
        "none.",
    )
    weight_decay: Annotated[float, Field(ge=0, le=1), Decides("weights")] | None = Field(
        None,
        description="Decoupled weight decay, 0 to 1, multiplied by the learning rate. Default "
        "0.01; adafactor and prodigy: 0.",
    )
    scale_parameter: Annotated[bool | None, Decides("weights")] = Field(
        None,
        description="For adafactor: whether to multiply the rate by each factor's own size (root "
        "mean "
        "square, at least 1e-3), so that learningRate is relative. Default false.",
    )
    initial_rate: Annotated[float, Field(gt=0, le=1), Decides("weights")] | None = Field(
        None,
        description="For prodigy: its first guess of the rate (d0), above 0. Default 1e-6.",
    )
    rate_coefficient: Annotated[float, Field(gt=0, le=100), Decides("weights")] | None = Field(
        None,
        description="For prodigy: the rate it finds is multiplied by this (d_coef), above 0 to "
        "100. Default 1.",
    )
    bias_correction: Annotated[bool | None, Decides("weights")] = Field(
        None, description="For prodigy: Adam's bias correction. Default false."
    )
    safeguard_warmup: Annotated[bool | None, Decides("weights")] = Field(
        None,
        description="For prodigy: keeps the schedule's warm-up out of the estimate of the rate. "
        "Default false.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.eps) || self.name != 'lion'",
            message="lion has no eps: leave it unset",
            check=lambda o: o.eps is None or o.name != "lion",
            at="eps",
        ),
        Rule(
            cel="!has(self.beta2) || self.name != 'adafactor'",
            message="adafactor has its own schedule for the second moment: leave beta2 unset",
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

    enabled: Annotated[bool, Decides("weights")] = Field(
        False,
        description="Whether to keep the average and use it for samples and exported files. "
        "Default false.",
    )
    decay: Annotated[float, Field(gt=0, lt=1), Decides("weights")] = Field(
        0.999,
        description="Fraction of the old average kept at each optimizer step, above 0 and below 1. "
        "Default 0.999.",
    )
    warmup: Annotated[bool, Decides("weights")] = Field(
        True,
        description="Whether the decay grows with the number of steps, (1 + n) / (10 + n), so that "
        "the first weights are soon forgotten. Default true.",
    )


class Training(ApiModel):
    """Length of the training, batch size, optimizer and learning rate."""

    steps: (
        Annotated[int, Field(ge=1, le=10_000_000), Decides("weights", resume="length")] | None
    ) = Field(None, description="Optimizer steps to train. Exactly one of steps and epochs is set.")
    epochs: (
        Annotated[int, Field(ge=1, le=1_000_000), Decides("weights", resume="length")] | None
    ) = Field(None, description="Passes over the dataset. Exactly one of steps and epochs is set.")
    batch_size: Annotated[int, Field(ge=1, le=1024), Decides("order", "weights", "norms")] = Field(
        1, description="Images per micro-batch of a GPU. Default 1."
    )
    gradient_accumulation: Annotated[
        int, Field(ge=1, le=65536), Decides("order", "weights", "norms")
    ] = Field(
        1,
        description="Micro-batches per optimizer step over all GPUs: more GPUs make a step faster "
        "and leave its batch unchanged. At least the number of GPUs. Default 1.",
    )
    learning_rate: Annotated[float, Field(gt=0, le=10), Decides("weights")] | None = Field(
        None,
        description="Peak learning rate, above 0 to 10. Default 1e-4. prodigy multiplies the rate "
        "it finds by this: default 1.",
    )
    learning_rates: Annotated[
        dict[str, Annotated[float, Field(gt=0, le=10)]],
        Field(max_length=64),
        MAP_ATOMIC,
        PatternKeys,
        Decides("weights"),
    ] = Field(
        default_factory=dict,
        description="Peak learning rate by factor: keys are regular expressions matched against "
        "the end of a factor's name (its layer's, then .lora_A, .lora_B or, of DoRA, "
        ".lora_magnitude_vector), such as text_encoder.*, mid_block.* or .*to_k.lora_B; the first "
        "that matches wins over learningRate. All follow the schedule. Default: none, at most 64.",
    )
    lora_plus_ratio: Annotated[float, Field(gt=0, le=1000), Decides("weights")] = Field(
        1.0,
        description="The rate of every lora_B is multiplied by this (LoRA+), above 0 to 1000. "
        "Default 1; LoRA+ recommends about 16.",
    )
    schedule: Schedule = Field(default_factory=Schedule)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    ema: Average = Field(default_factory=Average)
    max_grad_norm: Annotated[float, Field(ge=0, le=1e6), Decides("weights")] = Field(
        1.0, description="Gradients are clipped to this norm; 0 turns clipping off. Default 1."
    )
    min_snr_gamma: Annotated[float, Field(gt=0, le=1000), Decides("weights")] | None = Field(
        None,
        description="Min-SNR weighting: a sample's loss is weighted as if its signal-to-noise "
        "ratio were at most this, for epsilon and for v (Hang et al. 2023 use 5). Above 0, up to "
        "1000. Default: no weighting.",
    )
    noise_offset: Annotated[float, Field(ge=0, le=1), Decides("weights")] = Field(
        0.0,
        description="Offset noise: standard deviation of the constant added to each noise channel, "
        "so that very dark and very bright images are learned. 0 to 1; 0.05 to 0.1 is usual. "
        "Default 0.",
    )
    gradient_checkpointing: Annotated[bool, Decides("weights")] = Field(
        False,
        description="Whether to recompute the UNet's activations in the backward pass: slower, but "
        "less memory. Those of trained text encoders are kept, 0.13 GB per caption in 16 bit. "
        "Default false.",
    )
    compile: Annotated[bool, Decides("weights")] = Field(
        False,
        description="Whether to compile the UNet (torch.compile; requires a C compiler, which the "
        "trainer image has). Its first gradient is compared with the uncompiled one; if they "
        "differ, the run continues without compilation. Default false.",
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1), Decides("order", "weights")] = Field(
        0, description="Seed of every random draw. Default 0."
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], Decides("weights")] = Field(
        "auto",
        description="auto (default) uses a GPU and fails if there is none although "
        "workers.gpusPerNode is 1 or more; cpu trains on the CPU; cuda requires a GPU.",
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
            message="prodigy finds one rate for all factors: leave learningRates unset",
            check=lambda t: not t.optimizer.finds_rate or not t.learning_rates,
            at="learningRates",
        ),
        Rule(
            cel="self.optimizer.name != 'prodigy' || self.loraPlusRatio == 1.0",
            message="prodigy finds one rate for all factors: leave loraPlusRatio unset",
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
    """Floating-point types used in training. Defaults lose no gradient."""

    compute: Annotated[ComputeType, Decides("text", "weights", held_as=("model",))] = Field(
        "bf16",
        description="Type of forward and backward passes: bf16 (default), fp32, or fp16, whose "
        "gradients are kept in range by a loss scale that adjusts itself.",
    )
    accumulator: Annotated[FloatType, Decides("weights")] = Field(
        "fp32",
        description="Type of the buffer that sums gradients over a window: fp32 (default). bf16 "
        "needs allowLossyPrecision.",
    )
    master_weights: Annotated[FloatType, Decides("weights")] = Field(
        "fp32",
        description="Type of the weights that the optimizer updates: fp32 (default). bf16 needs "
        "allowLossyPrecision: most updates of lora_A vanish in it.",
    )
    allow_lossy_precision: Annotated[bool, Decides("weights")] = Field(
        False, description="Accept settings that are known to lose gradients. Default false."
    )
    RULES: ClassVar[tuple[Rule, ...]] = (_lossless("accumulator"), _lossless("masterWeights"))
