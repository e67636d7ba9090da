"""Text encoders with an adapter: which layers, gradients through them, files that load."""

import re
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file
from torch import nn

from kubelora_api.spec import Adapter
from kubelora_api.types import TextEncoder
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.dataset import build_dataset
from kubelora_trainer.export.verify_text_encoders import probe_text, verify_text_encoders
from kubelora_trainer.export.verify_unet import probe, verify_export
from kubelora_trainer.export.writers import Title, export_diffusers, export_kohya
from kubelora_trainer.lora.adapter import AdapterModule, TrainedLayer, trained_layers
from kubelora_trainer.lora.init_from_lora import warm_start
from kubelora_trainer.lora.kohya_format import read_kohya
from kubelora_trainer.models.pipeline import BaseModel, load_text_encoder
from kubelora_trainer.models.sgm_keys import Part
from kubelora_trainer.objective.embedding_cache import build_cache
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from kubelora_trainer.objective.text_embeddings import encode_text
from kubelora_trainer.training.setup import add_adapters
from kubelora_trainer.utils.errors import ConfigurationError, NumericalError
from tests.trainer.fixtures.jobs import fill_up_projections, job_spec, objective_on, open_base
from tests.trainer.integration.test_interruption import arguments, in_this_process

BOTH: list[TextEncoder] = ["text_encoder", "text_encoder_2"]
MIXED = Adapter(
    rank=4,
    alpha=3.0,
    text_encoders=["text_encoder", "text_encoder_2"],
    targets="all_linear",
    rank_pattern={r"text_encoder_2\..*fc1": 6, "v_proj": 2, r"attn1\.to_q": 5},
    alpha_pattern={r"text_encoder\..*q_proj": 8.0},
)


def adapted(model: Path, adapter: Adapter) -> tuple[BaseModel, tuple[AdapterModule, ...]]:
    base = open_base(model)
    return base, add_adapters(base, adapter, 1)


def text_models(base: BaseModel) -> dict[Part, nn.Module]:
    return {"text_encoder": base.text_encoders[0], "text_encoder_2": base.text_encoders[1]}


def test_the_layers_are_those_that_sdxls_conditions_come_from(demo: DemoPaths) -> None:
    """Two layers of four projections each; of the first encoder the last layer is not used."""
    base, modules = adapted(demo.model, Adapter(rank=2, text_encoders=BOTH))
    names = [module.full_name for module in modules if module.part != "unet"]
    projections = [f"self_attn.{p}_proj" for p in ("k", "v", "q", "out")]
    count = len(base.text_encoders[0].encoder.layers)
    wanted = [f"text_encoder.encoder.layers.{n}.{p}" for n in range(count - 1) for p in projections]
    second = [
        f"text_encoder_2.{name.removeprefix('text_model.').removesuffix('.base_layer')}"
        for name, _ in base.text_encoders[1].named_modules()
        if name.endswith("base_layer")
    ]
    assert sorted(n for n in names if n.startswith("text_encoder.")) == sorted(wanted)
    assert sorted(n for n in names if n.startswith("text_encoder_2.")) == sorted(second)
    assert len(second) == 4 * count
    assert {m.group_block for m in modules if m.part != "unet"} == set(BOTH)


def test_feed_forward_is_adapted_with_wider_targets_and_one_encoder_alone_can_be(
    demo: DemoPaths,
) -> None:
    _, modules = adapted(
        demo.model,
        Adapter(rank=2, text_encoders=["text_encoder_2"], targets="attention+feed_forward"),
    )
    ends = {m.name.rpartition(".")[2] for m in modules if m.part == "text_encoder_2"}
    assert ends == {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}
    assert not any(module.part == "text_encoder" for module in modules)


def test_patterns_mean_full_names_and_may_match_text_encoders_alone(demo: DemoPaths) -> None:
    _, modules = adapted(demo.model, MIXED)
    for module in modules:
        rank, alpha = 4, 3.0
        if re.search(r"^text_encoder_2\..*fc1$", module.full_name):
            rank = 6
        elif module.full_name.endswith("v_proj"):
            rank = 2
        elif module.full_name.endswith("attn1.to_q"):
            rank = 5
        if re.search(r"^text_encoder\..*q_proj$", module.full_name):
            alpha = 8.0
        assert module.rank == rank, module.full_name
        assert module.alpha == pytest.approx(alpha), module.full_name
    with pytest.raises(ConfigurationError, match="rankPattern"):
        adapted(demo.model, Adapter(rank_pattern={r"text_encoder\..*": 2}))


