"""One run from its job to its last word: claim the output, train, export, report.

`loop.py` is the training itself; this is what surrounds it, in order, and what makes sure that
every way to end leaves a manifest, a report and a sentence.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry
from rich.console import Console

from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import ExitCode, OutputPath
from kubelora_api.spec import Health
from kubelora_api.status import Artifact
from kubelora_trainer.health.baseline import compared_anew
from kubelora_trainer.health.quantities import facts_of
from kubelora_trainer.health.startup_checks import FirstGradients
from kubelora_trainer.optim.lr_schedule import steps_that_moved
from kubelora_trainer.optim.precision import plan_precision
from kubelora_trainer.reporting.metrics import TrainerMetrics
from kubelora_trainer.reporting.progress_bar import open_progress
from kubelora_trainer.reporting.prometheus import Board, Exporter
from kubelora_trainer.reporting.run_log import NoLog, RunLog, kept_to_the_end
from kubelora_trainer.reporting.summary import RunSummary, summary_text
from kubelora_trainer.reporting.trackers import open_tracking
from kubelora_trainer.storage.input_fingerprints import assert_same_inputs
from kubelora_trainer.storage.output_dir import Manifest, OutputFolder, artifact_of
from kubelora_trainer.storage.path_overlap import assert_apart
from kubelora_trainer.storage.run_length import assert_not_passed
from kubelora_trainer.storage.run_record import RunRecord
from kubelora_trainer.storage.uris import resolve_output
from kubelora_trainer.training.context import Run, RunOptions
from kubelora_trainer.training.hooks import Session
from kubelora_trainer.training.lifecycle import conclude, first_report, serve
from kubelora_trainer.training.loop import Parts, train
from kubelora_trainer.training.plan import plan_of
from kubelora_trainer.training.publish import draw, export_adapter, push_adapter
from kubelora_trainer.training.rank_sync import claim_together, compare, let_first_end, meet
from kubelora_trainer.training.setup import Material, open_material
from kubelora_trainer.training.start import begin, hold_against
from kubelora_trainer.training.step_reporter import Reporter
from kubelora_trainer.training.train_state import open_learner
from kubelora_trainer.utils.errors import HeldByPolicy, Interrupted, PeerLost, RunEnded
from kubelora_trainer.utils.progress_log import counting
from kubelora_trainer.utils.signals import StopRequest


def run_job(job: LoraTrainingJob, options: RunOptions, stop: StopRequest, console: Console) -> None:
    """Run ``job`` to its end. Raises RunEnded, after everything has been recorded and reported."""
    run = Run(job, options, stop, console)
    try:
        run.gang = meet(run)
        message, artifacts = _run(run)
    except HeldByPolicy as held:
        ended = HeldByPolicy(f"{held}{_how_to_go_on(run)}")
        ended.alike = held.alike
        let_first_end(run, ended)
        conclude(run, ended.exit_code, str(ended), [])
        raise ended from held
    except RunEnded as ended:
        let_first_end(run, ended)
        conclude(run, ended.exit_code, str(ended), run.exported)
        raise
    except Exception as error:
        conclude(run, ExitCode.INTERNAL, f"not foreseen: {error!r}", [])
        raise
    conclude(run, ExitCode.DONE, message, artifacts)


def _run(run: Run) -> tuple[str, list[Artifact]]:
    """Everything from the output folder to the exported adapter; returns the last sentence."""
    place = resolve_output(run.job.spec.output.uri, run.options.mounts)
    assert_apart(run.job.spec, run.options.mounts, place)
    claimed = claim_together(run, place)
    if isinstance(claimed, Manifest):
        return _already_done(run, place, claimed)
    run.folder = claimed
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry, plan_precision(run.job.spec.precision))
    board: Exporter | Board = Board(first_report(claimed))
    if run.options.seat.local_rank == 0:
        board = run.exporter = serve(run, claimed, registry)
    material = open_material(
        run.job.spec,
        run.options.mounts,
        claimed,
        run.say,
        stop=lambda: run.stop.requested,
        at_once=run.stop.at_once,
        seat=run.options.seat,
    )
    exit_code = ExitCode.INTERNAL
    try:
        material.objective.fill_cache(
            lambda: run.stop.requested, counting("cache: entries looked at", run.say)
        )
        run.gang.gathered(None)  # every rank's part of the cache is there
        done = _train_and_export(run, claimed, metrics, board, material)
        exit_code = ExitCode.DONE
        return done
    except RunEnded as ended:
        # What could not be pushed is trained and exported all the same.
        exit_code = ExitCode.DONE if run.exported else ended.exit_code
        raise
    finally:
        material.objective.close()
        if run.tracking:
            run.tracking.finish(exit_code)


def _already_done(run: Run, place: Path, manifest: Manifest) -> tuple[str, list[Artifact]]:
    """Nothing is trained; what an earlier attempt could not push is pushed."""
    name = run.job.metadata.name
    if not run.first or run.job.spec.output.push in (None, manifest.record.pushed):
        run.say(f"{name}: already done, see {place}; nothing to do")
    else:
        run.say(f"{name}: already done, see {place}")
        attempt = max(manifest.attempt, run.options.attempt or 0)
        run.folder = OutputFolder(place, run.job, manifest.run_id, attempt, manifest.record)
        push_adapter(run, run.folder, manifest.artifacts)
    return "already done", manifest.artifacts


def _train_and_export(
    run: Run,
    folder: OutputFolder,
    metrics: TrainerMetrics,
    exporter: Exporter | Board,
    material: Material,
) -> tuple[str, list[Artifact]]:
    spec = run.job.spec
    learner = open_learner(run, material)
    buffers = learner.buffers
    plan = plan_of(spec.training, material.objective.order)
    position, resumed_from = begin(run, folder, material, learner)
    assert_not_passed(position.step, plan.optimizer_steps)
    watch = compared_anew(position.watch, folder.record.total_steps, plan.optimizer_steps)
    position = replace(position, watch=watch)
    compare(run.gang, material, buffers, position)
    made_of = _made_of(material)
    if resumed_from is not None:
        assert_same_inputs(folder.record, made_of, spec.dataset.uri, spec.model.uri)
    baseline = hold_against(run, folder, made_of, plan.optimizer_steps)
    metrics.plan_steps(position.step, plan.optimizer_steps)
    exporter.report = exporter.report.model_copy(
        update={"phase": "Training", "step": position.step, "total_steps": plan.optimizer_steps}
    )
    run_log = RunLog(folder, buffers.slots, position.step, run.warn) if run.first else NoLog()
    if run.first:
        run.tracking = open_tracking(folder, position.step, _told_and_counted(run, metrics))
    with open_progress(run.console, plan.optimizer_steps, position.step) as progress:
        moved = steps_that_moved(spec.training, position.step, learner.skipped_steps)
        reporter = Reporter(
            slots=buffers.slots,
            policy=spec.health if run.first else Health(),
            facts=facts_of(spec.training, buffers, plan.optimizer_steps, spec.adapter.dropout),
            baseline=baseline,
            metrics=metrics,
            exporter=exporter,
            run_log=run_log,
            progress=progress,
            first_gradients=FirstGradients(buffers.slots, moved, buffers.plan.compute),
            position=position,
            elsewhere=material.objective.findings,
            also=run.tracking.log if run.tracking else lambda numbers: None,
        )
        session = Session(run, folder, material, learner, plan, reporter, run_log.flush)
        if resumed_from is not None:
            reporter.checkpointed(resumed_from, folder)
        elif spec.health.policy == "Rollback":
            session.checkpoint(position)  # what a fault in the first steps can go back to
        parts = _parts(session)
        with kept_to_the_end(run_log):
            position = train(
                parts,
                run.gang.adopt(position, buffers, parts.sums),
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
        return _wait_for_first(run, position.step, plan.optimizer_steps), []
    reporter.phase("Exporting")
    with buffers.showing(learner.result):
        artifacts = export_adapter(folder, material, buffers.by_factor(learner.result), run.warn)
        draw(run, folder, material, position.step)
    _leave_if_asked(run, position.step, plan.optimizer_steps)
    log = run_log.finish()
    if log.exists():  # not where a crash has damaged all of it
        artifacts.append(artifact_of(folder, log))
    folder.write_manifest("Done", artifacts=artifacts)
    run.say("\n" + summary_text(_summary(session, position.step, exporter.report.loss, log)))
    with suppress(PeerLost):  # whoever is gone now is not missed: all is written
        run.gang.told_by_first(None)
    push_adapter(run, folder, artifacts)
    return f"{position.step} steps done; numerical health: {reporter.watch.verdict}", artifacts


def _told_and_counted(run: Run, metrics: TrainerMetrics) -> Callable[[str], None]:
    """What a tracker that fails leads to."""

    def left_out(sentence: str) -> None:
        run.warn(sentence)
        metrics.tracker_failed()

    return left_out


def _made_of(material: Material) -> RunRecord:
    """The inputs, as a run that goes on must find them again."""
    return RunRecord(
        dataset_sha256=material.dataset.digest(),
        dataset_images=len(material.dataset),
        model_sha256=material.base.fingerprint,
    )


def _parts(session: Session) -> Parts:
    """What the training loop is handed."""
    run, learner, objective = session.run, session.learner, session.material.objective
    return Parts(
        training=run.job.spec.training,
        plan=session.plan,
        objective=learner.categories.watching(objective, objective.order),
        buffers=learner.buffers,
        optimizer=learner.optimizer,
        telemetry=learner.telemetry,
        reporter=session.reporter,
        average=learner.average,
        categories=learner.categories,
        scaler=learner.scaler,
        gang=run.gang,
        dump=learner.open_dump(run, session.folder),
    )


def _summary(session: Session, step: int, loss: float | None, log: Path) -> RunSummary:
    run, spec, folder = session.run, session.run.job.spec, session.folder
    return RunSummary(
        name=run.job.metadata.name,
        steps=step,
        seconds=time.monotonic() - run.begun,
        loss=loss,
        health=session.reporter.watch.status(),
        norm_range=session.reporter.norm_range,
        adapter=folder.place(OutputPath.DIFFUSERS_WEIGHTS),
        samples=folder.place(OutputPath.SAMPLES) if spec.validation.prompts else None,
        log=log,
        model=session.material.base.folder,
        prompt=spec.validation.prompts[0] if spec.validation.prompts else "a photo",
        edge=spec.dataset.resolution,
    )


def _wait_for_first(run: Run, step: int, total: int) -> str:
    """The others end when rank 0 has exported, so that no pod is done before the run is."""
    try:
        run.gang.told_by_first(None)
    except PeerLost:
        _leave_if_asked(run, step, total)
        raise
    return f"{step} steps done with rank 0, which exported the adapter"


def _how_to_go_on(run: Run) -> str:
    """After a suspension by the health policy; in a cluster the operator says it."""
    if run.options.in_pod:
        return ""
    again = run.options.resume_command
    return (
        f". To go on and accept what was found: {again}; to train on whatever is found, add "
        "--set spec.health.policy=Warn"
    )


def _leave_if_asked(run: Run, step: int, total: int) -> None:
    """After SIGTERM or Ctrl-C: the checkpoint is saved, so say how to go on."""
    if run.stop.requested or step < total:  # the stop may have reached another rank
        how = (
            "the next attempt goes on from there"
            if run.options.in_pod
            else f"to go on: {run.options.resume_command}"
        )
        raise Interrupted(
            f"stopped by {run.stop.name} at step {step} of {total}; a checkpoint is saved, {how}"
        )
