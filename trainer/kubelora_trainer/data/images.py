"""Decoding of an image file to upright 8-bit RGB.

This module alone decides what a usable image is. Preflight and training both use it, so that no
file passes one and fails the other.
"""

import hashlib
import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageCms, ImageColor, ImageOps, UnidentifiedImageError

READABLE = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
OTHERS = (".avif", ".heic", ".heif", ".jxl", ".jp2", ".tga", ".ppm", ".pgm", ".psd", ".exr", ".hdr")
CAMERA_RAW = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw")
IMAGE_SUFFIXES = frozenset(READABLE + OTHERS + CAMERA_RAW)
"""Suffixes of images, including formats without a decoder, which are then reported."""
MAX_PIXELS = 300_000_000
"""Largest plausible image: 300 megapixels are 900 MB of RGB."""
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit is lower; ours is checked before decoding
WHITE = "#ffffff"
LATENT_PIXELS = 8
"""Edge in pixels of the square that one element of SDXL's latents represents."""
_OTHER_FORMAT = "which is not supported: save it as PNG or JPEG"
_UNREADABLE = (
    (rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)", f"a HEIC photograph, {_OTHER_FORMAT}"),
    (rb".{4}ftyp", f"a video, {_OTHER_FORMAT}"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", f"a JPEG XL image, {_OTHER_FORMAT}"),
    (rb"II\*\0.{4}CR|II[RU]\0|FUJIFILMCCD-RAW", f"a camera raw file, {_OTHER_FORMAT}"),
    (rb"%PDF", f"a PDF, {_OTHER_FORMAT}"),
    (rb"\s*(<\?xml.*)?<svg", f"an SVG drawing, {_OTHER_FORMAT}"),
    (rb"\s*<(!doctype|html|head|\?xml)", "a web page, as after a failed download: download again"),
)
"""First bytes of files that are often mistaken for images, the more specific ones first."""
AlphaUse = Literal["background", "mask"]
_ORIENTATION = 0x0112
"""EXIF tag; 1 is upright."""
_TURNED = range(2, 9)
_PHOTOMETRIC = 0x0106
"""TIFF tag; 0 means that 0 is white."""


class BadImageError(Exception):
    """An image that cannot be used.

    The message is the reason, without the file's name; ``problem`` is its kind, in few words.
    """

    def __init__(self, problem: str, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


@dataclass(frozen=True)
class Conversion:
    """A difference between a file and a training image, and how it was handled."""

    problem: str
    done: str


@dataclass(frozen=True)
class DecodedImage:
    """A decoded image.

    Attributes:
        image: Upright RGB.
        conversions: Conversions that were necessary.
        sha256: SHA-256 of the file's bytes.
        mask: 8-bit opacity of each pixel that weights the loss, or None if all pixels count.
    """

    image: Image.Image
    conversions: tuple[Conversion, ...]
    sha256: str
    mask: Image.Image | None = None


def decode_image(
    path: Path, background: str = WHITE, alpha: AlphaUse = "background"
) -> DecodedImage:
    """Read and decode a file.

    Args:
        path: The file.
        background: Color, as #rrggbb, behind transparent pixels.
        alpha: "mask" if transparency is also the loss mask.

    Raises:
        BadImageError: The file cannot be used.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadImageError("can't be read", f"it can't be read: {error.strerror}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _decode(content, background, alpha)
    except BadImageError:
        raise
    except UnidentifiedImageError:
        raise _unidentified(content) from None
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error, …
        problem = "truncated" if "truncated" in str(error).lower() else "can't be decoded"
        raise BadImageError(problem, f"it can't be decoded: {error}") from error


def _decode(content: bytes, background: str, alpha: AlphaUse) -> DecodedImage:
    with Image.open(io.BytesIO(content)) as opened:
        if opened.width * opened.height > MAX_PIXELS:
            raise BadImageError(
                "too many pixels",
                f"it has {opened.width} x {opened.height} pixels, more than {MAX_PIXELS:,}",
            )
        conversions = []
        frames = getattr(opened, "n_frames", 1)
        if frames > 1:
            conversions.append(Conversion("several frames", f"the first of {frames} is used"))
        # Read before loading, which rotates a TIFF and drops the tag.
        turned = opened.getexif().get(_ORIENTATION)
        opened.load()
        profile = opened.info.get("icc_profile")
        upright = ImageOps.exif_transpose(opened)
        if opened.mode.startswith("I;16") and _is_negative(opened):
            upright = Image.fromarray(65535 - np.asarray(upright).astype(np.uint16))
        if turned in _TURNED:
            conversions.append(Conversion("EXIF orientation", "turned upright"))
        rgb, of_colour = _to_rgb(upright, profile, background)
        mask = _loss_mask(upright) if alpha == "mask" else None
    if mask is not None:
        of_colour.append(Conversion("loss mask", "by its transparency"))
    digest = hashlib.sha256(content).hexdigest()
    return DecodedImage(rgb, (*conversions, *of_colour), digest, mask)


def _loss_mask(upright: Image.Image) -> Image.Image | None:
    """Return the opacity in 8 bits, or None for an opaque image."""
    opacity: Image.Image | None = None
    if upright.mode.startswith("I"):
        opacity = _opacity_of_16_bit(upright)
    elif upright.has_transparency_data:
        opacity = upright.convert("RGBA").getchannel("A")
    if opacity is None or opacity.getextrema() == (255, 255):
        return None
    if opacity.getextrema() == (0, 0):
        raise BadImageError(
            "wholly transparent",
            "it is fully transparent, so none of it would count: see dataset.alpha",
        )
    return opacity


def _to_rgb(
    image: Image.Image, profile: bytes | None, background: str
) -> tuple[Image.Image, list[Conversion]]:
    """Convert to 8-bit sRGB; transparent pixels show ``background``."""
    if image.mode.startswith("I"):
        grey = _from_16_bit(image)
        rgb, of_profile = _through_profile(grey, profile) if profile else (grey.convert("RGB"), [])
        conversions = [Conversion("16 bits", "scaled to 8 bits"), *of_profile]
        return _laid_on(rgb, _opacity_of_16_bit(image), background, conversions), conversions
    if image.mode == "F":
        raise BadImageError(
            "floating-point pixels",
            "its pixels are floating-point numbers of unknown range: save it with 8 bits",
        )
    conversions = _mode_conversions(image.mode)
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    if alpha is not None:
        colours = "L" if image.mode in ("L", "LA", "La") else "RGB"
        image = image.convert("RGBA").convert(colours)
    elif image.mode not in ("RGB", "CMYK", "L"):
        image = image.convert("RGB")
    rgb, of_profile = _through_profile(image, profile) if profile else (image.convert("RGB"), [])
    conversions += of_profile
    return _laid_on(rgb, alpha, background, conversions), conversions


def _laid_on(
    rgb: Image.Image, alpha: Image.Image | None, background: str, conversions: list[Conversion]
) -> Image.Image:
    """Composite a transparent image onto the background color and record the conversion."""
    if alpha is None or alpha.getextrema() == (255, 255):
        return rgb
    conversions.append(Conversion("transparency", f"laid on {background}"))
    below = Image.new("RGB", rgb.size, ImageColor.getrgb(background))
    return Image.composite(rgb, below, alpha)


def _is_negative(opened: Image.Image) -> bool:
    """Return True for a white-is-zero TIFF; Pillow inverts those of 8 bits, but not of 16."""
    photometric = getattr(opened, "tag_v2", {}).get(_PHOTOMETRIC)
    return opened.format == "TIFF" and photometric == 0


def _opacity_of_16_bit(image: Image.Image) -> Image.Image | None:
    """Return the opacity of a gray PNG with one transparent value (its tRNS chunk)."""
    clear = image.info.get("transparency")
    if not isinstance(clear, int):
        return None
    return Image.fromarray(np.where(np.asarray(image) == clear, 0, 255).astype(np.uint8), mode="L")


def _mode_conversions(mode: str) -> list[Conversion]:
    kinds = {
        "CMYK": "CMYK",
        "YCbCr": "YCbCr",
        "LAB": "LAB",
        "HSV": "HSV",
        "P": "palette",
        "PA": "palette",
        "L": "grayscale",
        "LA": "grayscale",
        "1": "black and white",
    }
    return [Conversion(kinds[mode], "converted to RGB")] if mode in kinds else []


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Scale 65,535 to 255; PIL's own conversion would clip."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise BadImageError(
            "over 16 bits", "its pixels are integers beyond 16 bits: save it with 8 or 16 bits"
        )
    return Image.fromarray(((values + 128) // 257).astype(np.uint8), mode="L")


def _through_profile(image: Image.Image, profile: bytes) -> tuple[Image.Image, list[Conversion]]:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if image.mode == "RGB" and "sRGB" in ImageCms.getProfileDescription(source):
            return image, []  # converting would only add rounding
        converted = ImageCms.profileToProfile(
            image, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image.convert("RGB"), [Conversion("unusable colour profile", "ignored")]
    if converted is None:  # for the type checker: None only when converting in place
        return image.convert("RGB"), []
    return converted, [Conversion("colour profile", "converted to sRGB")]


def _unidentified(content: bytes) -> BadImageError:
    if not content:
        return BadImageError("empty file", "it is empty (0 bytes)")
    if content.startswith(b"version https://git-lfs"):
        return BadImageError(
            "Git LFS pointer", "it is a Git LFS pointer, not the image: run git lfs pull"
        )
    for begins, what in _UNREADABLE:
        if re.match(begins, content[:512], re.IGNORECASE | re.DOTALL):
            return BadImageError("not an image", f"it is {what}")
    return BadImageError("not an image", "it is not an image, or its format is not supported")
