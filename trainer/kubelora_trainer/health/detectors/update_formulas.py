"""Each optimizer's update once more, element by element in fp64, written from its paper.

Independent of the libraries and kernels that train, so that a mistake in one of them, or in the
rates and decays that they are given, shows as a difference. 8-bit AdamW keeps its momentum in codes
and Adafactor its second moments by rows and columns, so these two have no formula of single
elements.

    AdamW: Loshchilov & Hutter 2019, "Decoupled Weight Decay Regularization", alg. 2
    Lion: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", alg. 2
    Prodigy: Mishchenko & Defazio 2024, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner",
        alg. 1, with the decoupled decay of its authors' code
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kubelora_api.training_spec import Optimizer, OptimizerName


@dataclass(frozen=True)
class StepElements:
    """Sampled elements before a step, fp64 (slots, samples).

    first, second: moments. rate, decay: (slots, 1), of each factor. steps: scalar, those done
    before. own_rate: Prodigy's d before the step. new_own_rate: after it.
    """

    weight: Tensor
    gradient: Tensor
    first: Tensor
    second: Tensor
    rate: Tensor
    decay: Tensor
    steps: Tensor
    own_rate: float
    new_own_rate: float


@dataclass(frozen=True)
class Expected:
    """The result of a formula, fp64 (slots, samples).

    slack: by how much rounding in the optimizer's own type may change a weight's change; to be
    multiplied by the type's epsilon. second: None without a second moment.
    """

    change: Tensor
    first: Tensor
    second: Tensor | None
    slack: Tensor


def _adamw(spec: Optimizer, at: StepElements) -> Expected:
    beta1, beta2 = _default(spec.beta1, 0.9), _default(spec.beta2, 0.999)
    steps = at.steps + 1
    first = beta1 * at.first + (1 - beta1) * at.gradient
    second = beta2 * at.second + (1 - beta2) * at.gradient.square()
    root = (second / (1 - beta2**steps)).sqrt() + _default(spec.eps, 1e-8)
    per_moment = at.rate / (1 - beta1**steps) / root
    change = -at.rate * at.decay * at.weight - per_moment * first
    size = beta1 * at.first.abs() + (1 - beta1) * at.gradient.abs()
    return Expected(change, first, second, per_moment * size)


def _prodigy(spec: Optimizer, at: StepElements) -> Expected:
    beta1, beta2, d = _default(spec.beta1, 0.9), _default(spec.beta2, 0.999), at.own_rate
    rate = at.rate * d
    if spec.bias_correction:
        rate = rate * (1 - beta2 ** (at.steps + 1)).sqrt() / (1 - beta1 ** (at.steps + 1))
    first = beta1 * at.first + (1 - beta1) * d * at.gradient
    second = beta2 * at.second + (1 - beta2) * (d * at.gradient).square()
    root = second.sqrt() + at.new_own_rate * _default(spec.eps, 1e-8)
    # Without momentum it follows the gradient times the d that it has just found.
    followed = first if beta1 else at.new_own_rate * at.gradient
    change = -rate * at.decay * at.weight - rate * followed / root
    size = beta1 * at.first.abs() + (1 - beta1) * d * at.gradient.abs()
    return Expected(change, first if beta1 else at.first, second, rate / root * size)


def _lion(spec: Optimizer, at: StepElements) -> Expected:
    beta1, beta2 = _default(spec.beta1, 0.9), _default(spec.beta2, 0.99)
    direction = beta1 * at.first + (1 - beta1) * at.gradient
    size = beta1 * at.first.abs() + (1 - beta1) * at.gradient.abs()
    change = -at.rate * at.decay * at.weight - at.rate * direction.sign()
    # A sign is known where rounding can't turn it: else the step may be any of both.
    unsure = torch.where(direction.abs() < _UNSURE * size, torch.inf, 1.0)
    return Expected(change, beta2 * at.first + (1 - beta2) * at.gradient, None, at.rate * unsure)


_UNSURE: Final = 1e-5
"""Share of the addends below which a sum in fp32, which errs by 1e-7 of them, has no sure sign."""

Formula = Callable[[Optimizer, StepElements], Expected]

FORMULAS: Final[Mapping[OptimizerName, Formula]] = {
    "adamw": _adamw,
    "prodigy": _prodigy,
    "lion": _lion,
}

DECAYS: Final[Mapping[OptimizerName, float]] = {"adamw": 0.01, "lion": 0.01, "adamw8bit": 0.01}
"""Weight decay where the job leaves it out; 0 for the others."""


def decay_of(spec: Optimizer) -> float:
    """Return the weight decay that the job asks for."""
    return _default(spec.weight_decay, DECAYS.get(spec.name, 0.0))


def _default(value: float | None, default: float) -> float:
    return default if value is None else value
