"""Training sizes: one square, or aspect-ratio buckets of about the same area.

SDXL was trained on sizes whose edges are multiples of 64 and whose area is close to 1024 x 1024
(Podell et al. 2023, sec. 2.3). Every image is assigned the size nearest to its own aspect ratio, so
that none is dropped and as little as possible is cropped.
"""

import math
from dataclasses import dataclass

from kubelora_api.dataset_spec import Dataset

LEAST_AREA = 0.9
"""Share of resolution x resolution that a bucket covers at least, where there is a choice: SDXL's
own table has all sizes in multiples of 64 between this and 1."""
COARSE_STEP = 16
"""Steps of at least this part of the resolution, as SDXL's 64 of 1024, get every such size. Finer
steps have dozens of them for each shape, and a micro-batch holds images of one size."""


@dataclass(frozen=True, order=True)
class Size:
    """Size of a training image, in pixels."""

    width: int
    height: int

    @property
    def ratio(self) -> float:
        """Width over height."""
        return self.width / self.height


def training_sizes(settings: Dataset) -> tuple[Size, ...]:
    """Return the sizes that a dataset trains at, narrowest first; the square is always included.

    With buckets, each multiple of ``step`` is one edge of two sizes, portrait and landscape; the
    other edge is the largest that keeps the area within resolution x resolution. Coarse steps have
    every size of at least ``LEAST_AREA`` of it too, so that images made at SDXL's own sizes keep
    theirs.
    """
    resolution, buckets = settings.resolution, settings.buckets
    square = Size(resolution, resolution)
    if not buckets.enabled:
        return (square,)
    # Defaults allow aspect ratios from 1:4 to 4:1 at most; rounding to ``step`` narrows them.
    low = buckets.min_edge if buckets.min_edge is not None else resolution // 2
    high = buckets.max_edge if buckets.max_edge is not None else resolution * 2
    sizes = {square}
    area = resolution * resolution
    coarse = buckets.step * COARSE_STEP >= resolution
    edges = range(_round_up(low, buckets.step), high + 1, buckets.step)
    for edge in edges:
        largest = min(high, area // edge) // buckets.step * buckets.step
        for other in edges:
            if other == largest or (coarse and LEAST_AREA * area <= edge * other <= area):
                sizes |= {Size(edge, other), Size(other, edge)}
    return tuple(sorted(sizes, key=lambda size: (size.ratio, size)))


def _round_up(number: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is not below ``number``."""
    return -(-number // step) * step


def nearest_size(width: int, height: int, sizes: tuple[Size, ...]) -> Size:
    """Return the size whose aspect ratio is nearest.

    Args:
        width: Width of the image, in pixels.
        height: Height of the image, in pixels.
        sizes: Sizes to choose from; the first in sort order wins a tie.

    Returns:
        The nearest size by the quotient of the ratios: 2:1 is as far from 1:1 as 1:2 is.
    """
    ratio = width / height
    return min(sizes, key=lambda size: (abs(math.log(size.ratio / ratio)), size))


def covering_size(width: int, height: int, target: Size) -> Size:
    """Return the size of an image resized to just cover ``target``, aspect ratio kept.

    Args:
        width: Width of the image, in pixels.
        height: Height of the image, in pixels.
        target: Size to cover.

    Returns:
        A size with neither edge shorter than that of ``target``.
    """
    scale = max(target.width / width, target.height / height)
    return Size(max(target.width, round(width * scale)), max(target.height, round(height * scale)))


def visible_share(width: int, height: int, target: Size) -> float:
    """Return the share of an image that is visible in one crop at ``target``.

    Args:
        width: Width of the image, in pixels.
        height: Height of the image, in pixels.
        target: Size of the crop.

    Returns:
        A number above 0 and up to 1.
    """
    resized = covering_size(width, height, target)
    return target.width * target.height / (resized.width * resized.height)
