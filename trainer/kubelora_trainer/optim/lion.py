"""Lion, by bitsandbytes: every weight moves by the sign of its momentum."""

from collections.abc import Sequence
from math import prod

from kubelora_api.training_spec import Optimizer
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.library_optimizer import (
    LibraryOptimizer,
    LibraryState,
    allocate_bitsandbytes_state,
    default_to,
    import_library,
    total_bytes,
)
from kubelora_trainer.optim.param_groups import rate_groups


def build_lion(
    buffers: AdapterBuffers, spec: Optimizer, scales: Sequence[float]
) -> AdapterOptimizer:
    """Build bitsandbytes' Lion over the masters; see `build_optimizer` for the arguments."""
    library = import_library("bitsandbytes.optim", "lion").Lion(
        rate_groups(buffers, scales),
        lr=0.0,
        betas=(default_to(spec.beta1, 0.9), default_to(spec.beta2, 0.99)),
        weight_decay=default_to(spec.weight_decay, 0.01),
    )
    allocate_bitsandbytes_state(library)
    state = LibraryState("fp32", first="state1")
    return LibraryOptimizer(
        buffers, library, state, total_bytes(buffers, lambda shape: 4 * prod(shape))
    )
