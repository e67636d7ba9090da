"""Runs one job of the tiny model through `run_job`, with one part of it wrong or none.

The job goes the whole way of a real run: its document, output folder, model, data, buffers,
telemetry, watchdog, checkpoints. Three functions are replaced from outside: the model is copied
from the one in memory, the loop gets the parts after the injection, and what follows the last step
(export) is left out.
"""

import io
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from kubelora_api.documents import parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import OutputPath
from kubelora_trainer.checkpoint.directories import list_checkpoints
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.distributed.topology import SINGLE_RANK, RankInfo
from kubelora_trainer.storage.output_dir import read_manifest
from kubelora_trainer.telemetry.host_transfer import PendingNumbers
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.training import run
from kubelora_trainer.training import setup as inputs
from kubelora_trainer.training.context import RunOptions
from kubelora_trainer.training.loop import Parts, train
from kubelora_trainer.utils.errors import InterruptedRunError, NumericalError, RunEndedError
from kubelora_trainer.utils.signals import StopRequest
from tests.numerics.scene import Photographs, Scene

CONTRACT = "StartupContract"
"""Name under which a broken start-up contract counts as a finding."""

OTHER_SEEDS = 1_000
"""What a baseline's seed is higher by: no run is held against one that is judged itself."""

Injection = Callable[[Parts], Parts]
Observe = Callable[[Scene, int, Path], "Observation"]
"""A run, or several in a row, of a seed into a folder; what the last one showed."""
Document = Mapping[str, Mapping[str, object]]


def sound(parts: Parts) -> Parts:
    """Nothing is wrong."""
    return parts


@dataclass(frozen=True)
class Configuration:
    """A job that differs from the plain one in a few fields.

    spec: groups of the spec with the fields that differ. warm: whether the adapter starts from a
    trained one.
    """

    spec: Document = field(default_factory=dict)
    photographs: Photographs = field(default_factory=Photographs)
    warm: bool = False


@dataclass(frozen=True)
class Seen:
    """A finding as it stood when it was first seen. step: of detection."""

    step: int
    severity: str
    group: str | None
    value: float | None


@dataclass(frozen=True)
class Observation:
    """What a run showed.

    steps: optimizer steps done. findings: by name. error: what ended the run, if anything did.
    numbers: of every step.
    """

    steps: int
    findings: Mapping[str, Seen]
    error: str | None
    numbers: tuple[StepNumbers, ...]

    @property
    def critical(self) -> frozenset[str]:
        """Names of the critical findings."""
        return frozenset(n for n, seen in self.findings.items() if seen.severity == "critical")


PLAIN: Document = {
    "adapter": {"rank": 4},
    "training": {
        "steps": 14,
        "gradientAccumulation": 2,
        "learningRate": 1e-4,
        "device": "cpu",
    },
    "workers": {"gpusPerNode": 0},
    "checkpoint": {"everySteps": 10_000},
}
"""The job that every row varies: the defaults of the product, and few of everything."""


def document(
    scene: Scene, configuration: Configuration, seed: int, output: Path
) -> LoraTrainingJob:
    """The job of a configuration and a seed."""
    groups = {**PLAIN, **configuration.spec}
    spec = {name: {**PLAIN.get(name, {}), **groups[name]} for name in groups}
    photographs = str(scene.photographs(configuration.photographs))
    spec["model"] = {"uri": str(scene.model), **spec.get("model", {})}
    spec["dataset"] = {
        "uri": photographs,
        "resolution": 64,
        "captions": {"maxMissing": 1},
        **spec.get("dataset", {}),
    }
    if configuration.warm:
        spec["adapter"] = {**spec["adapter"], "from": str(scene.trained_adapter)}
    spec["training"] = {**spec["training"], "seed": seed}
    spec["output"] = {"uri": str(output)}
    return parse_job(
        {
            "apiVersion": "kubelora.dev/v1alpha1",
            "kind": "LoraTrainingJob",
            "metadata": {"name": "bench"},
            "spec": spec,
        },
        local=True,
    )


class TrainedError(InterruptedRunError):
    """The last step is done; nothing after it is of interest."""


