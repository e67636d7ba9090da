"""Ranks compile together or not at all, and the one that objects is named."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kubelora_trainer.distributed.process_group import ProcessGroup
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.training.compile import compile_if_gradients_match
from kubelora_trainer.utils.signals import StopRequest
from tests.trainer.fixtures.engine import tiny_factors
from tests.trainer.fixtures.processes import run_gang
from tests.trainer.fixtures.rank_runs import FP32
from tests.trainer.training.test_compile import TinyObjective, backward_times


def _broken(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    raise RuntimeError("no C compiler")


def _compile(
    plan: PrecisionPlan, at_fault: dict[int, str], process_group: ProcessGroup, stop: StopRequest
) -> Any:
    """Whether the rank compiled, whether it now computes with eager code, what it was told."""
    backends: dict[str, Any] = {"raises": _broken, "wrong": backward_times(1.5)}
    factors = tiny_factors()
    objective = TinyObjective(factors)
    eager, told = objective.forward, list[str]()
    compiled = compile_if_gradients_match(
        objective,
        AdapterBuffers(factors, plan),
        told.append,
        told.append,
        process_group=process_group,
        backend=backends.get(at_fault.get(process_group.share.rank, ""), "aot_eager"),
    )
    return compiled, objective.forward is eager, told


@pytest.mark.parametrize(
    ("at_fault", "told"),
    [
        ({1: "raises"}, "the compiler failed (no C compiler"),
        ({0: "wrong"}, "differs from eager mode by 0.5"),
        ({0: "raises", 1: "raises", 2: "raises"}, "on every rank of 3"),
        ({1: "wrong", 2: "raises"}, "on ranks 1 and 2 of 3"),
    ],
    ids=["one fails", "one is wrong", "all fail", "two"],
)
def test_a_rank_that_can_not_compile_keeps_all_from_it(
    tmp_path: Path, at_fault: dict[int, str], told: str
) -> None:
    ends, ranks = run_gang(3, functools.partial(_compile, FP32, at_fault), tmp_path)
    assert [end.code for end in ends] == [0, 0, 0]
    for compiled, eager, said in ranks:
        assert (compiled, eager) == (False, True)
        assert told in said[0]
        assert said == ranks[0][2]
    if len(at_fault) == 1:
        assert f" on rank {next(iter(at_fault))} of 3; continuing" in ranks[0][2][0]


def test_ranks_that_all_agree_with_eager_compile(tmp_path: Path) -> None:
    _, ranks = run_gang(2, functools.partial(_compile, FP32, {}), tmp_path)
    assert [rank[:2] for rank in ranks] == [[True, False], [True, False]]
