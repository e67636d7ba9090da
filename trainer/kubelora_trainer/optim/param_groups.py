"""Parameter groups: the learning rate of each factor relative to the schedule's.

A factor's rate is a fixed multiple of it: by ``training.learningRates`` (text encoders, blocks) and
``training.loraPlusRatio`` (LoRA+, Hayou et al. 2024: lora_B needs a larger rate than lora_A).
"""

from collections.abc import Sequence

from torch.nn import Parameter

from kubelora_api.training_spec import Training
from kubelora_trainer.lora.target_modules import matches, require_matches
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Slot


def rate_scales(slots: Sequence[Slot], training: Training) -> list[float]:
    """Compute the learning-rate multiplier of each factor, in slot order.

    Raises ConfigurationError for a pattern that matches no factor.
    """
    names = [slot.factor.name for slot in slots]
    require_matches(
        "training.learningRates",
        training.learning_rates,
        names,
        "trained factors",
        "adapt the layers it is meant for",
    )
    return [_scale(name, training) for name in names]


def _scale(name: str, training: Training) -> float:
    own = next((r for p, r in training.learning_rates.items() if matches(p, name)), None)
    scale = 1.0 if own is None else own / training.peak_rate
    return scale * training.lora_plus_ratio if name.endswith("lora_B") else scale


def rate_groups(buffers: AdapterBuffers, scales: Sequence[float]) -> list[dict[str, object]]:
    """Build parameter groups of equal ``scale`` (the learning-rate multiplier).

    Magnitudes get groups of their own without weight decay, because decaying a weight's norm
    towards 0 would remove the base model's layer.
    """
    groups: dict[tuple[float, bool], list[Parameter]] = {}
    for slot, master, scale in zip(buffers.slots, buffers.master_parameters, scales, strict=True):
        groups.setdefault((scale, slot.factor.is_magnitude), []).append(master)
    return [
        {"params": members, "scale": scale} | ({"weight_decay": 0.0} if magnitudes else {})
        for (scale, magnitudes), members in groups.items()
    ]
