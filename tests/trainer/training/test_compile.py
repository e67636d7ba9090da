"""A compiled UNet is trusted only where its first gradient is that of the eager one."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.lora.adapter import add_adapter
from kubelora_trainer.objective.sdxl_loss import MicroBatchLoss
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.training.compile import (
    CompilableObjective,
    compile_if_gradients_match,
    largest_difference,
)
from kubelora_trainer.training.setup import factors_of
from tests.trainer.fixtures.engine import tiny_factors
from tests.trainer.fixtures.jobs import job_spec, objective_on, open_base

BF16, FP32 = torch.bfloat16, torch.float32
Graph = Callable[..., Any]


class TwoModules(nn.Module):
    """x -> x + B·A·x, twice, as an adapter's layers compute."""

    def __init__(self, factors: Sequence[Factor]) -> None:
        super().__init__()
        self.down_a, self.down_b, self.up_a, self.up_b = (f.parameter for f in factors)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down_b @ torch.tanh(self.down_a @ x)
        return x + self.up_b @ torch.tanh(self.up_a @ x)


class TinyObjective:
    """|forward(x) - 1|² over five numbers."""

    def __init__(self, factors: Sequence[Factor]) -> None:
        self.forward: Callable[..., Any] = TwoModules(factors)
        self._x = torch.linspace(-1, 1, 5, dtype=factors[0].parameter.dtype)

    def __call__(self, micro_step: int) -> MicroBatchLoss:
        errors = (self.forward(self._x).float() - 1).square()
        return MicroBatchLoss(errors.sum(), 1, errors.sum()[None].detach())


class Trial:
    """A fresh adapter, its objective, and what was said of its compilation."""

    def __init__(self, objective: CompilableObjective, buffers: AdapterBuffers) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.objective, self.buffers = objective, buffers
        self.eager = objective.forward
        self.before = buffers.working.clone()
        self.said: list[str] = []
        self.warned: list[str] = []

    def compile(self, backend: str | Graph) -> bool:
        return compile_if_gradients_match(
            self.objective, self.buffers, self.said.append, self.warned.append, backend=backend
        )

    def graphs(self) -> int:
        """How many graphs were traced and compiled."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def is_untouched(self) -> bool:
        gone = not self.buffers.gradient.any()
        return gone and torch.equal(self.buffers.working, self.before)


@pytest.fixture
def trial() -> Trial:
    factors = tiny_factors()
    buffers = AdapterBuffers(factors, PrecisionPlan(BF16, FP32, FP32))
    return Trial(TinyObjective(factors), buffers)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_the_real_unet_is_compiled_and_its_gradient_is_eagers(demo: DemoPaths, dora: bool) -> None:
    """Through the real tracer and its autograd, without the code generator."""
    base = open_base(demo.model, BF16)
    factors = factors_of(add_adapter(base.unet, Adapter(rank=4, dora=dora), 0))
    objective = objective_on(base, demo, job_spec({"batchSize": 2}))
    trial = Trial(objective, AdapterBuffers(factors, PrecisionPlan(BF16, FP32, FP32)))
    assert trial.compile("aot_eager")
    assert trial.graphs() > 0
    assert trial.is_untouched()
    compiled = objective(3).loss_sum
    objective.forward = trial.eager
    assert float(compiled) == pytest.approx(float(objective(3).loss_sum), rel=1e-2)
    objective.close()


def test_generated_code_with_eagers_gradient_is_used(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    assert trial.compile("inductor"), trial.warned
    assert trial.graphs() == 1
    assert trial.objective.forward is not trial.eager
    assert trial.is_untouched()
    assert trial.warned == []
    assert trial.said[0].startswith("compile: 1 graphs in ")


def backward_times(factor: float) -> Graph:
    """A backend that is right forwards, and multiplies what comes out of backward passes."""

    def plain(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        return graph.forward

    def wrong(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        def run(*arguments: Any) -> Any:
            outcome = graph.forward(*arguments)
            return [o * factor if isinstance(o, Tensor) else o for o in outcome]

        return run

    backend: Graph = aot_autograd(fw_compiler=plain, bw_compiler=wrong)
    return backend


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [(1.5, "differs from eager mode by 0.5"), (float("nan"), "is not finite"), (0.0, "by 1")],
)
def test_a_compiler_with_wrong_gradients_is_not_used_and_named(
    trial: Trial, factor: float, sentence: str
) -> None:
    assert not trial.compile(backward_times(factor))
    assert trial.objective.forward is trial.eager
    assert trial.is_untouched()
    assert trial.said == []
    assert trial.warned[0].startswith("training.compile: the first compiled gradient of")
    assert sentence in trial.warned[0]
    assert trial.warned[0].endswith("continuing without compilation")


def test_what_could_not_be_traced_at_all_is_told(trial: Trial) -> None:
    opaque: Callable[..., Any] = torch.compiler.disable(trial.eager)

    def forward(x: Tensor) -> Any:
        return opaque(x)

    trial.objective.forward = forward
    assert not trial.compile("aot_eager")
    assert "nothing of the UNet could be compiled" in trial.warned[0]


def test_a_compiler_that_fails_is_not_used(trial: Trial) -> None:
    def broken(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Graph:
        raise RuntimeError("no C compiler\nmore of it")

    assert not trial.compile(broken)
    assert trial.objective.forward is trial.eager
    assert trial.is_untouched()
    assert "the compiler failed (no C compiler);" in trial.warned[0]
    assert "\n" not in trial.warned[0]


def test_the_difference_is_judged_by_group() -> None:
    """Of groups of norms 5 and 100, an error of 1 is 0.2 of the first and 0.01 of the second."""
    factors = [
        Factor("a", f"{block}.lora_A", torch.nn.Parameter(torch.ones(1, 2)))
        for block in ("down", "up")
    ]
    buffers = AdapterBuffers(factors, PrecisionPlan(FP32, FP32, FP32))
    expected = torch.tensor([3.0, 4.0, 100.0, 0.0])
    assert largest_difference(buffers, expected, expected) == (0.0, "down.lora_A")
    both = expected + torch.tensor([1.0, 0.0, 0.0, 1.0])
    off, group = largest_difference(buffers, expected, both)
    assert off == pytest.approx(0.2)
    assert group == "down.lora_A"
    lost = expected * torch.tensor([1.0, 1.0, float("inf"), 1.0])
    assert largest_difference(buffers, expected, lost) == (float("inf"), "up.lora_A")
    nothing = torch.zeros(4)
    assert largest_difference(buffers, nothing, nothing)[0] == 0.0
    assert largest_difference(buffers, nothing, expected)[0] == float("inf")
