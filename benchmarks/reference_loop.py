"""The peer: a minimal SDXL LoRA loop with the semantics of diffusers' training script.

accelerate accumulates, clips and autocasts; peft's adapter is in fp32 (``cast_training_params``),
for a bf16 one is a few per cent faster and loses updates; AdamW is torch's default. It is given
what the script has not: latents and text encoded once. Run as a program, it trains a few steps and
prints its peak memory and its CPU time at the first step.
"""

import argparse
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from kubelora_trainer.utils.third_party import hidden_packages

NOT_REQUIRED = ("bitsandbytes", "torchao", "scipy", "boto3")
"""What the script's requirements don't name, and its libraries would import where it is installed;
each costs seconds or memory."""


class ReferenceLoop:
    """One optimizer step a call."""

    def __init__(
        self,
        model: Path,
        photos: Path,
        *,
        rank: int,
        accumulation: int,
        edge: int,
        rate: float,
        batch: int = 1,
        device: str = "cpu",
        checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """edge: of the images, in pixels. batch: images in a micro-batch."""
        from accelerate import Accelerator
        from diffusers import DDPMScheduler, UNet2DConditionModel
        from diffusers.training_utils import cast_training_params
        from peft import LoraConfig

        self.accelerator = Accelerator(
            gradient_accumulation_steps=accumulation, mixed_precision="bf16", cpu=device == "cpu"
        )
        self._schedule = DDPMScheduler.from_pretrained(model, subfolder="scheduler")
        unet = UNet2DConditionModel.from_pretrained(model, subfolder="unet")
        unet.requires_grad_(False).to(device, dtype=torch.bfloat16)
        unet.add_adapter(
            LoraConfig(
                r=rank,
                lora_alpha=rank,
                init_lora_weights="gaussian",
                target_modules=["to_k", "to_q", "to_v", "to_out.0"],
            )
        )
        cast_training_params(unet, dtype=torch.float32)
        if checkpointing:
            unet.enable_gradient_checkpointing()
        self.parameters = [p for p in unet.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=1e-2, eps=1e-8)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        self._frozen = _Frozen(model, device)
        samples = [self._frozen.encode(file, text, edge) for file, text in captioned(photos)]
        loader: Any = torch.utils.data.DataLoader(_Samples(samples), shuffle=True, batch_size=batch)
        self._unet, self._optimizer, self._loader, self._rates = self.accelerator.prepare(
            unet, optimizer, loader, schedule
        )
        self._unet.train()
        self.compiled = compiled
        self._forward = torch.compile(self._unet) if compiled else self._unet
        self._batches = self._endless()
        self._accumulation = accumulation
        self.loss = 0.0

    def _endless(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from self._loader

    def step(self) -> None:
        """A window of micro-batches, one update."""
        self.loss = 0.0
        done = False
        while not done:
            batch = next(self._batches)
            with self.accelerator.accumulate(self._unet):
                loss = self._loss(batch)
                self.loss += self.accelerator.gather(loss.repeat(1)).mean().item()
                self.accelerator.backward(loss)
                done = self.accelerator.sync_gradients
                if done:
                    self.accelerator.clip_grad_norm_(self.parameters, 1.0)
                self._optimizer.step()
                self._rates.step()
                self._optimizer.zero_grad()
        self.loss /= self._accumulation

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        latents = batch["latents"].to(torch.bfloat16)
        noise = torch.randn_like(latents)
        levels = self._schedule.config.num_train_timesteps
        steps = torch.randint(0, levels, (latents.shape[0],), device=latents.device)
        noisy = self._schedule.add_noise(latents, noise, steps)
        predicted = self._forward(
            noisy,
            steps,
            batch["text"],
            added_cond_kwargs={"time_ids": batch["time_ids"], "text_embeds": batch["pooled"]},
            return_dict=False,
        )[0]
        return functional.mse_loss(predicted.float(), noise.float(), reduction="mean")


class _Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """What was encoded, by number."""

    def __init__(self, samples: list[dict[str, torch.Tensor]]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return self._samples[number]


class _Frozen:
    """VAE and text encoders; they stay in memory, as in the script."""

    def __init__(self, model: Path, device: str) -> None:
        from diffusers import AutoencoderKL
        from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

        self._device = device
        vae = AutoencoderKL.from_pretrained(model, subfolder="vae")
        self._vae = vae.requires_grad_(False).to(device)
        self._encoders = [
            kind.from_pretrained(model / folder, dtype=torch.bfloat16)
            .requires_grad_(False)
            .to(device)
            for kind, folder in (
                (CLIPTextModel, "text_encoder"),
                (CLIPTextModelWithProjection, "text_encoder_2"),
            )
        ]
        self._tokenizers = [
            CLIPTokenizer.from_pretrained(model / folder) for folder in ("tokenizer", "tokenizer_2")
        ]

    @torch.no_grad()
    def encode(self, file: Path, caption: str, edge: int) -> dict[str, torch.Tensor]:
        """Everything that the UNet is shown of one image, without the batch's dimension.

        On the CPU, from where the loader takes each micro-batch to the device.
        """
        import numpy as np
        from PIL import Image, ImageOps

        image = ImageOps.fit(Image.open(file).convert("RGB"), (edge, edge))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
        latents = (
            self._vae.encode(pixels.to(self._device)).latent_dist.sample()
            * self._vae.config.scaling_factor
        )
        hidden, pooled = [], torch.empty(0)
        for tokenizer, encoder in zip(self._tokenizers, self._encoders, strict=True):
            tokens = tokenizer(
                caption, padding="max_length", max_length=77, truncation=True, return_tensors="pt"
            )
            output = encoder(tokens.input_ids.to(self._device), output_hidden_states=True)
            hidden.append(output.hidden_states[-2])
            pooled = output[0]
        return {
            "latents": latents[0].cpu(),
            "text": torch.cat(hidden, dim=-1)[0].cpu(),
            "pooled": pooled[0].cpu(),
            "time_ids": torch.tensor([edge, edge, 0, 0, edge, edge], dtype=torch.bfloat16),
        }


def captioned(photos: Path) -> list[tuple[Path, str]]:
    """Images of a folder with metadata.jsonl."""
    lines = (photos / "metadata.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [(photos / row["file_name"], row["text"]) for row in rows]


def main() -> None:
    """Train a few steps in a process of one's own; print one line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with hidden_packages(NOT_REQUIRED):
        loop = ReferenceLoop(given.model, given.photos, rank=8, accumulation=4, edge=64, rate=1e-4)
    first = 0.0
    for step in range(given.steps):
        loop.step()
        if step == 0:
            used = os.times()
            first = used.user + used.system
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"first_step_cpu_s": first, "peak_kib": peak, "loss": loop.loss}))


if __name__ == "__main__":
    main()
