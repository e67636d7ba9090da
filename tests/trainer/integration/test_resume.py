"""A run that is interrupted anywhere, as often as one likes, ends with the same bits.

Over configurations: optimizer, schedule, warm-up, accumulation, rates by factor, moving average,
precision, DoRA. The engine is tiny, everything in it is the real thing.
"""

import tempfile
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kubelora_api.training_spec import OptimizerName
from kubelora_trainer.optim.precision import PrecisionPlan
from tests.trainer.fixtures.engine import Engine

BF16, FP32 = torch.bfloat16, torch.float32
PLANS = [
    PrecisionPlan(BF16, FP32, FP32),
    PrecisionPlan(FP32, FP32, FP32),
    PrecisionPlan(BF16, BF16, BF16),
]
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "adamw", "beta2": 0.99},
    {"name": "adamw8bit"},
    {"name": "adafactor"},
    {"name": "adafactor", "beta1": 0.9, "scaleParameter": True},
    {"name": "prodigy", "initialRate": 1e-3, "biasCorrection": True, "safeguardWarmup": True},
    {"name": "lion"},
]
assert {optimizer["name"] for optimizer in OPTIMIZERS} == set(get_args(OptimizerName))
SCHEDULES: list[dict[str, Any]] = [
    {"name": "constant"},
    {"name": "linear"},
    {"name": "cosine"},
    {"name": "cosine_with_restarts", "cycles": 2},
    {"name": "polynomial", "power": 2, "endFactor": 0.1},
]
STEPS = 5


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    chosen: dict[str, Any] = {
        "steps": STEPS,
        "optimizer": optimizer,
        "schedule": draw(st.sampled_from(SCHEDULES)) | {"warmupSteps": draw(st.integers(0, 2))},
        "gradientAccumulation": draw(st.integers(1, 4)),
        "ema": {"enabled": draw(st.booleans()), "warmup": draw(st.booleans())},
    }
    if optimizer["name"] != "prodigy":
        chosen["learningRate"] = 1e-2
        chosen["loraPlusRatio"] = draw(st.sampled_from([1, 4]))
        chosen["learningRates"] = draw(st.sampled_from([{}, {"up_blocks.*": 3e-3}]))
    return chosen


@st.composite
def interrupted_runs(draw: st.DrawFn) -> tuple[dict[str, Any], list[int]]:
    """A configuration, and how many micro-steps each of up to three interrupted attempts does."""
    chosen = draw(configurations())
    total = STEPS * chosen["gradientAccumulation"]
    cuts = draw(st.lists(st.integers(1, total - 1), min_size=1, max_size=3, unique=True))
    ends = sorted(cuts)
    return chosen, [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


# Factors of 64 x 64 reach the 4,096 elements from which on bitsandbytes takes 8 bits.
@settings(max_examples=40, deadline=None)
@given(
    interrupted_runs(),
    st.sampled_from(PLANS),
    st.sampled_from([(2, 5), (64, 64)]),
    st.booleans(),
)
@example(
    ({"steps": STEPS, "gradientAccumulation": 3, "optimizer": {"name": "adamw8bit"}}, [2, 5]),
    PLANS[0],
    (64, 64),
    False,
)
@example(({"steps": STEPS, "gradientAccumulation": 3}, [2, 5]), PLANS[0], (2, 5), True)
def test_any_interruption_of_any_configuration_ends_with_the_same_bits(
    run: tuple[dict[str, Any], list[int]],
    plan: PrecisionPlan,
    size: tuple[int, int],
    dora: bool,
) -> None:
    training, parts = run
    rank, width = size

    def engine(path: Path) -> Engine:
        return Engine(path, precision=plan, rank=rank, width=width, dora=dora, **training)

    with tempfile.TemporaryDirectory() as folder:
        whole = engine(Path(folder) / "whole")
        whole.train()
        done = 0
        for micro_steps in parts:
            cut = engine(Path(folder) / "cut")
            assert cut.position.micro_step == done
            done = cut.train(micro_steps=micro_steps).micro_step
        last = engine(Path(folder) / "cut")
        assert last.resumed is not None
        assert last.position.micro_step == done == sum(parts)
        last.train()
        assert last.warnings == []
    same_state(whole, last)


def bits(tensor: torch.Tensor) -> bytes:
    """NaN (a number that was not measured) is equal to itself here."""
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def same_state(one: Engine, other: Engine) -> None:
    assert one.saved_parts.keys() == other.saved_parts.keys()
    for name, part in {"adapter": one.buffers, **one.saved_parts}.items():
        twin = {"adapter": other.buffers, **other.saved_parts}[name]
        ours, theirs = part.tensors(), twin.tensors()
        assert ours.keys() == theirs.keys()
        assert all(bits(ours[key]) == bits(theirs[key]) for key in ours), name
        assert part.scalars() == twin.scalars(), name
    assert torch.equal(one.buffers.working, other.buffers.working)
    assert one.exporter.report.loss == other.exporter.report.loss
    assert one.reporter.watch == other.reporter.watch
    assert one.reporter.norm_range == other.reporter.norm_range


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: str(o))
def test_what_is_compared_does_move(tmp_path: Path, optimizer: dict[str, Any]) -> None:
    # Were nothing trained, every comparison above would hold.
    engine = Engine(tmp_path, steps=STEPS, optimizer=optimizer, ema={"enabled": True}, dora=True)
    before = engine.buffers.masters.clone()
    engine.train()
    assert all(s.of(engine.buffers.masters - before).any() for s in engine.buffers.slots)
    assert engine.average is not None
    assert not torch.equal(engine.average.weights, engine.buffers.masters)
