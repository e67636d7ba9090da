"""A DoRA's file: what diffusers makes of it, what a run starts from, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from kubelora_api.spec import Adapter
from kubelora_api.types import TextEncoder
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.export.verify_text_encoders import probe_text, verify_text_encoders
from kubelora_trainer.export.verify_unet import probe, verify_export
from kubelora_trainer.export.writers import Title, export_diffusers, export_kohya
from kubelora_trainer.lora.adapter import AdapterModule, TrainedLayer, trained_layers
from kubelora_trainer.lora.init_from_lora import warm_start
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.models.sgm_keys import Part
from kubelora_trainer.training.setup import add_adapters
from kubelora_trainer.utils.errors import ConfigurationError, NumericalError
from tests.trainer.fixtures.jobs import fill_up_projections, open_base
from tests.trainer.integration.test_interruption import arguments, in_this_process

BF16, FP32 = torch.bfloat16, torch.float32
BOTH: list[TextEncoder] = ["text_encoder", "text_encoder_2"]
MIXED = Adapter(
    rank=4,
    alpha=3.0,
    targets="all",
    dora=True,
    text_encoders=BOTH,
    rs_lora=True,
    rank_pattern={"to_q": 2},
    alpha_pattern={"conv1": 9.0},
)
DORA = Adapter(rank=4, targets="all", dora=True)
FILE = "pytorch_lora_weights.safetensors"


def trained(
    model: Path, adapter: Adapter = MIXED, dtype: torch.dtype = FP32
) -> tuple[BaseModel, tuple[AdapterModule, ...], list[TrainedLayer]]:
    """A DoRA with numbers in lora_B, and magnitudes that have moved by some per cent."""
    base = open_base(model, dtype)
    modules = add_adapters(base, adapter, 1)
    fill_up_projections(modules)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in modules:
            if module.magnitude is not None:
                drawn = torch.randn(module.magnitude.shape, generator=generator)
                module.magnitude.mul_(1 + 0.05 * drawn)
    layers = trained_layers(modules)
    layers = [
        TrainedLayer(
            one.module,
            one.lora_a.clone(),
            one.lora_b.clone(),
            None if one.magnitude is None else one.magnitude.clone(),
        )
        for one in layers
    ]
    for module in modules:
        for parameter in (module.lora_a, module.lora_b):
            parameter.data = parameter.data.to(dtype)
    return base, modules, layers


def encoders_of(base: BaseModel) -> dict[Part, nn.Module]:
    first, second = base.text_encoders
    return {"text_encoder": first, "text_encoder_2": second}


@pytest.mark.parametrize("layout", ["demo", "full_demo"])
def test_the_pipelines_own_loader_gives_the_trained_output(
    layout: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """On SDXL's topology, with convolutions, both text encoders, mixed ranks and alphas."""
    paths: DemoPaths = request.getfixturevalue(layout)
    base, _, layers = trained(paths.model)
    plain = open_base(paths.model)
    file = export_diffusers(base.unet, layers, tmp_path, encoders=encoders_of(base))
    pipeline = StableDiffusionXLPipeline.from_pretrained(paths.model)
    pipeline.load_lora_weights(tmp_path / "adapter")
    pairs = [(probe(pipeline.unet), probe(base.unet.eval()), probe(plain.unet))]
    theirs = (pipeline.text_encoder, pipeline.text_encoder_2)
    for loaded, own, without in zip(theirs, base.text_encoders, plain.text_encoders, strict=True):
        pairs.append((probe_text(loaded), probe_text(own.eval()), probe_text(without)))
    for loaded_output, output, before in pairs:
        effect = float((output - before).norm())
        assert effect > 0.1 * float(before.norm())
        assert float((loaded_output - output).norm()) < 1e-4 * effect
    [check] = verify_export(paths.model, [file.path], base.unet, layers)
    texts = verify_text_encoders(
        paths.model, [file.path], encoders_of(base), layers, unet_config=base.unet.config
    )
    assert max(c.deviation / c.effect for c in [check, *texts]) < 1e-4


