"""Several sources with repeats and weights, prior-preservation images, tables of images."""

import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from kubelora_api import dataset_spec
from kubelora_api.dataset_spec import Columns
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.dataset import ImageDataset, build_dataset
from kubelora_trainer.data.parquet_images import is_table_dataset, unpack_tables
from kubelora_trainer.data.preflight_report import Count, report_text
from kubelora_trainer.data.sources import resolve_dataset_folder, resolve_extra_sources
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from kubelora_trainer.utils.errors import DatasetError
from tests.trainer.fixtures.jobs import job_spec, open_base
from tests.trainer.integration.test_interruption import arguments, in_this_process


def _png(grey: int, size: tuple[int, int] = (64, 64)) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size, (grey, 20, 40)).save(content, "PNG")
    return content.getvalue()


def _settings(**settings: object) -> dataset_spec.Dataset:
    document: dict[str, Any] = {"uri": "x", "resolution": 64, **settings}
    return dataset_spec.Dataset.model_validate(document)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two bottles with captions, three class images without."""
    for name, count in (("bottles", 2), ("class", 3)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.png").write_bytes(_png(number + 10 * len(name)))
    for number in range(2):
        (tmp_path / "bottles" / f"{number}.txt").write_text(f"bottle {number}")
    return tmp_path


def _open(folder: Path, **extra: object) -> ImageDataset:
    source = {"uri": str(folder / "class"), **extra}
    settings = _settings(repeats=3, extraSources=[source], captions={"prefix": "zwx"})
    return build_dataset(folder / "bottles", settings, extra=resolve_extra_sources(settings, {}))


def test_an_epoch_sees_each_image_as_often_as_its_source_repeats(two: Path) -> None:
    """2 bottles three times and 3 class images twice are 12 samples, 3 micro-batches of 4."""
    data = _open(two, repeats=2)
    order = data.order(1, 4)
    assert order.micro_steps_per_epoch == 3
    for epoch in range(3):
        draws = [d for step in range(3) for d in order.samples_of(3 * epoch + step)]
        seen = Counter(data.samples[draw.sample].file for draw in draws)
        name = str(two / "class")
        bottles = {"0.png": 3, "1.png": 3}
        assert seen == bottles | {f"{name}/{number}.png": 2 for number in range(3)}
        assert len({draw.noise_seed for draw in draws}) == 12


def test_sources_are_counted_apart_and_may_name_category_and_caption(two: Path) -> None:
    data = _open(two, category="prior", caption="a photo of a bottle", usePrefix=False)
    name = str(two / "class")
    assert data.report.sources == {str(two / "bottles"): Count(2, 2), name: Count(3, 3)}
    assert data.report.categories == {"": Count(2, 2), "prior": Count(3, 3)}
    assert data.report.without_caption == 0
    assert f"sources: {two / 'bottles'} 2 of 2, {name} 3 of 3" in report_text(data.report)
    expected = {
        **{n: f"zwx, bottle {n}" for n in range(2)},
        **dict.fromkeys(range(2, 5), "a photo of a bottle"),
    }
    draws = [draw for step in range(9) for draw in data.order(0, 1).samples_of(step)]
    assert {draw.sample: data.caption(draw) for draw in draws} == expected
    assert sorted(data.all_captions()) == sorted(set(expected.values()))


def test_a_samples_loss_counts_with_its_sources_weight(demo: DemoPaths, two: Path) -> None:
    """One micro-batch of all 5: sum over bottles + 0.25 x sum over class images."""
    base = open_base(demo.model)
    job = job_spec({"batchSize": 9})
    weighted = SdxlObjective(base, _open(two, lossWeight=0.25), job)
    plain = SdxlObjective(base, _open(two), job)
    batch = plain.batch(0)
    with torch.no_grad():
        added = {"text_embeds": batch.pooled, "time_ids": batch.time_ids}
        answer = base.unet(batch.noisy, batch.timesteps, batch.text, added_cond_kwargs=added).sample
    losses = (answer - batch.target).pow(2).mean(dim=(1, 2, 3)).tolist()
    samples = [draw.sample for draw in plain.order.samples_of(0)]
    assert sorted(samples) == [0, 0, 0, 1, 1, 1, 2, 3, 4]
    expected = sum(
        loss * (1.0 if sample < 2 else 0.25) for loss, sample in zip(losses, samples, strict=True)
    )
    assert float(weighted(0).loss_sum) == pytest.approx(expected, rel=1e-5)
    assert float(plain(0).loss_sum) == pytest.approx(sum(losses), rel=1e-5)
    assert weighted(0).samples == 9
    weighted.close()
    plain.close()


def _table(images: list[Any], **columns: list[Any]) -> pa.Table:
    return pa.table({"image": images, **columns})


def _as_struct(content: bytes | None) -> dict[str, Any]:
    return {"bytes": content, "path": None}


def _write(table: pa.Table, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return path
    kind = pa.ipc.new_file if "file" in path.name else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, kind(sink, table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["a.parquet", "stream.arrow", "file.arrow"])
@pytest.mark.parametrize("struct", [True, False])
def test_every_row_of_a_table_is_a_sample_with_its_caption_and_category(
    tmp_path: Path, name: str, struct: bool
) -> None:
    pngs = [_png(grey) for grey in range(5)]
    table = _table(
        [_as_struct(png) for png in pngs] if struct else pngs,
        en=[f"caption {n}\nof two lines" for n in range(4)] + [None],
        product=["glass", "glass", "soft", None, "glass"],
    )
    _write(table, tmp_path / "data" / name)
    columns = Columns(caption="en", category="product")
    settings = _settings(columns=columns.document())
    assert is_table_dataset(tmp_path / "data")
    folder = unpack_tables(tmp_path / "data", columns, tmp_path / "cache")
    data = build_dataset(folder, settings)
    assert [sample.path.read_bytes() for sample in data.samples] == pngs
    assert [sample.caption for sample in data.samples] == [
        *(f"caption {n}\nof two lines" for n in range(4)),
        "",
    ]
    assert [s.category for s in data.samples] == ["glass", "glass", "soft", "", "glass"]


def test_a_row_without_image_is_reported_and_not_lost(tmp_path: Path) -> None:
    table = _table([_as_struct(_png(1)), _as_struct(None)], text=["a", "b"])
    path = _write(table, tmp_path / "a.parquet")
    folder = unpack_tables(path, Columns(), tmp_path / "cache")
    data = build_dataset(folder, _settings(onBadImage="skip"))
    assert (data.report.found, data.report.used) == (2, 1)
    assert data.report.skipped[0].problem == "empty file"


def test_unpacked_tables_are_used_again_until_they_change(tmp_path: Path) -> None:
    path = _write(_table([_png(1)], text=["a"]), tmp_path / "data" / "a.parquet")
    first = unpack_tables(path.parent, Columns(), tmp_path / "cache")
    (first / "mark").touch()
    assert (unpack_tables(path.parent, Columns(), tmp_path / "cache") / "mark").exists()
    _write(_table([_png(1), _png(2)], text=["a", "b"]), path)
    second = unpack_tables(path.parent, Columns(), tmp_path / "cache")
    assert second != first
    assert len(list(second.glob("*.png"))) == 2


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            pa.table({"picture": [b"x"], "thumb": [b"y"], "text": ["a"]}),
            "has no column 'image'; its columns are picture, thumb, te",
        ),
        (
            pa.table({"image": [b"x"], "label": [3]}),
            "has no column 'text'; its columns are image, label",
        ),
        (pa.table({"image": [7], "text": ["a"]}), "contains int, not the bytes of image files"),
        (pa.table({"image": [b"x"], "text": [3]}), "'text' of .* contains int, not text"),
    ],
)
def test_wrong_columns_are_a_sentence(tmp_path: Path, table: pa.Table, sentence: str) -> None:
    path = _write(table, tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=sentence):
        unpack_tables(path, Columns(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_category_that_no_table_and_no_line_has_is_answered_with_the_one_meant(
    tmp_path: Path,
) -> None:
    columns = Columns(category="prodcut")
    path = _write(_table([_png(1)], text=["a"], product=["glass"]), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=r"'prodcut'; .*did you mean 'product'\?"):
        unpack_tables(path, columns, tmp_path / "cache")
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.png").write_bytes(_png(1))
    line = {"file_name": "a.png", "text": "a", "product": "glass"}
    (photos / "metadata.jsonl").write_text(json.dumps(line))
    with pytest.raises(DatasetError, match=r"a field 'prodcut'; .*mean 'product'\?"):
        build_dataset(photos, _settings(columns=columns.document()))


def test_a_source_with_one_category_for_all_needs_no_column_of_them(tmp_path: Path) -> None:
    _write(_table([_png(1)], text=["a"]), tmp_path / "more" / "a.parquet")
    more = {"uri": str(tmp_path / "more"), "category": "cans"}
    settings = _settings(
        columns={"category": "kind"}, extraSources=[more], captions={"maxMissing": 1}
    )
    [source] = resolve_extra_sources(settings, {})
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(_png(2))
    data = build_dataset(tmp_path / "photos", settings, extra=(source,))
    assert [sample.category for sample in data.samples] == ["", "cans"]


def test_a_folder_of_tables_and_images_is_refused_rather_than_half_read(tmp_path: Path) -> None:
    _write(_table([_png(1)], text=["a"]), tmp_path / "data" / "a.parquet")
    (tmp_path / "data" / "b.PNG").write_bytes(_png(2))
    with pytest.raises(DatasetError, match=r"1 tables, such as a.parquet, and 1 image files"):
        resolve_dataset_folder(str(tmp_path / "data"), Columns(), {})


def test_tables_are_found_as_images_are_hidden_ones_left_out_and_linked_folders_entered(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    _write(_table([_png(1)], text=["a"]), tmp_path / "elsewhere" / "B.parquet").rename(
        tmp_path / "elsewhere" / "B.PARQUET"
    )
    _write(_table([_png(2)], text=["b"]), data / "a.parquet")
    (data / "._a.parquet").write_bytes(b"what macOS leaves in archives")
    (data / ".cache").mkdir()
    (data / ".cache" / "thumbnail.png").write_bytes(_png(3))
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    assert is_table_dataset(data)
    folder = unpack_tables(data, Columns(), tmp_path / "cache")
    samples = build_dataset(folder, _settings()).samples
    assert [(s.file, s.caption) for s in samples] == [
        ("00000-a-row-00000000.png", "b"),
        ("00001-B-row-00000000.png", "a"),
    ]


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            pa.Table.from_arrays([pa.array([b"x"])] * 3, names=["image", "text", "text"]),
            "has 2 columns named 'text'",
        ),
        (_table([{"data": b"x"}], text=["a"]), "is a struct of data, .* in a field 'bytes'"),
    ],
)
def test_columns_that_can_not_be_told_apart_or_hold_no_files_are_a_sentence(
    tmp_path: Path, table: pa.Table, sentence: str
) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=sentence):
        unpack_tables(tmp_path / "a.parquet", Columns(), tmp_path / "cache")


def test_a_damaged_table_is_a_sentence(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.arrow"):
        (tmp_path / name).write_bytes(b"nonsense" * 10)
        with pytest.raises(DatasetError, match=f"{name} can't be read"):
            unpack_tables(tmp_path / name, Columns(), tmp_path / "cache")


def test_metadata_fields_are_chosen_like_columns(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(_png(1))
    line = {"file_name": "a.png", "text": "no", "en": "yes", "kind": "glass"}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    data = build_dataset(tmp_path, _settings(columns={"caption": "en", "category": "kind"}))
    assert (data.samples[0].caption, data.samples[0].category) == ("yes", "glass")
    assert resolve_dataset_folder(str(tmp_path), Columns(), {}) == tmp_path


def test_a_run_trains_on_a_table_and_a_folder_together(
    tmp_path: Path, demo: DemoPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _write(_table([_png(1), _png(2)], text=["a", "b"]), tmp_path / "table" / "a.parquet")
    (tmp_path / "run").mkdir()
    source = f"[{{uri: {tmp_path / 'table'}, lossWeight: 0.5, category: prior}}]"
    done = in_this_process(
        [
            *arguments(tmp_path / "run", demo),
            *("--set", "spec.training.steps=2", "--set", f"spec.dataset.extraSources={source}"),
        ]
    )
    assert done.exit_code == 0, done.output
    assert "data: 10 images found = 10 used + 0 skipped" in done.output
    report = json.loads((tmp_path / "run/out/preflight.json").read_text())
    assert report["categories"]["prior"] == {"found": 2, "used": 2}
