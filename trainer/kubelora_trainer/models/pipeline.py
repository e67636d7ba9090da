"""Loading and validation of the frozen SDXL pipeline that an adapter is trained for.

A wrong or damaged model must be reported in one sentence before the first step. It must not end in
a traceback halfway through loading, and no layer may silently keep random weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from kubelora_trainer.models.pipeline_checks import (
    check_pipeline,
    check_weights,
    fingerprint,
    read_json,
)
from kubelora_trainer.utils.errors import ModelError
from kubelora_trainer.utils.third_party import quiet_libraries

Prediction = Literal["auto", "epsilon", "v_prediction"]


@dataclass(frozen=True)
class BaseModel:
    """An SDXL pipeline, frozen and in eval mode.

    Attributes:
        folder: Directory of the pipeline.
        unet: The UNet in the compute dtype.
        vae: The VAE, always in fp32, because SDXL's overflows in half precision.
        text_encoders: CLIP ViT-L and OpenCLIP bigG, in this order.
        tokenizers: Their tokenizers.
        noise_scheduler: DDPM for training, with the pipeline's betas and the pipeline's or job's
            prediction type.
        sampling_scheduler: Class name and configuration of the pipeline's own scheduler, adjusted
            likewise.
        force_zeros_for_empty_prompt: The pipeline's own setting.
        fingerprint: SHA-256 of configurations and of the weight files' headers and sizes.
    """

    folder: Path
    unet: UNet2DConditionModel
    vae: AutoencoderKL
    text_encoders: tuple[CLIPTextModel, CLIPTextModelWithProjection]
    tokenizers: tuple[CLIPTokenizer, CLIPTokenizer]
    noise_scheduler: DDPMScheduler
    sampling_scheduler: dict[str, Any]
    force_zeros_for_empty_prompt: bool
    fingerprint: str

    @property
    def device(self) -> torch.device:
        """Device of the UNet; read from a weight because ``unet.device`` walks over all modules."""
        device: torch.device = self.unet.conv_in.weight.device
        return device


def load_base_model(
    folder: Path,
    *,
    variant: str | None,
    vae: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    prediction: Prediction = "auto",
    zero_terminal_snr: bool = False,
) -> BaseModel:
    """Load the pipeline in ``folder``.

    Args:
        folder: Directory in diffusers layout.
        variant: Infix of the weight files, such as fp16; None loads the plain files.
        vae: Directory of another AutoencoderKL that replaces the pipeline's own.
        dtype: Type of the UNet and the text encoders.
        device: Device of all components.
        prediction: See `noise_schedule`.
        zero_terminal_snr: See `noise_schedule`.

    Raises:
        ModelError: The model is incomplete, damaged or not SDXL.
    """
    index = check_pipeline(folder)
    vae_folder, vae_variant = (_vae_folder(vae), None) if vae else (folder / "vae", variant)
    for part in ("unet", "text_encoder", "text_encoder_2"):
        check_weights(folder / part, variant)
    check_weights(vae_folder, vae_variant)
    scheduler = noise_schedule(
        read_json(folder / "scheduler" / "scheduler_config.json"), prediction, zero_terminal_snr
    )
    with quiet_libraries():
        return BaseModel(
            folder=folder,
            unet=load_unet(folder, variant=variant, dtype=dtype, device=device),
            vae=_part(AutoencoderKL, vae_folder, vae_variant, torch.float32, device),
            text_encoders=(
                _part(CLIPTextModel, folder / "text_encoder", variant, dtype, device),
                _part(
                    CLIPTextModelWithProjection, folder / "text_encoder_2", variant, dtype, device
                ),
            ),
            tokenizers=(_tokenizer(folder / "tokenizer"), _tokenizer(folder / "tokenizer_2")),
            noise_scheduler=_noise_scheduler(folder, scheduler),
            sampling_scheduler=scheduler,
            force_zeros_for_empty_prompt=bool(index.get("force_zeros_for_empty_prompt", True)),
            fingerprint=fingerprint(folder, variant, vae_folder, vae_variant),
        )


def load_unet(
    folder: Path, *, variant: str | None, dtype: torch.dtype, device: torch.device
) -> UNet2DConditionModel:
    """Load a fresh, frozen copy of only the pipeline's UNet.

    Args:
        folder: Directory of the pipeline.
        variant: Infix of the weight files.
        dtype: Type of the weights.
        device: Device of the weights.
    """
    with quiet_libraries():
        return _part(UNet2DConditionModel, folder / "unet", variant, dtype, device)


def load_text_encoder(
    folder: Path, part: str, *, variant: str | None, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    """Load a fresh, frozen copy of only one of the pipeline's text encoders.

    Args:
        folder: Directory of the pipeline.
        part: Subdirectory of the text encoder.
        variant: Infix of the weight files.
        dtype: Type of the weights.
        device: Device of the weights.
    """
    kind = CLIPTextModel if part == "text_encoder" else CLIPTextModelWithProjection
    with quiet_libraries():
        encoder: nn.Module = _part(kind, folder / part, variant, dtype, device)
    return encoder


def _part(
    kind: Any, folder: Path, variant: str | None, dtype: torch.dtype, device: torch.device
) -> Any:
    """Load one component; tensors that are missing or of another shape are an error."""
    dtype_name = "dtype" if kind.__module__.startswith("transformers.") else "torch_dtype"
    arguments = {
        dtype_name: dtype,
        "variant": variant,
        "use_safetensors": True,
        "local_files_only": True,
        "output_loading_info": True,
    }
    model, info = _load(lambda: kind.from_pretrained(folder, **arguments), folder)
    wrong = [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]
    if wrong:
        raise ModelError(
            f"The weights in {folder} lack {len(wrong)} tensors of its {kind.__name__}, such as "
            f"{sorted(wrong)[0]}: config.json and weights do not match. Download the model again."
        )
    module: nn.Module = model
    return module.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _load(load: Callable[[], Any], folder: Path) -> Any:
    """Report any failure of a library's loader in one sentence; they share no base class."""
    try:
        return load()
    except Exception as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{folder} can't be loaded: {first_line}") from error


