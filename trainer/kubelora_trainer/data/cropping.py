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

    original_size: of the upright file. crop_top_left: (top, left) of the crop in the resized image,
    measured in the mirror image where the pixels are mirrored. target_size: of the crop.
    """

    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]


@dataclass(frozen=True)
class TrainingImage:
    """Crop of an image.

    pixels: fp32 (3, height, width) in [-1, 1]. mask: fp32 (1, height / 8, width / 8) in [0, 1], the
    weight of each latent element in the loss, or None.
    """

    pixels: torch.Tensor
    sizes: SizeConditions
    mask: torch.Tensor | None = None


def size_conditions(
    width: int, height: int, target: Size, across: float, down: float
) -> SizeConditions:
    """Compute where ``crop_image`` crops an image of that size, without its pixels.

    Args:
        width: Width of the upright image, in pixels.
        height: Height of the upright image, in pixels.
        target: Size of the crop.
        across: Horizontal position of the crop, in [0, 1).
        down: Vertical position of the crop, in [0, 1).

    Returns:
        The size conditions that belong to the crop.
    """
    resized = covering_size(width, height, target)
    # One more offset than the difference in pixels: both ends are possible, each equally likely.
    left = int(across * (resized.width - target.width + 1))
    top = int(down * (resized.height - target.height + 1))
    return SizeConditions((height, width), (top, left), (target.height, target.width))


def crop_image(
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
        target: Size of the crop.
        across: Horizontal position of the crop, in [0, 1); uniform numbers give uniform crops.
        down: Vertical position of the crop, in [0, 1).
        mirrored: Whether left and right are swapped; the crop's offset is then measured in the
            mirrored image.
        mask: Opacity at the image's size, cropped the same way; each latent element gets the mean
            over its 8 x 8 pixels.

    Returns:
        The pixels, size conditions and mask of the crop.
    """
    sizes = size_conditions(image.width, image.height, target, across, down)
    resized = covering_size(image.width, image.height, target)
    top, left = sizes.crop_top_left
    # The crop is cut from the unmirrored file; in its mirror image the same pixels start at left.
    begin = resized.width - target.width - left if mirrored else left
    scale_x, scale_y = image.width / resized.width, image.height / resized.height
    box = (
        begin * scale_x,
        top * scale_y,
        # Rounding may put the far edge a fraction of a pixel outside; Pillow refuses such a box.
        min(image.width, (begin + target.width) * scale_x),
        min(image.height, (top + target.height) * scale_y),
    )
    crop = image.resize((target.width, target.height), Image.Resampling.LANCZOS, box=box)
    if mirrored:
        crop = ImageOps.mirror(crop)
    array = np.asarray(crop, dtype=np.float32) / 127.5 - 1.0  # 0 to 255 becomes -1 to 1
    pixels = torch.from_numpy(array).permute(2, 0, 1).contiguous()
    if mask is None:
        return TrainingImage(pixels, sizes)
    latent_size = (target.width // LATENT_PIXELS, target.height // LATENT_PIXELS)
    weights = mask.resize(latent_size, Image.Resampling.BOX, box=box)  # BOX: the mean of each tile
    if mirrored:
        weights = ImageOps.mirror(weights)
    return TrainingImage(
        pixels, sizes, torch.from_numpy(np.asarray(weights, dtype=np.float32) / 255.0)[None]
    )
