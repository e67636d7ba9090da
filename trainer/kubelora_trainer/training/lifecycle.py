"""The lifecycle of a run: metrics are served at its start, its end is recorded and reported.

Every way to end passes through `conclude`, unforeseen ones included; nothing here may hide the
first error.
"""

import hashlib
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from kubelora_api.names import METRICS_PORT, ExitCode, OutputPath
from kubelora_api.report import FinalReport, RunPhase, RunReport
from kubelora_api.status import Artifact
from kubelora_trainer.reporting.prometheus import Exporter
from kubelora_trainer.storage.output_dir import OutputFolder, RunState, run_id_of
from kubelora_trainer.training.context import Run
from kubelora_trainer.utils.errors import ConfigurationError, OutputError


def first_report(folder: OutputFolder) -> RunReport:
    """What is told before anything is known."""
    return RunReport(run_id=folder.run_id, attempt=folder.attempt, phase="Starting")


def serve_metrics(run: Run, folder: OutputFolder, registry: CollectorRegistry) -> Exporter:
    """Begin to serve metrics; in a pod on the contract's port alone.

    Raises ConfigurationError where that port is taken.
    """
    options = run.options
    port = options.metrics_port
    if port is None:
        port = METRICS_PORT if options.in_pod else 0
    try:
        exporter = Exporter(
            registry,
            first_report(folder),
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


def conclude(run: Run, code: ExitCode, message: str, artifacts: list[Artifact]) -> None:
    """Record how the run ended, tell it, and let Prometheus see the last numbers."""
    manifest_sha256 = _record(run, code, message)
    report = run.exporter.report if run.exporter else None
    final = FinalReport(
        run_id=run.folder.run_id if run.folder else run_id_of(run.job),
        attempt=run.folder.attempt if run.folder else run.options.attempt or 0,
        exit_code=code,
        message=message,
        artifacts=artifacts,
        manifest_sha256=manifest_sha256,
    )
    if report is not None:
        final = final.model_copy(
            update={
                "step": report.step,
                "total_steps": report.total_steps,
                "loss": report.loss,
                "health": report.health,
                "checkpoint": report.checkpoint,
            }
        )
    if run.options.termination_log is not None:
        _write_termination_message(run, run.options.termination_log, final)
    if run.exporter is not None:
        _let_prometheus_look(run, run.exporter, code)


def _let_prometheus_look(run: Run, exporter: Exporter, code: ExitCode) -> None:
    phases: dict[ExitCode, RunPhase] = {
        ExitCode.DONE: "Done",
        ExitCode.INTERRUPTED: "Stopping",
        ExitCode.HELD: "Stopping",
    }
    exporter.report = exporter.report.model_copy(update={"phase": phases.get(code, "Failed")})
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if exporter.last_scrape_budget() > 0 and not run.stop.requested:
        run.say("waiting for Prometheus to scrape the last numbers")
        exporter.wait_for_scrape(lambda: run.stop.requested)
    exporter.close()


def _record(run: Run, code: ExitCode, message: str) -> str | None:
    """The manifest's state for every ending but Done, which is written with its artifacts.

    What is Done stays so, also when a push failed after it.
    """
    if run.folder is None or not run.first:
        return None
    states: dict[ExitCode, RunState] = {
        ExitCode.INTERRUPTED: "Interrupted",
        ExitCode.HELD: "Suspended",
    }
    if code == ExitCode.DONE or run.exported:
        return _digest(run.folder.place(OutputPath.MANIFEST))
    try:
        return run.folder.write_manifest(states.get(code, "Failed"), message)
    except OutputError:  # taken over, or the disk is full: the first sentence counts
        return None


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _write_termination_message(run: Run, path: Path, final: FinalReport) -> None:
    try:
        path.write_bytes(final.to_termination_message())
    except OSError as error:
        run.warn(f"the final report could not be written to {path}: {error.strerror}")