def test_a_fresh_adapter_changes_no_text(demo: DemoPaths) -> None:
    plain = encode_text(open_base(demo.model), "a cat")
    fresh = encode_text(adapted(demo.model, MIXED)[0], "a cat")
    assert all(torch.equal(a, b) for a, b in zip(plain, fresh, strict=True))


def test_every_factor_gets_the_gradient_that_finite_differences_give(demo: DemoPaths) -> None:
    """The loss's slope along each gradient, in fp32, through encoder and UNet."""
    base, modules = adapted(demo.model, Adapter(rank=2, text_encoders=BOTH))
    fill_up_projections(modules, 0.02)
    spec = job_spec()
    spec = spec.model_copy(update={"adapter": Adapter(rank=2, text_encoders=BOTH)})
    objective = objective_on(base, demo, spec)
    objective(0).loss_sum.backward()
    for part in BOTH:
        own = [p for m in modules if m.part == part for p in (m.lora_a, m.lora_b)]
        assert all(p.grad is not None and p.grad.any() for p in own)
        slope = float(sum((p.grad.double() ** 2).sum() for p in own if p.grad is not None)) ** 0.5
        step, ends = 1e-2 / slope, []
        for sign in (1, -1):
            with torch.no_grad():
                for p in own:
                    p.add_(p.grad, alpha=sign * step / slope)  # type: ignore[arg-type]
                ends.append(float(objective(0).loss_sum.double()))
                for p in own:
                    p.sub_(p.grad, alpha=sign * step / slope)  # type: ignore[arg-type]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=0.05)
    objective.close()


def test_recomputing_the_unet_gives_text_encoders_the_same_gradients(demo: DemoPaths) -> None:
    """Captions of several lengths, a dropped one among them, in micro-batches of three."""
    gradients, losses = [], []
    for recomputed in (False, True):
        base, modules = adapted(demo.model, Adapter(rank=2, text_encoders=BOTH, dropout=0.2))
        fill_up_projections(modules, 0.02)
        spec = job_spec(
            {"batchSize": 3, "gradientCheckpointing": recomputed}, {"captionDropout": 0.3}
        )
        spec = spec.model_copy(update={"adapter": Adapter(rank=2, text_encoders=BOTH)})
        objective = objective_on(base, demo, spec)
        for micro_step in range(3):
            loss = objective(micro_step).loss_sum
            loss.backward()
            losses.append(loss.detach())
        gradients.append([p.grad for m in modules for p in (m.lora_a, m.lora_b)])
        objective.close()
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))
    for plain, again in zip(*gradients, strict=True):
        assert plain is not None
        assert plain.any()
        assert torch.equal(plain, again)


def test_text_is_encoded_anew_each_time_and_never_cached(demo: DemoPaths, tmp_path: Path) -> None:
    base, modules = adapted(demo.model, Adapter(rank=2, text_encoders=BOTH))
    spec = job_spec(dataset={"crop": "center"})
    spec = spec.model_copy(update={"adapter": Adapter(rank=2, text_encoders=BOTH)})
    data = build_dataset(demo.photos, spec.dataset)
    said: list[str] = []
    cache = build_cache(tmp_path, spec, base, data, said.append)
    assert cache.text is None
    assert cache.latents is not None
    assert any(
        "text embeddings are not cached because the text encoders are" in line for line in said
    )
    objective = SdxlObjective(base, data, spec, cache)
    before = objective.batch(0).text.detach()
    fill_up_projections([m for m in modules if m.part != "unet"], 0.2)
    assert not torch.equal(objective.batch(0).text, before)
    objective.close()


@pytest.fixture
def exported(demo: DemoPaths, tmp_path: Path) -> tuple[BaseModel, list[TrainedLayer], list[Path]]:
    base, modules = adapted(demo.model, MIXED)
    fill_up_projections(modules, 0.2)
    layers = trained_layers(modules)
    files = [
        export_diffusers(base.unet, layers, tmp_path, encoders=text_models(base)).path,
        export_kohya(base.unet.config, layers, tmp_path, Title("bottles")).path,
    ]
    return base, layers, files


