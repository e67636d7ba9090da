"""Checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint is a folder with one safetensors file per flat buffer and a manifest with their
hashes, written aside and renamed. It may stand in the middle of an accumulation window, for it
holds the accumulator too. There is no random state: every draw is a function of the seed and the
micro-step. On resume the newest checkpoint whose hashes agree is taken.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load, save
from torch import Tensor

from kubelora_api.names import OutputPath
from kubelora_trainer import health
from kubelora_trainer.atomic_files import sync_folder, write_durably, writing_to
from kubelora_trainer.buffers import AdapterBuffers
from kubelora_trainer.errors import ConfigurationError
from kubelora_trainer.health import WatchState
from kubelora_trainer.optimizer import FlatAdamW
from kubelora_trainer.output import OutputFolder

_NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
_MANIFEST = "checkpoint.json"


@dataclass(frozen=True)
class RunPosition:
    """Where a run stands, apart from its tensors.

    step: optimizer steps done. micro_step: micro-steps done, over the whole run.
    window_samples, window_loss: samples seen and losses summed in the unfinished window; the sum
    is a fp64 scalar that stays on the device, so that no micro-step waits for it.
    norm_range: least and largest total gradient norm so far, first steps left out.
    """

    step: int = 0
    micro_step: int = 0
    window_samples: int = 0
    window_loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    norm_range: tuple[float, float] | None = None
    watch: WatchState = field(default_factory=WatchState)


class CheckpointManifest(BaseModel):
    """``checkpoint.json``. layout: name and shape of each factor, in the buffers' order."""

    model_config = ConfigDict(frozen=True)

    format: int = 1
    run_id: str
    attempt: int
    step: int
    micro_step: int
    window_micro_steps: int
    window_samples: int
    window_loss: float
    norm_range: tuple[float, float] | None
    watch: dict[str, Any]
    layout: list[tuple[str, tuple[int, ...]]]
    files: dict[str, str]


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on the disk, by its folder."""

    path: Path
    step: int
    micro: int


def save_checkpoint(
    folder: OutputFolder,
    buffers: AdapterBuffers,
    optimizer: FlatAdamW,
    position: RunPosition,
    window_micro_steps: int,
    keep: int,
) -> SavedCheckpoint:
    """Write a checkpoint and remove all but the newest ``keep``.

    window_micro_steps: micro-steps done in the unfinished window, 0 between windows.
    Raises ConfigurationError when the disk refuses or a newer attempt took over; the checkpoints
    before it are intact then.
    """
    folder.assert_ours()
    root = folder.place(OutputPath.CHECKPOINTS)
    target = root / _name(position.step, window_micro_steps)
    aside = root / f".{target.name}.part"
    with writing_to(target):
        try:
            root.mkdir(exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            files = {
                name: _write_tensor(aside / name, tensor)
                for name, tensor in _tensors(buffers, optimizer).items()
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
                watch=health.to_json(position.watch),
                layout=_layout(buffers),
                files=files,
            )
            write_durably(aside / _MANIFEST, manifest.model_dump_json(indent=1).encode())
            sync_folder(aside)
            _put_in_place(aside, target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    for old in list_checkpoints(root)[:-keep]:
        shutil.rmtree(old.path, ignore_errors=True)
    return SavedCheckpoint(target, position.step, window_micro_steps)


def resume(
    folder: OutputFolder,
    buffers: AdapterBuffers,
    optimizer: FlatAdamW,
    warn: Callable[[str], None],
) -> tuple[RunPosition, SavedCheckpoint] | None:
    """Fill buffers and optimizer from the newest checkpoint that verifies; None where none is.

    A checkpoint that does not verify is named in a warning, set aside and not used.
    """
    for found in reversed(list_checkpoints(folder.place(OutputPath.CHECKPOINTS))):
        try:
            manifest, tensors = _read(found, folder.run_id, buffers, optimizer)
        except _Unusable as why:
            set_aside = found.path.with_name(f"{found.path.name}.corrupt")
            warn(f"checkpoint {found.path} is not usable: {why}; looking for an earlier one")
            with writing_to(found.path):
                shutil.rmtree(set_aside, ignore_errors=True)
                found.path.rename(set_aside)
            continue
        for name, target in _tensors(buffers, optimizer).items():
            target.copy_(tensors[name])
        buffers.publish_masters()
        optimizer.set_steps_taken(manifest.step)
        position = RunPosition(
            step=manifest.step,
            micro_step=manifest.micro_step,
            window_samples=manifest.window_samples,
            window_loss=torch.tensor(
                manifest.window_loss, dtype=torch.float64, device=buffers.gradient.device
            ),
            norm_range=manifest.norm_range,
            watch=health.from_json(manifest.watch),
        )
        return position, found
    return None


def list_checkpoints(root: Path) -> list[SavedCheckpoint]:
    """Finished checkpoints, oldest first."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        if match := _NAME.fullmatch(path.name):
            found.append(SavedCheckpoint(path, int(match[1]), int(match[2] or 0)))
    return sorted(found, key=lambda c: (c.step, c.micro))


class _Unusable(Exception):
    """Why a checkpoint can't be used."""


def _read(
    found: SavedCheckpoint, run_id: str, buffers: AdapterBuffers, optimizer: FlatAdamW
) -> tuple[CheckpointManifest, dict[str, Tensor]]:
    try:
        manifest = CheckpointManifest.model_validate_json((found.path / _MANIFEST).read_bytes())
    except FileNotFoundError:
        raise _Unusable(f"{_MANIFEST} is missing") from None
    except (ValidationError, json.JSONDecodeError):
        raise _Unusable(f"{_MANIFEST} is damaged") from None
    if manifest.run_id != run_id:
        raise _Unusable(f"it belongs to run {manifest.run_id}")
    if manifest.layout != _layout(buffers):
        raise ConfigurationError(
            f"{found.path}: made for another adapter (other modules or ranks); the model or the "
            "installed diffusers changed since: choose another spec.output.uri"
        )
    wanted = _tensors(buffers, optimizer)
    return manifest, {n: _read_tensor(found.path / n, manifest, t) for n, t in wanted.items()}


def _read_tensor(file: Path, manifest: CheckpointManifest, like: Tensor) -> Tensor:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise _Unusable(f"{file.name} can't be read ({error.strerror})") from None
    if hashlib.sha256(data).hexdigest() != manifest.files.get(file.name):
        raise _Unusable(f"{file.name} is not what was written (its sha256 differs)")
    tensor = load(data)["flat"]
    if tensor.dtype != like.dtype or tensor.shape != like.shape:
        raise _Unusable(f"{file.name} holds {tensor.dtype}, this run needs {like.dtype}")
    return tensor


def _write_tensor(file: Path, tensor: Tensor) -> str:
    data = save({"flat": tensor.detach().cpu()})
    write_durably(file, data)
    return hashlib.sha256(data).hexdigest()


def _put_in_place(aside: Path, target: Path) -> None:
    """Rename, also over an earlier checkpoint of the same name."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _tensors(buffers: AdapterBuffers, optimizer: FlatAdamW) -> dict[str, Tensor]:
    return {
        "masters.safetensors": buffers.masters,
        "gradient.safetensors": buffers.gradient,
        "first_moment.safetensors": optimizer.first_moment,
        "second_moment.safetensors": optimizer.second_moment,
    }


def _layout(buffers: AdapterBuffers) -> list[tuple[str, tuple[int, ...]]]:
    return [(slot.factor.name, slot.shape) for slot in buffers.slots]


def _name(step: int, window_micro_steps: int) -> str:
    return f"step-{step:06d}" + (f".{window_micro_steps}" if window_micro_steps else "")
