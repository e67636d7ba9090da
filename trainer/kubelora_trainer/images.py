"""Turns an image file into upright 8-bit RGB and into a training square.

One place decides what a usable image is; preflight and training both go through it, so that no file
passes the one and fails the other.
"""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

MAX_PIXELS = 300_000_000
"""Above this a file is taken for an error: 300 megapixels are 900 MB of RGB."""


class BadImageError(Exception):
    """An image that can't be used; the message is the reason, without the file's name."""


@dataclass(frozen=True)
class DecodedImage:
    """Upright RGB, and what had to be done to it that its owner may want to know."""

    image: Image.Image
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Square:
    """A training square and SDXL's micro-conditioning, sizes as (height, width) in pixels.

    pixels: fp32 (3, resolution, resolution) in [-1, 1].
    original_size: of the upright file. crop_top_left: (top, left) in the resized image.
    """

    pixels: torch.Tensor
    original_size: tuple[int, int]
    crop_top_left: tuple[int, int]
    target_size: tuple[int, int]


def decode_image(path: Path) -> DecodedImage:
    """Read the whole file. Raises BadImageError with the reason."""
    try:
        with warnings.catch_warnings(), path.open("rb") as content:
            warnings.simplefilter("ignore")
            return _decode(content)
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise BadImageError(_why_unidentified(path)) from None
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error, …
        raise BadImageError(f"it can't be decoded: {error}") from error


def _decode(content: io.BufferedReader) -> DecodedImage:
    with Image.open(content) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise BadImageError(
                f"it has {opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}"
            )
        notes = []
        frames = getattr(opened, "n_frames", 1)
        if frames > 1:
            notes.append(f"the first of {frames} frames is used")
        opened.load()
        upright = ImageOps.exif_transpose(opened)
        rgb, colour_notes = _to_rgb(upright, opened.info.get("icc_profile"))
    return DecodedImage(rgb, (*notes, *colour_notes))


def _to_rgb(image: Image.Image, profile: bytes | None) -> tuple[Image.Image, tuple[str, ...]]:
    """8-bit sRGB; what is transparent lies on white."""
    if image.mode.startswith("I"):
        return _from_16_bit(image).convert("RGB"), ()
    if image.mode == "F":
        raise BadImageError("its pixels are floating-point numbers of unknown range: save 8 bits")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        flat = Image.alpha_composite(white, rgba).convert("RGB")
        return flat, ("its transparency was laid on white",)
    if profile and image.mode in ("RGB", "CMYK", "L"):
        return _through_profile(image, profile)
    return image.convert("RGB"), ()


def _from_16_bit(image: Image.Image) -> Image.Image:
    """65,535 becomes 255 and everything between is scaled; PIL's own conversion would clip."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise BadImageError("its pixels are integers beyond 16 bits: save 8 or 16 bits")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8), mode="L")


def _through_profile(image: Image.Image, profile: bytes) -> tuple[Image.Image, tuple[str, ...]]:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if image.mode == "RGB" and "sRGB" in ImageCms.getProfileDescription(source):
            return image, ()  # converting would only add rounding
        converted = ImageCms.profileToProfile(
            image, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image.convert("RGB"), ("its colour profile is unusable and was ignored",)
    if converted is None:  # only when converting in place
        return image.convert("RGB"), ()
    return converted, ()


def _why_unidentified(path: Path) -> str:
    start = path.open("rb").read(256)
    if not start:
        return "it is empty (0 bytes)"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the image: run git lfs pull"
    return "it is not an image, or one of a format that can't be read here"


def resized_size(width: int, height: int, resolution: int) -> tuple[int, int]:
    """(width, height) once the shorter edge is ``resolution``."""
    short = min(width, height)
    return (
        max(resolution, round(width * resolution / short)),
        max(resolution, round(height * resolution / short)),
    )


def cut_square(image: Image.Image, resolution: int, across: float, down: float) -> Square:
    """Resize the short edge to ``resolution`` and cut a square out of the long one.

    across, down: where the square lies, each in [0, 1): uniform numbers give uniform crops.
    The square alone is resampled (Lanczos), so that a panorama costs no more than a square.
    """
    width, height = resized_size(image.width, image.height, resolution)
    left = int(across * (width - resolution + 1))
    top = int(down * (height - resolution + 1))
    scale_x, scale_y = image.width / width, image.height / height
    box = (
        left * scale_x,
        top * scale_y,
        min(image.width, (left + resolution) * scale_x),
        min(image.height, (top + resolution) * scale_y),
    )
    square = image.resize((resolution, resolution), Image.Resampling.LANCZOS, box=box)
    array = np.asarray(square, dtype=np.float32) / 127.5 - 1.0
    return Square(
        pixels=torch.from_numpy(array).permute(2, 0, 1).contiguous(),
        original_size=(image.height, image.width),
        crop_top_left=(top, left),
        target_size=(resolution, resolution),
    )
