"""A run from start to end: claim the output, train, export, report.

`loop.py` is the training itself. This module has the steps around it, in order, and makes sure that
every way to end leaves a manifest, a report and a message.
"""

import logging
import shlex
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry
from rich.console import Console

from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import ExitCode, OutputPath
from kubelora_api.report import RunReport
from kubelora_api.spec import Health
from kubelora_api.status import Artifact
from kubelora_trainer.health.detectors import Watched
from kubelora_trainer.health.detectors.quantities import facts_of
from kubelora_trainer.reporting.http_server import Board, Exporter
from kubelora_trainer.reporting.metrics import TrainerMetrics
from kubelora_trainer.reporting.progress_bar import build_progress
from kubelora_trainer.reporting.run_log import NoLog, RunLog, flush_on_error
from kubelora_trainer.reporting.summary import RunSummary, summary_text
from kubelora_trainer.reporting.trackers import build_trackers
from kubelora_trainer.storage.input_fingerprints import check_same_inputs
from kubelora_trainer.storage.output_dir import Manifest, OutputFolder, artifact_of
from kubelora_trainer.storage.path_overlap import check_paths_disjoint
from kubelora_trainer.storage.run_length import check_end_not_passed
from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.storage.uris import resolve_output
from kubelora_trainer.training.context import Run, RunOptions
from kubelora_trainer.training.hooks import RunHooks
from kubelora_trainer.training.lifecycle import (
    conclude,
    device_error,
    first_report,
    serve_metrics,
)
from kubelora_trainer.training.loop import Parts, train
from kubelora_trainer.training.plan import build_plan
from kubelora_trainer.training.publish import draw, export_adapter, upload_adapter
from kubelora_trainer.training.rank_sync import (
    claim_output_on_all_ranks,
    compare,
    join_ranks,
    wait_for_rank0_to_end,
)
from kubelora_trainer.training.setup import TrainingInputs, build_training_inputs
from kubelora_trainer.training.start import (
    load_baseline_for_run,
    run_start,
    start_or_resume,
    start_watchdog,
)
from kubelora_trainer.training.step_reporter import Reporter
from kubelora_trainer.training.train_state import build_train_state
from kubelora_trainer.utils.device_faults import device_label
from kubelora_trainer.utils.errors import (
    ConfigurationError,
    InterruptedRunError,
    PeerLostError,
    RunEndedError,
    SuspendedByPolicyError,
)
from kubelora_trainer.utils.progress_log import log_progress
from kubelora_trainer.utils.signals import StopRequest

logger = logging.getLogger(__name__)


def run_job(job: LoraTrainingJob, options: RunOptions, stop: StopRequest, console: Console) -> None:
    """Run ``job`` to its end.

    Args:
        job: The job.
        options: Options from the command line and environment.
        stop: The stop request.
        console: Console of the progress bar.

    Raises:
        RunEndedError: The run failed or was stopped; raised after it was recorded and reported.
    """
    run = Run(job, options, stop, console)
    try:
        run.process_group = join_ranks(run)
        message, artifacts = _run(run)
    except SuspendedByPolicyError as held:
        ended = SuspendedByPolicyError(f"{held}{_how_to_continue(run)}")
        ended.same_on_all_ranks = held.same_on_all_ranks
        wait_for_rank0_to_end(run, ended)
        conclude(run, ended.exit_code, str(ended), [])
        raise ended from held
    except Exception as error:
        ending = _foreseen(run, error)
        if ending is None:
            conclude(run, ExitCode.INTERNAL, f"unexpected error: {error!r}", [])
            raise
        wait_for_rank0_to_end(run, ending)
        conclude(run, ending.exit_code, str(ending), run.exported)
        if ending is error:
            raise
        raise ending from error
    conclude(run, ExitCode.DONE, message, artifacts)


def _foreseen(run: Run, error: Exception) -> RunEndedError | None:
    """Return the foreseen way to end that ``error`` is or shows; None if it is unexpected.

    Loaders report any failure as a wrong model, also one of the memory or the device.
    """
    foreseen = error if isinstance(error, RunEndedError) else None
    if foreseen is not None and not isinstance(foreseen, ConfigurationError):
        return foreseen
    return device_error(run, error) or foreseen


