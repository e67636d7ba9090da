"""The ``status`` of a LoraTrainingJob, written by the operator.

Every field is optional because a status is filled in over time. The printed time left is a string
because kubectl prints a time in the future as ``<invalid>``.
"""

from typing import Annotated, Literal, get_args

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from kubelora_api.schema import ApiModel, Kube, list_map

DATE_TIME = Kube({"format": "date-time"})
Time = Annotated[str, DATE_TIME]
Severity = Literal["warning", "critical"]
Verdict = Literal["Healthy", "Warning", "Critical", "Unknown"]
Cause = Literal["Data", "Code", "Hardware", "Unknown"]
# In the order of the status.
ConditionType = Literal[
    "Accepted",
    "Queued",
    "Running",
    "Suspended",
    "Restarting",
    "Complete",
    "Failed",
    "NumericallyHealthy",
]


class StatusModel(ApiModel):
    """The base class of status objects; ignores unknown fields, which a newer version may write."""

    model_config = ConfigDict(
        extra="ignore",
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        strict=False,
    )


class Condition(StatusModel):
    """A metav1.Condition."""

    type: Annotated[str, Field(min_length=1, max_length=316)] = Field(
        description="Type, such as Running."
    )
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: Annotated[int, Field(ge=0)] = Field(
        0, description="Generation of the spec that the condition is about."
    )
    last_transition_time: Time = Field(description="When the status changed last.")
    reason: Annotated[str, Field(min_length=1, max_length=1024)] = Field(
        description="Reason for the status, as one CamelCase term."
    )
    message: Annotated[str, Field(max_length=32768)] = Field(
        description="What happened and what to do, in sentences."
    )


class Progress(StatusModel):
    """Progress of the training, as last reported by the pods."""

    step: int | None = Field(None, description="Optimizer steps done.")
    total_steps: int | None = Field(None, description="Optimizer steps planned.")
    percent: str | None = Field(None, description="Percentage of the steps done, such as 42%.")
    samples_per_second: float | None = Field(None, description="Images per second over all GPUs.")
    eta: str | None = Field(None, description="Time left, such as 1h20m.")
    estimated_completion_time: Time | None = Field(
        None, description="When the last step is expected to be done."
    )
    loss: float | None = Field(None, description="Mean loss of the last optimizer step.")
    useful_seconds: int | None = Field(
        None,
        description="Seconds spent on the steps done, over all attempts. Steps that were lost and "
        "computed again count once.",
    )
    goodput: str | None = Field(
        None, description="usefulSeconds as a percentage of activeSeconds, such as 97%."
    )
    last_report_time: Time | None = Field(None, description="Time of the last report of a pod.")


class Finding(StatusModel):
    """A numerical problem found by the watchdog."""

    name: Annotated[str, Field(max_length=64)] = Field(description="Name, such as UpdatesLost.")
    severity: Severity = Field(description="warning or critical.")
    group: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="Group of layers that it is about; none if it is about all."
    )
    value: float | None = Field(None, description="Measured value.")
    threshold: float | None = Field(None, description="Limit that the value is compared with.")
    since_step: int | None = Field(None, description="First optimizer step with this finding.")
    message: Annotated[str, Field(max_length=1024)] = Field(
        description="What was found, its likely cause and what to do."
    )
    cause: Cause | None = Field(
        None,
        description="What the step shows when it is computed again. Hardware: another gradient. "
        "Data: the same one, and its samples alone show it. Code: the same one, and all samples "
        "show it. Unknown: neither can be known. Only critical findings have a cause.",
    )
    samples: Annotated[
        list[Annotated[str, Field(max_length=128)]] | None,
        Field(max_length=4),
        Kube({"x-kubernetes-list-type": "atomic"}),
    ] = Field(None, description="Files of the samples that the cause is about, at most 4.")
    node: Annotated[str, Field(max_length=253)] | None = Field(
        None, description="Node that computed the step."
    )
    device: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="Model and UUID of the device that computed the step."
    )


class HealthStatus(StatusModel):
    """Numerical health of the run."""

    verdict: Verdict = Field(
        "Unknown",
        description="Severity of the worst finding, or Healthy; Unknown before the first verdict.",
    )
    findings: Annotated[
        list[Finding], Field(max_length=10), Kube({"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list, description="Findings so far, at most 10.")


class CheckpointStatus(StatusModel):
    """The newest checkpoint."""

    step: int = Field(description="Optimizer step after which it was saved.")
    uri: Annotated[str, Field(max_length=1024)] = Field(description="Where it was saved.")


class Artifact(StatusModel):
    """A file written by the job."""

    uri: Annotated[str, Field(max_length=1024)] = Field(description="Where the file is.")
    sha256: Annotated[str, Field(max_length=64)] = Field(description="Its SHA-256, in hex.")
    bytes: int = Field(description="Its size.")


class CountedRun(StatusModel):
    """The pod whose running time activeSeconds counted last."""

    attempt: int = Field(description="Number of its attempt.")
    uid: Annotated[str, Field(max_length=64)] = Field(description="UID of the pod.")
    start_time: Time = Field(description="When its trainer started.")
    end_time: Time | None = Field(None, description="When its trainer ended, if it has.")
    seconds: int = Field(description="Seconds of it that activeSeconds holds.")


class JobStatus(StatusModel):
    """Observed state of the job."""

    observed_generation: int | None = Field(
        None, description="Generation of the spec that this status is about."
    )
    state: str | None = Field(
        None, description="Summary of the conditions, shown in the STATE column."
    )
    conditions: Annotated[list[Condition], Field(max_length=16), list_map("type")] = Field(
        default_factory=list,
        description=f"Conditions of the types {', '.join(get_args(ConditionType))}.",
    )
    attempt: int = Field(0, description="Number of the current attempt, 0 before the first one.")
    child_uid: str | None = Field(None, description="UID of the attempt's batch/v1 Job.")
    restarts: int = Field(0, description="Restarts counted against restartPolicy.maxRestarts.")
    free_restarts: int = Field(
        0, description="Restarts in a window of 24 h that don't count against maxRestarts."
    )
    free_restarts_since: Time | None = Field(None, description="When that window began.")
    unknown_ends: int = Field(
        0, description="Attempts in that window whose Job was gone before its outcome was known."
    )
    out_of_memory_step: int | None = Field(
        None, description="Steps done when an attempt ran out of memory; twice the same is final."
    )
    avoided_nodes: Annotated[
        list[Annotated[str, Field(max_length=253)]],
        Field(max_length=4),
        Kube({"x-kubernetes-list-type": "atomic"}),
    ] = Field(
        default_factory=list,
        description="Nodes whose GPU failed, the last one last. New attempts prefer others.",
    )
    start_time: Time | None = Field(None, description="When the first attempt was created.")
    completion_time: Time | None = Field(None, description="When the job ended.")
    active_seconds: int | None = Field(
        None,
        description="Seconds for which the trainer of index 0 ran, over all attempts. Up to a "
        "minute old while it runs.",
    )
    counted_run: CountedRun | None = Field(
        None, description="The running time that activeSeconds counted last."
    )
    pending_since: Time | None = Field(
        None, description="Since when the job waits for all its pods to run, outside of a queue."
    )
    progress: Progress | None = None
    health: HealthStatus | None = None
    checkpoint: CheckpointStatus | None = None
    artifacts: Annotated[
        list[Artifact], Field(max_length=32), Kube({"x-kubernetes-list-type": "atomic"})
    ] = Field(default_factory=list)
