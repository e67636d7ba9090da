"""The output folder: whose it is, what state the run in it has, and who may write there.

The folder belongs to one run id. The same id resumes or is already done; another run's output is
refused. Attempts are numbered, and an older attempt (a container on a node that was given up, but
still runs) may not write once a newer one has begun.
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
    OtherLength,
    follows_the_length,
    other_length,
    why_it_stays,
)
from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.storage.run_settings import (
    changes,
    deciding_settings,
    fields_that_may_change,
    recorded_settings,
    settings_digest,
    told,
)
from kubelora_trainer.utils.atomic_io import write_file, writing_to
from kubelora_trainer.utils.errors import OutputError

RunState = Literal["Running", "Interrupted", "Suspended", "Failed", "Done"]
RECORDED_PACKAGES = ("kubelora", "torch", "diffusers", "transformers", "peft", "safetensors")


class Manifest(BaseModel):
    """``manifest.json``: what is in the folder, made from what, by which versions.

    job: the resolved document, defaults filled in. updated: UTC, ISO 8601.
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
    """A claimed output folder. Every write of a run goes through ``assert_ours`` first.

    record: goes into every manifest from here on; assign a new one at any time.
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
        """Where ``output`` goes in this folder."""
        return self.path / output

    def assert_ours(self) -> None:
        """Raise OutputError when a newer attempt, or another run, took the folder over."""
        found = read_manifest(self.path)
        if found and (found.run_id != self.run_id or found.attempt > self.attempt):
            raise OutputError(
                f"{self.path}: attempt {found.attempt} of run {found.run_id} took this output "
                f"folder over; attempt {self.attempt} of run {self.run_id} stops without writing"
            )

    def write_manifest(
        self, state: RunState, message: str = "", artifacts: list[Artifact] | None = None
    ) -> str:
        """Record the run's state; returns the manifest's sha256."""
        self.assert_ours()
        manifest = Manifest(
            run_id=self.run_id,
            attempt=self.attempt,
            state=state,
            message=message,
            updated=datetime.now(UTC).isoformat(timespec="seconds"),
            job=self.job.document(),
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
    """Take the folder for this run.

    attempt: the operator's count; None counts on from the folder's last attempt.
    Returns the manifest instead where this very run is already done.
    Raises OutputError for another run's output, other settings than the run began with, a
    newer attempt, a folder that can't be written.
    """
    run_id = run_id_of(job)
    with writing_to(path):
        path.mkdir(parents=True, exist_ok=True)
    found = read_manifest(path)
    changed = _changed_settings(found, job)
    lengthened = _other_length(found, job)
    if found is not None and not job.metadata.uid and not _uid_of(found):
        if lengthened and not _why_not(found, job, lengthened):
            warn(f"{path}: run {found.run_id} goes on with another length, {lengthened}")
            found, changed = _begun_again(found), []
        if not changed:
            run_id = found.run_id  # named by another length, or a version with fewer settings
    if found is None or found.run_id != run_id:
        why = _why_not(found, job, lengthened) if found and lengthened else ""
        _make_room(path, found, changed, why, job.spec.output.replace_existing, warn)
        found = None
    if found is not None:
        _assert_resumable(path, found, changed)
        if found.state == "Done":
            return found
        if newer := told(list(changes(found.versions, installed_versions()))):
            warn(f"{path}: begun with other versions ({newer}); the last bits may differ")
    before = found.attempt if found else 0
    if attempt is not None and attempt < before:
        raise OutputError(
            f"{path}: attempt {before} of this run has begun already; attempt {attempt} is too "
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


def _other_length(found: Manifest | None, job: LoraTrainingJob) -> OtherLength | None:
    if found is None:
        return None
    return other_length(recorded_settings(found.job), deciding_settings(job))


def _why_not(found: Manifest, job: LoraTrainingJob, length: OtherLength) -> str:
    """Why the run can't change its length; empty where it can."""
    if follows_the_length(job.spec.training.schedule):
        return why_it_stays(job.spec.training.schedule, job.spec.output.uri)
    if found.state == "Done" and length.after < length.before:
        return "It is done, and can be lengthened alone"
    return ""


def _begun_again(found: Manifest) -> Manifest:
    """A run of another length is not done, and what was pushed is not its result."""
    record = found.record.model_copy(update={"pushed": ""})
    return found.model_copy(update={"state": "Interrupted", "record": record})


def _uid_of(found: Manifest) -> object:
    metadata = found.job.get("metadata")
    return metadata.get("uid") if isinstance(metadata, dict) else None


def _assert_resumable(path: Path, found: Manifest, changed: list[str]) -> None:
    """A job of the same uid, but with other settings, is not the run that began here."""
    if changed:
        raise OutputError(
            f"{path}: run {found.run_id} began with other settings ({told(changed)}) and can't go "
            f"on with these; put them back ({fields_that_may_change()}), or create a new job with "
            "another spec.output.uri"
        )


def _make_room(
    path: Path,
    found: Manifest | None,
    changed: list[str],
    why: str,
    replace: bool,
    warn: Callable[[str], None],
) -> None:
    """Refuse what another run left, or clear it away when told to; other files are not ours.

    why: what keeps the run there from going on with this job's length, if that is all that changed.
    """
    present = sorted(name for name in own_names() if (path / name).exists())
    if not present:
        return
    if found is None:
        raise OutputError(
            f"{path}: holds {', '.join(present)}, but no {OutputPath.MANIFEST} that says whose "
            "they are. Move them away, or choose another spec.output.uri"
        )
    whose = f"run {found.run_id}'s"
    if not replace:
        settings = (
            f" It was made with other settings: {told(changed)}.{f' {why}.' if why else ''} To go "
            f"on with it, put them back ({fields_that_may_change()})."
            if changed
            else ""
        )
        raise OutputError(
            f"{path}: holds {whose} output ({', '.join(present)}).{settings} Choose another "
            "spec.output.uri, or set spec.output.replaceExisting: true to clear it away"
        )
    warn(f"{path}: clearing away {whose} output ({', '.join(present)}), as replaceExisting says")
    present.sort(key=OutputPath.MANIFEST.__eq__)  # last, for it says whose the others are
    with writing_to(path):
        for name in present:
            target = path / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()


RUN_LOG_PARTS = "metrics.parts"
GROUP_LOG_PARTS = "groups.parts"
CATEGORY_LOG_PARTS = "categories.parts"
"""Folders of the run log's parts while the run goes on."""


def own_names() -> frozenset[str]:
    """Names that a run uses on top of its output folder."""
    logs = {RUN_LOG_PARTS, GROUP_LOG_PARTS, CATEGORY_LOG_PARTS}
    return frozenset({Path(p).parts[0] for p in OutputPath} | logs)


def read_manifest(path: Path) -> Manifest | None:
    """The folder's manifest; None where there is none. Raises OutputError if unreadable."""
    file = path / OutputPath.MANIFEST
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"can't read {file}: {error.strerror}") from error
    except ValidationError:
        raise OutputError(
            f"{file}: not a manifest of this program; move it away, or choose another "
            "spec.output.uri"
        ) from None


def installed_versions() -> dict[str, str]:
    """Versions of what decides the result."""
    found: dict[str, str] = {}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def artifact_of(folder: OutputFolder, file: Path) -> Artifact:
    """A finished file, by its URI, hash and size."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    uri = f"{folder.job.spec.output.uri.rstrip('/')}/{file.relative_to(folder.path)}"
    return Artifact(uri=uri, sha256=digest, bytes=file.stat().st_size)
