"""The start of a run: baseline, resuming, and start-up checks."""

import logging

import torch

from kubelora_trainer.checkpoint.directories import SavedCheckpoint
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.health.baseline import Baseline, load_baseline
from kubelora_trainer.health.startup_checks import check_dtypes, check_fresh_adapter, check_resumed
from kubelora_trainer.lora.dora import NO_KOHYA_FILE
from kubelora_trainer.optim.precision import describe_memory, lossy_warnings
from kubelora_trainer.optim.prodigy import rate_warning
from kubelora_trainer.storage.output_dir import OutputFolder, installed_versions
from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.storage.uris import resolve_input
from kubelora_trainer.training.context import Run
from kubelora_trainer.training.rank_sync import resume_on_all_ranks
from kubelora_trainer.training.setup import TrainingInputs
from kubelora_trainer.training.train_state import TrainState
from kubelora_trainer.utils.errors import StorageError

logger = logging.getLogger(__name__)


def load_baseline_for_run(
    run: Run, folder: OutputFolder, made_of: RunRecord, total_steps: int
) -> Baseline | None:
    """Record the run's inputs, and load its baseline on rank 0.

    Args:
        run: The run.
        folder: The output directory.
        made_of: Fingerprints of the inputs.
        total_steps: Optimizer steps of the run.

    Raises:
        StorageError: The baseline cannot be read.
    """
    if not run.first:
        return None
    uri, baseline, digest = run.job.spec.health.baseline, None, made_of.dataset_sha256 or ""
    if uri:
        try:
            place = resolve_input(uri, run.options.mounts, content="run")
        except StorageError as error:
            raise StorageError(f"health.baseline: {error}") from error
        document = run.job.document()
        baseline = load_baseline(uri, place, document, installed_versions(), digest, total_steps)
        for line in baseline.told():
            logger.info(line)
    folder.record = folder.record.model_copy(
        update={
            "total_steps": total_steps,
            "dataset_sha256": made_of.dataset_sha256,
            "dataset_images": made_of.dataset_images,
            "model_sha256": made_of.model_sha256,
            "baseline": baseline.record if baseline else None,
        }
    )
    folder.write_manifest("Running")
    return baseline


def start_or_resume(
    run: Run, folder: OutputFolder, inputs: TrainingInputs, state: TrainState
) -> tuple[RunPosition, SavedCheckpoint | None]:
    """Resume or start from scratch, and run the start-up checks.

    Args:
        run: The run.
        folder: The output directory.
        inputs: Model and adapter.
        state: Weights and optimizer, which are restored.

    Returns:
        The position, and the checkpoint it came from.
    """
    buffers = state.buffers
    resumed = resume_on_all_ranks(run, folder, buffers, state.saved_parts)
    further = {"optimizer state": state.optimizer.state_bytes}
    if state.average:
        further["average"] = 4 * buffers.numel
    logger.info(f"contract: {check_dtypes(buffers, state.optimizer)}")
    logger.info(f"memory of the adapter: {describe_memory(buffers.copy_bytes() | further)}")
    rate = rate_warning(run.job.spec.training)
    for sentence in [*lossy_warnings(buffers.plan), *([rate] if rate else [])]:
        run.warn(sentence)
    if run.job.spec.adapter.dora:
        run.warn(NO_KOHYA_FILE)
    if resumed is None:
        if folder.record.total_steps is not None:  # an earlier attempt came as far as training
            logger.info("no checkpoint of this run is left, so it restarts at its first step")
        if not run.job.spec.adapter.from_:
            check_fresh_adapter(buffers, inputs.modules)
            logger.info("contract: a fresh adapter, |B·A| = 0")
        no_loss = torch.zeros((), dtype=torch.float64, device=buffers.masters.device)
        return RunPosition(window_loss=no_loss), None
    position, saved = resumed
    held = check_resumed(state.optimizer, position.step, state.skipped_steps)
    logger.info(f"contract: {held}")
    run.stop.saved(position.step)
    logger.info(f"resuming from {saved.path} at step {position.step}")
    folder.record = folder.record.model_copy(update={"rollback": position.rollback})
    return position, saved
