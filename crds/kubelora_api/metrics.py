"""Names, types and help texts of all metrics, for the trainer, operator, alert rules and docs.

Ratios are between 0 and 1. ``group`` is block and factor of the adapter (``down.lora_A``), a
bounded set: the number of a pod's series does not grow with the number of its modules.
"""

from dataclasses import dataclass
from typing import Final, Literal

MetricType = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True)
class Metric:
    """A metric family. A counter's name ends in ``_total``, as it is exposed."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()


GRAD_NORM: Final = Metric(
    "kubelora_grad_norm",
    "gauge",
    "L2 norm of the accumulated gradient of the last optimizer step, before clipping.",
    ("group",),
)
GRAD_ABSMAX: Final = Metric(
    "kubelora_grad_absmax",
    "gauge",
    "Largest absolute value in the accumulated gradient, before clipping.",
    ("group",),
)
GRAD_ZERO_RATIO: Final = Metric(
    "kubelora_grad_zero_ratio",
    "gauge",
    "Share of the accumulated gradient's elements that are exactly zero.",
    ("group",),
)
GRAD_NONFINITE: Final = Metric(
    "kubelora_grad_nonfinite_total",
    "counter",
    "Elements of accumulated gradients that were NaN or infinite.",
    ("group",),
)
GRAD_UNDERFLOW_RATIO: Final = Metric(
    "kubelora_grad_underflow_ratio",
    "gauge",
    "Share of the non-zero gradient elements that the dtype in use turns into zero.",
    ("group", "dtype"),
)
ABSORBED_RATIO: Final = Metric(
    "kubelora_accumulation_absorbed_ratio",
    "gauge",
    "Share of gradient mass that is lost when a micro-batch is added in the accumulator's dtype.",
    ("group",),
)
UPDATE_LOST_RATIO: Final = Metric(
    "kubelora_update_lost_ratio",
    "gauge",
    "Share of the parameters whose value did not change in the last step although their momentum "
    "is not zero.",
    ("group",),
)
ACCUMULATION_ERROR_RATIO: Final = Metric(
    "kubelora_accumulation_error_ratio",
    "gauge",
    "Error of the last window's sum in the accumulator's dtype, relative to the same sum in fp32. "
    "NaN for an fp32 accumulator.",
    ("group",),
)
UPDATE_SCALE: Final = Metric(
    "kubelora_update_scale",
    "gauge",
    "Root mean square of the last step's parameter changes, divided by the learning rate.",
    ("group",),
)
OPTIMIZER_STUCK_RATIO: Final = Metric(
    "kubelora_optimizer_stuck_ratio",
    "gauge",
    "Share of the second moments that kept their value in the last step although the squared "
    "gradient differs; for adamw8bit, share that is wrong by a factor of more than 4. NaN for "
    "lion, "
    "which has none, and adafactor, which only has them by row and column.",
    ("group",),
)
ADAM_EPS_DAMPING_RATIO: Final = Metric(
    "kubelora_adam_eps_damping_ratio",
    "gauge",
    "Mean of sqrt(v) / (sqrt(v) + eps) over the bias-corrected second moments that are not 0: 1 is "
    "undamped. NaN for lion, which has none, and adafactor, whose eps has another meaning.",
    ("group",),
)
LORA_BALANCE: Final = Metric(
    "kubelora_lora_balance",
    "gauge",
    "How far the gradients of lora_A and lora_B contradict each other, pooled over a block's "
    "pairs: 0 if the chain rule holds. Reported for both factors of the block.",
    ("group",),
)
ADAPTER_SIZE: Final = Metric(
    "kubelora_adapter_size_ratio",
    "gauge",
    "Norm of the adapter's update over that of the weight it is added to, of the module where it "
    "is largest; measured every 5 steps and at checkpoints.",
)
CLIPPED_NORM: Final = Metric(
    "kubelora_clipped_grad_norm",
    "gauge",
    "L2 norm of the gradient passed to the optimizer in the last step, after clipping.",
)
BACKWARD_PASSES: Final = Metric(
    "kubelora_backward_passes",
    "gauge",
    "Backward passes that reached the accumulator in the last window. Fewer than "
    "kubelora_micro_steps: losses were summed before they were differentiated.",
)
MICRO_STEPS: Final = Metric(
    "kubelora_micro_steps", "gauge", "Micro-batches of the last accumulation window."
)
DEAD_MODULE_COUNT: Final = Metric(
    "kubelora_dead_modules",
    "gauge",
    "Adapter modules with a factor whose gradient has been exactly zero for 10 consecutive steps.",
)
WORKING_COPY_STALE_RATIO: Final = Metric(
    "kubelora_working_copy_stale_ratio",
    "gauge",
    "Share of the weights used by the model that differ from their rounded master weights after "
    "the last step.",
)
RANK_DIVERGENCE: Final = Metric(
    "kubelora_rank_divergence",
    "gauge",
    "Largest minus smallest parameter checksum over the ranks. NaN for a single rank.",
)
HOST_MEMORY_PEAK: Final = Metric(
    "kubelora_host_memory_peak_bytes", "gauge", "Peak resident memory of the process so far."
)
DEVICE_MEMORY_PEAK: Final = Metric(
    "kubelora_device_memory_peak_bytes",
    "gauge",
    "Peak accelerator memory allocated by tensors so far. NaN on a CPU.",
)
LEARNING_RATE: Final = Metric(
    "kubelora_learning_rate", "gauge", "Learning rate of the last optimizer step."
)
LOSS: Final = Metric("kubelora_loss", "gauge", "Mean loss of the last optimizer step.")
CATEGORY_LOSS: Final = Metric(
    "kubelora_category_loss",
    "gauge",
    "Mean loss of a category's samples in the last optimizer step that contained any: at most 16 "
    "categories, the smallest ones combined as other.",
    ("category",),
)
LOSS_SCALE: Final = Metric(
    "kubelora_loss_scale",
    "gauge",
    "Loss scale of the last optimizer step. NaN unless compute is fp16.",
)
STEPS_SKIPPED: Final = Metric(
    "kubelora_steps_skipped_total",
    "counter",
    "Optimizer steps skipped because the loss scale was too large for fp16.",
)
STEP: Final = Metric("kubelora_step", "gauge", "Optimizer steps done.")
STEPS_PLANNED: Final = Metric("kubelora_steps_planned", "gauge", "Optimizer steps planned.")
STEP_DURATION: Final = Metric(
    "kubelora_step_duration_seconds", "gauge", "Wall time of the last optimizer step, in seconds."
)
SAMPLES: Final = Metric(
    "kubelora_samples_total", "counter", "Images of all optimizer steps, over all GPUs."
)
DATA_WAIT: Final = Metric(
    "kubelora_data_wait_seconds_total",
    "counter",
    "Seconds for which training has waited for images to be read.",
)
CHECKPOINT_STEP: Final = Metric(
    "kubelora_checkpoint_step", "gauge", "Optimizer step of the newest checkpoint."
)
CHECKPOINT_TIME: Final = Metric(
    "kubelora_checkpoint_timestamp_seconds", "gauge", "Unix time of the newest checkpoint."
)
NUMERICS_INFO: Final = Metric(
    "kubelora_numerics_info",
    "gauge",
    "Always 1, with the run's dtypes as labels.",
    ("compute", "accumulator", "master_weights"),
)
HEALTH_FINDING: Final = Metric(
    "kubelora_health_finding",
    "gauge",
    "1 while the in-pod watchdog reports the finding, 0 once it cleared.",
    ("finding", "severity"),
)
TRACKERS_FAILED: Final = Metric(
    "kubelora_trackers_failed",
    "gauge",
    "Experiment trackers of spec.tracking that failed in this attempt and are no longer used.",
)

TRAINER_METRICS: Final = (
    GRAD_NORM,
    GRAD_ABSMAX,
    GRAD_ZERO_RATIO,
    GRAD_NONFINITE,
    GRAD_UNDERFLOW_RATIO,
    ABSORBED_RATIO,
    UPDATE_LOST_RATIO,
    ACCUMULATION_ERROR_RATIO,
    UPDATE_SCALE,
    OPTIMIZER_STUCK_RATIO,
    ADAM_EPS_DAMPING_RATIO,
    LORA_BALANCE,
    ADAPTER_SIZE,
    CLIPPED_NORM,
    BACKWARD_PASSES,
    MICRO_STEPS,
    DEAD_MODULE_COUNT,
    WORKING_COPY_STALE_RATIO,
    RANK_DIVERGENCE,
    HOST_MEMORY_PEAK,
    DEVICE_MEMORY_PEAK,
    LEARNING_RATE,
    LOSS,
    CATEGORY_LOSS,
    LOSS_SCALE,
    STEPS_SKIPPED,
    STEP,
    STEPS_PLANNED,
    STEP_DURATION,
    SAMPLES,
    DATA_WAIT,
    CHECKPOINT_STEP,
    CHECKPOINT_TIME,
    NUMERICS_INFO,
    HEALTH_FINDING,
    TRACKERS_FAILED,
)

OPERATOR_RECONCILES: Final = Metric(
    "kubelora_operator_reconciles_total",
    "counter",
    "Reconciliations of LoraTrainingJobs by result.",
    ("result",),
)
OPERATOR_RECONCILE_DURATION: Final = Metric(
    "kubelora_operator_reconcile_duration_seconds",
    "histogram",
    "Wall time of one reconciliation, in seconds.",
)
OPERATOR_QUEUE_DEPTH: Final = Metric(
    "kubelora_operator_queue_depth", "gauge", "Jobs waiting for a reconciliation."
)
OPERATOR_IS_LEADER: Final = Metric(
    "kubelora_operator_is_leader", "gauge", "1 on the replica that holds the Lease."
)
OPERATOR_WATCH_LAG: Final = Metric(
    "kubelora_operator_watch_overdue_jobs",
    "gauge",
    "Jobs whose change the periodic list found and no watch has reported for 30 s.",
)
OPERATOR_API_ERRORS: Final = Metric(
    "kubelora_operator_api_errors_total",
    "counter",
    "Failed requests to the API server by HTTP status code, 0 for no response.",
    ("code",),
)
JOBS: Final = Metric(
    "kubelora_jobs",
    "gauge",
    "LoraTrainingJobs by namespace and state.",
    ("job_namespace", "state"),
)

# Series of a job, which the operator reads from the object: they live as long as it does, whatever
# becomes of its pods. `job_namespace` is a label of its own, because Prometheus may be set up to
# overwrite `namespace` with that of the scraped pod.
_JOB: Final = ("job_namespace", "name")

JOB_STATE: Final = Metric(
    "kubelora_job_state",
    "gauge",
    "Always 1, with the job's state and the reason of the condition behind it as labels.",
    (*_JOB, "state", "reason"),
)
JOB_STATE_SINCE: Final = Metric(
    "kubelora_job_state_since_timestamp_seconds",
    "gauge",
    "Unix time at which the condition behind the job's state changed its status.",
    _JOB,
)
JOB_INFO: Final = Metric(
    "kubelora_job_info",
    "gauge",
    "Always 1, with the job's dtypes and health policy as labels.",
    (*_JOB, "compute", "accumulator", "master_weights", "policy"),
)
JOB_GPUS: Final = Metric("kubelora_job_gpus", "gauge", "GPUs that the job asks for.", _JOB)
JOB_VERDICT: Final = Metric(
    "kubelora_job_verdict",
    "gauge",
    "Always 1, with the verdict of the last report as a label.",
    (*_JOB, "verdict"),
)
JOB_FINDING: Final = Metric(
    "kubelora_job_finding",
    "gauge",
    "Measured value of a finding in the job's status, NaN where nothing is measured; at most 10.",
    (*_JOB, "finding", "severity", "group", "attempt"),
)
JOB_FINDING_LIMIT: Final = Metric(
    "kubelora_job_finding_limit",
    "gauge",
    "Limit that the value of a finding in the job's status is compared with.",
    (*_JOB, "finding"),
)
JOB_FINDING_SINCE: Final = Metric(
    "kubelora_job_finding_since_step",
    "gauge",
    "First optimizer step with a finding in the job's status.",
    (*_JOB, "finding"),
)
JOB_ACKNOWLEDGED: Final = Metric(
    "kubelora_job_acknowledged",
    "gauge",
    "Always 1, for each alert that the job's annotation kubelora.dev/acknowledged names.",
    (*_JOB, "alert"),
)
JOB_STEP: Final = Metric(
    "kubelora_job_last_step", "gauge", "Optimizer steps of a job at its last report.", _JOB
)
JOB_STEPS_PLANNED: Final = Metric(
    "kubelora_job_steps_planned", "gauge", "Optimizer steps that the job plans.", _JOB
)
JOB_LOSS: Final = Metric(
    "kubelora_job_last_loss", "gauge", "Mean loss of the last reported optimizer step.", _JOB
)
JOB_SAMPLES_PER_SECOND: Final = Metric(
    "kubelora_job_last_samples_per_second",
    "gauge",
    "Images per second over all GPUs at the last report.",
    _JOB,
)
JOB_REPORT_TIME: Final = Metric(
    "kubelora_job_last_report_timestamp_seconds",
    "gauge",
    "Unix time of the last report of a pod.",
    _JOB,
)
JOB_CHECKPOINT_STEP: Final = Metric(
    "kubelora_job_checkpoint_step", "gauge", "Optimizer step of the last known checkpoint.", _JOB
)
JOB_CHECKPOINT_INTERVAL: Final = Metric(
    "kubelora_job_checkpoint_interval_steps",
    "gauge",
    "Optimizer steps between two checkpoints, as the spec asks for.",
    _JOB,
)
JOB_ATTEMPT: Final = Metric(
    "kubelora_job_attempt", "gauge", "Number of the current attempt, 0 before the first one.", _JOB
)
JOB_RESTARTS: Final = Metric(
    "kubelora_job_restarts",
    "gauge",
    "Restarts counted against restartPolicy.maxRestarts.",
    _JOB,
)
JOB_ACTIVE_SECONDS: Final = Metric(
    "kubelora_job_active_seconds", "gauge", "Seconds of running over all attempts.", _JOB
)
JOB_GOODPUT: Final = Metric(
    "kubelora_job_goodput_ratio",
    "gauge",
    "Share of the running time that was spent on the steps done: the rest is loading, steps that "
    "were lost and computed again, validation and export.",
    _JOB,
)

JOB_METRICS: Final = (
    JOB_STATE,
    JOB_STATE_SINCE,
    JOB_INFO,
    JOB_GPUS,
    JOB_VERDICT,
    JOB_FINDING,
    JOB_FINDING_LIMIT,
    JOB_FINDING_SINCE,
    JOB_ACKNOWLEDGED,
    JOB_STEP,
    JOB_STEPS_PLANNED,
    JOB_LOSS,
    JOB_SAMPLES_PER_SECOND,
    JOB_REPORT_TIME,
    JOB_CHECKPOINT_STEP,
    JOB_CHECKPOINT_INTERVAL,
    JOB_ATTEMPT,
    JOB_RESTARTS,
    JOB_ACTIVE_SECONDS,
    JOB_GOODPUT,
)

OPERATOR_METRICS: Final = (
    OPERATOR_RECONCILES,
    OPERATOR_RECONCILE_DURATION,
    OPERATOR_QUEUE_DEPTH,
    OPERATOR_IS_LEADER,
    OPERATOR_WATCH_LAG,
    OPERATOR_API_ERRORS,
    JOBS,
    *JOB_METRICS,
)