def test_magnitudes_are_fp32_in_the_file_whatever_its_type_and_the_metadata_says_dora(
    demo: DemoPaths, tmp_path: Path
) -> None:
    """In bf16 they would be off by as much as a short training moves them."""
    base, _, layers = trained(demo.model)
    encoders = encoders_of(base)
    file = export_diffusers(base.unet, layers, tmp_path, dtype=BF16, encoders=encoders)
    state = load_file(file.path)
    magnitudes = {key: value for key, value in state.items() if "lora_magnitude_vector" in key}
    assert len(magnitudes) == len(layers) == len(state) / 3
    assert {tensor.dtype for tensor in magnitudes.values()} == {FP32}
    assert {t.dtype for k, t in state.items() if k not in magnitudes} == {BF16}
    for one in layers:
        if one.module.part == "unet":
            written = magnitudes[f"unet.{one.module.name}.lora_magnitude_vector.weight"]
            assert one.magnitude is not None
            assert torch.equal(written, one.magnitude)
    with safe_open(file.path, framework="pt") as opened:
        metadata = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert all(metadata[f"{part}.use_dora"] for part in ("unet", *BOTH))


def test_the_gate_allows_what_a_readers_norms_in_bf16_do_and_no_more(
    demo: DemoPaths, tmp_path: Path
) -> None:
    base, _, layers = trained(demo.model, dtype=BF16)
    encoders = encoders_of(base)
    file = export_diffusers(base.unet, layers, tmp_path, dtype=BF16, encoders=encoders)
    given = (demo.model, [file.path], base.unet, layers)
    [check] = verify_export(*given, dtype=BF16)
    assert 0 < check.deviation < check.noise * 1.5
    _scaled(file.path, "conv_in.lora_magnitude_vector", 1.05)
    with pytest.raises(NumericalError, match="holds magnitudes for conv_in"):
        verify_export(*given, dtype=BF16)


def _scaled(path: Path, part: str, factor: float) -> None:
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    state = load_file(path)
    changed = {key: t * factor if part in key else t for key, t in state.items()}
    assert any(part in key for key in state)
    save_file(changed, path, metadata)


def test_a_changed_magnitude_is_found_out(demo: DemoPaths, tmp_path: Path) -> None:
    base, _, layers = trained(demo.model)
    file = export_diffusers(base.unet, layers, tmp_path, encoders=encoders_of(base)).path
    _scaled(file, "mid_block.attentions.0.proj_in.lora_magnitude_vector", 1.00001)
    with pytest.raises(NumericalError, match=r"holds magnitudes for mid_block\.attentions\.0"):
        verify_export(demo.model, [file], base.unet, layers)


def test_a_dora_starts_from_its_own_kind_of_file(demo: DemoPaths, tmp_path: Path) -> None:
    """Another alpha is taken up by lora_B; magnitudes are the file's."""
    base, _, layers = trained(demo.model)
    file = export_diffusers(base.unet, layers, tmp_path, encoders=encoders_of(base)).path
    fresh = open_base(demo.model)
    modules = add_adapters(fresh, MIXED.model_copy(update={"alpha": 16.0}), 2)
    assert warm_start(modules, fresh.unet, tmp_path / "adapter") == file
    assert torch.allclose(probe(fresh.unet), probe(base.unet.eval()), atol=2e-5)
    for new, old in zip(fresh.text_encoders, base.text_encoders, strict=True):
        assert torch.allclose(probe_text(new.eval()), probe_text(old.eval()), atol=2e-5)


def test_the_key_that_peft_itself_writes_is_read_too(demo: DemoPaths, tmp_path: Path) -> None:
    base, _, layers = trained(demo.model, Adapter(rank=4, dora=True))
    file = export_diffusers(base.unet, layers, tmp_path).path
    state = {k.replace("_vector.weight", "_vector"): t for k, t in load_file(file).items()}
    assert not any("_vector.weight" in key for key in state)
    save_file(state, file)
    fresh = open_base(demo.model)
    modules = add_adapters(fresh, Adapter(rank=4, dora=True), 2)
    warm_start(modules, fresh.unet, file)
    assert torch.allclose(probe(fresh.unet), probe(base.unet.eval()), atol=2e-5)


