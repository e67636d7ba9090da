"""An audit's numbers, on either side of their limits, and what is made of them."""

from pathlib import Path

import pytest

from kubelora_trainer.health.detector import AuditFacts, RunStart
from kubelora_trainer.health.detectors.audited_step import AuditedStep
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from tests.trainer.fixtures.engine import Engine


def judged(tmp_path: Path, facts: AuditFacts, step: int = 4) -> dict[str, str]:
    engine = Engine(tmp_path)
    detector = AuditedStep()
    detector.on_start(RunStart("new", engine.buffers, engine.optimizer), WatchState())
    detector.on_audit(facts)
    concluded = detector.on_step(StepNumbers(step, 1e-4, 1.0, 1, 2.0, {}, [], []), WatchState())
    return {finding.name: finding.message for finding in concluded.raised}


@pytest.mark.parametrize(
    ("loss", "descent", "ratios", "found"),
    [
        (1.0, 0.97, (1.0, 0.99), False),
        (1.0, -0.1, (0.0, float("nan")), False),
        (1.0, None, (), False),
        (1.0, -0.98, (1.0, 1.0), True),
        (1.0, 0.97, (1.0, -1.0), True),
        (-1.0, 0.97, (1.0, 1.0), True),
    ],
)
def test_a_gradient_that_leads_uphill_is_found_by_the_loss_or_by_a_factor(
    tmp_path: Path, loss: float, descent: float | None, ratios: tuple[float, ...], found: bool
) -> None:
    facts = AuditFacts(4, loss, 0.0, "", descent, ratios)
    assert ("GradientReversed" in judged(tmp_path, facts)) is found


def test_the_worst_factor_is_named(tmp_path: Path) -> None:
    name = Engine(tmp_path / "named").buffers.slots[1].factor.name
    facts = AuditFacts(4, 1.0, 0.0, "", 0.9, (1.0, -1.0))
    assert f"The worst is {name}." in judged(tmp_path, facts)["GradientReversed"]


def test_a_pass_that_differs_is_the_devices_fault(tmp_path: Path) -> None:
    facts = AuditFacts(4, 1.0, 0.02, "a.lora_A", 0.9, ())
    assert "a.lora_A differs by 0.02" in judged(tmp_path, facts)["ComputationUnstable"]


def test_an_audit_belongs_to_its_own_step(tmp_path: Path) -> None:
    assert not judged(tmp_path, AuditFacts(4, -1.0, 0.0, "", None, ()), step=3)
