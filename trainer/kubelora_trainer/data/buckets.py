"""Training sizes: one square, or aspect-ratio buckets of about the same area.

SDXL was trained on sizes whose edges are multiples of 64 and whose area is close to 1024 x 1024
(Podell et al. 2023, sec. 2.3). Every image is assigned the size closest to its own shape, so that
no image is dropped and as little as possible is cropped.
"""

import math
from dataclasses import dataclass

from kubelora_api.dataset_spec import Dataset


@dataclass(frozen=True, order=True)
class Size:
    """Size of a training image in pixels."""

    width: int
    height: int

    @property
    def ratio(self) -> float:
        """Width over height."""
        return self.width / self.height


def training_sizes(settings: Dataset) -> tuple[Size, ...]:
    """List the sizes that a dataset is trained at, narrow ones first, always with the square.

    With buckets: for each multiple of ``step`` as one edge, the largest other edge that keeps the
    area within resolution x resolution, in both orientations.
    """
    resolution, buckets = settings.resolution, settings.buckets
    square = Size(resolution, resolution)
    if not buckets.enabled:
        return (square,)
    low = buckets.min_edge if buckets.min_edge is not None else resolution // 2
    high = buckets.max_edge if buckets.max_edge is not None else resolution * 2
    sizes = {square}
    for edge in range(_up(low, buckets.step), high + 1, buckets.step):
        other = min(high, resolution * resolution // edge) // buckets.step * buckets.step
        if other >= low:
            sizes |= {Size(edge, other), Size(other, edge)}
    return tuple(sorted(sizes, key=lambda size: (size.ratio, size)))


def _up(number: int, step: int) -> int:
    """Round up to a multiple of ``step``."""
    return -(-number // step) * step


def nearest_size(width: int, height: int, sizes: tuple[Size, ...]) -> Size:
    """Choose the size with the nearest aspect ratio, by quotient: 2:1 is as far from 1:1 as 1:2.

    Args:
        width: Width of the image.
        height: Height of the image.
        sizes: Training sizes.
    """
    ratio = width / height
    return min(sizes, key=lambda size: (abs(math.log(size.ratio / ratio)), size))


def covering_size(width: int, height: int, target: Size) -> Size:
    """Compute the image's size after resizing it to just cover ``target`` at its own aspect ratio.

    Args:
        width: Width of the image.
        height: Height of the image.
        target: Training size.
    """
    scale = max(target.width / width, target.height / height)
    return Size(max(target.width, round(width * scale)), max(target.height, round(height * scale)))


def visible_share(width: int, height: int, target: Size) -> float:
    """Compute the fraction of the image, 0 to 1, that one crop at ``target`` shows.

    Args:
        width: Width of the image.
        height: Height of the image.
        target: Training size.
    """
    resized = covering_size(width, height, target)
    return target.width * target.height / (resized.width * resized.height)
