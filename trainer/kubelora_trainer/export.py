"""Writes the adapter in diffusers' format, and proves that diffusers reads back what was trained.

A file without its adapter metadata loses alpha, one with a wrong key loses a layer, and both load
without an error. Success is therefore reported only after diffusers' own loader has put the file
onto a fresh UNet and that UNet has given the trained one's answer.
"""

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.utils import logging as diffusers_logging
from peft.tuners.lora import LoraLayer

from kubelora_api.names import OutputPath
from kubelora_trainer.adapter import ADAPTER_NAME, AdapterModule
from kubelora_trainer.atomic_files import sync_folder, writing_to
from kubelora_trainer.base_model import load_unet
from kubelora_trainer.errors import NumericalError

EFFECT_TOLERANCE = 1e-2
"""Largest deviation, as a share of what the adapter changes."""
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Deviation that rounding alone may give, as a share of the output: about eps of the dtype."""


@dataclass(frozen=True)
class ExportedFile:
    """A file of the adapter: where it is, its SHA-256 in hex, its size."""

    path: Path
    sha256: str
    bytes: int


@dataclass(frozen=True)
class ExportCheck:
    """What the comparison saw, as L2 norms over the output of one forward pass.

    deviation: reloaded against trained. effect: trained against the base model. output: trained.
    """

    deviation: float
    effect: float
    output: float


def export_diffusers(
    unet: UNet2DConditionModel,
    modules: Sequence[AdapterModule],
    folder: Path,
    *,
    masters: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[ExportedFile]:
    """Write ``folder/adapter/pytorch_lora_weights.safetensors``, whole or not at all.

    masters: (lora_a, lora_b) of each module in the modules' order; None takes the modules' own.
    dtype: of the tensors in the file.
    Raises NumericalError for weights that are not finite, ConfigurationError when the file can't
    be written.
    """
    weights = masters or [(module.lora_a, module.lora_b) for module in modules]
    state = {
        f"{module.name}.lora_{factor}.weight": tensor.detach().to("cpu", dtype).contiguous()
        for module, pair in zip(modules, weights, strict=True)
        for factor, tensor in zip("AB", pair, strict=True)
    }
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise NumericalError(
                f"The adapter was not exported: {name} holds values that are not finite in "
                f"{dtype}. Go back to the last checkpoint before they appeared."
            )
    target = folder / OutputPath.DIFFUSERS_WEIGHTS
    with writing_to(target):
        _write_whole(state, adapter_metadata(unet), target)
    return [_measured(target)]


def adapter_metadata(unet: UNet2DConditionModel) -> dict[str, Any]:
    """peft's configuration of the adapter, with sets sorted: equal adapters give equal files."""
    config = unet.peft_config[ADAPTER_NAME].to_dict()
    return {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.items()
    }


