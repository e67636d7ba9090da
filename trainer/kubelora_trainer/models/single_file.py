"""Single-file checkpoints in SDXL's original layout: checked by key, converted to a pipeline.

A file holds only weights, so configurations and tokenizers come from another pipeline. diffusers'
own loader translates the names. The result is written in diffusers layout to the user's cache
directory, where it is a pipeline like any other. Nothing is ever unpickled.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import StableDiffusionXLPipeline
from safetensors import SafetensorError, safe_open

from kubelora_trainer.models.pipeline_checks import (
    PICKLE_SUFFIXES,
    check_pipeline,
    header_and_samples,
    read_json,
)
from kubelora_trainer.utils.atomic_io import atomic_folder, writing_to
from kubelora_trainer.utils.errors import ModelError
from kubelora_trainer.utils.third_party import quiet_libraries

UNET = "model.diffusion_model."
VAE = "first_stage_model."
TEXT_ENCODER = "conditioner.embedders.0.transformer."
TEXT_ENCODER_2 = "conditioner.embedders.1.model."
_PARTS = {
    "UNet": UNET,
    "VAE": VAE,
    "first text encoder": TEXT_ENCODER,
    "second text encoder": TEXT_ENCODER_2,
}
_OTHERS: tuple[tuple[str, str], ...] = (
    ("joint_blocks.", "a Stable Diffusion 3 checkpoint"),
    ("double_blocks.", "a Flux checkpoint"),
    ("cond_stage_model.transformer.", "a Stable Diffusion 1 checkpoint"),
    ("cond_stage_model.model.", "a Stable Diffusion 2 checkpoint"),
    ("conditioner.embedders.0.model.", "an SDXL refiner"),
    ("control_model.", "a ControlNet"),
    ("edm_mean", "a Playground v2.5 checkpoint"),
    ("lora_unet_", "a LoRA, which goes to adapter.from,"),
    ("lora_te", "a LoRA, which goes to adapter.from,"),
)
"""Key prefixes that identify other kinds of models, without the UNet's own prefix."""
SINGLE_FILE_FORMAT = 1
"""Increment it when the conversion's output for the same file changes."""


@dataclass(frozen=True)
class Header:
    """Names and shapes of a file's tensors, and the type of the UNet's."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype


def single_file_of(place: Path) -> Path | None:
    """Return the checkpoint that ``place`` is, or the only one it holds; None for anything else."""
    if place.is_file():
        return None if place.suffix in PICKLE_SUFFIXES else place
    if not place.is_dir() or (place / "model_index.json").exists():
        return None
    files = list(place.glob("*.safetensors"))
    return files[0] if len(files) == 1 else None


def unpack(file: Path, lender: Path, cache: Path, say: Callable[[str], None]) -> Path:
    """Convert ``file`` to a pipeline in ``cache``, unless it is already there.

    Args:
        file: Single-file checkpoint.
        lender: Pipeline whose configurations and tokenizers are used; its weights are not read.
        cache: The user's cache directory.
        say: Called with a progress message.

    Returns:
        Directory of the pipeline.

    Raises:
        ModelError: The file is damaged or not SDXL base, the configurations do not match
            it, or the cache cannot be written.
    """
    header = read_header(file)
    check_single_file(file, header)
    check_pipeline(lender)
    folder = cache / "models" / _key(file, lender)
    if folder.is_dir():
        return folder
    say(f"model: converting {file} to {folder}, once")
    with writing_to(folder), atomic_folder(folder) as aside:
        _convert(file, header, lender, aside)
        _note_prediction(aside, header.shapes)
    return folder


def read_header(file: Path) -> Header:
    """Read names, shapes and types without reading weights. Raises ModelError."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
            types = [part.get_dtype() for name, part in slices.items() if name.startswith(UNET)]
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file} is damaged or not a safetensors file ({error}): download the model again."
        ) from error
    known = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
    found = max(set(types), key=types.count) if types else "F32"
    if found not in known:
        raise ModelError(
            f"{file} stores its UNet's weights in {found}, from which no adapter can be trained: "
            "use the model in fp16, bf16 or fp32."
        )
    return Header(shapes, known[found])


def check_single_file(file: Path, header: Header) -> None:
    """Check that a file is an SDXL base model. Raises ModelError that names what it is."""
    names = header.shapes.keys()
    bare = {name.removeprefix(UNET) for name in names}
    for start, what in _OTHERS:
        refiner = start.startswith("conditioner") and _any(names, TEXT_ENCODER_2)
        if _any(bare, start) and not refiner:
            raise ModelError(
                f"{file} is {what} not SDXL: model.uri needs an SDXL base model."
                if what.endswith(",")
                else f"{file} is {what}, not SDXL: model.uri needs an SDXL base model."
            )
    channels = header.shapes.get(f"{UNET}input_blocks.0.0.weight", (0, 4))[1]
    if channels != 4:
        raise ModelError(
            f"{file} has a UNet with {channels} input channels (inpainting has 9), but SDXL base "
            "has 4: model.uri needs an SDXL base model."
        )
    lacking = [part for part, start in _PARTS.items() if not _any(names, start)]
    if len(lacking) == len(_PARTS):
        raise ModelError(
            f"{file} is not a checkpoint in SDXL's original layout (no name begins with {UNET}): "
            "model.uri needs an SDXL base model."
        )
    if lacking:
        raise ModelError(
            f"{file} holds no {', no '.join(lacking)}: model.uri needs a complete checkpoint, or "
            "the folder of a pipeline."
        )


def _any(names: Iterable[str], start: str) -> bool:
    return any(name.startswith(start) for name in names)


def _key(file: Path, lender: Path) -> str:
    """Hash all inputs of the conversion: header and samples of the weights, and configurations."""
    digest = hashlib.sha256(f"single file {SINGLE_FILE_FORMAT}".encode())
    for chunk in header_and_samples(file):
        digest.update(chunk)
    for config in sorted(lender.glob("**/*.json")) + sorted(lender.glob("tokenizer*/*.txt")):
        digest.update(config.relative_to(lender).as_posix().encode() + config.read_bytes())
    return digest.hexdigest()[:32]


def _convert(file: Path, header: Header, lender: Path, target: Path) -> None:
    try:
        with quiet_libraries():
            pipeline = StableDiffusionXLPipeline.from_single_file(
                str(file),
                config=str(lender),
                local_files_only=True,
                torch_dtype=header.dtype,
                add_watermarker=False,
            )
    except NotImplementedError as error:  # missing tensors stay on the meta device
        raise ModelError(
            f"{file} lacks tensors that the configurations of {lender} require: download the model "
            "again, or set model.config to the right pipeline."
        ) from error
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{file} can't be loaded with the configurations of {lender}: {first_line}"
        ) from error
    with quiet_libraries():
        pipeline.save_pretrained(target, safe_serialization=True)


def _note_prediction(folder: Path, names: Iterable[str]) -> None:
    """Record v-prediction, which checkpoints mark with empty tensors by ComfyUI's convention."""
    marks = {"v_pred", "ztsnr"} & set(names)
    if "v_pred" not in marks:
        return
    path = folder / "scheduler" / "scheduler_config.json"
    config = read_json(path) | {"prediction_type": "v_prediction"}
    if "ztsnr" in marks:
        config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
