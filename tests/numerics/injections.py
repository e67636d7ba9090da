"""Faults: each takes a run's real parts and gives them back with one thing wrong.

They wrap or replace parts from outside, as a mistake in the product or in its environment would
change them; the product has no switch for any of this. Steps are counted from 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.data.cropping import TrainingImage
from kubelora_trainer.data.sampler import SampleDraw, SampleOrder
from kubelora_trainer.distributed.process_group import ReducedWindow
from kubelora_trainer.distributed.reduce_payload import ControlFlags
from kubelora_trainer.lora.factor_names import MAGNITUDE
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective import latents
from kubelora_trainer.optim import lr_schedule as rates
from kubelora_trainer.optim.adamw import FlatAdamW
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, GroupRange
from kubelora_trainer.training import loop
from kubelora_trainer.training.loop import MicroBatchOutput, Parts
from tests.numerics.bench import Injection, TrainedError

Objective = Callable[[int], MicroBatchOutput]


@dataclass(frozen=True)
class Loss:
    """A micro-batch's loss as an injection changed it."""

    loss_sum: Tensor
    samples: int


def ranges(buffers: AdapterBuffers, factor: str) -> list[GroupRange]:
    """The ranges of all groups of a factor (``lora_A``)."""
    return [group for group in buffers.groups if group.name.endswith(factor)]


def window_of(parts: Parts, micro_step: int) -> tuple[int, int, int]:
    """Optimizer step (from 1) of a micro-step, its place in the window, the window's length."""
    step = micro_step // parts.plan.accumulation
    window = parts.plan.window(step)
    return step + 1, micro_step - window.start, len(window)


def _with_objective(wrap: Callable[[Parts, int, MicroBatchOutput], MicroBatchOutput]) -> Injection:
    """An injection that changes what the objective gives."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective
        return replace(parts, objective=lambda micro: wrap(parts, micro, real(micro)))

    return inject


def scaled_loss(factor: float, from_step: int = 1) -> Injection:
    """The loss is multiplied by ``factor``."""

    def wrap(parts: Parts, micro_step: int, batch: MicroBatchOutput) -> MicroBatchOutput:
        if window_of(parts, micro_step)[0] < from_step:
            return batch
        return Loss(batch.loss_sum * factor, batch.samples)

    return _with_objective(wrap)


def scaled_micro_batch(factor: float, step: int) -> Injection:
    """The loss of one micro-batch, the first of window ``step``, is multiplied by ``factor``."""

    def wrap(parts: Parts, micro_step: int, batch: MicroBatchOutput) -> MicroBatchOutput:
        if window_of(parts, micro_step)[:2] != (step, 0):
            return batch
        return Loss(batch.loss_sum * factor, batch.samples)

    return _with_objective(wrap)


def non_finite(value: float, step: int) -> Injection:
    """One micro-batch's loss is NaN or infinite, and so are its gradients."""
    return scaled_micro_batch(value, step)


def dominant_term(last: bool, factor: float = 1000.0) -> Injection:
    """One micro-step of each window adds a term whose gradient is ``factor`` times the data's.

    The term is linear in B·A of each module, so its gradients obey the chain rule as any loss of
    the model's output does.
    """

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective
        term = _Term(parts.buffers, factor)

        def objective(micro_step: int) -> MicroBatchOutput:
            batch = real(micro_step)
            _, place, length = window_of(parts, micro_step)
            if place != (length - 1 if last else 0):
                return batch
            return Loss(batch.loss_sum + term(batch), batch.samples)

        return replace(parts, objective=objective)

    return inject


