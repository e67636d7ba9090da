"""AdamW with its state in 8 bits, by bitsandbytes."""

from collections.abc import Sequence
from math import prod

from kubelora_api.training_spec import Optimizer
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.bnb_8bit import BLOCK_8BIT, SMALLEST_8BIT, EightBitMoment
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.library_optimizer import (
    LibraryOptimizer,
    LibraryState,
    allocate_bitsandbytes_state,
    default_to,
    import_library,
    total_bytes,
)
from kubelora_trainer.optim.moments import Damping
from kubelora_trainer.optim.param_groups import rate_groups


def build_adamw_8bit(
    buffers: AdapterBuffers, spec: Optimizer, scales: Sequence[float]
) -> AdapterOptimizer:
    """Build bitsandbytes' 8-bit AdamW over the masters; see `build_optimizer` for the arguments."""
    beta2, eps = default_to(spec.beta2, 0.999), default_to(spec.eps, 1e-8)
    library = import_library("bitsandbytes.optim", "adamw8bit").AdamW8bit(
        rate_groups(buffers, scales),
        lr=0.0,
        betas=(default_to(spec.beta1, 0.9), beta2),
        eps=eps,
        weight_decay=default_to(spec.weight_decay, 0.01),
        min_8bit_size=SMALLEST_8BIT,
    )
    allocate_bitsandbytes_state(library)
    state = LibraryState(
        "8 bit",
        constants=frozenset({"qmap1", "qmap2"}),
        damping=lambda group, steps: Damping(eps, correction=1 - beta2**steps),
    )
    return LibraryOptimizer(
        buffers,
        library,
        state,
        total_bytes(buffers, _bytes_of),
        EightBitMoment(buffers.slots, beta2, buffers.masters.device),
    )


def _bytes_of(shape: tuple[int, ...]) -> int:
    """Return the bytes of a factor's state: two codes an element and two fp32 scales a block."""
    count = prod(shape)
    return 8 * count if count < SMALLEST_8BIT else 2 * count + 8 * -(-count // BLOCK_8BIT)
