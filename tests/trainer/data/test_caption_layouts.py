"""Captions in the layouts of other tools are read; where none can be read, the run ends."""

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from kubelora_api.dataset_spec import Dataset
from kubelora_trainer.data.dataset import ImageDataset, build_dataset
from kubelora_trainer.data.sources import resolve_dataset_folder, resolve_extra_sources
from kubelora_trainer.utils.errors import DatasetError

EXPECTED = {"a.png": "a red bottle", "b.png": "a blue can"}
KOHYA = {name: {"caption": "a red bottle" if name == "a" else "a blue can"} for name in "ab"}
LISTED = [{"file_name": name, "text": text} for name, text in EXPECTED.items()]


def _png(shade: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (64, 64), (shade, 20, 40)).save(content, "PNG")
    return content.getvalue()


def _images(folder: Path, *names: str) -> Path:
    for shade, name in enumerate(names or ("a.png", "b.png")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_png(shade))
    return folder


def _open(folder: Path, **settings: object) -> ImageDataset:
    document = {"uri": "x", "resolution": 64, **settings}
    return build_dataset(folder, Dataset.model_validate(document))


def _captions(folder: Path, **settings: object) -> dict[str, str]:
    return {sample.path.name: sample.caption for sample in _open(folder, **settings).samples}


