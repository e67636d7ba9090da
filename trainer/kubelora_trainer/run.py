"""One run from its job to its last word: claim the output, train, export, report.

`train.py` is the training itself; this is what surrounds it, in order, and what makes sure that
every way to end leaves a manifest, a report and a sentence.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from rich.console import Console

from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import METRICS_PORT, ExitCode, OutputPath
from kubelora_api.report import RunReport
from kubelora_api.spec import Health
from kubelora_api.status import Artifact, Finding
from kubelora_trainer.adapter import AdapterModule, trained_layers
from kubelora_trainer.baseline import hold_against
from kubelora_trainer.buffers import AdapterBuffers
from kubelora_trainer.category_losses import CategoryLosses
from kubelora_trainer.checkpoint import RunPosition, save_checkpoint
from kubelora_trainer.checkpoint_folders import SavedCheckpoint
from kubelora_trainer.checkpoint_part import CheckpointPart
from kubelora_trainer.compilation import compile_checked
from kubelora_trainer.counting import counting
from kubelora_trainer.ending import conclude
from kubelora_trainer.errors import (
    ConfigurationError,
    HeldByPolicy,
    Interrupted,
    PeerLost,
    RunEnded,
)
from kubelora_trainer.export import DTYPES as EXPORT_DTYPES
from kubelora_trainer.export import Title, dtype_that_holds, export_diffusers, export_kohya
from kubelora_trainer.export_gate import verify_export
from kubelora_trainer.export_gate_text import verify_text_encoders
from kubelora_trainer.exporter import Board, Exporter, TrainerMetrics
from kubelora_trainer.gradient_dump import GradientDump
from kubelora_trainer.health import HINDSIGHT_STEPS, last_healthy_step
from kubelora_trainer.judging import facts_of
from kubelora_trainer.learning_rates import rate_scales
from kubelora_trainer.loss_scaler import LossScaler
from kubelora_trainer.material import Material, open_material
from kubelora_trainer.moving_average import open_average
from kubelora_trainer.optimizer import AdapterOptimizer
from kubelora_trainer.optimizer_choice import open_optimizer, rate_warning
from kubelora_trainer.order import plan_of
from kubelora_trainer.output import (
    Manifest,
    OutputFolder,
    artifact_of,
)
from kubelora_trainer.places import resolve_output
from kubelora_trainer.precision import describe_memory, lossy_warnings, plan_precision
from kubelora_trainer.progress import open_progress
from kubelora_trainer.push import push
from kubelora_trainer.reporting import Reporter
from kubelora_trainer.rollback import go_back
from kubelora_trainer.run_context import Run, RunOptions
from kubelora_trainer.run_log import NoLog, RunLog
from kubelora_trainer.samples import draw_samples
from kubelora_trainer.schedule import steps_that_moved
from kubelora_trainer.startup_contract import FirstGradients, check_dtypes, check_fresh_adapter
from kubelora_trainer.stop_request import StopRequest
from kubelora_trainer.summary import RunSummary, summary_text
from kubelora_trainer.telemetry import GradientTelemetry
from kubelora_trainer.together import claim_together, compare, meet, resume_together
from kubelora_trainer.trackers import open_tracking
from kubelora_trainer.train import Parts, train


def run_job(job: LoraTrainingJob, options: RunOptions, stop: StopRequest, console: Console) -> None:
    """Run ``job`` to its end. Raises RunEnded, after everything has been recorded and reported."""
    run = Run(job, options, stop, console)
    try:
        run.gang = meet(run)
        message, artifacts = _run(run)
    except HeldByPolicy as held:
        ended = HeldByPolicy(f"{held}{_how_to_go_on(run)}")
        conclude(run, ended.exit_code, str(ended), [])
        raise ended from held
    except RunEnded as ended:
        conclude(run, ended.exit_code, str(ended), run.exported)
        raise
    except Exception as error:
        conclude(run, ExitCode.INTERNAL, f"not foreseen: {error!r}", [])
        raise
    conclude(run, ExitCode.DONE, message, artifacts)


def _run(run: Run) -> tuple[str, list[Artifact]]:
    """Everything from the output folder to the exported adapter; returns the last sentence."""
    place = resolve_output(run.job.spec.output.uri, run.options.mounts)
    claimed = claim_together(run, place)
    if isinstance(claimed, Manifest):
        return _already_done(run, place, claimed)
    run.folder = claimed
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry, plan_precision(run.job.spec.precision))
    board: Exporter | Board = Board(_first_report(claimed))
    if run.options.seat.local_rank == 0:
        board = run.exporter = _serve(run, claimed, registry)
    material = open_material(
        run.job.spec,
        run.options.mounts,
        claimed,
        run.say,
        stop=lambda: run.stop.requested,
        at_once=run.stop.at_once,
        seat=run.options.seat,
    )
    try:
        material.objective.fill_cache(
            lambda: run.stop.requested, counting("cache: entries looked at", run.say)
        )
        run.gang.gathered(None)  # every rank's part of the cache is there
        return _train_and_export(run, claimed, metrics, board, material)
    finally:
        material.objective.close()
        if run.tracking:
            run.tracking.finish()


def _already_done(run: Run, place: Path, manifest: Manifest) -> tuple[str, list[Artifact]]:
    """Nothing is trained; what an earlier attempt could not push is pushed."""
    name = run.job.metadata.name
    if not run.first or run.job.spec.output.push in (None, manifest.record.pushed):
        run.say(f"{name}: already done, see {place}; nothing to do")
    else:
        run.say(f"{name}: already done, see {place}")
        attempt = max(manifest.attempt, run.options.attempt or 0)
        run.folder = OutputFolder(place, run.job, manifest.run_id, attempt, manifest.record)
        _push(run, run.folder, manifest.artifacts)
    return "already done", manifest.artifacts


def _push(run: Run, folder: OutputFolder, artifacts: list[Artifact]) -> None:
    """Copy the finished adapter to where the job says, and note that it is there."""
    run.exported = artifacts
    if uri := run.job.spec.output.push:
        push(folder, uri)
        folder.record = folder.record.model_copy(update={"pushed": uri})
        folder.write_manifest("Done", artifacts=artifacts)
        run.say(f"pushed: the adapter is at {uri}")


def _train_and_export(
    run: Run,
    folder: OutputFolder,
    metrics: TrainerMetrics,
    exporter: Exporter | Board,
    material: Material,
) -> tuple[str, list[Artifact]]:
    spec, name = run.job.spec, run.job.metadata.name
    precision = plan_precision(spec.precision)
    dataset = material.dataset
    categories = CategoryLosses([s.category for s in dataset.samples], material.base.device)
    tail = run.gang.tail_elements(categories.sums.numel())
    buffers = AdapterBuffers(material.factors, precision, tail)
    if spec.training.compile:
        compile_checked(material.objective, buffers, run.say, run.warn)
    scales = rate_scales(buffers.slots, spec.training)
    optimizer = open_optimizer(buffers, spec.training.optimizer, scales)
    average = open_average(buffers, spec.training.ema)
    plan = plan_of(spec.training, material.objective.order)
    scaler = LossScaler(buffers.masters.device) if precision.scales_loss else None
    telemetry = GradientTelemetry(buffers, optimizer, scales, scaler.scale if scaler else None)
    saved_parts: dict[str, CheckpointPart] = {
        "optimizer": optimizer,
        "categories": categories,
        "telemetry": telemetry,
    }
    if average:
        saved_parts["average"] = average
    if scaler:
        saved_parts["loss_scaler"] = scaler
    results = average.weights if average else buffers.masters
    position, resumed_from = _begin(run, folder, buffers, optimizer, saved_parts)
    compare(run.gang, material, buffers, position)
    baseline = hold_against(run, folder, dataset, plan.optimizer_steps)
    metrics.plan_steps(position.step, plan.optimizer_steps)
    exporter.report = exporter.report.model_copy(
        update={"phase": "Training", "step": position.step, "total_steps": plan.optimizer_steps}
    )
    run_log = RunLog(folder, buffers.slots, position.step) if run.first else NoLog()
    if run.first:
        run.tracking = open_tracking(folder, position.step, run.warn)
    with open_progress(run.console, plan.optimizer_steps, position.step) as progress:
        reporter = Reporter(
            slots=buffers.slots,
            policy=spec.health if run.first else Health(),
            facts=facts_of(spec.training, buffers, plan.optimizer_steps),
            baseline=baseline,
            metrics=metrics,
            exporter=exporter,
            run_log=run_log,
            progress=progress,
            first_gradients=FirstGradients(
                buffers.slots,
                steps_that_moved(
                    spec.training, position.step, int(scaler.skipped) if scaler else 0
                ),
            ),
            position=position,
            elsewhere=material.objective.findings,
            also=run.tracking.log if run.tracking else lambda numbers: None,
        )
        parts = Parts(
            training=spec.training,
            plan=plan,
            objective=categories.watching(material.objective, material.objective.order),
            buffers=buffers,
            optimizer=optimizer,
            telemetry=telemetry,
            reporter=reporter,
            average=average,
            categories=categories,
            scaler=scaler,
            gang=run.gang,
            dump=_open_dump(run, folder, buffers, scaler),
        )

        def checkpoint(reached: RunPosition) -> None:
            if not run.first:
                return
            run_log.flush()
            saved = save_checkpoint(
                folder,
                buffers,
                saved_parts,
                reporter.position(reached),
                reached.micro_step - plan.window(reached.step).start,
                spec.checkpoint.keep,
                HINDSIGHT_STEPS if spec.health.policy == "Rollback" else None,
            )
            reporter.checkpointed(saved, folder)
            run.stop.saved(reached.step)

        def roll_back(reached: RunPosition, finding: Finding) -> RunPosition:
            earlier = go_back(
                folder,
                buffers,
                saved_parts,
                reached,
                finding,
                last_healthy_step(finding),
                run.warn,
            )
            skipped = int(scaler.skipped) if scaler else 0
            reporter.rewind(earlier, steps_that_moved(spec.training, earlier.step, skipped))
            checkpoint(earlier)
            folder.record = folder.record.model_copy(update={"rollback": earlier.rollback})
            folder.write_manifest("Running")
            if run.gang.share.size > 1:  # the other ranks can't be called back from their window
                raise Interrupted(
                    f"training went back to step {earlier.step}; all ranks go on from there when "
                    "they start again"
                )
            return earlier

        if resumed_from is not None:
            reporter.checkpointed(resumed_from, folder)
        elif spec.health.policy == "Rollback":
            checkpoint(position)  # what a fault in the first steps can go back to

        def samples(reached: RunPosition) -> None:
            every = spec.validation.every_steps
            due = every and reached.step % every == 0 and reached.step < plan.optimizer_steps
            if due and run.first:
                with buffers.showing(results):
                    _draw(run, folder, material, reached.step)

        position = train(
            parts,
            run.gang.adopt(position, buffers, parts.sums),
            stop=lambda: run.stop.requested,
            checkpoint=checkpoint,
            checkpoint_every=spec.checkpoint.every_steps,
            roll_back=roll_back,
            after_step=samples,
        )
        if position.step < plan.optimizer_steps:
            checkpoint(position)
    _leave_if_asked(run, position.step, plan.optimizer_steps)
    if isinstance(run_log, NoLog):
        return _wait_for_first(run, position.step, plan.optimizer_steps), []
    reporter.phase("Exporting")
    with buffers.showing(results):
        artifacts = _export(folder, material, buffers.by_factor(results), run.warn)
        _draw(run, folder, material, position.step)
    _leave_if_asked(run, position.step, plan.optimizer_steps)
    log = run_log.finish()
    artifacts.append(artifact_of(folder, log))
    folder.write_manifest("Done", artifacts=artifacts)
    summary = RunSummary(
        name=name,
        steps=position.step,
        seconds=time.monotonic() - run.begun,
        loss=exporter.report.loss,
        health=reporter.watch.status(),
        norm_range=reporter.norm_range,
        adapter=folder.place(OutputPath.DIFFUSERS_WEIGHTS),
        samples=folder.place(OutputPath.SAMPLES) if spec.validation.prompts else None,
        log=log,
        model=material.base.folder,
        prompt=spec.validation.prompts[0] if spec.validation.prompts else "a photo",
        edge=spec.dataset.resolution,
    )
    run.say("\n" + summary_text(summary))
    with suppress(PeerLost):  # whoever is gone now is not missed: all is written
        run.gang.told_by_first(None)
    _push(run, folder, artifacts)
    return f"{position.step} steps done; numerical health: {reporter.watch.verdict}", artifacts


def _wait_for_first(run: Run, step: int, total: int) -> str:
    """The others end when rank 0 has exported, so that no pod is done before the run is."""
    try:
        run.gang.told_by_first(None)
    except PeerLost:
        _leave_if_asked(run, step, total)
        raise
    return f"{step} steps done with rank 0, which exported the adapter"


def _open_dump(
    run: Run, folder: OutputFolder, buffers: AdapterBuffers, scaler: LossScaler | None
) -> GradientDump | None:
    """What writes raw gradients down, where the job asks for some."""
    wanted = run.job.spec.health.dump_gradients
    if wanted is None:
        return None
    scale = scaler.scale if scaler else None
    return GradientDump(
        folder,
        wanted,
        buffers.slots,
        buffers.plan.compute,
        run.warn,
        scale,
        run.gang.share.size,
    )


def _begin(
    run: Run,
    folder: OutputFolder,
    buffers: AdapterBuffers,
    optimizer: AdapterOptimizer,
    saved_parts: Mapping[str, CheckpointPart],
) -> tuple[RunPosition, SavedCheckpoint | None]:
    """Resume or start afresh; check and print the start-up contract."""
    resumed = resume_together(run, folder, buffers, saved_parts)
    beside = {"optimizer state": optimizer.state_bytes}
    if "average" in saved_parts:
        beside["average"] = 4 * buffers.numel
    run.say(f"contract: {check_dtypes(buffers, optimizer)}")
    run.say(f"memory of the adapter: {describe_memory(buffers.plan, buffers.numel, beside)}")
    doubtful = rate_warning(run.job.spec.training)
    for sentence in [*lossy_warnings(buffers.plan), *([doubtful] if doubtful else [])]:
        run.warn(sentence)
    if resumed is None:
        if not run.job.spec.adapter.from_:
            check_fresh_adapter(buffers)
            run.say("contract: a fresh adapter, |B·A| = 0")
        no_loss = torch.zeros((), dtype=torch.float64, device=buffers.masters.device)
        return RunPosition(window_loss=no_loss), None
    position, saved = resumed
    run.stop.saved(position.step)
    run.say(f"resuming from {saved.path} at step {position.step}")
    folder.record = folder.record.model_copy(update={"rollback": position.rollback})
    return position, saved


def _first_report(folder: OutputFolder) -> RunReport:
    return RunReport(run_id=folder.run_id, attempt=folder.attempt, phase="Starting")


def _serve(run: Run, folder: OutputFolder, registry: CollectorRegistry) -> Exporter:
    """Begin to serve metrics; in a pod on the contract's port alone."""
    options = run.options
    port = options.metrics_port
    if port is None:
        port = METRICS_PORT if options.in_pod else 0
    try:
        exporter = Exporter(
            registry,
            _first_report(folder),
            port,
            any_port=not options.in_pod,
            everywhere=options.in_pod,
        )
    except OSError as error:
        raise ConfigurationError(
            f"the metrics port {port} can't be opened ({error.strerror}); another process of "
            "this pod holds it"
        ) from error
    if port not in (0, exporter.port):
        run.warn(f"port {port} is taken, so metrics are on port {exporter.port}")
    run.say(f"metrics: http://localhost:{exporter.port}/metrics")
    return exporter


