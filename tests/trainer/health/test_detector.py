"""The detectors' protocol: who raises what, and that a new one is offered every moment of a run."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_api.spec import Health
from kubelora_api.status import Finding
from kubelora_api.thresholds import FINDINGS
from kubelora_trainer.health.detector import Detector, Judgement, RunStart
from kubelora_trainer.health.detectors import Watched, build_detectors
from kubelora_trainer.health.detectors.quantities import facts_of
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.errors import NumericalError, OutputError, SuspendedByPolicyError
from tests.trainer.fixtures.engine import Engine
from tests.trainer.fixtures.watching import watchdog


def test_each_row_of_the_table_is_raised_by_one_detector(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    facts = facts_of(engine.job.spec.training, engine.buffers, 6)
    built = build_detectors(Watched(facts, engine.buffers))
    raised = Counter(row.finding for detector in built for row in detector.rows)
    assert raised == Counter(row.finding for row in FINDINGS)


def test_no_two_detectors_remember_under_one_key(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    facts = facts_of(engine.job.spec.training, engine.buffers, 6)
    keys = Counter(k for d in build_detectors(Watched(facts, engine.buffers)) for k in d.state())
    assert set(keys.values()) == {1}
    assert not keys.keys() & {"judged", "found", "active", "accepted"}


class Everywhere(Detector):
    """Reads the masters' sum on the device in every second step, and judges checkpoints."""

    def __init__(self, limit: float = 0.0) -> None:
        self.limit, self.backward_passes = limit, 0
        self.sums: dict[int, float] = {}
        self.saved: list[int] = []
        self.starts: list[str] = []

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        self.buffers: AdapterBuffers = start.buffers
        self.starts.append(start.reason)
        return Judgement(lines=(f"start: {start.reason} at {start.step}",))

    def on_backward(self) -> None:
        self.backward_passes += 1

    def measure(self, step: int) -> Mapping[str, Tensor]:
        return {"everywhere.sum": self.buffers.masters.sum()} if step % 2 == 0 else {}

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        if values := numbers.extra.get("everywhere.sum"):
            (self.sums[numbers.step],) = values
        return Judgement()

    def on_checkpoint(self, step: int, known: WatchState) -> Judgement:
        self.saved.append(step)
        if step < self.limit:
            return Judgement()
        finding = Finding(
            name="Everywhere", severity="critical", since_step=step, message="Reached."
        )
        return Judgement((finding,))

    def state(self) -> JsonObject:
        return {"everywhere": {str(step): value for step, value in self.sums.items()}}

    def load(self, saved: JsonObject) -> None:
        self.sums = {int(step): value for step, value in saved.get("everywhere", {}).items()}


def test_a_detector_is_offered_every_moment_and_its_state_survives_a_resume(
    tmp_path: Path,
) -> None:
    first = Everywhere(limit=100)
    Engine(tmp_path, detectors=[first]).train(micro_steps=8, every=2)  # steps of 3 micro-steps
    assert (first.starts, first.backward_passes, first.saved) == (["new"], 8, [2])
    again = Everywhere(limit=100)
    engine = Engine(tmp_path, detectors=[again])
    assert again.sums == first.sums
    assert list(first.sums) == [2]
    engine.train(every=2)
    assert (again.starts, again.backward_passes) == (["resumed"], 10)
    assert (list(again.sums), again.saved) == ([2, 4, 6], [4, 6])
    assert again.sums[6] == pytest.approx(float(engine.buffers.masters.sum()))


def test_what_a_checkpoint_shows_is_the_policys_to_decide_before_it_is_saved(
    tmp_path: Path,
) -> None:
    judging = Everywhere(limit=4)
    engine = Engine(tmp_path, detectors=[judging], policy=Health(policy="Suspend"))
    with pytest.raises(SuspendedByPolicyError, match="Everywhere since step 4: Reached"):
        engine.train(every=2)
    assert engine.exporter.report.health.findings[0].name == "Everywhere"


class Broken(Detector):
    """Breaks a contract in its first step."""

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        raise NumericalError(f"broken in step {numbers.step}")


def test_a_broken_contract_ends_the_run_whatever_the_policy_is(tmp_path: Path) -> None:
    engine = Engine(tmp_path, detectors=[Broken()], policy=Health(policy="Warn"))
    with pytest.raises(NumericalError, match="broken in step 1"):
        engine.train()


def test_a_detectors_state_of_another_form_is_another_versions() -> None:
    saved = WatchState(detectors={"everywhere": {"not a step": 1}})
    with pytest.raises(OutputError, match=r"state of Everywhere .* another version of kubelora"):
        watchdog(Everywhere(), saved=saved)
