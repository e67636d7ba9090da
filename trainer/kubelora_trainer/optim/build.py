"""Which optimizer a job asks for, from which library, with which defaults.

AdamW is torch's own, fused. The others come from the libraries that those who train LoRAs use:
bitsandbytes (8-bit AdamW, Lion), transformers (Adafactor with a rate of one's own, which torch's
does not have) and prodigyopt (its authors' Prodigy). They are imported when they are asked for.
"""

import contextlib
import io
import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from math import prod
from types import ModuleType

import torch

from kubelora_api.training_spec import Optimizer, OptimizerName, Training
from kubelora_trainer.optim.adamw import FlatAdamW
from kubelora_trainer.optim.base import AdapterOptimizer
from kubelora_trainer.optim.bnb_8bit import BLOCK_8BIT, SMALLEST_8BIT, EightBitMoment
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.moments import Damping
from kubelora_trainer.optim.param_groups import rate_groups
from kubelora_trainer.optim.third_party import LibraryOptimizer, LibraryState
from kubelora_trainer.utils.errors import ConfigurationError

Groups = list[dict[str, object]]
USUAL_PRODIGY_RATES = (0.1, 10.0)


def build_optimizer(
    buffers: AdapterBuffers, spec: Optimizer, scales: Sequence[float] | None = None
) -> AdapterOptimizer:
    """The optimizer that ``training.optimizer`` asks for.

    scales: what the learning rate of each factor is multiplied by, in slot order; None: 1 for all.
    """
    scales = scales or [1.0] * len(buffers.slots)
    if spec.name == "adamw":
        return FlatAdamW(buffers, spec, scales)
    return _OPENERS[spec.name](buffers, spec, rate_groups(buffers, scales))


def rate_warning(training: Training) -> str | None:
    """A sentence where the learning rate can't be meant; None where it can."""
    least, most = USUAL_PRODIGY_RATES
    if training.optimizer.name == "prodigy" and not least <= training.peak_rate <= most:
        return (
            f"training.learningRate is {training.peak_rate:g}, and prodigy multiplies the rate "
            "that it finds by it: leave it out (1), and tune optimizer.rateCoefficient"
        )
    return None


def _adamw8bit(buffers: AdapterBuffers, spec: Optimizer, groups: Groups) -> AdapterOptimizer:
    beta2, eps = _or(spec.beta2, 0.999), _or(spec.eps, 1e-8)
    library = _library("bitsandbytes.optim", "adamw8bit").AdamW8bit(
        groups,
        lr=0.0,
        betas=(_or(spec.beta1, 0.9), beta2),
        eps=eps,
        weight_decay=_or(spec.weight_decay, 0.01),
        min_8bit_size=SMALLEST_8BIT,
    )
    _make_state(library)
    state = LibraryState(
        "8 bit",
        constants=frozenset({"qmap1", "qmap2"}),
        damping=lambda group, steps: Damping(eps, correction=1 - beta2**steps),
    )

    def cost(count: int) -> int:
        return 8 * count if count < SMALLEST_8BIT else 2 * count + 8 * -(-count // BLOCK_8BIT)

    return LibraryOptimizer(
        buffers,
        library,
        state,
        _bytes(buffers, lambda s: cost(prod(s))),
        EightBitMoment(buffers.slots, beta2, buffers.masters.device),
    )


def _lion(buffers: AdapterBuffers, spec: Optimizer, groups: Groups) -> AdapterOptimizer:
    library = _library("bitsandbytes.optim", "lion").Lion(
        groups,
        lr=0.0,
        betas=(_or(spec.beta1, 0.9), _or(spec.beta2, 0.99)),
        weight_decay=_or(spec.weight_decay, 0.01),
    )
    _make_state(library)
    state = LibraryState("fp32", first="state1")
    return LibraryOptimizer(buffers, library, state, _bytes(buffers, lambda s: 4 * prod(s)))


def _adafactor(buffers: AdapterBuffers, spec: Optimizer, groups: Groups) -> AdapterOptimizer:
    from transformers.optimization import Adafactor

    library = Adafactor(
        groups,
        lr=0.0,
        eps=(_or(spec.eps, 1e-30), 1e-3),
        beta1=spec.beta1 or None,
        weight_decay=_or(spec.weight_decay, 0.0),
        scale_parameter=bool(spec.scale_parameter),
        relative_step=False,
    )
    state = LibraryState("fp32 by rows and columns", first="exp_avg" if spec.beta1 else None)

    def cost(shape: tuple[int, ...]) -> int:
        momentum = prod(shape) if spec.beta1 else 0
        if len(shape) < 2:  # a linear layer's magnitudes have no rows and columns
            return 4 * (momentum + prod(shape))
        return 4 * (momentum + prod(shape[:-1]) + prod(shape[:-2] + shape[-1:]))

    return LibraryOptimizer(buffers, library, state, _bytes(buffers, cost))


def _prodigy(buffers: AdapterBuffers, spec: Optimizer, groups: Groups) -> AdapterOptimizer:
    prodigy = _library("prodigyopt", "prodigy").Prodigy
    with contextlib.redirect_stdout(io.StringIO()):  # it prints how it decays
        library = prodigy(
            groups,
            lr=1.0,
            betas=(_or(spec.beta1, 0.9), _or(spec.beta2, 0.999)),
            eps=_or(spec.eps, 1e-8),
            weight_decay=_or(spec.weight_decay, 0.0),
            d0=_or(spec.initial_rate, 1e-6),
            d_coef=_or(spec.rate_coefficient, 1.0),
            use_bias_correction=bool(spec.bias_correction),
            safeguard_warmup=bool(spec.safeguard_warmup),
        )
    estimate = ("d", "d_max", "d_hat", "d_numerator", "d_denom", "k")
    first = "exp_avg" if spec.beta1 != 0 else None
    state = LibraryState(
        "fp32",
        group=estimate,
        first=first,
        second="exp_avg_sq",
        # Its moments are of gradients times d, and so is its eps; the rate carries the correction.
        damping=lambda group, steps: Damping(eps=group["d"] * group["eps"], correction=1.0),
    )
    copies = 4 if first else 3  # moments, the first weights, the sum behind the estimate
    cost = copies * buffers.masters.itemsize
    return LibraryOptimizer(buffers, library, state, _bytes(buffers, lambda s: cost * prod(s)))


_OPENERS: dict[OptimizerName, Callable[[AdapterBuffers, Optimizer, Groups], AdapterOptimizer]] = {
    "adamw8bit": _adamw8bit,
    "adafactor": _adafactor,
    "prodigy": _prodigy,
    "lion": _lion,
}


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bytes(buffers: AdapterBuffers, of_shape: Callable[[tuple[int, ...]], int]) -> int:
    return sum(of_shape(slot.shape) for slot in buffers.slots)


def _library(module: str, optimizer: OptimizerName) -> ModuleType:
    """Import a library. On import bitsandbytes advises what to install for models in 4 bits."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"training.optimizer.name {optimizer} needs {module.split('.')[0]}, which can't be "
            f"imported ({error}): install kubelora with its trainer extra"
        ) from error


def _make_state(library: torch.optim.Optimizer) -> None:
    """Make bitsandbytes' state now, as its first step would: to be seen, saved and taken over."""
    for number, group in enumerate(library.param_groups):
        for index, parameter in enumerate(group["params"]):
            library.init_state(group, parameter, number, index)  # type: ignore[attr-defined]
