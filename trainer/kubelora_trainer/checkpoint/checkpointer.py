"""Checkpoints: everything a run needs to resume as if it had never stopped.

A checkpoint is a directory with one safetensors file per component (adapter, optimizer, ...) and a
manifest with their hashes; it is written to a staging directory and renamed. It may be taken in the
middle of an accumulation window, because it includes the accumulator. There is no random state:
every draw is a function of the seed and the micro-step. A run resumes from the newest checkpoint
whose hashes match.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load, save
from torch import Tensor

from kubelora_api.names import CHECKPOINT_MANIFEST, OutputPath
from kubelora_api.schema import JsonObject
from kubelora_trainer.checkpoint.directories import (
    SavedCheckpoint,
    discard,
    folder_name,
    list_checkpoints,
    publish_staged,
    staging_path,
    tidy_up,
)
from kubelora_trainer.checkpoint.state import CheckpointManifest, RunPosition
from kubelora_trainer.health import watch_state as health
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.utils.atomic_io import sync_folder, write_durably, writing_to
from kubelora_trainer.utils.errors import OutputError
from kubelora_trainer.utils.stateful import Stateful

_ADAPTER = "adapter"
AVERAGE = "average"
"""Name of the weights' exponential moving average among a checkpoint's components."""
_SEAL = "sha256"


def save_checkpoint(
    folder: OutputFolder,
    buffers: AdapterBuffers,
    parts: Mapping[str, Stateful],
    position: RunPosition,
    window_micro_steps: int,
    keep: int,
    hindsight: int | None = None,
) -> SavedCheckpoint:
    """Write a checkpoint and remove all but the newest ``keep``.

    Args:
        folder: The output directory.
        buffers: Flat buffers of the adapter.
        parts: Further components by name (``optimizer``, ...).
        position: Position of the run.
        window_micro_steps: Micro-steps done in the unfinished window, 0 between windows.
        keep: Number of checkpoints to keep.
        hindsight: Also keep the newest checkpoint that is this many optimizer steps older, because
            a fault may show only that much later.

    Returns:
        The checkpoint written.

    Raises:
        OutputError: The disk refuses the write or a newer attempt has taken over. Earlier
            checkpoints remain intact.
    """
    folder.check_ownership()
    root = folder.place(OutputPath.CHECKPOINTS)
    target = root / folder_name(position.step, window_micro_steps)
    aside = staging_path(target)
    with writing_to(target):
        try:
            root.mkdir(exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            everything = {_ADAPTER: buffers, **parts}
            files = {
                f"{name}.safetensors": _write_part(aside / f"{name}.safetensors", part)
                for name, part in everything.items()
            }
            manifest = CheckpointManifest(
                run_id=folder.run_id,
                attempt=folder.attempt,
                step=position.step,
                micro_step=position.micro_step,
                window_micro_steps=window_micro_steps,
                window_samples=position.window_samples,
                window_loss=float(position.window_loss),
                norm_range=position.norm_range,
                useful_seconds=position.useful_seconds,
                watch=health.to_json(position.watch),
                rollback=position.rollback,
                layout=_layout(buffers),
                parts={name: part.scalars() for name, part in everything.items()},
                files=files,
            )
            write_durably(aside / CHECKPOINT_MANIFEST, _sealed(manifest))
            sync_folder(aside)
            publish_staged(target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        oldest_wanted = None if hindsight is None else position.step - hindsight
        for old in surplus(list_checkpoints(root), keep, oldest_wanted):
            discard(old.path)
    return SavedCheckpoint(target, position.step, window_micro_steps)


def surplus(
    checkpoints: list[SavedCheckpoint], keep: int, oldest_wanted: int | None
) -> list[SavedCheckpoint]:
    """Select the checkpoints that can be removed.

    Args:
        checkpoints: All checkpoints, oldest first.
        keep: Number of newest checkpoints to keep.
        oldest_wanted: Also keep the newest checkpoint at or before this step and all later ones,
            because each of them will take its place eventually.
    """
    older = checkpoints[:-keep]
    if oldest_wanted is None:
        return older
    floor = max((c.step for c in checkpoints if c.step <= oldest_wanted), default=0)
    return [c for c in older if c.step < floor]


def resume(
    folder: OutputFolder,
    buffers: AdapterBuffers,
    parts: Mapping[str, Stateful],
    warn: Callable[[str], None],
    latest_step: int | None = None,
) -> tuple[RunPosition, SavedCheckpoint] | None:
    """Restore buffers and parts from the newest valid checkpoint.

    An invalid checkpoint is reported in a warning, renamed and skipped.

    Args:
        folder: The output directory.
        buffers: Flat buffers of the adapter.
        parts: Further components by name.
        warn: Called with each warning.
        latest_step: Ignore checkpoints of later steps.

    Returns:
        The position and the checkpoint, or None if there is no valid checkpoint.

    Raises:
        OutputError: A checkpoint is intact but was written by another version or for another
            adapter.
    """
    root = folder.place(OutputPath.CHECKPOINTS)
    folder.check_ownership()
    with writing_to(root):
        tidy_up(root)
    unusable = 0
    for found in reversed(list_checkpoints(root)):
        if latest_step is not None and found.step > latest_step:
            continue
        try:
            manifest, tensors = _read(found, folder.run_id, buffers, parts)
        except _UnusableCheckpointError as why:
            # Keep the evidence under a name that no later start considers.
            renamed = found.path.with_name(f"{found.path.name}.corrupt")
            warn(f"checkpoint {found.path} is not usable: {why}; looking for an earlier one")
            with writing_to(found.path):
                shutil.rmtree(renamed, ignore_errors=True)
                found.path.rename(renamed)
            unusable += 1
            continue
        return _take_over(found, manifest, tensors, buffers, parts), found
    if unusable:
        warn(f"{root}: none of {unusable} checkpoints is usable; training restarts at step 0")
    return None


def resume_from(
    found: SavedCheckpoint,
    folder: OutputFolder,
    buffers: AdapterBuffers,
    parts: Mapping[str, Stateful],
) -> RunPosition:
    """Restore buffers and parts from the checkpoint that rank 0 has chosen.

    Args:
        found: The checkpoint.
        folder: The output directory.
        buffers: Flat buffers of the adapter.
        parts: Further components by name.

    Raises:
        OutputError: The checkpoint cannot be read on this node or does not fit.
    """
    try:
        manifest, tensors = _read(found, folder.run_id, buffers, parts)
    except _UnusableCheckpointError as why:
        raise OutputError(
            f"{found.path}: rank 0 resumes from this checkpoint, but on this node {why}; "
            "spec.output.uri must be storage that all nodes share"
        ) from None
    return _take_over(found, manifest, tensors, buffers, parts)


def read_weights(found: SavedCheckpoint, run_id: str) -> dict[str, Tensor]:
    """Read the weights that an export at this checkpoint takes: the average if there is one.

    Args:
        found: The checkpoint.
        run_id: The run that it must belong to.

    Returns:
        Weights by factor name, in the masters' type.

    Raises:
        OutputError: The checkpoint is damaged, or another run's or version's.
    """
    try:
        manifest = _read_manifest(found)
        if manifest.run_id != run_id:
            raise _UnusableCheckpointError(f"it belongs to run {manifest.run_id}")
        part, name = (AVERAGE, "weights") if AVERAGE in manifest.parts else (_ADAPTER, "masters")
        flat = _read_part(found.path / f"{part}.safetensors", manifest)[name]
    except _UnusableCheckpointError as why:
        raise OutputError(
            f"checkpoint {found.path} can't be used: {why}; choose another one"
        ) from None
    sizes = [prod(shape) for _, shape in manifest.layout]
    pairs = zip(manifest.layout, flat.split(sizes), strict=True)
    return {factor: weights.view(shape) for (factor, shape), weights in pairs}


def _take_over(
    found: SavedCheckpoint,
    manifest: CheckpointManifest,
    tensors: Mapping[str, Mapping[str, Tensor]],
    buffers: AdapterBuffers,
    parts: Mapping[str, Stateful],
) -> RunPosition:
    for name, part in {_ADAPTER: buffers, **parts}.items():
        try:
            part.load(tensors[name], manifest.parts[name])
        except ValueError as error:
            raise _other_version(found, f"its {name} does not fit: {error}") from None
    try:
        watch = health.from_json(manifest.watch)
    except ValueError:
        raise _other_version(found, "its watchdog state has another format") from None
    return RunPosition(
        step=manifest.step,
        micro_step=manifest.micro_step,
        window_samples=manifest.window_samples,
        window_loss=torch.tensor(
            manifest.window_loss, dtype=torch.float64, device=buffers.gradient.device
        ),
        norm_range=manifest.norm_range,
        useful_seconds=manifest.useful_seconds,
        watch=watch,
        rollback=manifest.rollback,
    )


class _UnusableCheckpointError(Exception):
    """The reason that a checkpoint cannot be used."""


def _read(
    found: SavedCheckpoint,
    run_id: str,
    buffers: AdapterBuffers,
    parts: Mapping[str, Stateful],
) -> tuple[CheckpointManifest, dict[str, dict[str, Tensor]]]:
    """Read the manifest and each part's tensors by name, and compare every file with its hash."""
    manifest = _read_manifest(found)
    if manifest.run_id != run_id:
        raise _UnusableCheckpointError(f"it belongs to run {manifest.run_id}")
    if manifest.layout != _layout(buffers):
        raise OutputError(
            f"{found.path}: written for another adapter (other modules or ranks), because the "
            "model or the installed diffusers has changed since: choose another spec.output.uri"
        )
    wanted = {_ADAPTER, *parts}
    if manifest.parts.keys() != wanted:
        different = ", ".join(sorted(manifest.parts.keys() ^ wanted))
        raise _other_version(found, f"its components differ from this run's ({different})")
    return manifest, {n: _read_part(found.path / f"{n}.safetensors", manifest) for n in wanted}


