"""A gradient that is not finite names the sample whose input is not."""

import math

import pytest
import torch

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.health.detectors.startup_contract import FiniteGradients
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.errors import NumericalError
from tests.trainer.fixtures.jobs import job_spec, objective_on, open_base

BROKEN = StepNumbers(7, 1e-4, math.nan, 2, math.nan, {}, (), ())
FILES = ["red/a.png", "red/b.png", "blue/c.png"]


def _facts(samples: tuple[int, ...], **finite: list[bool]) -> MicroBatchFacts:
    shown = {name: torch.tensor(flags) for name, flags in finite.items()}
    numbers = (0,) * len(samples)
    return MicroBatchFacts(0, samples, numbers, numbers, lambda place: torch.zeros(1), shown)


def test_the_file_of_the_sample_is_named_and_no_other() -> None:
    detector = FiniteGradients((), FILES)
    detector.on_micro_batch(_facts((2, 0), latent=[True, True]))
    detector.on_micro_batch(_facts((0, 1), latent=[True, False]))
    with pytest.raises(NumericalError) as caught:
        detector.on_step(BROKEN, WatchState())
    assert str(caught.value).endswith("NaN or infinite values come from the latent of red/b.png")
    assert caught.value.named


def test_no_file_is_named_where_all_inputs_are_finite() -> None:
    detector = FiniteGradients((), FILES)
    detector.on_micro_batch(_facts((2, 0), latent=[True, True]))
    with pytest.raises(NumericalError) as caught:
        detector.on_step(BROKEN, WatchState())
    assert "come from" not in str(caught.value)
    assert not caught.value.named


@pytest.mark.parametrize(("part", "named"), [("vae", "latent"), ("text", "caption's embedding")])
def test_the_objective_says_which_input_of_which_sample_is_not_finite(
    demo: DemoPaths, part: str, named: str
) -> None:
    base = open_base(demo.model)
    objective = objective_on(base, demo, job_spec({"batchSize": 2}))
    seen: list[MicroBatchFacts] = []
    objective.observer = seen.append
    objective.batch(0)
    module = base.vae.encoder if part == "vae" else base.text_encoders[1]
    with torch.no_grad():
        next(p for p in reversed(list(module.parameters())) if p.ndim > 1).fill_(math.nan)
    fresh = objective_on(base, demo, job_spec({"batchSize": 2}))
    fresh.observer = seen.append
    fresh.batch(0)
    objective.close()
    fresh.close()
    healthy, broken = ({n: f.tolist() for n, f in facts.finite.items()} for facts in seen)
    assert healthy == {"latent": [True, True], "caption's embedding": [True, True]}
    assert broken == healthy | {named: [False, False]}
