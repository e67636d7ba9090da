"""Proves that an exported adapter is read back as it was trained, by those who will read it.

Success is reported only after each file has been loaded as a user would load it: diffusers' own
loader puts it onto a fresh UNet, layer by layer the scale and the weights are the trained ones
within what rounding explains, and that UNet gives the trained one's answer. The kohya file is also
read key by key without diffusers, and each layer's update compared.
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
"""Largest deviation of the output, by the file's dtype, as a share of what the adapter changes."""
NOISE_ALLOWANCE = 2.0
"""Deviation that rounding in the model's dtype may give, as a multiple of the noise measured."""


@dataclass(frozen=True)
class ExportCheck:
    """What the comparison saw, as L2 norms over the output of one forward pass.

    deviation: reloaded against trained. effect: trained against the base model. output: trained.
    noise: what one rounding error in the model's dtype makes of the trained output; with DoRA, what
    a reader's norms in that dtype make of it, where that is more. shows: whether some update is too
    large to be lost in the rounding of the model's dtype.
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
    """Load each exported file as a user would and compare with the trained UNet.

    base_folder: the pipeline. files: in diffusers' or kohya's format. dtype: of their tensors. A
    fresh UNet in the trained one's dtype and on its device is needed for the time of the
    comparison.
    Raises NumericalError when a layer is missing, a scale or a weight differs, or the outputs do.
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
        _load_as_a_user(fresh, file)
        compare_layers(fresh, layers, file, dtype)
        check = ExportCheck(
            deviation=float((probe(fresh) - expected).norm()),
            effect=float((expected - without).norm()),
            output=float(expected.norm()),
            noise=noise,
            shows=some_update_shows(trained, layers, "unet", model_dtype),
        )
        judge(check, dtype, file)
        checks.append(check)
        fresh.delete_adapters(ADAPTER_NAME)
    return checks


def _load_as_a_user(unet: UNet2DConditionModel, file: Path) -> None:
    """The two calls inside ``pipeline.load_lora_weights(folder, weight_name=...)``."""
    from diffusers import StableDiffusionXLPipeline  # needed at the end alone

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
    """Whether a kohya file holds every layer's update, and nothing else.

    Raises NumericalError. The error of a product is bounded by those of its factors.
    """
    try:
        found = read_kohya(file)
    except (OSError, ValueError, SafetensorError) as error:
        raise NumericalError(f"The exported adapter {file} can't be read: {error}") from error
    stems = kohya_names(trained.config, ((one.module.part, one.module.name) for one in layers))
    if found.keys() != set(stems.values()):
        odd = sorted(found.keys() ^ set(stems.values()))
        raise NumericalError(
            f"The exported adapter {file} holds {len(found)} layers, {len(layers)} were trained; "
            f"the first that differs is {odd[0]}."
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
                f"The exported adapter {file} changes {one.module.full_name} otherwise than was "
                "trained."
            )


