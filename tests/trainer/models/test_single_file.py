"""Single-file checkpoints: the very weights of the pipeline, or a refusal by name.

The file is written by a key map of its own, from diffusers' names to those of the original code.
"""

import json
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.models.pipeline import load_base_model
from kubelora_trainer.models.pipeline_checks import check_pipeline
from kubelora_trainer.models.sgm_keys import sgm_blocks, sgm_name
from kubelora_trainer.models.single_file import single_file_of, unpack
from kubelora_trainer.storage.downloads import wanted_files
from kubelora_trainer.utils.errors import ModelError
from tests.trainer.fixtures.hub_server import Hub, download_from
from tests.trainer.integration.test_interruption import adapter, arguments, in_this_process

WIDTH_2 = 48
"""Of the second text encoder: the loader tells SDXL's two by their widths."""


@pytest.fixture(scope="module")
def pipeline(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's pipeline with text encoders of two widths, as SDXL's are."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    shutil.copytree(demo.model, folder)
    torch.manual_seed(3)
    old = CLIPTextConfig.from_pretrained(folder / "text_encoder_2").to_dict()
    text = CLIPTextConfig(**{**old, "hidden_size": WIDTH_2, "intermediate_size": 96})
    CLIPTextModelWithProjection(text).save_pretrained(folder / "text_encoder_2")
    unet = UNet2DConditionModel.load_config(folder / "unet")
    unet |= {"cross_attention_dim": 32 + WIDTH_2}
    UNet2DConditionModel.from_config(unet).save_pretrained(folder / "unet")
    check_pipeline(folder)
    return folder


@pytest.fixture(scope="module")
def tensors(pipeline: Path) -> dict[str, Tensor]:
    """The pipeline's weights under the original names."""
    return {
        **_original_unet(pipeline / "unet"),
        **_original_vae(pipeline / "vae"),
        **_original_clip(load_file(pipeline / "text_encoder/model.safetensors")),
        **_original_open_clip(load_file(pipeline / "text_encoder_2/model.safetensors")),
    }


@pytest.fixture(scope="module")
def checkpoint(tensors: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("single") / "model.safetensors"
    save_file(tensors, path)
    return path


def _original_unet(folder: Path) -> dict[str, Tensor]:
    blocks = sgm_blocks(json.loads((folder / "config.json").read_text()))
    state = load_file(folder / "diffusion_pytorch_model.safetensors")
    renamed = {}
    for name, tensor in state.items():
        layer, _, kind = name.rpartition(".")
        renamed[f"model.diffusion_model.{sgm_name(layer, blocks)}.{kind}"] = tensor
    return renamed


def _original_vae(folder: Path) -> dict[str, Tensor]:
    levels = len(AutoencoderKL.load_config(folder)["block_out_channels"])
    renamed = {}
    for name, tensor in load_file(folder / "diffusion_pytorch_model.safetensors").items():
        new = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", name)
        new = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", new)
        new = re.sub(r"up_blocks\.(\d+)\.", lambda m: f"up.{levels - 1 - int(m[1])}.", new)
        new = re.sub(r"(up\.\d+)\.resnets\.(\d+)", r"\1.block.\2", new)
        new = re.sub(r"(up\.\d+)\.upsamplers\.0", r"\1.upsample", new)
        new = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", new)
        if "mid_block.attentions.0" in new:
            new = new.replace("mid_block.attentions.0", "mid.attn_1")
            for ours, theirs in (
                ("group_norm", "norm"),
                ("to_q", "q"),
                ("to_k", "k"),
                ("to_v", "v"),
                ("to_out.0", "proj_out"),
            ):
                new = new.replace(f".{ours}.", f".{theirs}.")
            if tensor.ndim == 2:
                tensor = tensor[:, :, None, None].contiguous()
        new = new.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        renamed[f"first_stage_model.{new}"] = tensor
    return renamed


def _original_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    start = "conditioner.embedders.0.transformer.text_model."
    return {start + name.removeprefix("text_model."): tensor for name, tensor in state.items()}


def _original_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    bare = {name.removeprefix("text_model."): tensor for name, tensor in state.items()}
    renamed = {
        "token_embedding.weight": bare.pop("embeddings.token_embedding.weight"),
        "positional_embedding": bare.pop("embeddings.position_embedding.weight"),
        "ln_final.weight": bare.pop("final_layer_norm.weight"),
        "ln_final.bias": bare.pop("final_layer_norm.bias"),
        "text_projection": bare.pop("text_projection.weight").T.contiguous(),
        "logit_scale": torch.tensor(4.6),
    }
    for name in [n for n in bare if ".self_attn.q_proj." in n]:
        kind = name.rpartition(".")[2]
        parts = [bare.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        layer = name.split(".")[2]
        renamed[f"transformer.resblocks.{layer}.attn.in_proj_{kind}"] = torch.cat(parts)
    inside = {
        "self_attn.out_proj": "attn.out_proj",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    for name, tensor in bare.items():
        _, _, layer, *middle, kind = name.split(".")
        if name.startswith("encoder.layers."):
            renamed[f"transformer.resblocks.{layer}.{inside['.'.join(middle)]}.{kind}"] = tensor
    return {f"conditioner.embedders.1.model.{name}": tensor for name, tensor in renamed.items()}


def test_every_weight_is_that_of_the_pipeline_and_it_is_unpacked_once(
    pipeline: Path, checkpoint: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    folder = unpack(checkpoint, pipeline, tmp_path, said.append)
    assert unpack(checkpoint, pipeline, tmp_path, said.append) == folder
    assert len(said) == 1
    for part in ("unet", "vae", "text_encoder", "text_encoder_2"):
        [expected] = (pipeline / part).glob("*.safetensors")
        [found] = (folder / part).glob("*.safetensors")
        wanted, got = load_file(expected), load_file(found)
        assert wanted.keys() == got.keys()
        assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [folder.name]


def test_a_run_on_the_file_here_or_on_the_hub_gives_the_adapter_that_the_folder_gives(
    pipeline: Path,
    checkpoint: Path,
    demo: DemoPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub = Hub()
    hub.files[("org/tunes", "v2")] = {"fine/model.safetensors": checkpoint.read_bytes()}
    download_from(hub, tmp_path / "hub", monkeypatch)
    adapters = []
    for name, place in (
        ("folder", pipeline),
        ("file", checkpoint),
        ("hub", "hf://org/tunes/fine/model.safetensors@v2"),
    ):
        (tmp_path / name).mkdir()
        given = arguments(tmp_path / name, DemoPaths(pipeline, demo.photos))
        given += ["--set", "spec.training.steps=2", "--set", f"spec.model.uri={place}"]
        given += ["--set", f"spec.model.config={pipeline}"] if name != "folder" else []
        done = in_this_process(given)
        assert done.exit_code == 0, done.output
        adapters.append(adapter(tmp_path / name))
    hub.shutdown()
    hub.server_close()
    assert adapters[0] == adapters[1] == adapters[2]


def test_a_checkpoint_marked_as_predicting_v_is_trained_so(
    pipeline: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    marks = {"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])}
    save_file({**tensors, **marks}, tmp_path / "v.safetensors")
    folder = unpack(tmp_path / "v.safetensors", pipeline, tmp_path / "cache", lambda _: None)
    base = load_base_model(
        folder, variant=None, vae=None, dtype=torch.float32, device=torch.device("cpu")
    )
    assert base.noise_scheduler.config.prediction_type == "v_prediction"
    assert float(base.noise_scheduler.alphas_cumprod[-1]) == 0.0


def test_fp16_weights_stay_fp16(pipeline: Path, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save_file({name: tensor.half() for name, tensor in tensors.items()}, tmp_path / "h.safetensors")
    folder = unpack(tmp_path / "h.safetensors", pipeline, tmp_path / "cache", lambda _: None)
    state = load_file(folder / "unet/diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["cond_stage_model.transformer.text_model.x"], "a Stable Diffusion 1 checkpoint"),
        (["cond_stage_model.model.token_embedding.weight"], "a Stable Diffusion 2 checkpoint"),
        (["model.diffusion_model.joint_blocks.0.x_block.w"], "a Stable Diffusion 3 checkpoint"),
        (["double_blocks.0.img_attn.qkv.weight"], "a Flux checkpoint"),
        (["model.diffusion_model.double_blocks.0.img_attn.qkv.weight"], "a Flux checkpoint"),
        (["conditioner.embedders.0.model.text_projection"], "an SDXL refiner"),
        (["control_model.time_embed.0.weight"], "a ControlNet"),
        (["lora_unet_mid_block.alpha"], "a LoRA, which goes to adapter.from"),
        (["something.weight"], "not a checkpoint in SDXL's original layout"),
        (["first_stage_model.a", "conditioner.embedders.1.model.b"], "holds no UNet, no first"),
    ],
)
def test_what_is_not_sdxl_is_refused_by_name(
    pipeline: Path, tmp_path: Path, names: list[str], found: str
) -> None:
    file = tmp_path / "other.safetensors"
    save_file({name: torch.zeros(1) for name in names}, file)
    with pytest.raises(ModelError, match=f"{file} .*{found}"):
        unpack(file, pipeline, tmp_path, lambda _: None)


def test_an_inpainting_unet_is_refused(
    pipeline: Path, tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    first = {"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(32, 9, 3, 3)}
    save_file({**tensors, **first}, tmp_path / "paint.safetensors")
    with pytest.raises(ModelError, match="9 input channels"):
        unpack(tmp_path / "paint.safetensors", pipeline, tmp_path, lambda _: None)


def test_missing_tensors_and_foreign_configurations_are_told(
    pipeline: Path,
    full_demo: DemoPaths,
    checkpoint: Path,
    tensors: dict[str, Tensor],
    tmp_path: Path,
) -> None:
    gone = "model.diffusion_model.middle_block.0.in_layers.2.weight"
    kept = {name: tensor for name, tensor in tensors.items() if name != gone}
    save_file(kept, tmp_path / "cut.safetensors")
    with pytest.raises(ModelError, match=r"cut.safetensors lacks tensors that"):
        unpack(tmp_path / "cut.safetensors", pipeline, tmp_path / "cache", lambda _: None)
    with pytest.raises(ModelError, match=r"with the configurations of|lacks"):
        unpack(checkpoint, full_demo.model, tmp_path / "cache", lambda _: None)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_pickle_under_another_name_is_never_loaded(pipeline: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (trap,)

    file = tmp_path / "model.safetensors"
    file.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ModelError, match="damaged or not a safetensors file"):
        unpack(file, pipeline, tmp_path, lambda _: None)
    assert not trap.exists()


def test_a_file_is_judged_before_anything_is_fetched_for_it(
    tmp_path: Path, demo: DemoPaths
) -> None:
    (tmp_path / "photo.png").write_bytes(b"\x89PNG")
    given = [*arguments(tmp_path, demo), "--set", f"spec.model.uri={tmp_path / 'photo.png'}"]
    ended = in_this_process([*given, "--set", "spec.model.config=hf://no-such-org/no-such-repo"])
    assert ended.exit_code == 2
    assert "photo.png is damaged or not a safetensors file" in ended.output


def test_a_place_is_a_single_file_or_holds_one_alone(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.ckpt"):
        (tmp_path / name).write_bytes(b"x")
    file = tmp_path / "model.safetensors"
    assert single_file_of(file) == single_file_of(tmp_path) == file
    assert single_file_of(tmp_path / "model.ckpt") is None
    (tmp_path / "other.safetensors").write_bytes(b"x")
    assert single_file_of(tmp_path) is None


def test_of_a_lender_only_configurations_are_fetched() -> None:
    patterns = wanted_files("configuration", None)
    assert patterns is not None
    assert "unet/config.json" in patterns
    assert not any(pattern.endswith(".safetensors") for pattern in patterns)
