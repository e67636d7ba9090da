"""`kubelora-operator`: the command line of the operator's container.

Options and their environment variables are the interface used by the chart. Heavy imports come
after the options are parsed, so `--help` is fast and needs no cluster.
"""

import secrets
import socket
import sys
from pathlib import Path
from typing import TypeVar

import click
from pydantic import BaseModel, ValidationError

from kubelora_operator.admission.policy import PodPolicy
from kubelora_operator.attempt.network_policy import NetworkSettings
from kubelora_operator.manager.options import Options

_Model = TypeVar("_Model", bound=BaseModel)
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kubelora", prog_name="kubelora-operator")
def operator_cli() -> None:
    """Run LoraTrainingJobs as training pods and report their progress.

    \b
    Examples:
      kubelora-operator run --all-namespaces --trainer-image registry.example/kubelora-trainer:0.1.0
      kubelora-operator run -n studio -n lab --trainer-image trainer:dev --log-format plain
    """


@operator_cli.command()
@click.option(
    "--namespace",
    "-n",
    "namespaces",
    multiple=True,
    envvar="KUBELORA_NAMESPACES",
    metavar="NAME",
    help="Watch this namespace; may be repeated (in the variable: separated by spaces).",
)
@click.option(
    "--all-namespaces",
    "-A",
    is_flag=True,
    envvar="KUBELORA_ALL_NAMESPACES",
    help="Watch all namespaces. Default if no namespace is given.",
)
@click.option(
    "--trainer-image",
    required=True,
    envvar="KUBELORA_TRAINER_IMAGE",
    metavar="IMAGE",
    help="Image of training pods whose job does not set one.",
)
@click.option(
    "--lease-namespace",
    envvar="KUBELORA_LEASE_NAMESPACE",
    metavar="NAME",
    help="Namespace of the leader election Lease. Default: the pod's own, else 'default'.",
)
@click.option(
    "--lease-name",
    default="kubelora-operator",
    show_default=True,
    envvar="KUBELORA_LEASE_NAME",
    metavar="NAME",
)
@click.option(
    "--identity",
    envvar="KUBELORA_IDENTITY",
    metavar="NAME",
    help="Identity in the Lease, unique per replica. Default: the host name and six hex digits.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    envvar="KUBELORA_METRICS_PORT",
    help="Port of /metrics, /healthz and /readyz; 0 for any free port.",
)
@click.option(
    "--poll-seconds",
    type=click.FloatRange(1, 3600),
    default=10,
    show_default=True,
    envvar="KUBELORA_POLL_SECONDS",
    help="Seconds between two reads of a running pod's progress; more with over 200 running jobs.",
)
@click.option(
    "--progress-seconds",
    type=click.FloatRange(1, 3600),
    default=30,
    show_default=True,
    envvar="KUBELORA_PROGRESS_SECONDS",
    help="Seconds between two writes of a job's progress; more with over 600 running jobs.",
)
@click.option(
    "--resync-seconds",
    type=click.FloatRange(5, 86400),
    default=60,
    show_default=True,
    envvar="KUBELORA_RESYNC_SECONDS",
    help="Seconds between two full lists, which find changes that a watch missed.",
)
@click.option(
    "--pod-policy",
    default="{}",
    envvar="KUBELORA_POD_POLICY",
    metavar="JSON",
    help="What jobs may ask for in their podTemplate: the chart's value podPolicy. Default: its "
    "defaults.",
)
@click.option(
    "--network-policy",
    envvar="KUBELORA_NETWORK_POLICY",
    metavar="JSON",
    help="Create a NetworkPolicy for each attempt: the chart's value networkPolicy, and the peer "
    "'operator' that selects the operator's own pods. Default: none is created.",
)
@click.option(
    "--log-format",
    type=click.Choice(["json", "plain"]),
    default="json",
    show_default=True,
    envvar="KUBELORA_LOG_FORMAT",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    envvar="KUBELORA_LOG_LEVEL",
)
def run(
    namespaces: tuple[str, ...],
    all_namespaces: bool,
    trainer_image: str,
    lease_namespace: str | None,
    lease_name: str,
    identity: str | None,
    metrics_port: int,
    poll_seconds: float,
    progress_seconds: float,
    resync_seconds: float,
    pod_policy: str,
    network_policy: str | None,
    log_format: str,
    log_level: str,
) -> None:
    """Watch LoraTrainingJobs and run them until SIGTERM.

    Connects with the pod's service account, else with KUBECONFIG. Several replicas may run: the
    one that holds the Lease is the leader, the others are on standby.

    \b
    Examples:
      kubelora-operator run -A --trainer-image registry.example/kubelora-trainer:0.1.0
      KUBECONFIG=./kubeconfig kubelora-operator run -n studio --trainer-image trainer:dev \\
          --log-format plain --poll-seconds 2
    """
    if all_namespaces and namespaces:
        raise click.UsageError("use either --all-namespaces or --namespace, not both")
    from kubelora_operator.manager.imports import without_synchronous_client

    with without_synchronous_client():
        from kubelora_operator.manager import manager
    from kubelora_operator.observability import logging

    logging.configure(log_format, log_level)
    sys.exit(
        manager.run_manager(
            Options(
                namespaces=namespaces,
                trainer_image=trainer_image,
                lease_namespace=lease_namespace or _own_namespace(),
                lease_name=lease_name,
                identity=identity or f"{socket.gethostname()}_{secrets.token_hex(3)}",
                port=metrics_port,
                poll_seconds=poll_seconds,
                progress_seconds=progress_seconds,
                resync_seconds=resync_seconds,
                pod_policy=_parse("--pod-policy", PodPolicy, pod_policy),
                network=_parse("--network-policy", NetworkSettings, network_policy)
                if network_policy
                else None,
            )
        )
    )


def _parse(option: str, model: type[_Model], text: str) -> _Model:
    """Parse an option's JSON.

    Args:
        option: Name of the option.
        model: Its type.
        text: Its value.

    Raises:
        click.UsageError: The value is wrong; the message names the field.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(map(str, first["loc"])) or "the JSON"
        raise click.UsageError(f"{option}: {path}: {first['msg']}") from None


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip() or "default"
    except OSError:
        return "default"


if __name__ == "__main__":
    operator_cli()
