"""Verification that an exported adapter loads exactly as it was trained.

Success is reported only after each file has been loaded as a user would load it: diffusers' own
loader applies it to a fresh UNet, every layer's scale and weights equal the trained ones up to
rounding, and the UNet's output matches. The kohya file is also read key by key without diffusers,
and each layer's update is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.utils import logging as diffusers_logging
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError
from torch import nn

from kubelora_api.names import OutputPath
from kubelora_trainer.lora.adapter import ADAPTER_NAME, TrainedLayer, full_name
from kubelora_trainer.lora.dora import with_peft_dora
from kubelora_trainer.lora.kohya_format import read_kohya
from kubelora_trainer.models.pipeline import load_unet
from kubelora_trainer.models.sgm_keys import Part, kohya_names
from kubelora_trainer.utils.errors import NumericalError

UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Largest relative error of rounding a number that is normal in the dtype (half its epsilon)."""
SMALLEST_STEP = {torch.float32: 2.0**-149, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}
"""Spacing of the dtype's subnormal numbers."""
EFFECT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Largest deviation of the output, by the file's dtype, relative to the adapter's effect."""
NOISE_ALLOWANCE = 2.0
"""Allowed deviation from rounding in the model's dtype, as a multiple of the measured noise."""


@dataclass(frozen=True)
class ExportCheck:
    """Result of a comparison, as L2 norms over the output of one forward pass.

    Attributes:
        deviation: Reloaded minus trained model.
        effect: Trained model minus base model.
        output: Trained model.
        noise: Effect of one rounding error in the model's dtype; with DoRA, the effect of a
            reader's norms in that dtype if that is larger.
        shows: True if some update is too large to be lost in the rounding of the model's dtype.
    """

    deviation: float
    effect: float
    output: float
    noise: float
    shows: bool


