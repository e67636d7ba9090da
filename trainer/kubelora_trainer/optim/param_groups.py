"""How the learning rate of each factor relates to the schedule's.

A factor's rate is a fixed multiple of it: by ``training.learningRates`` (text encoders, blocks) and
``training.loraPlusRatio`` (LoRA+, Hayou et al.: lora_B wants a larger rate than lora_A).
"""

from collections.abc import Sequence

from torch.nn import Parameter

from kubelora_api.training_spec import Training
from kubelora_trainer.lora.target_modules import matches, refuse_unmatched
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Slot


def rate_scales(slots: Sequence[Slot], training: Training) -> list[float]:
    """What the schedule's rate is multiplied by, for each factor in slot order.

    Raises ConfigurationError for a pattern that no factor's name matches.
    """
    names = [slot.factor.name for slot in slots]
    refuse_unmatched(
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
    """Parameter groups of equal ``scale`` (what the learning rate is multiplied by).

    Magnitudes are groups of their own without weight decay: 0 is no rest for the norm of a weight,
    it takes the base model's layer away.
    """
    groups: dict[tuple[float, bool], list[Parameter]] = {}
    for slot, master, scale in zip(buffers.slots, buffers.master_parameters, scales, strict=True):
        groups.setdefault((scale, slot.factor.is_magnitude), []).append(master)
    return [
        {"params": members, "scale": scale} | ({"weight_decay": 0.0} if magnitudes else {})
        for (scale, magnitudes), members in groups.items()
    ]
