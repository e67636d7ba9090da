"""The demo is a real SDXL pipeline with the real vocabulary, the same bytes every time."""

import hashlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from PIL import Image

from kubelora_trainer.cli.demo import DemoPaths, create_demo
from kubelora_trainer.models.tiny_tokenizer import read_vocabulary
from kubelora_trainer.utils.errors import ConfigurationError

CAT = [49406, 320, 1125, 539, 320, 2368, 49407]  # "a photo of a cat", as OpenAI's CLIP has it


def _hashes(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def test_diffusers_loads_the_demo_and_its_tokenizers_give_the_ids_of_clip(demo: DemoPaths) -> None:
    pipeline = StableDiffusionXLPipeline.from_pretrained(demo.model)
    arguments = {"padding": "max_length", "max_length": 9, "truncation": True}
    assert pipeline.tokenizer("a photo of a cat", **arguments).input_ids == [*CAT, 49407, 49407]
    assert pipeline.tokenizer_2("a photo of a cat", **arguments).input_ids == [*CAT, 0, 0]
    assert pipeline.tokenizer.model_max_length == pipeline.tokenizer_2.model_max_length == 77
    assert pipeline.scheduler.config.beta_schedule == "scaled_linear"
    assert pipeline.vae_scale_factor == 8


def test_the_full_layout_has_the_blocks_and_depths_of_sdxl(full_demo: DemoPaths) -> None:
    unet = StableDiffusionXLPipeline.from_pretrained(full_demo.model).unet
    depths = [
        [len(attention.transformer_blocks) for attention in getattr(block, "attentions", [])]
        for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks)
    ]
    assert depths == [[], [2, 2], [10, 10], [10], [10, 10, 10], [2, 2, 2], []]
    assert unet.config.addition_embed_type == "text_time"


def test_the_vocabulary_has_the_49408_tokens_of_clip() -> None:
    spec = find_spec("open_clip")
    assert spec is not None
    assert spec.origin is not None
    vocabulary = read_vocabulary(Path(spec.origin).parent / "bpe_simple_vocab_16e6.txt.gz")
    assert sorted(vocabulary.ids.values()) == list(range(49408))
    assert vocabulary.ids["!"] == 0
    assert len(vocabulary.merges) == 48894
    assert vocabulary.merges[0] == "i n"


def test_photographs_are_real_images_with_captions(demo: DemoPaths) -> None:
    lines = (demo.photos / "metadata.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert len(entries) == 8
    for entry in entries:
        assert len(entry["text"].split()) >= 4
        with Image.open(demo.photos / entry["file_name"]) as image:
            image.load()
            assert min(image.size) >= 300


def test_two_demos_are_the_same_bytes_whatever_was_drawn_before(
    demo: DemoPaths, tmp_path: Path
) -> None:
    torch.rand(17)
    state = torch.random.get_rng_state()
    again = create_demo(tmp_path, "small")
    assert torch.equal(state, torch.random.get_rng_state())
    assert _hashes(again.model) == _hashes(demo.model)
    assert _hashes(again.photos) == _hashes(demo.photos)


def test_an_earlier_demo_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "holiday.jpg").write_bytes(b"mine")
    with pytest.raises(ConfigurationError, match=r"photos exists and is not a demo"):
        create_demo(tmp_path, "small", images=1)
    assert (tmp_path / "photos" / "holiday.jpg").read_bytes() == b"mine"
    (tmp_path / "photos" / "holiday.jpg").unlink()
    create_demo(tmp_path, "small", images=2)
    create_demo(tmp_path, "small", images=1)
    assert len(list((tmp_path / "photos").iterdir())) == 2


def test_a_missing_extra_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ConfigurationError, match=r"pip install 'kubelora\[demo\]'"):
        create_demo(tmp_path, "small")
    assert list(tmp_path.iterdir()) == []


def test_making_the_demo_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    create_demo(tmp_path / "demo", "small", images=1)
    assert capfd.readouterr() == ("", "")


def test_no_library_gives_advice_while_the_demo_is_made(tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-c", ENTRY, "demo", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout.splitlines() == [
        f"model:  {tmp_path}/demo/model",
        f"photos: {tmp_path}/demo/photos",
    ]


ENTRY = "from kubelora_trainer.cli.main import main; main(prog_name='kubelora')"
