"""A kohya file of the adapter: sgm's names, one alpha, and every reader gets what was trained."""

import math
import re
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from benchmarks.sdxl_pipeline import SDXL_UNET
from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.export.verify_unet import probe, verify_export
from kubelora_trainer.export.writers import (
    EXPORT_DTYPES,
    Title,
    dtype_that_holds,
    export_diffusers,
    export_kohya,
)
from kubelora_trainer.lora.adapter import TrainedLayer, add_adapter, trained_layers
from kubelora_trainer.lora.kohya_format import read_kohya
from kubelora_trainer.lora.target_modules import target_names
from kubelora_trainer.models.pipeline import load_unet
from kubelora_trainer.models.sgm_keys import kohya_names, sgm_blocks, sgm_name
from kubelora_trainer.utils.errors import NumericalError
from tests.trainer.fixtures.jobs import fill_up_projections

CPU = torch.device("cpu")
TITLE = Title("bottles", 768, "v_prediction")
UNEVEN = Adapter(
    rank=8,
    alpha=3.0,
    targets="all_linear",
    rank_pattern={r"attn1\.to_q": 2, r"mid_block\..*to_k": 12, "to_v": 5},
    alpha_pattern={r"attn2\.to_out\.0": 16.0},
)


def _trained(
    model: Path, adapter: Adapter, dtype: torch.dtype = torch.float32
) -> tuple[UNet2DConditionModel, list[TrainedLayer]]:
    unet = load_unet(model, variant=None, dtype=dtype, device=CPU)
    modules = add_adapter(unet, adapter, 1)
    fill_up_projections(modules)
    return unet, trained_layers(modules)


@pytest.mark.parametrize(
    ("diffusers_name", "original"),
    [
        ("conv_in", "input_blocks.0.0"),
        ("down_blocks.0.resnets.0.conv1", "input_blocks.1.0.in_layers.2"),
        ("down_blocks.0.downsamplers.0.conv", "input_blocks.3.0.op"),
        ("down_blocks.1.resnets.0.conv_shortcut", "input_blocks.4.0.skip_connection"),
        (
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
            "input_blocks.4.1.transformer_blocks.0.attn1.to_q",
        ),
        ("down_blocks.2.attentions.1.proj_out", "input_blocks.8.1.proj_out"),
        ("mid_block.attentions.0.proj_in", "middle_block.1.proj_in"),
        ("mid_block.resnets.1.time_emb_proj", "middle_block.2.emb_layers.1"),
        ("up_blocks.0.resnets.0.conv2", "output_blocks.0.0.out_layers.3"),
        ("up_blocks.0.upsamplers.0.conv", "output_blocks.2.2.conv"),
        ("up_blocks.1.attentions.2.proj_in", "output_blocks.5.1.proj_in"),
        ("up_blocks.2.resnets.2.conv1", "output_blocks.8.0.in_layers.2"),
        ("time_embedding.linear_2", "time_embed.2"),
        ("add_embedding.linear_1", "label_emb.0.0"),
        ("conv_out", "out.2"),
    ],
)
def test_names_are_those_of_sdxls_own_checkpoint(diffusers_name: str, original: str) -> None:
    assert sgm_name(diffusers_name, sgm_blocks(SDXL_UNET)) == original


def test_text_encoder_keys_have_text_model_whether_transformers_says_it_or_not() -> None:
    layer = "encoder.layers.3.self_attn.q_proj"
    names = kohya_names(
        SDXL_UNET, [("text_encoder", layer), ("text_encoder_2", f"text_model.{layer}")]
    )
    assert list(names.values()) == [
        "lora_te1_text_model_encoder_layers_3_self_attn_q_proj",
        "lora_te2_text_model_encoder_layers_3_self_attn_q_proj",
    ]


