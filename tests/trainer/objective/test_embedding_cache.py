"""The cache on disk: the same bits as without it, never a stale entry, shared, interruptible."""

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from PIL import Image

from kubelora_api import dataset_spec
from kubelora_api.decides import Decides
from kubelora_api.spec import JobSpec
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.cropping import TrainingImage
from kubelora_trainer.data.dataset import ImageDataset, View, build_dataset
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective import latents
from kubelora_trainer.objective import text_embeddings as text
from kubelora_trainer.objective.embedding_cache import build_cache
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from kubelora_trainer.objective.tensor_store import TensorStore, key_of, module_digest
from kubelora_trainer.utils.errors import InterruptedRunError
from tests.trainer.fixtures.jobs import job_spec, open_base
from tests.trainer.integration.test_interruption import adapter, arguments, in_this_process

CENTERED = {"crop": "center", "captionDropout": 0.5}


@pytest.fixture
def photos(demo: DemoPaths, tmp_path: Path) -> Path:
    shutil.copytree(demo.photos, tmp_path / "photos")
    return tmp_path / "photos"


@pytest.fixture
def base(demo: DemoPaths) -> BaseModel:
    return open_base(demo.model)


class Work:
    """Counts what had to be computed."""

    images = texts = 0


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    counted = Work()
    real_encode, real_text = latents.encode, text.encode_text

    def encode(*arguments: Any) -> Any:
        counted.images += 1
        return real_encode(*arguments)

    def encode_text(*arguments: Any) -> Any:
        counted.texts += 1
        return real_text(*arguments)

    monkeypatch.setattr(latents, "encode", encode)
    monkeypatch.setattr(text, "encode_text", encode_text)
    return counted


def _open(photos: Path, **settings: object) -> ImageDataset:
    document: dict[str, Any] = {"uri": "x", "resolution": 64, **CENTERED, **settings}
    return build_dataset(photos, dataset_spec.Dataset.model_validate(document))


def _objective(base: BaseModel, data: ImageDataset, folder: Path, said: list[str]) -> SdxlObjective:
    folder.mkdir(exist_ok=True)
    spec = job_spec({"batchSize": 2}).model_copy(update={"dataset": data.settings})
    return SdxlObjective(base, data, spec, build_cache(folder, spec, base, data, said.append))


def _fill(base: BaseModel, data: ImageDataset, folder: Path, said: list[str] | None = None) -> None:
    objective = _objective(base, data, folder, said if said is not None else [])
    objective.fill_cache(lambda: False, lambda done, total: None)
    objective.close()


def test_a_filled_cache_gives_the_same_bits_and_nothing_is_computed_again(
    base: BaseModel, photos: Path, tmp_path: Path, work: Work
) -> None:
    """8 photographs, both ways round, and 8 captions and the empty one."""
    data = _open(photos, flip=0.5)
    _fill(base, data, tmp_path / "cache")
    assert (work.images, work.texts) == (16, 9)
    cached = _objective(base, data, tmp_path / "cache", [])
    cached.fill_cache(lambda: False, lambda done, total: None)
    batches = [cached.batch(step) for step in range(8)]
    cached.close()
    assert (work.images, work.texts) == (16, 9)
    plain = SdxlObjective(base, data, job_spec({"batchSize": 2}))
    for step, batch in enumerate(batches):
        expected = plain.batch(step)
        for name in ("noisy", "target", "text", "pooled", "time_ids"):
            assert torch.equal(getattr(batch, name), getattr(expected, name))
    plain.close()


@pytest.mark.parametrize(
    "change",
    [{"background": "#000000"}, {"resolution": 128}, {"flip": 1.0}],
    ids=lambda change: next(iter(change)),
)
def test_another_transform_uses_no_kept_latent(
    base: BaseModel, photos: Path, tmp_path: Path, work: Work, change: dict[str, object]
) -> None:
    _fill(base, _open(photos), tmp_path / "cache")
    assert work.images == 8
    _fill(base, _open(photos, **change), tmp_path / "cache")
    assert (work.images, work.texts) == (16, 9)


def test_another_file_under_the_same_name_is_another_entry(
    base: BaseModel, photos: Path, tmp_path: Path, work: Work
) -> None:
    _fill(base, _open(photos), tmp_path / "cache")
    Image.new("RGB", (80, 80)).save(photos / "chelsea.png")
    _fill(base, _open(photos), tmp_path / "cache")
    assert (work.images, work.texts) == (9, 9)


