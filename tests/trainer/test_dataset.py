"""Every image of a folder is accounted for before training; captions are found or missed aloud."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image

from kubelora_api import spec
from kubelora_trainer.dataset import Dataset, open_dataset
from kubelora_trainer.demo import DemoPaths
from kubelora_trainer.errors import ConfigurationError
from kubelora_trainer.preflight import PreflightReport, Remark, preflight, write_report


def _image(path: Path, size: tuple[int, int] = (80, 80)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (len(path.name) * 9 % 255, 120, 60)).save(path)
    return path


def _metadata(folder: Path, *entries: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))


def _skipping(folder: Path) -> tuple[dict[str, str], PreflightReport]:
    samples, report = preflight(folder, 64, "skip")
    return {sample.file: sample.caption for sample in samples}, report


def test_the_demos_photographs_pass_with_their_captions(demo: DemoPaths) -> None:
    data = open_dataset(demo.photos, spec.Dataset(uri="x", resolution=64))
    assert len(data) == data.report.used == data.report.found == 8
    assert data.report.skipped == ()
    captions = {sample.file: sample.caption for sample in data.samples}
    assert captions["chelsea.png"] == "a photo of a tabby cat"


def test_captions_come_from_metadata_then_from_text_files_and_folders_are_entered(
    tmp_path: Path,
) -> None:
    for name in ("a.png", "b.png", "c.png", "sub/d.png", "sub/e.PNG", "f.png"):
        _image(tmp_path / name)
    _metadata(tmp_path, {"file_name": "a.png", "text": "from metadata"}, {"file_name": "f.png"})
    _metadata(tmp_path / "sub", {"file_name": "d.png", "text": "a line\u2028separator"})
    (tmp_path / "a.txt").write_text("not this one")
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbffrom a\r\ntext file\n")
    (tmp_path / "c.caption").write_text("from a caption file")
    (tmp_path / "f.png.txt").write_text("beside")
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    captions, report = _skipping(tmp_path)
    assert captions == {
        "a.png": "from metadata",
        "b.png": "from a text file",
        "c.png": "from a caption file",
        "f.png": "beside",
        "sub/d.png": "a line\u2028separator",
        "sub/e.PNG": "",
    }
    assert report.notes == (Remark("sub/e.PNG", "no caption"),)
    assert (report.without_caption, report.other_files) == (1, 1)


def test_found_is_used_plus_skipped_and_each_bad_image_is_named(tmp_path: Path) -> None:
    for n in range(3):
        _image(tmp_path / f"good{n}.png")
    (tmp_path / "zero.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello")
    whole = _image(tmp_path / "cut.png", (500, 500)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "photo.heic").write_bytes(b"\x00\x00\x00\x18ftypheic")
    _metadata(tmp_path, {"file_name": "gone.png", "text": "x"})
    captions, report = _skipping(tmp_path)
    assert len(captions) == report.used == 3
    assert (report.found, len(report.skipped)) == (8, 5)
    reasons = {remark.file: remark.text for remark in report.skipped}
    assert reasons.keys() == {"zero.jpg", "text.jpg", "cut.png", "photo.heic", "gone.png"}
    assert "0 bytes" in reasons["zero.jpg"]
    assert "does not exist" in reasons["gone.png"]


def test_a_bad_image_ends_the_run_by_default_and_the_message_lists_the_first(
    tmp_path: Path,
) -> None:
    _image(tmp_path / "good.png")
    for n in range(5):
        (tmp_path / f"bad{n}.jpg").touch()
    with pytest.raises(ConfigurationError) as caught:
        open_dataset(tmp_path, spec.Dataset(uri="x", resolution=64))
    message = str(caught.value)
    assert "5 of 6 images" in message
    assert "bad0.jpg: it is empty (0 bytes)" in message
    assert "and 2 more" in message
    assert "dataset.onBadImage: skip" in message


def test_a_folder_without_usable_images_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no images"):
        preflight(tmp_path, 64, "skip")
    (tmp_path / "a.jpg").touch()
    with pytest.raises(ConfigurationError, match=r"No image .* can be used: a.jpg: it is empty"):
        preflight(tmp_path, 64, "skip")
    with pytest.raises(ConfigurationError, match="is no folder"):
        preflight(tmp_path / "none", 64, "skip")


def test_a_caption_that_is_not_utf8_names_the_byte(tmp_path: Path) -> None:
    _image(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes("une bouteille dorée".encode("latin-1"))
    with pytest.raises(ConfigurationError, match=r"a.txt is not UTF-8: byte 17 is 0xe9"):
        preflight(tmp_path, 64, "skip")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{oops", "line 2: not a JSON object"),
        ("[1]", "line 2: it needs a file_name"),
        ('{"text": "x"}', "line 2: it needs a file_name"),
        ('{"file_name": "a.png", "text": 5}', "line 2: text must be a string, not int"),
        ('{"file_name": "../b.png"}', "line 2: file_name '../b.png' leaves"),
        ('{"file_name": "a.png", "text": "again"}', "line 2: a.png is listed a second time"),
    ],
)
def test_a_wrong_metadata_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    _image(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n' + line)
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        preflight(tmp_path, 64, "skip")


def test_small_images_are_upscaled_and_empty_captions_kept_and_both_are_noted(
    tmp_path: Path,
) -> None:
    _image(tmp_path / "small.png", (40, 90))
    (tmp_path / "small.txt").write_text(" \n")
    _, report = _skipping(tmp_path)
    assert report.notes == (
        Remark("small.png", "upscaled from 40 x 90"),
        Remark("small.png", "its caption is empty"),
    )
    assert report.upscaled == 1
    data = open_dataset(tmp_path, spec.Dataset(uri="x", resolution=64))
    assert data.square(0, 0, 0).pixels.shape == (3, 64, 64)
    assert data.square(0, 0, 0).original_size == (90, 40)


def test_linked_folders_are_entered_once_and_loops_end(tmp_path: Path) -> None:
    _image(tmp_path / "elsewhere/a.png")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data")
    captions, report = _skipping(tmp_path / "data")
    assert list(captions) == ["linked/a.png"]
    assert report.found == 1


def test_the_report_is_written_as_it_is(tmp_path: Path) -> None:
    _image(tmp_path / "data/a.png")
    _, report = _skipping(tmp_path / "data")
    write_report(report, tmp_path / "preflight.json")
    written = json.loads((tmp_path / "preflight.json").read_text())
    assert written == json.loads(json.dumps(asdict(report)))
    assert written["found"] == 1
    assert written["notes"] == [{"file": "a.png", "text": "no caption"}]


def test_a_file_that_changes_after_preflight_is_an_error(tmp_path: Path) -> None:
    _image(tmp_path / "a.png")
    data: Dataset = open_dataset(tmp_path, spec.Dataset(uri="x", resolution=64))
    _image(tmp_path / "a.png", (90, 70))
    with pytest.raises(ConfigurationError, match="was 80 x 80 in preflight and is 90 x 70 now"):
        data.square(0, 0, 0)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ConfigurationError, match="passed preflight, but now"):
        data.square(0, 0, 0)
