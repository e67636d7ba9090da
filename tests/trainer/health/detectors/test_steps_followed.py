"""What happens within a step and between two is followed bit by bit, factor by factor."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kubelora_api.status import Finding
from kubelora_trainer.optim.ema import ExponentialMovingAverage
from tests.trainer.fixtures.engine import Engine


def found(engine: Engine) -> dict[str, Finding]:
    engine.train()
    return dict(engine.reporter.watchdog.state.found)


def in_step(engine: Engine, step: int, change: Callable[[], object]) -> None:
    """Call ``change`` when the first micro-batch of ``step`` is computed."""
    real, accumulation = engine.parts.objective, engine.plan.accumulation

    def objective(micro_step: int) -> object:
        if micro_step == (step - 1) * accumulation:
            change()
        return real(micro_step)

    object.__setattr__(engine.parts, "objective", objective)


def test_a_sound_run_shows_none_of_it(tmp_path: Path) -> None:
    state = found(Engine(tmp_path, ema={"enabled": True}))
    assert not state


@pytest.mark.parametrize("place", [0, -1])
def test_one_bit_of_the_weights_or_of_a_moment_is_seen(tmp_path: Path, place: int) -> None:
    for name in ("masters", "moment"):
        engine = Engine(tmp_path / name)
        moment = engine.optimizer.first_moment
        assert moment is not None
        flat = engine.buffers.masters if name == "masters" else moment

        def flip(flat: torch.Tensor = flat) -> None:
            flat.view(torch.int32)[place] ^= 1

        in_step(engine, 3, flip)
        finding = found(engine)["StateAltered"]
        what = "master weights" if name == "masters" else "optimizer's state"
        assert finding.message.startswith(f"The {what} changed between steps 2 and 3.")
        assert (finding.severity, finding.since_step) == ("critical", 3)


def test_a_change_after_the_last_step_is_not_saved_unseen(tmp_path: Path) -> None:
    engine = Engine(tmp_path, steps=2)
    step = engine.optimizer.step

    def then_written(learning_rate: float, non_finite: torch.Tensor) -> None:
        step(learning_rate, non_finite)
        engine.buffers.masters[3] *= 256

    engine.optimizer.step = then_written  # type: ignore[method-assign]
    state = found(engine)
    assert "after step 2" in state["StateAltered"].message or (
        "between steps 1 and 2" in state["StateAltered"].message
    )


def test_one_factor_at_half_its_rate_is_named_with_the_half(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    inner, slot = engine.optimizer._adamw, engine.buffers.slots[3]  # type: ignore[attr-defined]
    real = inner.step

    def half() -> None:
        before = engine.buffers.masters.clone()
        real()
        now = slot.of(engine.buffers.masters)
        now.copy_((now + slot.of(before)) / 2)

    inner.step = half
    finding = found(engine)["OptimizerWrong"]
    assert finding.since_step == 1
    assert "1 of 4 factors moved by another amount" in finding.message
    assert re.search(r"the worst by 0\.(5|499|501) times that", finding.message), finding.message
    assert slot.factor.name in finding.message


def test_a_gradient_that_changes_sign_on_its_way_is_found_in_its_step(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    normalise, slot = engine.buffers.normalise, engine.buffers.slots[3]

    def flipped(samples: int) -> None:
        normalise(samples)
        slot.of(engine.buffers.gradient).neg_()

    engine.buffers.normalise = flipped  # type: ignore[method-assign]
    finding = found(engine)["GradientAltered"]
    assert finding.value == pytest.approx(2.0)
    assert finding.since_step == 1
    assert slot.factor.name in finding.message


def test_a_micro_batch_without_a_gradient_is_counted_on_the_buffer(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    real = engine.parts.objective

    class Constant:
        def __init__(self, micro_step: int) -> None:
            batch = real(micro_step)
            self.loss_sum, self.samples = batch.loss_sum * 0 + batch.loss_sum.detach(), 1

    def objective(micro_step: int) -> object:
        return Constant(micro_step) if micro_step == 8 else real(micro_step)

    object.__setattr__(engine.parts, "objective", objective)
    finding = found(engine)["MicroBatchLost"]
    assert finding.since_step == 3
    assert finding.message.startswith("1 of 3 micro-batches left the accumulator as it was.")


def test_an_average_that_stops_is_found_in_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = ExponentialMovingAverage.update

    def until_four(self: ExponentialMovingAverage, step: int, non_finite: torch.Tensor) -> None:
        if step < 3:
            update(self, step, non_finite)

    monkeypatch.setattr(ExponentialMovingAverage, "update", until_four)
    finding = found(Engine(tmp_path, ema={"enabled": True}))["AverageStale"]
    assert (finding.since_step, finding.value) == (4, 1.0)
