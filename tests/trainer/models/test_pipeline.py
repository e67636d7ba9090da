"""A base model is frozen SDXL; anything else is refused by name and place."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.models.pipeline import BaseModel, load_base_model, noise_schedule
from kubelora_trainer.models.pipeline_checks import check_pipeline, check_weights, is_of_variant
from kubelora_trainer.utils.errors import ModelError

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"


def _load(folder: Path, variant: str | None = None, vae: Path | None = None) -> BaseModel:
    return load_base_model(folder, variant=variant, vae=vae, dtype=torch.bfloat16, device=CPU)


@pytest.fixture
def copy(demo: DemoPaths, tmp_path: Path) -> Path:
    shutil.copytree(demo.model, tmp_path / "model")
    return tmp_path / "model"


def _edit(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_everything_is_frozen_in_eval_mode_and_the_vae_is_fp32(demo: DemoPaths) -> None:
    base = _load(demo.model)
    for module in (base.unet, base.vae, *base.text_encoders):
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())
    assert {p.dtype for p in base.unet.parameters()} == {torch.bfloat16}
    assert {p.dtype for e in base.text_encoders for p in e.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in base.vae.parameters()} == {torch.float32}


def test_training_noise_follows_the_pipelines_betas(demo: DemoPaths) -> None:
    """SDXL's schedule by hand: squares of 1,000 even steps from sqrt(0.00085) to sqrt(0.012)."""
    schedule = _load(demo.model).noise_scheduler
    roots = [0.00085**0.5 + (0.012**0.5 - 0.00085**0.5) * i / 999 for i in range(1000)]
    product = 1.0
    for index, root in enumerate(roots):
        product *= 1 - root**2
        if index in (0, 499, 999):
            assert float(schedule.alphas_cumprod[index]) == pytest.approx(product, rel=1e-4)


@pytest.mark.parametrize("name", ["StableDiffusionPipeline", "FluxPipeline"])
def test_another_pipeline_is_refused_by_its_name(copy: Path, name: str) -> None:
    _edit(copy / "model_index.json", lambda index: index.update(_class_name=name))
    with pytest.raises(ModelError, match=rf"{copy} holds a {name}, not a StableDiff"):
        _load(copy)


@pytest.mark.parametrize(
    ("listed", "told"),
    [("x", "x"), (["diffusers"], r"\['diffusers'\]"), (None, "nothing"), (["a", 3], "3")],
)
def test_an_index_that_names_another_part_is_refused(copy: Path, listed: object, told: str) -> None:
    _edit(copy / "model_index.json", lambda index: index.update(unet=listed))
    with pytest.raises(ModelError, match=rf"has {told} as its unet; SDXL has UNet2DCond"):
        _load(copy)


def test_a_width_that_is_no_number_is_refused(copy: Path) -> None:
    _edit(copy / "text_encoder/config.json", lambda config: config.update(hidden_size="32"))
    with pytest.raises(ModelError, match="its parts do not match"):
        _load(copy)


def test_a_unet_without_text_time_is_refused(copy: Path) -> None:
    _edit(copy / "unet/config.json", lambda config: config.update(addition_embed_type=None))
    with pytest.raises(ModelError, match="addition_embed_type None; SDXL's is 'text_time'"):
        _load(copy)


def test_text_encoders_of_another_width_are_refused(copy: Path) -> None:
    _edit(copy / "unet/config.json", lambda config: config.update(cross_attention_dim=96))
    with pytest.raises(ModelError, match=r"attends to 96 channels.*32 \+ 32"):
        _load(copy)


def test_missing_and_empty_folders_and_single_files_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/a.txt").write_text("x")
    for name in ("model.safetensors", "model.ckpt", "model.pt", "model.bin"):
        (tmp_path / name).write_bytes(b"x")
    for name, sentence in {
        "none": "does not exist",
        "empty": "is empty",
        "photos": "no model_index.json",
        "model.safetensors": "is a file, but model.uri needs the folder of a pipeline",
        "model.ckpt": "is a pickled checkpoint, which can run code",
        "model.pt": "is a pickled checkpoint",
        "model.bin": "is a pickled checkpoint",
    }.items():
        with pytest.raises(ModelError, match=sentence) as caught:
            check_pipeline(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_a_missing_variant_names_what_is_there(demo: DemoPaths) -> None:
    with pytest.raises(ModelError, match=rf"no weights of variant fp16, only {WEIGHTS}"):
        _load(demo.model, variant="fp16")


def test_a_misspelt_variant_is_answered_with_the_one_that_is_there(copy: Path) -> None:
    unet = copy / "unet"
    (unet / WEIGHTS).rename(unet / WEIGHTS.replace(".safetensors", ".fp16.safetensors"))
    with pytest.raises(ModelError, match=r"see model.variant; did you mean 'fp16'\?$"):
        check_weights(unet, "pf16")


def test_a_variant_is_loaded_from_its_own_files(copy: Path) -> None:
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        for file in (copy / part).glob("*.safetensors"):
            state = {key: tensor.half() for key, tensor in load_file(file).items()}
            save_file(state, file.with_suffix(".fp16.safetensors"), {"format": "pt"})
            file.unlink()
    base = _load(copy, variant="fp16")
    expected = load_file(copy / "unet/diffusion_pytorch_model.fp16.safetensors")["conv_in.weight"]
    assert torch.equal(base.unet.conv_in.weight, expected.bfloat16())


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_a_cut_weight_file_is_named(copy: Path, keep: int) -> None:
    file = copy / "unet" / WEIGHTS
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=rf"{file} is damaged or not a safetensors file"):
        _load(copy)


