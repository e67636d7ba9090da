"""The adapter as kohya's sd-scripts, ComfyUI and A1111 read it: sgm names, modelspec metadata.

A kohya file holds an alpha for each layer, and readers multiply by ``alpha / rank``. Not all of
them (diffusers among them) get it right where alphas differ between layers, so one alpha stands
everywhere and what is left of a layer's scale is folded into its up-projection.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kubelora_trainer.lora.adapter import TrainedLayer
from kubelora_trainer.models.sgm_keys import kohya_names

DOWN, UP, ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"


@dataclass(frozen=True)
class KohyaLayer:
    """One layer of a kohya file: down (rank, inputs...), up (outputs, rank...), fp32."""

    down: torch.Tensor
    up: torch.Tensor
    alpha: float

    @property
    def scale(self) -> float:
        """What every reader multiplies the update by."""
        return self.alpha / self.down.shape[0]

    def update(self) -> torch.Tensor:
        """What the layer's weight gains: scale times up times down, (outputs, inputs flattened)."""
        return self.scale * self.up.flatten(1) @ self.down.flatten(1)


def common_alpha(layers: Sequence[TrainedLayer]) -> float:
    """The alpha that most layers have, as bf16 holds it: a reader that casts it changes nothing."""
    alphas = Counter(layer.module.alpha for layer in layers)
    return float(torch.tensor(alphas.most_common(1)[0][0]).bfloat16())


def kohya_state(
    layers: Sequence[TrainedLayer], unet_config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Tensors of the file by key, weights in ``dtype``, alphas fp32 scalars."""
    alpha = common_alpha(layers)
    stems = kohya_names(unet_config, ((one.module.part, one.module.name) for one in layers))
    state: dict[str, torch.Tensor] = {}
    for one in layers:
        stem = stems[one.module.part, one.module.name]
        up = one.lora_b.detach().float() * (one.module.alpha / alpha)
        state[stem + DOWN] = one.lora_a.detach().to("cpu", dtype).contiguous()
        state[stem + UP] = up.to("cpu", dtype).contiguous()
        state[stem + ALPHA] = torch.tensor(alpha)
    return state


def kohya_metadata(
    layers: Sequence[TrainedLayer], title: str, resolution: int, prediction_type: str
) -> dict[str, str]:
    """What interfaces read of a file: modelspec 1.0 and kohya's own ``ss_`` keys.

    resolution: edge in pixels. prediction_type: diffusers' name. There is no date, so that equal
    adapters give equal files.
    """
    ranks = Counter(layer.module.rank for layer in layers)
    prediction = {"v_prediction": "v"}.get(prediction_type, prediction_type)
    return {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-xl-v1-base/lora",
        "modelspec.implementation": "https://github.com/Stability-AI/generative-models",
        "modelspec.title": title,
        "modelspec.resolution": f"{resolution}x{resolution}",
        "modelspec.prediction_type": prediction,
        "ss_output_name": title,
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(ranks.most_common(1)[0][0]),
        "ss_network_alpha": f"{common_alpha(layers):g}",
        "ss_network_args": json.dumps({}),
        "ss_v2": "False",
    }


def read_kohya(path: Path) -> dict[str, KohyaLayer]:
    """Layers of a kohya file by the stem of their keys.

    Without alpha, or with 0, the scale is 1, as kohya's own reader has it.
    Raises ValueError naming keys that are no part of a LoRA layer, or that lack their counterpart,
    and layers that are no matrices.
    """
    state = load_file(path)
    stems = {key.removesuffix(DOWN) for key in state if key.endswith(DOWN)}
    known = {stem + end for stem in stems for end in (DOWN, UP, ALPHA)}
    odd = sorted(state.keys() - known) + sorted(
        stem + UP for stem in stems if stem + UP not in state
    )
    if odd:
        raise ValueError(f"{len(odd)} keys are not a LoRA layer's or lack one, such as {odd[0]}")
    return {stem: _layer(state, stem) for stem in sorted(stems)}


def _layer(state: Mapping[str, torch.Tensor], stem: str) -> KohyaLayer:
    down, up = state[stem + DOWN].float(), state[stem + UP].float()
    if down.ndim < 2 or up.ndim < 2:
        raise ValueError(f"{stem} is no pair of matrices or kernels")
    alpha = state.get(stem + ALPHA)
    return KohyaLayer(down, up, (0 if alpha is None else float(alpha)) or float(down.shape[0]))
