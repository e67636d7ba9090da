"""Reports of a training pod that the operator reads.

``RunReport`` is the body of ``GET /status`` on the metrics port; ``FinalReport`` is written to the
container's termination message (at most 4,096 bytes). Both are best effort: no decision depends on
them, exit codes decide.
"""

from typing import Annotated, Literal

from pydantic import Field

from kubelora_api.names import TERMINATION_MESSAGE_MAX_BYTES
from kubelora_api.status import Artifact, CheckpointStatus, HealthStatus, StatusModel

RunPhase = Literal["Starting", "Training", "Exporting", "Done", "Stopping", "Failed"]


class ModuleNumbers(StatusModel):
    """An adapter module in the list of the worst modules."""

    module: str
    metric: str
    value: float


class RunReport(StatusModel):
    """The current state of a run. Measured numbers have four significant digits.

    category_loss: Mean loss by category, from the last step with one of its samples.
    useful_seconds: Time spent on the steps that the run has, over all attempts: steps that were
    lost and computed again count once.
    adapter_size: Norm of the adapter's update over that of the weight, of the module where it is
        largest, when it was last measured.
    """

    run_id: str
    attempt: int
    phase: RunPhase
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    category_loss: Annotated[dict[str, float], Field(max_length=16)] = Field(default_factory=dict)
    grad_norm: float | None = None
    adapter_size: float | None = None
    learning_rate: float | None = None
    samples_per_second: float | None = None
    seconds_left: float | None = None
    useful_seconds: float | None = None
    health: HealthStatus = Field(default_factory=HealthStatus)
    checkpoint: CheckpointStatus | None = None
    worst_modules: Annotated[list[ModuleNumbers], Field(max_length=10)] = Field(
        default_factory=list
    )


class FinalReport(StatusModel):
    """The outcome of a run."""

    run_id: str
    attempt: int
    exit_code: int
    message: str
    """One sentence: what happened and, if the user must act, what to do."""
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    useful_seconds: float | None = None
    health: HealthStatus = Field(default_factory=HealthStatus)
    checkpoint: CheckpointStatus | None = None
    artifacts: list[Artifact] = Field(default_factory=list)
    manifest_sha256: str | None = None

    def to_termination_message(self) -> bytes:
        """Return JSON of at most 4,096 bytes: findings are dropped first, then the message is cut.

        The limit is that of the kubelet, which truncates longer messages to invalid JSON. A finding
        with the cause Hardware is dropped last: the operator avoids the node because of it.
        """
        report = self
        blamed = [found for found in report.health.findings if found.cause == "Hardware"][:1]
        for trimmed in (
            report,
            report.model_copy(
                update={"health": HealthStatus(verdict=report.health.verdict, findings=blamed)}
            ),
            report.model_copy(update={"health": HealthStatus(verdict=report.health.verdict)}),
            report.model_copy(
                update={
                    "health": HealthStatus(verdict=report.health.verdict),
                    "artifacts": report.artifacts[:2],
                    "message": report.message[:800],
                }
            ),
        ):
            encoded = trimmed.model_dump_json(by_alias=True, exclude_none=True).encode()
            if len(encoded) <= TERMINATION_MESSAGE_MAX_BYTES:
                return encoded
        least = FinalReport(
            run_id=report.run_id[:64],
            attempt=report.attempt,
            exit_code=report.exit_code,
            message=report.message[:300],
        )
        return least.model_dump_json(by_alias=True, exclude_none=True).encode()
