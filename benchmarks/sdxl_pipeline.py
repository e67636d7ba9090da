"""A pipeline with SDXL's real UNet and random weights, and square photographs, for both loops.

Nothing is downloaded: the UNet is built from its published configuration. Text encoders have SDXL's
widths and two layers, the autoencoder is the demo's: what they give is encoded once and kept, so
their depth costs no step anything.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch

LAYOUTS: Final = ("sdxl", "small")
SDXL_UNET: Final[dict[str, Any]] = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
"""As in unet/config.json of stabilityai/stable-diffusion-xl-base-1.0."""
TEXT_WIDTHS: Final = {"text_encoder": 768, "text_encoder_2": 1280}
HEAD: Final = 64
PHOTOGRAPHS: Final = 8


def write_pipeline(folder: Path, layout: str, edge: int, device: str) -> None:
    """Write ``folder/model`` and ``folder/photos``.

    layout: sdxl, or small for the demo's tiny UNet. edge: of the photographs, in pixels. device:
    that the weights are drawn on; a CPU takes minutes for SDXL's.
    """
    from kubelora_trainer.cli.demo import create_demo

    demo = create_demo(folder / "demo", "small", images=PHOTOGRAPHS)
    if layout == "sdxl":
        with torch.device(device):
            _write_unet(demo.model / "unet")
            _write_text_encoders(demo.model)
    shutil.move(demo.model, folder / "model")
    _write_squares(demo.photos, folder / "photos", edge)
    shutil.rmtree(folder / "demo")


def _write_unet(folder: Path) -> None:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(**SDXL_UNET).to(torch.bfloat16)
    shutil.rmtree(folder)
    unet.save_pretrained(folder, max_shard_size="20GB")


def _write_text_encoders(model: Path) -> None:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    kinds = (CLIPTextModel, CLIPTextModelWithProjection)
    for (part, width), kind in zip(TEXT_WIDTHS.items(), kinds, strict=True):
        config = CLIPTextConfig.from_pretrained(model / part)
        config.update(
            {
                "hidden_size": width,
                "intermediate_size": 4 * width,
                "projection_dim": width,
                "num_attention_heads": width // HEAD,
                "num_hidden_layers": 2,
            }
        )
        shutil.rmtree(model / part)
        kind(config).save_pretrained(model / part)


def _write_squares(photos: Path, target: Path, edge: int) -> None:
    """Every photograph as a square, so that each fills a micro-batch of one size in both loops."""
    from PIL import Image, ImageOps

    target.mkdir()
    lines = (photos / "metadata.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        with Image.open(photos / row["file_name"]) as image:
            square = ImageOps.fit(image.convert("RGB"), (edge, edge))
        row["file_name"] = Path(row["file_name"]).stem + ".png"
        square.save(target / row["file_name"], compress_level=1)
    (target / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write the pipeline in a process of one's own."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layout", choices=LAYOUTS, default="sdxl")
    parser.add_argument("--edge", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    write_pipeline(given.folder, given.layout, given.edge, given.device)


if __name__ == "__main__":
    main()
