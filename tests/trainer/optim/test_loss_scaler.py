"""fp16 with a loss scaler: exact where nothing overflows, silent while it settles, never a mask."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.health.detectors.quantities import FactorFacts, RunFacts
from kubelora_trainer.health.startup_checks import FirstGradients, check_finite
from kubelora_trainer.optim.loss_scaler import FIRST_SCALE, LossScaler
from kubelora_trainer.optim.lr_schedule import steps_that_moved
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.step_metrics import GroupNumbers, StepNumbers
from kubelora_trainer.utils.errors import NumericalError
from tests.trainer.fixtures.engine import Engine, Loss
from tests.trainer.fixtures.jobs import job_spec
from tests.trainer.fixtures.watching import after
from tests.trainer.integration.test_interruption import arguments, in_this_process

HALF = PrecisionPlan(torch.float16, torch.float32, torch.float32)
WHOLE = PrecisionPlan(torch.float32, torch.float32, torch.float32)
CPU = torch.device("cpu")


class Steep:
    """A loss whose gradient is ``slope`` for every element of lora_B, and 1e-3 x that of lora_A."""

    def __init__(self, engine: Engine, slope: float) -> None:
        self._factors, self._slope = engine.factors, slope

    def __call__(self, micro_step: int) -> Loss:
        total = torch.zeros(())
        for factor in self._factors:
            share = self._slope * (1e-3 if factor.name.endswith("lora_A") else 1.0)
            total = total + (factor.parameter.float() * share).sum()
        return Loss(total, 1)


def test_scaling_by_a_power_of_two_changes_no_bit(tmp_path: Path) -> None:
    plain, scaled = (
        Engine(tmp_path / "a", precision=WHOLE),
        Engine(tmp_path / "b", precision=WHOLE),
    )
    scaled.parts = replace(scaled.parts, scaler=LossScaler(CPU, growth_steps=2))
    plain.train()
    scaled.train()
    assert torch.equal(plain.buffers.masters, scaled.buffers.masters)
    assert scaled.parts.scaler is not None
    assert float(scaled.parts.scaler.scale) == FIRST_SCALE * 2**3  # 6 good steps, doubled each 2


def test_the_scale_halves_until_gradients_fit_and_no_alarm_is_raised(tmp_path: Path) -> None:
    """A slope of 100 fits below 65,504 from a scale of 512 on: 2^16 to 2^10 are 7 steps skipped."""
    engine = Engine(tmp_path, precision=HALF, steps=12, gradientAccumulation=1)
    engine.parts = replace(engine.parts, objective=Steep(engine, 100.0))
    before = engine.buffers.masters.clone()
    moved: list[bool] = []
    step = engine.optimizer.step

    def noted(learning_rate: float, non_finite: Tensor) -> None:
        step(learning_rate, non_finite)
        moved.append(not torch.equal(engine.buffers.masters, before))

    engine.optimizer.step = noted  # type: ignore[method-assign]
    engine.train()
    assert moved == [False] * 7 + [True] * 5
    assert engine.scaler is not None
    assert (float(engine.scaler.scale), float(engine.scaler.skipped)) == (512.0, 7.0)
    # A slope on the factors themselves is no function of B·A: their gradients need not agree.
    assert engine.reporter.watch.found.keys() <= {"GradientImbalance"}
    samples = {
        sample.name: sample.value
        for family in engine.registry.collect()
        for sample in family.samples
        if not sample.labels or sample.labels.get("group") == "down.lora_B"
    }
    assert samples["kubelora_steps_skipped_total"] == 7
    assert samples["kubelora_loss_scale"] == 512
    assert samples.get("kubelora_grad_nonfinite_total", 0.0) == 0
    assert samples["kubelora_grad_norm"] == pytest.approx(100 * math.sqrt(10))
    assert engine.reporter.norm_range is not None
    assert math.isfinite(engine.reporter.norm_range[1])


def test_a_gradient_that_no_scale_mends_ends_the_run_untouched(tmp_path: Path) -> None:
    """NaN at every scale: 16 halvings, and the 17th step, at scale 1, is the last."""
    engine = Engine(tmp_path, precision=HALF, steps=40, gradientAccumulation=1)
    objective = Steep(engine, 1.0)
    for factor in engine.factors[:1]:
        factor.parameter.register_hook(lambda gradient: gradient * math.nan)
    engine.parts = replace(engine.parts, objective=objective)
    before = engine.buffers.masters.clone()
    with pytest.raises(NumericalError, match=r"step 17: .* NaN or infinite"):
        engine.train()
    assert torch.equal(engine.buffers.masters, before)
    assert engine.reporter.watch.found["GradientNonFinite"].severity == "critical"


def _numbers(loss: float, scale: float, nonfinite: int = 3) -> StepNumbers:
    norm = math.inf if nonfinite else 1.0
    group = GroupNumbers(norm, 1.0, 0.0, nonfinite, 0.0, 0.0, 0.0)
    return StepNumbers(
        *(5, 1e-3, loss, 1, norm, {"down.lora_A": group}, [norm], [1.0]), loss_scale=scale
    )


FACTS = RunFacts("fp16", 1.0, 1e-3, 100, 0.0, (FactorFacts("down.lora_A", 1, False),))


@pytest.mark.parametrize(
    ("numbers", "skipped"),
    [
        (_numbers(1.0, 1024.0), True),
        (_numbers(1.0, 1.0), False),
        (_numbers(math.nan, 1024.0), False),  # the forward pass failed, scaling has no part in it
        (_numbers(1.0, math.nan), False),  # no scaler
        (_numbers(1.0, 1024.0, nonfinite=0), False),
    ],
)
def test_only_what_a_smaller_scale_may_mend_counts_as_skipped(
    numbers: StepNumbers, skipped: bool
) -> None:
    assert numbers.skipped == skipped
    watched = after([numbers], FACTS)
    if skipped:
        check_finite((), numbers)
        FirstGradients((), moved_before=0).observe(numbers)
        assert watched == after([], FACTS)
    elif numbers.nonfinite:
        assert "GradientNonFinite" in watched.found


def test_skipped_steps_do_not_count_as_moved() -> None:
    plain = job_spec().training
    warm = job_spec({"schedule": {"warmupSteps": 3}}).training
    assert steps_that_moved(plain, 9, skipped=7) == 2
    assert steps_that_moved(warm, 9, skipped=7) == 1
    assert steps_that_moved(warm, 2, skipped=2) == 0


def test_a_resumed_run_has_the_scale_and_the_bits_of_one_that_was_not_interrupted(
    tmp_path: Path,
) -> None:
    def engine(name: str) -> Engine:
        made = Engine(tmp_path / name, precision=HALF, steps=12, gradientAccumulation=3)
        made.parts = replace(made.parts, objective=Steep(made, 100.0))
        return made

    whole = engine("whole")
    whole.train()
    engine("cut").train(micro_steps=14)  # in the middle of a window that is still to be skipped
    resumed = engine("cut")
    assert resumed.scaler is not None
    assert float(resumed.scaler.scale) == FIRST_SCALE / 2**4
    resumed.train()
    assert whole.scaler is not None
    for name, tensor in whole.scaler.tensors().items():
        assert torch.equal(tensor, resumed.scaler.tensors()[name])
    assert torch.equal(whole.buffers.masters, resumed.buffers.masters)


def test_a_real_run_in_fp16_trains_as_one_in_fp32_does(tmp_path: Path, demo: DemoPaths) -> None:
    loaded = {}
    for compute in ("fp16", "fp32"):
        (tmp_path / compute).mkdir()
        given = arguments(tmp_path / compute, demo)
        given += ["--set", f"spec.precision.compute={compute}", "--set", "spec.training.steps=6"]
        done = in_this_process(given)
        assert done.exit_code == 0, done.output
        assert f"working copy {compute}" in done.output
        assert "Critical" not in done.output
        path = tmp_path / compute / "out" / "adapter" / "pytorch_lora_weights.safetensors"
        loaded[compute] = torch.cat(
            [t.flatten() for n, t in sorted(load_file(path).items()) if "lora_B" in n]
        )
    likeness = torch.nn.functional.cosine_similarity(loaded["fp16"], loaded["fp32"], dim=0)
    assert float(likeness) > 0.9
