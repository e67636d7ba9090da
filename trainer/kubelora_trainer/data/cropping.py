"""Cropping of a decoded image to a training image of a bucket's size."""

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps

from kubelora_trainer.data.buckets import Size, covering_size
from kubelora_trainer.data.images import LATENT_PIXELS


@dataclass(frozen=True)
class SizeConditions:
    """SDXL's micro-conditioning (Podell et al. 2023, sec. 2.2), as (height, width) in pixels.

    Attributes:
        original_size: Size of the upright file.
        crop_top_left: (top, left) of the crop in the resized image, or in its mirror image if the
            pixels are mirrored.
        target_size: Size of the crop.
    """

    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]


@dataclass(frozen=True)
class TrainingImage:
    """A crop of an image.

    Attributes:
        pixels: fp32 (3, height, width) in [-1, 1].
        sizes: Size conditioning.
        mask: fp32 (1, height / 8, width / 8) in [0, 1], each latent element's weight in the loss,
            or None.
    """

    pixels: torch.Tensor
    sizes: SizeConditions
    mask: torch.Tensor | None = None


def size_conditions(
    width: int, height: int, target: Size, across: float, down: float
) -> SizeConditions:
    """Compute where ``cut_image`` crops an image of that size, without its pixels.

    Args:
        width: Width of the image.
        height: Height of the image.
        target: Training size.
        across: Horizontal position of the crop in [0, 1).
        down: Vertical position of the crop in [0, 1).
    """
    resized = covering_size(width, height, target)
    left = int(across * (resized.width - target.width + 1))
    top = int(down * (resized.height - target.height + 1))
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
    """Resize the image until it just covers ``target`` and crop ``target`` out of it.

    Only the crop is resampled (Lanczos), so that a panorama costs no more than a square.

    Args:
        image: Upright RGB image.
        target: Training size.
        across: Horizontal position of the crop in [0, 1); uniform numbers give uniform crops.
        down: Vertical position of the crop, likewise.
        mirrored: Swap left and right; the crop's offset is then that in the mirrored image.
        mask: Opacity in the image's size, cropped alike; each latent element gets the mean over its
            8 x 8 pixels.
    """
    sizes = size_conditions(image.width, image.height, target, across, down)
    resized = covering_size(image.width, image.height, target)
    top, left = sizes.crop_top_left
    # Offset in the unmirrored file; in the mirror image the same pixels begin at ``left``.
    begin = resized.width - target.width - left if mirrored else left
    scale_x, scale_y = image.width / resized.width, image.height / resized.height
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
