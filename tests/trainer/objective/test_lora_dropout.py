"""Dropout: masks are a function of the micro-step, on in training alone, and a resume is exact."""

from pathlib import Path

import pytest
import torch
from peft.tuners.lora import LoraLayer

from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.sampler import SampleOrder
from kubelora_trainer.export.verify_unet import probe
from kubelora_trainer.lora.adapter import add_adapter
from kubelora_trainer.objective.lora_dropout import mask_seed
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from kubelora_trainer.utils.signals import StopRequest
from tests.trainer.fixtures.jobs import fill_up_projections, job_spec, objective_on, open_base
from tests.trainer.integration.test_interruption import adapter, arguments, in_this_process


def _objective(
    demo: DemoPaths, dropout: float, *, checkpointing: bool = False
) -> tuple[SdxlObjective, torch.nn.Module, list[torch.nn.Parameter]]:
    base = open_base(demo.model)
    modules = add_adapter(base.unet, Adapter(rank=4, dropout=dropout), 1)
    fill_up_projections(modules)
    spec = job_spec({"batchSize": 2, "seed": 5, "gradientCheckpointing": checkpointing})
    return (
        objective_on(base, demo, spec),
        base.unet,
        [p for m in modules for p in (m.lora_a, m.lora_b)],
    )


def test_masks_depend_on_the_micro_step_alone(demo: DemoPaths) -> None:
    objective, _, _ = _objective(demo, 0.5)
    first, other = objective(0).loss_sum, objective(1).loss_sum
    torch.rand(100)
    assert torch.equal(objective(0).loss_sum, first)
    assert torch.equal(objective(1).loss_sum, other)
    order = SampleOrder(5, 8, 2)
    seeds = [mask_seed(order.samples_of(micro_step)) for micro_step in range(50)]
    assert len(set(seeds)) == 50


def test_dropout_changes_the_loss_in_training_and_nothing_in_evaluation(demo: DemoPaths) -> None:
    dropped, unet, _ = _objective(demo, 0.5)
    whole, plain, _ = _objective(demo, 0.0)
    assert not torch.allclose(dropped(0).loss_sum, whole(0).loss_sum, rtol=1e-6)
    unet.eval()
    assert torch.equal(probe(unet), probe(plain))


def test_an_inputs_share_is_dropped_and_the_rest_scaled_up(demo: DemoPaths) -> None:
    objective, unet, _ = _objective(demo, 0.25)
    layer = unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn1.to_q")
    seen: list[torch.Tensor] = []
    assert isinstance(layer, LoraLayer)
    layer.lora_A["default"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    objective(0)
    given, dropped = seen
    kept = dropped != 0
    assert float((~kept).float().mean()) == pytest.approx(0.25, abs=0.02)
    assert torch.allclose(dropped[kept], given[kept] / 0.75)


def test_recomputed_activations_see_the_same_masks(demo: DemoPaths) -> None:
    gradients = []
    for checkpointing in (False, True):
        objective, _, parameters = _objective(demo, 0.5, checkpointing=checkpointing)
        objective(3).loss_sum.backward()
        gradients.append([p.grad for p in parameters])
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain is not None
        assert plain.any()
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("dora", ["false", "true"], ids=["LoRA", "DoRA"])
def test_a_run_with_dropout_resumes_to_the_same_bits(
    tmp_path: Path, demo: DemoPaths, dora: str
) -> None:
    """Stopped within a window, after sample images have put the model into eval mode."""
    settings = (
        f"spec.adapter={{rank: 4, dropout: 0.3, rsLora: true, targets: all, dora: {dora}}}",
        "spec.training.steps=4",
        "spec.validation={prompts: [a cat], everySteps: 1, inferenceSteps: 1}",
        "spec.output.dtype=fp32",
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    given = [part for setting in settings for part in ("--set", setting)]
    done = in_this_process([*arguments(whole, demo), *given])
    assert done.exit_code == 0, done.output
    with pytest.MonkeyPatch.context() as patch:
        left = iter(range(8 + 5))  # it is asked once for each of the 8 photographs first
        patch.setattr(StopRequest, "requested", property(lambda self: next(left, None) is None))
        patch.setattr(StopRequest, "name", "a test")
        arguments_of_parts = [*arguments(parts, demo), *given]
        stopped = in_this_process(arguments_of_parts)
    assert stopped.exit_code == 75, stopped.output
    resumed = in_this_process(arguments_of_parts)
    assert resumed.exit_code == 0, resumed.output
    assert "resuming from" in resumed.output
    assert adapter(parts) == adapter(whole)
