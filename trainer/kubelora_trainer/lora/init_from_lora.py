"""Initialisation of an adapter from an existing LoRA, in diffusers' or kohya's format.

The job defines which layers are adapted and at which rank, and the file must match. A layer that
exists on only one side would be lost or start from zero silently, so it is an error.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from kubelora_api.names import CHECKPOINT_MANIFEST, OutputPath
from kubelora_trainer.lora.adapter import AdapterModule, full_name
from kubelora_trainer.lora.factor_names import MAGNITUDE
from kubelora_trainer.lora.kohya_format import read_kohya
from kubelora_trainer.lora.target_modules import matches
from kubelora_trainer.models.pipeline_checks import PICKLE_SUFFIXES
from kubelora_trainer.models.sgm_keys import SGM_PARTS, kohya_names
from kubelora_trainer.utils.errors import ModelError

LORA_METADATA = "lora_adapter_metadata"
TEXT_NAMES = {
    "text_encoder": ("text_encoder.", "lora_te1_"),
    "text_encoder_2": ("text_encoder_2.", "lora_te2_"),
}
"""Prefixes of the text encoders' layers in diffusers' and in kohya's files."""
ENDS = {".lora_A.weight": "down", ".lora.down.weight": "down"}
ENDS |= {".lora_B.weight": "up", ".lora.up.weight": "up"}
ENDS |= {f".{MAGNITUDE}": "magnitude", f".{MAGNITUDE}.weight": "magnitude"}


