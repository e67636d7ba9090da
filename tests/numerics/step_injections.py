"""Faults between backward pass, optimizer and memory, as `injections.py` has those of the rest.

Each takes the run's real parts; modules, elements, bits and times are arguments.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.sdxl_loss import MicroBatchLoss, SdxlObjective
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Slot
from kubelora_trainer.training.loop import MicroBatchOutput, Parts
from tests.numerics.bench import Injection
from tests.numerics.injections import Objective, WrappedOptimizer, window_of
from tests.numerics.scene import Scene

Target = Callable[[Parts], Tensor]
"""A flat tensor of the run: masters, a moment."""


def masters(parts: Parts) -> Tensor:
    return parts.buffers.masters


def first_moment(parts: Parts) -> Tensor:
    moment = parts.optimizer.first_moment
    assert moment is not None
    return moment


def second_moment(parts: Parts) -> Tensor:
    moment = parts.optimizer.second_moment
    assert isinstance(moment, Tensor)
    return moment


def largest_of(target: Tensor, slot: Slot, place: int = 0) -> int:
    """Position of a slot's largest element; ``place``: of the next smaller ones."""
    sizes = target[slot.start : slot.stop].abs()
    return slot.start + int(sizes.argsort(descending=True)[place])


def scaled_in_memory(target: Target, factor: float, step: int, slot: int = 0) -> Injection:
    """One element is multiplied while the window of ``step`` is computed."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective

        def objective(micro_step: int) -> MicroBatchOutput:
            if window_of(parts, micro_step)[:2] == (step, 0):
                flat = target(parts)
                flat[largest_of(flat, parts.buffers.slots[slot])] *= factor
            return real(micro_step)

        return replace(parts, objective=objective)

    return inject


def scaled_after_the_step(target: Target, factor: float, step: int, slot: int = -1) -> Injection:
    """One element is multiplied directly after the optimizer has returned."""

    def inject(parts: Parts) -> Parts:
        def after(optimizer: WrappedOptimizer) -> None:
            if optimizer.steps == step:
                flat = target(parts)
                flat[largest_of(flat, parts.buffers.slots[slot])] *= factor

        return replace(parts, optimizer=WrappedOptimizer(parts, after=after))

    return inject


def zeroed_state(step: int) -> Injection:
    """Both moments are 0 again, in the middle of the run."""

    def inject(parts: Parts) -> Parts:
        def after(optimizer: WrappedOptimizer) -> None:
            if optimizer.steps == step:
                first_moment(parts).zero_()
                second_moment(parts).zero_()

        return replace(parts, optimizer=WrappedOptimizer(parts, after=after))

    return inject


def state_loaded_as_new(step: int) -> Injection:
    """Somebody loads an empty state, in the middle of the run."""

    def inject(parts: Parts) -> Parts:
        def after(optimizer: WrappedOptimizer) -> None:
            if optimizer.steps == step:
                empty = {n: torch.zeros_like(t) for n, t in parts.optimizer.tensors().items()}
                parts.optimizer.load(empty, parts.optimizer.scalars())

        return replace(parts, optimizer=WrappedOptimizer(parts, after=after))

    return inject


class InnerStep:
    """torch's or a library's own optimizer, with something done to its step."""

    def __init__(
        self, inner: torch.optim.Optimizer, step: Callable[[Callable[[], None]], None]
    ) -> None:
        self._inner, self._step = inner, step

    def step(self) -> None:
        self._step(lambda: self._inner.step() and None)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("_inner", "_step"):
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)


def within_the_step(change: Callable[[Parts, int, Callable[[], None]], None]) -> Injection:
    """``change`` is called with the step's number, from 1, and the library's own step."""

    def inject(parts: Parts) -> Parts:
        held = "_adamw" if hasattr(parts.optimizer, "_adamw") else "_library"
        done = 0

        def step(real: Callable[[], None]) -> None:
            nonlocal done
            done += 1
            change(parts, done, real)

        setattr(parts.optimizer, held, InnerStep(getattr(parts.optimizer, held), step))
        return parts

    return inject


def stepped_twice(from_step: int = 1) -> Injection:
    """The library's step is called twice."""

    def change(parts: Parts, step: int, real: Callable[[], None]) -> None:
        real()
        if step >= from_step:
            real()

    return within_the_step(change)


def momentum_lost(from_step: int = 1) -> Injection:
    """The momentum is 0 at the begin of each step."""

    def change(parts: Parts, step: int, real: Callable[[], None]) -> None:
        if step >= from_step:
            first_moment(parts).zero_()
        real()

    return within_the_step(change)


def moved_by(factor: float, slots: slice, from_step: int = 1) -> Injection:
    """Some factors move by ``factor`` times what they should; 0 freezes them."""

    def change(parts: Parts, step: int, real: Callable[[], None]) -> None:
        before = parts.buffers.masters.clone()
        real()
        if step >= from_step:
            for slot in parts.buffers.slots[slots]:
                now, old = slot.of(parts.buffers.masters), slot.of(before)
                now.copy_(old + factor * (now - old))

    return within_the_step(change)


def decay_without_rate(decay: float, from_step: int = 1) -> Injection:
    """Weights decay by themselves and not by the rate."""

    def change(parts: Parts, step: int, real: Callable[[], None]) -> None:
        if step >= from_step:
            parts.buffers.masters.mul_(1 - decay)
        real()

    return within_the_step(change)


def _finished(change: Callable[[AdapterBuffers, int], None]) -> Injection:
    """``change`` is done to the finished gradient of a step, from 1."""

    def inject(parts: Parts) -> Parts:
        buffers, done = parts.buffers, 0
        normalise = buffers.normalise

        def changed(samples: int) -> None:
            nonlocal done
            normalise(samples)
            done += 1
            change(buffers, done)

        buffers.normalise = changed  # type: ignore[method-assign]
        return parts

    return inject


