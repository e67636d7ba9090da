"""The adapter: which layers, which ranks and scales, and numbers that depend on the seed alone."""

import math
import re

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from torch import nn

from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.export.verify_unet import probe
from kubelora_trainer.lora.adapter import add_adapter, initial_down_projection
from kubelora_trainer.lora.target_modules import suggest_parts
from kubelora_trainer.models.pipeline import load_unet
from kubelora_trainer.utils.errors import ConfigurationError


@pytest.fixture
def unet(demo: DemoPaths) -> UNet2DConditionModel:
    return _unet(demo)


def _unet(demo: DemoPaths, dtype: torch.dtype = torch.float32) -> UNet2DConditionModel:
    return load_unet(demo.model, variant=None, dtype=dtype, device=torch.device("cpu"))


def test_a_fresh_adapter_changes_nothing_and_is_all_that_trains(unet: UNet2DConditionModel) -> None:
    before = probe(unet)
    modules = add_adapter(unet, Adapter(init="orthogonal"), 0)
    assert torch.equal(probe(unet), before)
    trainable = {id(p) for p in unet.parameters() if p.requires_grad}
    assert trainable == {id(p) for m in modules for p in (m.lora_a, m.lora_b)}
    assert all(not m.lora_b.any() for m in modules)


def test_adapter_weights_are_fp32_on_a_bf16_model(demo: DemoPaths) -> None:
    modules = add_adapter(_unet(demo, torch.bfloat16), Adapter(), 0)
    assert {p.dtype for m in modules for p in (m.lora_a, m.lora_b)} == {torch.float32}


def test_sdxls_seventy_blocks_give_560_attention_layers(full_demo: DemoPaths) -> None:
    """2 x 2 + 2 x 10 down, 10 mid, 3 x 10 + 3 x 2 up: 70 blocks of 2 attentions of 4 layers."""
    modules = add_adapter(_unet(full_demo), Adapter(rank=1), 0)
    blocks = [module.group_block for module in modules]
    assert len(modules) == 70 * 8
    assert (blocks.count("down"), blocks.count("mid"), blocks.count("up")) == (192, 80, 288)
    assert all(re.search(r"\.to_(q|k|v|out\.0)$", module.name) for module in modules)


def test_targets_widen_by_two_layers_a_block_and_to_all_linear_layers(
    full_demo: DemoPaths,
) -> None:
    wider = add_adapter(_unet(full_demo), Adapter(rank=1, targets="attention+feed_forward"), 0)
    assert len(wider) == 70 * 10
    bare = _unet(full_demo)
    linear = [name for name, layer in bare.named_modules() if isinstance(layer, nn.Linear)]
    widest = add_adapter(bare, Adapter(rank=1, targets="all_linear"), 0)
    assert [module.name for module in widest] == linear
    assert [m.name for m in widest if m.group_block == "embed"] == [
        "time_embedding.linear_1",
        "time_embedding.linear_2",
        "add_embedding.linear_1",
        "add_embedding.linear_2",
    ]


@pytest.mark.parametrize(("rank", "inputs"), [(4, 64), (64, 64), (96, 64)])
def test_orthogonal_has_orthonormal_rows_or_columns_where_rank_exceeds_inputs(
    rank: int, inputs: int
) -> None:
    a = initial_down_projection("orthogonal", rank, inputs, 5)
    assert a.shape == (rank, inputs)
    gram = a @ a.T if rank <= inputs else a.T @ a
    assert torch.allclose(gram, torch.eye(min(rank, inputs)), atol=1e-6)


def test_kaiming_and_gaussian_have_pefts_spread() -> None:
    """Uniform within 1/sqrt(inputs) has deviation 1/sqrt(3 inputs); gaussian has 1/rank."""
    kaiming = initial_down_projection("kaiming", 16, 4096, 1)
    assert kaiming.abs().max() <= 1 / 64
    assert float(kaiming.std()) == pytest.approx(1 / math.sqrt(3 * 4096), rel=0.02)
    assert abs(float(kaiming.mean())) < 1e-4
    assert float(initial_down_projection("gaussian", 16, 4096, 1).std()) == pytest.approx(
        1 / 16, rel=0.02
    )


def test_numbers_depend_on_seed_and_name_and_on_nothing_drawn_before(demo: DemoPaths) -> None:
    state = torch.random.get_rng_state()
    first = add_adapter(_unet(demo), Adapter(), 7)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(100)
    wider = add_adapter(_unet(demo), Adapter(targets="all_linear"), 7)
    again = {module.name: module.lora_a for module in wider}
    assert all(torch.equal(module.lora_a, again[module.name]) for module in first)
    other = add_adapter(_unet(demo), Adapter(), 8)
    assert not any(torch.equal(a.lora_a, b.lora_a) for a, b in zip(first, other, strict=True))
    same_shape = [m.lora_a for m in first if m.lora_a.shape == first[0].lora_a.shape]
    assert len({tuple(a.flatten().tolist()) for a in same_shape}) == len(same_shape)


def test_patterns_follow_pefts_rule_the_first_match_wins(demo: DemoPaths) -> None:
    patterns = {r"attn1\.to_q": 2, "to_q": 3, r"mid_block\..*to_k": 5}
    adapter = Adapter(rank=8, alpha=4.0, rank_pattern=patterns, alpha_pattern={"to_v": 12.0})
    for module in add_adapter(_unet(demo), adapter, 0):
        rank, alpha = 8, 4.0
        if module.name.endswith("attn1.to_q"):
            rank = 2
        elif module.name.endswith("to_q"):
            rank = 3
        elif module.name.startswith("mid_block") and module.name.endswith("to_k"):
            rank = 5
        if module.name.endswith("to_v"):
            alpha = 12.0
        assert module.rank == rank
        assert module.alpha == pytest.approx(alpha)
        assert module.lora_a.shape[0] == module.lora_b.shape[1] == rank


