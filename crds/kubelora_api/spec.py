"""The ``spec`` of a LoraTrainingJob.

`kubectl explain` prints the docstrings of the classes and the descriptions of the fields, which
name default, bounds and units. A field exists only if the trainer or the operator acts on it.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kubelora_api.dataset_spec import Dataset
from kubelora_api.decides import Decides
from kubelora_api.gradient_dump_spec import DumpGradients
from kubelora_api.pod import PodTemplate
from kubelora_api.schema import LIST_ATOMIC, MAP_ATOMIC, ApiModel, Rule
from kubelora_api.training_spec import Precision, Training
from kubelora_api.types import (
    Alpha,
    InputPlace,
    OutputPlace,
    Pattern,
    PatternItems,
    PatternKeys,
    Prompt,
    PushPlace,
    QueueName,
    Rank,
    TextEncoder,
)

_PIPELINE = Decides("pixels", "text", "weights", held_as=("model",))
Seconds = Annotated[int, Field(le=2**31 - 1)]
PredictionType = Literal["auto", "epsilon", "v_prediction"]


class Model(ApiModel):
    """The base model to adapt: an SDXL pipeline in diffusers layout, or one file of weights."""

    uri: Annotated[InputPlace, _PIPELINE] = Field(
        description="Location of the pipeline: hf://org/repo[/path][@revision], pvc://claim/path "
        "or "
        "s3://bucket/prefix. Or a .safetensors file in SDXL's original layout, given by its name "
        "or "
        "as the only file in its directory."
    )
    config: Annotated[InputPlace | None, _PIPELINE] = Field(
        None,
        description="For a single-file model: the pipeline that provides its configuration and "
        "tokenizers; from hf:// only those files are downloaded. Default "
        "hf://stabilityai/stable-diffusion-xl-base-1.0.",
    )
    variant: Annotated[str, Field(min_length=1, max_length=32), _PIPELINE] | None = Field(
        None, description="Variant of the weight files, such as fp16. Default: the plain files."
    )
    vae: Annotated[InputPlace | None, Decides("pixels", "weights", held_as=("model",))] = Field(
        None,
        description="VAE to use instead of the pipeline's own, such as "
        "hf://madebyollin/sdxl-vae-fp16-fix. Default: the pipeline's own.",
    )
    prediction_type: Annotated[PredictionType, Decides("weights")] = Field(
        "auto",
        description="What the UNet predicts: epsilon (the noise), v_prediction, or auto (default): "
        "as set in the model's scheduler.",
    )
    zero_terminal_snr: Annotated[bool, Decides("weights")] = Field(
        False,
        description="Whether to rescale the noise schedule so that its last step is pure noise, "
        "and to start sampling there. Requires a model that predicts v. Default false: the model's "
        "own schedule.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!self.zeroTerminalSnr || self.predictionType != 'epsilon'",
            message="zeroTerminalSnr requires a model that predicts v, because predicting the "
            "noise "
            "in pure noise is trivial: set predictionType to v_prediction or leave zeroTerminalSnr "
            "unset",
            check=lambda m: not m.zero_terminal_snr or m.prediction_type != "epsilon",
            at="zeroTerminalSnr",
        ),
    )


class Adapter(ApiModel):
    """The LoRA adapter: its target layers, rank and initialization."""

    rank: Annotated[Rank, Decides("weights", "norms")] = Field(
        16, description="Rank of the update, the width of lora_A. Default 16, 1 to 1024."
    )
    alpha: Annotated[Alpha | None, Decides("weights")] = Field(
        None,
        description="Scale: the update is multiplied by alpha / rank. Above 0. Default: the rank.",
    )
    rs_lora: Annotated[bool, Decides("weights")] = Field(
        False,
        description="Whether to multiply the update by alpha / sqrt(rank) (rank-stabilized LoRA), "
        "so that a large rank learns as fast as a small one. Default false.",
    )
    dora: Annotated[bool, Decides("weights")] = Field(
        False,
        description="Whether to train DoRA: the magnitude of each output channel's weights is "
        "trained separately from their direction. It adds one parameter per channel, and time "
        "because norms are computed in every pass. The adapter is only exported in diffusers' "
        "format. Default false.",
    )
    dropout: Annotated[float, Field(ge=0, lt=1), Decides("weights")] = Field(
        0.0,
        description="Fraction of the adapter's inputs, 0 to below 1, that is randomly set to zero "
        "in each training pass; the others are scaled up. Default 0.",
    )
    targets: Annotated[
        Literal["attention", "attention+feed_forward", "all_linear", "all"],
        Decides("weights", "norms"),
    ] = Field(
        "attention",
        description="Layers of the UNet that get an adapter: attention (default: to_q, to_k, "
        "to_v, to_out.0), attention+feed_forward, all_linear (time and size embeddings too), or "
        "all (with convolutions).",
    )
    text_encoders: Annotated[
        list[TextEncoder], Field(max_length=2), LIST_ATOMIC, Decides("text", "weights")
    ] = Field(
        default_factory=list,
        description="Text encoders that get an adapter too: text_encoder (CLIP ViT-L), "
        "text_encoder_2 (OpenCLIP bigG), or both. With targets attention their q_proj, k_proj, "
        "v_proj and out_proj, else fc1 and fc2 too. Captions are then encoded in every step. "
        "Default: none.",
    )
    target_patterns: Annotated[
        list[Pattern], Field(max_length=64), LIST_ATOMIC, PatternItems, Decides("weights", "norms")
    ] = Field(
        default_factory=list,
        description="Instead of targets: regular expressions matched against the end of a "
        "layer's name, over all linear layers and convolutions of the UNet. Default: none. At "
        "most 64, of up to 256 characters.",
    )
    rank_pattern: Annotated[
        dict[str, Rank], Field(max_length=64), MAP_ATOMIC, PatternKeys, Decides("weights", "norms")
    ] = Field(
        default_factory=dict,
        description="Rank by module: keys are regular expressions matched against the end of a "
        "module's name, the first that matches wins over rank. Names in text encoders begin with "
        "text_encoder. or text_encoder_2.",
    )
    alpha_pattern: Annotated[
        dict[str, Alpha], Field(max_length=64), MAP_ATOMIC, PatternKeys, Decides("weights")
    ] = Field(default_factory=dict, description="Alpha by module, like rankPattern.")
    init: Annotated[Literal["kaiming", "gaussian", "orthogonal"], Decides("weights")] = Field(
        "kaiming",
        description="Initialisation of lora_A; lora_B starts at 0, so a fresh adapter changes "
        "nothing. kaiming (default), gaussian, or orthogonal (orthonormal rows).",
    )
    from_: Annotated[InputPlace | None, Decides("weights")] = Field(
        None,
        alias="from",
        description="Existing LoRA to start from, in diffusers' or kohya's format: a .safetensors "
        "file, or a directory that contains one. Its layers and ranks must match this adapter; "
        "init "
        "is then ignored. Default: none.",
    )


class Health(ApiModel):
    """What to do when the telemetry finds something wrong."""

    policy: Annotated[
        Literal["Warn", "Suspend", "Fail", "Rollback"], Decides("nothing", live=True)
    ] = Field(
        "Warn",
        description="Action on a critical finding. Warn (default): report it in status and "
        "metrics, "
        "and continue training. Suspend: save a checkpoint and stop the pods; the job waits until "
        "its spec is changed, or suspend is set to true and back to false. Fail: save a checkpoint "
        "and fail the job. Rollback: return once to the last checkpoint before the finding and "
        "continue with data not used before; a second critical finding fails the job.",
    )
    baseline: Annotated[InputPlace | None, Decides("nothing", live=True)] = Field(
        None,
        description="Output of an earlier good run (its output.uri) to compare with. Differences "
        "are logged and recorded in the manifest; gradient norms outside its range at the same "
        "progress are a critical finding. Default: none.",
    )
    dump_gradients: DumpGradients | None = Field(
        None, description="Raw gradients to save for debugging. Default: none."
    )


class Validation(ApiModel):
    """Sample images, drawn with fixed seeds so that steps can be compared."""

    every_steps: Annotated[int, Field(ge=1, le=10_000_000), Decides("samples")] | None = Field(
        None, description="Optimizer steps between samples. Default: only at the end."
    )
    prompts: Annotated[list[Prompt], Field(max_length=16), LIST_ATOMIC, Decides("samples")] = Field(
        default_factory=list, description="Prompts to draw, at most 16. Default: none."
    )
    inference_steps: Annotated[int, Field(ge=1, le=1000), Decides("samples")] = Field(
        25, description="Denoising steps per image. Default 25."
    )
    guidance_scale: Annotated[float, Field(ge=0, le=100), Decides("samples")] = Field(
        5.0, description="Classifier-free guidance. Default 5."
    )
    seed: Annotated[int, Field(ge=0, le=2**31 - 1), Decides("samples")] = Field(
        0, description="Seed of the initial noise. Default 0."
    )


class Checkpoint(ApiModel):
    """Checkpoints that a run resumes from."""

    every_steps: Annotated[int, Field(ge=1, le=10_000_000), Decides("nothing")] = Field(
        500, description="Optimizer steps between checkpoints. Default 500."
    )
    keep: Annotated[int, Field(ge=1, le=1000), Decides("nothing")] = Field(
        3, description="Number of newest checkpoints to keep. Default 3."
    )


class Output(ApiModel):
    """Location and format of the results."""

    uri: Annotated[OutputPlace, Decides("nothing", resume="no")] = Field(
        description="Output directory, as pvc://claim/path. It must not be shared with another run."
    )
    dtype: Annotated[Literal["fp16", "bf16", "fp32"], Decides("nothing")] = Field(
        "bf16",
        description="Data type of the exported adapter: bf16 (default: half the size, and the type "
        "that a bf16 run computes with), fp16 (half the size, three more bits, a narrow range) or "
        "fp32.",
    )
    push: Annotated[PushPlace | None, Decides("nothing")] = Field(
        None,
        description="Where to upload the finished adapter and the manifest: s3://bucket/prefix "
        "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL) or hf://org/repo[@branch] "
        "(HF_TOKEN; a new repository is private). A failed upload is retried by the same job. "
        "Default: no upload.",
    )
    replace_existing: Annotated[bool, Decides("nothing")] = Field(
        False,
        description="Whether to delete another run's output found there. Default false: fail.",
    )


class Tracking(ApiModel):
    """Experiment trackers that receive each step's metrics and the sample images."""

    trackers: Annotated[
        list[Literal["tensorboard", "wandb", "mlflow"]],
        Field(max_length=3),
        LIST_ATOMIC,
        Decides("nothing", live=True),
    ] = Field(
        default_factory=list,
        description="Any of tensorboard (event files in the output), wandb (WANDB_API_KEY, or "
        "WANDB_MODE=offline for files in the output) and mlflow (MLFLOW_TRACKING_URI, else files "
        "in the output); set variables in podTemplate.env. A failing tracker never ends a run. "
        "Default: none.",
    )
    project: Annotated[
        str,
        Field(min_length=1, max_length=128, pattern="^[A-Za-z0-9._-]+$"),
        Decides("nothing", live=True),
    ] = Field(
        "kubelora",
        description="Project (wandb), experiment (mlflow) or directory (tensorboard) of the "
        "runs. Letters, digits and . _ -, up to 128. Default kubelora.",
    )