def _read_manifest(found: SavedCheckpoint) -> CheckpointManifest:
    content = _content(found.path / CHECKPOINT_MANIFEST)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        raise _UnusableCheckpointError(f"{CHECKPOINT_MANIFEST} is damaged") from None
    if not isinstance(document, dict):
        raise _UnusableCheckpointError(f"{CHECKPOINT_MANIFEST} is damaged")
    ours, made_as = CheckpointManifest.model_fields["format"].default, document.get("format")
    seal = document.pop(_SEAL, None)
    # The first format had no seal. If the seal is broken, nothing in the manifest can be trusted.
    if seal != _digest(document) and not (seal is None and made_as == 1):
        raise _UnusableCheckpointError(
            f"{CHECKPOINT_MANIFEST} is not what was written (its sha256 differs)"
        )
    if made_as != ours:
        raise _other_version(found, f"its format is {made_as}, not {ours}")
    try:
        return CheckpointManifest.model_validate(document)
    except ValidationError:
        raise _UnusableCheckpointError(f"{CHECKPOINT_MANIFEST} is damaged") from None


def _sealed(manifest: CheckpointManifest) -> bytes:
    """Serialise the manifest as JSON, with a digest over all of it."""
    document = manifest.model_dump(mode="json")
    return json.dumps({**document, _SEAL: _digest(document)}, indent=1).encode()


