"""Cropping: from a decoded image to a training image of a bucket's size."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps

from kubelora_trainer.data.buckets import Size, covering_size
from kubelora_trainer.data.images import LATENT_PIXELS


@dataclass(frozen=True)
class SizeConditions:
    """SDXL's micro-conditioning (Podell et al. 2023, sec. 2.2), as (height, width) in pixels.

    original_size: of the upright file. crop_top_left: (top, left) of the cut in the resized image,
    in its mirror image where that is what the pixels show. target_size: of the cut.
    """

    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]


@dataclass(frozen=True)
class TrainingImage:
    """A cut of an image. pixels: fp32 (3, height, width) in [-1, 1].

    mask: fp32 (1, height / 8, width / 8) in [0, 1], of each latent's share of the loss, or None.
    """

    pixels: torch.Tensor
    sizes: SizeConditions
    mask: torch.Tensor | None = None


def size_conditions(
    width: int, height: int, target: Size, across: float, down: float
) -> SizeConditions:
    """Where ``cut_image`` cuts an image of that size, without its pixels."""
    whole = covering_size(width, height, target)
    left = int(across * (whole.width - target.width + 1))
    top = int(down * (whole.height - target.height + 1))
    return SizeConditions((height, width), (top, left), (target.height, target.width))


def cut_image(
    image: Image.Image,
    target: Size,
    across: float,
    down: float,
    *,
    mirrored: bool = False,
    mask: Image.Image | None = None,
) -> TrainingImage:
    """Resize the image until it just covers ``target`` and cut ``target`` out of it.

    across, down: where the cut lies, each in [0, 1): uniform numbers give uniform crops.
    mirrored: left and right are swapped; the crop's offset is then that in the mirrored image.
    mask: opacity of the image's size, cut alike; each latent gets the mean over its 8 x 8 pixels.
    The cut alone is resampled (Lanczos), so that a panorama costs no more than a square.
    """
    sizes = size_conditions(image.width, image.height, target, across, down)
    whole = covering_size(image.width, image.height, target)
    top, left = sizes.crop_top_left
    # The cut in the file as it is; in its mirror image the same pixels begin at ``left``.
    begin = whole.width - target.width - left if mirrored else left
    scale_x, scale_y = image.width / whole.width, image.height / whole.height
    box = (
        begin * scale_x,
        top * scale_y,
        min(image.width, (begin + target.width) * scale_x),
        min(image.height, (top + target.height) * scale_y),
    )
    cut = image.resize((target.width, target.height), Image.Resampling.LANCZOS, box=box)
    if mirrored:
        cut = ImageOps.mirror(cut)
    array = np.asarray(cut, dtype=np.float32) / 127.5 - 1.0
    pixels = torch.from_numpy(array).permute(2, 0, 1).contiguous()
    if mask is None:
        return TrainingImage(pixels, sizes)
    latent_size = (target.width // LATENT_PIXELS, target.height // LATENT_PIXELS)
    shares = mask.resize(latent_size, Image.Resampling.BOX, box=box)
    if mirrored:
        shares = ImageOps.mirror(shares)
    return TrainingImage(
        pixels, sizes, torch.from_numpy(np.asarray(shares, dtype=np.float32) / 255.0)[None]
    )