class Workers(ApiModel):
    """The pods of one attempt."""

    nodes: Annotated[int, Field(ge=1, le=64), Decides("order", resume="yes")] = Field(
        1,
        description="Number of pods, 1 to 64. They share model, data and output; several pods need "
        "claims that several nodes can mount (ReadWriteMany for the output). Default 1.",
    )
    gpus_per_node: Annotated[int, Field(ge=0, le=16), Decides("order", resume="yes")] = Field(
        1,
        description="GPUs per pod, its nvidia.com/gpu limit: 0 to 16. One process runs per GPU, "
        "and "
        "at least one; with training.device cpu it is the number of processes. Default 1.",
    )


class RestartPolicy(ApiModel):
    """Restarts of failed attempts. Interruptions and evictions do not count."""

    max_restarts: Annotated[
        int, Field(ge=0, le=100), Decides("nothing", live=True, at_once=True)
    ] = Field(3, description="Maximum restarts after failures, 0 to 100. Default 3.")


def _ranks(spec: "JobSpec") -> int:
    """Return the number of ranks: one per GPU, at least one per node."""
    return spec.workers.nodes * max(1, spec.workers.gpus_per_node)


def _gpu_limit_agrees(spec: "JobSpec") -> bool:
    resources = spec.pod_template.resources
    limit = resources.limits.get("nvidia.com/gpu") if resources else None
    return limit is None or str(limit) == str(spec.workers.gpus_per_node)


