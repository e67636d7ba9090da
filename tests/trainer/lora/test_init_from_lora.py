"""An adapter that starts from a LoRA file computes what the file's own loader computes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.export.verify_unet import probe
from kubelora_trainer.export.writers import Title, export_diffusers, export_kohya
from kubelora_trainer.lora.adapter import AdapterModule, add_adapter, trained_layers
from kubelora_trainer.lora.init_from_lora import warm_start
from kubelora_trainer.models.pipeline import load_unet
from kubelora_trainer.utils.errors import ModelError
from tests.trainer.fixtures.jobs import fill_up_projections
from tests.trainer.integration.test_interruption import arguments, in_this_process

OLD = Adapter(rank=4, alpha=3.0, targets="all", rs_lora=True, alpha_pattern={"to_v": 9.0})


def _unet(model: Path) -> UNet2DConditionModel:
    return load_unet(model, variant=None, dtype=torch.float32, device=torch.device("cpu"))


def _adapted(
    model: Path, adapter: Adapter
) -> tuple[UNet2DConditionModel, tuple[AdapterModule, ...]]:
    unet = _unet(model)
    return unet, add_adapter(unet, adapter, 1)


@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_a_new_adapter_of_another_alpha_computes_what_the_old_one_did(
    full_demo: DemoPaths, tmp_path: Path, form: str
) -> None:
    unet, modules = _adapted(full_demo.model, OLD)
    fill_up_projections(modules)
    layers = trained_layers(modules)
    file = (
        export_diffusers(unet, layers, tmp_path)
        if form == "diffusers"
        else export_kohya(unet.config, layers, tmp_path, Title("old"))
    )
    fresh, new = _adapted(full_demo.model, Adapter(rank=4, alpha=16.0, targets="all"))
    assert warm_start(new, fresh, file.path.parent) == file.path
    for before, after in zip(modules, new, strict=True):
        assert torch.allclose(
            after.scale * after.lora_b.flatten(1) @ after.lora_a.flatten(1),
            before.scale * before.lora_b.flatten(1) @ before.lora_a.flatten(1),
            rtol=1e-5,
            atol=1e-7,
        )
    assert torch.allclose(probe(fresh), probe(unet), atol=2e-5)


def test_a_file_written_by_diffusers_alone_is_taken_with_the_scale_its_loader_gives_it(
    demo: DemoPaths, tmp_path: Path
) -> None:
    """No metadata: the scale is 1, whatever alpha it was trained with."""
    reference = _unet(demo.model)
    reference.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    state = {
        name.replace(".default", ""): torch.randn(tensor.shape) * 0.1
        for name, tensor in reference.named_parameters()
        if "lora_" in name
    }
    StableDiffusionXLPipeline.save_lora_weights(tmp_path, unet_lora_layers=state)
    pipeline = StableDiffusionXLPipeline.from_pretrained(demo.model)
    pipeline.load_lora_weights(tmp_path)
    unet, modules = _adapted(demo.model, Adapter(rank=4, alpha=2.0))
    warm_start(modules, unet, tmp_path)
    assert torch.allclose(probe(unet), probe(pipeline.unet), atol=1e-5)


def test_kohya_keys_in_diffusers_names_are_read_too(demo: DemoPaths, tmp_path: Path) -> None:
    unet, modules = _adapted(demo.model, Adapter(rank=2))
    state = {}
    for module in modules:
        stem = f"lora_unet_{module.name.replace('.', '_')}"
        state[f"{stem}.lora_down.weight"] = module.lora_a.detach() * 2
        state[f"{stem}.lora_up.weight"] = torch.ones_like(module.lora_b)
        state[f"{stem}.alpha"] = torch.tensor(1.0)
    save_file(state, tmp_path / "lora.safetensors")
    doubled = [module.lora_a.detach() * 2 for module in modules]
    warm_start(modules, unet, tmp_path / "lora.safetensors")
    for module, wanted in zip(modules, doubled, strict=True):
        assert torch.equal(module.lora_a, wanted)
        assert torch.equal(module.lora_b, torch.full_like(module.lora_b, 0.5))


@pytest.fixture
def file(demo: DemoPaths, tmp_path: Path) -> Path:
    unet, modules = _adapted(demo.model, Adapter(rank=4))
    return export_kohya(unet.config, trained_layers(modules), tmp_path, Title("old")).path


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        (Adapter(rank=8), "has rank 4 at .*, this job 8: set adapter.rank"),
        (Adapter(rank=4, targets="all_linear"), "lacks .* layers that this job adapts, such as"),
        (Adapter(rank=4, target_patterns=["to_q"]), "holds 24 layers that this job does not adapt"),
    ],
)
def test_other_layers_and_ranks_are_a_sentence(
    demo: DemoPaths, file: Path, adapter: Adapter, sentence: str
) -> None:
    unet, modules = _adapted(demo.model, adapter)
    with pytest.raises(ModelError, match=sentence):
        warm_start(modules, unet, file)


@pytest.mark.parametrize(
    "fault", ["cut", "half", "dora", "pickle", "none", "two", "text", "vector", "alphas", "nan"]
)
def test_files_that_are_no_lora_for_this_model_are_a_sentence(
    demo: DemoPaths, file: Path, fault: str
) -> None:
    state = load_file(file)
    key = min(key for key in state if key.endswith("lora_up.weight"))
    place, sentence = file, ""
    if fault == "cut":
        file.write_bytes(file.read_bytes()[:-8])
        sentence = "can't be read"
    elif fault == "half":
        del state[key]
        sentence = f"missing from one, such as {key}"
    elif fault == "dora":
        state[key.replace("lora_up.weight", "dora_scale")] = torch.ones(1)
        sentence = "is a DoRA"
    elif fault == "pickle":
        place = file.rename(file.with_suffix(".pt"))
        sentence = "is a pickle"
    elif fault == "none":
        file.unlink()
        place, sentence = file.parent, "holds no .safetensors file"
    elif fault == "two":
        save_file(state, file.with_name("other.safetensors"))
        place, sentence = file.parent, "holds 2 .safetensors files; name one"
    elif fault == "text":
        extra = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
        state[f"{extra}.lora_down.weight"] = torch.zeros(4, 32)
        state[f"{extra}.lora_up.weight"] = torch.zeros(128, 4)
        sentence = f"such as {extra}: add text_encoder to adapter.textEncoders"
    elif fault == "vector":
        state[key] = torch.zeros(3)
        sentence = "is not a pair of matrices"
    elif fault == "alphas":
        state[key.replace("lora_up.weight", "alpha")] = torch.zeros(2)
        sentence = "can't be read"
    else:
        state[key][0, 0] = float("nan")
        sentence = "NaN or infinite values"
    if fault in ("half", "dora", "text", "vector", "alphas", "nan"):
        save_file(state, file)
    unet, modules = _adapted(demo.model, Adapter(rank=4))
    with pytest.raises(ModelError, match=sentence):
        warm_start(modules, unet, place)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ("{", "can't be read"),
        ("[1]", "is not a JSON object"),
        ('{"unet.lora_alpha": "x"}', "can't be read"),
        ('{"unet.lora_alpha": [1]}', "can't be read"),
        (
            '{"unet.lora_alpha": 2, "unet.alpha_pattern": [1]}',
            "alpha_pattern .* is not a JSON object",
        ),
        ('{"unet.lora_alpha": 2, "unet.alpha_pattern": {"(": 1}}', "can't be read"),
    ],
)
def test_metadata_that_does_not_tell_the_scale_is_a_sentence(
    demo: DemoPaths, tmp_path: Path, metadata: str, sentence: str
) -> None:
    unet, modules = _adapted(demo.model, Adapter(rank=4))
    path = export_diffusers(unet, trained_layers(modules), tmp_path).path
    save_file(load_file(path), path, {"lora_adapter_metadata": metadata})
    with pytest.raises(ModelError, match=sentence):
        warm_start(modules, unet, path)


def test_an_alpha_of_0_means_the_rank_as_in_kohyas_own_reader(demo: DemoPaths, file: Path) -> None:
    """sd-scripts takes the rank where alpha is None or 0, so the scale is 1 and not 0."""
    state = load_file(file)
    for key in state:
        if key.endswith(".alpha"):
            state[key] = torch.tensor(0.0)
        if key.endswith("lora_up.weight"):
            state[key] = torch.full_like(state[key], 0.5)
    save_file(state, file)
    unet, modules = _adapted(demo.model, Adapter(rank=4, alpha=2))
    warm_start(modules, unet, file)
    for module in modules:  # twice 0.5, for the job's own scale is 2 / 4
        assert torch.equal(module.lora_b, torch.ones_like(module.lora_b))


def test_layers_of_text_encoders_name_the_field_that_takes_them_in_or_out(
    demo: DemoPaths, file: Path
) -> None:
    unet, modules = _adapted(demo.model, Adapter(rank=4))
    of_text = [replace(modules[0], part="text_encoder_2", name="encoder.layers.0.mlp.fc1")]
    with pytest.raises(ModelError, match=r"remove text_encoder_2 from adapter\.textEnc"):
        warm_start([*modules, *of_text], unet, file)


def test_a_run_starts_from_the_adapter_that_another_run_made(
    tmp_path: Path, demo: DemoPaths
) -> None:
    """One step at a tiny rate: the second run's file is the first one's, almost."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    short = ["--set", "spec.training.steps=3"]
    first = in_this_process([*arguments(tmp_path / "one", demo), *short])
    assert first.exit_code == 0, first.output
    made = tmp_path / "one" / "out" / "adapter" / "pytorch_lora_weights.safetensors"
    second = in_this_process(
        [
            *arguments(tmp_path / "two", demo),
            *("--set", f"spec.adapter.from={made}"),
            *("--set", "spec.training.steps=1", "--set", "spec.training.learningRate=1.0e-9"),
        ]
    )
    assert second.exit_code == 0, second.output
    assert f"adapter: initialised from {made}" in second.output
    assert "a fresh adapter" not in second.output
    before = load_file(made)
    after = load_file(tmp_path / "two" / "out" / "adapter" / "pytorch_lora_weights.safetensors")
    assert all(torch.allclose(after[key], before[key], atol=1e-7) for key in before)
    assert any(tensor.any() for key, tensor in before.items() if "lora_B" in key)
