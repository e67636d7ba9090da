"""Latents of a micro-step's images: read ahead, encoded by the VAE, kept where that is right."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from kubelora_trainer.base_model import BaseModel
from kubelora_trainer.dataset import Dataset, View
from kubelora_trainer.images import SizeConditions, TrainingImage
from kubelora_trainer.order import SampleDraw, SampleOrder

KEPT_LATENTS = 1024


class LatentSource:
    """Latents of any micro-step, a pure function of it."""

    def __init__(self, base: BaseModel, dataset: Dataset, order: SampleOrder) -> None:
        self._base, self._dataset, self._order = base, dataset, order
        self._moments: OrderedDict[tuple[int, bool], torch.Tensor] = OrderedDict()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")
        self._ahead: tuple[int, Future[list[TrainingImage | None]]] | None = None

    def close(self) -> None:
        """End the reading thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def of(self, micro_step: int, draws: Sequence[SampleDraw]) -> torch.Tensor:
        """One draw each from the VAE's posterior, scaled; fp32 (n, channels, h, w).

        draws: those of ``micro_step``, which all have one training size.
        """
        images = self._images(micro_step)
        return torch.stack(
            [self._latent(draw, image) for draw, image in zip(draws, images, strict=True)]
        )

    def sizes(self, draws: Sequence[SampleDraw]) -> list[SizeConditions]:
        """What the model is told of each draw's sizes."""
        return [self._dataset.view(draw).sizes for draw in draws]

    def _images(self, micro_step: int) -> list[TrainingImage | None]:
        """This micro-step's images; the next one's are read meanwhile."""
        ahead, self._ahead = self._ahead, None
        images = ahead[1].result() if ahead and ahead[0] == micro_step else self._read(micro_step)
        self._ahead = (micro_step + 1, self._reader.submit(self._read, micro_step + 1))
        return images

    def _read(self, micro_step: int) -> list[TrainingImage | None]:
        """Images of a micro-step; None where the latent is kept and no pixels are needed."""
        views = [self._dataset.view(draw) for draw in self._order.samples_of(micro_step)]
        return [
            None if _key(view) in self._moments else self._dataset.image(view) for view in views
        ]

    def _latent(self, draw: SampleDraw, image: TrainingImage | None) -> torch.Tensor:
        """A draw from the posterior, scaled; fp32 (channels, h, w)."""
        moments = self._moments_of(self._dataset.view(draw), image)
        mean, log_variance = moments.to(self._base.device).chunk(2)
        spread = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
        noise = normal(draw.posterior_seed, mean.shape).to(mean.device)
        return normalise_latents(mean + spread * noise, self._base)

    def _moments_of(self, view: View, image: TrainingImage | None) -> torch.Tensor:
        kept = self._moments.get(_key(view))
        if kept is not None:
            return kept
        moments = encode(self._base, image or self._dataset.image(view))
        if self._dataset.has_fixed_crop(view.sample):
            self._moments[_key(view)] = moments.cpu()
            if len(self._moments) > KEPT_LATENTS:
                self._moments.popitem(last=False)
        return moments


def _key(view: View) -> tuple[int, bool]:
    """What the latent of a fixed crop depends on."""
    return view.sample, view.mirrored


@torch.no_grad()
def encode(base: BaseModel, image: TrainingImage) -> torch.Tensor:
    """Mean and log variance of one image's latent, one above the other: (2 channels, h, w)."""
    pixels = image.pixels.to(base.device)[None]
    moments: torch.Tensor = base.vae.encode(pixels).latent_dist.parameters[0]
    return moments


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


def normal(seed: int, shape: torch.Size) -> torch.Tensor:
    """Standard normal numbers, drawn on the CPU: the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
