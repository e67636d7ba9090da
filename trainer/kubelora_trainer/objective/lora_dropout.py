"""Dropout of the adapter's inputs, with masks that a resumed run draws again.

Masks come from torch's generator, which is seeded anew before every forward pass from the draws of
its samples: they are a function of (seed, micro-step, samples) alone, whatever was drawn before and
however samples are spread over processes. Recomputed activations see the same masks, for
checkpointing puts the generator back.
"""

import hashlib
from collections.abc import Sequence

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from kubelora_trainer.data.sampler import SampleDraw


class AdapterDropout:
    """Switches the dropout of adapted layers on, for one training pass at a time.

    The whole adapted layer is put in training mode: peft's DoRA asks the layer, not its dropout.

    ``eval()`` on the model switches them off again; sample images and comparisons call it.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._layers = [
            adapted
            for model in models
            for adapted in model.modules()
            if isinstance(adapted, LoraLayer)
            and any(isinstance(layer, nn.Dropout) for layer in adapted.lora_dropout.values())
        ]

    def arm(self, draws: Sequence[SampleDraw]) -> None:
        """Make ready for the forward pass over ``draws``. Does nothing without dropout."""
        if not self._layers:
            return
        for layer in self._layers:
            layer.train()  # a linear layer or convolution below it knows no modes
        torch.manual_seed(mask_seed(draws))


def mask_seed(draws: Sequence[SampleDraw]) -> int:
    """Seed of a micro-batch's masks, from its samples' own noise seeds."""
    text = " ".join(str(draw.noise_seed) for draw in draws)
    digest = hashlib.sha256(f"dropout {text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
