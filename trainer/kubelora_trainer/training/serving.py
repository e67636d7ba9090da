"""The run's metrics and status, served for Prometheus, the operator and a curious person."""

from prometheus_client import CollectorRegistry

from kubelora_api.names import METRICS_PORT
from kubelora_api.report import RunReport
from kubelora_trainer.reporting.prometheus import Exporter
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.training.context import Run
from kubelora_trainer.utils.errors import ConfigurationError


def first_report(folder: OutputFolder) -> RunReport:
    """What is told before anything is known."""
    return RunReport(run_id=folder.run_id, attempt=folder.attempt, phase="Starting")


def serve(run: Run, folder: OutputFolder, registry: CollectorRegistry) -> Exporter:
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
