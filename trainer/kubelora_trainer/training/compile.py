"""torch.compile for the UNet, used only if its first gradient agrees with eager mode.

Compiled backward passes have been seen to return NaN, or gradients off by orders of magnitude,
silently. So one micro-step is run both ways before training starts. If they disagree, or the
compiler fails, the run continues without compilation and reports why. Ranks decide together: a sum
of compiled and eager gradients would differ from either, and slow ranks would hold up the others.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._dynamo.utils import counters  # no public module counts graphs (decision 0015)

from kubelora_trainer.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from kubelora_trainer.objective.sdxl_loss import MicroBatchLoss
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.utils.text import ranks_named

TRIAL_FILL = 1e-2
"""Standard deviation of lora_B in the trial; at 0 the gradient of lora_A would vanish."""
TRIAL_SCALE = 2.0**10
"""Loss scale of the trial, so that fp16 can represent its gradients."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest |compiled - eager| / |eager| of a group's gradient, by compute type.

Fused kernels round less often than eager ones. bf16 has 8 bits: after about a hundred roundings to
2^-9, a gradient is accurate to a few per cent; fp16 has 3 more bits. The faults that this catches
are off by tens of per cent at least.
"""


class CompilableObjective(Protocol):
    """The part of the objective that the trial needs. forward: the callable that runs the UNet."""

    forward: Callable[..., Any]

    def __call__(self, micro_step: int) -> MicroBatchLoss:
        """Compute the loss of a micro-step, with a graph."""


def compile_if_gradients_match(
    objective: CompilableObjective,
    buffers: AdapterBuffers,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    process_group: ProcessGroup = SINGLE_PROCESS,
    backend: str | Callable[..., object] = "inductor",
) -> bool:
    """Compile the objective's UNet if the gradient matches eager mode on every rank.

    Weights and gradient buffer are restored afterwards.

    Args:
        objective: The objective, whose ``forward`` is replaced.
        buffers: Flat buffers of the adapter.
        say: Called with each message.
        warn: Called with each warning.
        process_group: The ranks, which decide together.
        backend: Backend of torch.compile.

    Returns:
        True if the UNet is compiled.
    """
    begun, graphs = time.monotonic(), _graphs()
    eager = objective.forward
    before = buffers.working.clone()
    _fill_up_projections(buffers)
    try:
        expected = _trial_gradient(objective, buffers)
        objective.forward = _without_gradients(torch.compile(eager, backend=backend), buffers)
        found = _trial_gradient(objective, buffers)
        off, group = largest_difference(buffers, expected, found)
        limit = LIMITS[buffers.plan.compute]
        problem = None if off <= limit else _too_far(off, group, limit)
        if _graphs() == graphs:
            problem = "nothing of the UNet could be compiled"
    except Exception as error:  # compilers raise whatever their own dependencies raise
        cause = getattr(error, "inner_exception", error)  # torch's wrapper omits the reason
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        problem = f"the compiler failed ({reason})"
    finally:
        with torch.no_grad():
            buffers.working.copy_(before)
        buffers.zero_gradient()
    problems = process_group.all_gather_object(problem)
    if any(problems):
        objective.forward = eager
        warn(f"training.compile: {_objection(problems)}; continuing without compilation")
        return False
    seconds = time.monotonic() - begun
    say(
        f"compile: {_graphs() - graphs} graphs in {seconds:.0f} s; the first compiled gradient "
        f"matches eager mode to {off:.1g}"
    )
    return True


def _without_gradients(compiled: Callable[..., Any], buffers: AdapterBuffers) -> Callable[..., Any]:
    """Call ``compiled`` while no parameter has a gradient.

    The tracer rejects a parameter whose gradient has another type, as a bf16 working copy with an
    fp32 accumulator does, and would silently leave every adapter layer uncompiled.
    """

    def forward(*arguments: Any, **named: Any) -> Any:
        with buffers.detached_gradients():
            return compiled(*arguments, **named)

    return forward


def largest_difference(
    buffers: AdapterBuffers, expected: Tensor, found: Tensor
) -> tuple[float, str]:
    """Find the group with the largest |found - expected| / |expected|.

    Args:
        buffers: Layout of the groups.
        expected: Flat gradient of eager mode.
        found: Flat gradient of the compiled model.

    Returns:
        The ratio and the group's name. The ratio is infinite if anything is not finite, or nonzero
        where zero is expected.
    """
    worst, where = 0.0, buffers.groups[0].name
    for group in buffers.groups:
        wanted, got = expected[group.start : group.stop], found[group.start : group.stop]
        size = float(wanted.double().norm())
        off = float((got.double() - wanted.double()).norm())
        ratio = 0.0 if off == 0.0 else off / size if size > 0.0 else float("inf")
        ratio = ratio if ratio == ratio else float("inf")
        if ratio > worst:
            worst, where = ratio, group.name
    return worst, where


def _graphs() -> int:
    """Count the graphs compiled by this process; a tracer that gives up does not raise."""
    return int(counters["stats"]["unique_graphs"])


def _trial_gradient(objective: CompilableObjective, buffers: AdapterBuffers) -> Tensor:
    buffers.zero_gradient()
    (objective(0).loss_sum * TRIAL_SCALE).backward()
    return buffers.gradient.clone()


@torch.no_grad()
def _fill_up_projections(buffers: AdapterBuffers) -> None:
    generator = torch.Generator().manual_seed(0)
    for slot in buffers.slots:
        if slot.factor.name.endswith("lora_B"):
            values = torch.randn(slot.shape, generator=generator) * TRIAL_FILL
            slot.of(buffers.working).copy_(values)


def _objection(problems: Sequence[str | None]) -> str:
    """Describe the first rank's problem, and which ranks have one."""
    objecting = [rank for rank, problem in enumerate(problems) if problem]
    first = problems[objecting[0]] or ""
    if len(problems) == 1:
        return first
    who = "every rank" if len(objecting) == len(problems) else ranks_named(objecting, "")
    return f"{first} on {who} of {len(problems)}"


def _too_far(off: float, group: str, limit: float) -> str:
    how = "is not finite" if off == float("inf") else f"differs from eager mode by {off:.2g}"
    return f"the first compiled gradient of {group} {how} (relative, limit {limit:g})"