class JobSpec(ApiModel):
    """Desired state of the training job."""

    model: Model
    dataset: Dataset
    adapter: Adapter = Field(default_factory=Adapter)
    training: Training
    precision: Precision = Field(default_factory=Precision)
    health: Health = Field(default_factory=Health)
    validation: Validation = Field(default_factory=Validation)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    output: Output
    tracking: Tracking = Field(default_factory=Tracking)
    workers: Workers = Field(default_factory=Workers)
    pod_template: Annotated[PodTemplate, Decides("nothing", live=True)] = Field(
        default_factory=PodTemplate
    )
    queue_name: Annotated[QueueName, Decides("nothing", live=True)] | None = Field(
        None, description="Name of the Kueue LocalQueue that admits the job's pods."
    )
    suspend: Annotated[bool, Decides("nothing", live=True, at_once=True)] = Field(
        False,
        description="Whether to stop the pods, which save a checkpoint first. Setting it back to "
        "false starts a new attempt from that checkpoint. Default false.",
    )
    restart_policy: RestartPolicy = Field(default_factory=RestartPolicy)
    active_deadline_seconds: (
        Annotated[Seconds, Field(ge=1), Decides("nothing", live=True, at_once=True)] | None
    ) = Field(
        None,
        description="Seconds that the job may run, summed over its attempts; time in which it "
        "is suspended or queued does not count. Then its pods save a checkpoint and the job "
        "fails; if this is raised, it continues from there. At least 1. Default: no limit.",
    )
    pending_deadline_seconds: (
        Annotated[Seconds, Field(ge=1), Decides("nothing", live=True, at_once=True)] | None
    ) = Field(
        None,
        description="Seconds after which a job fails if its pods do not all run, because one can't "
        "be scheduled, pulled or configured; time in a queue does not count. A later change of the "
        "spec continues it. At least 1. Default: 3600 for a pod that holds its GPUs and can't "
        "start for a known cause, no limit for one that waits for a node.",
    )
    ttl_seconds_after_finished: (
        Annotated[Seconds, Field(ge=0), Decides("nothing", live=True, at_once=True)] | None
    ) = Field(
        None,
        description="Seconds after which a complete or failed job is deleted, at least 0. Its "
        "output is kept. Default: it is not deleted.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.podTemplate.resources) || !has(self.podTemplate.resources.limits) || "
            "!('nvidia.com/gpu' in self.podTemplate.resources.limits) || "
            "(type(self.podTemplate.resources.limits['nvidia.com/gpu']) == int "
            "? self.podTemplate.resources.limits['nvidia.com/gpu'] == self.workers.gpusPerNode "
            ": self.podTemplate.resources.limits['nvidia.com/gpu'] == "
            "string(self.workers.gpusPerNode))",
            message="the limit of nvidia.com/gpu in podTemplate.resources must equal "
            "workers.gpusPerNode: leave it unset, gpusPerNode sets it",
            check=_gpu_limit_agrees,
            at="podTemplate",
        ),
        Rule(
            cel="!self.adapter.dora || self.precision.masterWeights == 'fp32'",
            message="adapter.dora requires precision.masterWeights fp32 because updates of a "
            "magnitude are too small for bf16",
            check=lambda s: not s.adapter.dora or s.precision.master_weights == "fp32",
            at="adapter",
        ),
        Rule(
            cel="self.training.gradientAccumulation >= self.workers.nodes * "
            "(self.workers.gpusPerNode > 1 ? self.workers.gpusPerNode : 1)",
            message="training.gradientAccumulation counts the micro-batches of all GPUs together: "
            "set it to workers.nodes times workers.gpusPerNode or more, so that each GPU has one",
            check=lambda s: s.training.gradient_accumulation >= _ranks(s),
            at="training",
        ),
    )
