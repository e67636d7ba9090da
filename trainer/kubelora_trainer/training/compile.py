"""torch.compile for the UNet, trusted only after its first gradient agrees with eager's.

Compiled backward passes have been seen to give NaN, or gradients off by orders of magnitude,
without a word. So one micro-step is run both ways before training begins; where they disagree, or
the compiler fails, the run goes on without compilation and says why. Ranks decide together: sums of
compiled and eager gradients would differ from either, and slow ranks hold up the others.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from kubelora_trainer.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from kubelora_trainer.objective.sdxl_loss import MicroBatchLoss
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.utils.text import ranks_named

TRIAL_FILL = 1e-2
"""Deviation of what lora_B is filled with for the trial; at 0 it would hide lora_A's gradient."""
TRIAL_SCALE = 2.0**10
"""The trial's loss is scaled by this, so that fp16 has numbers for its gradients."""
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest |compiled - eager| / |eager| of a group's gradient, by compute type.

Fused kernels round less often than eager ones. bf16 has 8 bits: a gradient that went through some
hundred roundings to 2^-9 is known to a few per cent; fp16 has 3 bits more. What this guards against
is wrong by tens of per cent at least.
"""


class CompilableObjective(Protocol):
    """The objective, as far as the trial needs it. forward: what calls the UNet."""

    forward: Callable[..., Any]

    def __call__(self, micro_step: int) -> MicroBatchLoss:
        """Loss of a micro-step, with a graph."""


def compile_if_gradients_match(
    objective: CompilableObjective,
    buffers: AdapterBuffers,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    process_group: ProcessGroup = SINGLE_PROCESS,
    backend: str | Callable[..., object] = "inductor",
) -> bool:
    """Compile the objective's UNet where that gives eager's gradient; whether it does.

    Every rank judges its own; all compile, or none does where one has a reason against it.
    Weights and gradient buffer are afterwards as they were. backend: of torch.compile.
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
        cause = getattr(error, "inner_exception", error)  # of which torch's own words tell nothing
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        problem = f"the compiler failed ({reason})"
    finally:
        with torch.no_grad():
            buffers.working.copy_(before)
        buffers.zero_gradient()
    problems = process_group.all_gather_object(problem)
    if any(problems):
        objective.forward = eager
        warn(f"training.compile: {_objection(problems)}; the run goes on without compilation")
        return False
    seconds = time.monotonic() - begun
    say(
        f"compile: {_graphs() - graphs} graphs in {seconds:.0f} s; the first compiled gradient is "
        f"eager's to {off:.1g}"
    )
    return True


def _without_gradients(compiled: Callable[..., Any], buffers: AdapterBuffers) -> Callable[..., Any]:
    """``compiled``, called while no parameter has a gradient.

    The tracer refuses a parameter whose gradient has another type, as a bf16 working copy with an
    fp32 accumulator does, and would leave every adapter layer uncompiled without a word.
    """

    def forward(*arguments: Any, **named: Any) -> Any:
        with buffers.detached_gradients():
            return compiled(*arguments, **named)

    return forward


def largest_difference(
    buffers: AdapterBuffers, expected: Tensor, found: Tensor
) -> tuple[float, str]:
    """The largest |found - expected| / |expected| over groups, and the group's name.

    Infinite where anything is not finite, or is something where nothing is expected.
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
    """Graphs that this process has compiled; a tracer that gives up raises nothing."""
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
    """What the first rank with a problem says, and who else has one."""
    objecting = [rank for rank, problem in enumerate(problems) if problem]
    first = problems[objecting[0]] or ""
    if len(problems) == 1:
        return first
    who = "every rank" if len(objecting) == len(problems) else ranks_named(objecting, "")
    return f"{first} on {who} of {len(problems)}"


def _too_far(off: float, group: str, limit: float) -> str:
    how = "is not finite" if off == float("inf") else f"is off by {off:.2g} of its size"
    return f"the first compiled gradient of {group} {how} (eager's is trusted, limit {limit:g})"
