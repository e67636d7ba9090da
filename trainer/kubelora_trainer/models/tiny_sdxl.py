"""A tiny SDXL pipeline in diffusers layout: SDXL's classes and wiring, narrow, random weights.

``small`` has one cross-attention level and is fast; ``full`` has SDXL's blocks and transformer
depths, so that every name of a LoRA key map occurs. Scales are chosen so that latents, conditioning
and predictions have a realistic spread, and hence gradients a realistic size.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from kubelora_trainer.models.tiny_tokenizer import END, Vocabulary, write_tokenizer
from kubelora_trainer.utils.third_party import quiet_libraries

TinyLayout = Literal["small", "full"]
SEED = 20240229
"""Any value; another one changes every number that tests and docs record."""
TEXT_WIDTH = 32
"""SDXL has 768; both tiny encoders have this one."""
POOLED_WIDTH = 32
"""SDXL has 1280."""
TIME_ID_WIDTH = 32
"""SDXL has 256."""
SDXL_SCALING_FACTOR = 0.13025
"""From the configuration of SDXL's VAE: it brings latents to unit variance."""


@dataclass(frozen=True)
class UNetShape:
    """Dimensions that differ between the layouts: one entry per level, from the finest."""

    widths: tuple[int, ...]
    cross_attention: tuple[bool, ...]
    depths: tuple[int, ...]
    resnets: int
    sample_size: int

    @property
    def heads(self) -> tuple[int, ...]:
        """Number of 16-channel heads per level; like SDXL, all levels share one head size."""
        return tuple(width // 16 for width in self.widths)


SHAPES: dict[TinyLayout, UNetShape] = {
    "small": UNetShape((32, 64), (False, True), (1, 1), resnets=1, sample_size=16),
    "full": UNetShape((16, 32, 64), (False, True, True), (1, 2, 10), resnets=2, sample_size=16),
}


def write_pipeline(folder: Path, layout: TinyLayout, vocabulary: Vocabulary) -> None:
    """Write the pipeline's directory, with components in subdirectories and the index last.

    Args:
        folder: Directory to write.
        layout: Size of the UNet.
        vocabulary: Vocabulary of both tokenizers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(SEED)
        _unet(SHAPES[layout]).save_pretrained(folder / "unet")
        _vae().save_pretrained(folder / "vae")
        CLIPTextModel(_text_config("quick_gelu", 1)).save_pretrained(folder / "text_encoder")
        CLIPTextModelWithProjection(_text_config("gelu", 0)).save_pretrained(
            folder / "text_encoder_2"
        )
    _scheduler().save_pretrained(folder / "scheduler")
    write_tokenizer(folder / "tokenizer", vocabulary, pad_token=END)
    write_tokenizer(folder / "tokenizer_2", vocabulary, pad_token="!")
    index = {
        "_class_name": "StableDiffusionXLPipeline",
        "_diffusers_version": "0.35.0",
        "force_zeros_for_empty_prompt": True,
        "add_watermarker": None,
        "scheduler": ["diffusers", "EulerDiscreteScheduler"],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "text_encoder_2": ["transformers", "CLIPTextModelWithProjection"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _unet(shape: UNetShape) -> UNet2DConditionModel:
    unet = UNet2DConditionModel(
        sample_size=shape.sample_size,
        in_channels=4,
        out_channels=4,
        down_block_types=tuple(
            "CrossAttnDownBlock2D" if crossed else "DownBlock2D"
            for crossed in shape.cross_attention
        ),
        up_block_types=tuple(
            "CrossAttnUpBlock2D" if crossed else "UpBlock2D"
            for crossed in reversed(shape.cross_attention)
        ),
        block_out_channels=shape.widths,
        layers_per_block=shape.resnets,
        transformer_layers_per_block=shape.depths,
        attention_head_dim=shape.heads,
        cross_attention_dim=2 * TEXT_WIDTH,
        use_linear_projection=True,
        norm_num_groups=8,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_ID_WIDTH,
        projection_class_embeddings_input_dim=POOLED_WIDTH + 6 * TIME_ID_WIDTH,
    )
    _match_output_to_noise(unet)
    return unet


@torch.no_grad()
def _match_output_to_noise(unet: UNet2DConditionModel) -> None:
    """Scale the last convolution so that predictions have half the spread of the noise.

    A fresh UNet predicts values near 0 for any input; a trained one predicts unit noise.
    """
    size = unet.config.sample_size
    noise = torch.randn(4, 4, size, size)
    condition = {
        "text_embeds": torch.randn(4, POOLED_WIDTH),
        "time_ids": torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]]).expand(4, -1),
    }
    prediction = unet(
        noise,
        torch.tensor([50, 300, 600, 950]),
        torch.randn(4, 77, 2 * TEXT_WIDTH),
        added_cond_kwargs=condition,
    ).sample
    last = unet.conv_out
    last.weight.mul_(0.5 / prediction.std())
    nn.init.zeros_(last.bias)


@torch.no_grad()
def _vae() -> AutoencoderKL:
    """Build an untrained autoencoder (factor 8) whose latents of photographs have spread.

    Its weights are scaled so that ``mean * scaling_factor`` of smooth random images has unit
    standard deviation in each channel, and its posterior is narrow, like SDXL's.
    """
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 16, 16),
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=128,
        scaling_factor=SDXL_SCALING_FACTOR,
    )
    coarse = torch.rand(8, 3, 8, 8) * 2 - 1
    pictures = nn.functional.interpolate(coarse, size=(128, 128), mode="bicubic").clamp(-1, 1)
    means = vae.encode(pictures).latent_dist.mean
    last = vae.quant_conv
    spread = means.std(dim=(0, 2, 3)) * SDXL_SCALING_FACTOR
    centre = means.mean(dim=(0, 2, 3)) * SDXL_SCALING_FACTOR
    last.weight[:4] /= spread[:, None, None, None]
    last.bias[:4] = (last.bias[:4] - centre / SDXL_SCALING_FACTOR) / spread
    last.weight[4:] = 0.0
    last.bias[4:] = -10.0
    decoded = vae.decode(vae.encode(pictures).latent_dist.mean).sample
    vae.decoder.conv_out.weight.mul_(0.5 / decoded.std())
    return vae


def _text_config(activation: str, pad_id: int) -> CLIPTextConfig:
    """Configure a text encoder like SDXL's, with 3 layers and hidden states at unit scale."""
    return CLIPTextConfig(
        vocab_size=49408,
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=POOLED_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        hidden_act=activation,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=pad_id,
        initializer_factor=1.5,
    )


def _scheduler() -> EulerDiscreteScheduler:
    return EulerDiscreteScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="epsilon",
        interpolation_type="linear",
        timestep_spacing="leading",
        steps_offset=1,
        use_karras_sigmas=False,
    )
