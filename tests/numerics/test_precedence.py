"""Of the findings that a fault makes, the right one is named first."""

import pytest

from kubelora_api.status import Finding
from kubelora_api.thresholds import FINDINGS, PRECEDENCE, by_precedence
from kubelora_trainer.health.watch_state import WatchState
from tests.numerics.fault_table import FAULTS
from tests.numerics.faults import Fault

SEVERAL = [f for f in FAULTS if f.also]


def test_every_finding_has_its_place_in_the_order() -> None:
    assert sorted(f.finding for f in PRECEDENCE) == sorted(f.finding for f in FINDINGS)


@pytest.mark.parametrize("fault", SEVERAL, ids=lambda fault: fault.name)
def test_a_faults_own_finding_is_named_before_those_that_follow_from_it(fault: Fault) -> None:
    severities = {f.finding: f.severity for f in FINDINGS}
    names = [*sorted(fault.also), fault.expected]  # as if the right one came last
    found = {n: Finding(name=n, severity=severities[n], message="") for n in names}
    state = WatchState(found=found, active=frozenset(names))

    assert state.status().findings[0].name == fault.expected
    assert state.due is not None
    assert state.due.name == fault.expected


def test_a_rate_of_one_in_bf16_is_not_answered_by_scaling_the_loss() -> None:
    assert by_precedence("UpdatesTooLarge") < by_precedence("GradientUnderflow")
    assert by_precedence("UpdatesTooLarge") < by_precedence("UpdatesLost")
    assert by_precedence("Unheard") == len(PRECEDENCE)
