"""How the learning rate of each factor relates to the schedule's.

A factor's rate is a fixed multiple of it: by ``training.learningRates`` (text encoders, blocks) and
``training.loraPlusRatio`` (LoRA+, Hayou et al.: lora_B wants a larger rate than lora_A).
"""

from collections.abc import Sequence

from kubelora_api.training_spec import Training
from kubelora_trainer.lora.target_modules import matches, refuse_unmatched
from kubelora_trainer.optim.flat_buffers import Slot


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