@dataclass(frozen=True)
class FoundLayer:
    """A layer's adapter as read from a file: it adds ``scale * up @ down`` to the layer's weight.

    Attributes:
        down: Down-projection, (rank, inputs...).
        up: Up-projection, (outputs, rank...).
        scale: Factor of the update.
        magnitude: DoRA magnitudes, the norms of the adapted weight; None for a plain LoRA.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None


@torch.no_grad()
def warm_start(modules: Sequence[AdapterModule], unet: UNet2DConditionModel, place: Path) -> Path:
    """Initialise the adapter from the LoRA at ``place``.

    The adapted model then computes what the file makes of it: if the file's scale differs from the
    job's, the up-projection absorbs the difference. A DoRA that starts from a LoRA takes the norms
    of its adapted weights as magnitudes.

    Args:
        modules: The adapter's modules, which are overwritten.
        unet: The model whose configuration maps kohya's names.
        place: A file, or a directory that holds one.

    Returns:
        The file that was read.

    Raises:
        ModelError: The file cannot be read, or its layers, ranks or shapes differ from the
            adapter's.
    """
    file = lora_file(place)
    found = _read(file, unet, modules)
    by_name = {module.full_name: module for module in modules}
    only_file, only_job = found.keys() - by_name.keys(), by_name.keys() - found.keys()
    if only_file:
        raise ModelError(
            f"adapter.from: {file} holds {len(only_file)} layers that this job does not adapt, "
            f"such as {min(only_file)}: {_widen(only_file)}, or remove them from the file."
        )
    if only_job:
        raise ModelError(
            f"adapter.from: {file} lacks {len(only_job)} layers that this job adapts, such as "
            f"{min(only_job)}: {_narrow(only_job)}."
        )
    for name, module in by_name.items():
        layer = found[name]
        _check_shapes(layer, module, file)
        module.lora_a.copy_(layer.down)
        module.lora_b.copy_(layer.up.float() * (layer.scale / module.scale))
        if module.magnitude is not None:
            own = module.norms() if layer.magnitude is None else layer.magnitude
            module.magnitude.copy_(own)
    return file


def _widen(layers: Collection[str]) -> str:
    """Advise how the job can include layers that only the file has."""
    return _fields(layers, "add {} to adapter.textEncoders", "widen adapter.targets")


def _narrow(layers: Collection[str]) -> str:
    """Advise how the job can exclude layers that only the job has."""
    return _fields(layers, "remove {} from adapter.textEncoders", "narrow adapter.targets")


def _fields(layers: Collection[str], of_text: str, of_all: str) -> str:
    """Return ``of_text`` with the text encoders that ``layers`` belong to; ``of_all`` if none."""
    encoders = [
        part
        for part, starts in TEXT_NAMES.items()
        if any(layer.removeprefix("base_model.model.").startswith(starts) for layer in layers)
    ]
    return of_text.format(" and ".join(encoders)) if encoders else of_all


def lora_file(place: Path, asked_by: str = "adapter.from") -> Path:
    """Return the file itself, or the adapter that a directory holds.

    Args:
        place: A file, a run's output directory, or a directory with one .safetensors file.
        asked_by: Field or argument that named it, for messages.

    Raises:
        ModelError: There is no adapter, or more than one.
    """
    if place.is_file():
        if place.suffix in PICKLE_SUFFIXES:
            raise ModelError(
                f"{asked_by}: {place.name} is a pickle, which can run code when it is loaded: "
                "convert it to safetensors."
            )
        return place
    weights = Path(OutputPath.DIFFUSERS_WEIGHTS)
    usual = [place / name for name in (weights.name, weights) if (place / name).is_file()]
    files = usual[:1] or sorted(place.glob("*.safetensors"))
    if (place / CHECKPOINT_MANIFEST).is_file():
        raise ModelError(
            f"{asked_by}: {place} is a checkpoint, which holds more than an adapter: write its "
            f"adapter with `kubelora export {place}`, and use that."
        )
    if len(files) == 1:
        return files[0]
    what = f"{len(files)} .safetensors files; name one" if files else "no .safetensors file"
    if not files and (place / OutputPath.CHECKPOINTS).is_dir():
        what = f"no adapter yet; write a checkpoint's with `kubelora export {place}`"
    raise ModelError(f"{asked_by}: {place} holds {what}.")


def _read(
    file: Path, unet: UNet2DConditionModel, modules: Sequence[AdapterModule]
) -> dict[str, FoundLayer]:
    try:
        with safe_open(file, framework="pt") as opened:
            keys, metadata = list(opened.keys()), opened.metadata() or {}
        if any("dora_scale" in key for key in keys):
            raise ModelError(
                f"adapter.from: {file} is a DoRA in kohya's format, and programs disagree on what "
                "its dora_scale means: start from a DoRA in diffusers' format, or from a LoRA."
            )
        trains_magnitudes = any(module.magnitude is not None for module in modules)
        if any(MAGNITUDE in key for key in keys) and not trains_magnitudes:
            raise ModelError(
                f"adapter.from: {file} is a DoRA, and a plain LoRA cannot hold its magnitudes: "
                "set adapter.dora to true."
            )
        if all(key.startswith("lora_") for key in keys):
            return _from_kohya(file, unet, modules)
        return _from_diffusers(load_file(file), metadata)
    except (SafetensorError, OSError, ValueError, TypeError, re.error) as error:
        raise ModelError(f"adapter.from: {file} can't be read: {error}.") from error


def _from_kohya(
    file: Path, unet: UNet2DConditionModel, modules: Sequence[AdapterModule]
) -> dict[str, FoundLayer]:
    """Read layers by full name; keys use sgm's names, or diffusers' with underscores."""
    names = {f"lora_unet_{m.name.replace('.', '_')}": m.name for m in modules if m.part == "unet"}
    stems = kohya_names(unet.config, ((m.part, m.name) for m in modules))
    names |= {stem: full_name(part, name) for (part, name), stem in stems.items()}
    return {
        names.get(stem, stem): FoundLayer(layer.down, layer.up, layer.scale)
        for stem, layer in read_kohya(file).items()
    }


def _from_diffusers(
    state: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> dict[str, FoundLayer]:
    """Read layers by full name; without adapter metadata the scale is 1, as in diffusers."""
    config = json.loads(metadata.get(LORA_METADATA, "{}"))
    if not isinstance(config, dict):
        raise ValueError(f"its {LORA_METADATA} is not a JSON object")
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        end = next((end for end in ENDS if key.endswith(end)), None)
        if end is None:
            raise ValueError(f"{key} is not a key of a LoRA in diffusers' or kohya's format")
        name = key.removesuffix(end).removeprefix("unet.").replace(".text_model.", ".", 1)
        if tensor.ndim < 2 and ENDS[end] != "magnitude":
            raise ValueError(f"{key} is not a matrix or convolution kernel")
        factors.setdefault(name, {})[ENDS[end]] = tensor
    half = next((name for name, pair in factors.items() if not {"down", "up"} <= pair.keys()), None)
    if half is not None:
        raise ValueError(f"{half} has only one of its two factors")
    return {
        name: FoundLayer(
            pair["down"],
            pair["up"],
            _scale(name, pair["down"].shape[0], config),
            pair.get("magnitude"),
        )
        for name, pair in factors.items()
    }


def _scale(name: str, rank: int, config: Mapping[str, Any]) -> float:
    """Compute a layer's scale as peft does: the first pattern that matches wins."""
    part, _, inside = name.partition(".")
    if part not in SGM_PARTS:
        part, inside = "unet", name
    if f"{part}.lora_alpha" not in config:
        return 1.0
    patterns = config.get(f"{part}.alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{part}.alpha_pattern in its {LORA_METADATA} is not a JSON object")
    own = (value for pattern, value in patterns.items() if matches(pattern, inside))
    alpha = float(next(own, config[f"{part}.lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get(f"{part}.use_rslora") else rank)


def _check_shapes(layer: FoundLayer, module: AdapterModule, file: Path) -> None:
    rank = layer.down.shape[0]
    if rank != module.rank:
        raise ModelError(
            f"adapter.from: {file} has rank {rank} at {module.full_name}, this job {module.rank}: "
            f"set adapter.rank or rankPattern to {rank}."
        )
    found = (tuple(layer.down.shape), tuple(layer.up.shape))
    wanted = (tuple(module.lora_a.shape), tuple(module.lora_b.shape))
    if found != wanted:
        raise ModelError(
            f"adapter.from: {file} has shapes {found[0]} and {found[1]} at {module.full_name}, "
            f"this model {wanted[0]} and {wanted[1]}: the file belongs to another base model."
        )
    magnitude, own = layer.magnitude, module.magnitude
    if magnitude is not None and own is not None and magnitude.shape != own.shape:
        raise ModelError(
            f"adapter.from: {file} has magnitudes of shape {tuple(magnitude.shape)} at "
            f"{module.full_name}, this model {tuple(own.shape)}: the file belongs to another base "
            "model."
        )
    tensors = [tensor for tensor in (layer.down, layer.up, magnitude) if tensor is not None]
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise ModelError(
            f"adapter.from: {file} holds NaN or infinite values at {module.full_name}: use another "
            "file."
        )
