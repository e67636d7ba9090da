"""Any usable image becomes upright 8-bit RGB and a square; any other gives its reason."""

import io
import struct
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.buckets import Size, covering_size
from kubelora_trainer.data.cropping import crop_image
from kubelora_trainer.data.images import HEIC_READABLE, BadImageError, Conversion
from tests.trainer.fixtures.decoding import decode


def _save(image: Image.Image, path: Path, **arguments: Any) -> Path:
    image.save(path, **arguments)
    return path


def _pixel(path: Path, x: int = 0, y: int = 0) -> tuple[int, ...]:
    image = decode(path).image
    assert image.mode == "RGB"
    pixel = image.getpixel((x, y))
    assert isinstance(pixel, tuple)
    return tuple(int(value) for value in pixel)


def test_sixteen_bits_are_scaled_and_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    path = _save(Image.fromarray(values), tmp_path / "a.png")
    assert [_pixel(path, x)[0] for x in range(4)] == [0, 1, 128, 255]


def test_transparent_pixels_lie_on_white(tmp_path: Path) -> None:
    """Half transparent red on white is (255, 127 or 128, 127 or 128)."""
    path = _save(Image.new("RGBA", (4, 4), (255, 0, 0, 128)), tmp_path / "a.png")
    assert _pixel(path) == pytest.approx((255, 127.5, 127.5), abs=1)
    assert decode(path).conversions == (Conversion("transparency", "composited on #ffffff"),)


def test_palettes_with_a_transparent_colour_grey_and_bilevel_are_converted(tmp_path: Path) -> None:
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([9, 9, 9, 10, 200, 30])
    assert _pixel(_save(palette, tmp_path / "plain.png")) == (10, 200, 30)
    assert _pixel(_save(palette, tmp_path / "clear.png", transparency=1)) == (255, 255, 255)
    assert _pixel(_save(Image.new("L", (4, 4), 77), tmp_path / "grey.png")) == (77, 77, 77)
    assert _pixel(_save(Image.new("1", (4, 4), 1), tmp_path / "bit.png")) == (255, 255, 255)


def test_cmyk_photographs_keep_their_colours(tmp_path: Path) -> None:
    path = _save(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), tmp_path / "a.jpg", quality=100)
    red, green, blue = _pixel(path)
    assert red > 250
    assert green < 8
    assert blue < 8


def test_the_profile_of_srgb_changes_nothing_and_a_broken_one_is_noted(tmp_path: Path) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    image = Image.new("RGB", (4, 4), (200, 100, 50))
    assert _pixel(_save(image, tmp_path / "a.png", icc_profile=profile)) == (200, 100, 50)
    broken = _save(image, tmp_path / "b.png", icc_profile=b"nonsense")
    assert _pixel(broken) == (200, 100, 50)
    assert decode(broken).conversions == (Conversion("unusable colour profile", "ignored"),)


def test_a_profile_of_a_wider_space_is_followed(demo: DemoPaths, tmp_path: Path) -> None:
    """Adobe RGB to sRGB by both standards' curves and the matrix between their primaries."""
    with Image.open(demo.photos / "rocket.jpg") as rocket:
        profile = rocket.info["icc_profile"]
    assert b"Adobe RGB" in profile
    colours = [(100, 150, 100), (180, 120, 90), (60, 60, 200), (128, 128, 128)]
    matrix = np.array(
        [[1.39836, -0.39836, 0.0], [0.0, 1.0, 0.0], [0.0, -0.04293, 1.04293]]
    )  # linear Adobe RGB to linear sRGB: same white, same green row but for the wider green
    for number, colour in enumerate(colours):
        linear = matrix @ (np.array(colour) / 255) ** 2.19921875
        curve = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
        image = Image.new("RGB", (4, 4), colour)
        path = _save(image, tmp_path / f"{number}.png", icc_profile=profile)
        assert _pixel(path) == pytest.approx(tuple(curve * 255), abs=1.5)


