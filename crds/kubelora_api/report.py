"""What a training pod says of itself, and the operator reads.

``RunReport`` is the body of ``GET /status`` on the metrics port; ``FinalReport`` is the last word,
left in the container's termination message (4,096 bytes at most). Both are best effort: no
decision hangs on them, exit codes decide.
"""

from typing import Annotated, Literal

from pydantic import Field

from kubelora_api.names import TERMINATION_MESSAGE_MAX_BYTES
from kubelora_api.status import Artifact, CheckpointStatus, HealthStatus, StatusModel

RunPhase = Literal["Starting", "Training", "Exporting", "Done", "Stopping", "Failed"]


class ModuleNumbers(StatusModel):
    """One adapter module in the list of the worst."""

    module: str
    metric: str
    value: float


class RunReport(StatusModel):
    """Where a run is now. Measured numbers have four significant digits.

    category_loss: mean loss by category, of the last step that saw one of its samples.
    """

    run_id: str
    attempt: int
    phase: RunPhase
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    category_loss: Annotated[dict[str, float], Field(max_length=16)] = Field(default_factory=dict)
    grad_norm: float | None = None
    learning_rate: float | None = None
    samples_per_second: float | None = None
    seconds_left: float | None = None
    health: HealthStatus = Field(default_factory=HealthStatus)
    checkpoint: CheckpointStatus | None = None
    worst_modules: Annotated[list[ModuleNumbers], Field(max_length=10)] = Field(
        default_factory=list
    )


class FinalReport(StatusModel):
    """How a run ended."""

    run_id: str
    attempt: int
    exit_code: int
    message: str
    """One sentence: what happened and, where something is to be done, what."""
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    health: HealthStatus = Field(default_factory=HealthStatus)
    checkpoint: CheckpointStatus | None = None
    artifacts: list[Artifact] = Field(default_factory=list)
    manifest_sha256: str | None = None

    def to_termination_message(self) -> bytes:
        """JSON of at most 4,096 bytes: findings go first, then the sentence is cut."""
        report = self
        for trimmed in (
            report,
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