def test_ranks_are_those_of_pefts_own_adapter(demo: DemoPaths) -> None:
    """Pattern keys and shapes against a UNet that peft alone has adapted."""
    patterns = {r"down_blocks\.1\..*": 4, "to_k": 6}
    reference = _unet(demo)
    reference.add_adapter(
        LoraConfig(r=8, target_modules=["to_q", "to_k"], rank_pattern=dict(patterns))
    )
    shapes = {
        name.split(".lora_A")[0]: tensor.shape
        for name, tensor in reference.named_parameters()
        if "lora_A" in name
    }
    ours = add_adapter(_unet(demo), Adapter(rank=8, rank_pattern=patterns), 0)
    compared = [module for module in ours if module.name in shapes]
    assert len(compared) == len(shapes)
    assert all(module.lora_a.shape == shapes[module.name] for module in compared)


def test_an_output_gains_alpha_over_rank_times_b_times_a(unet: UNet2DConditionModel) -> None:
    layer_name = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    plain = unet.get_submodule(layer_name)
    x = torch.randn(3, plain.in_features, generator=torch.Generator().manual_seed(1))
    before = plain(x)
    modules = add_adapter(unet, Adapter(rank=4, alpha=6.0), 0)
    module = next(m for m in modules if m.name == layer_name)
    with torch.no_grad():
        module.lora_b.normal_(generator=torch.Generator().manual_seed(2))
        gained = unet.get_submodule(layer_name)(x) - before
        expected = (x @ module.lora_a.T @ module.lora_b.T) * (6.0 / 4)
    assert torch.allclose(gained, expected, atol=1e-5)


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_matches_nothing_is_an_error(unet: UNet2DConditionModel, field: str) -> None:
    adapter = Adapter.model_validate({field: {"to_query": 4}})
    with pytest.raises(ConfigurationError, match=r"Pattern: 'to_query' matches none of the 32"):
        add_adapter(unet, adapter, 0)


def test_all_reaches_every_linear_layer_and_convolution(full_demo: DemoPaths) -> None:
    """794 layers of SDXL: 743 linear ones and 51 convolutions."""
    bare = _unet(full_demo)
    convolutions = {n: m for n, m in bare.named_modules() if isinstance(m, nn.Conv2d)}
    modules = {m.name: m for m in add_adapter(bare, Adapter(rank=2, targets="all"), 0)}
    assert (len(modules), len(convolutions)) == (794, 51)
    for name, convolution in convolutions.items():
        down, up = modules[name].lora_a, modules[name].lora_b
        assert down.shape == (2, convolution.in_channels, *convolution.kernel_size)
        assert up.shape == (convolution.out_channels, 2, 1, 1)
    assert modules["conv_in"].group_block == modules["conv_out"].group_block == "embed"


def test_an_orthogonal_convolution_has_orthonormal_filters(unet: UNet2DConditionModel) -> None:
    adapter = Adapter(rank=4, target_patterns=[r"resnets\.0\.conv1"], init="orthogonal")
    for module in add_adapter(unet, adapter, 3):
        rows = module.lora_a.detach().flatten(1)
        assert torch.allclose(rows @ rows.T, torch.eye(4), atol=1e-6)


def test_target_patterns_choose_by_the_end_of_a_name_and_take_the_place_of_targets(
    unet: UNet2DConditionModel,
) -> None:
    names = [n for n, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    wanted = [n for n in names if n.endswith(("attn2.to_k", "attn2.to_v", ".conv1"))]
    adapter = Adapter(targets="all", target_patterns=[r"attn2\.to_[kv]", "conv1"])
    assert [module.name for module in add_adapter(unet, adapter, 0)] == wanted


def test_a_target_pattern_that_matches_nothing_is_an_error(unet: UNet2DConditionModel) -> None:
    with pytest.raises(ConfigurationError, match="targetPatterns: 'to_z' matches none of the"):
        add_adapter(unet, Adapter(target_patterns=["to_q", "to_z"]), 0)


def test_rank_stabilised_scale_is_alpha_over_the_root_of_each_modules_rank(
    unet: UNet2DConditionModel,
) -> None:
    """Kalajdzievski 2023: 6 / sqrt(4) = 3 and 6 / sqrt(9) = 2."""
    adapter = Adapter(rank=4, alpha=6.0, rs_lora=True, rank_pattern={"to_v": 9})
    scales = {m.name.endswith("to_v"): m.scale for m in add_adapter(unet, adapter, 0)}
    assert scales == {True: pytest.approx(2.0), False: pytest.approx(3.0)}


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("mid_blocks.*", "; did you mean 'mid_block' for 'mid_blocks'?"),
        (r"down\.\d+\.atn2\.to_kk", "; did you mean 'attn2' for 'atn2' and 'to_k' for 'to_kk'?"),
        ("attn2.*", ""),
        ("zebra", ""),
    ],
)
def test_words_of_a_pattern_that_no_name_has_are_answered(pattern: str, meant: str) -> None:
    names = ["mid_block.attn2.to_k", "down.0.attn2.to_k", "down.0.attn2.to_out.0"]
    assert suggest_parts(pattern, names) == meant
