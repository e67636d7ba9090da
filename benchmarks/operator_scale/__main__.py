"""Scale and cost of the operator: N jobs at once, a settled state, a restart, running jobs.

The API server and the controllers are real, on loopback and in a temporary folder; nodes and pods
are simulated by kwok; the operator is the real process. A bare client that creates the same Jobs
itself is measured first, in the same run.

    python -m benchmarks.operator_scale --jobs 200,1000
    python -m benchmarks.operator_scale --peer
    python -m benchmarks.operator_scale --running 1000
    python -m benchmarks.operator_scale --objects 10000
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from benchmarks.operator_scale import report
from benchmarks.operator_scale.api import BenchError
from benchmarks.operator_scale.measure import Settings, measure
from benchmarks.operator_scale.peer import training_operator
from benchmarks.operator_scale.poll import poll
from benchmarks.operator_scale.subject import kubelora
from tests.cluster.harness.errors import HarnessError

_OBJECTS_PER_JOB = 4
"""A LoraTrainingJob, its ConfigMap, its Job and its pod."""


async def _run(arguments: argparse.Namespace) -> None:
    subject = kubelora()
    settings = Settings(arguments.run_seconds, arguments.deadline, arguments.settled_seconds)
    if arguments.running:
        for line in report.poll_lines(
            await poll(subject, arguments.running, arguments.poll_seconds, arguments.deadline)
        ):
            _say(line)
        return
    if arguments.objects:
        result = await measure(subject, arguments.objects // _OBJECTS_PER_JOB, settings)
        for line in report.lines_of(result):
            _say(line)
        _say(report.objects_line(arguments.objects, result))
        return
    last: list[str] = []
    for jobs in arguments.jobs:
        # Ours last, so that its line is the last one.
        last = []
        for each in [*([training_operator()] if arguments.peer else []), subject]:
            result = await measure(each, jobs, settings)
            for line in report.lines_of(result):
                _say(line)
            last.append(report.closing_line(result))
    if not arguments.peer:
        _say(report.PEER)
    for line in last:
        _say(line)


def _say(line: str) -> None:
    print(line, flush=True)


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-operator",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--jobs",
        type=_numbers,
        default=[200, 1000],
        help="jobs created at once, for example 200,1000",
    )
    parser.add_argument(
        "--peer", action="store_true", help="measure Kubeflow's training-operator v1 as well"
    )
    parser.add_argument("--running", type=int, help="measure this many running jobs instead")
    parser.add_argument("--objects", type=int, help="measure with this many objects instead")
    parser.add_argument("--run-seconds", type=float, default=10.0, help="how long a pod runs")
    parser.add_argument(
        "--deadline", type=float, default=600.0, help="longest wait for all jobs, in seconds"
    )
    parser.add_argument(
        "--settled-seconds", type=float, default=20.0, help="how long nothing happens"
    )
    parser.add_argument(
        "--poll-seconds", type=float, default=60.0, help="how long running jobs are measured"
    )
    return parser.parse_args()


def main() -> int:
    """Run; everything that was started is stopped on every way out."""
    # asyncio turns an interrupt into the orderly end of what runs. A shell starts what it puts into
    # the background with the interrupt ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    code = 0
    try:
        asyncio.run(_run(_arguments()))
    except* (BenchError, HarnessError) as errors:
        for error in errors.exceptions:
            print(f"error: {error}", file=sys.stderr)
        code = 1
    except* KeyboardInterrupt:
        print("error: interrupted; everything was stopped", file=sys.stderr)
        code = 130
    return code


if __name__ == "__main__":
    sys.exit(main())
