"""What a sample counts for by its timestep, and the noise it gets."""

import math
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.models.pipeline import load_base_model
from kubelora_trainer.objective.loss_weighting import mean_errors, min_snr_weights, signal_to_noise
from tests.trainer.fixtures.jobs import job_spec, objective_on, open_base


@pytest.mark.parametrize(
    ("snr", "of_epsilon", "of_v"),
    [(20.0, 0.25, 5 / 21), (5.0, 1.0, 5 / 6), (1.0, 1.0, 0.5), (0.0, 1.0, 0.0)],
)
def test_min_snr_weights_by_hand(snr: float, of_epsilon: float, of_v: float) -> None:
    ratio = torch.tensor([snr])
    assert float(min_snr_weights(ratio, 5.0, "epsilon")) == pytest.approx(of_epsilon)
    assert float(min_snr_weights(ratio, 5.0, "v_prediction")) == pytest.approx(of_v)


def test_min_snr_weighs_the_images_error_alike_whatever_the_model_predicts() -> None:
    """A guess of x_0 is a guess of e and of v; both weighted errors are min(SNR, 5) |dx_0|^2."""
    generator = torch.Generator().manual_seed(0)
    clean, noise, guess = torch.randn(3, 7, dtype=torch.float64, generator=generator)
    for abar in (0.999, 0.9, 0.5, 0.1, 0.004):
        a, s = math.sqrt(abar), math.sqrt(1 - abar)
        noisy = a * clean + s * noise
        guessed_noise = (noisy - a * guess) / s
        of_noise = (guessed_noise - noise).square().mean()
        of_velocity = ((a * guessed_noise - s * guess) - (a * noise - s * clean)).square().mean()
        expected = min(abar / (1 - abar), 5.0) * float((guess - clean).square().mean())
        snr = torch.tensor([abar / (1 - abar)], dtype=torch.float64)
        for kind, error in (("epsilon", of_noise), ("v_prediction", of_velocity)):
            weighted = float(min_snr_weights(snr, 5.0, kind) * error)
            assert weighted == pytest.approx(expected, rel=1e-9)


def test_the_ratio_is_that_of_diffusers_and_0_at_zero_terminal_snr() -> None:
    steps = torch.tensor([0, 1, 250, 500, 998, 999])
    betas = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    plain = DDPMScheduler(**betas)
    found = signal_to_noise(plain.alphas_cumprod, steps)
    assert torch.allclose(found, compute_snr(plain, steps), rtol=1e-3)
    rescaled = DDPMScheduler(**betas, rescale_betas_zero_snr=True)
    last = signal_to_noise(rescaled.alphas_cumprod, steps)[-1:]
    assert float(last) == 0.0
    assert float(min_snr_weights(last, 5.0, "v_prediction")) == 0.0


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_the_objective_weighs_each_sample_by_its_timestep(
    demo: DemoPaths, prediction: str, tmp_path: Path
) -> None:
    base = load_base_model(
        demo.model,
        variant=None,
        vae=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        prediction="v_prediction" if prediction == "v_prediction" else "epsilon",
    )
    plain = objective_on(base, demo, job_spec({"batchSize": 4})).batch(0)
    weighted = objective_on(base, demo, job_spec({"batchSize": 4, "minSnrGamma": 0.5})).batch(0)
    assert torch.equal(plain.weights, torch.ones(4))
    expected = []
    for t in plain.timesteps.tolist():
        abar = 1.0
        for step in range(t + 1):
            root = 0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * step / 999
            abar *= 1 - root**2
        snr = abar / (1 - abar)
        expected.append(min(snr, 0.5) / (snr + 1 if prediction == "v_prediction" else snr))
    assert weighted.weights.tolist() == pytest.approx(expected, rel=1e-3)
    assert min(expected) < 0.4 * max(expected)
    assert torch.equal(plain.noisy, weighted.noisy)


def test_a_weighted_loss_is_the_weighted_sum_of_the_samples(demo: DemoPaths) -> None:
    base = open_base(demo.model)
    objective = objective_on(base, demo, job_spec({"batchSize": 3, "minSnrGamma": 0.5}))
    batch = objective.batch(0)
    with torch.no_grad():
        total = 0.0
        for i in range(3):
            answer = base.unet(
                batch.noisy[i : i + 1],
                batch.timesteps[i : i + 1],
                batch.text[i : i + 1],
                added_cond_kwargs={
                    "text_embeds": batch.pooled[i : i + 1],
                    "time_ids": batch.time_ids[i : i + 1],
                },
            ).sample
            error = (answer[0] - batch.target[i]).square().mean()
            total += float(batch.weights[i]) * float(error)
    assert float(objective(0).loss_sum) == pytest.approx(total, rel=1e-5)


def test_offset_noise_is_one_number_per_channel_in_what_is_added_and_in_what_is_predicted(
    demo: DemoPaths,
) -> None:
    base = open_base(demo.model)
    plain = objective_on(base, demo, job_spec({"batchSize": 2}))
    moved = objective_on(base, demo, job_spec({"batchSize": 2, "noiseOffset": 0.1}))
    before, after = plain.batch(3), moved.batch(3)
    offsets = torch.stack(
        [
            torch.randn(4, 1, 1, generator=torch.Generator().manual_seed(draw.offset_seed))
            for draw in plain.order.samples_of(3)
        ]
    )
    assert torch.allclose(
        after.target - before.target, 0.1 * offsets.expand(-1, -1, 8, 8), atol=1e-6
    )
    abar = base.noise_scheduler.alphas_cumprod[before.timesteps].view(-1, 1, 1, 1)
    shift = (1 - abar).sqrt() * 0.1 * offsets
    assert torch.allclose(after.noisy - before.noisy, shift.expand(-1, -1, 8, 8), atol=1e-6)
    assert len({float(o) for o in offsets.flatten()}) == 8


def test_masked_elements_count_as_0_in_the_mean_over_all() -> None:
    errors = torch.tensor([[[[4.0, 8.0]]], [[[1.0, 3.0]]]])
    masks = torch.tensor([[[[0.5, 0.0]]], [[[1.0, 1.0]]]])
    assert mean_errors(errors, masks).tolist() == [1.0, 2.0]
    assert mean_errors(errors, None).tolist() == [6.0, 2.0]