def test_one_bit_of_a_model_makes_every_entry_another(
    demo: DemoPaths, photos: Path, tmp_path: Path, work: Work
) -> None:
    _fill(open_base(demo.model), _open(photos), tmp_path / "cache")
    other = open_base(demo.model)
    with torch.no_grad():
        weight = next(other.vae.parameters())
        weight.view(-1)[0] = torch.nextafter(weight.view(-1)[0], torch.tensor(9.0))
    _fill(other, _open(photos), tmp_path / "cache")
    assert (work.images, work.texts) == (16, 9)
    with torch.no_grad():
        weight = next(other.text_encoders[1].parameters())
        weight.view(-1)[-1] += 1
    _fill(other, _open(photos), tmp_path / "cache")
    assert (work.images, work.texts) == (16, 18)


def test_other_merges_of_a_tokenizer_make_every_text_another(
    demo: DemoPaths, photos: Path, tmp_path: Path, work: Work
) -> None:
    """The vocabulary stays: the same words are only cut into other tokens of it."""
    _fill(open_base(demo.model), _open(photos), tmp_path / "cache")
    shutil.copytree(demo.model, tmp_path / "model")
    for merges in (tmp_path / "model").glob("tokenizer*/merges.txt"):
        head, *rules = merges.read_text().splitlines()
        merges.write_text("\n".join([head, *reversed(rules)]) + "\n")
    other = open_base(tmp_path / "model")
    assert other.tokenizers[0].get_vocab() == open_base(demo.model).tokenizers[0].get_vocab()
    _fill(other, _open(photos), tmp_path / "cache")
    assert (work.images, work.texts) == (8, 18)
    _fill(open_base(tmp_path / "model"), _open(photos), tmp_path / "cache")
    assert (work.images, work.texts) == (8, 18)


def test_what_can_not_be_cached_rightly_is_not_and_says_so(
    base: BaseModel, photos: Path, tmp_path: Path, work: Work
) -> None:
    Image.new("RGB", (90, 90)).save(photos / "square.png")
    (photos / "square.txt").write_text("black")
    said: list[str] = []
    data = _open(photos, crop="random", captions={"shuffleTags": True})
    squares = sum(sample.width == sample.height for sample in data.samples)
    _fill(base, data, tmp_path / "cache", said)
    assert (work.images, work.texts) == (squares, 0)
    assert "text embeddings are not cached because tags are shuffled" in said[0]
    assert f"latents of {9 - squares} of 9 images are not cached" in said[1]


def test_filling_is_interruptible_and_goes_on_where_it_was(
    base: BaseModel, photos: Path, tmp_path: Path, work: Work
) -> None:
    data = _open(photos)
    objective = _objective(base, data, tmp_path / "cache", [])
    told: list[tuple[int, int]] = []
    with pytest.raises(InterruptedRunError, match="11 of 17 entries are kept"):
        objective.fill_cache(lambda: len(told) == 11, lambda *numbers: told.append(numbers))
    objective.close()
    assert told == [(n, 17) for n in range(1, 12)]
    _fill(base, data, tmp_path / "cache")
    assert (work.images, work.texts) == (8, 9)