@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_a_dora_starts_from_a_plain_lora_with_the_norms_of_its_weights(
    demo: DemoPaths, tmp_path: Path, form: str
) -> None:
    plain = Adapter(rank=4, alpha=6.0, targets="all")
    base, _, layers = trained(demo.model, plain)
    file = (
        export_diffusers(base.unet, layers, tmp_path)
        if form == "diffusers"
        else export_kohya(base.unet.config, layers, tmp_path, Title("old"))
    )
    fresh = open_base(demo.model)
    modules = add_adapters(fresh, DORA, 2)
    warm_start(modules, fresh.unet, file.path)
    effect = float((probe(base.unet.eval()) - probe(open_base(demo.model).unet)).norm())
    assert float((probe(fresh.unet.eval()) - probe(base.unet)).norm()) < 1e-4 * effect
    untouched = add_adapters(open_base(demo.model), DORA, 2)
    for module, other in zip(modules, untouched, strict=True):
        assert module.magnitude is not None
        assert other.magnitude is not None
        assert not torch.equal(module.magnitude, other.magnitude)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("plain job", "a plain LoRA cannot hold its magnitudes: set adapter.dora"),
        (
            "kohya",
            "is a DoRA in kohya's format, and programs disagree on what its dora_scale means",
        ),
        ("shape", r"has magnitudes of shape \(2,\) at .*, this model \(\d+,\)"),
        ("nan", "NaN or infinite values"),
    ],
)
def test_files_that_a_run_can_not_start_from_are_a_sentence(
    demo: DemoPaths, tmp_path: Path, fault: str, sentence: str
) -> None:
    base, _, layers = trained(demo.model, Adapter(rank=4, dora=True))
    file = export_diffusers(base.unet, layers, tmp_path).path
    state = load_file(file)
    key = min(key for key in state if "lora_magnitude_vector" in key)
    if fault == "kohya":
        state[key.replace("lora_magnitude_vector.weight", "dora_scale")] = state.pop(key)
    elif fault == "shape":
        state[key] = torch.ones(2)
    elif fault == "nan":
        state[key][0] = float("nan")
    save_file(state, file)
    fresh = open_base(demo.model)
    modules = add_adapters(fresh, Adapter(rank=4, dora=fault != "plain job"), 2)
    with pytest.raises(ConfigurationError, match=sentence):
        warm_start(modules, fresh.unet, file)


def test_a_run_trains_magnitudes_and_says_at_its_start_why_there_is_no_kohya_file(
    tmp_path: Path, demo: DemoPaths
) -> None:
    given = [
        *arguments(tmp_path, demo),
        *("--set", "spec.adapter={rank: 4, dora: true}", "--set", "spec.training.steps=4"),
        *("--set", "spec.training.learningRate=1.0e-3"),
    ]
    done = in_this_process(given)
    assert done.exit_code == 0, done.output
    began = done.output.index("step=1/")
    assert "written only in diffusers' format" in done.output[:began]
    assert "magnitudes fp32" in done.output[:began]
    assert [p.name for p in (tmp_path / "out" / "adapter").iterdir()] == [FILE]
    state = load_file(tmp_path / "out" / "adapter" / FILE)
    base = open_base(demo.model)
    modules = add_adapters(base, Adapter(rank=4, dora=True), 1)
    for module in modules:
        began_as = module.magnitude
        assert began_as is not None
        ended_as = state[f"unet.{module.name}.lora_magnitude_vector.weight"]
        moved = (ended_as - began_as.detach()).abs()
        assert 1e-3 < float(moved.max()) < 5e-3  # Adam: at most about the rate in each of 4 steps