def _write_whole(state: dict[str, torch.Tensor], metadata: dict[str, Any], target: Path) -> None:
    """Write aside, flush to the disk, rename."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=".export-"))
    try:
        StableDiffusionXLPipeline.save_lora_weights(
            aside,
            unet_lora_layers=state,
            unet_lora_adapter_metadata=metadata,
            weight_name=target.name,
        )
        sort_header(aside / target.name)
        with (aside / target.name).open("rb+") as written:
            os.fsync(written.fileno())
        (aside / target.name).replace(target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def sort_header(path: Path) -> None:
    """Put a safetensors file's metadata in alphabetical order; the writer leaves it to chance.

    The header is 8 bytes of length and JSON, padded with spaces to a multiple of 8: sorting keys
    keeps its length.
    """
    with path.open("rb+") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            return  # another writer's spelling: correct as it is, though not canonical
        file.seek(8)
        file.write(text.ljust(length))


def _measured(path: Path) -> ExportedFile:
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return ExportedFile(path, digest, path.stat().st_size)


def verify_export(
    base_folder: Path,
    adapter_folder: Path,
    trained: UNet2DConditionModel,
    modules: Sequence[AdapterModule],
    *,
    variant: str | None = None,
) -> ExportCheck:
    """Load the exported file as a user would and compare with the trained UNet.

    base_folder: the pipeline. adapter_folder: holds pytorch_lora_weights.safetensors. A fresh UNet
    in the trained one's dtype and on its device is needed for the time of the comparison.
    Raises NumericalError when a module is missing, a scale or a weight differs, or the outputs do.
    """
    dtype, device = trained.conv_in.weight.dtype, trained.device
    fresh = load_unet(base_folder, variant=variant, dtype=dtype, device=device)
    without = probe(fresh)
    _load_as_a_user(fresh, adapter_folder)
    _compare_modules(fresh, modules, adapter_folder)
    with_adapter, expected = probe(fresh), probe(trained)
    check = ExportCheck(
        deviation=float((with_adapter - expected).norm()),
        effect=float((expected - without).norm()),
        output=float(expected.norm()),
    )
    _judge(check, modules, dtype, adapter_folder)
    return check


def _load_as_a_user(unet: UNet2DConditionModel, folder: Path) -> None:
    """The two calls inside ``pipeline.load_lora_weights(folder)``."""
    name = Path(OutputPath.DIFFUSERS_WEIGHTS).name
    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        state, alphas, metadata = StableDiffusionXLPipeline.lora_state_dict(
            folder, weight_name=name, unet_config=unet.config, return_lora_metadata=True
        )
        StableDiffusionXLPipeline.load_lora_into_unet(
            state, network_alphas=alphas, unet=unet, adapter_name=ADAPTER_NAME, metadata=metadata
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise NumericalError(
            f"The exported adapter in {folder} can't be loaded by diffusers: {error}"
        ) from error
    finally:
        diffusers_logging.set_verbosity(level)
    unet.eval()


def _compare_modules(
    fresh: UNet2DConditionModel, modules: Sequence[AdapterModule], folder: Path
) -> None:
    """Same layers, same scale, same numbers once rounded to the dtype of the trained weights."""
    loaded = {name: layer for name, layer in fresh.named_modules() if isinstance(layer, LoraLayer)}
    names = {module.name for module in modules}
    if loaded.keys() != names:
        odd = sorted(loaded.keys() ^ names)
        raise NumericalError(
            f"The exported adapter in {folder} gives {len(loaded)} layers, {len(names)} were "
            f"trained; the first that differs is {odd[0]}."
        )
    for module in modules:
        layer = loaded[module.name]
        scale = layer.scaling[ADAPTER_NAME]
        if abs(scale - module.alpha / module.rank) > 1e-6 * abs(scale):
            raise NumericalError(
                f"The exported adapter in {folder} scales {module.name} by {scale}, it was "
                f"trained with {module.alpha / module.rank}: its alpha was lost."
            )
        _compare_factor(layer.lora_A[ADAPTER_NAME].weight, module.lora_a, module.name, folder)
        _compare_factor(layer.lora_B[ADAPTER_NAME].weight, module.lora_b, module.name, folder)


def _compare_factor(loaded: torch.Tensor, trained: torch.Tensor, name: str, folder: Path) -> None:
    """Equal in the coarser of the two dtypes: a loader casts to the model's."""
    if loaded.dtype.itemsize < trained.dtype.itemsize:
        trained = trained.to(loaded.dtype)
    else:
        loaded = loaded.to(trained.dtype)
    if not torch.equal(loaded, trained):
        raise NumericalError(
            f"The exported adapter in {folder} holds other weights for {name} than were trained."
        )


def _judge(
    check: ExportCheck, modules: Sequence[AdapterModule], dtype: torch.dtype, folder: Path
) -> None:
    allowed = EFFECT_TOLERANCE * check.effect + ROUNDING[dtype] * check.output
    if not check.deviation <= allowed:
        raise NumericalError(
            f"The exported adapter in {folder} gives another output than the trained one: "
            f"deviation {check.deviation:.3g}, allowed {allowed:.3g}."
        )
    trained_at_all = any(bool(module.lora_b.any()) for module in modules)
    if trained_at_all and not check.effect > 0:
        raise NumericalError(
            f"The exported adapter in {folder} changes nothing, though its lora_B is not zero."
        )


@torch.no_grad()
def probe(unet: UNet2DConditionModel) -> torch.Tensor:
    """Output of one forward pass on fixed noise and conditions, fp32 (1, 4, 16, 16)."""
    generator = torch.Generator().manual_seed(0)
    config = unet.config
    pooled = unet.add_embedding.linear_1.in_features - 6 * config.addition_time_embed_dim
    dtype, device = unet.conv_in.weight.dtype, unet.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    answer: torch.Tensor = unet(
        normal(1, config.in_channels, 16, 16),
        torch.tensor([500], device=device),
        normal(1, 77, config.cross_attention_dim),
        added_cond_kwargs={
            "text_embeds": normal(1, pooled),
            "time_ids": torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]], device=device),
        },
        return_dict=False,
    )[0]
    return answer.float()
