"""Timesteps or noise that stand still are found, and nothing else is."""

import pytest

from kubelora_trainer.health.detectors.repeated_draws import RepeatedDraws
from tests.trainer.fixtures.watching import micro_batch


def watched(timesteps: list[int], noise: list[float], batch: int = 1) -> RepeatedDraws:
    draws = RepeatedDraws()
    for micro_step, start in enumerate(range(0, len(timesteps), batch)):
        here = slice(start, start + batch)
        draws.on_micro_batch(micro_batch(micro_step, timesteps=timesteps[here], noise=noise[here]))
    return draws


@pytest.mark.parametrize("batch", [1, 4])
def test_sixteen_samples_of_one_timestep_are_found_and_fifteen_are_not(batch: int) -> None:
    noise = [float(i) for i in range(20)]
    assert watched([500] * 15 + [1], noise[:16], batch).findings(4) == ()
    (finding,) = watched([500] * 16, noise[:16], batch).findings(4)
    assert (finding.name, finding.severity, finding.since_step) == ("DrawsRepeated", "critical", 4)
    assert (finding.value, finding.threshold) == (16, 16)
    assert finding.message.startswith("The timestep of 16 samples in a row was the same.")


def test_noise_that_is_always_the_same_is_found_though_timesteps_differ() -> None:
    (finding,) = watched(list(range(16)), [0.3] * 16).findings(1)
    assert finding.message.startswith("The noise of 16 samples")


def test_one_other_draw_begins_the_count_anew() -> None:
    timesteps = [7] * 15 + [8] + [7] * 15
    assert watched(timesteps, [float(i) for i in range(31)]).findings(1) == ()


def test_a_micro_step_that_is_asked_for_again_repeats_nothing() -> None:
    draws = RepeatedDraws()
    for _ in range(50):
        draws.on_micro_batch(micro_batch(0, timesteps=[500], noise=[0.1]))
    assert draws.findings(1) == ()
