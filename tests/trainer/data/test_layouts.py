"""Folders of kohya's scripts, and masks in files of their own."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kubelora_api.dataset_spec import Dataset
from kubelora_trainer.data.dataset import ImageDataset, build_dataset
from kubelora_trainer.utils.errors import DatasetError


def _image(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64), (shade, 20, 40)).save(path)


def _open(folder: Path, **settings: object) -> ImageDataset:
    document = {"uri": "x", "resolution": 64, "crop": "center", **settings}
    return build_dataset(folder, Dataset.model_validate(document))


@pytest.fixture
def kohya(tmp_path: Path) -> Path:
    for shade, name in enumerate(
        ("img/10_zwx dog/a.png", "img/10_zwx dog/b.png", "reg/1_dog/c.png")
    ):
        _image(tmp_path / name, shade)
    (tmp_path / "img/10_zwx dog/a.txt").write_text("zwx dog on grass")
    return tmp_path


def test_kohyas_folders_have_repeats_captions_and_prior_images(kohya: Path) -> None:
    _image(kohya / "stray.png", 9)
    data = _open(kohya, layout="kohya", captions={"prefix": "photo"})
    assert [
        (s.path.name, s.repeats, s.caption, s.category, s.use_prefix) for s in data.samples
    ] == [
        ("a.png", 10, "zwx dog on grass", "zwx dog", True),
        ("b.png", 10, "zwx dog", "zwx dog", True),
        ("c.png", 1, "dog", "reg dog", False),
    ]
    assert [one.file for one in data.report.skipped] == ["stray.png"]


def test_what_looks_like_kohyas_layout_is_named(kohya: Path) -> None:
    report = _open(kohya, captions={"maxMissing": 1}).report
    seen = {n.file: n.detail for n in report.notes if n.problem == "looks like kohya's layout"}
    assert seen == {
        "img/10_zwx dog": "images with repeats 10 and the caption 'zwx dog'",
        "reg/1_dog": "prior-preservation images with repeats 1 and the caption 'dog'",
    }


def test_the_layout_without_such_a_folder_is_an_error(tmp_path: Path) -> None:
    _image(tmp_path / "a.png", 1)
    with pytest.raises(DatasetError, match=r"no image of .* in a folder named like '10_zwx dog'"):
        _open(tmp_path, layout="kohya")


def _masked(folder: Path, mask: str) -> Path:
    _image(folder / "a.png", 1)
    (folder / "a.txt").write_text("a bottle")
    weights = np.zeros((64, 64), dtype=np.uint8)
    weights[:, :32] = 255
    (folder / mask).parent.mkdir(exist_ok=True)
    Image.fromarray(weights).save(folder / mask)
    return folder


@pytest.mark.parametrize("mask", ["a-masklabel.png", "A_mask.PNG", "mask/a.png", "masks/a.webp"])
def test_a_mask_file_weights_the_loss_of_its_image(tmp_path: Path, mask: str) -> None:
    """The left half is white: of 8 x 8 latent elements four columns count."""
    _masked(tmp_path, mask)
    if mask.endswith("webp"):
        Image.open(tmp_path / mask).save(tmp_path / mask, lossless=True)
    data = _open(tmp_path, maskFiles="use")
    (sample,) = data.samples
    (view,) = data.fixed_views()
    weights = data.image(view).mask
    assert weights is not None
    assert (weights[0, :, :4] == 1).all()
    assert (weights[0, :, 4:] == 0).all()
    before = sample.sha256
    Image.new("L", (64, 64), 255).save(tmp_path / mask)
    with pytest.raises(DatasetError, match="has changed since preflight"):
        data.image(view)
    assert _open(tmp_path, maskFiles="use").samples[0].sha256 != before


def test_a_file_that_looks_like_a_mask_is_left_out_by_name_unless_it_is_to_be_trained(
    tmp_path: Path,
) -> None:
    data = _open(_masked(tmp_path, "a-masklabel.png"))
    assert [sample.file for sample in data.samples] == ["a.png"]
    (note,) = data.report.notes
    assert (note.file, note.problem, note.detail) == (
        *("a-masklabel.png", "looks like a mask"),
        "of a.png",
    )
    trained = _open(tmp_path, maskFiles="train", captions={"maxMissing": 1})
    assert len(trained) == 2


def test_an_image_called_mask_is_one_where_there_is_no_image_for_it(tmp_path: Path) -> None:
    _image(tmp_path / "gas_mask.png", 1)
    (tmp_path / "gas_mask.txt").write_text("a gas mask")
    assert len(_open(tmp_path)) == 1
