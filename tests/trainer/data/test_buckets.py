"""Aspect-ratio buckets: SDXL's sizes, no image dropped, one size per micro-batch, right numbers."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from kubelora_api import dataset_spec
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.buckets import Size, covering_size, nearest_size, training_sizes
from kubelora_trainer.data.dataset import ImageDataset, build_dataset
from kubelora_trainer.data.sampler import SampleOrder, groups_of
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from tests.trainer.fixtures.jobs import job_spec, open_base

SDXL_WIDER_THAN_HIGH = {
    (2048, 512), (1984, 512), (1920, 512), (1856, 512), (1792, 576), (1728, 576), (1664, 576),
    (1600, 640), (1536, 640), (1472, 704), (1408, 704), (1344, 704), (1344, 768), (1280, 768),
    (1216, 832), (1152, 832), (1152, 896), (1088, 896), (1088, 960), (1024, 960),
}  # fmt: skip
"""The table of Podell et al. 2023, appendix I, without the square."""
SHAPES = ((100, 100), (200, 100), (210, 100), (100, 190), (128, 128), (64, 64), (300, 100))


def _dataset(**buckets: object) -> dataset_spec.Dataset:
    document: dict[str, Any] = {
        "uri": "x",
        "resolution": 64,
        "buckets": {"enabled": True, "step": 8, **buckets},
    }
    return dataset_spec.Dataset.model_validate(document)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    generator = np.random.default_rng(5)
    for number, (width, height) in enumerate(SHAPES):
        pixels = generator.integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(f"photo {number}")
    return tmp_path


def test_the_sizes_at_1024_are_sdxls_own_table() -> None:
    sizes = training_sizes(
        dataset_spec.Dataset.model_validate({"uri": "x", "buckets": {"enabled": True}})
    )
    wide = {(size.width, size.height) for size in sizes if size.ratio > 1}
    assert wide == SDXL_WIDER_THAN_HIGH
    assert {(h, w) for w, h in wide} == {(s.width, s.height) for s in sizes if s.ratio < 1}
    assert Size(1024, 1024) in sizes


def test_an_image_of_one_of_sdxls_own_sizes_keeps_it() -> None:
    sizes = training_sizes(
        dataset_spec.Dataset.model_validate({"uri": "x", "buckets": {"enabled": True}})
    )
    for wide, high in {*SDXL_WIDER_THAN_HIGH, (1024, 1024)}:
        assert nearest_size(wide, high, sizes) == Size(wide, high)
        assert nearest_size(high, wide, sizes) == Size(high, wide)


def test_sizes_stay_within_area_and_edges() -> None:
    for size in training_sizes(_dataset(minEdge=48, maxEdge=88)):
        assert size.width * size.height <= 64 * 64
        assert all(48 <= edge <= 88 and edge % 8 == 0 for edge in (size.width, size.height))
    assert training_sizes(dataset_spec.Dataset(uri="x", resolution=64)) == (Size(64, 64),)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_nearest_size_is_covered_by_the_resized_image(width: int, height: int) -> None:
    sizes = training_sizes(_dataset())
    chosen = nearest_size(width, height, sizes)
    whole = covering_size(width, height, chosen)
    assert whole.width >= chosen.width
    assert whole.height >= chosen.height
    assert whole.width == chosen.width or whole.height == chosen.height
    quotients = [max(s.ratio * height / width, width / height / s.ratio) for s in sizes]
    assert max(chosen.ratio * height / width, width / height / chosen.ratio) == pytest.approx(
        min(quotients)
    )


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(0, 2**31 - 1),
)
def test_every_epoch_sees_every_sample_once_in_micro_batches_of_one_size(
    sizes: list[int], batch_size: int, seed: int
) -> None:
    order = SampleOrder(seed, len(sizes), batch_size, groups_of(sizes))
    counts = Counter(sizes)
    expected = Counter(
        length
        for count in counts.values()
        for length in [batch_size] * (count // batch_size)
        + ([count % batch_size] if count % batch_size else [])
    )
    steps = order.micro_steps_per_epoch
    assert steps == sum(expected.values())
    for epoch in (0, 1, 7):
        batches = [order.samples_of(epoch * steps + n) for n in range(steps)]
        assert sorted(d.sample for batch in batches for d in batch) == list(range(len(sizes)))
        assert Counter(len(batch) for batch in batches) == expected
        assert all(len({sizes[d.sample] for d in batch}) == 1 for batch in batches)


def test_the_order_is_a_function_of_seed_and_epoch_alone_and_mixes_the_sizes() -> None:
    sizes = [0] * 12 + [1] * 12
    order = SampleOrder(3, 24, 2, groups_of(sizes))
    ahead = [order.samples_of(step) for step in range(36)]
    again = SampleOrder(3, 24, 2, groups_of(sizes))
    assert [again.samples_of(step) for step in reversed(range(36))] == ahead[::-1]
    epochs = [[d.sample for batch in ahead[n : n + 12] for d in batch] for n in (0, 12, 24)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    first = [sizes[batch[0].sample] for batch in ahead[:12]]
    assert first not in (sorted(first), sorted(first)[::-1])


def test_each_bucket_gives_its_own_size_conditions_in_fp32(demo: DemoPaths, photos: Path) -> None:
    """200 x 100 at resolution 64 in steps of 8: 88 x 40 (2.2) is nearer to 2 than 80 x 48 (1.67).

    It is resized to 88 x 44, so the cut lies 0 to 4 rows from the top.
    """
    data = build_dataset(photos, _dataset())
    by_shape = {(s.width, s.height): s.size for s in data.samples}
    assert by_shape[(200, 100)] == Size(88, 40)
    assert by_shape[(100, 100)] == by_shape[(128, 128)] == by_shape[(64, 64)] == Size(64, 64)
    assert data.report.sizes["64x64"] == 3
    base = open_base(demo.model)
    objective = SdxlObjective(base, data, job_spec({"batchSize": 2}))
    seen: Counter[int] = Counter()
    for step in range(objective.order.micro_steps_per_epoch):
        draws = objective.order.samples_of(step)
        batch = objective.batch(step)
        size = data.samples[draws[0].sample].size
        assert batch.noisy.shape == (len(draws), 4, size.height // 8, size.width // 8)
        assert batch.time_ids.dtype == torch.float32
        for row, draw in zip(batch.time_ids.tolist(), draws, strict=True):
            sample = data.samples[draw.sample]
            seen[draw.sample] += 1
            assert row[:2] == [sample.height, sample.width]
            assert row[4:] == [size.height, size.width]
            if (sample.width, sample.height) == (200, 100):
                assert row[2] == int(draw.down * 5)
                assert row[3] == 0
    objective.close()
    assert seen == Counter(range(len(SHAPES)))


def test_an_incomplete_micro_batch_counts_its_samples(demo: DemoPaths, photos: Path) -> None:
    """3 squares by 2 are 2 and 1: sums over samples, so a window divides by 3, not by 4."""
    data = build_dataset(photos, _dataset())
    objective = SdxlObjective(open_base(demo.model), data, job_spec({"batchSize": 2}))
    total = sum(objective(step).samples for step in range(objective.order.micro_steps_per_epoch))
    objective.close()
    assert total == len(SHAPES)


def _flipping(photos: Path, flip: float, crop: str = "random") -> ImageDataset:
    document: dict[str, Any] = {"uri": "x", "resolution": 64, "flip": flip, "crop": crop}
    return build_dataset(photos, dataset_spec.Dataset.model_validate(document))


def test_the_share_of_mirrored_samples_is_the_set_one(photos: Path) -> None:
    data = _flipping(photos, 0.3)
    order = data.order(1, 1)
    mirrored = [data.view(order.samples_of(step)[0]).mirrored for step in range(2000)]
    assert sum(mirrored) / 2000 == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 2000) ** 0.5)
    never = _flipping(photos, 0.0)
    assert not any(never.view(order.samples_of(step)[0]).mirrored for step in range(200))


def test_a_centred_crop_has_the_middle_offsets(photos: Path) -> None:
    """300 x 100 becomes 192 x 64; 129 places, the middle one begins at 64."""
    data = _flipping(photos, 0.5, "center")
    for step in range(20):
        (draw,) = data.order(0, 1).samples_of(step)
        view = data.view(draw)
        if data.samples[draw.sample].width == 300:
            assert view.sizes.crop_top_left == (0, 64)
            expected = data.image(view).pixels
            with Image.open(photos / "6.png") as image:
                cut = image.crop((100, 0, 200, 100)).resize((64, 64), Image.Resampling.LANCZOS)
            plain = torch.from_numpy(np.asarray(cut).copy()).permute(2, 0, 1) / 127.5 - 1
            plain = plain.flip(2) if view.mirrored else plain
            assert float((plain - expected)[:, :, 6:-6].abs().max()) < 2 / 127.5


def test_mirrored_and_plain_latents_are_not_taken_for_each_other(
    demo: DemoPaths, photos: Path
) -> None:
    """With and without anything kept: the second epoch, out of memory, equals a fresh objective."""
    base: BaseModel = open_base(demo.model)
    job = job_spec({"seed": 4})
    data = _flipping(photos, 0.5, "center")
    warm = SdxlObjective(base, data, job)
    for step in range(14):
        warm.batch(step)
    for step in range(14, 28):
        fresh = SdxlObjective(base, data, job)
        assert torch.equal(warm.batch(step).noisy, fresh.batch(step).noisy)
        fresh.close()
    warm.close()