def test_the_camera_orientation_is_applied(tmp_path: Path) -> None:
    """Orientation 6 is turned by 90 degrees clockwise: the left column becomes the top row."""
    image = Image.new("RGB", (30, 10), "black")
    image.paste((255, 255, 255), (0, 0, 10, 10))
    exif = Image.Exif()
    exif[0x0112] = 6
    path = _save(image, tmp_path / "a.png", exif=exif)
    assert decode(path).image.size == (10, 30)
    assert _pixel(path, 5, 2) == (255, 255, 255)
    assert _pixel(path, 5, 25) == (0, 0, 0)


@pytest.mark.parametrize("form", ["png", "jpg", "webp", "tif"])
@pytest.mark.parametrize(
    ("orientation", "stored"),
    [
        (2, Image.Transpose.FLIP_LEFT_RIGHT),
        (3, Image.Transpose.ROTATE_180),
        (4, Image.Transpose.FLIP_TOP_BOTTOM),
        (5, Image.Transpose.TRANSPOSE),
        (6, Image.Transpose.ROTATE_90),
        (7, Image.Transpose.TRANSVERSE),
        (8, Image.Transpose.ROTATE_270),
    ],
)
def test_every_orientation_is_turned_upright_and_told_in_every_format(
    tmp_path: Path, form: str, orientation: int, stored: Image.Transpose
) -> None:
    """A green corner on red and blue, stored the way that the orientation undoes."""
    upright = Image.new("RGB", (64, 48), (255, 0, 0))
    upright.paste((0, 0, 255), (32, 0, 64, 48))
    upright.paste((0, 255, 0), (0, 0, 16, 16))
    exif = Image.Exif()
    exif[0x0112] = orientation
    exact: dict[str, object] = {"lossless": True} if form == "webp" else {"quality": 95}
    path = _save(
        upright.transpose(stored),
        tmp_path / f"a.{form}",
        exif=exif,
        **(exact if form in ("webp", "jpg") else {}),
    )
    decoded = decode(path)
    assert decoded.image.size == (64, 48)
    for place, wanted in (((4, 4), (0, 255, 0)), ((60, 4), (0, 0, 255)), ((4, 44), (255, 0, 0))):
        assert _pixel(path, *place) == pytest.approx(wanted, abs=3)
    assert decoded.conversions == (Conversion("EXIF orientation", "turned upright"),)


