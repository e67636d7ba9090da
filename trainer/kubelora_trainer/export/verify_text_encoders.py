"""Proves that an exported adapter of the text encoders is read back as it was trained.

As for the UNet: diffusers' own loader puts each file onto fresh encoders, every layer's scale and
weights are the trained ones, and the encoders give the trained ones' hidden states and pooled text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from kubelora_trainer.export.verify_unet import (
    UNIT_ROUNDOFF,
    ExportCheck,
    compare_layers,
    judge,
    some_update_shows,
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
    """Load each file onto a fresh encoder of each part, as a user would, and compare.

    encoders: the trained ones. unet_config: diffusers reads kohya's block names by it.
    dtype: of the files' tensors.
    Raises NumericalError when a layer is missing, a scale or a weight differs, or the outputs do.
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
            _load_as_a_user(fresh, part, file, unet_config)
            compare_layers(fresh, layers, file, dtype, part)
            check = ExportCheck(
                deviation=float((probe_text(fresh) - expected).norm()),
                effect=float((expected - without).norm()),
                output=float(expected.norm()),
                noise=noise,
                shows=some_update_shows(trained, layers, part, model_dtype),
            )
            judge(check, dtype, file, part)
            checks.append(check)
    return checks


def _load_as_a_user(encoder: nn.Module, part: Part, file: Path, unet_config: object) -> None:
    """The calls inside ``pipeline.load_lora_weights`` for one encoder."""
    from diffusers import StableDiffusionXLPipeline  # needed at the end alone

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
    """What SDXL takes of an encoder for one fixed row of 77 tokens, flat, fp32.

    roundoff: relative change, of either sign, of each number that the embeddings give.
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
    if output[0].ndim == 2:  # a projection's: the second encoder's pooled text
        taken.append(output[0].flatten())
    return torch.cat(taken).float()