def _export(
    folder: OutputFolder,
    material: Material,
    weights: Mapping[str, torch.Tensor],
    warn: Callable[[str], None],
) -> list[Artifact]:
    """Write the adapter from ``weights`` (by factor), load it as a user would, and compare."""
    folder.assert_ours()
    spec, base = folder.job.spec, material.base
    layers = trained_layers(material.modules, _pairs_of(material.modules, weights))
    wanted = EXPORT_DTYPES[spec.output.dtype]
    dtype = dtype_that_holds(layers, wanted)
    if dtype != wanted:
        warn(
            "fp16 is too narrow for this adapter's weights, so its files are in fp32; "
            "output.dtype bf16 would hold them in half the size"
        )
    title = Title(
        folder.job.metadata.name,
        spec.dataset.resolution,
        base.noise_scheduler.config.prediction_type,
    )
    encoders = material.trained_encoders
    exported = [
        export_diffusers(base.unet, layers, folder.path, dtype=dtype, encoders=encoders),
        export_kohya(base.unet.config, layers, folder.path, title, dtype=dtype),
    ]
    verify_export(
        base.folder,
        [file.path for file in exported],
        base.unet,
        layers,
        variant=spec.model.variant,
        dtype=dtype,
    )
    verify_text_encoders(
        base.folder,
        [file.path for file in exported],
        encoders,
        layers,
        unet_config=base.unet.config,
        variant=spec.model.variant,
        dtype=dtype,
    )
    return [artifact_of(folder, file.path) for file in exported]


def _pairs_of(
    modules: tuple[AdapterModule, ...], weights: Mapping[str, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(lora_A, lora_B) of each module, in the modules' order."""
    return [(weights[f"{m.full_name}.lora_A"], weights[f"{m.full_name}.lora_B"]) for m in modules]


def _draw(run: Run, folder: OutputFolder, material: Material, step: int) -> None:
    spec = run.job.spec
    if spec.validation.prompts:
        folder.assert_ours()
        paths = draw_samples(
            material.base,
            material.base.unet,
            spec.validation,
            folder.place(OutputPath.SAMPLES),
            step,
            resolution=spec.dataset.resolution,
            stop=lambda: run.stop.requested,
        )
        if run.tracking:
            run.tracking.log_samples(paths, step)


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
