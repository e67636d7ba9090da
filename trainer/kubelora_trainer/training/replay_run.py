"""A step of a recorded run, computed again on another machine or later.

The run keeps what that takes: its job, the checkpoint's weights and optimizer state, and the
fingerprints of data and model. Draws follow from the seed, and pixels are read from the dataset.
The steps between the checkpoint and the one that is asked for are computed first.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from rich.console import Console

from kubelora_api.documents import InvalidDocumentError, parse_job
from kubelora_api.gradient_dump_spec import DumpGradients
from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import OutputPath
from kubelora_api.report import RunReport
from kubelora_api.spec import Health
from kubelora_trainer.checkpoint.checkpointer import resume_from
from kubelora_trainer.checkpoint.directories import SavedCheckpoint, list_checkpoints
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.distributed.process_group import ReducedWindow
from kubelora_trainer.distributed.reduce_payload import ControlFlags
from kubelora_trainer.health.watchdog import Watchdog
from kubelora_trainer.reporting.http_server import Board
from kubelora_trainer.reporting.metrics import TrainerMetrics
from kubelora_trainer.reporting.progress_bar import LineView
from kubelora_trainer.reporting.run_log import NoLog
from kubelora_trainer.storage.input_fingerprints import changed_inputs
from kubelora_trainer.storage.output_dir import (
    RUN_LOG_PARTS,
    Manifest,
    OutputFolder,
    installed_versions,
    read_manifest,
)
from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.telemetry.gradient_dump import GradientDump
from kubelora_trainer.training.context import Run, RunOptions
from kubelora_trainer.training.loop import Parts, accumulate_window, take_step
from kubelora_trainer.training.plan import build_plan
from kubelora_trainer.training.setup import TrainingInputs, build_training_inputs
from kubelora_trainer.training.step_reporter import Reporter
from kubelora_trainer.training.train_state import TrainState, build_train_state
from kubelora_trainer.utils.errors import OutputError
from kubelora_trainer.utils.paths import did_you_mean_path
from kubelora_trainer.utils.signals import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplayedRun:
    """A run's output directory, and what a replay of it takes from there."""

    path: Path
    manifest: Manifest
    job: LoraTrainingJob


@dataclass(frozen=True)
class FactorRow:
    """The gradient norm of a factor, recomputed and as the run recorded it; None if it did not."""

    name: str
    found: float
    recorded: float | None


def open_run(path: Path) -> ReplayedRun:
    """Read a run's manifest and job. Raises OutputError if there is no run."""
    if not path.is_dir():
        raise OutputError(f"{path}: no such folder{did_you_mean_path(path)}")
    manifest = read_manifest(path)
    if manifest is None:
        raise OutputError(f"{path}: not a run's output, as it has no {OutputPath.MANIFEST}")
    try:
        job = parse_job(manifest.job, local=True)
    except InvalidDocumentError as invalid:
        raise OutputError(
            f"{path / OutputPath.MANIFEST}: its job can't be read by this version "
            f"({invalid.problems[0]}); replay with the version that trained it, "
            f"{manifest.versions.get('kubelora', 'unknown')}"
        ) from None
    return ReplayedRun(path, manifest, job)


def replay_step(
    run: ReplayedRun, step: int, output: Path, mounts: Mapping[str, Path]
) -> list[FactorRow]:
    """Compute a step again, and write the gradients of each of its micro-steps.

    Args:
        run: The run.
        step: Optimizer step, from 1.
        output: Directory that gets the folder of gradients.
        mounts: Directory of each claim.

    Returns:
        The norm of every factor's gradient, before clipping.

    Raises:
        OutputError: The run has no such step, or data or model have changed.
    """
    total = run.manifest.record.total_steps
    if step < 1 or (total is not None and step > total):
        raise OutputError(f"{run.path}: has no step {step}; it has 1 to {total}")
    for line in differences(run):
        logger.warning(line)
    begin = nearest_checkpoint(run, step)
    scratch = OutputFolder(output, run.job, run.manifest.run_id, run.manifest.attempt)
    output.mkdir(parents=True, exist_ok=True)
    own = Run(run.job, RunOptions(mounts, None, None, None, ""), StopRequest(), Console())
    inputs = build_training_inputs(run.job.spec, mounts, scratch, logger.info)
    try:
        _check_inputs(run, inputs)
        state = build_train_state(own, inputs)
        position = _position(run, begin, state)
        parts = _parts(run.job, own, inputs, state, position)
        return _replayed(run, parts, position, step, scratch)
    finally:
        inputs.objective.close()


def nearest_checkpoint(run: ReplayedRun, step: int) -> SavedCheckpoint | None:
    """Return the last checkpoint before ``step`` at a step's end; None is the run's beginning."""
    kept = list_checkpoints(run.path / OutputPath.CHECKPOINTS)
    before = [c for c in kept if c.step < step and c.micro == 0]
    if before:
        return before[-1]
    steps = ", ".join(sorted({str(c.step) for c in kept}, key=int)) or "none"
    logger.warning(
        f"{run.path}: holds no checkpoint before step {step} (it has those of steps: {steps}), so "
        "the run is computed from its beginning; spec.checkpoint.keep decides how many are kept"
    )
    return None


