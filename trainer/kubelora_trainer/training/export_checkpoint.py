"""Export of a checkpoint's adapter, which passes the same verification as a finished run's."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kubelora_api.documents import InvalidDocumentError, parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import OutputPath
from kubelora_trainer.checkpoint.checkpointer import read_weights
from kubelora_trainer.checkpoint.directories import (
    SavedCheckpoint,
    folder_name,
    list_checkpoints,
)
from kubelora_trainer.storage.output_dir import Manifest, read_manifest
from kubelora_trainer.training.publish import write_adapter
from kubelora_trainer.training.setup import AdaptedModel, load_adapted_model
from kubelora_trainer.utils.errors import OutputError
from kubelora_trainer.utils.paths import did_you_mean_path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, and the run that it belongs to."""

    checkpoint: SavedCheckpoint
    run: Path
    manifest: Manifest


def find_checkpoint(source: str) -> FoundCheckpoint:
    """Find the checkpoint that ``source`` names.

    Args:
        source: A run's output directory, ``RUN@STEP``, or a checkpoint's own directory.

    Returns:
        The checkpoint; without a step the newest one.

    Raises:
        OutputError: There is no such run or checkpoint.
    """
    place, step = Path(source).expanduser(), None
    if not place.exists() and "@" in source:
        name, _, given = source.rpartition("@")
        if not given.isdecimal():
            raise OutputError(f"{source}: expected RUN@STEP, such as {name}@500")
        place, step = Path(name).expanduser(), int(given)
    if not place.is_dir():
        raise OutputError(f"{place}: no such folder{did_you_mean_path(place)}")
    if place.parent.name == OutputPath.CHECKPOINTS:
        run = place.parent.parent
        wanted = [c for c in list_checkpoints(place.parent) if c.path.name == place.name]
    else:
        run = place
        wanted = list_checkpoints(run / OutputPath.CHECKPOINTS)
    manifest = read_manifest(run)
    if manifest is None:
        raise OutputError(
            f"{place}: neither a run's output (it has no {OutputPath.MANIFEST}) nor one of its "
            f"{OutputPath.CHECKPOINTS}"
        )
    if not wanted:
        raise OutputError(f"{run}: holds no checkpoint{_where_the_adapter_is(run, manifest)}")
    chosen = [c for c in wanted if step is None or c.step == step]
    if not chosen:
        steps = ", ".join(sorted({str(c.step) for c in wanted}, key=int))
        raise OutputError(
            f"{run}: holds no checkpoint of step {step}; it has those of {steps} "
            "(spec.checkpoint.keep decides how many are kept)"
        )
    # Of step 500 and a place in its next window, both have the same weights.
    return FoundCheckpoint(chosen[-1], run, manifest)


def export_checkpoint(
    found: FoundCheckpoint,
    output: Path | None,
    mounts: Mapping[str, Path],
    model_uri: str | None = None,
) -> list[Path]:
    """Write the adapter of a checkpoint, load it as a user would, and compare.

    Args:
        found: The checkpoint.
        output: Directory that gets the folder ``adapter``; None is a directory in the run's own.
        mounts: Directory of each claim.
        model_uri: The base model, if it is not at the job's ``spec.model.uri`` any more.

    Returns:
        The files written.

    Raises:
        ConfigurationError: The model or the checkpoint can't be read.
        NumericalError: A file does not load exactly as it was trained.
    """
    job = _job_of(found, model_uri)
    weights = read_weights(found.checkpoint, found.manifest.run_id)
    # The figures of the verification are the CPU's own, and a GPU may be busy with the run itself.
    model = load_adapted_model(job.spec, mounts, torch.device("cpu"), logger.info)
    _check_fit(model, weights, found)
    known = found.manifest.record.model_sha256
    if known not in (None, model.base.fingerprint):
        logger.warning(
            f"the model at {job.spec.model.uri} is not the one that the run was trained on (its "
            "fingerprint differs), so images will differ from the run's samples"
        )
    target = output or found.run / OutputPath.EXPORTS / _name(found.checkpoint)
    with torch.no_grad():
        for module in model.modules:
            for name, parameter in module.factors.items():
                parameter.copy_(weights[f"{module.full_name}.{name}"])
    return write_adapter(job, target, model, weights, logger.warning)


def _job_of(found: FoundCheckpoint, model_uri: str | None) -> LoraTrainingJob:
    document = found.manifest.job
    if model_uri is not None:
        spec = document.get("spec", {})
        document = {**document, "spec": {**spec, "model": {**spec["model"], "uri": model_uri}}}
    try:
        return parse_job(document, local=True)
    except InvalidDocumentError as invalid:
        raise OutputError(
            f"{found.run / OutputPath.MANIFEST}: its job can't be read by this version "
            f"({invalid.problems[0]}); export with the version that trained it, "
            f"{found.manifest.versions.get('kubelora', 'unknown')}"
        ) from None


def _check_fit(
    model: AdaptedModel, weights: Mapping[str, torch.Tensor], found: FoundCheckpoint
) -> None:
    have = {factor.name: tuple(factor.parameter.shape) for factor in model.factors}
    if have != {name: tuple(tensor.shape) for name, tensor in weights.items()}:
        raise OutputError(
            f"{found.checkpoint.path}: written for another adapter (other modules or ranks) than "
            "the job gives with this model: pass the run's own model with --model"
        )


def _name(checkpoint: SavedCheckpoint) -> str:
    return folder_name(checkpoint.step, checkpoint.micro)


def _where_the_adapter_is(run: Path, manifest: Manifest) -> str:
    if manifest.state == "Done":
        return f"; the run is done, and its adapter is in {run / OutputPath.ADAPTER}"
    return "; spec.checkpoint.everySteps decides how often one is saved"
