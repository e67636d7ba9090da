"""Faults that only a second computation of a micro-step shows: signs, and a device that errs."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kubelora_trainer.objective.sdxl_loss import MicroBatchLoss
from kubelora_trainer.training.loop import MicroBatchOutput, Parts
from tests.numerics.bench import Injection
from tests.numerics.injections import Objective, window_of


class _Uphill(torch.autograd.Function):
    """The identity, with a gradient of another sign."""

    @staticmethod
    def forward(context: object, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(context: object, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def with_loss(change: Callable[[Tensor], Tensor], from_step: int = 1) -> Injection:
    """The loss that is differentiated is another one than the samples'."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective

        def objective(micro_step: int) -> MicroBatchOutput:
            output = real(micro_step)
            assert isinstance(output, MicroBatchLoss)
            if window_of(parts, micro_step)[0] < from_step:
                return output
            return replace(output, loss_sum=change(output.loss_sum))

        return replace(parts, objective=objective)

    return inject


def negated(loss: Tensor) -> Tensor:
    return -loss


def reversed_in_autograd(loss: Tensor) -> Tensor:
    uphill: Tensor = _Uphill.apply(loss)
    return uphill


def reversed_hooks(slots: slice, from_step: int = 1) -> Injection:
    """Autograd gives some factors the gradient of another sign."""

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective
        step = 0

        def turned(gradient: Tensor) -> Tensor | None:
            return -gradient if step >= from_step else None

        for slot in parts.buffers.slots[slots]:
            slot.factor.parameter.register_hook(turned)

        def objective(micro_step: int) -> MicroBatchOutput:
            nonlocal step
            step = window_of(parts, micro_step)[0]
            return real(micro_step)

        return replace(parts, objective=objective)

    return inject


def reversed_module(module: int, from_step: int = 1) -> Injection:
    """As `reversed_hooks`, for both factors of a module, which obey the chain rule still."""

    def inject(parts: Parts) -> Parts:
        name = parts.buffers.slots[module].factor.module
        for place, slot in enumerate(parts.buffers.slots):
            if slot.factor.module == name:
                parts = reversed_hooks(slice(place, place + 1), from_step)(parts)
        return parts

    return inject


def one_pass_errs(change: Callable[[Tensor], object], step: int, place: int = 0) -> Injection:
    """The device errs in one pass of a micro-step, and in no other one.

    change: of a factor's gradient as autograd hands it on.
    """

    def inject(parts: Parts) -> Parts:
        real: Objective = parts.objective
        errs, done = False, False

        def arrived(gradient: Tensor) -> Tensor | None:
            if not errs:
                return None
            wrong = gradient.clone()
            change(wrong)
            return wrong

        parts.buffers.slots[-1].factor.parameter.register_hook(arrived)

        def objective(micro_step: int) -> MicroBatchOutput:
            nonlocal errs, done
            errs = not done and window_of(parts, micro_step)[:2] == (step, place)
            done = done or errs
            return real(micro_step)

        return replace(parts, objective=objective)

    return inject