def test_diffusers_turns_every_name_of_every_layer_back(full_demo: DemoPaths) -> None:
    """Diffusers' own conversion is the second implementation: 794 layers, convolutions too."""
    unet = load_unet(full_demo.model, variant=None, dtype=torch.float32, device=CPU)
    layers = [n for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    stems = kohya_names(unet.config, (("unet", name) for name in layers))
    assert len(set(stems.values())) == len(layers) == 794
    state = {}
    for number, name in enumerate(layers):
        stem = stems["unet", name]
        state[f"{stem}.lora_down.weight"] = torch.tensor([number])
        state[f"{stem}.lora_up.weight"] = torch.tensor([-number])
        state[f"{stem}.alpha"] = torch.tensor(1.0)
    converted, _ = StableDiffusionXLPipeline.lora_state_dict(state, unet_config=unet.config)
    assert len(converted) == 2 * len(layers)
    assert {int(number) for number in converted.values() if number > 0} == set(range(1, 794))
    for key, number in converted.items():
        found = re.sub(r"\.processor\b|\.lora\b.*|_lora\b.*|^unet\.", "", key)
        assert found.removesuffix(".0") == layers[abs(int(number))].removesuffix(".0")


def test_convolutions_and_rank_stabilised_scales_survive_both_formats(
    full_demo: DemoPaths, tmp_path: Path
) -> None:
    """Every layer that can have an adapter; ranks differ, so scales differ by a root."""
    adapter = Adapter(
        rank=4, alpha=3.0, targets="all", rs_lora=True, rank_pattern={r"conv\d": 2, "to_v": 5}
    )
    unet, layers = _trained(full_demo.model, adapter)
    files = [
        export_diffusers(unet, layers, tmp_path).path,
        export_kohya(unet.config, layers, tmp_path, TITLE).path,
    ]
    for check in verify_export(full_demo.model, files, unet, layers):
        assert check.effect > 0.01 * check.output
        assert check.deviation <= 1e-4 * check.effect + 2 * check.noise


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_both_files_give_the_trained_output_on_sdxls_topology(
    full_demo: DemoPaths, tmp_path: Path, dtype: str
) -> None:
    """Ranks and alphas differ between layers, alpha from rank; embeddings are adapted too."""
    kind = EXPORT_DTYPES[dtype]  # type: ignore[index]
    unet, layers = _trained(full_demo.model, UNEVEN)
    files = [
        export_diffusers(unet, layers, tmp_path, dtype=kind).path,
        export_kohya(unet.config, layers, tmp_path, TITLE, dtype=kind).path,
    ]
    checks = verify_export(full_demo.model, files, unet, layers, dtype=kind)
    limit = {"fp32": 1e-4, "fp16": 1e-3, "bf16": 8e-3}[dtype]
    for check in checks:
        assert check.effect > 0.01 * check.output
        assert check.deviation <= limit * check.effect


def test_a_bf16_run_judges_a_folded_file_against_the_noise_of_bf16_itself(
    full_demo: DemoPaths, tmp_path: Path
) -> None:
    """In bf16 any rounding, amplified by 70 blocks, is a fifth of this adapter's effect."""
    unet, layers = _trained(full_demo.model, UNEVEN, torch.bfloat16)
    layers = [TrainedLayer(o.module, o.lora_a.clone(), o.lora_b.clone()) for o in layers]
    for one in layers:
        for parameter in (one.module.lora_a, one.module.lora_b):
            parameter.data = parameter.data.bfloat16()
    exact = export_diffusers(unet, layers, tmp_path, dtype=torch.bfloat16).path
    folded = export_kohya(unet.config, layers, tmp_path, TITLE, dtype=torch.bfloat16).path
    checks = verify_export(full_demo.model, [exact, folded], unet, layers, dtype=torch.bfloat16)
    assert checks[0].deviation == 0.0
    assert 0 < checks[1].deviation < 2 * checks[1].noise < checks[1].effect


def test_a_user_loads_the_kohya_file_with_the_pipelines_own_call(
    full_demo: DemoPaths, tmp_path: Path
) -> None:
    unet, layers = _trained(full_demo.model, UNEVEN)
    file = export_kohya(unet.config, layers, tmp_path, TITLE)
    pipeline = StableDiffusionXLPipeline.from_pretrained(full_demo.model)
    pipeline.load_lora_weights(file.path.parent, weight_name="bottles.safetensors")
    assert torch.allclose(probe(pipeline.unet), probe(unet), atol=1e-5)


def test_one_alpha_stands_everywhere_and_the_rest_of_the_scale_is_in_the_weights(
    demo: DemoPaths, tmp_path: Path
) -> None:
    unet, layers = _trained(demo.model, UNEVEN)
    file = export_kohya(unet.config, layers, tmp_path, TITLE)
    state = load_file(file.path)
    assert {float(t) for key, t in state.items() if key.endswith(".alpha")} == {3.0}
    stems = kohya_names(unet.config, (("unet", one.module.name) for one in layers))
    odd = 0
    for one in layers:
        name, stem = one.module.name, stems["unet", one.module.name]
        alpha = 16.0 if name.endswith("attn2.to_out.0") else 3.0
        odd += alpha != 3.0
        update = (3.0 / one.module.rank) * (
            state[f"{stem}.lora_up.weight"] @ state[f"{stem}.lora_down.weight"]
        )
        trained = (alpha / one.module.rank) * (one.lora_b @ one.lora_a)
        assert torch.allclose(update, trained, rtol=1e-5, atol=1e-8)
        assert torch.allclose(read_kohya(file.path)[stem].update(), trained, rtol=1e-5, atol=1e-8)
    assert odd == 4
    assert len(state) == 3 * len(layers)


def test_the_metadata_is_what_interfaces_look_for_and_files_are_equal_every_time(
    demo: DemoPaths, tmp_path: Path
) -> None:
    unet, layers = _trained(demo.model, Adapter(rank=8, alpha=4.0))
    first = export_kohya(unet.config, layers, tmp_path / "a", TITLE)
    with safe_open(first.path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["modelspec.architecture"] == "stable-diffusion-xl-v1-base/lora"
    assert metadata["modelspec.sai_model_spec"] == "1.0.0"
    assert metadata["modelspec.title"] == "bottles"
    assert metadata["modelspec.resolution"] == "768x768"
    assert metadata["modelspec.prediction_type"] == "v"
    assert (metadata["ss_network_dim"], metadata["ss_network_alpha"]) == ("8", "4")
    second = export_kohya(unet.config, layers, tmp_path / "b", TITLE)
    assert second.sha256 == first.sha256


@pytest.mark.parametrize("fault", ["lost", "renamed", "alpha", "scaled", "stray"])
def test_a_faulty_kohya_file_is_found_out(demo: DemoPaths, tmp_path: Path, fault: str) -> None:
    unet, layers = _trained(demo.model, Adapter(rank=4, alpha=12.0))
    path = export_kohya(unet.config, layers, tmp_path, TITLE).path
    state = load_file(path)
    stem = next(key for key in state if "attn2_to_k.lora_up" in key).split(".")[0]
    name = f"{stem}.lora_up.weight"
    if fault == "lost":
        state = {key: tensor for key, tensor in state.items() if not key.startswith(f"{stem}.")}
    elif fault == "renamed":
        state[name.replace("attn2", "attn1").replace("to_k", "to_x")] = state.pop(name)
    elif fault == "alpha":
        state[f"{stem}.alpha"] = torch.tensor(4.0)
    elif fault == "scaled":
        state[name] = state[name] * 1.001
    else:
        state["lora_unet_out_2.diff"] = torch.zeros(1)
    save_file(state, path)
    with pytest.raises(
        NumericalError, match=r"holds 31 layers|can't be read|differently from what"
    ):
        verify_export(demo.model, [path], unet, layers)


def test_values_too_large_for_fp16_are_a_sentence(demo: DemoPaths, tmp_path: Path) -> None:
    unet, layers = _trained(demo.model, Adapter(rank=4))
    layers[2].lora_b[0, 0] = 1e6
    with pytest.raises(NumericalError, match=r"not finite in torch.float16.*output.dtype to bf16"):
        export_kohya(unet.config, layers, tmp_path, TITLE, dtype=torch.float16)


@pytest.mark.parametrize(
    ("value", "held"), [(1e-2, True), (1e-4, True), (1e-6, False), (1e-9, False), (1e5, False)]
)
def test_weights_that_fp16_would_lose_are_kept_in_fp32(
    demo: DemoPaths, value: float, held: bool
) -> None:
    """Steps of 6e-8: 1e-6 would be off by up to 3 %, 1e-9 would be 0; 1e5 is beyond 65504."""
    _, layers = _trained(demo.model, Adapter(rank=4))
    draw = torch.rand(layers[7].lora_b.shape, generator=torch.Generator().manual_seed(1))
    layers[7].lora_b.copy_(value * (1 + draw))
    wide = torch.float16 if held else torch.float32
    assert dtype_that_holds(layers, torch.float16) == wide
    assert dtype_that_holds(layers, torch.bfloat16) == torch.bfloat16


def test_a_fresh_up_projection_of_zeros_is_held_by_fp16(demo: DemoPaths) -> None:
    _, layers = _trained(demo.model, Adapter(rank=4))
    layers[0].lora_b.zero_()
    assert dtype_that_holds(layers, torch.float16) == torch.float16


def test_attention_at_rank_64_in_16_bit_is_186_mb_on_sdxl() -> None:
    """560 layers of rank x (inputs + outputs) numbers of 2 bytes, from SDXL's own configuration.

    185.8 decimal megabytes, 177.2 MiB; a file has about 0.1 MB of header besides. By hand: self-
    attention has 4 layers of width w to w, cross-attention two of them and two from 2048 to w, in
    10 blocks of width 640 and 60 of width 1280.
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel(**SDXL_UNET)
    layers = [unet.get_submodule(name) for name in target_names(unet, "attention")]
    numbers = sum(64 * (layer.in_features + layer.out_features) for layer in layers)
    by_hand = 64 * sum(
        blocks * (6 * (w + w) + 2 * (2048 + w)) for blocks, w in ((10, 640), (60, 1280))
    )
    assert len(layers) == 560
    assert numbers == by_hand
    assert math.floor(2 * numbers / 1e6 + 0.5) == 186
    assert 2 * numbers / 2**20 == pytest.approx(177.2, abs=0.05)