def verify_export(
    base_folder: Path,
    files: Sequence[Path],
    trained: UNet2DConditionModel,
    layers: Sequence[TrainedLayer],
    *,
    variant: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[ExportCheck]:
    """Load each exported file as a user would and compare it with the trained UNet.

    A fresh UNet in the trained one's dtype and on its device is needed for the comparison.

    Args:
        base_folder: Directory of the pipeline.
        files: Files in diffusers' or kohya's format.
        trained: The UNet with the trained adapter.
        layers: The trained layers.
        variant: Infix of the base model's weight files.
        dtype: Type of the tensors in the files.

    Raises:
        NumericalError: A layer is missing, or a scale, a weight or the output differs.
    """
    model_dtype, device = trained.conv_in.weight.dtype, trained.device
    fresh = load_unet(base_folder, variant=variant, dtype=model_dtype, device=device)
    trained.eval()
    without, expected = probe(fresh), probe(trained)
    noise = float((probe(trained, roundoff=UNIT_ROUNDOFF[model_dtype]) - expected).norm())
    with with_peft_dora(trained, ADAPTER_NAME):
        noise = max(noise, float((probe(trained) - expected).norm()))
    checks = []
    for file in files:
        if file.name != Path(OutputPath.DIFFUSERS_WEIGHTS).name:
            compare_updates(file, trained, layers, dtype)
        _load_with_diffusers(fresh, file)
        compare_layers(fresh, layers, file, dtype)
        check = ExportCheck(
            deviation=float((probe(fresh) - expected).norm()),
            effect=float((expected - without).norm()),
            output=float(expected.norm()),
            noise=noise,
            shows=any_update_shows(trained, layers, "unet", model_dtype),
        )
        check_output(check, dtype, file)
        checks.append(check)
        fresh.delete_adapters(ADAPTER_NAME)
    return checks


def _load_with_diffusers(unet: UNet2DConditionModel, file: Path) -> None:
    """Repeat the two calls inside ``pipeline.load_lora_weights(folder, weight_name=...)``."""
    from diffusers import StableDiffusionXLPipeline  # a slow import, needed only at the end

    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        state, alphas, metadata = StableDiffusionXLPipeline.lora_state_dict(
            file.parent, weight_name=file.name, unet_config=unet.config, return_lora_metadata=True
        )
        StableDiffusionXLPipeline.load_lora_into_unet(
            state, network_alphas=alphas, unet=unet, adapter_name=ADAPTER_NAME, metadata=metadata
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise NumericalError(
            f"The exported adapter {file} can't be loaded by diffusers: {error}"
        ) from error
    finally:
        diffusers_logging.set_verbosity(level)
    unet.eval()


def compare_updates(
    file: Path,
    trained: UNet2DConditionModel,
    layers: Sequence[TrainedLayer],
    dtype: torch.dtype,
) -> None:
    """Check that a kohya file holds every layer's update and nothing else.

    The error of a product is bounded by those of its factors.

    Args:
        file: The kohya file.
        trained: The trained UNet, whose configuration maps layer names.
        layers: The trained layers.
        dtype: Type of the tensors in the file.

    Raises:
        NumericalError: The file cannot be read, or a layer is missing or differs.
    """
    try:
        found = read_kohya(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise NumericalError(f"The exported adapter {file} can't be read: {error}") from error
    stems = kohya_names(trained.config, ((one.module.part, one.module.name) for one in layers))
    if found.keys() != set(stems.values()):
        different = sorted(found.keys() ^ set(stems.values()))
        raise NumericalError(
            f"The exported adapter {file} holds {len(found)} layers, but {len(layers)} were "
            f"trained; the first that differs is {different[0]}."
        )
    for one in layers:
        layer = found[stems[one.module.part, one.module.name]]
        a, b = one.lora_a.cpu().double(), one.lora_b.cpu().double()
        wanted = one.module.scale * b.flatten(1) @ a.flatten(1)
        share = UNIT_ROUNDOFF[dtype] + UNIT_ROUNDOFF[torch.float32]
        steps = SMALLEST_STEP[dtype] * (a.norm() + b.norm()) * (a.numel() + b.numel()) ** 0.5
        allowed = 2.5 * share * one.module.scale * float(a.norm() * b.norm())
        allowed += one.module.scale * float(steps)
        if not float((layer.update().double() - wanted).norm()) <= allowed:
            raise NumericalError(
                f"The exported adapter {file} updates {one.module.full_name} differently from what "
                "was trained."
            )


def compare_layers(
    fresh: nn.Module,
    layers: Sequence[TrainedLayer],
    file: Path,
    dtype: torch.dtype,
    part: Part = "unet",
) -> None:
    """Check that a loaded model has the same layers and weights, up to rounding of file and model.

    In diffusers' format each scale must be the trained one; a kohya file may have folded part of it
    into the up-projection.

    Args:
        fresh: The loaded model.
        layers: The trained layers of all parts.
        file: The exported file.
        dtype: Type of the tensors in the file.
        part: Part that ``fresh`` is.

    Raises:
        NumericalError: A layer is missing, or a scale or a weight differs.
    """
    wanted = [one for one in layers if one.module.part == part]
    loaded = {name: layer for name, layer in fresh.named_modules() if isinstance(layer, LoraLayer)}
    names = {one.module.name for one in wanted}
    if loaded.keys() != names:
        different = sorted(loaded.keys() ^ names)
        raise NumericalError(
            f"The exported adapter {file} loads {len(loaded)} layers, but {len(names)} were "
            f"trained; the first that differs is {full_name(part, different[0])}."
        )
    folded = file.name != Path(OutputPath.DIFFUSERS_WEIGHTS).name
    for one in wanted:
        module, layer = one.module, loaded[one.module.name]
        scale = layer.scaling[ADAPTER_NAME]
        if not folded and abs(scale - module.scale) > 1e-6 * abs(scale):
            raise NumericalError(
                f"The exported adapter {file} scales {module.full_name} by {scale}, but it was "
                f"trained with {module.scale}: its alpha was lost."
            )
        up = layer.lora_B[ADAPTER_NAME].weight.double() * (scale / module.scale)
        down = layer.lora_A[ADAPTER_NAME].weight
        if not (_close(down, one.lora_a, dtype, down.dtype, 1.0)) or not (
            _close(up, one.lora_b, dtype, down.dtype, scale / module.scale)
        ):
            raise NumericalError(
                f"The exported adapter {file} holds weights for {module.full_name} that differ "
                "from the trained ones."
            )
        if one.magnitude is not None:
            magnitude = layer.lora_magnitude_vector[ADAPTER_NAME].weight
            if not _close(magnitude, one.magnitude, torch.float32, magnitude.dtype, 1.0):
                raise NumericalError(
                    f"The exported adapter {file} holds magnitudes for {module.full_name} that "
                    "differ from the trained ones."
                )


def _close(
    loaded: torch.Tensor,
    trained: torch.Tensor,
    file_dtype: torch.dtype,
    model_dtype: torch.dtype,
    unfolded: float,
) -> bool:
    """Return True if rounding to the file's and then the model's dtype explains the difference.

    unfolded: factor by which the loaded weights, and hence their subnormal steps, were multiplied.
    """
    expected = trained.to(loaded.device).double()
    share = UNIT_ROUNDOFF[file_dtype] + UNIT_ROUNDOFF[model_dtype] + UNIT_ROUNDOFF[torch.float32]
    step = SMALLEST_STEP[file_dtype] + SMALLEST_STEP[model_dtype]
    allowed = share * float(expected.norm()) + abs(unfolded) * step * expected.numel() ** 0.5
    return bool((loaded.double() - expected).norm() <= allowed)


def any_update_shows(
    trained: nn.Module, layers: Sequence[TrainedLayer], part: Part, dtype: torch.dtype
) -> bool:
    """Return True if any layer's update exceeds rounding in ``dtype``, relative to its weights.

    After a few warm-up steps none may: such an adapter adds less than the last digit to a layer's
    output.

    Args:
        trained: The model of ``part`` with its adapter.
        layers: The trained layers of all parts.
        part: Part that ``trained`` is.
        dtype: Type of the model.
    """
    for one in layers:
        if one.module.part != part:
            continue
        layer = trained.get_submodule(one.module.name)
        base: Any = getattr(layer, "base_layer", layer)
        a, b = one.lora_a.double().flatten(1), one.lora_b.double().flatten(1)
        # |BA|^2 is the trace of B'B AA', which needs only rank x rank products.
        update = abs(one.module.scale) * float(((b.T @ b) * (a @ a.T)).sum()) ** 0.5
        if update > UNIT_ROUNDOFF[dtype] * float(base.weight.float().norm()):
            return True
    return False


def check_output(check: ExportCheck, dtype: torch.dtype, file: Path, part: Part = "unet") -> None:
    """Check that rounding explains the deviation of the output.

    A deep UNet in bf16 amplifies a single rounding error to 1 % of its output.

    Args:
        check: The comparison.
        dtype: Type of the tensors in the file.
        file: The exported file.
        part: The compared model.

    Raises:
        NumericalError: The output deviates more, or the adapter has no effect.
    """
    allowed = EFFECT_TOLERANCE[dtype] * check.effect + NOISE_ALLOWANCE * check.noise
    if not check.deviation <= allowed:
        raise NumericalError(
            f"The exported adapter {file} gives a different output from the trained one: "
            f"deviation {check.deviation:.3g}, allowed {allowed:.3g}."
        )
    if check.shows and not check.effect > 0:
        raise NumericalError(
            f"The exported adapter {file} changes nothing in {part}, although its updates are "
            "larger than rounding."
        )


@torch.no_grad()
def probe(unet: UNet2DConditionModel, *, roundoff: float = 0.0) -> torch.Tensor:
    """Run one forward pass on fixed noise and conditions; returns fp32 (1, 4, 16, 16).

    roundoff: relative perturbation, of random sign, of each output of the first convolution.
    """
    generator = torch.Generator().manual_seed(0)
    config = unet.config
    pooled = unet.add_embedding.linear_1.in_features - 6 * config.addition_time_embed_dim
    dtype, device = unet.conv_in.weight.dtype, unet.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def disturb(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        signs = torch.randn(output.shape, generator=generator).sign().to(device)
        return (output.float() * (1 + roundoff * signs)).to(output.dtype)

    inputs = (
        normal(1, config.in_channels, 16, 16),
        torch.tensor([500], device=device),
        normal(1, 77, config.cross_attention_dim),
    )
    conditions = {
        "text_embeds": normal(1, pooled),
        "time_ids": torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]], device=device),
    }
    hook = unet.conv_in.register_forward_hook(disturb) if roundoff else None
    try:
        answer: torch.Tensor = unet(*inputs, added_cond_kwargs=conditions, return_dict=False)[0]
    finally:
        if hook:
            hook.remove()
    return answer.float()
