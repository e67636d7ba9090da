"""Latents without content are found, category by category."""

from dataclasses import replace

import pytest
import torch

from kubelora_trainer.health.detector import NOTHING
from kubelora_trainer.health.detectors.latent_spread import LatentSpread
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from tests.trainer.fixtures.watching import micro_batch


def step(number: int) -> StepNumbers:
    return StepNumbers(number, 1e-4, 1.0, 1, 1.0, {}, (), ())


def observe(spread: LatentSpread, sample: int, latent: torch.Tensor) -> None:
    spread.on_micro_batch(micro_batch(sample, samples=[sample], latent=latent))


def test_a_category_of_constant_latents_is_found_once_all_its_images_were_seen() -> None:
    spread = LatentSpread(["tins", "bottles", "tins"])
    generator = torch.Generator().manual_seed(0)
    observe(spread, 1, torch.randn(4, 8, 8, generator=generator))
    observe(spread, 0, torch.zeros(4, 8, 8))
    assert spread.findings(3) == ()  # one image of two
    observe(spread, 2, torch.zeros(4, 8, 8))
    (finding,) = spread.findings(3)
    assert (finding.name, finding.group, finding.value) == ("LatentsConstant", "tins", 0.0)
    assert (finding.severity, finding.since_step) == ("critical", 3)


@pytest.mark.parametrize(("amplitude", "count"), [(0.009, 1), (0.011, 0)])
def test_the_limit_is_a_deviation_of_a_hundredth_in_the_channel_that_varies_most(
    amplitude: float, count: int
) -> None:
    latent = torch.zeros(4, 2, 2)
    latent[1] = torch.tensor([[amplitude, -amplitude], [-amplitude, amplitude]])
    spread = LatentSpread([""])
    observe(spread, 0, latent + 5.0)  # an offset is no content
    assert len(spread.findings(1)) == count


@pytest.mark.parametrize(("factor", "found"), [(1.0, []), (1 / 0.13025, ["LatentsUnscaled"])])
def test_latents_whose_scaling_factor_was_forgotten_are_found(
    factor: float, found: list[str]
) -> None:
    spread = LatentSpread(["tins", "bottles"])
    checkered = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(4, 1, 1)  # a deviation of 1
    observe(spread, 0, checkered)
    observe(spread, 1, checkered * factor)
    findings = spread.findings(2)
    assert [finding.name for finding in findings] == found
    for finding in findings:
        assert (finding.group, finding.threshold) == ("bottles", 3.0)
        assert finding.value == pytest.approx(1 / 0.13025)


def test_constant_images_that_differ_from_each_other_have_content() -> None:
    spread = LatentSpread(["plain", "plain"])
    observe(spread, 0, torch.zeros(4, 2, 2))
    observe(spread, 1, torch.ones(4, 2, 2))
    assert spread.findings(1) == ()


def test_an_image_counts_once_and_eight_are_enough() -> None:
    spread = LatentSpread(["many"] * 100)
    for _ in range(20):
        observe(spread, 0, torch.zeros(4, 2, 2))
    assert spread.findings(1) == ()
    for sample in range(1, 8):
        observe(spread, sample, torch.zeros(4, 2, 2))
    assert len(spread.findings(1)) == 1


def test_a_latent_is_computed_for_the_first_use_of_an_image_alone() -> None:
    spread, asked = LatentSpread(["tins", "tins"]), list[int]()

    def latent(place: int) -> torch.Tensor:
        asked.append(place)
        return torch.ones(4, 2, 2)

    facts = replace(micro_batch(0, samples=[1, 0]), latent=latent)
    spread.on_micro_batch(facts)
    spread.on_micro_batch(facts)
    assert asked == [0, 1]


def test_a_finding_is_raised_once() -> None:
    spread = LatentSpread(["tins"])
    observe(spread, 0, torch.zeros(4, 2, 2))
    (finding,) = spread.on_step(step(3), WatchState()).raised
    assert finding.since_step == 3
    assert spread.on_step(step(4), WatchState(found={finding.name: finding})) == NOTHING