def _run(run: Run) -> tuple[str, list[Artifact]]:
    """Run everything from the output directory to the exported adapter; return a message."""
    place = resolve_output(run.job.spec.output.uri, run.options.mounts)
    check_paths_disjoint(run.job.spec, run.options.mounts, place)
    claimed = claim_output_on_all_ranks(run, place)
    if isinstance(claimed, Manifest):
        return _already_done(run, place, claimed)
    run.folder = claimed
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry, run.precision)
    board: Exporter | Board = Board(first_report(claimed))
    if run.options.rank_info.local_rank == 0:
        board = run.exporter = serve_metrics(run, claimed, registry)
    inputs = build_training_inputs(
        run.job.spec,
        run.options.mounts,
        claimed,
        logger.info,
        stop=lambda: run.stop.requested,
        at_once=run.stop.at_once,
        rank_info=run.options.rank_info,
    )
    run.device_label = device_label(inputs.base.device)
    exit_code = ExitCode.INTERNAL
    try:
        inputs.objective.fill_cache(
            lambda: run.stop.requested, log_progress("cache: entries checked", logger.info)
        )
        run.process_group.all_gather_object(None)  # barrier: every rank's part is cached
        done = _train_and_export(run, claimed, metrics, board, inputs)
        exit_code = ExitCode.DONE
        return done
    except RunEndedError as ended:
        # After a failed upload the run itself is still done.
        exit_code = ExitCode.DONE if run.exported else ended.exit_code
        raise
    finally:
        inputs.objective.close()
        if run.tracking:
            run.tracking.finish(exit_code)


def _already_done(run: Run, place: Path, manifest: Manifest) -> tuple[str, list[Artifact]]:
    """Train nothing, but retry an upload that failed in an earlier attempt."""
    name = run.job.metadata.name
    if not run.first or run.job.spec.output.push in (None, manifest.record.pushed):
        logger.info(f"{name}: already done, see {place}; nothing to do")
    else:
        logger.info(f"{name}: already done, see {place}")
        attempt = max(manifest.attempt, run.options.attempt or 0)
        run.folder = OutputFolder(place, run.job, manifest.run_id, attempt, manifest.record)
        upload_adapter(run, run.folder, manifest.artifacts)
    return "already done", manifest.artifacts


def _train_and_export(
    run: Run,
    folder: OutputFolder,
    metrics: TrainerMetrics,
    exporter: Exporter | Board,
    inputs: TrainingInputs,
) -> tuple[str, list[Artifact]]:
    spec = run.job.spec
    state = build_train_state(run, inputs)
    buffers = state.buffers
    plan = build_plan(spec.training, inputs.objective.order)
    position, resumed_from = start_or_resume(run, folder, state)
    check_end_not_passed(position.step, plan.optimizer_steps)
    reason: Literal["new", "resumed"] = "new" if resumed_from is None else "resumed"
    start = run_start(run, inputs, state, position, reason, folder.record.total_steps)
    compare(run.process_group, inputs, buffers, position)
    made_of = _made_of(inputs)
    if resumed_from is not None:
        check_same_inputs(folder.record, made_of, spec.dataset.uri, spec.model.uri)
    watched = Watched(
        facts=facts_of(spec.training, buffers, plan.optimizer_steps, spec.adapter.dropout),
        buffers=buffers,
        categories=[sample.category for sample in inputs.dataset.samples],
        files=[sample.file for sample in inputs.dataset.samples],
        baseline=load_baseline_for_run(run, folder, made_of, plan.optimizer_steps),
        training=spec.training,
    )
    watchdog = start_watchdog(run, inputs, watched, position, start)
    metrics.data_wait = inputs.objective.data_wait
    metrics.plan_steps(position.step, plan.optimizer_steps)
    exporter.report = exporter.report.model_copy(
        update={"phase": "Training", "step": position.step, "total_steps": plan.optimizer_steps}
    )
    run_log = RunLog(folder, buffers.slots, position.step, run.warn) if run.first else NoLog()
    if run.first:
        run.tracking = build_trackers(folder, position.step, _tracker_failure(run, metrics))
    with build_progress(run.console, plan.optimizer_steps, position.step) as progress:
        reporter = Reporter(
            slots=buffers.slots,
            policy=spec.health if run.first else Health(),
            watchdog=watchdog,
            metrics=metrics,
            exporter=exporter,
            run_log=run_log,
            progress=progress,
            position=position,
            also=run.tracking.log if run.tracking else lambda numbers: None,
            leave_device=run.options.in_pod,
        )
        session = RunHooks(run, folder, inputs, state, plan, reporter, run_log.flush)
        if resumed_from is not None:
            reporter.checkpointed(resumed_from, folder)
        elif spec.health.policy == "Rollback":
            session.checkpoint(position)  # so that a fault in the first steps can be rolled back
        parts = _parts(session)
        with flush_on_error(run_log):
            position = train(
                parts,
                run.process_group.adopt(position, buffers, parts.sums),
                stop=lambda: run.stop.requested,
                checkpoint=session.checkpoint,
                checkpoint_every=spec.checkpoint.every_steps,
                roll_back=session.roll_back,
                after_step=session.draw_if_due,
            )
        if position.step < plan.optimizer_steps:
            session.checkpoint(position)
    _leave_if_asked(run, position.step, plan.optimizer_steps)
    if isinstance(run_log, NoLog):
        return _wait_for_rank0(run, position.step, plan.optimizer_steps), []
    reporter.phase("Exporting")
    with buffers.using_weights(state.result):
        artifacts = export_adapter(folder, inputs, buffers.by_factor(state.result), run.warn)
        draw(run, folder, inputs, position.step)
    _leave_if_asked(run, position.step, plan.optimizer_steps)
    log = run_log.finish()
    if log.exists():  # a crash may have damaged all of it
        artifacts.append(artifact_of(folder, log))
    folder.write_manifest("Done", artifacts=artifacts)
    logger.info("\n" + summary_text(_summary(session, position.step, exporter.report, log)))
    with suppress(PeerLostError):  # everything is written: a lost rank no longer matters
        run.process_group.broadcast_object(None)
    upload_adapter(run, folder, artifacts)
    return f"{position.step} steps done; numerical health: {reporter.watch.verdict}", artifacts


