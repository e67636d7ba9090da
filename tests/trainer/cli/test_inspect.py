"""`kubelora inspect` recognises what other programs write, by key formats alone."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.cli.main import main
from kubelora_trainer.export.writers import Title, export_diffusers, export_kohya
from kubelora_trainer.lora.adapter import add_adapter, trained_layers
from kubelora_trainer.lora.init_from_lora import warm_start
from tests.trainer.lora.test_init_from_lora import OLD, _unet

Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1"
SGM = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"
WILD: dict[str, tuple[dict[str, tuple[int, ...]], str, str]] = {
    "kohya": (
        {f"{SGM}.lora_down.weight": (8, 4), f"{SGM}.lora_up.weight": (4, 8)},
        "kohya",
        "LoRA",
    ),
    "second text encoder": (
        {
            "lora_te2_text_model_x.lora_down.weight": (8, 4),
            "lora_te2_text_model_x.lora_up.weight": (4, 8),
        },
        "kohya",
        "LoRA",
    ),
    "peft": (
        {
            f"base_model.model.{Q}.to_q.lora_A.weight": (8, 4),
            f"base_model.model.{Q}.to_q.lora_B.weight": (4, 8),
        },
        "peft",
        "LoRA",
    ),
    "processors": (
        {
            f"unet.{Q}.processor.to_q_lora.down.weight": (8, 4),
            f"unet.{Q}.processor.to_q_lora.up.weight": (4, 8),
        },
        "diffusers, with attention processors",
        "LoRA",
    ),
    "DoRA of kohya": (
        {
            f"{SGM}.lora_down.weight": (8, 4),
            f"{SGM}.lora_up.weight": (4, 8),
            f"{SGM}.dora_scale": (4, 1),
        },
        "kohya",
        "DoRA",
    ),
    "LoHa": (
        {f"{SGM}.hada_{name}": (4, 4) for name in ("w1_a", "w1_b", "w2_a", "w2_b")},
        "kohya",
        "LoHa",
    ),
    "LoKr": ({f"{SGM}.lokr_w1": (2, 2), f"{SGM}.lokr_w2": (2, 2)}, "kohya", "LoKr"),
    "LoCon": (
        {
            f"{SGM}.lora_down.weight": (8, 4, 1, 1),
            f"{SGM}.lora_mid.weight": (8, 8, 3, 3),
            f"{SGM}.lora_up.weight": (4, 8, 1, 1),
        },
        "kohya",
        "LoCon with a core tensor",
    ),
    "full": ({f"{SGM}.diff": (4, 4)}, "kohya", "full weights"),
    "IA3": ({f"{SGM}.weight": (4, 1), f"{SGM}.on_input": ()}, "kohya", "IA3"),
    "OFT": ({f"{SGM}.oft_blocks": (2, 4, 4), f"{SGM}.alpha": ()}, "kohya", "OFT"),
}


def describe(*given: str | Path) -> Result:
    return CliRunner().invoke(main, ["inspect", *(str(text) for text in given)])


@pytest.mark.parametrize("kind", WILD)
def test_formats_and_adapter_types_are_named(tmp_path: Path, kind: str) -> None:
    shapes, form, name = WILD[kind]
    save_file({key: torch.ones(shape) for key, shape in shapes.items()}, tmp_path / "x.safetensors")
    found = json.loads(describe(tmp_path, "-o", "json").output)
    assert (found["format"], found["types"]) == (form, {name: 1})
    assert found["parts"] == {"text_encoder_2" if "te2" in min(shapes) else "unet": 1}
    assert found["ranks"] == ({"8": 1} if name in ("LoRA", "DoRA") or "LoCon" in name else {})


@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_own_files_show_ranks_and_alphas_as_trained(
    demo: DemoPaths, tmp_path: Path, form: str
) -> None:
    unet = _unet(demo.model)
    layers = trained_layers(add_adapter(unet, OLD, 1))
    file = (
        export_diffusers(unet, layers, tmp_path)
        if form == "diffusers"
        else export_kohya(unet.config, layers, tmp_path, Title("old"))
    )
    found = json.loads(describe(file.path, "-o", "json").output)
    assert found["ranks"] == {"4": len(layers)}
    assert found["types"] == {"LoRA": len(layers)}
    assert (found["sha256"], found["bytes"]) == (file.sha256, file.bytes)
    if form == "diffusers":
        own = sum("to_v" in layer.module.name for layer in layers)
        assert found["alphas"] == {"3.0": len(layers) - own, "9.0": own}
    text = describe(file.path).output
    assert f"LoRA ({len(layers)})" in text
    # What it names as an adapter is one: the trainer takes the same file.
    fresh = _unet(demo.model)
    warm_start(add_adapter(fresh, OLD, 2), fresh, file.path)


def test_hostile_metadata_moves_no_cursor(tmp_path: Path) -> None:
    state = {"lora_unet_x.lora_down.weight": torch.ones(2, 2)}
    save_file(state, tmp_path / "x.safetensors", {"note": "\x1b[2Jgone\r\n" + "x" * 500})
    text = describe(tmp_path / "x.safetensors").output
    assert "\x1b" not in text
    assert "\\x1b[2Jgone" in text
    assert "characters)" in text


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("x.safetensors", b"not one", "not a safetensors file, or damaged"),
        ("x.pt", b"", "is a pickle, which can run code"),
        ("photos", None, "holds no .safetensors file"),
        (None, None, "no such file"),
    ],
)
def test_what_is_no_lora_is_explained(
    tmp_path: Path, name: str | None, content: bytes | None, sentence: str
) -> None:
    place = tmp_path / (name or "missing")
    if content is not None:
        place.write_bytes(content)
    elif name is not None:
        place.mkdir()
    refused = describe(place)
    assert refused.exit_code == 2
    assert sentence in refused.output


def test_a_model_is_no_lora(demo: DemoPaths) -> None:
    refused = describe(next(demo.model.glob("unet/*.safetensors")))
    assert refused.exit_code == 2
    assert "no LoRA; none of its" in refused.output
