"""Transparency as loss mask: the same cut as the pixels, at the latents' resolution."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kubelora_api import dataset_spec
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.buckets import Size
from kubelora_trainer.data.cropping import crop_image
from kubelora_trainer.data.dataset import ImageDataset, build_dataset
from kubelora_trainer.data.images import BadImageError, Conversion
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.embedding_cache import build_cache
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from tests.trainer.fixtures.decoding import decode
from tests.trainer.fixtures.jobs import job_spec, open_base

EXIF_ORIENTATION = 0x0112


@pytest.fixture(scope="module")
def base(demo: DemoPaths) -> BaseModel:
    return open_base(demo.model)


def _picture(path: Path, opacity: np.ndarray) -> Path:
    """A noisy picture with the given opacity, (height, width) of 0 to 255."""
    colours = np.random.default_rng(1).integers(0, 256, (*opacity.shape, 3), dtype=np.uint8)
    Image.fromarray(np.dstack([colours, opacity.astype(np.uint8)])).save(path)
    return path


def _left_half(width: int, height: int) -> np.ndarray:
    opacity = np.zeros((height, width))
    opacity[:, : width // 2] = 255
    return opacity


def test_each_latent_counts_by_the_mean_opacity_of_its_8_by_8_pixels(tmp_path: Path) -> None:
    """64 x 64 at 64 x 64; opaque up to column 28: three latents whole and half of the fourth."""
    opacity = np.zeros((64, 64))
    opacity[:, :28] = 255
    decoded = decode(_picture(tmp_path / "a.png", opacity), alpha="mask")
    assert Conversion("loss mask", "taken from its transparency") in decoded.conversions
    mask = crop_image(decoded.image, Size(64, 64), 0.5, 0.5, mask=decoded.mask).mask
    assert mask is not None
    assert mask.shape == (1, 8, 8)
    row = [1.0, 1.0, 1.0, pytest.approx(0.5, abs=1 / 255), 0.0, 0.0, 0.0, 0.0]
    assert all(line == row for line in mask[0].tolist())


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize(("across", "down"), [(0.0, 0.5), (0.7, 0.3), (0.99, 0.0)])
@pytest.mark.parametrize("target", [Size(64, 64), Size(48, 80), Size(96, 40)])
def test_the_mask_is_cut_and_mirrored_as_the_pixels_are(
    tmp_path: Path, target: Size, across: float, down: float, mirrored: bool
) -> None:
    """A picture whose brightness is its opacity: pixels, averaged 8 x 8, must be the mask."""
    ramp = np.add.outer(np.linspace(0, 100, 160), np.linspace(20, 155, 240)).astype(np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(np.dstack([ramp, ramp, ramp, ramp])).save(path)
    grey = Image.fromarray(ramp).convert("RGB")
    decoded = decode(path, alpha="mask")
    cut = crop_image(grey, target, across, down, mirrored=mirrored, mask=decoded.mask)
    assert cut.mask is not None
    brightness = (cut.pixels[:1] + 1) / 2
    expected = torch.nn.functional.avg_pool2d(brightness, 8)
    assert torch.allclose(cut.mask, expected, atol=0.008)
    assert float(expected.max() - expected.min()) > 0.2


def test_the_mask_is_turned_upright_with_the_image(tmp_path: Path) -> None:
    """Orientation 6 is turned a quarter to the right: what was left is then on top."""
    picture = Image.open(_picture(tmp_path / "a.png", _left_half(64, 64)))
    exif = picture.getexif()
    exif[EXIF_ORIENTATION] = 6
    picture.save(tmp_path / "b.png", exif=exif)
    decoded = decode(tmp_path / "b.png", alpha="mask")
    assert decoded.mask is not None
    mask = np.asarray(decoded.mask)
    assert (mask[:32] == 255).all()
    assert (mask[32:] == 0).all()


def test_an_opaque_image_has_no_mask_and_a_wholly_transparent_one_is_refused(
    tmp_path: Path,
) -> None:
    opaque = _picture(tmp_path / "a.png", np.full((16, 16), 255))
    assert decode(opaque, alpha="mask").mask is None
    clear = _picture(tmp_path / "b.png", np.zeros((16, 16)))
    assert decode(clear).mask is None
    with pytest.raises(BadImageError, match="fully transparent"):
        decode(clear, alpha="mask")


def _photos(folder: Path) -> Path:
    folder.mkdir()
    _picture(folder / "a-half.png", _left_half(96, 64))
    _picture(folder / "b-whole.png", np.full((64, 96), 255))
    lines = [{"file_name": name, "text": name} for name in ("a-half.png", "b-whole.png")]
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return folder


def _open(folder: Path, **settings: object) -> ImageDataset:
    document = {"uri": "x", "resolution": 64, "crop": "center", **settings}
    return build_dataset(folder, dataset_spec.Dataset.model_validate(document))


def test_only_opaque_parts_have_a_gradient_and_an_opaque_image_is_trained_on_as_ever(
    base: BaseModel, tmp_path: Path
) -> None:
    photos = _photos(tmp_path / "photos")
    spec = job_spec({"batchSize": 2})
    masked = SdxlObjective(base, _open(photos, alpha="mask"), spec)
    plain = SdxlObjective(base, _open(photos), spec)
    batch, unmasked = masked.batch(0), plain.batch(0)
    assert unmasked.masks is None
    assert batch.masks is not None
    assert torch.equal(batch.noisy, unmasked.noisy)
    samples = [draw.sample for draw in masked.order.samples_of(0)]
    half, whole = samples.index(0), samples.index(1)
    # The middle 64 of 96 columns: 32 opaque ones, which are 4 of 8 latents.
    assert batch.masks[half, 0].mean(dim=0).tolist() == [1.0] * 4 + [0.0] * 4
    assert bool((batch.masks[whole] == 1).all())
    captured = _predicted(base)
    result = masked(0)
    (answer,) = captured
    answer.retain_grad()
    torch.autograd.backward(result.loss_sum)
    assert answer.grad is not None
    expected = 2 * (answer.detach() - batch.target) / batch.target[0].numel()
    expected[half, :, :, 4:] = 0
    assert torch.allclose(answer.grad, expected, atol=1e-7)
    masked.close()
    plain.close()


def _predicted(base: BaseModel) -> list[torch.Tensor]:
    """The UNet's next answer, made to need a gradient."""
    captured: list[torch.Tensor] = []

    def note(module: object, inputs: object, output: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        handle.remove()
        captured.append(output[0].detach().requires_grad_(True))
        return (captured[0],)

    handle = base.unet.register_forward_hook(note)
    return captured


def test_a_cache_carries_the_masks(base: BaseModel, tmp_path: Path) -> None:
    """Flipped too; and a cache filled without masks is not taken for one with them."""
    photos, folder = _photos(tmp_path / "photos"), tmp_path / "cache"
    folder.mkdir()
    spec = job_spec({"batchSize": 2})
    for settings in ({}, {"alpha": "mask"}):
        data = _open(photos, flip=1.0, **settings)
        spec = spec.model_copy(update={"dataset": data.settings})
        cache = build_cache(folder, spec, base, data, lambda _: None)
        filled = SdxlObjective(base, data, spec, cache)
        filled.fill_cache(lambda: False, lambda done, total: None)
        filled.close()
    data = _open(photos, flip=1.0, alpha="mask")
    spec = spec.model_copy(update={"dataset": data.settings})
    cached = SdxlObjective(base, data, spec, build_cache(folder, spec, base, data, lambda _: None))
    plain = SdxlObjective(base, data, spec)
    for step in range(2):  # the second time from memory
        found, expected = cached.batch(step).masks, plain.batch(step).masks
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
        half = [draw.sample for draw in plain.order.samples_of(step)].index(0)
        assert found[half, 0].mean(dim=0).tolist() == [0.0] * 4 + [1.0] * 4
    cached.close()
    plain.close()
