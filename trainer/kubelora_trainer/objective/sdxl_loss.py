"""The SDXL training objective: UNet inputs and loss of one micro-batch.

    x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) e,   loss = mean (UNet(x_t, t, text, sizes) - e)^2

(Ho et al. 2020, eq. 14; micro-conditioning on sizes: Podell et al. 2023, sec. 2.2.)
`loss_weighting.py` has the weights of samples and pixels. There is no autocast: the UNet already is
in its compute dtype, while latents, time ids, noise and the loss are fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from kubelora_api.spec import JobSpec
from kubelora_trainer.data.cropping import SizeConditions
from kubelora_trainer.data.dataset import ImageDataset
from kubelora_trainer.data.sampler import ALL_MICRO_STEPS, RankShare, SampleDraw
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.embedding_cache import NO_CACHE, DataCache
from kubelora_trainer.objective.latents import LatentSource, normal
from kubelora_trainer.objective.lora_dropout import AdapterDropout
from kubelora_trainer.objective.loss_weighting import mean_errors, timestep_weights
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts, ignore
from kubelora_trainer.objective.text_embeddings import TextConditions
from kubelora_trainer.utils.device import to_device
from kubelora_trainer.utils.errors import InterruptedRunError


@dataclass(frozen=True)
class MicroBatchLoss:
    """Loss of one micro-batch.

    Attributes:
        loss_sum: fp32 scalar, the SUM over samples of each one's weighted mean squared error. A
            window accumulates its gradient, and then divides by the number of samples seen.
        samples: Number of samples.
        losses: fp32 (n), the same per sample, without a graph.
    """

    loss_sum: torch.Tensor
    samples: int
    losses: torch.Tensor


@dataclass(frozen=True)
class MicroBatch:
    """Inputs and target of the UNet; the first dimension is the samples.

    Attributes:
        noisy: fp32 (n, 4, h, w).
        target: fp32 (n, 4, h, w).
        timesteps: int64 (n).
        text: (n, 77, channels).
        pooled: (n, channels).
        time_ids: fp32 (n, 6).
        weights: fp32 (n), the weight of each sample's loss.
        masks: fp32 (n, 1, h, w), the weight of each element in it; None if all count.
    """

    noisy: torch.Tensor
    target: torch.Tensor
    timesteps: torch.Tensor
    text: torch.Tensor
    pooled: torch.Tensor
    time_ids: torch.Tensor
    weights: torch.Tensor
    masks: torch.Tensor | None = None


class SdxlObjective:
    """The loss of any micro-step, as a pure function of the micro-step and the adapter's weights.

    forward: the callable that runs the UNet: the module itself, or its compiled version.
    observer: the callable that receives the facts of every micro-batch.
    """

    def __init__(
        self,
        base: BaseModel,
        dataset: ImageDataset,
        spec: JobSpec,
        cache: DataCache = NO_CACHE,
        share: RankShare = ALL_MICRO_STEPS,
    ) -> None:
        """share: what this rank does of the work; any micro-step can be asked for all the same."""
        self._base = base
        self._dataset = dataset
        self._training = spec.training
        self.order = dataset.order(spec.training.seed, spec.training.batch_size)
        self._cache = cache
        self._text = TextConditions(base, cache.text, trained=bool(spec.adapter.text_encoders))
        self._share = share
        accumulation = spec.training.gradient_accumulation
        self._latents = LatentSource(
            base, dataset, self.order, cache.latents, lambda m: share.after(m, accumulation)
        )
        self._dropout = AdapterDropout(base.unet, *base.text_encoders)
        self.forward: Callable[..., Any] = base.unet
        self.observer: Callable[[MicroBatchFacts], None] = ignore
        if spec.training.gradient_checkpointing:
            base.unet.enable_gradient_checkpointing()

    def __call__(self, micro_step: int) -> MicroBatchLoss:
        """Run a micro-step's forward pass (from 0). Call ``backward()`` on its ``loss_sum``."""
        self._dropout.arm(self.order.samples_of(micro_step))
        batch = self.batch(micro_step)
        dtype = self._base.unet.conv_in.weight.dtype
        predicted = self.forward(
            batch.noisy.to(dtype),
            batch.timesteps,
            batch.text.to(dtype),
            added_cond_kwargs={"text_embeds": batch.pooled.to(dtype), "time_ids": batch.time_ids},
            return_dict=False,
        )[0]
        errors = functional.mse_loss(predicted.float(), batch.target, reduction="none")
        losses = mean_errors(errors, batch.masks) * batch.weights
        return MicroBatchLoss(losses.sum(), len(losses), losses.detach())

    def data_wait(self) -> float:
        """Return the seconds spent waiting for images so far."""
        return self._latents.waited

    def close(self) -> None:
        """Stop the reader thread."""
        self._latents.close()

    def fill_cache(self, stop: Callable[[], bool], tick: Callable[[int, int], None]) -> None:
        """Compute this rank's share of the cache; tick gets (done, total).

        Raises InterruptedRunError if ``stop`` returns True; entries computed until then are kept.
        """
        work: list[Callable[[], object]] = []
        if self._cache.text:
            captions = self._dataset.all_captions()
            work += [partial(self._text.ensure_cached, caption) for caption in captions]
        if self._cache.latents:
            views = self._dataset.fixed_views()
            work += [partial(self._latents.ensure_cached, view) for view in views]
        work = work[self._share.rank :: self._share.size]
        for done, one in enumerate(work):
            if stop():
                raise InterruptedRunError(
                    f"stopped while the cache was filled: {done} of {len(work)} entries are kept; "
                    "the same command continues from there"
                )
            if not self._cache.writable:
                return  # further results could not be stored
            one()
            tick(done + 1, len(work))

    def batch(self, micro_step: int) -> MicroBatch:
        """Build everything that a micro-step feeds to the UNet, on its device.

        Text embeddings have a graph if their encoders are trained; nothing else has.
        """
        draws = self.order.samples_of(micro_step)
        device, schedule = self._base.device, self._base.noise_scheduler
        drawn = self._latents.of(micro_step, draws)
        latents = drawn.values
        noises = torch.stack([self._noise(draw, latents.shape[1:]) for draw in draws])
        noise = to_device(noises, device)
        levels = schedule.config.num_train_timesteps
        timesteps = [int(draw.timestep * levels) for draw in draws]
        steps = to_device(torch.tensor(timesteps), device)
        prediction = schedule.config.prediction_type
        if prediction == "v_prediction":
            target = schedule.get_velocity(latents, noise, steps)
        else:
            target = noise
        text, pooled = self._text.of([self._dataset.caption(draw) for draw in draws])
        self.observer(
            MicroBatchFacts(
                micro_step=micro_step,
                samples=tuple(draw.sample for draw in draws),
                timesteps=tuple(timesteps),
                noise=tuple(noises.flatten(1)[:, 0].tolist()),
                latent=drawn.mean,
                finite={
                    "latent": _finite_samples(latents),
                    "caption's embedding": _finite_samples(text) & _finite_samples(pooled),
                },
            )
        )
        of_sources = to_device(
            torch.tensor([self._dataset.loss_weight(draw) for draw in draws]), device
        )
        of_timesteps = timestep_weights(self._training, schedule.alphas_cumprod, steps, prediction)
        return MicroBatch(
            noisy=schedule.add_noise(latents, noise, steps),
            target=target,
            timesteps=steps,
            text=text,
            pooled=pooled,
            weights=of_sources * of_timesteps,
            masks=drawn.masks,
            time_ids=to_device(
                torch.tensor([time_ids(sizes) for sizes in self._latents.sizes(draws)]), device
            ),
        )

    def _noise(self, draw: SampleDraw, shape: torch.Size) -> torch.Tensor:
        """Draw standard normal noise of a latent; with offset noise, plus one number per channel.

        (N. Guttenberg 2023, "Diffusion with offset noise".) The noise that is added is also the
        target.
        """
        noise = normal(draw.noise_seed, shape)
        offset = self._training.noise_offset
        if offset > 0:
            noise = noise + offset * normal(draw.offset_seed, torch.Size((shape[0], 1, 1)))
        return noise


def _finite_samples(values: torch.Tensor) -> torch.Tensor:
    """Return for each sample, on the device, whether all of its values are finite."""
    return values.detach().isfinite().flatten(1).all(dim=1)


def time_ids(sizes: SizeConditions) -> tuple[float, ...]:
    """Return SDXL's six size conditions: original (h, w), crop (top, left), target (h, w)."""
    return tuple(
        float(size) for size in sizes.original_size + sizes.crop_top_left + sizes.target_size
    )
