"""kohya's LoRA format, read by sd-scripts, ComfyUI and A1111: sgm names, modelspec metadata.

A kohya file stores one alpha per layer, and readers multiply by ``alpha / rank``. Some readers
(diffusers among them) get it wrong if alphas differ between layers, so every layer is written with
the same alpha and the rest of its scale is folded into the up-projection. ``export/writers.py``
writes the file.
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

_DOWN, _UP, _ALPHA = ".lora_down.weight", ".lora_up.weight", ".alpha"


@dataclass(frozen=True)
class KohyaLayer:
    """One layer of a kohya file: down (rank, inputs...), up (outputs, rank...), fp32."""

    down: torch.Tensor
    up: torch.Tensor
    alpha: float

    @property
    def scale(self) -> float:
        """Factor by which every reader multiplies the update."""
        return self.alpha / self.down.shape[0]

    def update(self) -> torch.Tensor:
        """Compute the update of the weight: scale * up @ down, (outputs, flattened inputs)."""
        return self.scale * self.up.flatten(1) @ self.down.flatten(1)


def common_alpha(layers: Sequence[TrainedLayer]) -> float:
    """Return the most frequent alpha, rounded to bf16 so that a reader's cast changes nothing."""
    alphas = Counter(layer.module.alpha for layer in layers)
    return float(torch.tensor(alphas.most_common(1)[0][0]).bfloat16())


def kohya_state(
    layers: Sequence[TrainedLayer], unet_config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Build the tensors of a kohya file.

    Args:
        layers: The layers to write.
        unet_config: The UNet's configuration, which maps layer names to sgm's.
        dtype: Type of the weights; alphas are fp32 scalars.

    Returns:
        Tensors by key.
    """
    alpha = common_alpha(layers)
    stems = kohya_names(unet_config, ((one.module.part, one.module.name) for one in layers))
    state: dict[str, torch.Tensor] = {}
    for one in layers:
        stem = stems[one.module.part, one.module.name]
        up = one.lora_b.detach().float() * (one.module.alpha / alpha)
        state[stem + _DOWN] = one.lora_a.detach().to("cpu", dtype).contiguous()
        state[stem + _UP] = up.to("cpu", dtype).contiguous()
        state[stem + _ALPHA] = torch.tensor(alpha)
    return state


def kohya_metadata(
    layers: Sequence[TrainedLayer], title: str, resolution: int, prediction_type: str
) -> dict[str, str]:
    """Build the metadata that user interfaces read: modelspec 1.0 and kohya's own ``ss_`` keys.

    There is no date, so that equal adapters give equal files.

    Args:
        layers: The layers of the file.
        title: Title shown to users.
        resolution: Edge length in pixels.
        prediction_type: diffusers' name of the prediction type.
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
    """Read the layers of a kohya file, by the stem of their keys.

    If alpha is absent or 0 the scale is 1, as in kohya's own reader.

    Raises:
        ValueError: A key belongs to no LoRA layer, lacks its counterpart, or is not a matrix.
    """
    state = load_file(path)
    stems = {key.removesuffix(_DOWN) for key in state if key.endswith(_DOWN)}
    known = {stem + end for stem in stems for end in (_DOWN, _UP, _ALPHA)}
    unmatched = sorted(state.keys() - known) + sorted(
        stem + _UP for stem in stems if stem + _UP not in state
    )
    if unmatched:
        raise ValueError(
            f"{len(unmatched)} keys do not belong to a LoRA layer or are missing from one, such as "
            f"{unmatched[0]}"
        )
    return {stem: _layer(state, stem) for stem in sorted(stems)}


def _layer(state: Mapping[str, torch.Tensor], stem: str) -> KohyaLayer:
    down, up = state[stem + _DOWN].float(), state[stem + _UP].float()
    if down.ndim < 2 or up.ndim < 2:
        raise ValueError(f"{stem} is not a pair of matrices or convolution kernels")
    alpha = state.get(stem + _ALPHA)
    return KohyaLayer(down, up, (0 if alpha is None else float(alpha)) or float(down.shape[0]))
