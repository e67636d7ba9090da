"""The benchmark measures what it says: three sides that train, in turn, and their ratio."""

import ast
import importlib.util
import math
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks import start_up
from benchmarks.our_loop import OurLoop
from benchmarks.paired import measure_rounds, ratio_of
from benchmarks.reference_loop import ReferenceLoop
from benchmarks.start_up import cpu_seconds
from kubelora_trainer.cli.demo import DemoPaths, create_demo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoPaths:
    return create_demo(tmp_path_factory.mktemp("demo"), "small", images=2)


def test_each_side_runs_once_a_round_in_changing_order_and_warm_up_is_not_counted() -> None:
    ran: list[str] = []
    now = 0.0

    def side(name: str, seconds: float) -> None:
        nonlocal now
        ran.append(name)
        now += seconds

    times = measure_rounds(
        {"x": lambda: side("x", 2.0), "y": lambda: side("y", 3.0)},
        rounds=40,
        warm_up=2,
        clock=lambda: now,
    )
    assert times == {"x": [2.0] * 40, "y": [3.0] * 40}
    rounds = [ran[i : i + 2] for i in range(0, len(ran), 2)]
    assert len(rounds) == 42
    assert ["x", "y"] in rounds
    assert ["y", "x"] in rounds


def test_the_ratio_is_of_the_means_and_its_interval_is_that_of_whole_rounds() -> None:
    """Rounds of 1 and 9 times the pace: each pair has ratio 2 exactly, so the interval is a point.

    Drawn apart, the sides would give anything between 2/9 and 18.
    """
    under = [1.0, 9.0] * 50
    exact = ratio_of([2 * t for t in under], under)
    assert (exact.value, exact.low, exact.high) == (2.0, 2.0, 2.0)
    # Mean 1.5 over 1; the standard error is 0.5 / sqrt(100) = 0.05, so 95 % is about ±0.098.
    loose = ratio_of([1.0, 2.0] * 50, [1.0] * 100)
    assert loose.value == 1.5
    assert loose.low == pytest.approx(1.5 - 1.96 * 0.05, abs=0.02)
    assert loose.high == pytest.approx(1.5 + 1.96 * 0.05, abs=0.02)
    with pytest.raises(ValueError, match="every round"):
        ratio_of([1.0], [1.0, 2.0])


def test_one_loop_trains_with_and_without_telemetry_by_turns(
    demo: DemoPaths, tmp_path: Path
) -> None:
    loop = OurLoop(demo.model, demo.photos, tmp_path / "out")
    begun = loop.buffers.masters.clone()
    told, moved = [], []
    for make_step in (loop.step, loop.step_without_telemetry, loop.step, loop.step):
        before = loop.buffers.masters.clone()
        make_step()
        told.append(loop.told)
        moved.append(not torch.equal(loop.buffers.masters, before))
    loop.close()
    assert loop.position.step == 4
    assert loop.position.micro_step == 16
    assert moved == [True] * 4
    assert told == [0, 0, 1, 3]  # numbers are told with the next step that is measured
    assert (loop.buffers.masters != begun).double().mean() > 0.9


def test_a_step_without_telemetry_calls_no_hook_and_gives_the_same_weights(
    demo: DemoPaths, tmp_path: Path
) -> None:
    weights = []
    for number, measured in enumerate((True, False)):
        loop = OurLoop(demo.model, demo.photos, tmp_path / str(number))
        hooked = [
            hooks
            for slot in loop.buffers.slots
            if (hooks := slot.factor.parameter._post_accumulate_grad_hooks)
        ]
        calls: list[int] = []
        hooked[0][-1] = lambda parameter, calls=calls: calls.append(1)
        loop.step() if measured else loop.step_without_telemetry()
        assert len(calls) == (4 if measured else 0)
        weights.append(loop.buffers.masters.clone())
        loop.close()
    assert torch.equal(*weights)


def test_the_reference_trains_in_fp32_under_autocast(demo: DemoPaths) -> None:
    torch.manual_seed(0)
    loop = ReferenceLoop(demo.model, demo.photos, rank=8, accumulation=4, edge=64, rate=1e-4)
    before = [p.detach().clone() for p in loop.parameters]
    loop.step()
    loop.step()
    assert {p.dtype for p in loop.parameters} == {torch.float32}
    assert all(not torch.equal(p, b) for p, b in zip(loop.parameters, before, strict=True))
    assert math.isfinite(loop.loss)
    assert loop.loss > 0


def test_cpu_seconds_are_the_kernels_account_of_the_process() -> None:
    before = cpu_seconds(os.getpid())
    begun = time.process_time()
    while time.process_time() - begun < 0.2:
        pass
    assert cpu_seconds(os.getpid()) - before >= 0.15


@pytest.mark.parametrize("program", [start_up.COMMAND, start_up.OUR_LOOP])
def test_programs_of_other_processes_import_modules_that_exist(program: str) -> None:
    modules = [n.module for n in ast.walk(ast.parse(program)) if isinstance(n, ast.ImportFrom)]
    assert modules
    assert all(module and importlib.util.find_spec(module) for module in modules)