@pytest.mark.parametrize("damage", ["cut", "flipped", "moved"])
def test_a_damaged_entry_is_computed_again(
    base: BaseModel, photos: Path, tmp_path: Path, work: Work, damage: str
) -> None:
    data = _open(photos)
    _fill(base, data, tmp_path / "cache")
    files = sorted((tmp_path / "cache").glob("*/*.tensors"))
    assert len(files) == 17
    content = bytearray(files[0].read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    elif damage == "flipped":
        content[-1] ^= 1
    else:
        content = bytearray(files[1].read_bytes())
    files[0].write_bytes(content)
    _fill(base, data, tmp_path / "cache")
    assert work.images + work.texts == 18


@contextmanager
def _files_no_larger_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_refuses_is_told_once_and_the_run_goes_on(
    base: BaseModel, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = _open(photos)
    with _files_no_larger_than(1000):
        _fill(base, data, tmp_path / "cache")
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert "can't be written: File too large; free some space" in warning.message
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_nothing_more_is_computed_ahead_for_a_disk_that_has_refused(
    base: BaseModel, photos: Path, tmp_path: Path, work: Work
) -> None:
    with _files_no_larger_than(1000):
        _fill(base, _open(photos), tmp_path / "cache")
    assert (work.texts, work.images) == (1, 0)


def test_a_cache_that_can_only_be_read_is_read(
    base: BaseModel, photos: Path, tmp_path: Path, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the system's answer is given for it. Every entry is needed."""
    data = _open(photos, captionDropout=0.0)
    _fill(base, data, tmp_path / "cache")
    before = (work.texts, work.images)
    lost = next((tmp_path / "cache").rglob("*.tensors"))
    lost.unlink()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    said: list[str] = []
    cached = _objective(base, data, tmp_path / "cache", said)
    cached.fill_cache(lambda: False, lambda done, total: None)
    for step in range(4):
        cached.batch(step)
    cached.close()
    assert sum((work.texts, work.images)) == sum(before) + 1
    assert [line for line in said if "is read-only here" in line] == said
    assert not lost.exists()


def test_a_file_where_a_folder_belongs_is_a_refusal_like_any_other(tmp_path: Path) -> None:
    key = key_of("test", {"a": 1})
    (tmp_path / key[:2]).write_text("in the way")
    said: list[str] = []
    store = TensorStore(tmp_path, said.append)
    store.put(key, {"x": torch.zeros(1)})
    assert len(said) == 1
    assert store.get(key) is None


def test_writers_at_the_same_time_leave_one_whole_entry(tmp_path: Path) -> None:
    stores = [TensorStore(tmp_path, pytest.fail) for _ in range(3)]
    key = key_of("test", {"a": 1})
    for store in stores:
        store.put(key, {"x": torch.arange(6.0).view(2, 3)})
    kept = stores[0].get(key)
    assert kept is not None
    assert torch.equal(kept["x"], torch.arange(6.0).view(2, 3))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1
    assert stores[0].get(key_of("test", {"a": 2})) is None


def test_a_digest_covers_names_values_and_shapes() -> None:
    def layer(*shape: int) -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer("x", torch.ones(*shape))
        return module

    assert module_digest(layer(2, 3)) == module_digest(layer(2, 3))
    assert module_digest(layer(2, 3)) != module_digest(layer(3, 2))


def test_runs_with_a_cache_train_to_the_same_bits_as_without(
    tmp_path: Path, demo: DemoPaths
) -> None:
    adapters = []
    for name, cache in (("plain", ""), ("filling", "cache"), ("filled", "cache")):
        (tmp_path / name).mkdir()
        given = [*arguments(tmp_path / name, demo), "--set", "spec.training.steps=3"]
        given += ["--set", "spec.dataset.crop=center"]
        if cache:
            given += ["--set", f"spec.dataset.cache={tmp_path / cache}"]
        done = in_this_process(given)
        assert done.exit_code == 0, done.output
        adapters.append(adapter(tmp_path / name))
    assert adapters[0] == adapters[1] == adapters[2]
    assert len(list((tmp_path / "cache").glob("*/*.tensors"))) == 16


class _Toned(dataset_spec.Dataset):
    """Fields that the contract does not have: each says only what it decides."""

    tone: Annotated[Literal["colour", "gray"], Decides("pixels")] = "colour"
    language: Annotated[Literal["en", "de"], Decides("text")] = "en"
    reversal: Annotated[bool, Decides("order")] = False
    title: Annotated[str, Decides("nothing")] = ""


class _TonedSpec(JobSpec):
    dataset: _Toned


@pytest.fixture
def gray_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder that the new field would come with."""
    real = ImageDataset.image

    def image(self: ImageDataset, view: View) -> TrainingImage:
        found = real(self, view)
        if getattr(self.settings, "tone", "colour") == "gray":
            gray = found.pixels.mean(0, keepdim=True).expand(3, -1, -1).contiguous()
            return replace(found, pixels=gray)
        return found

    monkeypatch.setattr(ImageDataset, "image", image)


@pytest.mark.usefixtures("gray_in_the_end")
@pytest.mark.parametrize(
    ("change", "images", "texts"),
    [
        ({"tone": "gray"}, 8, 0),
        ({"language": "de"}, 0, 9),
        ({"reversal": True}, 0, 0),
        ({"title": "bottles"}, 0, 0),
    ],
    ids=lambda value: str(value),
)
def test_a_new_field_misses_the_cache_of_what_it_declares_to_decide(
    base: BaseModel,
    photos: Path,
    tmp_path: Path,
    work: Work,
    change: dict[str, object],
    images: int,
    texts: int,
) -> None:
    """8 photographs and 9 captions, filled once; then again with the field changed."""
    (tmp_path / "cache").mkdir()
    for changed in ({}, change):
        work.images = work.texts = 0
        document = {"uri": "x", "resolution": 64, **CENTERED, **changed}
        plain = job_spec({"batchSize": 2}).document()
        spec = _TonedSpec.model_validate({**plain, "dataset": document})
        data = build_dataset(photos, spec.dataset)
        cache = build_cache(tmp_path / "cache", spec, base, data, pytest.fail)
        objective = SdxlObjective(base, data, spec, cache)
        objective.fill_cache(lambda: False, lambda done, total: None)
        found = objective.batch(0)
        objective.close()
    assert (work.images, work.texts) == (images, texts)
    fresh = SdxlObjective(base, data, spec)
    assert torch.equal(found.noisy, fresh.batch(0).noisy)
    fresh.close()
