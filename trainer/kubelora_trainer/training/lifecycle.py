"""Lifecycle of a run: serve metrics at its start, record and report its end.

Every way to end passes through `conclude`, including unexpected ones. Nothing here may hide the
original error.
"""

import hashlib
import logging
from contextlib import suppress
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from kubelora_api.names import METRICS_PORT, ExitCode, OutputPath
from kubelora_api.report import FinalReport, RunPhase, RunReport
from kubelora_api.status import Artifact
from kubelora_trainer.reporting.http_server import Exporter
from kubelora_trainer.storage.output_dir import OutputFolder, RunState, run_id_of
from kubelora_trainer.training.context import Run
from kubelora_trainer.utils.device_faults import (
    Fault,
    device_sentence,
    fault_in,
    memory_sentence,
)
from kubelora_trainer.utils.errors import (
    ConfigurationError,
    DeviceError,
    OutOfMemoryError,
    OutputError,
    RunEndedError,
)

logger = logging.getLogger(__name__)


def first_report(folder: OutputFolder) -> RunReport:
    """Build the status report of a run that has just started."""
    return RunReport(run_id=folder.run_id, attempt=folder.attempt, phase="Starting")


def serve_metrics(run: Run, folder: OutputFolder, registry: CollectorRegistry) -> Exporter:
    """Start the metrics server; in a pod only on the documented port.

    Args:
        run: The run.
        folder: The output directory.
        registry: Registry of the metrics.

    Raises:
        ConfigurationError: The port is taken, in a pod.
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
            "this pod uses it"
        ) from error
    if port not in (0, exporter.port):
        run.warn(f"port {port} is taken, so metrics are on port {exporter.port}")
    logger.info(f"metrics: http://localhost:{exporter.port}/metrics")
    return exporter


def conclude(run: Run, code: ExitCode, message: str, artifacts: list[Artifact]) -> None:
    """Record and report how the run ended, and let Prometheus scrape the final values.

    Args:
        run: The run.
        code: Exit code.
        message: Message for the user.
        artifacts: Files of a finished run.
    """
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
                "useful_seconds": report.useful_seconds,
                "health": report.health,
                "checkpoint": report.checkpoint,
            }
        )
    if run.options.termination_log is not None:
        _write_termination_message(run, run.options.termination_log, final)
    if run.exporter is not None:
        _wait_for_last_scrape(run, run.exporter, code)


def device_error(run: Run, error: BaseException) -> RunEndedError | None:
    """Return how the run ends if memory or the device caused ``error``; None for other causes."""
    found = fault_in(error)
    if found is None:
        return None
    fault, cause = found
    if fault is Fault.DEVICE:
        return DeviceError(
            device_sentence(cause, run.device_label, run.options.in_pod, run.options.resume_command)
        )
    report = run.exporter.report if run.exporter else None
    phase = report.phase if report else "Starting"
    when = f"after step {report.step}" if report and phase == "Training" else _WHILE[phase]
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
    return OutOfMemoryError(memory_sentence(fault, cause, run.job.spec, when, peak))


_WHILE: dict[RunPhase, str] = {
    "Starting": "while the model was loaded or the caches were filled",
    "Exporting": "during export and the last samples",
    "Stopping": "while the run was stopping",
    "Done": "after the run was done",
    "Failed": "while the run was ending",
}


def _wait_for_last_scrape(run: Run, exporter: Exporter, code: ExitCode) -> None:
    phases: dict[ExitCode, RunPhase] = {
        ExitCode.DONE: "Done",
        ExitCode.INTERRUPTED: "Stopping",
        ExitCode.HELD: "Stopping",
    }
    exporter.report = exporter.report.model_copy(update={"phase": phases.get(code, "Failed")})
    # Other processes may need the memory while this one waits. After a fault of the device any call
    # to it raises, which would hide the fault.
    if torch.cuda.is_initialized() and code != ExitCode.DEVICE:
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    if exporter.last_scrape_budget() > 0 and not run.stop.requested:
        logger.info("waiting for Prometheus to scrape the final values")
        exporter.wait_for_scrape(lambda: run.stop.requested)
    exporter.close()


def _record(run: Run, code: ExitCode, message: str) -> str | None:
    """Write the manifest's state, unless it is Done, which was written with the artifacts.

    A finished run stays Done, even if its upload failed afterwards.
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
    except OutputError:  # taken over, or the disk is full: report the original error
        return None


def _digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _write_termination_message(run: Run, path: Path, final: FinalReport) -> None:
    try:
        path.write_bytes(final.to_termination_message())
    except OSError as error:
        run.warn(f"the final report could not be written to {path}: {error.strerror}")
