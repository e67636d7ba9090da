"""The output directory: which run owns it, the state of that run, and who may write to it.

The directory belongs to one run id. The same run resumes or is already done; a different run is
rejected. Attempts are numbered, and an older attempt (a container on a lost node that still runs)
may not write once a newer one has started.
"""

import hashlib
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import OutputPath
from kubelora_api.status import Artifact
from kubelora_trainer.storage.run_length import (
    LengthChange,
    depends_on_length,
    fixed_length_reason,
    length_change,
)
from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.storage.run_settings import (
    changes,
    deciding_settings,
    fields_that_may_change,
    join_changes,
    recorded_settings,
    settings_digest,
)
from kubelora_trainer.utils.atomic_io import write_file, writing_to
from kubelora_trainer.utils.errors import OutputError

RunState = Literal["Running", "Interrupted", "Suspended", "Failed", "Done"]
RECORDED_PACKAGES = ("kubelora", "torch", "diffusers", "transformers", "peft", "safetensors")


class Manifest(BaseModel):
    """The content of ``manifest.json``: what the directory contains, from which job and versions.

    job: the resolved document with defaults. updated: UTC, ISO 8601.
    """

    model_config = ConfigDict(frozen=True)

    format: Literal[1] = 1
    run_id: str
    attempt: int
    state: RunState
    message: str = ""
    updated: str
    job: dict[str, Any]
    versions: dict[str, str]
    record: RunRecord = Field(default_factory=RunRecord)
    artifacts: list[Artifact] = Field(default_factory=list)


def run_id_of(job: LoraTrainingJob) -> str:
    """Return the job's uid in a cluster, else a hash of its name and of what decides the result.

    Left out of the hash is every field that declares that a run resumes after its change.
    """
    return job.metadata.uid or settings_digest(job)


class OutputFolder:
    """A claimed output directory. Every write of a run calls ``check_ownership`` first.

    record: part of every manifest from here on; assign a new one at any time.
    """

    def __init__(
        self,
        path: Path,
        job: LoraTrainingJob,
        run_id: str,
        attempt: int,
        record: RunRecord | None = None,
    ) -> None:
        self.path = path
        self.job = job
        self.run_id = run_id
        self.attempt = attempt
        self.record = record or RunRecord()

    def place(self, output: OutputPath) -> Path:
        """Return the path of ``output`` in this directory."""
        return self.path / output

    def check_ownership(self) -> None:
        """Raise OutputError if a newer attempt or another run has taken over the directory."""
        found = read_manifest(self.path)
        if found and (found.run_id != self.run_id or found.attempt > self.attempt):
            raise OutputError(
                f"{self.path}: attempt {found.attempt} of run {found.run_id} has taken over this "
                f"output folder; attempt {self.attempt} of run {self.run_id} stops without writing"
            )

    def write_manifest(
        self, state: RunState, message: str = "", artifacts: list[Artifact] | None = None
    ) -> str:
        """Record the run's state and return the manifest's sha256.

        Args:
            state: State of the run.
            message: Reason for the state.
            artifacts: Files of a finished run.

        Raises:
            OutputError: Another attempt has taken over, or the disk refuses the write.
        """
        self.check_ownership()
        manifest = Manifest(
            run_id=self.run_id,
            attempt=self.attempt,
            state=state,
            message=message,
            updated=datetime.now(UTC).isoformat(timespec="seconds"),
            job=self.job.recorded_document(),
            versions=installed_versions(),
            record=self.record,
            artifacts=artifacts or [],
        )
        data = manifest.model_dump_json(indent=2).encode()
        write_file(self.place(OutputPath.MANIFEST), data)
        return hashlib.sha256(data).hexdigest()


def claim_output(
    path: Path, job: LoraTrainingJob, attempt: int | None, warn: Callable[[str], None]
) -> OutputFolder | Manifest:
    """Claim the directory for this run.

    Args:
        path: The output directory.
        job: The job.
        attempt: The operator's attempt number; None continues from the last attempt.
        warn: Called with each warning.

    Returns:
        The claimed directory, or the manifest if this run is already done.

    Raises:
        OutputError: The directory has another run's output, other settings than the run started
            with, or a newer attempt; or it is not writable.
    """
    run_id = run_id_of(job)
    with writing_to(path):
        path.mkdir(parents=True, exist_ok=True)
    found = read_manifest(path)
    changed = _changed_settings(found, job)
    lengthened = _length_change(found, job)
    if found is not None and not job.metadata.uid and not _uid_of(found):
        if lengthened and not _length_objection(found, job, lengthened):
            warn(f"{path}: run {found.run_id} continues with another length, {lengthened}")
            found, changed = _reopened(found), []
        if not changed:
            # Its id comes from another length, or from a version with fewer settings.
            run_id = found.run_id
    if found is None or found.run_id != run_id:
        why = _length_objection(found, job, lengthened) if found and lengthened else ""
        _make_room(path, found, changed, why, job.spec.output.replace_existing, warn)
        found = None
    if found is not None:
        _assert_resumable(path, found, changed)
        if found.state == "Done":
            return found
        if newer := join_changes(list(changes(found.versions, installed_versions()))):
            warn(f"{path}: started with other versions ({newer}); the last bits may differ")
    before = found.attempt if found else 0
    if attempt is not None and attempt < before:
        raise OutputError(
            f"{path}: attempt {before} of this run has already started; attempt {attempt} is too "
            "old to write here"
        )
    number = before + 1 if attempt is None else attempt
    folder = OutputFolder(path, job, run_id, number, found.record if found else None)
    folder.write_manifest("Running")
    return folder


