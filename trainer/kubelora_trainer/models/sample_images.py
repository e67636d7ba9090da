"""Sample images with fixed seeds, with and without the adapter, side by side.

The same seed gives the same initial noise at every step of a run, so any difference between two
grids comes from the adapter. Sampling leaves the training state unchanged.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import diffusers
import torch
from diffusers import UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from peft.tuners.lora import LoraLayer
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from kubelora_api.spec import Validation
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.utils.atomic_io import write_file, writing_to

if TYPE_CHECKING:
    from diffusers import StableDiffusionXLPipeline

LABEL_HEIGHT = 18
"""Pixels: a line of Pillow's default font and a margin."""
LABELS = ("with adapter", "without")


def draw_samples(
    base: BaseModel,
    unet: UNet2DConditionModel,
    validation: Validation,
    folder: Path,
    step: int,
    *,
    resolution: int,
    stop: Callable[[], bool] = lambda: False,
) -> list[Path]:
    """Write one PNG per prompt to ``folder``: left with the adapter, right without it.

    Args:
        base: The frozen pipeline.
        unet: The UNet with the adapter.
        validation: The job's ``spec.validation``.
        folder: Directory of the images.
        step: Optimizer steps done, part of the file name.
        resolution: Edge length in pixels.
        stop: Polled between denoising steps; if it returns True, nothing is written.

    Returns:
        The files written; empty if stopped.

    Raises:
        OutputError: A file cannot be written.
    """
    if not validation.prompts:
        return []

    def draw_all() -> list[Image.Image]:
        return [
            _draw(pipeline, base, validation, number, resolution, stop)
            for number in range(len(validation.prompts))
        ]

    models = (unet, *base.text_encoders)
    try:
        with _undisturbed(models):
            pipeline = _pipeline(base, unet)
            left = draw_all()
            _switch_adapters(models, on=False)
            try:
                right = draw_all()
            finally:
                _switch_adapters(models, on=True)
    except _InterruptedSamplingError:
        return []
    grids = [side_by_side(pair, LABELS) for pair in zip(left, right, strict=True)]
    return [_save(grid, folder / f"step-{step:06d}-{n}.png") for n, grid in enumerate(grids)]


class _InterruptedSamplingError(Exception):
    """Leaves the denoising loop when the run is to stop."""


def _pipeline(base: BaseModel, unet: UNet2DConditionModel) -> "StableDiffusionXLPipeline":
    from diffusers import StableDiffusionXLPipeline  # a slow import, unneeded before step one

    config = base.sampling_scheduler
    kind = getattr(diffusers, str(config.get("_class_name")), diffusers.EulerDiscreteScheduler)
    pipeline = StableDiffusionXLPipeline(
        vae=base.vae,
        text_encoder=base.text_encoders[0],
        text_encoder_2=base.text_encoders[1],
        tokenizer=base.tokenizers[0],
        tokenizer_2=base.tokenizers[1],
        unet=unet,
        scheduler=kind.from_config(config),
        force_zeros_for_empty_prompt=base.force_zeros_for_empty_prompt,
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def _draw(
    pipeline: "StableDiffusionXLPipeline",
    base: BaseModel,
    validation: Validation,
    number: int,
    resolution: int,
    stop: Callable[[], bool],
) -> Image.Image:
    """Sample one image; decode it here, because the VAE is fp32 whatever the UNet's dtype."""

    def ask(
        pipeline: object, step: int, level: Tensor, kept: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if stop():
            raise _InterruptedSamplingError
        return kept

    latents = pipeline(
        prompt=validation.prompts[number],
        height=resolution,
        width=resolution,
        num_inference_steps=validation.inference_steps,
        guidance_scale=validation.guidance_scale,
        generator=torch.Generator().manual_seed(validation.seed + number),
        output_type="latent",
        callback_on_step_end=ask,
    ).images
    config = base.vae.config
    scaled = latents.float() / config.scaling_factor
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and deviation is not None:
        shape = (1, -1, 1, 1)
        scaled = scaled * scaled.new_tensor(deviation).view(shape)
        scaled = scaled + scaled.new_tensor(mean).view(shape)
    pixels = base.vae.decode(scaled).sample
    image: Image.Image = VaeImageProcessor().postprocess(pixels, output_type="pil")[0]
    return image


def side_by_side(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Place images of one size in a row, each under its label."""
    width, height = images[0].size
    grid = Image.new("RGB", (width * len(images), height + LABEL_HEIGHT), "white")
    pen = ImageDraw.Draw(grid)
    font = ImageFont.load_default(size=11)
    for column, (image, label) in enumerate(zip(images, labels, strict=True)):
        pen.text((column * width + 4, 2), label, fill="black", font=font)
        grid.paste(image, (column * width, LABEL_HEIGHT))
    return grid


@contextmanager
def _undisturbed(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restore train/eval mode, requires_grad and the random number generators afterwards."""
    training = [model.training for model in models]
    trained = [p for model in models for p in model.parameters() if p.requires_grad]
    for model in models:
        model.eval()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for model, mode in zip(models, training, strict=True):
                model.train(mode)
            for parameter in trained:
                parameter.requires_grad_(True)


def _switch_adapters(models: Sequence[nn.Module], *, on: bool) -> None:
    for model in models:
        for layer in model.modules():
            if isinstance(layer, LoraLayer):
                layer.enable_adapters(on)


def _save(image: Image.Image, path: Path) -> Path:
    encoded = io.BytesIO()
    image.save(encoded, format="PNG")
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, encoded.getvalue())
    return path
