"""The start of a run: baseline, resuming, and the detectors' first checks."""

import logging
from typing import Literal

import torch

from kubelora_trainer.checkpoint.directories import SavedCheckpoint
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.health.baseline import Baseline, load_baseline
from kubelora_trainer.health.detector import RunStart
from kubelora_trainer.health.detectors import Watched, build_detectors
from kubelora_trainer.health.watchdog import Watchdog
from kubelora_trainer.lora.dora import NO_KOHYA_FILE
from kubelora_trainer.optim.lr_schedule import steps_that_moved
from kubelora_trainer.optim.precision import describe_memory, lossy_warnings
from kubelora_trainer.optim.prodigy import rate_warning
from kubelora_trainer.storage.output_dir import OutputFolder, installed_versions
from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.storage.uris import resolve_input
from kubelora_trainer.training.context import Run
from kubelora_trainer.training.rank_sync import resume_on_all_ranks
from kubelora_trainer.training.recomputation import weights_in_use
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
        document = run.job.recorded_document()
        baseline = load_baseline(uri, place, document, installed_versions(), digest, total_steps)
        for line in baseline.report_lines():
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
    run: Run, folder: OutputFolder, state: TrainState
) -> tuple[RunPosition, SavedCheckpoint | None]:
    """Resume or start from scratch.

    Args:
        run: The run.
        folder: The output directory.
        state: Weights and optimizer, which are restored.

    Returns:
        The position, and the checkpoint it came from.
    """
    buffers = state.buffers
    resumed = resume_on_all_ranks(run, folder, buffers, state.saved_parts)
    further = {"optimizer state": state.optimizer.state_bytes}
    further["last step, for its replay"] = buffers.gradient.nbytes + sum(
        part.nbytes for part in weights_in_use(buffers)
    )
    if state.average:
        further["average"] = 4 * buffers.numel
    logger.info(f"memory of the adapter: {describe_memory(buffers.copy_bytes() | further)}")
    rate = rate_warning(run.job.spec.training)
    for sentence in [*lossy_warnings(buffers.plan), *([rate] if rate else [])]:
        run.warn(sentence)
    if run.job.spec.adapter.dora:
        run.warn(NO_KOHYA_FILE)
    if resumed is None:
        if folder.record.total_steps is not None:  # an earlier attempt reached training
            logger.info("no checkpoint of this run is left, so it restarts at its first step")
        no_loss = torch.zeros((), dtype=torch.float64, device=buffers.masters.device)
        return RunPosition(window_loss=no_loss), None
    position, saved = resumed
    run.stop.saved(position.step)
    logger.info(f"resuming from {saved.path} at step {position.step}")
    folder.record = folder.record.model_copy(update={"rollback": position.rollback})
    return position, saved


def start_watchdog(
    run: Run, inputs: TrainingInputs, watched: Watched, position: RunPosition, start: RunStart
) -> Watchdog:
    """Build the detectors, let them judge the start, and show them every micro-batch.

    Raises NumericalError if the start-up contract is broken.
    """
    watchdog = Watchdog(build_detectors(watched))
    for line in watchdog.start(position.watch, start):
        logger.info(line)
    inputs.objective.observer = watchdog.on_micro_batch
    return watchdog


def run_start(
    run: Run,
    inputs: TrainingInputs,
    state: TrainState,
    position: RunPosition,
    reason: Literal["new", "resumed", "rolled back"],
    planned_before: int | None = None,
) -> RunStart:
    """Describe the point that training starts from, for the detectors.

    Args:
        run: The run.
        inputs: Its model, adapter and data.
        state: The adapter's buffers and optimizer, restored if there was a checkpoint.
        position: The steps they have done.
        reason: Why training starts here.
        planned_before: Optimizer steps that an earlier attempt planned; None if unknown.
    """
    spec, skipped = run.job.spec, state.skipped_steps
    return RunStart(
        reason=reason,
        buffers=state.buffers,
        optimizer=state.optimizer,
        modules=inputs.modules,
        untrained=reason == "new" and not spec.adapter.from_,
        step=position.step,
        moved=steps_that_moved(spec.training, position.step, skipped),
        skipped=skipped,
        planned_before=planned_before,
        rollback=position.rollback,
        frozen=inputs.frozen_weights,
        average=state.average,
    )
