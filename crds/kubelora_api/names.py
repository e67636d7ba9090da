"""Names shared by operator and trainer: API group, labels, environment, paths, exit codes.

A name that is written twice diverges; here each is written once.
"""

from enum import IntEnum, StrEnum
from typing import Final

GROUP: Final = "kubelora.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "LoraTrainingJob"
PLURAL: Final = "loratrainingjobs"
SINGULAR: Final = "loratrainingjob"
SHORT_NAME: Final = "ltj"
NAME_PATTERN: Final = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_MAX_LENGTH: Final = 40
"""What `child_name` and Kubernetes append keeps a pod's host name below 63 characters."""

LABEL_JOB: Final = f"{GROUP}/job"
LABEL_JOB_UID: Final = f"{GROUP}/job-uid"
LABEL_ATTEMPT: Final = f"{GROUP}/attempt"
LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
TRAINER_APP: Final = "kubelora-trainer"
OPERATOR_APP: Final = "kubelora-operator"
LABEL_QUEUE_NAME: Final = "kueue.x-k8s.io/queue-name"
LABEL_PRIORITY_CLASS: Final = "kueue.x-k8s.io/priority-class"
ANNOTATION_BEGUN_WITH: Final = f"{GROUP}/begun-with"
"""Of an attempt's Job: digests of the parts of the spec that only the next attempt takes up."""
ANNOTATION_COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
ANNOTATION_ACKNOWLEDGED: Final = f"{GROUP}/acknowledged"
"""On a LoraTrainingJob: alerts that its user knows of, such as ``UpdatesLost@2,JobSuspended@2``."""
GPU_RESOURCE: Final = "nvidia.com/gpu"

TRAINER_CONTAINER: Final = "trainer"
METRICS_PORT_NAME: Final = "metrics"
METRICS_PORT: Final = 9464
"""In the range of Prometheus exporters; a process without root can't open one below 1024."""
RENDEZVOUS_PORT_NAME: Final = "rendezvous"
RENDEZVOUS_PORT: Final = 29400
"""Port of the rendezvous store on node 0, when there are several nodes."""

ENV_ATTEMPT: Final = "KUBELORA_ATTEMPT"
ENV_NODE: Final = "KUBELORA_NODE"
ENV_COMPLETION_INDEX: Final = "JOB_COMPLETION_INDEX"
ENV_MASTER_ADDR: Final = "MASTER_ADDR"
ENV_MASTER_PORT: Final = "MASTER_PORT"
ENV_TERMINATION_LOG: Final = "KUBELORA_TERMINATION_LOG"
"""File for the final report (only set in pods)."""
RESERVED_ENV_PREFIX: Final = "KUBELORA_"

JOB_DIRECTORY: Final = "/kubelora/job"
JOB_FILE: Final = "job.json"
CLAIMS_DIRECTORY: Final = "/kubelora/claims"
"""A claim ``photos`` is mounted at ``/kubelora/claims/photos`` in a pod."""
TERMINATION_LOG: Final = "/dev/termination-log"
TERMINATION_MESSAGE_MAX_BYTES: Final = 4096
"""The kubelet cuts a container's termination message here, which would break its JSON."""


class ExitCode(IntEnum):
    """Exit codes of a training process."""

    DONE = 0
    INTERNAL = 1
    """Unexpected error. The operator counts it against ``restartPolicy.maxRestarts``."""
    CONFIGURATION = 2
    """The job file, the model, the data or the output location is invalid. Never retried."""
    NUMERICAL = 3
    """A start-up check failed, a gradient is not finite, or the health policy is Fail."""
    PEER_LOST = 4
    """Another rank was lost; the cause is in that rank's report."""
    HELD = 5
    """The health policy is Suspend. A checkpoint is saved, and the run waits for its user."""
    OUT_OF_MEMORY = 6
    """Memory ran out, of the GPU or of the machine. Final if it happens twice at the same step."""
    DEVICE = 7
    """The GPU or its driver failed or cannot be used. The next attempt prefers another node."""
    INTERRUPTED = 75
    """Stopped on request after a checkpoint was saved. Does not count as a restart."""


class OutputPath(StrEnum):
    """Paths relative to the output directory."""

    ADAPTER = "adapter"
    DIFFUSERS_WEIGHTS = "adapter/pytorch_lora_weights.safetensors"
    CHECKPOINTS = "checkpoints"
    EXPORTS = "exports"
    """Adapters of single checkpoints, which `kubelora export` writes."""
    SAMPLES = "samples"
    RUN_LOG = "metrics.parquet"
    GROUP_LOG = "groups.parquet"
    CATEGORY_LOG = "categories.parquet"
    GRADIENTS = "gradients"
    PREFLIGHT = "preflight.json"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"
    MANIFEST = "manifest.json"


CHECKPOINT_MANIFEST: Final = "checkpoint.json"
"""File that makes a directory a checkpoint, in that directory."""


def kohya_weights(job_name: str) -> str:
    """Return the path of the adapter in kohya's format, relative to the output directory."""
    return f"{OutputPath.ADAPTER}/{job_name}.safetensors"
