"""Dropout of the adapter's inputs, with masks that a resumed run reproduces.

Masks come from torch's generator, which is reseeded before every forward pass from the draws of its
samples. They are a function of (seed, micro-step, samples) alone, independent of earlier draws and
of how samples are distributed over processes. Recomputed activations see the same masks, because
activation checkpointing restores the generator.
"""

import hashlib
from collections.abc import Sequence

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from kubelora_trainer.data.sampler import SampleDraw


class AdapterDropout:
    """Dropout of adapted layers, enabled for one training pass at a time.

    The entire adapted layer is set to training mode, because peft's DoRA checks the mode of the
    layer, not of its dropout. ``eval()`` on the model disables it again; sample images and
    comparisons call it.
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
        """Prepare for the forward pass over ``draws``. Does nothing without dropout."""
        if not self._layers:
            return
        for layer in self._layers:
            layer.train()  # the linear layer or convolution below ignores the mode
        torch.manual_seed(mask_seed(draws))


def mask_seed(draws: Sequence[SampleDraw]) -> int:
    """Derive the seed of a micro-batch's masks from the noise seeds of its samples."""
    text = " ".join(str(draw.noise_seed) for draw in draws)
    digest = hashlib.sha256(f"dropout {text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits, like every seed of a draw