def _changed_settings(found: Manifest | None, job: LoraTrainingJob) -> list[str]:
    if found is None:
        return []
    return list(changes(recorded_settings(found.job), deciding_settings(job)))


def _length_change(found: Manifest | None, job: LoraTrainingJob) -> LengthChange | None:
    if found is None:
        return None
    return length_change(recorded_settings(found.job), deciding_settings(job))


def _length_objection(found: Manifest, job: LoraTrainingJob, length: LengthChange) -> str:
    """Explain why the run can't change its length; empty if it can."""
    if depends_on_length(job.spec.training.schedule):
        return fixed_length_reason(job.spec.training.schedule, job.spec.output.uri)
    if found.state == "Done" and length.after < length.before:
        return "It is done, and can only be extended"
    return ""


def _reopened(found: Manifest) -> Manifest:
    """Reset state and upload: with another length the run is not done."""
    record = found.record.model_copy(update={"pushed": ""})
    return found.model_copy(update={"state": "Interrupted", "record": record})


def _uid_of(found: Manifest) -> object:
    metadata = found.job.get("metadata")
    return metadata.get("uid") if isinstance(metadata, dict) else None


def _assert_resumable(path: Path, found: Manifest, changed: list[str]) -> None:
    """Check that a job of the same uid still has the run's settings."""
    if changed:
        raise OutputError(
            f"{path}: run {found.run_id} was started with other settings "
            f"({join_changes(changed)}) and can't resume with these; restore them "
            f"({fields_that_may_change()}), or create a new job with another spec.output.uri"
        )


def _has_nothing_to_lose(path: Path, found: Manifest) -> bool:
    """Return whether a run ended without a checkpoint, an adapter or a gradient dump."""
    # An interrupted job of a cluster may be suspended, and its pod come back.
    ended = found.state == "Failed" or (found.state == "Interrupted" and not _uid_of(found))
    kept = (OutputPath.CHECKPOINTS, OutputPath.ADAPTER, OutputPath.GRADIENTS)
    return ended and not any(file.is_file() for place in kept for file in (path / place).rglob("*"))


def _make_room(
    path: Path,
    found: Manifest | None,
    changed: list[str],
    why: str,
    replace: bool,
    warn: Callable[[str], None],
) -> None:
    """Reject another run's output, or delete it on request; other files are left alone.

    What a run left that ended before its first checkpoint is deleted without a request: a first
    attempt fails often, and whoever follows the advice in its message has another run.

    why: what prevents that run from continuing with this job's length, if only that has changed.
    """
    present = sorted(name for name in output_names() if (path / name).exists())
    if not present:
        return
    if found is None:
        raise OutputError(
            f"{path}: contains {', '.join(present)}, but no {OutputPath.MANIFEST} to identify "
            "their run. Move them elsewhere, or choose another spec.output.uri"
        )
    whose = f"run {found.run_id}'s"
    unfinished = _has_nothing_to_lose(path, found)
    if not replace and not unfinished:
        settings = (
            f" It was made with other settings: {join_changes(changed)}."
            f"{f' {why}.' if why else ''} To continue it, restore them "
            f"({fields_that_may_change()})."
            if changed
            else ""
        )
        raise OutputError(
            f"{path}: contains {whose} output ({', '.join(present)}).{settings} Choose another "
            "spec.output.uri, or set spec.output.replaceExisting: true to delete it"
        )
    because = "that run ended before its first checkpoint" if unfinished else "of replaceExisting"
    warn(f"{path}: deleting {whose} output ({', '.join(present)}) because {because}")
    # The manifest goes last: it identifies the owner if a kill leaves the rest half deleted.
    present.sort(key=OutputPath.MANIFEST.__eq__)
    with writing_to(path):
        for name in present:
            target = path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()


RUN_LOG_PARTS = "metrics.parts"
GROUP_LOG_PARTS = "groups.parts"
CATEGORY_LOG_PARTS = "categories.parts"
"""Directories of the run log's parts during the run."""


def output_names() -> frozenset[str]:
    """List the names that a run uses at the top of its output directory."""
    logs = {RUN_LOG_PARTS, GROUP_LOG_PARTS, CATEGORY_LOG_PARTS}
    return frozenset({Path(p).parts[0] for p in OutputPath} | logs)


def read_manifest(path: Path) -> Manifest | None:
    """Read the directory's manifest; None if there is none. Raises OutputError if unreadable."""
    file = path / OutputPath.MANIFEST
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"can't read {file}: {error.strerror}") from error
    except ValidationError:
        raise OutputError(
            f"{file}: not a manifest of this program; move it elsewhere, or choose another "
            "spec.output.uri"
        ) from None


def installed_versions() -> dict[str, str]:
    """List the versions of packages that affect the result."""
    found: dict[str, str] = {}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def artifact_of(folder: OutputFolder, file: Path) -> Artifact:
    """Describe a finished file by its URI, hash and size."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    uri = f"{folder.job.spec.output.uri.rstrip('/')}/{file.relative_to(folder.path)}"
    return Artifact(uri=uri, sha256=digest, bytes=file.stat().st_size)
