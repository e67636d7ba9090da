"""The ten factors that `/status` names."""

import math

from torch import nn, ones

from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.telemetry.worst_modules import worst_modules
from tests.trainer.fixtures.engine import DEFAULT

PLAN: PrecisionPlan = DEFAULT


def worst(norms: list[float], balances: list[float] | None = None) -> list[tuple[str, str, float]]:
    """Of modules m0, m1, ... of one group, with these numbers."""
    factors = [Factor(f"m{i}", "down.lora_A", nn.Parameter(ones(1, 1))) for i in range(len(norms))]
    numbers = StepNumbers(
        *(1, 1e-4, 1.0, 1, 1.0, {}, norms, norms), factor_balance=balances or [0.0] * len(norms)
    )
    found = worst_modules(AdapterBuffers(factors, PLAN).slots, numbers)
    return [(n.module.removesuffix(".lora_A"), n.metric, n.value) for n in found]


def test_what_is_not_finite_comes_first_as_a_number_that_json_has() -> None:
    assert worst([1.0, math.inf, 1.0, math.nan])[:2] == [
        ("m1", "grad_norm", 3.4e38),
        ("m3", "grad_norm", 3.4e38),
    ]


def test_then_pairs_that_contradict_each_other_the_worst_first() -> None:
    found = worst([1.0, 1.0, 1.0, 50.0], [0.2, 0.04, 1.4, 0.003])
    assert found[:2] == [("m2", "lora_balance", 1.4), ("m0", "lora_balance", 0.2)]
    assert found[2] == ("m3", "grad_norm", 50.0)


def test_then_those_farthest_from_their_groups_median_small_or_large() -> None:
    # The median of 1, 1, 1, 0.01, 30, 0 is 1: apart by infinity, 100 times, 30 times.
    found = worst([1.0, 1.0, 0.01, 30.0, 1.0, 0.0, 1.0])
    assert [name for name, _, _ in found[:3]] == ["m5", "m2", "m3"]


def test_ten_are_named_of_however_many_there_are() -> None:
    assert len(worst([float(i + 1) for i in range(500)])) == 10


def test_a_group_without_any_gradient_is_no_reason_for_an_error() -> None:
    assert [value for _, _, value in worst([0.0, 0.0])] == [0.0, 0.0]
