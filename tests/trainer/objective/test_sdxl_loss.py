"""The objective is SDXL's, checked against the pipeline and against a computation by hand."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image
from safetensors import safe_open

from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.buckets import Size
from kubelora_trainer.data.cropping import crop_image
from kubelora_trainer.lora.adapter import AdapterModule, add_adapter
from kubelora_trainer.models.pipeline import BaseModel, load_base_model
from kubelora_trainer.objective.sdxl_loss import SdxlObjective, time_ids
from kubelora_trainer.objective.text_embeddings import encode_text
from tests.trainer.fixtures.decoding import decode
from tests.trainer.fixtures.jobs import fill_up_projections, job_spec, objective_on, open_base
from tests.trainer.integration.test_interruption import arguments, in_this_process


@pytest.fixture(scope="module")
def base(demo: DemoPaths) -> BaseModel:
    return open_base(demo.model)


@pytest.fixture
def objective(base: BaseModel, demo: DemoPaths) -> SdxlObjective:
    return objective_on(base, demo, job_spec({"batchSize": 3, "seed": 5}))


@pytest.mark.parametrize("caption", ["a photo of a cat", "", "bottle " * 200, "Größe 42 — 汉字"])
def test_text_conditions_are_those_of_the_pipeline(
    base: BaseModel, demo: DemoPaths, caption: str
) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(demo.model)
    with torch.no_grad():
        expected, _, pooled, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
    hidden, ours = encode_text(base, caption)
    assert torch.equal(hidden, expected)
    assert torch.equal(ours, pooled)


def test_time_ids_are_those_of_the_pipeline_for_a_crop(demo: DemoPaths) -> None:
    """A landscape picture: heights come before widths everywhere."""
    pipeline = StableDiffusionXLPipeline.from_pretrained(demo.model)
    square = crop_image(Image.new("RGB", (300, 200)), Size(64, 64), across=0.5, down=0.0)
    expected = pipeline._get_add_time_ids((200, 300), (0, 16), (64, 64), torch.float32, 32)
    assert torch.equal(torch.tensor([time_ids(square.sizes)]), expected)


def test_the_loss_is_the_sum_over_samples_of_each_ones_mean_squared_error(
    base: BaseModel, demo: DemoPaths, objective: SdxlObjective
) -> None:
    """Written out with the schedule's closed form, from the draws, one sample at a time."""
    result = objective(1)
    draws = objective.order.samples_of(1)
    lines = (demo.photos / "metadata.jsonl").read_text().splitlines()
    entries = sorted((json.loads(line) for line in lines), key=lambda entry: entry["file_name"])
    total = 0.0
    for draw in draws:
        entry = entries[draw.sample]
        picture = decode(demo.photos / entry["file_name"]).image
        square = crop_image(picture, Size(64, 64), draw.across, draw.down)
        with torch.no_grad():
            posterior = base.vae.encode(square.pixels[None]).latent_dist
            first = torch.Generator().manual_seed(draw.posterior_seed)
            sampled = posterior.mean + posterior.std * torch.randn(4, 8, 8, generator=first)
            second = torch.Generator().manual_seed(draw.noise_seed)
            noise = torch.randn(4, 8, 8, generator=second)[None]
            t = math.floor(draw.timestep * 1000)
            share = 1.0
            for step in range(t + 1):
                root = 0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * step / 999
                share *= 1 - root**2
            noisy = math.sqrt(share) * sampled * 0.13025 + math.sqrt(1 - share) * noise
            hidden, pooled = encode_text(base, entry["text"])
            sizes = [[*square.sizes.original_size, *square.sizes.crop_top_left, 64, 64]]
            condition = {"text_embeds": pooled, "time_ids": torch.tensor(sizes).float()}
            answer = base.unet(noisy, t, hidden, added_cond_kwargs=condition).sample
            total += float((answer - noise).pow(2).mean())
    assert result.samples == 3
    assert result.loss_sum.dtype == torch.float32
    assert float(result.loss_sum) == pytest.approx(total, rel=2e-4)


def test_a_velocity_model_is_asked_for_the_velocity(demo: DemoPaths, tmp_path: Path) -> None:
    """v = sqrt(abar) e - sqrt(1 - abar) x_0 (Salimans and Ho 2022); x_0 from x_t and e."""
    shutil.copytree(demo.model, tmp_path / "model")
    path = tmp_path / "model/scheduler/scheduler_config.json"
    path.write_text(path.read_text().replace('"epsilon"', '"v_prediction"'))
    spec = job_spec({"batchSize": 2})
    velocity = objective_on(open_base(tmp_path / "model"), demo, spec).batch(0)
    epsilon = objective_on(open_base(demo.model), demo, spec).batch(0)
    assert torch.equal(velocity.noisy, epsilon.noisy)
    abar = open_base(demo.model).noise_scheduler.alphas_cumprod[epsilon.timesteps].view(-1, 1, 1, 1)
    clean = (epsilon.noisy - (1 - abar).sqrt() * epsilon.target) / abar.sqrt()
    expected = abar.sqrt() * epsilon.target - (1 - abar).sqrt() * clean
    assert torch.allclose(velocity.target, expected, atol=1e-3)