def test_an_orientation_that_there_is_not_turns_nothing_and_tells_nothing(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 9
    path = _save(Image.new("RGB", (8, 4)), tmp_path / "a.jpg", exif=exif)
    assert decode(path).image.size == (8, 4)
    assert decode(path).conversions == ()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_tiff_that_counts_from_white_is_no_negative(tmp_path: Path, dtype: type) -> None:
    """Zero is white; a tenth of the range is nine tenths of white: 230 of 255.

    The file is written by hand: a header, 9 entries of 12 bytes, one row of two pixels.
    """
    top = np.iinfo(dtype).max
    pixels = np.array([0, round(top / 10)], dtype=dtype).tobytes()
    bits = np.dtype(dtype).itemsize * 8
    tags = {256: 2, 257: 1, 258: bits, 259: 1, 262: 0, 273: 8, 277: 1, 278: 1, 279: len(pixels)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + struct.pack("<I", 0)
    header = b"II*\0" + struct.pack("<I", 8 + len(pixels))
    (tmp_path / "a.tif").write_bytes(header + pixels + directory)
    assert [_pixel(tmp_path / "a.tif", x)[0] for x in (0, 1)] == pytest.approx([255, 229.5], abs=1)


def test_a_profile_is_followed_from_16_bits_as_from_8(demo: DemoPaths, tmp_path: Path) -> None:
    """Of a gray value; a profile for RGB does not fit and is named instead of dropped."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for name, values in (("a", np.uint8(77)), ("b", np.uint16(77 * 257))):
        image = Image.fromarray(np.full((4, 4), values))
        path = _save(image, tmp_path / f"{name}.png", icc_profile=profile)
        assert _pixel(path) == (77, 77, 77)
        problems = [c.problem for c in decode(path).conversions]
        assert problems[-1] == "unusable colour profile"


def test_the_transparent_value_of_a_16_bit_gray_image_lies_on_the_background_and_is_masked(
    tmp_path: Path,
) -> None:
    values = np.array([[0, 65535, 257]], dtype=np.uint16)
    path = _save(Image.fromarray(values), tmp_path / "a.png", transparency=0)
    image = decode(path, background="#102030").image
    assert [image.getpixel((x, 0)) for x in range(3)] == [(16, 32, 48), (255,) * 3, (1,) * 3]
    mask = decode(path, alpha="mask").mask
    assert mask is not None
    assert list(mask.tobytes()) == [0, 255, 255]


def _png_header(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc32(kind + data))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"")


def test_the_limit_is_300_megapixels_and_no_lower_one(tmp_path: Path) -> None:
    """17,320 squared is just below, 17,321 just above; headers alone are judged."""
    (tmp_path / "below.png").write_bytes(_png_header(17320, 17320))
    (tmp_path / "above.png").write_bytes(_png_header(17321, 17321))
    with pytest.raises(
        BadImageError, match=r"17321 x 17321 pixels, more than 300,000,000"
    ) as above:
        decode(tmp_path / "above.png")
    assert above.value.problem == "too many pixels"
    with pytest.raises(BadImageError, match="truncated"):
        decode(tmp_path / "below.png")


def test_the_first_frame_of_several_is_used_and_noted(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    path = _save(frames[0], tmp_path / "a.tif", save_all=True, append_images=frames[1:])
    assert _pixel(path) == (255, 0, 0)
    assert decode(path).conversions == (Conversion("several frames", "the first of 2 is used"),)


def _jpeg(size: int = 200) -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (size, size, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, "JPEG")
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"no image at all", "not an image"),
        (
            b"<!DOCTYPE html><p>not found",
            "a web page, as after a failed download: download it again",
        ),
        (b"\xff\x0a\0\0", "a JPEG XL image"),
        (b"II*\0\x10\0\0\0CR\2\0", "a camera raw file"),
        (b'<?xml version="1.0"?>\n<svg xmlns="x"/>', "an SVG drawing"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (_jpeg()[:-2000], "truncated"),
        (_jpeg()[:100], "."),
    ],
)
def test_a_bad_file_gives_its_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(BadImageError, match=reason):
        decode(tmp_path / "a.jpg")


def test_a_heic_photograph_is_read_where_its_package_is_installed_and_else_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.heic"
    if not HEIC_READABLE:
        path.write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
        with pytest.raises(BadImageError, match=r"a HEIC photograph, .* or install pillow-heif"):
            decode(path)
        return
    Image.new("RGB", (64, 48), (200, 40, 90)).save(path, "HEIF", quality=100)
    decoded = decode(path)
    assert decoded.image.size == (64, 48)
    assert all(abs(a - b) < 4 for a, b in zip(_pixel(path, 30, 20), (200, 40, 90), strict=True))


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    path = _save(Image.new("F", (4, 4), 0.5), tmp_path / "a.tif")
    with pytest.raises(BadImageError, match="floating-point"):
        decode(path)


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(600, 400, (96, 64)), (400, 600, (64, 96)), (50, 50, (64, 64)), (1000, 1, (64000, 64))],
)
def test_the_short_edge_becomes_the_edge_of_a_square(
    width: int, height: int, expected: tuple[int, int]
) -> None:
    assert covering_size(width, height, Size(64, 64)) == Size(*expected)


def test_a_square_is_the_same_cut_as_resizing_everything_and_cropping() -> None:
    """Against the plain two-step way on a smooth picture, where Lanczos' edges do not matter."""
    ramp = np.linspace(0, 255, 300)[None, :, None] * np.ones((200, 1, 3))
    image = Image.fromarray(ramp.astype(np.uint8))
    square = crop_image(image, Size(64, 64), across=0.5, down=0.3)
    assert (square.sizes.original_size, square.sizes.target_size) == ((200, 300), (64, 64))
    top, left = square.sizes.crop_top_left
    assert (top, left) == (0, 16)  # 96 x 64, 33 places across, the middle one
    whole = image.resize((96, 64), Image.Resampling.LANCZOS).crop((16, 0, 80, 64))
    expected = torch.from_numpy(np.asarray(whole).copy()).permute(2, 0, 1) / 127.5 - 1
    assert square.pixels.dtype == torch.float32
    assert float((square.pixels - expected).abs().max()) < 3 / 127.5


def test_crops_reach_both_ends_and_never_leave_the_image() -> None:
    image = Image.new("RGB", (300, 200))
    assert crop_image(image, Size(64, 64), 0.0, 0.0).sizes.crop_top_left == (0, 0)
    assert crop_image(image, Size(64, 64), 1 - 2**-53, 1 - 2**-53).sizes.crop_top_left == (0, 32)


def test_black_and_white_are_minus_one_and_one() -> None:
    for colour, value in (("black", -1.0), ("white", 1.0)):
        pixels = crop_image(Image.new("RGB", (9, 9), colour), Size(8, 8), 0, 0).pixels
        assert torch.equal(pixels, torch.full((3, 8, 8), value))


def test_transparency_lies_on_the_chosen_colour_and_opaque_alpha_is_no_conversion(
    tmp_path: Path,
) -> None:
    """A quarter of red over black: (64, 0, 0)."""
    path = _save(Image.new("RGBA", (4, 4), (255, 0, 0, 64)), tmp_path / "a.png")
    decoded = decode(path, background="#000000")
    assert decoded.image.getpixel((0, 0)) == pytest.approx((64, 0, 0), abs=1)
    assert decoded.conversions == (Conversion("transparency", "composited on #000000"),)
    opaque = _save(Image.new("RGBA", (4, 4), (9, 8, 7, 255)), tmp_path / "b.png")
    assert decode(opaque).conversions == ()
    assert _pixel(opaque) == (9, 8, 7)


def test_each_conversion_is_told(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = _save(Image.new("RGB", (4, 4)), tmp_path / "a.jpg", exif=exif)
    cmyk = _save(Image.new("CMYK", (4, 4)), tmp_path / "b.jpg")
    grey = _save(Image.new("L", (4, 4)), tmp_path / "c.png")
    deep = _save(Image.fromarray(np.zeros((4, 4), np.uint16)), tmp_path / "d.png")
    palette = _save(Image.new("P", (4, 4)), tmp_path / "e.png")
    assert decode(turned).conversions == (Conversion("EXIF orientation", "turned upright"),)
    assert decode(cmyk).conversions == (Conversion("CMYK", "converted to RGB"),)
    assert decode(grey).conversions == (Conversion("grayscale", "converted to RGB"),)
    assert decode(deep).conversions == (Conversion("16 bits", "scaled to 8 bits"),)
    assert decode(palette).conversions == (Conversion("palette", "converted to RGB"),)


def test_a_profile_is_followed_under_transparency_too(demo: DemoPaths, tmp_path: Path) -> None:
    with Image.open(demo.photos / "rocket.jpg") as rocket:
        profile = rocket.info["icc_profile"]
    plain = Image.new("RGB", (4, 4), (100, 150, 100))
    expected = _pixel(_save(plain, tmp_path / "a.png", icc_profile=profile))
    assert expected != (100, 150, 100)
    clear = Image.new("RGBA", (4, 4), (100, 150, 100, 255))
    assert _pixel(_save(clear, tmp_path / "b.png", icc_profile=profile)) == expected


def test_a_mirrored_cut_is_the_cut_of_the_mirrored_image_at_the_same_offsets() -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (40, 64, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    mirrored = crop_image(image, Size(40, 40), 0.3, 0.0, mirrored=True)
    turned = crop_image(Image.fromarray(pixels[:, ::-1].copy()), Size(40, 40), 0.3, 0.0)
    assert mirrored.sizes.crop_top_left == turned.sizes.crop_top_left == (0, 7)  # floor(0.3 * 25)
    assert torch.equal(mirrored.pixels, turned.pixels)
    by_hand = torch.from_numpy(pixels[:, ::-1][:, 7:47].copy()).permute(2, 0, 1) / 127.5 - 1
    assert torch.allclose(mirrored.pixels, by_hand, atol=1e-6)