def _digest(document: JsonObject) -> str:
    """Hash the content independently of its layout; Python writes and reads floats exactly."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _other_version(found: SavedCheckpoint, why: str) -> OutputError:
    return OutputError(
        f"{found.path}: written by another version of kubelora or its libraries ({why}); resume "
        "with that version, or choose another spec.output.uri"
    )


def _read_part(file: Path, manifest: CheckpointManifest) -> dict[str, Tensor]:
    data = _content(file)
    if hashlib.sha256(data).hexdigest() != manifest.files.get(file.name):
        raise _UnusableCheckpointError(f"{file.name} is not what was written (its sha256 differs)")
    return load(data)


def _content(file: Path) -> bytes:
    """Read a file.

    Permission errors end the run: falling back to an earlier checkpoint would lose intact progress.
    """
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise _UnusableCheckpointError(f"{file.name} is missing") from None
    except PermissionError:
        raise OutputError(
            f"{file} can't be read: permission denied; give this user read access and run again"
        ) from None
    except OSError as error:
        raise _UnusableCheckpointError(f"{file.name} can't be read ({error.strerror})") from None


def _write_part(file: Path, part: Stateful) -> str:
    """Write a part's tensors and return the file's sha256."""
    data = save({n: t.detach().cpu().contiguous() for n, t in part.tensors().items()})
    write_durably(file, data)
    return hashlib.sha256(data).hexdigest()


def _layout(buffers: AdapterBuffers) -> list[tuple[str, tuple[int, ...]]]:
    return [(slot.factor.name, slot.shape) for slot in buffers.slots]