def test_a_micro_step_gives_the_same_loss_in_any_order_and_with_other_random_draws(
    base: BaseModel, demo: DemoPaths
) -> None:
    spec = job_spec({"batchSize": 2, "seed": 1})
    forward = objective_on(base, demo, spec)
    losses = [forward(step).loss_sum for step in range(5)]
    torch.rand(10)
    resumed = objective_on(base, demo, spec)
    state = torch.random.get_rng_state()
    assert [resumed(step).loss_sum for step in (4, 2, 3, 0, 1)] == [
        losses[step] for step in (4, 2, 3, 0, 1)
    ]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_last_micro_batch_of_an_epoch_is_shorter(objective: SdxlObjective) -> None:
    """8 photographs by 3 are 3, 3 and 2."""
    assert [objective(step).samples for step in range(4)] == [3, 3, 2, 3]


def test_dropped_captions_are_the_empty_one_at_the_set_rate(
    base: BaseModel, demo: DemoPaths
) -> None:
    empty, _ = encode_text(base, "")
    always = objective_on(base, demo, job_spec(dataset={"captionDropout": 1.0}))
    assert torch.equal(always.batch(0).text, empty)
    never = objective_on(base, demo, job_spec())
    assert not any(torch.equal(never.batch(step).text, empty) for step in range(8))
    half = objective_on(base, demo, job_spec(dataset={"captionDropout": 0.5}))
    draws = [half.order.samples_of(step)[0].caption < 0.5 for step in range(12)]
    assert [torch.equal(half.batch(step).text, empty) for step in range(12)] == draws
    assert 0 < sum(draws) < 12


def _adapted(folder: Path, dtype: torch.dtype) -> tuple[BaseModel, tuple[AdapterModule, ...]]:
    model = open_base(folder, dtype)
    modules = add_adapter(model.unet, Adapter(rank=4), 0)
    fill_up_projections(modules)
    return model, modules


def test_conditions_stay_fp32_and_gradients_are_finite_under_bf16(demo: DemoPaths) -> None:
    model, modules = _adapted(demo.model, torch.bfloat16)
    objective = objective_on(model, demo, job_spec({"batchSize": 2}))
    batch = objective.batch(0)
    exact = {batch.noisy.dtype, batch.target.dtype, batch.time_ids.dtype}
    assert exact == {torch.float32}
    loss = objective(0).loss_sum
    assert loss.dtype == torch.float32
    torch.autograd.backward(loss)
    for module in modules:
        for parameter in (module.lora_a, module.lora_b):
            assert parameter.grad is not None
            assert torch.isfinite(parameter.grad).all()
            assert 1e-9 < float(parameter.grad.norm()) < 1e3


def test_checkpointing_gives_the_same_gradients(demo: DemoPaths) -> None:
    gradients = []
    for checkpointing in (False, True):
        model, modules = _adapted(demo.model, torch.float32)
        spec = job_spec({"gradientCheckpointing": checkpointing})
        torch.autograd.backward(objective_on(model, demo, spec)(0).loss_sum)
        assert model.unet.is_gradient_checkpointing == checkpointing
        gradients.append([module.lora_a.grad for module in modules])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        assert recomputed is not None
        assert torch.allclose(plain, recomputed, atol=1e-7)


def test_at_zero_terminal_snr_the_last_timestep_is_pure_noise_and_the_target_is_the_image(
    demo: DemoPaths,
) -> None:
    """v = sqrt(abar) e - sqrt(1 - abar) x_0 is -x_0 where abar is 0 (Salimans and Ho 2022)."""
    base = load_base_model(
        demo.model,
        variant=None,
        vae=None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        prediction="v_prediction",
        zero_terminal_snr=True,
    )
    latents, noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    last = torch.tensor([999])
    assert torch.equal(base.noise_scheduler.add_noise(latents, noise, last), noise)
    assert torch.equal(base.noise_scheduler.get_velocity(latents, noise, last), -latents)


def test_a_run_in_v_prediction_with_zero_terminal_snr_draws_samples(
    tmp_path: Path, demo: DemoPaths
) -> None:
    settings = (
        "spec.model.predictionType=v_prediction",
        "spec.model.zeroTerminalSnr=true",
        "spec.training.steps=2",
        "spec.validation={prompts: [a cat], inferenceSteps: 2}",
    )
    given = [part for setting in settings for part in ("--set", setting)]
    done = in_this_process([*arguments(tmp_path, demo), *given])
    assert done.exit_code == 0, done.output
    picture = Image.open(tmp_path / "out" / "samples" / "step-000002-0.png")
    assert int(np.ptp(np.asarray(picture.crop((0, 20, 64, 80))))) > 10
    [kohya] = (tmp_path / "out" / "adapter").glob("[!p]*.safetensors")
    with safe_open(kohya, framework="pt") as file:
        assert file.metadata()["modelspec.prediction_type"] == "v"
