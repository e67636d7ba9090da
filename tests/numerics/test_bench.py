"""How the benchmark judges, and that an injection breaks what it says."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import pytest
import torch

from kubelora_api.thresholds import FINDINGS
from kubelora_api.training_spec import OptimizerName
from tests.numerics import injections
from tests.numerics.__main__ import Verdict, _fault_row, judge_fault, judge_healthy
from tests.numerics.bench import Injection, Observation, Seen
from tests.numerics.fault_table import FAULTS
from tests.numerics.faults import Fault
from tests.numerics.healthy_table import HEALTHY
from tests.numerics.results_page import FaultRow, HealthyRow, page
from tests.trainer.fixtures.engine import Engine

FAULT = Fault(
    99,
    "a fault",
    "Expected",
    9,
    lambda scene, seed, output: seen({}),
    frozenset({"AlsoRight"}),
    frozenset({"Sooner"}),
)


def seen(findings: Mapping[str, Seen], error: str | None = None) -> Observation:
    return Observation(14, findings, error, ())


def critical(step: int) -> Seen:
    return Seen(step, "critical", "down.lora_A", 1.0)


@pytest.mark.parametrize(
    ("findings", "good"),
    [
        ({"Expected": critical(9)}, True),
        ({"Expected": critical(10)}, False),
        ({"Other": critical(3)}, False),
        ({"Expected": critical(9), "Other": critical(3)}, False),
        ({"Expected": critical(9), "AlsoRight": critical(3)}, True),
        ({"Expected": critical(9), "Other": Seen(3, "warning", None, None)}, True),
        ({"AlsoRight": critical(3)}, False),
        ({"Sooner": critical(3)}, True),
        ({"Sooner": critical(10)}, False),
        ({"Sooner": critical(3), "Other": critical(3)}, False),
        ({}, False),
    ],
)
def test_a_fault_counts_when_its_own_finding_comes_in_time_and_nothing_absurd_beside_it(
    findings: Mapping[str, Seen], good: bool
) -> None:
    assert judge_fault(FAULT, seen(findings))[0] is good


def test_every_optimizer_has_a_healthy_configuration() -> None:
    specs = " ".join(str(healthy.configuration.spec) for healthy in HEALTHY)
    missing = {name for name in get_args(OptimizerName) if f"'name': '{name}'" not in specs}
    assert not missing


WITHOUT_A_FAULT = {
    "GradientVanished": "a zero gradient by hand: trainer/health/test_watchdog.py",
    "LossDiverged": "losses by hand: trainer/health/detectors/test_quantities.py",
    "RolledBack": "an action of health.policy, not a fault: a critical finding comes before it",
}


def test_every_finding_is_expected_by_a_fault_or_has_a_reason_not_to_be() -> None:
    expected = {fault.expected for fault in FAULTS}
    assert {f.finding for f in FINDINGS} - expected == set(WITHOUT_A_FAULT)


def test_a_healthy_run_may_show_not_even_a_warning_and_must_reach_its_end() -> None:
    assert judge_healthy(seen({}))[0]
    assert not judge_healthy(seen({"Any": Seen(3, "warning", None, None)}))[0]
    assert not judge_healthy(seen({}, error="ended"))[0]


def test_the_page_tells_misses_alarms_and_the_bound_that_silence_gives() -> None:
    fault = FaultRow(1, "sums", "AccumulationError", 5, 5, 8, 9)
    missed = FaultRow(9, "scaled", "Departure", 0, 5, None, 9)
    quiet = HealthyRow("plain", 800, 0, 800.0)
    told = page("make x", [fault, missed], [quiet])
    assert "| 1 | sums | AccumulationError | 5/5 | 8 | 9 |" in told
    assert "| 9 | scaled | Departure | **0/5** | never | 9 |" in told
    # No alarm in 800: 1 - 0.05^(1/800) = 0.374 %.
    assert "800 runs of 1 configurations, 0 with an alarm" in told
    assert "below 0.37% a run" in told
    assert "bounds" not in page("make x", [], [HealthyRow("plain", 800, 1, 800.0)])


def test_a_row_is_as_late_as_its_latest_run_and_counts_those_in_time() -> None:
    verdicts = [
        Verdict("a fault", seed, good, step, (), 1.0)
        for seed, (good, step) in enumerate([(True, 8), (False, 12), (False, None), (True, 7)])
    ]
    assert _fault_row(FAULT, verdicts) == FaultRow(99, "a fault", "Expected", 2, 4, 12, 9)


def test_names_of_rows_are_unique() -> None:
    names = [fault.name for fault in FAULTS] + [healthy.name for healthy in HEALTHY]
    assert len(set(names)) == len(names)


def gradient_of_window(path: Path, injection: Injection) -> dict[str, torch.Tensor]:
    """The gradient that the optimizer of the tiny engine gets in its second window, by group."""
    engine = Engine(path, steps=2, gradientAccumulation=3)
    engine.parts = injection(engine.parts)
    got: list[torch.Tensor] = []
    measure = engine.parts.telemetry.measure_gradient

    def note() -> torch.Tensor:
        got.append(engine.buffers.gradient.clone())
        return measure()

    engine.parts.telemetry.measure_gradient = note  # type: ignore[method-assign]
    engine.train()
    return {g.name: got[-1][g.start : g.stop] for g in engine.buffers.groups}


def test_a_second_division_makes_lora_a_a_third_and_leaves_lora_b(tmp_path: Path) -> None:
    right = gradient_of_window(tmp_path / "right", lambda parts: parts)
    wrong = gradient_of_window(tmp_path / "wrong", injections.divided_twice)
    torch.testing.assert_close(wrong["down.lora_A"] * 3, right["down.lora_A"])
    torch.testing.assert_close(wrong["down.lora_B"], right["down.lora_B"])


def test_the_first_micro_step_is_missing_in_lora_a_alone(tmp_path: Path) -> None:
    right = gradient_of_window(tmp_path / "right", lambda parts: parts)
    wrong = gradient_of_window(tmp_path / "wrong", injections.lost_micro_step)
    assert not torch.allclose(wrong["down.lora_A"], right["down.lora_A"], rtol=1e-4, atol=0)
    torch.testing.assert_close(wrong["down.lora_B"], right["down.lora_B"])


def test_a_buffer_that_is_never_zeroed_holds_the_last_window_too(tmp_path: Path) -> None:
    right = gradient_of_window(tmp_path / "right", lambda parts: parts)
    wrong = gradient_of_window(tmp_path / "wrong", injections.never_zeroed)
    assert not torch.allclose(wrong["down.lora_B"], right["down.lora_B"])


def test_a_way_through_fp16_leaves_numbers_that_fp16_holds(tmp_path: Path) -> None:
    wrong = gradient_of_window(tmp_path / "wrong", injections.gradients_through(torch.float16))
    assert torch.equal(wrong["down.lora_B"], wrong["down.lora_B"].half().float())


def test_one_backward_pass_per_window_gives_the_same_sum_in_exact_arithmetic(
    tmp_path: Path,
) -> None:
    right = gradient_of_window(tmp_path / "right", lambda parts: parts)
    wrong = gradient_of_window(tmp_path / "wrong", injections.one_backward_per_window(2))
    error = (wrong["down.lora_B"] - right["down.lora_B"]).norm() / right["down.lora_B"].norm()
    assert float(error) < 2**-6  # working copies are bf16
    assert math.isfinite(float(error))
