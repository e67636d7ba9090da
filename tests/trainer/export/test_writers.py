"""An exported adapter, loaded by diffusers, gives the trained output; anything less is an error."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.export.verify_unet import (
    ExportCheck,
    any_update_shows,
    check_output,
    probe,
    verify_export,
)
from kubelora_trainer.export.writers import export_diffusers
from kubelora_trainer.lora.adapter import TrainedLayer, add_adapter, trained_layers
from kubelora_trainer.models.pipeline import load_unet
from kubelora_trainer.utils.errors import NumericalError, OutputError
from tests.trainer.fixtures.jobs import fill_up_projections

CPU = torch.device("cpu")
FILE = "pytorch_lora_weights.safetensors"
UNEVEN = Adapter(
    rank=8,
    alpha=3.0,
    targets="all_linear",
    init="orthogonal",
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


@pytest.mark.parametrize("layout", ["demo", "full_demo"])
def test_the_pipelines_own_loader_gives_the_trained_output(
    layout: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Alpha differs from rank, and ranks and alphas differ between modules."""
    paths: DemoPaths = request.getfixturevalue(layout)
    unet, layers = _trained(paths.model, UNEVEN)
    without = probe(load_unet(paths.model, variant=None, dtype=torch.float32, device=CPU))
    export_diffusers(unet, layers, tmp_path)
    pipeline = StableDiffusionXLPipeline.from_pretrained(paths.model)
    pipeline.load_lora_weights(tmp_path / "adapter")
    loaded, trained = probe(pipeline.unet), probe(unet)
    assert torch.allclose(loaded, trained, atol=1e-5)
    assert float((trained - without).norm() / without.norm()) > 0.01
    [check] = verify_export(paths.model, [tmp_path / "adapter" / FILE], unet, layers)
    assert check.deviation <= 1e-5 * check.output
    assert check.effect == pytest.approx(float((trained - without).norm()), rel=1e-3)


def test_the_file_is_described_by_its_hash_and_size_and_is_the_same_every_time(
    demo: DemoPaths, tmp_path: Path
) -> None:
    unet, layers = _trained(demo.model, Adapter(rank=4, targets="all_linear"))
    first = export_diffusers(unet, layers, tmp_path / "a")
    content = first.path.read_bytes()
    assert first.path == tmp_path / "a/adapter" / FILE
    assert first.sha256 == hashlib.sha256(content).hexdigest()
    assert first.bytes == len(content)
    assert [file.name for file in first.path.parent.iterdir()] == [FILE]
    second = export_diffusers(unet, layers, tmp_path / "b")
    assert second.sha256 == first.sha256


def test_masters_are_written_in_place_of_the_working_copy(demo: DemoPaths, tmp_path: Path) -> None:
    unet, layers = _trained(demo.model, Adapter(rank=4), torch.bfloat16)
    modules = [one.module for one in layers]
    masters = {
        f"{module.full_name}.{name}": parameter.detach() + 1e-5
        for module in modules
        for name, parameter in module.factors.items()
    }
    layers = trained_layers(modules, masters)
    file = export_diffusers(unet, layers, tmp_path)
    state = load_file(file.path)
    assert len(state) == 2 * len(modules)
    assert all(torch.equal(state[f"unet.{name}.weight"], own) for name, own in masters.items())
    half = export_diffusers(unet, layers, tmp_path, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(half.path).values()} == {torch.bfloat16}


def test_a_bf16_working_copy_agrees_with_its_fp32_masters(demo: DemoPaths, tmp_path: Path) -> None:
    unet, layers = _trained(demo.model, UNEVEN, torch.bfloat16)
    layers = [TrainedLayer(o.module, o.lora_a.clone(), o.lora_b.clone()) for o in layers]
    for one in layers:
        for parameter in (one.module.lora_a, one.module.lora_b):
            parameter.data = parameter.data.bfloat16()
    export_diffusers(unet, layers, tmp_path)
    [check] = verify_export(demo.model, [tmp_path / "adapter" / FILE], unet, layers)
    assert check.deviation <= 1e-3 * check.output
    assert check.effect > 0


def test_updates_that_bf16_can_not_show_yet_are_no_fault_of_the_file(
    demo: DemoPaths, tmp_path: Path
) -> None:
    """As after two steps of a warm-up."""
    unet = load_unet(demo.model, variant=None, dtype=torch.bfloat16, device=CPU)
    modules = add_adapter(unet, Adapter(rank=4), 1)
    fill_up_projections(modules, scale=1e-9)
    layers = trained_layers(modules)
    export_diffusers(unet, layers, tmp_path)
    [check] = verify_export(demo.model, [tmp_path / "adapter" / FILE], unet, layers)
    assert (check.effect, check.shows) == (0.0, False)


@pytest.mark.parametrize(("size", "shows"), [(0.0155, False), (0.0157, True)])
def test_an_update_shows_that_is_more_than_half_the_last_digit_of_its_layers_weights(
    demo: DemoPaths, size: float, shows: bool
) -> None:
    """Weights of norm 4, in bf16: 4 / 256 = 0.015625."""
    unet = load_unet(demo.model, variant=None, dtype=torch.bfloat16, device=CPU)
    one, *others = trained_layers(add_adapter(unet, Adapter(rank=2, alpha=4.0), 1))
    for layer in (one, *others):
        layer.lora_b.zero_()
    layer = unet.get_submodule(one.module.name)
    weight = layer.base_layer.weight
    weight.data.fill_(4 / weight.numel() ** 0.5)
    one.lora_a.zero_()[0, 0] = 0.5
    one.lora_b[0, 0] = size  # times 0.5, times alpha / rank
    assert any_update_shows(unet, [one, *others], "unet", torch.bfloat16) is shows
    assert any_update_shows(unet, [one, *others], "unet", torch.float32)


