"""Whatever adapter a job asks for, its files give it back on SDXL's topology; a DoRA has one."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.export.verify_text_encoders import verify_text_encoders
from kubelora_trainer.export.verify_unet import ExportCheck, verify_export
from kubelora_trainer.export.writers import Title, export_diffusers, export_kohya
from kubelora_trainer.lora.adapter import AdapterModule, trained_layers
from kubelora_trainer.models.sgm_keys import Part
from kubelora_trainer.training.setup import add_adapters
from tests.trainer.fixtures.jobs import open_base

PATTERNS = ("to_q", r"attn1\.to_out\.0", r"down_blocks\.1\..*to_k", r"mid_block\..*", "to_v")
"""Each matches a layer of every family of targets."""


@st.composite
def adapters(draw: st.DrawFn) -> Adapter:
    """Ranks, alphas and targets of every kind, patterns that differ between layers."""
    patterns = st.lists(st.sampled_from(PATTERNS), unique=True, max_size=3)
    alphas = st.floats(0.25, 64, width=16)
    return Adapter(
        rank=draw(st.integers(1, 6)),
        alpha=draw(st.none() | alphas),
        targets=draw(st.sampled_from(["attention", "attention+feed_forward", "all_linear", "all"])),
        rs_lora=draw(st.booleans()),
        dora=draw(st.booleans()),
        text_encoders=draw(
            st.lists(st.sampled_from(["text_encoder", "text_encoder_2"]), unique=True)
        ),
        rank_pattern={p: draw(st.integers(1, 6)) for p in draw(patterns)},
        alpha_pattern={p: draw(alphas) for p in draw(patterns)},
        init=draw(st.sampled_from(["kaiming", "gaussian", "orthogonal"])),
    )


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(adapter=adapters())
def test_both_files_give_back_any_adapter_with_no_key_unmatched(
    full_demo: DemoPaths, adapter: Adapter
) -> None:
    """The gates raise for a layer too many or too few, a scale, a weight or an output."""
    base = open_base(full_demo.model)
    modules = add_adapters(base, adapter, 1)
    _fill(modules)
    layers = trained_layers(modules)
    parts: tuple[Part, Part] = ("text_encoder", "text_encoder_2")
    encoders: dict[Part, torch.nn.Module] = {
        part: encoder
        for part, encoder in zip(parts, base.text_encoders, strict=True)
        if part in adapter.text_encoders
    }
    with TemporaryDirectory() as folder:
        files = [export_diffusers(base.unet, layers, Path(folder), encoders=encoders).path]
        if not adapter.dora:
            title = Title("any")
            files.append(export_kohya(base.unet.config, layers, Path(folder), title).path)
        checks = verify_export(full_demo.model, files, base.unet, layers)
        text = verify_text_encoders(
            full_demo.model, files, encoders, layers, unet_config=base.unet.config
        )
    assert len(checks) == len(files)
    assert len(text) == len(files) * len(adapter.text_encoders)
    for check in [*checks, *text]:
        _judge(check)


def _judge(check: ExportCheck) -> None:
    assert check.effect > 0
    assert check.deviation <= 1e-4 * check.effect + 2 * check.noise


@torch.no_grad()
def _fill(modules: tuple[AdapterModule, ...]) -> None:
    """Updates of a twentieth of what goes through the layer, whatever rank and scale."""
    generator = torch.Generator().manual_seed(3)
    for module in modules:
        up = torch.randn(module.lora_b.shape, generator=generator)
        module.lora_b.copy_(up)
        size = (module.scale * up.flatten(1) @ module.lora_a.flatten(1)).norm(dim=1).mean()
        module.lora_b.mul_(0.05 / size)
        if module.magnitude is not None:
            drawn = torch.randn(module.magnitude.shape, generator=generator)
            module.magnitude.mul_(1 + 0.05 * drawn)
