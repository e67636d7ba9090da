"""Latents of a micro-step's images: prefetched, encoded by the VAE, and cached where valid."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from kubelora_trainer.data.cropping import SizeConditions, TrainingImage
from kubelora_trainer.data.dataset import CENTER, ImageDataset, View
from kubelora_trainer.data.sampler import SampleDraw, SampleOrder
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.embedding_cache import Latent, LatentCache
from kubelora_trainer.utils.device import to_device

KEPT_LATENTS = 1024
"""Limit of latents in host memory, about 0.5 MB each at 1024 x 1024."""
_Read = TrainingImage | Latent
"""Pixels to be encoded, or a cached latent."""


@dataclass(frozen=True)
class Latents:
    """Latents of a micro-batch.

    Attributes:
        values: fp32 (n, channels, h, w).
        masks: fp32 (n, 1, h, w), the weight of each element in the loss; None if all count.
        mean: Returns the scaled mean of the posterior that the i-th latent is drawn from, fp32
            (channels, h, w); computed on each call.
    """

    values: torch.Tensor
    masks: torch.Tensor | None
    mean: Callable[[int], torch.Tensor]


class LatentSource:
    """A source of the latents of any micro-step, as a pure function of it."""

    def __init__(
        self,
        base: BaseModel,
        dataset: ImageDataset,
        order: SampleOrder,
        cache: LatentCache | None = None,
        after: Callable[[int], int] = lambda micro_step: micro_step + 1,
    ) -> None:
        """after: the micro-step whose images are read while one is at work."""
        self._base, self._dataset, self._order = base, dataset, order
        self._cache, self._after = cache, after
        self._kept: OrderedDict[View, Latent] = OrderedDict()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="images")
        self._ahead: tuple[int, Future[list[_Read]]] | None = None
        self.waited = 0.0
        """Seconds spent waiting for images so far."""

    def close(self) -> None:
        """Stop the reader thread."""
        self._reader.shutdown(wait=True, cancel_futures=True)

    def of(self, micro_step: int, draws: Sequence[SampleDraw]) -> Latents:
        """Draw from the VAE's posterior for each sample; returns scaled latents with masks.

        draws: those of ``micro_step``, which all have one training size.
        """
        read = zip(draws, self._images(micro_step), strict=True)
        kept = [self._latent_of(self._dataset.view(draw), image) for draw, image in read]
        values = [self._drawn(draw, latent) for draw, latent in zip(draws, kept, strict=True)]

        def mean(place: int) -> torch.Tensor:
            return normalise_latents(kept[place].moments.float().chunk(2)[0], self._base)

        return Latents(torch.stack(values), _stacked_masks(kept, self._base.device), mean)

    def sizes(self, draws: Sequence[SampleDraw]) -> list[SizeConditions]:
        """Return the size conditioning of each draw."""
        return [self._dataset.view(draw).sizes for draw in draws]

    def ensure_cached(self, view: View) -> None:
        """Encode the view and store its moments, unless they are stored or must not be."""
        cache = self._cache_for(view)
        if cache is not None and cache.get(view) is None:
            cache.put(view, self._encoded(self._dataset.image(view)))

    def _cache_for(self, view: View) -> LatentCache | None:
        return self._cache if self._dataset.has_fixed_crop(view.sample) else None

    def _images(self, micro_step: int) -> list[_Read]:
        """Return the images of this micro-step, and start to read the next ones."""
        begun = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        images = ahead[1].result() if ahead and ahead[0] == micro_step else self._read(micro_step)
        self.waited += time.perf_counter() - begun
        following = self._after(micro_step)
        self._ahead = (following, self._reader.submit(self._read, following))
        return images

    def _read(self, micro_step: int) -> list[_Read]:
        views = [self._dataset.view(draw) for draw in self._order.samples_of(micro_step)]
        return [self._read_view(view) for view in views]

    def _read_view(self, view: View) -> _Read:
        """Return the latent if it is cached in memory or on disk, else the pixels."""
        kept = self._kept.get(_key(view))
        cache = self._cache_for(view)
        if kept is None and cache is not None:
            kept = cache.get(view)
        return self._dataset.image(view) if kept is None else kept

    def _drawn(self, draw: SampleDraw, latent: Latent) -> torch.Tensor:
        """Draw from the posterior and scale; returns fp32 (channels, h, w)."""
        mean, log_variance = to_device(latent.moments, self._base.device).chunk(2)
        # The clamp is that of diffusers' DiagonalGaussianDistribution.
        spread = torch.exp(0.5 * log_variance.clamp(-30.0, 20.0))
        noise = to_device(normal(draw.posterior_seed, mean.shape), mean.device)
        return normalise_latents(mean + spread * noise, self._base)

    def _latent_of(self, view: View, read: _Read) -> Latent:
        kept = self._kept.get(_key(view))
        if kept is not None:
            return kept
        latent = self._encoded(read) if isinstance(read, TrainingImage) else read
        if self._dataset.has_fixed_crop(view.sample):
            if self._cache is not None and isinstance(read, TrainingImage):
                self._cache.put(view, latent)
            self._kept[_key(view)] = Latent(latent.moments.cpu(), latent.mask)
            if len(self._kept) > KEPT_LATENTS:
                self._kept.popitem(last=False)
        return latent

    def _encoded(self, image: TrainingImage) -> Latent:
        return Latent(encode(self._base, image), image.mask)


def _stacked_masks(latents: Sequence[Latent], device: torch.device) -> torch.Tensor | None:
    """Stack the masks of a micro-batch; an image without one counts everywhere."""
    if all(latent.mask is None for latent in latents):
        return None
    masks = [
        torch.ones(1, *latent.moments.shape[1:]) if latent.mask is None else latent.mask
        for latent in latents
    ]
    return to_device(torch.stack(masks), device)


def _key(view: View) -> View:
    """Return the view of a fixed crop, wherever in its reach the cut was drawn to lie."""
    return replace(view, across=CENTER, down=CENTER)


@torch.no_grad()
def encode(base: BaseModel, image: TrainingImage) -> torch.Tensor:
    """Encode one image; returns mean and log variance, concatenated: (2 channels, h, w)."""
    pixels = to_device(image.pixels, base.device)[None]
    moments: torch.Tensor = base.vae.encode(pixels).latent_dist.parameters[0]
    return moments


def normalise_latents(latents: torch.Tensor, base: BaseModel) -> torch.Tensor:
    """Scale latents to what the UNet was trained on; some VAEs define mean and deviation too."""
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
    """Draw standard normal numbers on the CPU, so that they are equal on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
