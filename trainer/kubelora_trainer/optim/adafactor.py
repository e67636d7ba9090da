"""Adafactor, by transformers: second moments by rows and columns, in next to no memory."""

from collections.abc import Sequence
from math import prod

from kubelora_api.training_spec import Optimizer
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.library_optimizer import (
    LibraryOptimizer,
    LibraryState,
    default_to,
    total_bytes,
)
from kubelora_trainer.optim.param_groups import rate_groups


def build_adafactor(
    buffers: AdapterBuffers, spec: Optimizer, scales: Sequence[float]
) -> AdapterOptimizer:
    """Build transformers' Adafactor over the masters; see `build_optimizer` for the arguments."""
    from transformers.optimization import Adafactor

    library = Adafactor(
        rate_groups(buffers, scales),
        lr=0.0,
        eps=(default_to(spec.eps, 1e-30), 1e-3),
        beta1=spec.beta1 or None,
        weight_decay=default_to(spec.weight_decay, 0.0),
        scale_parameter=bool(spec.scale_parameter),
        relative_step=False,
    )
    state = LibraryState("fp32 by rows and columns", first="exp_avg" if spec.beta1 else None)

    def bytes_of(shape: tuple[int, ...]) -> int:
        momentum = prod(shape) if spec.beta1 else 0
        if len(shape) < 2:  # a linear layer's magnitudes have no rows and columns
            return 4 * (momentum + prod(shape))
        return 4 * (momentum + prod(shape[:-1]) + prod(shape[:-2] + shape[-1:]))

    return LibraryOptimizer(buffers, library, state, total_bytes(buffers, bytes_of))
