"""Publication of the finished adapter: export, verification, sample images and upload."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import OutputPath
from kubelora_api.status import Artifact
from kubelora_trainer.export.upload import push
from kubelora_trainer.export.verify_text_encoders import verify_text_encoders
from kubelora_trainer.export.verify_unet import verify_export
from kubelora_trainer.export.writers import (
    EXPORT_DTYPES,
    Title,
    dtype_that_holds,
    export_diffusers,
    export_kohya,
)
from kubelora_trainer.lora.adapter import trained_layers
from kubelora_trainer.models.sample_images import draw_samples
from kubelora_trainer.storage.output_dir import OutputFolder, artifact_of
from kubelora_trainer.training.context import Run
from kubelora_trainer.training.setup import AdaptedModel, TrainingInputs

logger = logging.getLogger(__name__)


def export_adapter(
    folder: OutputFolder,
    inputs: TrainingInputs,
    weights: Mapping[str, torch.Tensor],
    warn: Callable[[str], None],
) -> list[Artifact]:
    """Write the run's adapter, load it as a user would, and compare.

    Args:
        folder: The output directory.
        inputs: Model and adapter.
        weights: Weights to export, by factor.
        warn: Called with each warning.

    Returns:
        The files written.

    Raises:
        NumericalError: A file does not load exactly as it was trained.
    """
    folder.check_ownership()
    files = write_adapter(folder.job, folder.path, inputs, weights, warn)
    return [artifact_of(folder, file) for file in files]


def write_adapter(
    job: LoraTrainingJob,
    folder: Path,
    model: AdaptedModel,
    weights: Mapping[str, torch.Tensor],
    warn: Callable[[str], None],
) -> list[Path]:
    """Write an adapter in all formats, load it as a user would, and compare.

    Args:
        job: The job that the adapter was trained with.
        folder: Directory that gets the folder ``adapter``.
        model: Model and adapter.
        weights: Weights to export, by factor.
        warn: Called with each warning.

    Returns:
        The files written.

    Raises:
        NumericalError: A file does not load exactly as it was trained.
    """
    spec, base = job.spec, model.base
    layers = trained_layers(model.modules, weights)
    wanted = EXPORT_DTYPES[spec.output.dtype]
    dtype = dtype_that_holds(layers, wanted)
    if dtype != wanted:
        warn(
            "fp16 is too narrow for this adapter's weights, so its files are in fp32; "
            "output.dtype bf16 would store them in half the size"
        )
    title = Title(
        job.metadata.name, spec.dataset.resolution, base.noise_scheduler.config.prediction_type
    )
    encoders = model.trained_encoders
    exported = [export_diffusers(base.unet, layers, folder, dtype=dtype, encoders=encoders)]
    if not spec.adapter.dora:  # see NO_KOHYA_FILE
        exported.append(export_kohya(base.unet.config, layers, folder, title, dtype=dtype))
    files = [file.path for file in exported]
    checks = verify_export(
        base.folder, files, base.unet, layers, variant=spec.model.variant, dtype=dtype
    )
    checks += verify_text_encoders(
        base.folder,
        files,
        encoders,
        layers,
        unet_config=base.unet.config,
        variant=spec.model.variant,
        dtype=dtype,
    )
    if not any(check.effect > 0 for check in checks):
        warn(
            "the adapter changes nothing yet: its updates are below the precision of "
            f"{spec.precision.compute}. Train longer, or increase the learning rate"
        )
    return files


def draw(run: Run, folder: OutputFolder, inputs: TrainingInputs, step: int) -> None:
    """Generate the sample images of ``step`` if the job has prompts.

    Args:
        run: The run.
        folder: The output directory.
        inputs: The pipeline.
        step: Optimizer steps done.
    """
    spec = run.job.spec
    if spec.validation.prompts:
        folder.check_ownership()
        paths = draw_samples(
            inputs.base,
            inputs.base.unet,
            spec.validation,
            folder.place(OutputPath.SAMPLES),
            step,
            resolution=spec.dataset.resolution,
            stop=lambda: run.stop.requested,
        )
        if run.tracking:
            run.tracking.log_samples(paths, step)


def upload_adapter(run: Run, folder: OutputFolder, artifacts: list[Artifact]) -> None:
    """Upload the finished adapter to ``output.push``, and record it.

    Args:
        run: The run.
        folder: The output directory.
        artifacts: The files of the adapter.
    """
    run.exported = artifacts
    if uri := run.job.spec.output.push:
        push(folder, uri)
        folder.record = folder.record.model_copy(update={"pushed": uri})
        folder.write_manifest("Done", artifacts=artifacts)
        logger.info(f"uploaded: the adapter is at {uri}")
