"""A finding's cause: found once, kept while the finding lasts, and what it makes of a run."""

from pathlib import Path

import pytest

from kubelora_api.status import Finding
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement
from kubelora_trainer.health.watch_state import MAX_MESSAGE, WatchState, with_cause
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.errors import DeviceError
from tests.trainer.fixtures.engine import Engine
from tests.trainer.fixtures.watching import watchdog


class Shows(Detector):
    """A critical finding in every step but the third, and a warning."""

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        if numbers.step == 3:
            return Judgement(cleared=frozenset({"Shown"}))
        raised = Finding(
            name="Shown", severity="critical", value=numbers.loss, message=f"At {numbers.step}."
        )
        warned = Finding(name="Warned", severity="warning", message="It is small.")
        return Judgement((raised, warned))


def hardware(finding: Finding, active: frozenset[str]) -> Finding:
    assert active == {"Shown", "Warned"}
    message = with_cause(finding.message, "Hardware: other bits.")
    return finding.model_copy(update={"cause": "Hardware", "node": "n", "message": message})


def test_a_cause_is_asked_for_once_and_kept_while_the_finding_lasts() -> None:
    dog = watchdog(Shows())
    asked = []
    for step in (1, 2, 3, 4):
        dog.on_step(StepNumbers(step, 1e-4, float(step), 1, 2.0, {}, [], []))
        asked.append([f.name for f in dog.explain(hardware)] if step != 3 else [])
    assert asked == [["Shown"], [], [], ["Shown"]]
    found = dog.state.found["Shown"]
    assert (found.cause, found.node) == ("Hardware", "n")
    assert found.message == "At 4. Cause: Hardware: other bits."
    assert dog.state.found["Warned"].cause is None


def test_a_long_sentence_is_cut_and_not_its_cause() -> None:
    message = with_cause("a" * 2000, "Data: b.")
    assert len(message) == MAX_MESSAGE
    assert message.endswith("a Cause: Data: b.")


class Once(Detector):
    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        if numbers.step != 2:
            return NOTHING
        return Judgement((Finding(name="Shown", severity="critical", message="It is."),))


@pytest.mark.parametrize("in_pod", [True, False])
def test_a_hardware_fault_ends_the_attempt_where_an_operator_moves_it(
    tmp_path: Path, in_pod: bool
) -> None:
    engine = Engine(tmp_path, steps=4, detectors=[Once()])
    engine.reporter.explain = lambda finding, step, active: finding.model_copy(
        update={"cause": "Hardware"}
    )
    engine.reporter.leave_device = in_pod
    if in_pod:
        with pytest.raises(DeviceError, match="prefers another node"):
            engine.train()
    else:
        assert engine.train().step == 4
