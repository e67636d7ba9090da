"""LoRA adapters for the text encoders, in the layers that SDXL's conditioning comes from.

The UNet receives the penultimate hidden state of both encoders and the pooled output of the second.
The first encoder's last layer contributes nothing, so an adapter there would never learn.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from peft import inject_adapter_in_model
from torch import nn

from kubelora_api.spec import Adapter
from kubelora_api.types import TextEncoder
from kubelora_trainer.lora.adapter import (
    ADAPTER_NAME,
    AdapterModule,
    full_name,
    initialised_modules,
    peft_config,
)
from kubelora_trainer.lora.target_modules import matches
from kubelora_trainer.utils.third_party import QUANTISATION_PACKAGES, hidden_packages

TEXT_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
TEXT_FEED_FORWARD = ("fc1", "fc2")
_T = TypeVar("_T")


def text_targets(encoder: nn.Module, part: TextEncoder, targets: str) -> list[str]:
    """Select the encoder's layers to adapt, in its own order.

    Args:
        encoder: The text encoder.
        part: Which of the two encoders it is.
        targets: The job's ``adapter.targets``: "attention", or anything else to include the
            feed-forward layers.
    """
    ends = TEXT_ATTENTION if targets == "attention" else TEXT_ATTENTION + TEXT_FEED_FORWARD
    names = [
        name
        for name, layer in encoder.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in ends
    ]
    if part == "text_encoder_2":
        return names
    last = max(_layer_number(name) for name in names)
    return [name for name in names if _layer_number(name) < last]


def _layer_number(name: str) -> int:
    """Parse the layer number: 11 for ``encoder.layers.11.mlp.fc1``."""
    return int(name.partition("layers.")[2].partition(".")[0])


def add_text_adapter(
    encoder: nn.Module, part: TextEncoder, adapter: Adapter, seed: int
) -> tuple[AdapterModule, ...]:
    """Add a trainable fp32 adapter to a frozen text encoder without changing what it computes.

    The job's patterns match full names (``text_encoder.encoder.layers.0.self_attn.q_proj``), but
    peft sees only names within the encoder; so each matching layer is passed to peft by its own
    name.

    Args:
        encoder: The frozen text encoder.
        part: Which of the two encoders it is.
        adapter: The job's ``spec.adapter``.
        seed: Seed of the initial weights.
    """
    targets = text_targets(encoder, part, adapter.targets)
    ranks = {n: r for n in targets if (r := _own(adapter.rank_pattern.items(), part, n))}
    alphas = {n: a for n in targets if (a := _own(adapter.alpha_pattern.items(), part, n))}
    config = peft_config(adapter, targets, _escaped(ranks), _escaped(alphas))
    with torch.random.fork_rng(devices=[]), hidden_packages(QUANTISATION_PACKAGES):
        inject_adapter_in_model(config, encoder, adapter_name=ADAPTER_NAME)
    return initialised_modules(encoder, part, adapter.init, seed)


def _escaped(by_name: Mapping[str, _T]) -> dict[str, _T]:
    """Escape names into patterns that match exactly these names."""
    return {name.replace(".", r"\."): value for name, value in by_name.items()}


def _own(patterns: Iterable[tuple[str, _T]], part: TextEncoder, name: str) -> _T | None:
    """Return the value of the first pattern that matches the layer's full name."""
    full = full_name(part, name)
    return next((value for pattern, value in patterns if matches(pattern, full)), None)
