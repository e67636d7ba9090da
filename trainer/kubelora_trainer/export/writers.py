"""Writers of the adapter in diffusers' and kohya's formats; each file is written atomically.

A file without its adapter metadata loses alpha, and one with a wrong key loses a layer, yet both
load without an error. So `verify_unet.py` checks every file that is written here.
"""

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import UNet2DConditionModel
from safetensors.torch import save_file
from torch import nn

from kubelora_api.names import OutputPath, kohya_weights
from kubelora_trainer.lora.adapter import ADAPTER_NAME, TrainedLayer
from kubelora_trainer.lora.factor_names import MAGNITUDE
from kubelora_trainer.lora.kohya_format import common_alpha, kohya_metadata, kohya_state
from kubelora_trainer.models.sgm_keys import SGM_PARTS, Part
from kubelora_trainer.utils.atomic_io import apply_umask, sync_folder, writing_to
from kubelora_trainer.utils.errors import NumericalError

EXPORT_DTYPES: dict[Literal["fp16", "bf16", "fp32"], torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


@dataclass(frozen=True)
class ExportedFile:
    """A file of the adapter: path, SHA-256 in hex, and size."""

    path: Path
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Title:
    """Metadata of a kohya file.

    Attributes:
        name: The job's name.
        resolution: Edge length in pixels.
        prediction_type: diffusers' name of the prediction type.
    """

    name: str
    resolution: int = 1024
    prediction_type: str = "epsilon"


def export_diffusers(
    unet: UNet2DConditionModel,
    layers: Sequence[TrainedLayer],
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    encoders: Mapping[Part, nn.Module] | None = None,
) -> ExportedFile:
    """Write ``folder/adapter/pytorch_lora_weights.safetensors``.

    Args:
        unet: The UNet with the adapter.
        layers: The trained layers.
        folder: The output directory.
        dtype: Type of the tensors in the file.
        encoders: The adapted text encoders. Their keys contain ``text_model``, which every version
            of diffusers' loader removes if it must.

    Raises:
        NumericalError: A weight is not finite.
        OutputError: The file cannot be written.
    """
    models: dict[Part, nn.Module] = {"unet": unet, **(encoders or {})}
    states: dict[Part, dict[str, torch.Tensor]] = {part: {} for part in SGM_PARTS}
    for one in layers:
        name = one.module.name
        if one.module.part != "unet":
            name = f"text_model.{name.removeprefix('text_model.')}"
        for factor, tensor in (("A", one.lora_a), ("B", one.lora_b)):
            key = f"{name}.lora_{factor}.weight"
            states[one.module.part][key] = tensor.to("cpu", dtype).contiguous()
        if one.magnitude is not None:
            magnitude = one.magnitude.to("cpu", torch.float32).contiguous()
            states[one.module.part][f"{name}.{MAGNITUDE}.weight"] = magnitude
    for state in states.values():
        _check_finite(state, dtype)
    metadata = {part: adapter_metadata(model) for part, model in models.items()}

    def write(path: Path) -> None:
        from diffusers import StableDiffusionXLPipeline  # a slow import, needed only at the end

        StableDiffusionXLPipeline.save_lora_weights(
            path.parent,
            unet_lora_layers=states["unet"],
            text_encoder_lora_layers=states["text_encoder"] or None,
            text_encoder_2_lora_layers=states["text_encoder_2"] or None,
            unet_lora_adapter_metadata=metadata["unet"],
            text_encoder_lora_adapter_metadata=metadata.get("text_encoder"),
            text_encoder_2_lora_adapter_metadata=metadata.get("text_encoder_2"),
            weight_name=path.name,
        )

    return _write_whole(folder / OutputPath.DIFFUSERS_WEIGHTS, write)


def export_kohya(
    unet_config: Mapping[str, Any],
    layers: Sequence[TrainedLayer],
    folder: Path,
    title: Title,
    *,
    dtype: torch.dtype = torch.float32,
) -> ExportedFile:
    """Write ``folder/adapter/<name>.safetensors`` in kohya's format.

    Args:
        unet_config: The UNet's configuration.
        layers: The trained layers.
        folder: The output directory.
        title: Metadata of the file.
        dtype: Type of the tensors in the file.

    Raises:
        NumericalError: A weight is not finite.
        OutputError: The file cannot be written.
    """
    state = kohya_state(layers, unet_config, dtype)
    _check_finite(state, dtype)
    metadata = kohya_metadata(layers, title.name, title.resolution, title.prediction_type)
    return _write_whole(
        folder / kohya_weights(title.name), lambda path: save_file(state, path, metadata)
    )


def dtype_that_holds(layers: Sequence[TrainedLayer], wanted: torch.dtype) -> torch.dtype:
    """Return ``wanted``, or fp32 if a factor would lose more in it than normal rounding.

    Only fp16 can be too narrow: its smallest step is 6e-8 and its largest value 65504. The
    criterion is the norm of the rounding error against twice the maximum for normal numbers.
    """
    if wanted != torch.float16:
        return wanted
    alpha = common_alpha(layers)
    for one in layers:
        for factor in (one.lora_a, one.lora_b, one.lora_b * (one.module.alpha / alpha)):
            exact = factor.float()
            if not (exact.half().float() - exact).norm() <= 2.0**-10 * exact.norm():
                return torch.float32
    return wanted


def _check_finite(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise NumericalError(
                f"The adapter was not exported: {name} holds values that are not finite in "
                f"{dtype}. Go back to the last checkpoint before they appeared or, if fp16 is too "
                "narrow for them, set output.dtype to bf16."
            )


def adapter_metadata(model: Any) -> dict[str, Any]:
    """Return peft's configuration with sets sorted, so that equal adapters give equal files."""
    config = model.peft_config[ADAPTER_NAME].to_dict()
    for field in ("rank_pattern", "alpha_pattern"):
        config[field] = with_stable_order(config[field])
    return {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }


def with_stable_order(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite patterns so that the first match still wins after diffusers has sorted them by name.

    If sorting would change the order, each pattern gets its index in front, as a regular-expression
    comment.
    """
    if list(patterns) == sorted(patterns):
        return dict(patterns)
    return {f"(?#{n:02d}){pattern}": patterns[pattern] for n, pattern in enumerate(patterns)}


def _write_whole(target: Path, write: Callable[[Path], None]) -> ExportedFile:
    """Write to a temporary directory, flush to disk, and rename."""
    with writing_to(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".export-"))
        try:
            write(aside / target.name)
            sort_header(aside / target.name)
            apply_umask(aside / target.name)
            with (aside / target.name).open("rb+") as written:
                os.fsync(written.fileno())
            (aside / target.name).replace(target)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return _measured(target)


def sort_header(path: Path) -> None:
    """Sort a safetensors file's metadata, whose order the writer leaves undefined.

    The header is 8 bytes of length and JSON, padded with spaces to a multiple of 8. Sorting keys
    keeps its length.
    """
    with path.open("rb+") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            return  # another writer's formatting: correct, though not canonical
        file.seek(8)
        file.write(text.ljust(length))


def _measured(path: Path) -> ExportedFile:
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return ExportedFile(path, digest, path.stat().st_size)