def _tokenizer(folder: Path) -> CLIPTokenizer:
    if not any((folder / name).is_file() for name in ("vocab.json", "tokenizer.json")):
        raise ModelError(
            f"{folder} holds no tokenizer (vocab.json and merges.txt, or tokenizer.json): download "
            "the model again."
        )
    return _load(lambda: CLIPTokenizer.from_pretrained(folder, local_files_only=True), folder)


def noise_schedule(
    config: dict[str, Any], prediction: Prediction, zero_terminal_snr: bool
) -> dict[str, Any]:
    """Apply the job's settings to a scheduler's configuration.

    Args:
        config: The pipeline's scheduler configuration.
        prediction: The job's prediction type; "auto" keeps the model's.
        zero_terminal_snr: Rescale the betas so that the last timestep is pure noise, and start
            sampling there (Lin et al. 2023, "Common diffusion noise schedules and sample steps are
            flawed", algorithm 1 and section 3.3).

    Raises:
        ModelError: The prediction type is unsupported, or zero terminal SNR is combined
            with epsilon: at pure noise the noise is already known, so the last timestep would
            teach nothing.
    """
    kind = config.get("prediction_type", "epsilon") if prediction == "auto" else prediction
    if kind not in ("epsilon", "v_prediction"):
        raise ModelError(
            f"The model's scheduler predicts {kind!r}; only epsilon and v_prediction can be "
            "trained: see model.predictionType."
        )
    changed = config | {"prediction_type": kind}
    if zero_terminal_snr:
        changed |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    if changed.get("rescale_betas_zero_snr") and kind == "epsilon":
        raise ModelError(
            "Zero terminal SNR needs a model that predicts v, but this one predicts epsilon: set "
            "model.predictionType to v_prediction if that is wrong, or remove "
            "model.zeroTerminalSnr."
        )
    return changed


def _noise_scheduler(folder: Path, config: dict[str, Any]) -> DDPMScheduler:
    return _load(lambda: DDPMScheduler.from_config(config), folder / "scheduler")


def _vae_folder(place: Path) -> Path:
    """Find a VAE's own directory, or the vae of a complete pipeline."""
    if (place / "config.json").is_file():
        found = str(read_json(place / "config.json").get("_class_name"))
        if found != "AutoencoderKL":
            raise ModelError(f"{place} holds {found}, not an AutoencoderKL: see model.vae.")
        return place
    if (place / "vae" / "config.json").is_file():
        return place / "vae"
    raise ModelError(f"{place} holds no VAE (no config.json): see model.vae.")
