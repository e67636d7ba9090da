"""The preflight report: counts that add up, one row per kind of problem, captions counted."""

import json
from pathlib import Path

import pytest
from PIL import Image

from kubelora_api import dataset_spec
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.dataset import build_dataset
from kubelora_trainer.data.preflight import preflight
from kubelora_trainer.data.preflight_report import Count, PreflightReport, Remark, report_text
from kubelora_trainer.data.sources import SourceFolder
from kubelora_trainer.data.token_limits import load_token_limits
from kubelora_trainer.utils.errors import DatasetError
from kubelora_trainer.utils.progress_log import log_progress


def _image(path: Path, size: tuple[int, int] = (64, 64), grey: int = 90) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (grey, 120, 60)).save(path)
    return path


def _report(folder: Path, **settings: object) -> PreflightReport:
    return preflight(
        folder, dataset_spec.Dataset.model_validate({"uri": "x", "resolution": 64, **settings})
    )[1]


def test_a_report_whose_counts_do_not_add_up_can_not_be_made() -> None:
    with pytest.raises(ValueError, match="3 found, 1 used, 1 skipped"):
        PreflightReport("x", 64, 3, 1, (Remark("a", "b", "c", "d"),), (), 0, 0, 0, 0, 0)


def test_small_and_stretched_images_are_bad_where_limits_say_so(tmp_path: Path) -> None:
    _image(tmp_path / "fine.png", (128, 64))
    _image(tmp_path / "flat.png", (300, 100))
    _image(tmp_path / "small.png", (500, 63))
    report = _report(tmp_path, minShortEdge=64, maxAspectRatio=2.5)
    assert (report.found, report.used) == (3, 1)
    problems = {remark.file: (remark.problem, remark.detail) for remark in report.skipped}
    assert problems["flat.png"] == (
        "extreme aspect ratio",
        "it has 300 x 100 pixels, 3 to 1, but dataset.maxAspectRatio is 2.5",
    )
    assert problems["small.png"][0] == "too small"
    without = _report(tmp_path)
    assert without.used == 3
    seen = {n.file: n.detail for n in without.notes if n.problem == "extreme aspect ratio"}
    assert seen.keys() == {"flat.png", "small.png"}
    assert seen["flat.png"] == "300 x 100: a crop of 64 x 64 shows 33% of it"


def test_exact_duplicates_are_kept_and_noted_or_left_out_and_never_fail_a_run(
    tmp_path: Path,
) -> None:
    _image(tmp_path / "a.png")
    _image(tmp_path / "b/copy.png")
    _image(tmp_path / "c.png", grey=91)
    kept = _report(tmp_path)
    assert (kept.found, kept.used, kept.duplicates) == (3, 3, 1)
    assert Remark("b/copy.png", "exact duplicate", "same bytes as a.png", "kept") in kept.notes
    settings = dataset_spec.Dataset(
        uri="x",
        resolution=64,
        on_duplicate="skip",
        on_bad_image="fail",
        captions=dataset_spec.Captions(max_missing=1),
    )
    data = build_dataset(tmp_path, settings)
    assert [sample.file for sample in data.samples] == ["a.png", "c.png"]
    assert (data.report.found, data.report.used, data.report.duplicates) == (3, 2, 1)


def test_images_of_one_place_that_is_named_twice_are_duplicates_too(tmp_path: Path) -> None:
    _image(tmp_path / "main/a.png")
    _image(tmp_path / "more/b.png", grey=91)
    more = SourceFolder(tmp_path / "more", label="pvc://more")
    settings = dataset_spec.Dataset(uri="x", resolution=64)
    _, report = preflight(tmp_path / "main", settings, extra=(more, more))
    assert (report.found, report.used, report.duplicates) == (3, 3, 1)


def test_categories_come_from_metadata_then_from_the_first_folder(tmp_path: Path) -> None:
    for number, name in enumerate(("top.png", "glass/a.png", "glass/deep/b.png", "soft/c.png")):
        _image(tmp_path / name, grey=number)
        (tmp_path / name).with_suffix(".txt").write_text("x")
    (tmp_path / "soft/bad.jpg").touch()
    (tmp_path / "soft/bad.txt").write_text("x")
    (tmp_path / "metadata.jsonl").write_text(
        json.dumps({"file_name": "soft/c.png", "text": "x", "category": "fabric"}) + "\n"
    )
    report = _report(tmp_path)
    assert report.categories == {
        "": Count(1, 1),
        "glass": Count(2, 2),
        "fabric": Count(1, 1),
        "soft": Count(1, 0),
    }
    assert "categories: (none) 1 of 1, fabric 1 of 1, glass 2 of 2, soft 0 of 1" in report_text(
        report
    )


def test_a_caption_beyond_77_tokens_says_how_many_are_cut_for_which_encoder(
    demo: DemoPaths, tmp_path: Path
) -> None:
    """Each word is one token; with the two marks 75 words fill 77 tokens."""
    for name, words in (("fits", 75), ("long", 78)):
        _image(tmp_path / f"{name}.png", grey=words)
        last = " dog" * (words - 75) if words > 75 else ""
        (tmp_path / f"{name}.txt").write_text("cat " * 75 + last)
    settings = dataset_spec.Dataset(uri="x", resolution=64)
    _, report = preflight(tmp_path, settings, load_token_limits(demo.model))
    assert report.cut_captions == 1
    (note,) = report.notes
    assert note == Remark(
        "long.png",
        "caption too long",
        "80 tokens, text_encoder and text_encoder_2 read 77: the last 3, 'dog dog dog', are not "
        "seen",
        "truncated",
    )


def test_encoders_of_different_lengths_are_told_apart(demo: DemoPaths) -> None:
    first, second = load_token_limits(demo.model)
    second.tokenizer.model_max_length = 70
    try:
        assert first.truncation("cat " * 72) is None
        truncated = second.truncation("cat " * 72)
    finally:
        second.tokenizer.model_max_length = 77
    assert truncated is not None
    found = (truncated.encoder, truncated.tokens, truncated.limit, truncated.over)
    assert found == ("text_encoder_2", 74, 70, 4)


def test_the_table_has_a_row_per_kind_of_problem_with_the_first_files(tmp_path: Path) -> None:
    for number in range(5):
        _image(tmp_path / f"good{number}.png", grey=number)
        (tmp_path / f"bad{number}.jpg").touch()
    text = report_text(_report(tmp_path))
    assert text.startswith("data: 10 images found = 5 used + 5 skipped in ")
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "problem images done which" in rows
    (empty,) = [row for row in rows if row.startswith("empty file")]
    assert empty.startswith("empty file 5 skipped bad0.jpg (it is empty (0 bytes));")
    assert "and 2 more" in text
    (captions,) = [row for row in rows if row.startswith("no caption")]
    assert captions.startswith("no caption 5 trained on the empty caption good0.png; good1.png;")


def test_the_report_is_published_before_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    published: list[PreflightReport] = []
    with pytest.raises(DatasetError, match="No image"):
        build_dataset(
            tmp_path, dataset_spec.Dataset(uri="x", resolution=64), publish=published.append
        )
    assert [(report.found, report.used) for report in published] == [(1, 0)]


def test_long_work_says_how_far_it_is_every_five_seconds() -> None:
    said: list[str] = []
    now = iter([0.0, 1.0, 5.0, 6.0, 10.0, 30.0])
    tick = log_progress("images", said.append, clock=lambda: next(now))
    for done in (1, 2000, 2001, 4000, 8000):
        tick(done, 8000)
    assert said == ["images: 2,000 of 8,000, 15s left", "images: 4,000 of 8,000, 10s left"]