def test_both_files_give_the_trained_text_and_the_trained_answer(
    demo: DemoPaths, exported: tuple[BaseModel, list[TrainedLayer], list[Path]]
) -> None:
    base, layers, files = exported
    verify_export(demo.model, files, base.unet, layers)
    checks = verify_text_encoders(
        demo.model, files, text_models(base), layers, unet_config=base.unet.config
    )
    assert len(checks) == 4
    for check in checks:
        assert check.effect > 0.01 * check.output
        assert check.deviation <= 1e-4 * check.effect


@pytest.mark.parametrize("which", [0, 1])
def test_a_user_loads_either_file_with_the_pipelines_own_call(
    demo: DemoPaths, exported: tuple[BaseModel, list[TrainedLayer], list[Path]], which: int
) -> None:
    base, _, files = exported
    pipeline = StableDiffusionXLPipeline.from_pretrained(demo.model)
    pipeline.load_lora_weights(files[which].parent, weight_name=files[which].name)
    assert torch.allclose(probe(pipeline.unet), probe(base.unet), atol=1e-5)
    pairs = zip((pipeline.text_encoder, pipeline.text_encoder_2), base.text_encoders, strict=True)
    for theirs, ours in pairs:
        assert torch.allclose(probe_text(theirs), probe_text(ours), atol=1e-5)


def test_kohya_keys_are_those_of_its_own_trainer(
    exported: tuple[BaseModel, list[TrainedLayer], list[Path]],
) -> None:
    _, layers, files = exported
    stems = read_kohya(files[1])
    assert len(stems) == len(layers)
    assert "lora_te1_text_model_encoder_layers_0_self_attn_q_proj" in stems
    assert "lora_te2_text_model_encoder_layers_1_mlp_fc1" in stems


def test_a_changed_weight_and_a_lost_layer_of_a_text_encoder_are_found_out(
    demo: DemoPaths, exported: tuple[BaseModel, list[TrainedLayer], list[Path]]
) -> None:
    base, layers, files = exported
    whole, path = load_file(files[1]), files[1]
    key = "lora_te2_text_model_encoder_layers_0_self_attn_q_proj"
    given = (text_models(base), layers)
    save_file(whole | {f"{key}.lora_up.weight": whole[f"{key}.lora_up.weight"] * 1.01}, path)
    with pytest.raises(NumericalError, match=r"holds weights for text_encoder_2\.encoder"):
        verify_text_encoders(demo.model, [path], *given, unet_config=base.unet.config)
    save_file({k: t for k, t in whole.items() if not k.startswith(key)}, path)
    with pytest.raises(NumericalError, match=r"text_encoder_2\.encoder\.layers\.0"):
        verify_text_encoders(demo.model, [path], *given, unet_config=base.unet.config)


@pytest.mark.parametrize("which", [0, 1])
def test_an_adapter_starts_from_either_file(
    demo: DemoPaths, exported: tuple[BaseModel, list[TrainedLayer], list[Path]], which: int
) -> None:
    base, _, files = exported
    fresh, modules = adapted(demo.model, MIXED.model_copy(update={"alpha": 16.0}))
    warm_start(modules, fresh.unet, files[which])
    assert torch.allclose(probe(fresh.unet), probe(base.unet), atol=1e-5)
    for new, old in zip(fresh.text_encoders, base.text_encoders, strict=True):
        assert torch.allclose(probe_text(new), probe_text(old), atol=1e-5)


def test_a_run_trains_both_encoders_and_its_files_hold_them(
    tmp_path: Path, demo: DemoPaths
) -> None:
    given = [
        *arguments(tmp_path, demo),
        *("--set", "spec.adapter.textEncoders=[text_encoder,text_encoder_2]"),
        *(
            "--set",
            "spec.training.steps=3",
            "--set",
            "spec.training.learningRates={'text_encoder.*': 0.0005}",
        ),
    ]
    done = in_this_process(given)
    assert done.exit_code == 0, done.output
    state = load_file(tmp_path / "out" / "adapter" / "pytorch_lora_weights.safetensors")
    for part in BOTH:
        ups = [t for k, t in state.items() if k.startswith(f"{part}.text_model.") and "lora_B" in k]
        assert ups
        assert all(tensor.any() for tensor in ups)
    fresh = load_text_encoder(
        demo.model, "text_encoder", variant=None, dtype=torch.float32, device=torch.device("cpu")
    )
    assert not any("lora" in name for name, _ in fresh.named_parameters())
