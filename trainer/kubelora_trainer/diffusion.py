"""The training objective of SDXL: what one micro-batch asks of the UNet, and how far off it is.

    x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) e,   loss = mean (UNet(x_t, t, text, sizes) - e)^2

(Ho et al. 2020, eq. 14; micro-conditioning on sizes: Podell et al. 2023, sec. 2.2.) No autocast:
the UNet is in its compute dtype already; latents, time ids, noise and the loss are fp32.
"""

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch.nn import functional

from kubelora_api.spec import JobSpec
from kubelora_trainer.base_model import BaseModel
from kubelora_trainer.dataset import Dataset
from kubelora_trainer.images import TrainingImage
from kubelora_trainer.order import SampleDraw, SampleOrder
from kubelora_trainer.text import TextConditions

CACHED_LATENTS = 1024


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of one micro-batch.

    loss_sum: fp32 scalar, the SUM over samples of each sample's mean squared error; its gradient
    is what a window adds up before it is divided by the samples seen.
    """

    loss_sum: torch.Tensor
    samples: int


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of the UNet and what it should answer, first dimension the samples.

    noisy, target: fp32 (n, 4, h, w). timesteps: int64 (n). text: (n, 77, channels).
    pooled: (n, channels). time_ids: fp32 (n, 6).
    """

    noisy: torch.Tensor
    target: torch.Tensor
    timesteps: torch.Tensor
    text: torch.Tensor
    pooled: torch.Tensor
    time_ids: torch.Tensor


class SdxlObjective:
    """Loss of any micro-step, a pure function of the micro-step and of the adapter's weights."""

    def __init__(self, base: BaseModel, dataset: Dataset, spec: JobSpec) -> None:
        self._base = base
        self._dataset = dataset
        self._dropout = spec.dataset.caption_dropout
        self.order = SampleOrder(spec.training.seed, len(dataset), spec.training.batch_size)
        self._text = TextConditions(base)
        self._moments: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")
        self._ahead: tuple[int, Future[list[TrainingImage]]] | None = None
        if spec.training.gradient_checkpointing:
            base.unet.enable_gradient_checkpointing()

    def __call__(self, micro_step: int) -> MicroBatchLoss:
        """Forward pass of a micro-step (from 0). Call ``backward()`` on its ``loss_sum``."""
        batch = self.batch(micro_step)
        unet = self._base.unet
        dtype = unet.conv_in.weight.dtype
        predicted = unet(
            batch.noisy.to(dtype),
            batch.timesteps,
            batch.text.to(dtype),
            added_cond_kwargs={"text_embeds": batch.pooled.to(dtype), "time_ids": batch.time_ids},
            return_dict=False,
        )[0]
        errors = functional.mse_loss(predicted.float(), batch.target, reduction="none")
        return MicroBatchLoss(errors.mean(dim=(1, 2, 3)).sum(), len(batch.timesteps))

    def close(self) -> None:
        """End the reading thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    @torch.no_grad()
    def batch(self, micro_step: int) -> MicroBatch:
        """Everything that a micro-step feeds to the UNet, on its device."""
        draws = self.order.samples_of(micro_step)
        images = self._images(micro_step)
        device, schedule = self._base.device, self._base.noise_scheduler
        latents = torch.stack(
            [self._latent(draw, image) for draw, image in zip(draws, images, strict=True)]
        )
        noise = torch.stack([_normal(draw.noise_seed, latents.shape[1:]) for draw in draws])
        noise = noise.to(device)
        levels = schedule.config.num_train_timesteps
        steps = torch.tensor([int(draw.timestep * levels) for draw in draws], device=device)
        if schedule.config.prediction_type == "v_prediction":
            target = schedule.get_velocity(latents, noise, steps)
        else:
            target = noise
        text, pooled = self._text.of([self._caption(draw) for draw in draws])
        return MicroBatch(
            noisy=schedule.add_noise(latents, noise, steps),
            target=target,
            timesteps=steps,
            text=text,
            pooled=pooled,
            time_ids=torch.tensor([time_ids(image) for image in images], device=device),
        )

    def _caption(self, draw: SampleDraw) -> str:
        dropped = draw.caption < self._dropout
        return "" if dropped else self._dataset.samples[draw.sample].caption

    def _images(self, micro_step: int) -> list[TrainingImage]:
        """This micro-step's images; the next one's are read meanwhile."""
        ahead, self._ahead = self._ahead, None
        images = ahead[1].result() if ahead and ahead[0] == micro_step else self._read(micro_step)
        self._ahead = (micro_step + 1, self._reader.submit(self._read, micro_step + 1))
        return images

    def _read(self, micro_step: int) -> list[TrainingImage]:
        draws = self.order.samples_of(micro_step)
        return [self._dataset.image(draw.sample, draw.across, draw.down) for draw in draws]

    def _latent(self, draw: SampleDraw, image: TrainingImage) -> torch.Tensor:
        """A draw from the VAE's posterior, scaled; fp32 (4, h, w)."""
        moments = self._moments.get(draw.sample)
        if moments is None:
            moments = self._encode(image)
            if self._dataset.has_fixed_crop(draw.sample):
                self._moments[draw.sample] = moments.cpu()
                if len(self._moments) > CACHED_LATENTS:
                    self._moments.popitem(last=False)
        mean, log_variance = moments.to(self._base.device).chunk(2)
        spread = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
        noise = _normal(draw.posterior_seed, mean.shape).to(mean.device)
        return normalise_latents(mean + spread * noise, self._base)

    def _encode(self, image: TrainingImage) -> torch.Tensor:
        """Mean and log variance of one image's latent, one above the other: (8, h, w)."""
        pixels = image.pixels.to(self._base.device)[None]
        moments: torch.Tensor = self._base.vae.encode(pixels).latent_dist.parameters[0]
        return moments


def time_ids(image: TrainingImage) -> tuple[float, ...]:
    """SDXL's six size conditions: original (h, w), crop (top, left), target (h, w)."""
    return tuple(
        float(size) for size in image.original_size + image.crop_top_left + image.target_size
    )


def normalise_latents(latents: torch.Tensor, base: BaseModel) -> torch.Tensor:
    """Latents at the scale that the UNet was trained on; some VAEs give mean and deviation too."""
    config = base.vae.config
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and deviation is not None:
        shape = (-1, 1, 1)
        latents = (latents - latents.new_tensor(mean).view(shape)) / latents.new_tensor(
            deviation
        ).view(shape)
    scaled: torch.Tensor = latents * config.scaling_factor
    return scaled


def _normal(seed: int, shape: torch.Size) -> torch.Tensor:
    """Standard normal numbers, drawn on the CPU: the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
