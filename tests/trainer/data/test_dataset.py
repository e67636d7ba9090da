"""Every image of a folder is accounted for before training; captions are found or missed aloud."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal
from unicodedata import normalize

import pytest
from PIL import Image

from kubelora_api import dataset_spec
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.dataset import ImageDataset, View, build_dataset
from kubelora_trainer.data.preflight import preflight, require_usable_images
from kubelora_trainer.data.preflight_report import PreflightReport, Remark, write_report
from kubelora_trainer.utils.errors import DatasetError


def _image(path: Path, size: tuple[int, int] = (80, 80)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = tuple(hashlib.sha256(path.name.encode()).digest()[:3])
    Image.new("RGB", size, colour).save(path)
    return path


def _metadata(folder: Path, *entries: Mapping[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(e) + "\n" for e in entries))


def _view(data: ImageDataset) -> View:
    return data.view(data.order(0, 1).samples_of(0)[0])


def _skipping(folder: Path) -> tuple[dict[str, str], PreflightReport]:
    samples, report = preflight(folder, dataset_spec.Dataset(uri="x", resolution=64))
    require_usable_images(report, "skip")
    return {sample.file: sample.caption for sample in samples}, report


def _dataset(**captions: object) -> dataset_spec.Dataset:
    """Settings for images that need no captions."""
    document = {"uri": "x", "resolution": 64, "captions": {"maxMissing": 1, **captions}}
    return dataset_spec.Dataset.model_validate(document)


def test_the_demos_photographs_pass_with_their_captions(demo: DemoPaths) -> None:
    data = build_dataset(demo.photos, dataset_spec.Dataset(uri="x", resolution=64))
    assert len(data) == data.report.used == data.report.found == 8
    assert data.report.skipped == ()
    captions = {sample.file: sample.caption for sample in data.samples}
    assert captions["chelsea.png"] == "a photo of a tabby cat"


def test_captions_come_from_metadata_then_from_text_files_and_folders_are_entered(
    tmp_path: Path,
) -> None:
    for name in ("a.png", "b.png", "c.png", "sub/d.png", "other/e.PNG", "f.png"):
        _image(tmp_path / name)
    _metadata(
        tmp_path,
        {"file_name": "a.png", "text": "from metadata"},
        {"file_name": "f.png"},
        {"file_name": "other/e.PNG"},
    )
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
        "other/e.PNG": "",
    }
    assert report.notes == (
        Remark("b.png", "caption of several lines", "2 lines", "joined"),
        Remark("other/e.PNG", "no caption", "", "trained on the empty caption"),
    )
    assert (report.without_caption, report.other_files) == (1, 1)


def test_found_is_used_plus_skipped_and_each_bad_image_is_named(tmp_path: Path) -> None:
    for n in range(3):
        _image(tmp_path / f"good{n}.png")
        (tmp_path / f"good{n}.txt").write_text("x")
    for name in ("zero", "text", "cut", "photo"):
        (tmp_path / f"{name}.txt").write_text("x")
    (tmp_path / "zero.jpg").touch()
    (tmp_path / "text.jpg").write_text("hello")
    whole = _image(tmp_path / "cut.png", (500, 500)).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "photo.heic").write_bytes(b"\x00\x00\x00\x18ftypheic")
    _metadata(tmp_path, {"file_name": "gone.png", "text": "x"})
    captions, report = _skipping(tmp_path)
    assert len(captions) == report.used == 3
    assert (report.found, len(report.skipped)) == (8, 5)
    reasons = {remark.file: remark.detail for remark in report.skipped}
    assert reasons.keys() == {"zero.jpg", "text.jpg", "cut.png", "photo.heic", "gone.png"}
    assert "0 bytes" in reasons["zero.jpg"]
    assert "does not exist" in reasons["gone.png"]


def test_a_bad_image_ends_the_run_by_default_and_the_message_lists_the_first(
    tmp_path: Path,
) -> None:
    _image(tmp_path / "good.png")
    for n in range(5):
        (tmp_path / f"bad{n}.jpg").touch()
    with pytest.raises(DatasetError) as caught:
        build_dataset(tmp_path, dataset_spec.Dataset(uri="x", resolution=64))
    message = str(caught.value)
    assert "5 of 6 images" in message
    assert "bad0.jpg: it is empty (0 bytes)" in message
    assert "and 2 more" in message
    assert "dataset.onBadImage: skip" in message


def test_a_folder_without_usable_images_is_an_error_even_when_skipping(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="contains no images"):
        _skipping(tmp_path)
    (tmp_path / "a.jpg").touch()
    with pytest.raises(DatasetError, match=r"No image .* can be used: a.jpg: it is empty"):
        _skipping(tmp_path)
    with pytest.raises(DatasetError, match="is not a folder"):
        _skipping(tmp_path / "none")


def test_a_caption_that_is_not_utf8_is_its_images_problem_and_names_the_byte(
    tmp_path: Path,
) -> None:
    """0x92 is the apostrophe of Windows-1252; it follows 6 bytes."""
    _image(tmp_path / "a.png")
    _image(tmp_path / "b.png")
    (tmp_path / "a.txt").write_bytes("grocer’s bottle".encode("cp1252"))
    captions, report = _skipping(tmp_path)
    assert list(captions) == ["b.png"]
    (problem,) = report.skipped
    assert (problem.file, problem.problem) == ("a.png", "caption not UTF-8")
    assert re.search(r"a\.txt is not UTF-8: byte 6 is 0x92", problem.detail)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{oops", "line 2: not a JSON object"),
        ("[1]", "line 2: a line needs a file_name"),
        ('{"text": "x"}', "line 2: a line needs a file_name"),
        ('{"file_name": "a.png", "text": 5}', "line 2: text must be a string, not int"),
        ('{"file_name": "../b.png"}', "line 2: file_name '../b.png' points outside"),
        ('{"file_name": "a.png", "text": "again"}', "line 2: a.png is listed a second time"),
        (
            '{"file_name": "b.png", "text": "\\ud83d"}',
            "line 2: text contains half a character (\\ud83d)",
        ),
        ('{"file_name": "\\ude00.png"}', "line 2: file_name contains half a character (\\ude00)"),
        ("[" * 100_000, "line 2: not a JSON object"),
    ],
)
def test_a_wrong_metadata_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    _image(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}\n' + line)
    _, report = _skipping(tmp_path)
    assert sentence in "; ".join(f"{one.file}: {one.detail}" for one in report.skipped)
    assert (report.found, report.used) == (2, 1)
    with pytest.raises(DatasetError, match=re.escape(sentence)):
        build_dataset(tmp_path, dataset_spec.Dataset(uri="x", resolution=64))


def test_each_way_of_not_being_a_file_is_told(tmp_path: Path) -> None:
    _image(tmp_path / "a.png")
    for name in ("a", "link", "pipe"):
        (tmp_path / f"{name}.txt").write_text("x")
    long = "x" * 300 + ".png"
    (tmp_path / "link.png").symlink_to("gone.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder").mkdir()
    _metadata(tmp_path, {"file_name": long}, {"file_name": "gone.jpg"}, {"file_name": "folder"})
    captions, report = _skipping(tmp_path)
    assert list(captions) == ["a.png"]
    assert {remark.file: remark.detail for remark in report.skipped} == {
        long: "it can't be read: File name too long",
        "link.png": "it is a link to gone.png, which does not exist",
        "pipe.png": "it is a folder or a device, not a file",
        "folder": "it is a folder or a device, not a file",
        "gone.jpg": "it is listed in the metadata but does not exist",
    }


@pytest.mark.parametrize(("stored", "written"), [("NFC", "NFD"), ("NFD", "NFC")])
def test_an_accented_name_is_found_however_unicode_spells_it(
    tmp_path: Path, stored: Literal["NFC", "NFD"], written: Literal["NFC", "NFD"]
) -> None:
    name = "café.png"
    _image(tmp_path / normalize(stored, name))
    _metadata(tmp_path, {"file_name": normalize(written, name), "text": "a coffee"})
    captions, report = _skipping(tmp_path)
    assert captions == {normalize(stored, name): "a coffee"}
    assert report.found == 1


def test_two_names_that_differ_in_spelling_alone_are_two_images(tmp_path: Path) -> None:
    for form in ("NFC", "NFD"):
        _image(tmp_path / normalize(form, "é.png"))
    _metadata(tmp_path, *({"file_name": normalize(f, "é.png"), "text": f} for f in ("NFC", "NFD")))
    captions, _ = _skipping(tmp_path)
    assert captions == {normalize(form, "é.png"): form for form in ("NFC", "NFD")}


def test_a_name_that_is_not_utf8_is_used_and_written_with_its_bytes(tmp_path: Path) -> None:
    _image(tmp_path / "a.png")
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)  # noqa: PTH102 (a name in bytes)
    os.rename(tmp_path / "a.png", folder + b"/\xe8.png")  # noqa: PTH104
    samples, report = preflight(tmp_path, dataset_spec.Dataset(uri="x", resolution=64))
    assert [(s.file, s.category) for s in samples] == [(r"caf\xe9/\xe8.png", r"caf\xe9")]
    write_report(report, tmp_path / "preflight.json")
    written = json.loads((tmp_path / "preflight.json").read_text())
    assert written["notes"][0]["file"] == r"caf\xe9/\xe8.png"
    Path(os.fsdecode(folder + b"/\xe8.txt")).write_bytes(b"\x92")
    with pytest.raises(DatasetError, match=re.escape(r"caf\xe9/\xe8.txt is not UTF-8")):
        build_dataset(tmp_path, dataset_spec.Dataset(uri="x", resolution=64))


def test_a_folder_that_can_not_be_read_ends_the_run_rather_than_hide_its_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _image(tmp_path / "a.png")
    _image(tmp_path / "locked" / "b.png")
    listed = os.scandir

    def refusing(path: str) -> object:
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr("os.scandir", refusing)
    with pytest.raises(DatasetError, match=r"locked can't be read: Permission denied\. Give"):
        _skipping(tmp_path)


def test_a_caption_whose_image_is_not_there_is_told(tmp_path: Path) -> None:
    _image(tmp_path / "a.png")
    for name in ("a.txt", "a.png.caption", "sub/b.txt", "c.jpg.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a bottle")
    _, report = _skipping(tmp_path)
    assert (report.found, report.used, report.other_files) == (1, 1, 0)
    assert report.notes == tuple(
        Remark(name, "caption without an image", "", "not used")
        for name in ("c.jpg.txt", "sub/b.txt")
    )


def test_small_images_are_upscaled_and_empty_captions_kept_and_both_are_noted(
    tmp_path: Path,
) -> None:
    _image(tmp_path / "small.png", (40, 70))
    (tmp_path / "small.txt").write_text(" \n")
    _, report = _skipping(tmp_path)
    assert report.notes == (
        Remark("small.png", "smaller than its training size", "40 x 70", "enlarged"),
        Remark("small.png", "empty caption", "", "trained on the empty caption"),
    )
    assert report.upscaled == 1
    data = build_dataset(tmp_path, _dataset())
    assert data.image(_view(data)).pixels.shape == (3, 64, 64)
    assert data.image(_view(data)).sizes.original_size == (70, 40)


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
    assert written["notes"] == [
        {
            "file": "a.png",
            "problem": "no caption",
            "detail": "",
            "done": "trained on the empty caption",
        }
    ]


def test_a_file_that_changes_after_preflight_is_an_error(tmp_path: Path) -> None:
    _image(tmp_path / "a.png")
    data: ImageDataset = build_dataset(tmp_path, _dataset())
    _image(tmp_path / "a.png", (90, 70))
    with pytest.raises(
        DatasetError,
        match=r"has changed since preflight\. .* restored, the run resumes",
    ):
        data.image(_view(data))
    (tmp_path / "a.png").unlink()
    with pytest.raises(
        DatasetError, match=r"passed preflight, but now .* restored, the run resumes"
    ):
        data.image(_view(data))