def compare_layers(
    fresh: nn.Module,
    layers: Sequence[TrainedLayer],
    file: Path,
    dtype: torch.dtype,
    part: Part = "unet",
) -> None:
    """Same layers, and the same numbers within the rounding of file and model.

    fresh: the loaded model of ``part``. dtype: of the file's tensors.

    In diffusers' format each scale must be the trained one; a kohya file may have moved a part of
    it into the up-projection.
    """
    wanted = [one for one in layers if one.module.part == part]
    loaded = {name: layer for name, layer in fresh.named_modules() if isinstance(layer, LoraLayer)}
    names = {one.module.name for one in wanted}
    if loaded.keys() != names:
        odd = sorted(loaded.keys() ^ names)
        raise NumericalError(
            f"The exported adapter {file} gives {len(loaded)} layers, {len(names)} were "
            f"trained; the first that differs is {full_name(part, odd[0])}."
        )
    folded = file.name != Path(OutputPath.DIFFUSERS_WEIGHTS).name
    for one in wanted:
        module, layer = one.module, loaded[one.module.name]
        scale = layer.scaling[ADAPTER_NAME]
        if not folded and abs(scale - module.scale) > 1e-6 * abs(scale):
            raise NumericalError(
                f"The exported adapter {file} scales {module.full_name} by {scale}, it was "
                f"trained with {module.scale}: its alpha was lost."
            )
        up = layer.lora_B[ADAPTER_NAME].weight.double() * (scale / module.scale)
        down = layer.lora_A[ADAPTER_NAME].weight
        if not (_close(down, one.lora_a, dtype, down.dtype, 1.0)) or not (
            _close(up, one.lora_b, dtype, down.dtype, scale / module.scale)
        ):
            raise NumericalError(
                f"The exported adapter {file} holds other weights for {module.full_name} than were "
                "trained."
            )
        if one.magnitude is not None:
            magnitude = layer.lora_magnitude_vector[ADAPTER_NAME].weight
            if not _close(magnitude, one.magnitude, torch.float32, magnitude.dtype, 1.0):
                raise NumericalError(
                    f"The exported adapter {file} holds other magnitudes for {module.full_name} "
                    "than were trained."
                )


def _close(
    loaded: torch.Tensor,
    trained: torch.Tensor,
    file_dtype: torch.dtype,
    model_dtype: torch.dtype,
    unfolded: float,
) -> bool:
    """Whether rounding to the file's and then to the model's dtype explains the difference.

    unfolded: what loaded numbers were multiplied by, and their subnormal steps with them.
    """
    expected = trained.to(loaded.device).double()
    share = UNIT_ROUNDOFF[file_dtype] + UNIT_ROUNDOFF[model_dtype] + UNIT_ROUNDOFF[torch.float32]
    step = SMALLEST_STEP[file_dtype] + SMALLEST_STEP[model_dtype]
    allowed = share * float(expected.norm()) + abs(unfolded) * step * expected.numel() ** 0.5
    return bool((loaded.double() - expected).norm() <= allowed)


def some_update_shows(
    trained: nn.Module, layers: Sequence[TrainedLayer], part: Part, dtype: torch.dtype
) -> bool:
    """Whether a layer's update is more than rounding in ``dtype``, as a share of its own weights.

    trained: the model of ``part``, with its adapter. After a few steps of a warm-up none is: what
    such an adapter adds to a layer's output is less than its last digit.
    """
    for one in layers:
        if one.module.part != part:
            continue
        layer = trained.get_submodule(one.module.name)
        base: Any = getattr(layer, "base_layer", layer)
        a, b = one.lora_a.double().flatten(1), one.lora_b.double().flatten(1)
        # |BA|^2 is the trace of B'B AA', of rank x rank numbers.
        update = abs(one.module.scale) * float(((b.T @ b) * (a @ a.T)).sum()) ** 0.5
        if update > UNIT_ROUNDOFF[dtype] * float(base.weight.float().norm()):
            return True
    return False


def judge(check: ExportCheck, dtype: torch.dtype, file: Path, part: Part = "unet") -> None:
    """Raise NumericalError for an output that rounding does not explain. dtype: of the file.

    A deep UNet in bf16 amplifies a single rounding to 1 % of its output."""
    allowed = EFFECT_TOLERANCE[dtype] * check.effect + NOISE_ALLOWANCE * check.noise
    if not check.deviation <= allowed:
        raise NumericalError(
            f"The exported adapter {file} gives another output than the trained one: "
            f"deviation {check.deviation:.3g}, allowed {allowed:.3g}."
        )
    if check.shows and not check.effect > 0:
        raise NumericalError(
            f"The exported adapter {file} changes nothing in {part}, though its updates are larger "
            "than rounding."
        )


@torch.no_grad()
def probe(unet: UNet2DConditionModel, *, roundoff: float = 0.0) -> torch.Tensor:
    """Output of one forward pass on fixed noise and conditions, fp32 (1, 4, 16, 16).

    roundoff: relative change, of either sign, of each number that the first convolution gives.
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
