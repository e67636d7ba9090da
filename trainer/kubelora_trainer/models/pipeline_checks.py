"""Checks that a directory holds an SDXL pipeline, before anything is loaded.

Only configurations and the headers of weight files are read, so a 7 GB model takes milliseconds.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kubelora_api.suggestions import did_you_mean
from kubelora_trainer.utils.errors import ModelError

PIPELINE = "StableDiffusionXLPipeline"
PIPELINE_PARTS = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
}
PICKLE_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")
# Enough to distinguish fine-tunes of one model, and still milliseconds per file.
SAMPLES_PER_FILE = 64
SAMPLE_BYTES = 4096
WANTED = "an SDXL pipeline in diffusers layout, such as stabilityai/stable-diffusion-xl-base-1.0"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file of the model. Raises ModelError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: model.uri needs {WANTED}.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object: download the model again.")
    return content


def check_pipeline(folder: Path) -> dict[str, Any]:
    """Check that every part is SDXL's and return the pipeline's index.

    Raises ModelError that names what was found instead.
    """
    index = _index_of(folder)
    found = str(index.get("_class_name"))
    if found != PIPELINE:
        raise ModelError(f"{folder} holds a {found}, not a {PIPELINE}: model.uri needs {WANTED}.")
    for part, kind in PIPELINE_PARTS.items():
        listed = index.get(part)
        there = listed[1] if isinstance(listed, list) and len(listed) == 2 else listed
        if there != kind:
            raise ModelError(f"{folder} has {there or 'nothing'} as its {part}; SDXL has {kind}.")
    _check_unet(folder)
    return index


def _index_of(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        raise ModelError(f"The model folder {folder} does not exist: see model.uri.")
    if folder.suffix in PICKLE_SUFFIXES and folder.is_file():
        raise ModelError(
            f"{folder} is a pickled checkpoint, which can run code when it is loaded: model.uri "
            f"needs the folder of {WANTED}, with weights in .safetensors."
        )
    if folder.is_file():
        raise ModelError(
            f"{folder} is a file, but model.uri needs the folder of a pipeline: {WANTED}."
        )
    if not any(folder.iterdir()):
        raise ModelError(f"The model folder {folder} is empty: model.uri needs {WANTED}.")
    if not (folder / "model_index.json").is_file():
        raise ModelError(
            f"{folder} is not a diffusers pipeline (no model_index.json): model.uri needs {WANTED}."
        )
    return read_json(folder / "model_index.json")


def _check_unet(folder: Path) -> None:
    """Check SDXL's conditioning: time ids, and the states of both text encoders concatenated."""
    unet = read_json(folder / "unet" / "config.json")
    kind = unet.get("addition_embed_type")
    if kind != "text_time":
        raise ModelError(
            f"The UNet in {folder} has addition_embed_type {kind!r}; SDXL's is 'text_time'. "
            f"model.uri needs {WANTED}."
        )
    widths = [
        read_json(folder / part / "config.json").get("hidden_size", 0)
        for part in ("text_encoder", "text_encoder_2")
    ]
    known = all(isinstance(width, int) for width in widths)
    if not known or unet.get("cross_attention_dim") != sum(widths):
        raise ModelError(
            f"The UNet in {folder} attends to {unet.get('cross_attention_dim')} channels, but its "
            f"text encoders give {widths[0]} + {widths[1]}: its parts do not match. Download the "
            "model again."
        )


def check_weights(folder: Path, variant: str | None) -> None:
    """Check that the variant's safetensors files are complete. Raises ModelError."""
    read_json(folder / "config.json")
    files = weight_files(folder, variant)
    if not files:
        raise ModelError(_missing(folder, variant))
    for file in files:
        _check_header(file)
    for index in folder.glob("*.safetensors.index*.json"):
        if is_of_variant(index.name, variant):
            _check_shards(index)


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """List the variant's safetensors files, sorted by name."""
    return sorted(f for f in folder.glob("*.safetensors") if is_of_variant(f.name, variant))


