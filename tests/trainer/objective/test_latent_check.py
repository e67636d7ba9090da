"""Latents without content are found, category by category."""

import pytest
import torch

from kubelora_trainer.objective.latent_check import LatentSpread


def test_a_category_of_constant_latents_is_found_once_all_its_images_were_seen() -> None:
    spread = LatentSpread(["tins", "bottles", "tins"])
    generator = torch.Generator().manual_seed(0)
    spread.observe(1, torch.randn(4, 8, 8, generator=generator))
    spread.observe(0, torch.zeros(4, 8, 8))
    assert spread.findings(3) == ()  # one image of two
    spread.observe(2, torch.zeros(4, 8, 8))
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
    spread.observe(0, latent + 5.0)  # an offset is no content
    assert len(spread.findings(1)) == count


@pytest.mark.parametrize(("factor", "found"), [(1.0, []), (1 / 0.13025, ["LatentsUnscaled"])])
def test_latents_whose_scaling_factor_was_forgotten_are_found(
    factor: float, found: list[str]
) -> None:
    spread = LatentSpread(["tins", "bottles"])
    checkered = torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(4, 1, 1)  # a deviation of 1
    spread.observe(0, checkered)
    spread.observe(1, checkered * factor)
    findings = spread.findings(2)
    assert [finding.name for finding in findings] == found
    for finding in findings:
        assert (finding.group, finding.threshold) == ("bottles", 3.0)
        assert finding.value == pytest.approx(1 / 0.13025)


def test_constant_images_that_differ_from_each_other_have_content() -> None:
    spread = LatentSpread(["plain", "plain"])
    spread.observe(0, torch.zeros(4, 2, 2))
    spread.observe(1, torch.ones(4, 2, 2))
    assert spread.findings(1) == ()


def test_an_image_counts_once_and_eight_are_enough() -> None:
    spread = LatentSpread(["many"] * 100)
    for _ in range(20):
        spread.observe(0, torch.zeros(4, 2, 2))
    assert spread.findings(1) == ()
    for sample in range(1, 8):
        spread.observe(sample, torch.zeros(4, 2, 2))
    assert len(spread.findings(1)) == 1