@dataclass(frozen=True)
class _Read:
    """A step's numbers on their way, which are told to ``tell`` when they are read."""

    pending: PendingNumbers
    tell: Callable[[StepNumbers], None]

    def read(self) -> StepNumbers:
        numbers = self.pending.read()
        self.tell(numbers)
        return numbers


@dataclass
class _Witness:
    """Looks at the watchdog whenever the reporter has read a step's numbers."""

    findings: dict[str, Seen] = field(default_factory=dict)
    numbers: list[StepNumbers] = field(default_factory=list)

    def attend(self, parts: Parts) -> None:
        reporter = parts.reporter
        drain, expect = reporter.drain, reporter.expect

        def witnessed_expect(pending: PendingNumbers) -> None:
            expect(_Read(pending, self.numbers.append))  # type: ignore[arg-type]

        def witnessed_drain(saving: bool = False) -> None:
            try:
                drain(saving)
            finally:
                self.note(parts)

        reporter.drain = witnessed_drain  # type: ignore[method-assign]
        reporter.expect = witnessed_expect  # type: ignore[method-assign]

    def note(self, parts: Parts) -> None:
        step = self.numbers[-1].step if self.numbers else 0
        for name, finding in parts.reporter.watchdog.state.found.items():
            seen = Seen(step, finding.severity, finding.group, finding.value)
            self.findings.setdefault(name, seen)


def observe_run(
    scene: Scene,
    configuration: Configuration,
    seed: int,
    output: Path,
    injection: Injection = sound,
) -> Observation:
    """Run the job to its last step, or to what ends it."""
    shutil.rmtree(output, ignore_errors=True)
    return continue_run(scene, configuration, seed, output, injection)


def against_a_baseline(
    scene: Scene,
    configuration: Configuration,
    seed: int,
    output: Path,
    injection: Injection = sound,
) -> Observation:
    """A good run of another seed, then the run itself, held against it.

    Raises AssertionError where the two were not compared.
    """
    good = output.with_name("baseline")
    observe_run(scene, configuration, seed + OTHER_SEEDS, good)
    health = {**configuration.spec.get("health", {}), "baseline": str(good)}
    held = replace(configuration, spec={**configuration.spec, "health": health})
    seen = observe_run(scene, held, seed, output, injection)
    manifest = read_manifest(output)
    told = manifest.record.baseline if manifest else None
    assert told is not None, output
    assert not told.not_compared, told.not_compared
    return seen


def continue_run(
    scene: Scene,
    configuration: Configuration,
    seed: int,
    output: Path,
    injection: Injection = sound,
    rank_info: RankInfo = SINGLE_RANK,
) -> Observation:
    """As ``observe_run``, from the newest checkpoint in ``output``, if there is one.

    seat: of this process, where it is one of several ranks.
    """
    job = document(scene, configuration, seed, output)
    begun = max((c.step for c in list_checkpoints(output / OutputPath.CHECKPOINTS)), default=0)
    witness = _Witness()

    def broken_train(parts: Parts, position: RunPosition, **rest: object) -> RunPosition:
        parts = injection(parts)
        witness.attend(parts)
        train(parts, position, **rest)  # type: ignore[arg-type]
        raise TrainedError("trained")

    options = RunOptions(
        mounts={},
        metrics_port=0,
        attempt=None,
        termination_log=None,
        resume_command="",
        rank_info=rank_info,
    )
    logging.getLogger("kubelora_trainer").addHandler(logging.NullHandler())  # faults warn a lot
    error = None
    with ExitStack() as stack:
        stack.enter_context(patch.object(inputs, "load_base_model", scene.load_base))
        stack.enter_context(patch.object(inputs, "load_token_limits", scene.token_limits))
        stack.enter_context(patch.object(run, "train", broken_train))
        try:
            run.run_job(job, options, StopRequest(), Console(file=io.StringIO()))
        except TrainedError:
            pass
        except NumericalError as ended:
            error = str(ended)
            step = witness.numbers[-1].step if witness.numbers else begun + 1
            if not any(f.severity == "critical" for f in witness.findings.values()):
                witness.findings[CONTRACT] = Seen(step, "critical", None, None)
        except RunEndedError as ended:
            raise AssertionError(f"the bench's own job is wrong: {ended}") from ended
    steps = witness.numbers[-1].step if witness.numbers else 0
    return Observation(steps, witness.findings, error, tuple(witness.numbers))