def test_a_file_that_changes_nothing_though_its_updates_would_show_is_refused() -> None:
    nothing = ExportCheck(deviation=0.0, effect=0.0, output=1.0, noise=0.1, shows=True)
    with pytest.raises(NumericalError, match="changes nothing in unet, although its updates are"):
        check_output(nothing, torch.bfloat16, Path("a.safetensors"))


@pytest.fixture
def exported(demo: DemoPaths, tmp_path: Path) -> tuple[UNet2DConditionModel, list[TrainedLayer]]:
    unet, layers = _trained(demo.model, Adapter(rank=4, alpha=12.0))
    export_diffusers(unet, layers, tmp_path)
    return unet, layers


def _rewrite(
    path: Path, state: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> None:
    with safe_open(path, framework="pt") as file:
        old = file.metadata()
    save_file(state, path, metadata if metadata is not None else old)


def test_a_file_that_lost_its_alpha_is_found_out(
    demo: DemoPaths, tmp_path: Path, exported: tuple[UNet2DConditionModel, list[TrainedLayer]]
) -> None:
    path = tmp_path / "adapter" / FILE
    _rewrite(path, load_file(path), {"format": "pt"})
    with pytest.raises(NumericalError, match=r"scales .* by 1\.0, but it was trained with 3\.0"):
        verify_export(demo.model, [path], *exported)


def test_a_lost_layer_a_changed_weight_and_a_broken_file_are_found_out(
    demo: DemoPaths, tmp_path: Path, exported: tuple[UNet2DConditionModel, list[TrainedLayer]]
) -> None:
    path = tmp_path / "adapter" / FILE
    whole = load_file(path)
    layer = exported[1][5].module.name
    lost = {key: tensor for key, tensor in whole.items() if layer not in key}
    _rewrite(path, lost)
    with pytest.raises(NumericalError, match=layer):
        verify_export(demo.model, [path], *exported)
    key = f"unet.{layer}.lora_B.weight"
    _rewrite(path, whole | {key: whole[key] * 1.001})
    with pytest.raises(NumericalError, match=f"holds weights for {layer}"):
        verify_export(demo.model, [path], *exported)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(NumericalError, match="can't be loaded by diffusers"):
        verify_export(demo.model, [path], *exported)


def test_another_base_model_gives_another_output_and_is_found_out(
    demo: DemoPaths, tmp_path: Path, exported: tuple[UNet2DConditionModel, list[TrainedLayer]]
) -> None:
    shutil.copytree(demo.model, tmp_path / "other")
    path = tmp_path / "other/unet/diffusion_pytorch_model.safetensors"
    save_file({k: t * 1.1 for k, t in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(NumericalError, match="gives a different output from the trained one"):
        verify_export(tmp_path / "other", [tmp_path / "adapter" / FILE], *exported)


def test_weights_that_are_not_finite_are_not_exported(demo: DemoPaths, tmp_path: Path) -> None:
    unet, layers = _trained(demo.model, Adapter(rank=4))
    with torch.no_grad():
        layers[3].lora_b[0, 0] = float("nan")
    with pytest.raises(
        NumericalError, match=rf"{layers[3].module.name}.lora_B.weight holds values"
    ):
        export_diffusers(unet, layers, tmp_path)
    assert not (tmp_path / "adapter").exists()


def test_a_failed_write_leaves_the_earlier_adapter_whole(demo: DemoPaths, tmp_path: Path) -> None:
    """A limit on file size, as a full disk would end the write."""
    import resource
    import signal

    unet, layers = _trained(demo.model, Adapter(rank=4))
    first = export_diffusers(unet, layers, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OutputError, match="can't write to"):
            export_diffusers(unet, layers, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert hashlib.sha256(first.path.read_bytes()).hexdigest() == first.sha256
    assert [file.name for file in first.path.parent.iterdir()] == [FILE]


def test_the_metadata_tells_alpha_and_patterns(demo: DemoPaths, tmp_path: Path) -> None:
    unet, layers = _trained(demo.model, UNEVEN)
    file = export_diffusers(unet, layers, tmp_path)
    with safe_open(file.path, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert metadata["unet.lora_alpha"] == 3
    told = metadata["unet.rank_pattern"]
    assert {re.sub(r"^\(\?#\d\d\)", "", key): told[key] for key in told} == UNEVEN.rank_pattern
    assert metadata["unet.target_modules"] == sorted(metadata["unet.target_modules"])


def test_the_first_of_two_patterns_that_match_still_wins_in_the_file(
    demo: DemoPaths, tmp_path: Path
) -> None:
    """Diffusers sorts the metadata by name; a layer of both patterns would change its alpha."""
    adapter = Adapter(rank=4, alpha_pattern={r"mid_block\..*": 2.0, r"attn1\.to_q": 40.0})
    unet, layers = _trained(demo.model, adapter)
    both = [o.module for o in layers if re.match(r"mid_block.*attn1\.to_q", o.module.name)]
    assert both
    assert {module.alpha for module in both} == {2.0}
    file = export_diffusers(unet, layers, tmp_path)
    [check] = verify_export(demo.model, [file.path], unet, layers)
    assert check.deviation == 0.0
