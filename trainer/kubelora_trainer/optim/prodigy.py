"""Prodigy, by prodigyopt: it finds its learning rate, and the schedule multiplies that."""

import contextlib
import io
from collections.abc import Sequence
from math import prod

from kubelora_api.training_spec import Optimizer, Training
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.library_optimizer import (
    LibraryOptimizer,
    LibraryState,
    default_to,
    import_library,
    total_bytes,
)
from kubelora_trainer.optim.moments import Damping
from kubelora_trainer.optim.param_groups import rate_groups

USUAL_RATES = (0.1, 10.0)
"""Range of multipliers around Prodigy's intended 1; beyond it, an AdamW rate was left in place."""
# Numbers of a parameter group that hold the estimate of the rate.
_ESTIMATE = ("d", "d_max", "d_hat", "d_numerator", "d_denom", "k")


def build_prodigy(
    buffers: AdapterBuffers, spec: Optimizer, scales: Sequence[float]
) -> AdapterOptimizer:
    """Build prodigyopt's Prodigy over the masters; see `build_optimizer` for the arguments."""
    prodigy = import_library("prodigyopt", "prodigy").Prodigy
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its kind of weight decay
        library = prodigy(
            rate_groups(buffers, scales),
            lr=1.0,
            betas=(default_to(spec.beta1, 0.9), default_to(spec.beta2, 0.999)),
            eps=default_to(spec.eps, 1e-8),
            weight_decay=default_to(spec.weight_decay, 0.0),
            d0=default_to(spec.initial_rate, 1e-6),
            d_coef=default_to(spec.rate_coefficient, 1.0),
            use_bias_correction=bool(spec.bias_correction),
            safeguard_warmup=bool(spec.safeguard_warmup),
        )
    first = "exp_avg" if spec.beta1 != 0 else None
    state = LibraryState(
        "fp32",
        group=_ESTIMATE,
        first=first,
        second="exp_avg_sq",
        # Prodigy scales gradients and eps by d; bias correction is part of its learning rate.
        damping=lambda group, steps: Damping(eps=group["d"] * group["eps"], correction=1.0),
        ignores_zero_rate=True,  # its estimate divides by a sum that the rate multiplies
    )
    copies = 4 if first else 3  # moments, the first weights, the sum behind the estimate
    cost = copies * buffers.masters.itemsize
    return LibraryOptimizer(
        buffers, library, state, total_bytes(buffers, lambda shape: cost * prod(shape))
    )


def rate_warning(training: Training) -> str | None:
    """Return a sentence if the learning rate cannot be what the user meant, else None."""
    least, most = USUAL_RATES
    if training.optimizer.finds_rate and not least <= training.peak_rate <= most:
        return (
            f"training.learningRate is {training.peak_rate:g}, and prodigy multiplies its own "
            "estimate of the rate by it: remove it (the default is 1) and tune "
            "optimizer.rateCoefficient instead"
        )
    return None