def _lines(field: str, image: str = "file_name") -> bytes:
    rows = ({image: name, field: text} for name, text in EXPECTED.items())
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _parquet(rows: list[dict[str, str]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


FILES: dict[str, dict[str, bytes]] = {
    "upper-case suffix": {"a.TXT": b"a red bottle", "b.Txt": b"a blue can"},
    "caption files": {"a.caption": b"a red bottle", "b.png.caption": b"a blue can"},
    "tag files": {"a.tags": b"a red bottle", "b.CAP": b"a blue can"},
    "UTF-16 with its mark": {
        "a.txt": "a red bottle".encode("utf-16"),
        "b.txt": b"\xfe\xff" + "a blue can".encode("utf-16-be"),
    },
    "UTF-16 without": {
        "a.txt": "a red bottle".encode("utf-16-le"),
        "b.txt": "a blue can".encode("utf-16-be"),
    },
    "an empty text file before the caption": {
        **{"a.txt": b"", "a.caption": b"a red bottle"},
        "b.txt": b"a blue can",
    },
    "JSON next to each image": {
        "a.json": b'{"caption": "a red bottle"}',
        "b.png.json": b'{"prompt": "a blue can", "seed": 3}',
    },
    "a tagger's scores": {
        "a.json": b'{"tags": {"a red bottle": 0.9}}',
        "b.json": b'{"tags": ["a blue can"]}',
    },
    "a folder of captions": {
        "captions/a.txt": b"a red bottle",
        "captions/b.png.txt": b"a blue can",
    },
    "metadata with caption": {"metadata.jsonl": _lines("caption")},
    "metadata with other names": {"metadata.jsonl": _lines("Prompt", "image")},
    "another case": {"Metadata.jsonl": _lines("text")},
    "JSON in a file of lines": {"metadata.jsonl": json.dumps(LISTED, indent=1).encode()},
    "CSV": {"METADATA.CSV": b"file_name,text\r\na.png,a red bottle\r\nb.png,a blue can\r\n"},
    "CSV of a spreadsheet": {
        "metadata.csv": b'\xef\xbb\xbfFile_Name;Caption\na.png;"a red bottle"\nb.png;a blue can\n'
    },
    "TSV": {"metadata.tsv": b"image\tcaption\na.png\ta red bottle\nb.png\ta blue can\n"},
    "a list of objects": {"metadata.json": json.dumps(LISTED).encode()},
    "a mapping": {"metadata.json": json.dumps(EXPECTED).encode()},
    "Parquet next to images": {"metadata.parquet": _parquet(LISTED)},
    "kohya's captions": {"meta_cap.json": json.dumps(KOHYA).encode()},
    "kohya's latest": {
        "meta_cap.json": json.dumps({"a": {"caption": "old"}, "b": {"caption": "old"}}).encode(),
        "meta_lat.json": json.dumps(
            {
                f"/mnt/train/{key}.png": {**value, "train_resolution": [64, 64]}
                for key, value in KOHYA.items()
            }
        ).encode(),
    },
    "paths of another machine": {
        "metadata.jsonl": _lines("text").replace(b'"a.png', rb'"C:\\photos\\A.PNG')
    },
    "COCO": {
        "annotations.json": json.dumps(
            {
                "images": [{"id": 7, "file_name": "a.png"}, {"id": 9, "file_name": "b.png"}],
                "annotations": [
                    {"image_id": 9, "caption": "a blue can"},
                    {"image_id": 7, "caption": "a red bottle"},
                ],
            }
        ).encode()
    },
    "a list of any name": {"prompts.csv": b"filename,description\na,a red bottle\nb,a blue can\n"},
    "a list without header": {"list.txt": b"a.png,a red bottle\nb.png,a blue can\n"},
}


@pytest.mark.parametrize("layout", FILES)
def test_a_layout_of_another_tool_is_read(tmp_path: Path, layout: str) -> None:
    _images(tmp_path)
    for name, content in FILES[layout].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert _captions(tmp_path) == EXPECTED


def test_folders_of_images_and_of_captions_side_by_side(tmp_path: Path) -> None:
    _images(tmp_path, "train/images/a.png", "train/images/b.png")
    (tmp_path / "train/captions").mkdir()
    for name, text in EXPECTED.items():
        (tmp_path / "train/captions" / name).with_suffix(".txt").write_text(text)
    assert _captions(tmp_path) == EXPECTED


def test_kohyas_tags_follow_the_caption(tmp_path: Path) -> None:
    _images(tmp_path, "a.png")
    (tmp_path / "meta_lat.json").write_text('{"a": {"caption": "a bottle", "tags": "red, tall"}}')
    assert _captions(tmp_path) == {"a.png": "a bottle, red, tall"}


@pytest.mark.parametrize("shards", [1, 2])
def test_tars_of_a_web_dataset_are_unpacked(
    tmp_path: Path, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for shard in range(shards):
        with tarfile.open(tmp_path / f"data/{shard:05d}.tar", "w") as tar:
            for name, content in {
                "000.png": _png(shard),
                "000.txt": b"a bottle",
                "000.json": b'{"caption": "not this one"}',
                "001.png": _png(shard + 10),
                "001.json": b'{"caption": "a can"}',
            }.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    document = {"uri": "x", "resolution": 64}
    settings = Dataset.model_validate(document)
    folder = resolve_dataset_folder(str(tmp_path / "data"), settings.columns, {})
    samples = build_dataset(folder, settings).samples
    assert (
        sorted(sample.caption for sample in samples) == ["a bottle"] * shards + ["a can"] * shards
    )
    assert {sample.category for sample in samples} == {""}


def test_columns_of_a_table_are_found_by_type_and_by_what_tools_call_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    table = pa.table({"jpg": [_png(1), _png(2)], "caption": [["a can", "one can"], ["a bottle"]]})
    pq.write_table(table, tmp_path / "data/a.parquet")
    settings = Dataset(uri="x", resolution=64)
    folder = resolve_dataset_folder(str(tmp_path / "data"), settings.columns, {})
    data = build_dataset(folder, settings)
    assert [sample.caption for sample in data.samples] == ["a can", "a bottle"]
    (note,) = data.report.notes
    assert (note.problem, note.detail, note.done) == (
        *("several captions", "2 captions"),
        "the first is used",
    )


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.yaml", "caption: a bottle", "Not read: a.yaml."),
        ("notes/a-caption.txt", "a bottle", r"Not read: notes/a-caption.txt."),
        ("metadata.xlsx", "x", "Not read: metadata.xlsx."),
        ("a.json", '{"beschreibung": "x"}', "Not read: a.json."),
        ("list.csv", "file_name,beschreibung\na.png,x\n", "Not read: list.csv."),
        (
            "metadata.jsonl",
            '{"file_name": "a.png", "beschreibung": "x", "id": 4}\n{"file_name": "b.png"}',
            "No line of metadata.jsonl in .* has a caption; its fields are beschreibung, id: name "
            "the one with captions in dataset.columns.caption",
        ),
        ("metadata.csv", "file_name,text\na.png,\nb.png,\n", "No line of metadata.csv"),
        ("metadata.json", '{"version": 3}', "Not read: metadata.json."),
        ("a.txt", " \n", "No image in .* has a caption"),
    ],
)
def test_a_folder_without_any_caption_ends_the_run_unless_the_job_says_so(
    tmp_path: Path, name: str, content: str, sentence: str
) -> None:
    _images(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=sentence) as caught:
        _open(tmp_path)
    assert "set dataset.captions.maxMissing: 1" in str(caught.value)
    with pytest.raises(DatasetError, match=sentence):  # a caption would be lost all the same
        _open(tmp_path, captions={"prefix": "zwx"} if name != "a.txt" else {})
    assert _captions(tmp_path, captions={"maxMissing": 1}) == {"a.png": "", "b.png": ""}


def test_the_advice_about_the_field_works(tmp_path: Path) -> None:
    _images(tmp_path)
    (tmp_path / "metadata.jsonl").write_bytes(_lines("beschreibung"))
    with pytest.raises(DatasetError, match=r"beschreibung: name .*dataset.columns.caption"):
        _open(tmp_path)
    assert _captions(tmp_path, columns={"caption": "beschreibung"}) == EXPECTED


def test_images_alone_train_on_the_prefix_where_there_is_one(tmp_path: Path) -> None:
    _images(tmp_path)
    with pytest.raises(DatasetError, match=r"No image in .* has a caption"):
        _open(tmp_path)
    data = _open(tmp_path, captions={"prefix": "zwx bottle"})
    assert {note.done for note in data.report.notes} == {"trained on the prefix alone"}


def test_captions_that_are_partly_missing_are_counted_and_limited(tmp_path: Path) -> None:
    """1 of 4 is more than a fifth and less than 0.3; the advice is the share itself."""
    _images(tmp_path, *(f"{number}.png" for number in range(4)))
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a bottle")
    (tmp_path / "3.yaml").write_text("caption: x")
    with pytest.raises(DatasetError) as caught:
        _open(tmp_path)
    assert "1 of 4 images" in str(caught.value)
    assert "Not read: 3.yaml." in str(caught.value)
    assert str(caught.value).endswith("set dataset.captions.maxMissing: 0.25.")
    report = _open(tmp_path, captions={"maxMissing": 0.25}).report
    assert report.without_caption == 1


def test_a_source_without_captions_is_found_next_to_one_with_them(tmp_path: Path) -> None:
    """Its single image is less than a fifth of all, and yet all that it has."""
    _images(tmp_path / "main", *(f"{number}.png" for number in range(9)))
    for number in range(9):
        (tmp_path / f"main/{number}.txt").write_text("a bottle")
    _images(tmp_path / "class", "a.png")
    document = {"uri": "x", "resolution": 64, "extraSources": [{"uri": str(tmp_path / "class")}]}
    settings = Dataset.model_validate(document)
    with pytest.raises(DatasetError, match=r"No image in .*/class has a caption"):
        build_dataset(tmp_path / "main", settings, extra=resolve_extra_sources(settings, {}))


def test_a_stray_image_next_to_metadata_that_lists_the_others_is_left_out_by_name(
    tmp_path: Path,
) -> None:
    _images(tmp_path, "a.png", "b.png", "cover.png", "own.png")
    (tmp_path / "metadata.jsonl").write_bytes(_lines("text"))
    (tmp_path / "own.txt").write_text("with a caption of its own")
    data = _open(tmp_path)
    assert [sample.file for sample in data.samples] == ["a.png", "b.png", "own.png"]
    (left_out,) = data.report.skipped
    assert (left_out.file, left_out.problem) == ("cover.png", "not in the metadata")


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_one_bad_byte_is_one_bad_image_and_names_file_and_line(tmp_path: Path, name: str) -> None:
    """0x92 is Windows-1252's apostrophe."""
    _images(tmp_path)
    lines = _lines("text") if name.endswith("jsonl") else b"file_name,text\na.png,x\nb.png,blue\n"
    (tmp_path / name).write_bytes(lines.replace(b"blue", b"bl\x92e"))
    number = 2 if name.endswith("jsonl") else 3
    with pytest.raises(
        DatasetError, match=rf"b.png: {name}, line {number}: not UTF-8: byte \d+ is 0x92"
    ):
        _open(tmp_path)
    data = _open(tmp_path, onBadImage="skip")
    assert [sample.file for sample in data.samples] == ["a.png"]
    assert (data.report.found, data.report.used) == (2, 1)


def test_what_is_done_with_prompt_syntax_and_lines_is_told(tmp_path: Path) -> None:
    _images(tmp_path)
    (tmp_path / "a.txt").write_text("a (red:1.2) bottle BREAK on white")
    (tmp_path / "b.txt").write_text("a blue can\nof two lines\n")
    report = _open(tmp_path).report
    assert {(n.file, n.problem, n.detail, n.done) for n in report.notes} == {
        ("a.png", "prompt syntax", "(red:1.2), BREAK", "trained as plain text"),
        ("b.png", "caption of several lines", "2 lines", "joined"),
    }