def flipped_signs(slots: slice = slice(None), from_step: int = 1) -> Injection:
    """The finished gradient of some factors has the opposite sign."""

    def change(buffers: AdapterBuffers, step: int) -> None:
        if step >= from_step:
            for slot in buffers.slots[slots]:
                slot.of(buffers.gradient).neg_()

    return _finished(change)


def flipped_bit(bit: int, step: int, slot: int = 0, element: int = 0) -> Injection:
    """One bit of an element of one factor's finished gradient flips, the largest being 0."""

    def change(buffers: AdapterBuffers, now: int) -> None:
        if now == step:
            flat = buffers.gradient
            place = largest_of(flat, buffers.slots[slot], element)
            flat.view(torch.int32)[place] ^= 1 << bit

    return _finished(change)


def restored_before(place: int, from_step: int = 1, slots: slice = slice(None)) -> Injection:
    """A window's micro-step ``place`` is taken back by whoever computes the next one."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective
        kept: list[Tensor] = []

        def objective(micro_step: int) -> MicroBatchOutput:
            step, now, _ = window_of(parts, micro_step)
            gradient = parts.buffers.gradient
            if now == place:
                kept[:] = [gradient.clone()]
            if now == place + 1 and step >= from_step:
                for slot in parts.buffers.slots[slots]:
                    slot.of(gradient).copy_(slot.of(kept[0]))
            return real(micro_step)

        return replace(parts, objective=objective)

    return inject


class _Constant:
    """A loss whose value is right and whose gradient is 0."""

    def __init__(self, batch: MicroBatchOutput) -> None:
        self.loss_sum, self.samples = batch.loss_sum * 0.0 + batch.loss_sum.detach(), batch.samples


def detached_micro_step(place: int, from_step: int = 1) -> Injection:
    """A window's micro-step ``place`` has a loss and a gradient of 0, on both factors."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective

        def objective(micro_step: int) -> MicroBatchOutput:
            batch = real(micro_step)
            step, now, _ = window_of(parts, micro_step)
            return _Constant(batch) if now == place and step >= from_step else batch

        return replace(parts, objective=objective)

    return inject


def last_micro_step_taken_back(from_step: int = 1) -> Injection:
    """The window's last micro-step is gone from both factors before the sum is divided."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective
        buffers, normalise = parts.buffers, parts.buffers.normalise
        kept: list[Tensor] = []
        step = 0

        def objective(micro_step: int) -> MicroBatchOutput:
            _, place, length = window_of(parts, micro_step)
            if place == length - 1:
                kept[:] = [buffers.gradient.clone()]
            return real(micro_step)

        def without(samples: int) -> None:
            nonlocal step
            step += 1
            if step >= from_step:
                buffers.gradient.copy_(kept[0])
            normalise(samples)

        buffers.normalise = without  # type: ignore[method-assign]
        return replace(parts, objective=objective)

    return inject


@contextmanager
def base_weight_changes(
    step: int, change: Callable[[Tensor], object], name: str = "conv_in.weight"
) -> Iterator[None]:
    """One tensor of the UNet is changed when the first micro-batch of ``step`` is computed.

    For windows of two micro-batches, the plain job's.
    """
    real = SdxlObjective.__call__

    def computed(objective: SdxlObjective, micro_step: int) -> MicroBatchLoss:
        if micro_step == 2 * (step - 1):
            weights = dict(objective._base.unet.named_parameters())
            with torch.no_grad():
                change(weights[name].view(-1))
        return real(objective, micro_step)

    with patch.object(SdxlObjective, "__call__", computed):
        yield


@contextmanager
def base_weight_is_broken(value: float) -> Iterator[None]:
    """One weight of the UNet is not finite as it is loaded."""
    real = Scene.load_base

    def loaded(scene: Scene, folder: Path, **settings: Any) -> BaseModel:
        base = real(scene, folder, **settings)
        with torch.no_grad():
            next(base.unet.mid_block.parameters()).view(-1)[3] = value
        return base

    with patch.object(Scene, "load_base", loaded):
        yield


@contextmanager
def overflows(sample: int, factor: float = 1e30) -> Iterator[None]:
    """The gradient of one image overflows fp16 whenever it is seen; its loss is right."""
    real = SdxlObjective.__call__

    def computed(objective: SdxlObjective, micro_step: int) -> MicroBatchLoss:
        result = real(objective, micro_step)
        samples = {draw.sample for draw in objective.order.samples_of(micro_step)}
        if sample not in samples:
            return result
        return replace(result, loss_sum=_steep(result.loss_sum, factor))

    with patch.object(SdxlObjective, "__call__", computed):
        yield


def _steep(loss: Tensor, factor: float) -> Tensor:
    """The loss itself, with ``factor`` times its gradient."""
    return loss.detach() + (loss - loss.detach()) * factor


def average_moves_by(share: float, from_step: int = 1, slots: slice = slice(None)) -> Injection:
    """The moving average of some factors moves by ``share`` of what it should; 0 stops it."""

    def inject(parts: Parts) -> Parts:
        average = parts.average
        assert average is not None
        update = average.update

        def changed(step: int, non_finite: Tensor) -> None:
            before = average.weights.clone()
            update(step, non_finite)
            if step + 1 >= from_step:
                for slot in parts.buffers.slots[slots]:
                    now, old = slot.of(average.weights), slot.of(before)
                    now.copy_(old + share * (now - old))

        average.update = changed  # type: ignore[method-assign]
        return parts

    return inject
