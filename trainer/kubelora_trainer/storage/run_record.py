"""What a run learns about itself on its way, kept in its manifest for whoever compares runs."""

from pydantic import BaseModel, ConfigDict, Field

from kubelora_trainer.health.policy import Rollback


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