class _Term:
    """sum over modules of c·<R, B·A>, R fixed and random, c set by the first window's gradient."""

    def __init__(self, buffers: AdapterBuffers, factor: float) -> None:
        self._factor = factor
        by_module: dict[str, dict[str, torch.nn.Parameter]] = {}
        for slot in buffers.slots:
            name = slot.factor.name.rpartition(".")[2]
            by_module.setdefault(slot.factor.module, {})[name] = slot.factor.parameter
        generator = torch.Generator().manual_seed(5)
        self._pairs = [
            (pair["lora_B"], pair["lora_A"], _direction(pair, generator))
            for pair in by_module.values()
        ]
        self._scale: float | None = None

    def __call__(self, batch: MicroBatchOutput) -> Tensor:
        linear = torch.stack([(b.float() @ a.float() * r).sum() for b, a, r in self._pairs]).sum()
        if self._scale is None:
            ups = [b for b, _, _ in self._pairs]
            data = torch.autograd.grad(batch.loss_sum, ups, retain_graph=True)
            own = torch.autograd.grad(linear, ups, retain_graph=True)
            self._scale = self._factor * float(_norm(data) / _norm(own))
        scaled: Tensor = linear * self._scale
        return scaled


def _direction(pair: dict[str, torch.nn.Parameter], generator: torch.Generator) -> Tensor:
    outputs, inputs = pair["lora_B"].shape[0], pair["lora_A"].shape[1]
    return torch.randn(outputs, inputs, generator=generator)


def _norm(tensors: tuple[Tensor, ...]) -> Tensor:
    norm: Tensor = torch.stack([t.float().norm() for t in tensors]).norm()
    return norm


@contextmanager
def one_draw() -> Iterator[None]:
    """Every sample is drawn at one timestep with one noise: gradients of one direction."""
    real = SampleOrder.samples_of

    def coherent(order: SampleOrder, micro_step: int) -> tuple[SampleDraw, ...]:
        return tuple(
            replace(draw, timestep=0.5, noise_seed=7, posterior_seed=7)
            for draw in real(order, micro_step)
        )

    with patch.object(SampleOrder, "samples_of", coherent):
        yield


@contextmanager
def one_timestep() -> Iterator[None]:
    """The timestep is drawn once and for all."""
    real = SampleOrder.samples_of

    def stuck(order: SampleOrder, micro_step: int) -> tuple[SampleDraw, ...]:
        return tuple(replace(draw, timestep=0.5) for draw in real(order, micro_step))

    with patch.object(SampleOrder, "samples_of", stuck):
        yield


def second_moment_in(dtype: torch.dtype) -> Injection:
    """The optimizer keeps its second moment in ``dtype``."""

    def inject(parts: Parts) -> Parts:
        def after(optimizer: "WrappedOptimizer") -> None:
            moment = optimizer.second_moment
            assert moment is not None
            moment.copy_(moment.to(dtype))

        return replace(parts, optimizer=WrappedOptimizer(parts, after=after))

    return inject


def outliers(factor: float, dropped: float = 1.0, from_step: int = 1) -> Injection:
    """One element of each 256 has ``factor`` times its gradient, as the optimizer gets it.

    From ``from_step`` on all others have ``dropped`` times theirs.
    """

    def inject(parts: Parts) -> Parts:
        gradient = parts.buffers.gradient
        largest = torch.zeros(parts.buffers.numel, dtype=torch.bool, device=gradient.device)
        for slot in parts.buffers.slots:
            largest[slot.start : slot.stop : 256] = True
        begun = torch.where(largest, factor, 1.0)
        later = torch.where(largest, factor, dropped)

        def before(optimizer: WrappedOptimizer) -> None:
            gradient[: len(begun)].mul_(later if optimizer.steps + 1 >= from_step else begun)

        return replace(parts, optimizer=WrappedOptimizer(parts, before=before))

    return inject