def is_of_variant(name: str, variant: str | None) -> bool:
    """Return True if a weight file or its index belongs to the variant.

    Names are ``stem[.variant][-i-of-n].safetensors`` and ``stem[-i-of-n][.variant].safetensors``.
    """
    return _infixes(name) == ([variant] if variant else [])


def _infixes(name: str) -> list[str]:
    stem = name.split(".safetensors")[0]
    tail = name.split(".safetensors")[1].removeprefix(".index").removesuffix(".json").strip(".")
    return [part.split("-")[0] for part in stem.split(".")[1:]] + ([tail] if tail else [])


def _missing(folder: Path, variant: str | None) -> str:
    others = sorted({f.name for f in folder.glob("*.safetensors")})
    what = f"weights of variant {variant}" if variant else "plain safetensors weights"
    if others:
        near = (
            did_you_mean(variant or "", [one for name in others for one in _infixes(name)]) or "."
        )
        return f"{folder} holds no {what}, only {', '.join(others[:4])}: see model.variant{near}"
    if any(f.suffix in PICKLE_SUFFIXES for f in folder.iterdir()):
        return (
            f"{folder} holds no {what}, only pickles, which can run code when they are loaded: "
            "convert the model to safetensors."
        )
    advice = "download the model again"
    if variant:
        advice = f"correct model.variant, or {advice}"
    return f"{folder} holds no {what}: {advice}."


def _check_header(file: Path) -> None:
    """Open a file, which checks that the header parses and that offsets match the file's size."""
    try:
        with safe_open(file, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{file} is damaged or not a safetensors file ({error}): download the model again."
        ) from error


def _check_shards(index: Path) -> None:
    names = set(read_json(index).get("weight_map", {}).values())
    for name in sorted(names):
        if not (index.parent / name).is_file():
            raise ModelError(f"{index} names {name}, which is missing: download the model again.")


def fingerprint(folder: Path, variant: str | None, vae: Path, vae_variant: str | None) -> str:
    """Hash configurations and headers, sizes and samples of the weight files.

    Headers hold every tensor's name, dtype and shape. Of the weights, 64 evenly spaced pieces of 4
    KiB per file are read: fine-tunes of one model share everything else but differ nearly
    everywhere. Where and by which library version a configuration was written does not count.

    Args:
        folder: Directory of the pipeline.
        variant: Infix of its weight files.
        vae: Directory of the VAE in use.
        vae_variant: Infix of the VAE's weight files.

    Returns:
        SHA-256 in hex.
    """
    digest = hashlib.sha256()
    parts = [(folder / part, variant) for part in PIPELINE_PARTS if part != "vae"] + [
        (vae, vae_variant)
    ]
    configs = [folder / "model_index.json", folder / "scheduler" / "scheduler_config.json"]
    for config in configs:
        digest.update(config.name.encode() + _what_decides(config))
    for part, part_variant in parts:
        digest.update(_what_decides(part / "config.json"))
        for file in weight_files(part, part_variant):
            for chunk in header_and_samples(file):
                digest.update(chunk)
    return digest.hexdigest()


def _what_decides(config: Path) -> bytes:
    document = read_json(config)
    for key in ("_name_or_path", "_diffusers_version", "transformers_version"):
        document.pop(key, None)
    return json.dumps(document, sort_keys=True).encode()


def header_and_samples(file: Path) -> Iterator[bytes]:
    """Yield name, size, header and 64 evenly spaced pieces of 4 KiB of a safetensors file."""
    size = file.stat().st_size
    yield f"{file.name} {size}".encode()
    with file.open("rb") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        yield content.read(length)
        for piece in range(SAMPLES_PER_FILE):
            content.seek(8 + length + (size - 8 - length) * piece // SAMPLES_PER_FILE)
            yield content.read(SAMPLE_BYTES)
