"""Image decoding: from an image file to upright 8-bit RGB.

This module alone decides what a usable image is. Preflight and training both use it, so that no
file passes one and fails the other.
"""

import hashlib
import io
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageCms, ImageColor, ImageOps, UnidentifiedImageError

from kubelora_api.dataset_spec import Dataset

try:
    from pillow_heif import register_heif_opener
except ImportError:  # an optional package, which messages about HEIC name
    HEIC_READABLE = False
else:
    register_heif_opener()
    HEIC_READABLE = True

READABLE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".webp",
    ".bmp",
    ".tif",
    ".tiff",
    ".gif",
)
OTHER_SUFFIXES = (
    ".avif",
    ".heic",
    ".heif",
    ".jxl",
    ".jp2",
    ".tga",
    ".ppm",
    ".pgm",
    ".psd",
    ".exr",
    ".hdr",
)
CAMERA_RAW_SUFFIXES = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw")
IMAGE_SUFFIXES = frozenset(READABLE_SUFFIXES + OTHER_SUFFIXES + CAMERA_RAW_SUFFIXES)
"""Suffixes of files counted as images, even where no decoder is installed: those are reported."""
MAX_PIXELS = 300_000_000
"""Above this a file is considered broken: 300 megapixels are 900 MB of RGB."""
Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit is lower; MAX_PIXELS is checked before decoding
LATENT_PIXELS = 8
"""Edge, in pixels, of the square that one element of SDXL's latents covers (the VAE's factor)."""
_OTHER_FORMAT = "which can't be read here: save it as PNG or JPEG"
_UNREADABLE = (
    (
        rb".{4}ftyp(hei[cxms]|hev[cxms]|mif1|msf1)",
        f"a HEIC photograph, {_OTHER_FORMAT}, or install pillow-heif",
    ),
    (rb".{4}ftyp", f"a video, {_OTHER_FORMAT}"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", f"a JPEG XL image, {_OTHER_FORMAT}"),
    (rb"II\*\0.{4}CR|II[RU]\0|FUJIFILMCCD-RAW", f"a camera raw file, {_OTHER_FORMAT}"),
    (rb"%PDF", f"a PDF, {_OTHER_FORMAT}"),
    (rb"\s*(<\?xml.*)?<svg", f"an SVG drawing, {_OTHER_FORMAT}"),
    (
        rb"\s*<(!doctype|html|head|\?xml)",
        "a web page, as after a failed download: download it again",
    ),
)
"""First bytes of files that are often mistaken for images; the more specific patterns first."""
_ORIENTATION = 0x0112
"""EXIF tag of the orientation; 1 is upright."""
_NOT_UPRIGHT = range(2, 9)
"""The rotations and mirrorings that EXIF defines; anything else is no orientation."""
_PHOTOMETRIC = 0x0106
"""TIFF tag PhotometricInterpretation; 0 means that zero is white."""


class BadImageError(Exception):
    """Unusable image.

    The message is the reason, without the file's name; ``problem`` is its kind, in a few words.
    """

    def __init__(self, problem: str, reason: str) -> None:
        super().__init__(reason)
        self.problem = problem


@dataclass(frozen=True)
class Conversion:
    """Property of a file that a training image may not have, and what was done about it."""

    problem: str
    done: str


@dataclass(frozen=True)
class DecodedImage:
    """Upright RGB, what had to be done to it, and the SHA-256 of the file's bytes.

    mask: 8 bits, the opacity of each pixel, where it weights the loss; None where all pixels count.
    """

    image: Image.Image
    conversions: tuple[Conversion, ...]
    sha256: str
    mask: Image.Image | None = None


def decode_image(path: Path, settings: Dataset, mask_file: Path | None = None) -> DecodedImage:
    """Read and decode an image file.

    Args:
        path: Path of the file.
        settings: All of them, so that preflight and training can't differ in one.
        mask_file: Image whose brightness weights the loss; the SHA-256 is then of both files.

    Returns:
        The upright RGB image.

    Raises:
        BadImageError: The file can't be read, decoded or used; the message is the reason.
    """
    decoded = _decode_bytes(path, settings)
    return decoded if mask_file is None else _with_mask(decoded, mask_file, settings)


def _with_mask(decoded: DecodedImage, mask_file: Path, settings: Dataset) -> DecodedImage:
    try:
        mask = _decode_bytes(mask_file, settings.model_copy(update={"alpha": "background"}))
    except BadImageError as error:
        raise BadImageError("bad mask", f"its mask {mask_file.name}: {error}") from error
    weights = mask.image.convert("L")
    if weights.size != decoded.image.size:
        weights = weights.resize(decoded.image.size, Image.Resampling.BILINEAR)
    if decoded.mask is not None:
        weights = ImageChops.multiply(weights, decoded.mask)
    if weights.getextrema() == (0, 0):
        raise BadImageError("bad mask", f"its mask {mask_file.name} is black, so no pixel counts")
    conversions = (*decoded.conversions, Conversion("loss mask", "taken from its mask file"))
    digest = hashlib.sha256((decoded.sha256 + mask.sha256).encode()).hexdigest()
    return DecodedImage(decoded.image, conversions, digest, weights)


def _decode_bytes(path: Path, settings: Dataset) -> DecodedImage:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadImageError("can't be read", f"it can't be read: {error.strerror}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _decode(content, settings)
    except BadImageError:
        raise
    except MemoryError:
        raise  # the machine's fault, not the image's
    except UnidentifiedImageError:
        raise _unidentified(content) from None
    except Exception as error:  # decoders raise OSError, ValueError, SyntaxError, struct.error, …
        problem = "truncated" if "truncated" in str(error).lower() else "can't be decoded"
        raise BadImageError(problem, f"it can't be decoded: {error}") from error


def _decode(content: bytes, settings: Dataset) -> DecodedImage:
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
        # Read before load(), which turns a TIFF upright and drops the tag.
        orientation = opened.getexif().get(_ORIENTATION)
        opened.load()
        profile = opened.info.get("icc_profile")
        upright = ImageOps.exif_transpose(opened)
        if opened.mode.startswith("I;16") and _is_negative(opened):
            upright = Image.fromarray(65535 - np.asarray(upright).astype(np.uint16))
        if orientation in _NOT_UPRIGHT:
            conversions.append(Conversion("EXIF orientation", "turned upright"))
        rgb, of_colour = _to_rgb(upright, profile, settings.background)
        mask = _loss_mask(upright) if settings.alpha == "mask" else None
    if mask is not None:
        of_colour.append(Conversion("loss mask", "taken from its transparency"))
    digest = hashlib.sha256(content).hexdigest()
    return DecodedImage(rgb, (*conversions, *of_colour), digest, mask)


def _loss_mask(upright: Image.Image) -> Image.Image | None:
    """Return the opacity, 8 bits; None for an image that is opaque everywhere."""
    opacity: Image.Image | None = None
    if upright.mode.startswith("I"):
        opacity = _opacity_of_16_bit(upright)
    elif upright.has_transparency_data:
        opacity = upright.convert("RGBA").getchannel("A")
    if opacity is None or opacity.getextrema() == (255, 255):
        return None
    if opacity.getextrema() == (0, 0):
        raise BadImageError(
            "fully transparent",
            "it is fully transparent, so no pixel would count in the loss: see dataset.alpha",
        )
    return opacity


def _to_rgb(
    image: Image.Image, profile: bytes | None, background: str
) -> tuple[Image.Image, list[Conversion]]:
    """Convert to 8-bit sRGB; transparent pixels are composited on ``background``."""
    if image.mode.startswith("I"):
        gray = _from_16_bit(image)
        rgb, of_profile = _apply_profile(gray, profile) if profile else (gray.convert("RGB"), [])
        conversions = [Conversion("16 bits", "scaled to 8 bits"), *of_profile]
        return _composite(rgb, _opacity_of_16_bit(image), background, conversions), conversions
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
    rgb, of_profile = _apply_profile(image, profile) if profile else (image.convert("RGB"), [])
    conversions += of_profile
    return _composite(rgb, alpha, background, conversions), conversions


def _composite(
    rgb: Image.Image, alpha: Image.Image | None, background: str, conversions: list[Conversion]
) -> Image.Image:
    """Composite the image on the background colour where it is transparent, and note that."""
    if alpha is None or alpha.getextrema() == (255, 255):
        return rgb
    conversions.append(Conversion("transparency", f"composited on {background}"))
    below = Image.new("RGB", rgb.size, ImageColor.getrgb(background))
    return Image.composite(rgb, below, alpha)


def _is_negative(opened: Image.Image) -> bool:
    """Return whether zero is white in a TIFF; Pillow inverts such files with 8 bits, not 16."""
    photometric = getattr(opened, "tag_v2", {}).get(_PHOTOMETRIC)
    return opened.format == "TIFF" and photometric == 0


def _opacity_of_16_bit(image: Image.Image) -> Image.Image | None:
    """Return the opacity of a gray PNG in which one value is transparent (its tRNS chunk)."""
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
    """Scale 0 to 65,535 to 0 to 255; Pillow's own conversion would clip at 255."""
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise BadImageError(
            "over 16 bits", "its pixels are integers beyond 16 bits: save it with 8 or 16 bits"
        )
    # 257 = 65535 / 255; half of it is added so that division rounds to the nearest.
    return Image.fromarray(((values + 128) // 257).astype(np.uint8), mode="L")


def _apply_profile(image: Image.Image, profile: bytes) -> tuple[Image.Image, list[Conversion]]:
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if image.mode == "RGB" and "sRGB" in ImageCms.getProfileDescription(source):
            return image, []  # converting would only add rounding errors
        converted = ImageCms.profileToProfile(
            image, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image.convert("RGB"), [Conversion("unusable colour profile", "ignored")]
    if converted is None:  # never here: Pillow returns None only for conversion in place
        return image.convert("RGB"), []
    return converted, [Conversion("colour profile", "converted to sRGB")]


def _unidentified(content: bytes) -> BadImageError:
    if not content:
        return BadImageError("empty file", "it is empty (0 bytes)")
    if content.startswith(b"version https://git-lfs"):
        return BadImageError(
            "Git LFS pointer", "it is a Git LFS pointer, not the image: run git lfs pull"
        )
    for pattern, what in _UNREADABLE:
        if re.match(pattern, content[:512], re.IGNORECASE | re.DOTALL):
            return BadImageError("not an image", f"it is {what}")
    return BadImageError(
        "not an image", "it is not an image, or is in a format that can't be read here"
    )
