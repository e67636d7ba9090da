"""Verification that an exported text-encoder adapter loads exactly as it was trained.

As for the UNet, diffusers' own loader applies each file to fresh encoders. Every layer's scale and
weights must be the trained ones, and hidden states and pooled output must match.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from kubelora_trainer.export.verify_unet import (
    UNIT_ROUNDOFF,
    ExportCheck,
    any_update_shows,
    check_output,
    compare_layers,
)
from kubelora_trainer.lora.adapter import ADAPTER_NAME, TrainedLayer
from kubelora_trainer.lora.dora import with_peft_dora
from kubelora_trainer.models.pipeline import load_text_encoder
from kubelora_trainer.models.sgm_keys import Part
from kubelora_trainer.utils.errors import NumericalError
from kubelora_trainer.utils.third_party import quiet_libraries


def verify_text_encoders(
    base_folder: Path,
    files: Sequence[Path],
    encoders: Mapping[Part, nn.Module],
    layers: Sequence[TrainedLayer],
    *,
    unet_config: object,
    variant: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[ExportCheck]:
    """Load each file onto a fresh copy of each encoder, as a user would, and compare.

    Args:
        base_folder: Directory of the pipeline.
        files: Exported files.
        encoders: The trained text encoders.
        layers: The trained layers.
        unet_config: The UNet's configuration, by which diffusers reads kohya's block names.
        variant: Infix of the base model's weight files.
        dtype: Type of the tensors in the files.

    Raises:
        NumericalError: A layer is missing, or a scale, a weight or the output differs.
    """
    checks = []
    for part, trained in encoders.items():
        trained.eval()
        weight = next(trained.parameters())
        model_dtype = weight.dtype
        expected = probe_text(trained)
        noise = float((probe_text(trained, UNIT_ROUNDOFF[model_dtype]) - expected).norm())
        with with_peft_dora(trained, ADAPTER_NAME):
            noise = max(noise, float((probe_text(trained) - expected).norm()))
        for file in files:
            fresh = load_text_encoder(
                base_folder, part, variant=variant, dtype=model_dtype, device=weight.device
            )
            without = probe_text(fresh)
            _load_with_diffusers(fresh, part, file, unet_config)
            compare_layers(fresh, layers, file, dtype, part)
            check = ExportCheck(
                deviation=float((probe_text(fresh) - expected).norm()),
                effect=float((expected - without).norm()),
                output=float(expected.norm()),
                noise=noise,
                shows=any_update_shows(trained, layers, part, model_dtype),
            )
            check_output(check, dtype, file, part)
            checks.append(check)
    return checks


def _load_with_diffusers(encoder: nn.Module, part: Part, file: Path, unet_config: object) -> None:
    """Repeat the calls inside ``pipeline.load_lora_weights`` for one encoder."""
    from diffusers import StableDiffusionXLPipeline  # a slow import, needed only at the end

    try:
        with quiet_libraries():
            state, alphas, metadata = StableDiffusionXLPipeline.lora_state_dict(
                file.parent,
                weight_name=file.name,
                unet_config=unet_config,
                return_lora_metadata=True,
            )
            StableDiffusionXLPipeline.load_lora_into_text_encoder(
                state,
                network_alphas=alphas,
                text_encoder=encoder,
                prefix=part,
                adapter_name=ADAPTER_NAME,
                metadata=metadata,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise NumericalError(
            f"The exported adapter {file} can't be loaded into {part} by diffusers: {error}"
        ) from error
    encoder.eval()


@torch.no_grad()
def probe_text(encoder: nn.Module, roundoff: float = 0.0) -> torch.Tensor:
    """Compute what SDXL uses of an encoder for one fixed row of 77 tokens, flattened to fp32.

    roundoff: relative perturbation, of random sign, of each element of the embeddings.
    """
    generator = torch.Generator().manual_seed(0)
    weight = encoder.get_input_embeddings().weight  # type: ignore[operator]
    tokens = torch.randint(0, weight.shape[0], (1, 77), generator=generator).to(weight.device)

    def disturb(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        signs = torch.randn(output.shape, generator=generator).sign().to(output.device)
        return (output.float() * (1 + roundoff * signs)).to(output.dtype)

    embeddings: nn.Module = encoder.get_input_embeddings()  # type: ignore[operator]
    hook = embeddings.register_forward_hook(disturb) if roundoff else None
    try:
        output = encoder(tokens, output_hidden_states=True)
    finally:
        if hook:
            hook.remove()
    taken = [output.hidden_states[-2].flatten()]
    if output[0].ndim == 2:  # the projected pooled output of the second encoder
        taken.append(output[0].flatten())
    return torch.cat(taken).float()
