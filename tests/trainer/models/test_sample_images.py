"""Samples are drawn with fixed seeds, with and without the adapter, and leave training alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline
from PIL import Image

from kubelora_api.spec import Adapter, Validation
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.lora.adapter import add_adapter
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.models.sample_images import LABEL_HEIGHT, draw_samples, side_by_side
from tests.trainer.fixtures.jobs import fill_up_projections, job_spec, objective_on, open_base

CATS = Validation(prompts=["a cat", "a rocket"], inference_steps=3, seed=9)


@pytest.fixture
def base(demo: DemoPaths) -> BaseModel:
    return open_base(demo.model)


def _halves(path: Path) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.asarray(Image.open(path))[LABEL_HEIGHT:]
    assert pixels.shape == (64, 128, 3)
    return pixels[:, :64], pixels[:, 64:]


def test_the_right_half_is_the_plain_pipelines_image_and_the_left_the_adapters(
    base: BaseModel, demo: DemoPaths, tmp_path: Path
) -> None:
    modules = add_adapter(base.unet, Adapter(rank=4), 0)
    fill_up_projections(modules, 0.3)
    paths = draw_samples(base, base.unet, CATS, tmp_path / "samples", 40, resolution=64)
    assert [path.name for path in paths] == ["step-000040-0.png", "step-000040-1.png"]
    assert sorted(tmp_path.rglob("*.*")) == sorted(paths)
    pipeline = StableDiffusionXLPipeline.from_pretrained(demo.model)
    assert isinstance(pipeline.scheduler, EulerDiscreteScheduler)
    for number, path in enumerate(paths):
        plain = pipeline(
            CATS.prompts[number],
            height=64,
            width=64,
            num_inference_steps=3,
            guidance_scale=5.0,
            generator=torch.Generator().manual_seed(9 + number),
        ).images[0]
        left, right = _halves(path)
        assert np.abs(right.astype(int) - np.asarray(plain).astype(int)).max() <= 1
        assert np.abs(left.astype(int) - right.astype(int)).mean() > 0.5


def test_samples_are_the_same_bytes_again(base: BaseModel, tmp_path: Path) -> None:
    fill_up_projections(add_adapter(base.unet, Adapter(rank=4), 0))
    first = draw_samples(base, base.unet, CATS, tmp_path / "a", 0, resolution=64)
    torch.rand(5)
    second = draw_samples(base, base.unet, CATS, tmp_path / "b", 0, resolution=64)
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]


def test_drawing_leaves_training_as_it_was(
    base: BaseModel, demo: DemoPaths, tmp_path: Path
) -> None:
    """Modes, gradients in place, random numbers, what trains, and the next loss."""
    modules = add_adapter(base.unet, Adapter(rank=4), 0)
    fill_up_projections(modules)
    objective = objective_on(base, demo, job_spec())
    base.unet.train()
    torch.autograd.backward(objective(0).loss_sum)
    parameters = [p for module in modules for p in (module.lora_a, module.lora_b)]
    buffers = [parameter.grad for parameter in parameters]
    values = [grad.clone() for grad in buffers if grad is not None]
    state, loss = torch.random.get_rng_state(), objective(1).loss_sum
    draw_samples(base, base.unet, CATS, tmp_path, 1, resolution=64)
    assert base.unet.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is b for p, b in zip(parameters, buffers, strict=True))
    assert len(values) == len(buffers)
    for parameter, value in zip(parameters, values, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, value)
    trainable = {id(p) for p in base.unet.parameters() if p.requires_grad}
    assert trainable == {id(p) for p in parameters}
    assert torch.equal(objective(1).loss_sum, loss)


def test_fp32_gradients_of_a_bf16_copy_outlast_drawing(demo: DemoPaths, tmp_path: Path) -> None:
    base = open_base(demo.model, torch.bfloat16)
    modules = add_adapter(base.unet, Adapter(rank=4), 0)
    fill_up_projections(modules)
    parameters = [p for module in modules for p in (module.lora_a, module.lora_b)]
    for parameter in parameters:
        parameter.data = parameter.data.bfloat16()
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    objective = objective_on(base, demo, job_spec())
    draw_samples(base, base.unet, CATS, tmp_path, 1, resolution=64)
    torch.autograd.backward(objective(0).loss_sum)
    assert {p.grad.dtype for p in parameters if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None and p.grad.any() for p in parameters)


def test_no_prompts_draw_nothing(base: BaseModel, tmp_path: Path) -> None:
    assert draw_samples(base, base.unet, Validation(), tmp_path / "x", 0, resolution=64) == []
    assert not (tmp_path / "x").exists()


def test_a_grid_puts_images_under_their_labels() -> None:
    images = [Image.new("RGB", (60, 40), "red"), Image.new("RGB", (60, 40), "blue")]
    grid = side_by_side(images, ("one", "two"))
    assert grid.size == (120, 40 + LABEL_HEIGHT)
    assert grid.getpixel((30, 40)) == (255, 0, 0)
    assert grid.getpixel((90, 40)) == (0, 0, 255)
    strip = np.asarray(grid)[:LABEL_HEIGHT]
    assert strip[:, :60].min() < 128
    assert strip[:, 60:].min() < 128