def _tracker_failure(run: Run, metrics: TrainerMetrics) -> Callable[[str], None]:
    """Build the callback for a failed tracker: warn and count it."""

    def on_failure(sentence: str) -> None:
        run.warn(sentence)
        metrics.tracker_failed()

    return on_failure


def _made_of(inputs: TrainingInputs) -> RunRecord:
    """Record the inputs, which a resumed run must find unchanged."""
    return RunRecord(
        dataset_sha256=inputs.dataset.digest(),
        dataset_images=len(inputs.dataset),
        model_sha256=inputs.base.fingerprint,
    )


def _parts(session: RunHooks) -> Parts:
    """Collect the components of the training loop."""
    run, state, objective = session.run, session.state, session.inputs.objective
    audit, replay = state.build_audit(run, session.folder, session.inputs)
    return Parts(
        training=run.job.spec.training,
        plan=session.plan,
        objective=state.categories.watching(objective, objective.order),
        buffers=state.buffers,
        optimizer=state.optimizer,
        telemetry=state.telemetry,
        reporter=session.reporter,
        watchdog=session.reporter.watchdog,
        average=state.average,
        categories=state.categories,
        scaler=state.scaler,
        process_group=run.process_group,
        dump=state.build_dump(run, session.folder),
        audit=audit,
        replay=replay,
    )


def _summary(session: RunHooks, step: int, report: RunReport, log: Path) -> RunSummary:
    run, spec, folder = session.run, session.run.job.spec, session.folder
    return RunSummary(
        name=run.job.metadata.name,
        steps=step,
        seconds=time.monotonic() - run.begun,
        loss=report.loss,
        health=session.reporter.watch.status(),
        norm_range=session.reporter.norm_range,
        adapter_size=report.adapter_size,
        adapter=folder.place(OutputPath.DIFFUSERS_WEIGHTS),
        samples=folder.place(OutputPath.SAMPLES) if spec.validation.prompts else None,
        log=log,
        model=session.inputs.base.folder,
        prompt=spec.validation.prompts[0] if spec.validation.prompts else "a photo",
        edge=spec.dataset.resolution,
    )


def _wait_for_rank0(run: Run, step: int, total: int) -> str:
    """Wait until rank 0 has exported, so that no pod completes before the run does."""
    try:
        run.process_group.broadcast_object(None)
    except PeerLostError:
        _leave_if_asked(run, step, total)
        raise
    return f"{step} steps done; rank 0 exported the adapter"


def _how_to_continue(run: Run) -> str:
    """Explain how to continue after a suspension; in a cluster the operator does."""
    if run.options.in_pod:
        return ""
    again = run.options.resume_command
    return (
        f". To accept the finding and continue: {again}; to ignore further findings, add "
        "--set spec.health.policy=Warn"
    )


def _leave_if_asked(run: Run, step: int, total: int) -> None:
    """End after SIGTERM or Ctrl-C, with advice on how to resume from the checkpoint."""
    if run.stop.requested or step < total:  # the stop may have reached another rank
        how = (
            "the next attempt resumes from it"
            if run.options.in_pod
            else f"to resume: {run.options.resume_command}{_how_to_export(run)}"
        )
        raise InterruptedRunError(
            f"stopped by {run.stop.name} at step {step} of {total}; a checkpoint is saved, {how}"
        )


def _how_to_export(run: Run) -> str:
    """Return how to use what is trained so far; it needs a checkpoint, which a stop saves."""
    if run.folder is None:
        return ""
    return f"; to try the adapter as it is: kubelora export {shlex.quote(str(run.folder.path))}"
