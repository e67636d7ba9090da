"""The formulas of the optimizers, against values worked out by hand, and the real optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kubelora_api.training_spec import Optimizer
from kubelora_trainer.health.detectors.update_formulas import FORMULAS, StepElements, decay_of
from tests.trainer.fixtures.engine import Engine


def one(
    weight: float, gradient: float, rate: float, decay: float = 0.0, d: float = 1.0
) -> StepElements:
    def of(value: float) -> torch.Tensor:
        return torch.tensor([[value]], dtype=torch.float64)

    none = of(0.0)
    steps = torch.zeros((), dtype=torch.float64)
    return StepElements(of(weight), of(gradient), none, none, of(rate), of(decay), steps, d, d)


def test_the_first_step_of_adamw_is_the_rate_and_decay_is_the_rates_share() -> None:
    spec = Optimizer(name="adamw", eps=1e-12)
    expected = FORMULAS["adamw"](spec, one(2.0, -0.5, rate=1e-3, decay=0.01))
    # m = -0.05, v = 2.5e-4; corrected -0.5 and 0.25: a step of +rate. Decay: 1e-3 * 0.01 * 2.
    assert float(expected.change) == pytest.approx(1e-3 - 2e-5)
    assert float(expected.first) == pytest.approx(-0.05)
    assert expected.second is not None
    assert float(expected.second) == pytest.approx(2.5e-4)


def test_lion_moves_by_the_sign_and_keeps_another_mean() -> None:
    expected = FORMULAS["lion"](Optimizer(name="lion"), one(1.0, 0.5, rate=1e-4, decay=0.01))
    assert float(expected.change) == pytest.approx(-1e-4 - 1e-6)
    assert float(expected.first) == pytest.approx(0.005)  # beta2 is 0.99
    assert expected.second is None


def test_prodigy_scales_gradients_by_its_estimate() -> None:
    spec = Optimizer(name="prodigy", eps=1e-20)
    expected = FORMULAS["prodigy"](spec, one(1.0, 0.5, rate=1.0, d=1e-2))
    # m = 0.1 * 5e-3, v = 1e-3 * 2.5e-5: m / sqrt(v) = 0.1 / sqrt(1e-3) = 3.162.
    assert float(expected.change) == pytest.approx(-1e-2 * 0.1 / 1e-3**0.5)


def test_decay_is_the_jobs_or_the_optimizers_default() -> None:
    assert decay_of(Optimizer(name="adamw")) == 0.01
    assert decay_of(Optimizer(name="prodigy")) == 0.0
    assert decay_of(Optimizer(name="adamw", weight_decay=0.2)) == 0.2


@pytest.mark.parametrize(
    "training",
    [
        {},
        {
            "optimizer": {
                "name": "adamw",
                "beta1": 0.5,
                "beta2": 0.9,
                "eps": 1e-3,
                "weightDecay": 0.5,
            }
        },
        {"loraPlusRatio": 16.0, "learningRates": {"down.*": 1e-2}},
        {"optimizer": {"name": "lion"}},
        {"optimizer": {"name": "prodigy", "biasCorrection": True}, "learningRate": 1.0},
        {"optimizer": {"name": "prodigy", "beta1": 0.0}, "learningRate": 1.0},
        {"optimizer": {"name": "adafactor"}},
        {"optimizer": {"name": "adamw8bit"}},
    ],
    ids=str,
)
def test_every_optimizer_does_its_formula(tmp_path: Path, training: dict[str, Any]) -> None:
    engine = Engine(tmp_path, dora=True, steps=8, **training)
    engine.train()
    assert not {"OptimizerWrong", "StateAltered"} & engine.reporter.watchdog.state.found.keys()
