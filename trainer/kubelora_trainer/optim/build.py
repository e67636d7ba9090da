"""The optimizer that ``training.optimizer`` asks for: one row for each name of the contract.

AdamW is torch's own, fused. The others come from the libraries that LoRA trainers use: bitsandbytes
(8-bit AdamW, Lion), transformers (Adafactor with a learning rate of its own, which torch's lacks)
and prodigyopt (the authors' Prodigy). A library is imported only when a job asks for it.
"""

from collections.abc import Callable, Sequence

from kubelora_api.training_spec import Optimizer, OptimizerName
from kubelora_trainer.optim.adafactor import build_adafactor
from kubelora_trainer.optim.adamw import FlatAdamW
from kubelora_trainer.optim.adamw_8bit import build_adamw_8bit
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.lion import build_lion
from kubelora_trainer.optim.prodigy import build_prodigy

Builder = Callable[[AdapterBuffers, Optimizer, Sequence[float]], AdapterOptimizer]

BUILDERS: dict[OptimizerName, Builder] = {
    "adamw": FlatAdamW,
    "adamw8bit": build_adamw_8bit,
    "adafactor": build_adafactor,
    "prodigy": build_prodigy,
    "lion": build_lion,
}


def build_optimizer(
    buffers: AdapterBuffers, spec: Optimizer, scales: Sequence[float] | None = None
) -> AdapterOptimizer:
    """Build the optimizer that ``training.optimizer`` asks for.

    Args:
        buffers: The flat buffers whose master weights it updates.
        spec: The job's ``training.optimizer``.
        scales: Multiple of the learning rate for each factor, in slot order; None means 1 for all.

    Returns:
        The optimizer, with fresh state.

    Raises:
        ConfigurationError: Its library cannot be imported.
    """
    return BUILDERS[spec.name](buffers, spec, scales or [1.0] * len(buffers.slots))