def differences(run: ReplayedRun) -> Iterator[str]:
    """Yield a sentence for what differs from the run's own circumstances."""
    now = installed_versions()
    other = [
        f"{name} {was} then and {now.get(name, 'not installed')} now"
        for name, was in sorted(run.manifest.versions.items())
        if now.get(name) != was
    ]
    if other:
        yield f"other versions may compute other bits: {'; '.join(other)}"
    workers = run.job.spec.workers
    if workers.nodes * workers.gpus_per_node > 1:
        yield (
            f"the run had {workers.nodes * workers.gpus_per_node} ranks, whose sums are rounded in "
            "another order than on this single one: norms agree to some digits, not to the bit"
        )


def _check_inputs(run: ReplayedRun, inputs: TrainingInputs) -> None:
    now = RunRecord(
        dataset_sha256=inputs.dataset.digest(),
        dataset_images=len(inputs.dataset),
        model_sha256=inputs.base.fingerprint,
    )
    spec = run.job.spec
    if changed := changed_inputs(run.manifest.record, now, spec.dataset.uri, spec.model.uri):
        raise OutputError(
            f"{' and '.join(changed)} changed since the run, so its steps can't be computed again: "
            "restore the original"
        )


def _position(run: ReplayedRun, begin: SavedCheckpoint | None, state: TrainState) -> RunPosition:
    if begin is None:
        device = state.buffers.masters.device
        return RunPosition(window_loss=torch.zeros((), dtype=torch.float64, device=device))
    folder = OutputFolder(run.path, run.job, run.manifest.run_id, run.manifest.attempt)
    return resume_from(begin, folder, state.buffers, state.saved_parts)


def _parts(
    job: LoraTrainingJob, own: Run, inputs: TrainingInputs, state: TrainState, position: RunPosition
) -> Parts:
    plan = build_plan(job.spec.training, inputs.objective.order)
    watchdog = Watchdog(())
    reporter = Reporter(
        slots=state.buffers.slots,
        policy=Health(),
        watchdog=watchdog,
        metrics=TrainerMetrics(CollectorRegistry(), own.precision),
        exporter=Board(RunReport(run_id="", attempt=0, phase="Training")),
        run_log=NoLog(),
        progress=LineView(plan.optimizer_steps, every=100),
        position=position,
    )
    return Parts(
        training=job.spec.training,
        plan=plan,
        objective=state.categories.watching(inputs.objective, inputs.objective.order),
        buffers=state.buffers,
        optimizer=state.optimizer,
        telemetry=state.telemetry,
        reporter=reporter,
        watchdog=watchdog,
        average=state.average,
        categories=state.categories,
        scaler=state.scaler,
    )


def _replayed(
    run: ReplayedRun, parts: Parts, position: RunPosition, step: int, scratch: OutputFolder
) -> list[FactorRow]:
    logger.info(f"computing steps {position.step + 1} to {step} on {parts.buffers.masters.device}")
    while True:
        if position.step == step - 1:
            parts = replace(parts, dump=_dump(parts, scratch))
        position = accumulate_window(parts, position, lambda: False)
        nobody = ReducedWindow(position, ControlFlags(False, False), float("nan"))
        pending, position = take_step(parts, nobody)
        if position.step == step:
            break
    recorded = recorded_norms(run.path, step)
    norms = pending.read().factor_norms
    names = [slot.factor.name for slot in parts.buffers.slots]
    return [
        FactorRow(name, norm, recorded.get(name))
        for name, norm in sorted(zip(names, norms, strict=True))
    ]


def _dump(parts: Parts, scratch: OutputFolder) -> GradientDump:
    return GradientDump(
        scratch,
        DumpGradients(when=ANY_GRADIENT, budget=EVERYTHING),
        parts.buffers.slots,
        parts.buffers.plan.compute,
        logger.warning,
        parts.scaler.scale if parts.scaler else None,
    )


ANY_GRADIENT = "zero_ratio < 2"
"""Condition that holds for every gradient, those with NaN included."""
EVERYTHING = "1024Gi"
"""Budget of the dump: all micro-steps of one step, which was asked for by name."""


def recorded_norms(run: Path, step: int) -> dict[str, float]:
    """Return the run's own gradient norms of a step by factor; empty where its log has none."""
    import pyarrow.parquet as pq

    joined = run / OutputPath.RUN_LOG
    files = [joined] if joined.exists() else sorted((run / RUN_LOG_PARTS).glob("*.parquet"))
    columns = ["module", "factor", "grad_norm"]
    norms: dict[str, float] = {}
    for file in files:
        table = pq.read_table(file, columns=columns, filters=[("step", "==", step)])
        for row in table.to_pylist():
            if row["grad_norm"] is not None:
                norms[f"{row['module']}.{row['factor']}"] = row["grad_norm"]
    return norms
