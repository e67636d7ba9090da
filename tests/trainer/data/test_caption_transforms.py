"""Prefix, tags in another order, dropout: pure functions of the draw."""

from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from kubelora_api.dataset_spec import Captions
from kubelora_api.dataset_spec import Dataset as Settings
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.caption_transforms import training_caption
from kubelora_trainer.data.dataset import build_dataset
from kubelora_trainer.data.preflight import preflight
from kubelora_trainer.data.token_limits import load_token_limits

TAGS = "bottle, glass, green, on white"


def test_without_settings_a_caption_stays_as_it_is() -> None:
    assert training_caption("a  b,c ,", Captions(), 1) == "a  b,c ,"


def test_a_prefix_stands_in_front_and_alone_where_there_is_no_caption() -> None:
    settings = Captions(prefix="zwx bottle")
    assert training_caption("on white", settings, 1) == "zwx bottle, on white"
    assert training_caption("", settings, 1) == "zwx bottle"


def test_kept_tags_stay_in_front_and_the_others_come_in_every_order_alike() -> None:
    settings = Captions(prefix="zwx", shuffle_tags=True, keep_tags=1)
    seen = Counter(training_caption(TAGS, settings, seed) for seed in range(1200))
    assert len(seen) == 6
    assert all(text.startswith("zwx, bottle, ") for text in seen)
    assert all(sorted(text.split(", ")[1:]) == sorted(TAGS.split(", ")) for text in seen)
    assert all(abs(count - 200) < 5 * (1200 / 6 * 5 / 6) ** 0.5 for count in seen.values())


def test_a_seed_gives_the_same_order_always() -> None:
    settings = Captions(shuffle_tags=True, separator=";")
    texts = {training_caption("a; b; c; d; e", settings, 12345) for _ in range(5)}
    assert len(texts) == 1
    assert sorted(texts.pop().split("; ")) == ["a", "b", "c", "d", "e"]


def test_tags_differ_from_use_to_use_and_a_dropped_caption_is_empty(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text(TAGS)
    settings = Settings(
        uri="x",
        resolution=64,
        caption_dropout=0.5,
        captions=Captions(prefix="zwx", shuffle_tags=True),
    )
    data = build_dataset(tmp_path, settings)
    draws = [data.order(9, 1).samples_of(step)[0] for step in range(60)]
    captions = [data.caption(draw) for draw in draws]
    assert captions == [data.caption(draw) for draw in draws]
    assert [caption == "" for caption in captions] == [draw.caption < 0.5 for draw in draws]
    assert len(set(captions)) > 10


@pytest.mark.parametrize(("prefix", "cut"), [("", 0), ("one two", 1)])
def test_the_prefix_counts_where_captions_are_measured(
    demo: DemoPaths, tmp_path: Path, prefix: str, cut: int
) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("cat " * 75)
    settings = Settings(uri="x", resolution=64, captions=Captions(prefix=prefix))
    assert preflight(tmp_path, settings, load_token_limits(demo.model))[1].cut_captions == cut
