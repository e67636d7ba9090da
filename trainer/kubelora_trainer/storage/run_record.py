"""Facts that a run records about itself in its manifest, for comparisons between runs."""

from pydantic import BaseModel, ConfigDict, Field

from kubelora_api.status import Finding
from kubelora_api.thresholds import ROLLED_BACK


class Difference(BaseModel):
    """A setting, version or hash in which two runs differ, as text."""

    model_config = ConfigDict(frozen=True)

    field: str
    here: str
    there: str


class BaselineRecord(BaseModel):
    """The baseline run, and how it differs from this one.

    not_compared: why gradient norms are not compared; empty if they are.
    """

    model_config = ConfigDict(frozen=True)

    uri: str
    run_id: str
    differences: list[Difference] = Field(default_factory=list)
    not_compared: str = ""


class Rollback(BaseModel):
    """Record of a rollback, kept in checkpoints and in the manifest.

    Attributes:
        finding: The cause.
        found_at: Optimizer steps done when the finding was evaluated.
        back_to: Optimizer steps of the checkpoint.
        skipped: Half-open range of micro-steps whose data was skipped.
    """

    model_config = ConfigDict(frozen=True)

    finding: Finding
    found_at: int
    back_to: int
    skipped: tuple[int, int]

    def as_finding(self) -> Finding:
        """Convert to a finding for the run's status, which no longer has the undone steps."""
        first, last = self.skipped[0], self.skipped[1] - 1
        return Finding(
            name=ROLLED_BACK.finding,
            severity=ROLLED_BACK.severity,
            group=self.finding.group,
            value=self.finding.value,
            threshold=self.finding.threshold,
            since_step=self.found_at,
            message=f"Training rolled back from step {self.found_at} to the checkpoint of step "
            f"{self.back_to} because of {self.finding.name}, and skipped the data of micro-steps "
            f"{first} to {last}. Another critical finding fails the run. {self.finding.message}"[
                :1024
            ],
        )


class RunRecord(BaseModel):
    """Facts about a run.

    Attributes:
        total_steps: Optimizer steps planned.
        dataset_sha256: Hash of all images, captions and their use.
        dataset_images: Number of images used.
        model_sha256: Fingerprint of the base model.
        baseline: Record of ``health.baseline``.
        rollback: The rollback, if there was one.
        pushed: Where the artifacts were uploaded to.
        tracking_id: The run's name in experiment trackers.
    """

    model_config = ConfigDict(frozen=True)

    total_steps: int | None = None
    dataset_sha256: str | None = None
    dataset_images: int | None = None
    model_sha256: str | None = None
    baseline: BaselineRecord | None = None
    rollback: Rollback | None = None
    pushed: str = ""
    tracking_id: str = ""
