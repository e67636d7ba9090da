"""What a run learns about itself on its way, kept in its manifest for whoever compares runs."""

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
    """Which run this one is held against, and what differs.

    not_compared: why gradient norms are not compared; empty where they are.
    """

    model_config = ConfigDict(frozen=True)

    uri: str
    run_id: str
    differences: list[Difference] = Field(default_factory=list)
    not_compared: str = ""


class Rollback(BaseModel):
    """That a run went back, and what it left out since. Kept in checkpoints and in the manifest.

    found_at: optimizer steps done when the finding was judged. back_to: those of the checkpoint.
    skipped: micro-steps whose data was left out: from the first one up to, not with, the second.
    """

    model_config = ConfigDict(frozen=True)

    finding: Finding
    found_at: int
    back_to: int
    skipped: tuple[int, int]

    def as_finding(self) -> Finding:
        """For the run's status, which has forgotten the steps that were taken back."""
        first, last = self.skipped[0], self.skipped[1] - 1
        return Finding(
            name=ROLLED_BACK.finding,
            severity=ROLLED_BACK.severity,
            group=self.finding.group,
            value=self.finding.value,
            threshold=self.finding.threshold,
            since_step=self.found_at,
            message=f"Training went back from step {self.found_at} to the checkpoint of step "
            f"{self.back_to} because of {self.finding.name}, and left out the data of micro-steps "
            f"{first} to {last}. Another critical finding fails the run. {self.finding.message}"[
                :1024
            ],
        )


class RunRecord(BaseModel):
    """total_steps: optimizer steps planned. dataset_sha256: of all images, captions and their use.

    dataset_images: how many are used. model_sha256: the base model's fingerprint. baseline: what
    ``health.baseline`` names. rollback: that the run went back once. pushed: where its artifacts
    have been copied to. tracking_id: its name in experiment trackers.
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
