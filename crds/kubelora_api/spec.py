"""What a user asks for: the ``spec`` of a LoraTrainingJob, group by group.

The docstring of a class and the description of a field are what `kubectl explain` prints: they name
default, bounds and units. A field is here only when the trainer or the operator acts on it.
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints, TypeAdapter
from pydantic_core import SchemaError

from kubelora_api import places
from kubelora_api.pod import PodTemplate
from kubelora_api.schema import LIST_ATOMIC, MAP_ATOMIC, ApiModel, Rule

FloatType = Literal["bf16", "fp32"]


def _place_rule(schemes: tuple[str, ...]) -> Rule:
    pattern = places.pattern_of(schemes)

    def on_cluster(uri: str) -> bool:
        return bool(re.search(pattern, uri)) and not places.has_parent_step(uri)

    return Rule(
        cel=f"self.matches({_cel_string(pattern)}) && !self.matches({_cel_string(_PARENT_STEP)})",
        message=f"unknown place: use {places.forms_of(schemes)}, without '..'",
        check=on_cluster,
        local=lambda uri: places.is_local(uri) or on_cluster(uri),
    )


_PARENT_STEP = r"/\.\.(/|$)"


def _cel_string(text: str) -> str:
    return "r'" + text + "'"


def _compiles(pattern: str) -> bool:
    """Whether ``pattern`` is a regular expression for Python and for RE2.

    The Rust engine inside pydantic has RE2's syntax (no look-around, no back-references).
    """
    try:
        re.compile(pattern)
        TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)])
    except (re.error, SchemaError):
        return False
    return True


PatternKeys = Rule(
    cel="self.all(k, ''.matches(k) || !''.matches(k))",
    message="every key must be a regular expression (RE2 syntax) over module names",
    check=lambda patterns: all(_compiles(p) for p in patterns),
)
PatternItems = Rule(
    cel="self.all(p, ''.matches(p) || !''.matches(p))",
    message="every item must be a regular expression (RE2 syntax) over layer names",
    check=lambda patterns: all(_compiles(p) for p in patterns),
)
Pattern = Annotated[str, Field(min_length=1, max_length=256)]
InputPlace = Annotated[
    str, Field(min_length=1, max_length=1024), _place_rule(places.CLUSTER_SCHEMES)
]
OutputPlace = Annotated[str, Field(min_length=1, max_length=1024), _place_rule(("pvc",))]
Prompt = Annotated[str, Field(max_length=2048)]
Rank = Annotated[int, Field(ge=1, le=1024)]
Alpha = Annotated[float, Field(gt=0, le=65536)]


class Model(ApiModel):
    """The base model to adapt: an SDXL pipeline in diffusers layout."""

    uri: InputPlace = Field(
        description="Where the pipeline is: hf://org/repo[@revision], pvc://claim/path or "
        "s3://bucket/prefix."
    )
    variant: Annotated[str, Field(min_length=1, max_length=32)] | None = Field(
        None, description="Variant of the weight files, such as fp16. Default: the plain files."
    )
    vae: InputPlace | None = Field(
        None,
        description="Another VAE in place of the pipeline's own, such as "
        "hf://madebyollin/sdxl-vae-fp16-fix.",
    )
    prediction_type: Literal["auto", "epsilon", "v_prediction"] = Field(
        "auto",
        description="What the UNet predicts: epsilon (the noise), v_prediction, or auto (default): "
        "what the model's scheduler says.",
    )
    zero_terminal_snr: bool = Field(
        False,
        description="true rescales the noise schedule so that its last step is pure noise, and "
        "draws samples from there. Needs a model that predicts v. Default false: the model's own "
        "schedule.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!self.zeroTerminalSnr || self.predictionType != 'epsilon'",
            message="zeroTerminalSnr needs a model that predicts v: of pure noise the noise is "
            "known already",
            check=lambda m: not m.zero_terminal_snr or m.prediction_type != "epsilon",
            at="zeroTerminalSnr",
        ),
    )


class Buckets(ApiModel):
    """Aspect-ratio buckets: training sizes of about the area of resolution x resolution."""

    enabled: bool = Field(
        False,
        description="true trains each image at the size nearest to its shape, one size per "
        "micro-batch; false (default) trains every image as a square.",
    )
    step: Annotated[int, Field(ge=8, le=512, multiple_of=8)] = Field(
        64, description="Edges are multiples of this many pixels. Default 64, 8 to 512."
    )
    min_edge: Annotated[int, Field(ge=8, le=8192)] | None = Field(
        None, description="Shortest edge in pixels, 8 to 8192. Default: half the resolution."
    )
    max_edge: Annotated[int, Field(ge=8, le=8192)] | None = Field(
        None, description="Longest edge in pixels, 8 to 8192. Default: twice the resolution."
    )


class Captions(ApiModel):
    """What happens to each caption before the text encoders read it."""

    prefix: Annotated[str, Field(max_length=256)] = Field(
        "",
        description="Put in front of every caption with a separator, such as a trigger word. "
        "Default: nothing. Up to 256 characters.",
    )
    shuffle_tags: bool = Field(
        False,
        description="Shuffle the caption's tags anew each time it is used. Default false.",
    )
    keep_tags: Annotated[int, Field(ge=0, le=256)] = Field(
        0,
        description="First tags of the caption that keep their place when tags are shuffled; the "
        "prefix always does. Default 0, up to 256.",
    )
    separator: Annotated[str, Field(min_length=1, max_length=8)] = Field(
        ",", description="What stands between tags. Default a comma, 1 to 8 characters."
    )


Column = Annotated[str, Field(min_length=1, max_length=128)]


class Columns(ApiModel):
    """Names of the columns of .parquet and .arrow files, and of the fields of metadata.jsonl."""

    image: Column = Field(
        "image",
        description="Column of a table with the image files' bytes, alone or as the field bytes "
        "of a struct. Default image.",
    )
    caption: Column = Field("text", description="Column or field with captions. Default text.")
    category: Column = Field(
        "category", description="Column or field with categories. Default category."
    )


class Source(ApiModel):
    """More images, trained on together with those of dataset.uri."""

    uri: InputPlace = Field(description="Where they are, like dataset.uri.")
    repeats: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="How often an epoch sees each image. Default 1, 1 to 1000."
    )
    loss_weight: Annotated[float, Field(gt=0, le=100)] = Field(
        1.0,
        description="Weight of these images' losses, as prior-preservation images need it. Default "
        "1, above 0, up to 100.",
    )
    category: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        None, description="Category of all these images. Default: as found with each image."
    )
    caption: Annotated[str, Field(min_length=1, max_length=2048)] | None = Field(
        None, description="Caption of those without one. Default: the empty caption."
    )
    use_prefix: bool = Field(
        True,
        description="Whether captions.prefix is put in front here too. Default true; false for "
        "prior-preservation images.",
    )


def _buckets_hold_the_resolution(dataset: "Dataset") -> bool:
    low, high = dataset.buckets.min_edge, dataset.buckets.max_edge
    return (low is None or low <= dataset.resolution) and (
        high is None or high >= dataset.resolution
    )


class Dataset(ApiModel):
    """The images and captions to train on."""

    uri: InputPlace = Field(
        description="A folder of images with captions in metadata.jsonl (file_name, text) or in "
        ".txt or .caption files beside them, or of .parquet or .arrow files with images in them."
    )
    columns: Columns = Field(default_factory=Columns)
    repeats: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="How often an epoch sees each image of uri. Default 1, 1 to 1000."
    )
    extra_sources: Annotated[list[Source], Field(max_length=16), LIST_ATOMIC] = Field(
        default_factory=list,
        description="More places with images, at most 16. Default: none.",
    )
    resolution: Annotated[int, Field(ge=64, le=4096, multiple_of=8)] = Field(
        1024,
        description="Edge in pixels of the square that images are resized to and cropped from. "
        "Default 1024, 64 to 4096, a multiple of 8.",
    )
    caption_dropout: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Share of samples, 0 to 1, trained on an empty caption, which "
        "classifier-free guidance needs. Default 0.",
    )
    captions: Captions = Field(default_factory=Captions)
    buckets: Buckets = Field(default_factory=Buckets)
    crop: Literal["random", "center"] = Field(
        "random",
        description="Where the part of an image lies that its training size shows: random "
        "(default, anew each time) or center.",
    )
    flip: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Share of samples, 0 to 1, that are mirrored left to right. Default 0: text "
        "and logos would be learned mirrored.",
    )
    cache: OutputPlace | None = Field(
        None,
        description="pvc://claim/path where latents and text embeddings are kept for later runs, "
        "keyed by content, model and transform. Several runs may share it. Latents are kept for "
        "crop: center, or images of exactly their training size's shape; text embeddings unless "
        "tags are shuffled. Default: no cache on disk.",
    )
    on_bad_image: Literal["fail", "skip"] = Field(
        "fail",
        description="What an image that can't be used does: fail ends the run before training "
        "(default), skip leaves it out and says so in preflight.json.",
    )
    on_duplicate: Literal["keep", "skip"] = Field(
        "keep",
        description="What a file does whose bytes were met before: keep trains on it too and says "
        "so (default), skip leaves it out.",
    )
    min_short_edge: Annotated[int, Field(ge=0, le=16384)] = Field(
        0,
        description="An image whose shorter edge has fewer pixels can't be used. Default 0, up to "
        "16384: small images are enlarged, and noted.",
    )
    max_aspect_ratio: Annotated[float, Field(ge=1, le=1000)] | None = Field(
        None,
        description="An image whose longer edge is more than this many times its shorter one "
        "can't be used. 1 to 1000. Default: no limit.",
    )
    background: Annotated[str, Field(pattern="^#[0-9a-fA-F]{6}$", max_length=7)] = Field(
        "#ffffff",
        description="Colour that transparent pixels are laid on, as #rrggbb. Default #ffffff.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.buckets) || ((!has(self.buckets.minEdge) || self.buckets.minEdge <= "
            "self.resolution) && (!has(self.buckets.maxEdge) || self.buckets.maxEdge >= "
            "self.resolution))",
            message="the resolution must lie between buckets.minEdge and buckets.maxEdge",
            check=_buckets_hold_the_resolution,
            at="buckets",
        ),
    )


class Adapter(ApiModel):
    """The LoRA adapter: which layers get one, how large, how initialised."""

    rank: Rank = Field(
        16, description="Rank of the update, the width of lora_A. Default 16, 1 to 1024."
    )
    alpha: Alpha | None = Field(
        None,
        description="Scale: the update is multiplied by alpha / rank. Above 0. Default: the rank.",
    )
    rs_lora: bool = Field(
        False,
        description="true multiplies the update by alpha / sqrt(rank) (rank-stabilised LoRA), so "
        "that a large rank learns as fast as a small one. Default false.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Share of the adapter's inputs, 0 to below 1, set to zero at random in each "
        "training pass; the others are scaled up. Default 0.",
    )
    targets: Literal["attention", "attention+feed_forward", "all_linear", "all"] = Field(
        "attention",
        description="Layers of the UNet that get an adapter: attention (default: to_q, to_k, "
        "to_v, to_out.0), attention+feed_forward, all_linear (time and size embeddings too), or "
        "all (with convolutions).",
    )
    target_patterns: Annotated[list[Pattern], Field(max_length=64), LIST_ATOMIC, PatternItems] = (
        Field(
            default_factory=list,
            description="In place of targets: regular expressions matched against the end of a "
            "layer's name, over all linear layers and convolutions of the UNet. Default: none. At "
            "most 64, of up to 256 characters.",
        )
    )
    rank_pattern: Annotated[dict[str, Rank], Field(max_length=64), MAP_ATOMIC, PatternKeys] = Field(
        default_factory=dict,
        description="Rank by module: keys are regular expressions matched against the end of a "
        "module's name, the first that matches wins over rank.",
    )
    alpha_pattern: Annotated[dict[str, Alpha], Field(max_length=64), MAP_ATOMIC, PatternKeys] = (
        Field(default_factory=dict, description="Alpha by module, like rankPattern.")
    )
    init: Literal["kaiming", "gaussian", "orthogonal"] = Field(
        "kaiming",
        description="Initialisation of lora_A; lora_B starts at 0, so a fresh adapter changes "
        "nothing. kaiming (default), gaussian, or orthogonal (orthonormal rows).",
    )
    from_: InputPlace | None = Field(
        None,
        alias="from",
        description="An existing LoRA to start from, in diffusers' or kohya's format: a "
        ".safetensors file, or a place that holds one. Its layers and ranks must be this "
        "adapter's; init is then not used. Default: none.",
    )


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


class Health(ApiModel):
    """What to do when the telemetry finds something wrong."""

    policy: Literal["Warn", "Fail"] = Field(
        "Warn",
        description="Warn (default) reports findings in status and metrics and trains on; Fail "
        "ends the run at the first critical finding with exit code 3, after a checkpoint.",
    )


class Validation(ApiModel):
    """Sample images, drawn with fixed seeds so that steps can be compared."""

    every_steps: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None, description="Optimizer steps between samples. Default: at the end alone."
    )
    prompts: Annotated[list[Prompt], Field(max_length=16), LIST_ATOMIC] = Field(
        default_factory=list, description="Prompts to draw, at most 16. Default: none."
    )
    inference_steps: Annotated[int, Field(ge=1, le=1000)] = Field(
        25, description="Denoising steps per image. Default 25."
    )
    guidance_scale: Annotated[float, Field(ge=0, le=100)] = Field(
        5.0, description="Classifier-free guidance. Default 5."
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        0, description="Seed of the first noise. Default 0."
    )


class Checkpoint(ApiModel):
    """What a run can resume from."""

    every_steps: Annotated[int, Field(ge=1, le=10_000_000)] = Field(
        500, description="Optimizer steps between checkpoints. Default 500."
    )
    keep: Annotated[int, Field(ge=1, le=1000)] = Field(
        3, description="Checkpoints to keep, the newest ones. Default 3."
    )


class Output(ApiModel):
    """Where everything the run makes goes."""

    uri: OutputPlace = Field(description="pvc://claim/path. The folder belongs to one run.")
    dtype: Literal["fp16", "bf16", "fp32"] = Field(
        "bf16",
        description="Type of the numbers in the adapter's files: bf16 (default: half the size, "
        "and what a bf16 run computed with), fp16 (half the size, three more bits, a narrow "
        "range) or fp32.",
    )
    replace_existing: bool = Field(
        False,
        description="Clear away another run's output found there. Default false: refuse.",
    )


class Workers(ApiModel):
    """The pods of one attempt."""

    nodes: Annotated[int, Field(ge=1, le=1)] = Field(
        1, description="Pods. This version trains on one. Default 1."
    )
    gpus_per_node: Annotated[int, Field(ge=0, le=1)] = Field(
        1, description="GPUs of each pod, its nvidia.com/gpu limit: 0 or 1. Default 1."
    )


class RestartPolicy(ApiModel):
    """How often a failed attempt is tried again. Interruptions and evictions are free."""

    max_restarts: Annotated[int, Field(ge=0, le=100)] = Field(
        3, description="Restarts after failures. Default 3, 0 to 100."
    )


def _gpu_limit_agrees(spec: "JobSpec") -> bool:
    resources = spec.pod_template.resources
    limit = resources.limits.get("nvidia.com/gpu") if resources else None
    return limit is None or str(limit) == str(spec.workers.gpus_per_node)


class JobSpec(ApiModel):
    """What to train, on what, how, and where the result goes."""

    model: Model
    dataset: Dataset
    adapter: Adapter = Field(default_factory=Adapter)
    training: Training
    precision: Precision = Field(default_factory=Precision)
    health: Health = Field(default_factory=Health)
    validation: Validation = Field(default_factory=Validation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    output: Output
    workers: Workers = Field(default_factory=Workers)
    pod_template: PodTemplate = Field(default_factory=PodTemplate)
    queue_name: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        None, description="Kueue LocalQueue that admits the job's pods."
    )
    suspend: bool = Field(
        False,
        description="true stops the pods, which save a checkpoint first; false starts a new "
        "attempt from it. Default false.",
    )
    restart_policy: RestartPolicy = Field(default_factory=RestartPolicy)
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.podTemplate.resources) || !has(self.podTemplate.resources.limits) || "
            "!('nvidia.com/gpu' in self.podTemplate.resources.limits) || "
            "(type(self.podTemplate.resources.limits['nvidia.com/gpu']) == int "
            "? self.podTemplate.resources.limits['nvidia.com/gpu'] == self.workers.gpusPerNode "
            ": self.podTemplate.resources.limits['nvidia.com/gpu'] == "
            "string(self.workers.gpusPerNode))",
            message="the limit of nvidia.com/gpu in podTemplate.resources must equal "
            "workers.gpusPerNode; leave it out, gpusPerNode sets it",
            check=_gpu_limit_agrees,
            at="podTemplate",
        ),
    )


IMMUTABLE_GROUPS: tuple[str, ...] = (
    "model",
    "dataset",
    "adapter",
    "training",
    "precision",
    "validation",
    "checkpoint",
    "output",
    "workers",
)
"""Groups that decide the weights or where they go: fixed once an attempt has started."""