def test_a_missing_tensor_is_never_left_at_random_values(copy: Path) -> None:
    for part, file, key in (
        ("unet", WEIGHTS, "mid_block.resnets.0.conv1.weight"),
        ("text_encoder", "model.safetensors", "encoder.layers.1.mlp.fc1.weight"),
    ):
        path = copy / part / file
        state = load_file(path)
        whole = next(name for name in state if name.endswith(key))
        kept = {name: tensor for name, tensor in state.items() if name != whole}
        save_file(kept, path, {"format": "pt"})
        with pytest.raises(ModelError, match=rf"{copy / part} lack 1 tensors.*{key}"):
            _load(copy)
        save_file(state, path, {"format": "pt"})


def test_a_tensor_of_another_shape_is_an_error_of_that_folder(copy: Path) -> None:
    path = copy / "unet" / WEIGHTS
    state = load_file(path)
    state["conv_in.weight"] = torch.zeros(8, 4, 3, 3)
    save_file(state, path, {"format": "pt"})
    with pytest.raises(ModelError, match=str(copy / "unet")):
        _load(copy)


def test_pickled_weights_are_refused(copy: Path) -> None:
    (copy / "unet" / WEIGHTS).rename(copy / "unet/diffusion_pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickles"):
        check_weights(copy / "unet", None)


def test_a_missing_shard_is_named(copy: Path) -> None:
    index = {"weight_map": {"conv_in.weight": "diffusion_pytorch_model-00002-of-00002.safetensors"}}
    (copy / "unet" / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"00002-of-00002.safetensors, which is missing"):
        check_weights(copy / "unet", None)


def test_another_vae_takes_the_place_of_the_pipelines_own(
    demo: DemoPaths, full_demo: DemoPaths
) -> None:
    base = _load(demo.model, vae=full_demo.model / "vae")
    expected = load_file(full_demo.model / "vae" / WEIGHTS)["quant_conv.weight"]
    assert torch.equal(base.vae.quant_conv.weight, expected)
    with pytest.raises(ModelError, match="holds UNet2DConditionModel, not an Autoencoder"):
        _load(demo.model, vae=demo.model / "unet")


def test_the_fingerprint_tells_fine_tunes_of_one_architecture_apart(copy: Path) -> None:
    before = _load(copy).fingerprint
    assert _load(copy).fingerprint == before
    path = copy / "unet" / WEIGHTS
    save_file({k: t * 1.01 for k, t in load_file(path).items()}, path, {"format": "pt"})
    assert _load(copy).fingerprint != before


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("model.safetensors", None),
        ("model-00001-of-00002.safetensors", None),
        ("model.fp16.safetensors", "fp16"),
        ("model.fp16-00001-of-00002.safetensors", "fp16"),
        ("model-00001-of-00002.fp16.safetensors", "fp16"),
        ("model.safetensors.index.json", None),
        ("model.safetensors.index.fp16.json", "fp16"),
    ],
)
def test_a_weight_files_variant_is_read_from_its_name(name: str, variant: str | None) -> None:
    for candidate in (None, "fp16", "ema"):
        assert is_of_variant(name, candidate) == (candidate == variant)


def test_zero_terminal_snr_rescales_the_schedule_by_lins_algorithm(demo: DemoPaths) -> None:
    """sqrt(abar_t)' = (sqrt(abar_t) - sqrt(abar_T)) sqrt(abar_1) / (sqrt(abar_1) - sqrt(abar_T))"""
    plain = _load(demo.model).noise_scheduler.alphas_cumprod.double().sqrt()
    base = load_base_model(
        demo.model,
        variant=None,
        vae=None,
        dtype=torch.float32,
        device=CPU,
        prediction="v_prediction",
        zero_terminal_snr=True,
    )
    expected = (plain - plain[-1]) * plain[0] / (plain[0] - plain[-1])
    rescaled = base.noise_scheduler.alphas_cumprod
    assert torch.allclose(rescaled.double().sqrt(), expected, atol=1e-4)
    assert float(rescaled[-1]) == 0.0
    assert base.sampling_scheduler["timestep_spacing"] == "trailing"
    assert base.sampling_scheduler["rescale_betas_zero_snr"] is True


def test_the_jobs_prediction_type_wins_over_the_models(copy: Path) -> None:
    config = copy / "scheduler/scheduler_config.json"
    assert _load(copy).noise_scheduler.config.prediction_type == "epsilon"
    _edit(config, lambda content: content.update(prediction_type="v_prediction"))
    for wanted, found in {
        "auto": "v_prediction",
        "epsilon": "epsilon",
        "v_prediction": "v_prediction",
    }.items():
        schedule = noise_schedule(json.loads(config.read_text()), wanted, False)  # type: ignore[arg-type]
        assert schedule["prediction_type"] == found


def test_zero_terminal_snr_of_a_model_that_predicts_epsilon_is_refused() -> None:
    for config in ({}, {"prediction_type": "epsilon"}):
        with pytest.raises(ModelError, match=r"predicts epsilon: set model\.predictionType"):
            noise_schedule(config, "auto", True)
    with pytest.raises(ModelError, match="predicts 'sample'"):
        noise_schedule({"prediction_type": "sample"}, "auto", False)
