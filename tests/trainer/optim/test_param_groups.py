"""Which factor learns how fast, and that it does."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kubelora_api.training_spec import Training
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor, Slot
from kubelora_trainer.optim.param_groups import rate_scales
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.utils.errors import ConfigurationError
from tests.trainer.fixtures.engine import Engine

FP32 = torch.float32
MODULES = {
    "down_blocks.1.attentions.0.to_k": "down",
    "mid_block.attentions.0.to_k": "mid",
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj": "text_encoder",
    "text_encoder_2.text_model.encoder.layers.0.self_attn.q_proj": "text_encoder_2",
}


def slots() -> tuple[Slot, ...]:
    factors = [
        Factor(module, f"{block}.{name}", nn.Parameter(torch.ones(1, 1)))
        for module, block in MODULES.items()
        for name in ("lora_A", "lora_B")
    ]
    return AdapterBuffers(factors, PrecisionPlan(FP32, FP32, FP32)).slots


def scales(**training: object) -> dict[str, float]:
    of_factor = rate_scales(slots(), Training.model_validate({"steps": 1, **training}))
    return {s.factor.group: scale for s, scale in zip(slots(), of_factor, strict=True)}


def test_without_settings_all_factors_learn_alike() -> None:
    assert set(scales(learningRate=3e-4).values()) == {1.0}


def test_the_first_pattern_that_matches_the_end_of_a_name_wins() -> None:
    found = scales(
        learningRate=1e-4,
        learningRates={r"text_encoder\..*": 5e-5, r"to_k\.lora_B": 2e-4, r"mid_block.*": 1e-5},
    )
    assert found == pytest.approx(
        {
            "down.lora_A": 1.0,
            "down.lora_B": 2.0,
            "mid.lora_A": 0.1,
            "mid.lora_B": 2.0,
            "text_encoder.lora_A": 0.5,
            "text_encoder.lora_B": 0.5,
            "text_encoder_2.lora_A": 1.0,
            "text_encoder_2.lora_B": 1.0,
        }
    )


def test_lora_plus_multiplies_every_up_projection() -> None:
    found = scales(learningRate=1e-4, learningRates={"mid_block.*": 5e-5}, loraPlusRatio=16)
    assert found["down.lora_A"] == 1.0
    assert found["down.lora_B"] == 16.0
    assert found["mid.lora_A"] == pytest.approx(0.5)
    assert found["mid.lora_B"] == pytest.approx(8.0)


def test_a_pattern_that_matches_nothing_is_told() -> None:
    with pytest.raises(
        ConfigurationError, match=r"learningRates: 'to_q\.\*' matches none of the 8"
    ):
        scales(learningRates={"to_q.*": 1e-4})


def test_the_first_step_moves_each_factor_by_its_own_rate(tmp_path: Path) -> None:
    # AdamW's first step is lr·sign(g) beside the decay; lora_A has no gradient yet.
    engine = Engine(
        tmp_path,
        steps=1,
        learningRate=1e-3,
        learningRates={"down_blocks.*": 2e-3},
        loraPlusRatio=4,
        optimizer={"weightDecay": 0.0},
    )
    engine.train()
    moved = {
        slot.factor.group: float(slot.of(engine.buffers.masters).abs().max())
        for slot in engine.buffers.slots
        if slot.factor.name.endswith("lora_B")
    }
    assert moved == pytest.approx({"down.lora_B": 8e-3, "up.lora_B": 4e-3}, rel=1e-4)


def test_magnitudes_have_the_rate_itself_unless_a_pattern_says_another() -> None:
    """LoRA+ is about lora_B alone."""
    factors = [
        Factor("mid_block.to_k", f"mid.{name}", nn.Parameter(torch.ones(1, 1)))
        for name in ("lora_A", "lora_B", "lora_magnitude_vector")
    ]
    slots = AdapterBuffers(factors, PrecisionPlan(FP32, FP32, FP32)).slots
    plus = Training.model_validate({"steps": 1, "loraPlusRatio": 16})
    assert rate_scales(slots, plus) == [1.0, 16.0, 1.0]
    own = {"learningRate": 1e-4, "learningRates": {r"lora_magnitude_vector": 5e-4}}
    assert rate_scales(slots, Training.model_validate({"steps": 1, **own})) == [1.0, 1.0, 5.0]
