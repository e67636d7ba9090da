"""The harness's commands: `python -m tests.cluster.harness COMMAND`, from the repository's root."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable

from . import cluster, gobuild, images, teardown
from .errors import HarnessError
from .places import Places, default_places
from .tools import FAMILIES, HELM, PROMETHEUS


def _up(places: Places, _: argparse.Namespace) -> int:
    print(f"export KUBECONFIG={cluster.up(places)}")
    return 0


def _down(places: Places, arguments: argparse.Namespace) -> int:
    if arguments.force:
        teardown.down(places)
    else:
        cluster.down(places)
    return 0


def _status(places: Places, _: argparse.Namespace) -> int:
    print(cluster.describe(places))
    return 0 if cluster.is_healthy(places) else 1


def _tool(places: Places, arguments: argparse.Namespace) -> int:
    print(gobuild.tool(places, arguments.name))
    return 0


def _images(places: Places, _: argparse.Namespace) -> int:
    if images.uses_local_cluster(places):
        cluster.up(places)
    built = images.ensure(places)
    print(f"export KUBELORA_OPERATOR_IMAGE={built.operator}")
    print(f"export KUBELORA_TRAINER_IMAGE={built.trainer}")
    return 0


def _build(places: Places, _: argparse.Namespace) -> int:
    if os.geteuid() == 0 or os.environ.get("KUBECONFIG"):
        gobuild.ensure(places, FAMILIES)
        images.build(places)
    else:  # no cluster here, and none elsewhere: the chart's tests run all the same
        gobuild.ensure(places, (HELM, PROMETHEUS))
    return 0


def _check_clean(places: Places, _: argparse.Namespace) -> int:
    left = teardown.check_clean(places)
    print("\n".join(left) or "Nothing of a cluster is left on this machine.")
    return 1 if left else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cluster.harness",
        description="A real one-node Kubernetes on this machine, for tests and by hand.",
        epilog="Binaries are cached in $KUBELORA_CACHE (default ~/.cache/kubelora), the cluster's "
        "state is in $KUBELORA_STATE (default /var/lib/kubelora-cluster), and $KUBELORA_JOBS "
        "limits how many packages are compiled at a time.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, action: Callable[[Places, argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(action=action)
        return command

    add("up", _up, "start the cluster, repair it, or find it running; prints the KUBECONFIG")
    down = add("down", _down, "stop the cluster and remove every trace of it")
    down.add_argument("--force", action="store_true", help="even when a test run uses it")
    add("build", _build, "build the programs and images that tests need on this machine")
    add("status", _status, "one line a component; the exit status is 0 when all are healthy")
    add("check-clean", _check_clean, "list what a cluster left behind; exit status 0 when nothing")
    add("images", _images, "build the two images where stale and hand them to the cluster")
    tool = add("tool", _tool, "print a tool's path, building it first if it is missing")
    tool.add_argument("name", help="for example helm, promtool, kubectl or monitoring-crds")
    return parser


def _of_the_system(error: OSError) -> str:
    """A refusal by the system that no check foresaw, a disk that fills up on the way above all."""
    where = f" at {error.filename}" if error.filename else ""
    what = f"{(error.strerror or str(error)).lower()}{where}"
    if error.errno == errno.ENOSPC:
        return f"{what}: free some, or set KUBELORA_CACHE and KUBELORA_STATE to a larger disk."
    return f"{what}: see that this user may use it, or set KUBELORA_CACHE and KUBELORA_STATE."


def main() -> int:
    arguments = _parser().parse_args()
    try:
        return int(arguments.action(default_places(), arguments))
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {_of_the_system(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted; the same command goes on from here.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