class WrappedOptimizer:
    """The real optimizer, with something done to its step."""

    def __init__(
        self,
        parts: Parts,
        *,
        before: Callable[["WrappedOptimizer"], None] = lambda optimizer: None,
        after: Callable[["WrappedOptimizer"], None] = lambda optimizer: None,
    ) -> None:
        self._real, self._before, self._after = parts.optimizer, before, after
        self.steps = 0

    def step(self, learning_rate: float, non_finite: Tensor) -> None:
        self._before(self)
        self._real.step(learning_rate, non_finite)
        self.steps += 1
        self._after(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def unscaled(parts: Parts) -> Parts:
    """fp16 gradients without a scaled loss."""
    assert parts.scaler is not None
    parts.scaler.scale.fill_(1.0)
    return replace(parts, scaler=None)


class _Deaf:
    """A gang whose exchange of one step brings nothing back to this rank's gradient."""

    def __init__(self, parts: Parts, step: int) -> None:
        self._parts, self._real, self._step = parts, parts.process_group, step

    def exchange(
        self,
        buffers: AdapterBuffers,
        position: RunPosition,
        asked: ControlFlags,
        sums: Sequence[Tensor],
    ) -> ReducedWindow:
        own = buffers.gradient.clone()
        exchanged = self._real.exchange(buffers, position, asked, sums)
        if position.step + 1 == self._step:
            buffers.gradient.copy_(own)
        return exchanged

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def keeps_its_own_gradient(step: int) -> Injection:
    """In one step this rank does not take over what the ranks have summed."""
    return lambda parts: replace(parts, process_group=_Deaf(parts, step))


def ends_before(step: int) -> Injection:
    """The run is interrupted when window ``step`` begins."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective

        def objective(micro_step: int) -> MicroBatchOutput:
            if window_of(parts, micro_step)[0] >= step:
                raise TrainedError("interrupted")
            return real(micro_step)

        return replace(parts, objective=objective)

    return inject


@contextmanager
def optimizer_not_loaded() -> Iterator[None]:
    """A resume that leaves the optimizer as new."""
    with patch.object(FlatAdamW, "load", lambda *arguments: None):
        yield


def optimizer_made_anew(parts: Parts) -> Parts:
    """What the resume has restored and checked is given up: an optimizer made once more."""
    anew = {name: torch.zeros_like(state) for name, state in parts.optimizer.tensors().items()}
    parts.optimizer.load(anew, {})
    return parts


@contextmanager
def plain_images_encode_to_zero() -> Iterator[None]:
    """The VAE gives nothing for images of a single colour."""
    real = latents.encode

    def encode(base: BaseModel, image: TrainingImage) -> Tensor:
        moments = real(base, image)
        return (
            torch.zeros_like(moments) - 30.0 * _variance_half(moments) if _plain(image) else moments
        )

    with patch.object(latents, "encode", encode):
        yield


@contextmanager
def latents_not_scaled() -> Iterator[None]:
    """Latents reach the model as the VAE gives them: 1 / 0.13025 times too large with SDXL's."""
    real = latents.normalise_latents
    with patch.object(latents, "normalise_latents", lambda z, base: real(z, base) / 0.13025):
        yield


def _plain(image: TrainingImage) -> bool:
    return float(image.pixels.std()) < 1e-3


def _variance_half(moments: Tensor) -> Tensor:
    """1 where the log variances stand, so that they are -30 there: the posterior is a point."""
    half = torch.zeros_like(moments)
    half[len(moments) // 2 :] = 1.0
    return half


def gradients_through(dtype: torch.dtype) -> Injection:
    """The finished gradient takes a way through ``dtype``, as a cast or a communication hook."""

    def inject(parts: Parts) -> Parts:
        buffers = parts.buffers
        normalise = buffers.normalise

        def cast(samples: int) -> None:
            normalise(samples)
            buffers.gradient.copy_(buffers.gradient.to(dtype))

        buffers.normalise = cast  # type: ignore[method-assign]
        return parts

    return inject


def scaled_element(factor: float, step: int) -> Injection:
    """One element of the finished gradient is multiplied, as by bits of its exponent that flip."""

    def inject(parts: Parts) -> Parts:
        buffers, done = parts.buffers, 0
        normalise = buffers.normalise
        place = ranges(buffers, "lora_B")[0].start

        def flip(samples: int) -> None:
            nonlocal done
            normalise(samples)
            done += 1
            if done == step:
                buffers.gradient[place] *= factor

        buffers.normalise = flip  # type: ignore[method-assign]
        return parts

    return inject


def never_zeroed(parts: Parts) -> Parts:
    """The accumulator keeps the last window's gradient."""
    parts.buffers.zero_gradient = lambda: None  # type: ignore[method-assign]
    return parts


def lost_micro_step(parts: Parts) -> Parts:
    """The first micro-step of each window reaches lora_B, but not lora_A."""
    real: Objective = parts.objective
    buffers = parts.buffers

    def objective(micro_step: int) -> MicroBatchOutput:
        if window_of(parts, micro_step)[1] == 1:
            for group in ranges(buffers, "lora_A"):
                buffers.gradient[group.start : group.stop].zero_()
        return real(micro_step)

    return replace(parts, objective=objective)


def divided_twice(parts: Parts) -> Parts:
    """lora_A's gradient is divided by the accumulation count once more."""
    buffers = parts.buffers
    normalise = buffers.normalise

    def twice(samples: int) -> None:
        normalise(samples)
        for group in ranges(buffers, "lora_A"):
            buffers.gradient[group.start : group.stop].div_(parts.training.gradient_accumulation)

    buffers.normalise = twice  # type: ignore[method-assign]
    return parts


def detached(from_step: int) -> Injection:
    """From a step on one module's adapter takes no part in the forward pass any more."""

    def inject(parts: Parts) -> Parts:
        slots = parts.buffers.slots
        module = slots[0].factor.module
        own = [slot.factor.parameter for slot in slots if slot.factor.module == module]

        real: Objective = parts.objective

        def objective(micro_step: int) -> MicroBatchOutput:
            if window_of(parts, micro_step)[0] >= from_step:
                for parameter in own:
                    parameter.requires_grad_(False)
            return real(micro_step)

        return replace(parts, objective=objective)

    return inject


def one_backward_per_window(from_step: int) -> Injection:
    """The window's losses are summed and differentiated once, at its end."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective
        kept: list[Tensor] = []

        def objective(micro_step: int) -> MicroBatchOutput:
            batch = real(micro_step)
            step, place, length = window_of(parts, micro_step)
            if step < from_step:
                return batch
            kept.append(batch.loss_sum)
            if place < length - 1:
                return Loss(torch.zeros((), requires_grad=True) * 1.0, batch.samples)
            together = torch.stack(kept).sum()
            kept.clear()
            return Loss(together, batch.samples)

        return replace(parts, objective=objective)

    return inject


@contextmanager
def schedule(change: Callable[[int, float], float]) -> Iterator[None]:
    """The loop gets ``change(step from 1, right rate)`` for its learning rate."""
    real = rates.learning_rate

    def wrong(training: object, step: int, total: int) -> float:
        return change(step + 1, real(training, step, total))  # type: ignore[arg-type]

    with patch.object(loop, "learning_rate", wrong):
        yield


def working_copy_stands_still(from_step: int) -> Injection:
    """From a step on the working copy is not refreshed after the masters moved."""

    def inject(parts: Parts) -> Parts:
        publish, done = parts.buffers.publish_masters, 0

        def publish_early_on() -> None:
            nonlocal done
            done += 1
            if done < from_step:
                publish()

        parts.buffers.publish_masters = publish_early_on  # type: ignore[method-assign]
        return parts

    return inject


def frozen_up_projections(parts: Parts) -> Parts:
    """lora_B is 0 again after every step."""

    def after(optimizer: WrappedOptimizer) -> None:
        for group in ranges(parts.buffers, "lora_B"):
            parts.buffers.masters[group.start : group.stop].zero_()
        parts.buffers.publish_masters()

    return replace(parts, optimizer=WrappedOptimizer(parts, after=after))


def magnitudes_in(dtype: torch.dtype) -> Injection:
    """After every step the magnitudes of a DoRA are rounded to ``dtype``."""

    def inject(parts: Parts) -> Parts:
        masters = [
            parts.buffers.masters[group.start : group.stop]
            for group in ranges(parts.buffers, MAGNITUDE)
        ]
        assert masters

        def after(optimizer: WrappedOptimizer) -> None:
            for magnitudes in masters:
                magnitudes.copy_(magnitudes.to(dtype))

        return replace(parts, optimizer=WrappedOptimizer(parts, after=after))

    return inject


def wrong_norm(factor: float) -> Injection:
    """Clipping gets a norm that is ``factor`` times the true one."""

    def inject(parts: Parts) -> Parts:
        telemetry = parts.telemetry
        measure = telemetry.measure_gradient

        def too_large() -> Tensor:
            return measure() * factor

        telemetry.measure_gradient = too_large  # type: ignore[method-assign]
        return parts

    return inject


NAN, INF = math.nan, math.inf
