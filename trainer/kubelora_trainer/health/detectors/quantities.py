"""Quantities that are compared with the table's limits: one number per group of a step.

Most limits are on a metric itself. The others are on a quantity made of it and of what is known of
the run; each is a pure function here, under the finding's name. NaN means: not to be judged now.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Final

from kubelora_api import thresholds
from kubelora_api.thresholds import ACCUMULATION_ERROR_LAW, Threshold
from kubelora_api.training_spec import Training
from kubelora_trainer.lora.factor_names import DOWN, UP
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Slot
from kubelora_trainer.optim.precision import DTYPE_NAMES
from kubelora_trainer.telemetry.step_metrics import GROUP_FIELDS, STEP_FIELDS, StepNumbers

REFERENCE_LOSSES = 25
"""First losses that later ones are compared with."""
SETTLED_STEPS = 5
"""Steps before a resume that the first ones after it are compared with."""
RESUMED_STEPS = 3
"""First steps after a resume that are judged together."""
JUDGED_SHARE = 0.9
"""Share of a run in which a rate of 0 is a fault; decays end in the rest."""
LEAST_ROWS = 4
"""Rows of input that a layer of attention gets from a sample: 2 x 2 positions of 64 pixels."""
DROPPED_COLUMNS = 1e-3
"""Share of columns without any input, by dropout, up to which zeros are judged."""
LEAST_PRODUCTS = 4
"""Numbers that a block's A · grad(A)^T have at least, where it is judged: a single one is a sum
that passes through 0 now and then, and leaves rounding alone to be compared."""
EMBEDDINGS = "embed."
"""Begin of the groups whose inputs hold exact zeros: sines and cosines of sizes and time."""

Values = Mapping[str | None, float]
"""By group; None for a number of the step."""


@dataclass(frozen=True)
class FactorFacts:
    """One factor of the adapter.

    reads_text: whether its layer's input is the caption. rows: of input, that a sample brings at
    least. rank: of the module; 0 for a factor of another kind.
    """

    group: str
    numel: int
    reads_text: bool
    rows: int = LEAST_ROWS
    rank: int = LEAST_PRODUCTS


@dataclass(frozen=True)
class RunFacts:
    """Facts that do not change during a run.

    compute: type of the passes. dropout: share of the adapter's inputs that is set to 0.
    finds_rate: whether the optimizer multiplies the rate by a number of its own (Prodigy). factors:
    in slot order.
    """

    compute: str
    max_grad_norm: float
    peak_rate: float
    total_steps: int
    dropout: float
    factors: tuple[FactorFacts, ...]
    finds_rate: bool = False

    @cached_property
    def products(self) -> Mapping[str, int]:
        """By group: numbers that its modules' A · grad(A)^T have together."""
        found: dict[str, int] = {}
        for factor in self.factors:
            found[factor.group] = found.get(factor.group, 0) + factor.rank**2
        return found

    @cached_property
    def fresh_sizes(self) -> Mapping[str, float]:
        """By block: root mean square of a fresh lora_A, uniform up to 1 / sqrt(inputs)."""
        squares: dict[str, float] = {}
        counts: dict[str, int] = {}
        for factor in self.factors:
            block, _, kind = factor.group.rpartition(".")
            if kind == DOWN:  # rank x inputs numbers of 1 / (3 * inputs)
                squares[block] = squares.get(block, 0.0) + factor.rank / 3
                counts[block] = counts.get(block, 0) + factor.numel
        return {block: math.sqrt(squares[block] / counts[block]) for block in squares}


@dataclass(frozen=True)
class Memory:
    """Numbers of earlier steps that a step is judged by.

    first_losses: of the run. scales: newest update scales by group. before: what they were at the
    last resume, emptied once that is judged. since: update scales of each group since then.
    """

    first_losses: tuple[float, ...] = ()
    scales: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # Whether it was resumed makes no run another.
    before: Mapping[str, float] = field(default_factory=dict, compare=False)
    since: Mapping[str, tuple[float, ...]] = field(default_factory=dict, compare=False)


def facts_of(
    training: Training, buffers: AdapterBuffers, total_steps: int, dropout: float = 0.0
) -> RunFacts:
    """Collect the facts of a run.

    Args:
        training: The job's settings.
        buffers: The adapter.
        total_steps: Optimizer steps of the run.
        dropout: ``adapter.dropout``.
    """
    factors = tuple(
        FactorFacts(
            slot.factor.group,
            math.prod(slot.shape),
            ".attn2." in f".{slot.factor.module}.",
            1 if slot.factor.module.endswith("time_emb_proj") else LEAST_ROWS,
            _rank(slot),
        )
        for slot in buffers.slots
    )
    return RunFacts(
        compute=DTYPE_NAMES[buffers.plan.compute],
        max_grad_norm=training.max_grad_norm,
        peak_rate=training.peak_rate,
        total_steps=total_steps,
        dropout=dropout,
        factors=factors,
        finds_rate=training.optimizer.finds_rate,
    )


def _rank(slot: Slot) -> int:
    """Return the rank: lora_A is (rank, ...), lora_B (outputs, rank, ...)."""
    kind = slot.factor.name.rpartition(".")[2]
    return slot.shape[0] if kind == DOWN else slot.shape[1] if kind == UP else 0


def values_of(
    threshold: Threshold, numbers: StepNumbers, facts: RunFacts, memory: Memory
) -> Values:
    """Return what ``threshold`` is compared with in this step, by group.

    Args:
        threshold: The row of the table.
        numbers: The step's numbers.
        facts: The run.
        memory: What earlier steps left.
    """
    if quantity := QUANTITIES.get(threshold.finding):
        return quantity(numbers, facts, memory)
    name = threshold.metric.name
    if name in STEP_FIELDS:
        return {None: float(getattr(numbers, STEP_FIELDS[name]))}
    return {g: float(getattr(n, GROUP_FIELDS[name])) for g, n in numbers.groups.items()}


def remembered(memory: Memory, numbers: StepNumbers) -> Memory:
    """Add one step to the memory."""
    losses = memory.first_losses
    if len(losses) < REFERENCE_LOSSES and math.isfinite(numbers.loss):
        losses = (*losses, numbers.loss)
    scales = dict(memory.scales)
    since = dict(memory.since)
    for group, n in numbers.groups.items():
        if math.isfinite(n.update_scale):
            scales[group] = (*scales.get(group, ()), n.update_scale)[-SETTLED_STEPS:]
            if memory.before:
                since[group] = (*since.get(group, ()), n.update_scale)
    judged = any(len(s) >= RESUMED_STEPS for s in since.values())
    if judged:
        return Memory(losses, scales)
    return Memory(losses, scales, memory.before, since)


def at_resume(memory: Memory) -> Memory:
    """Prepare the memory of a run that was just resumed."""
    settled = {
        group: median(scales)
        for group, scales in memory.scales.items()
        if len(scales) == SETTLED_STEPS
    }
    return Memory(memory.first_losses, memory.scales, settled)


def _eps_damping(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    up = (g for g in numbers.groups if g.endswith(".lora_B"))
    return {g: numbers.groups[g].adam_eps_damping_ratio for g in up}


def _accumulation_error(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    law = ACCUMULATION_ERROR_LAW * math.sqrt((numbers.micro_steps + 1) / 2)
    return {g: n.accumulation_error_ratio / law for g, n in numbers.groups.items()}


def _balance(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    return {
        group: n.lora_balance if facts.products.get(group, 0) >= LEAST_PRODUCTS else math.nan
        for group, n in numbers.groups.items()
    }


def _zeros_of_live_modules(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    sizes = dict.fromkeys(numbers.groups, 0)
    dead = dict.fromkeys(numbers.groups, 0)
    dropped = set()
    for factor, norm in zip(facts.factors, numbers.factor_norms, strict=True):
        sizes[factor.group] += factor.numel
        dead[factor.group] += factor.numel if norm == 0 else 0
        # A column of lora_A whose input was dropped in every row has no gradient.
        if facts.dropout ** (factor.rows * numbers.samples) > DROPPED_COLUMNS:
            dropped.add(factor.group)
    return {
        group: (n.grad_zero_ratio * sizes[group] - dead[group]) / (sizes[group] - dead[group])
        if sizes[group] > dead[group]
        and not group.startswith(EMBEDDINGS)
        and not (group in dropped and group.endswith(DOWN))
        else math.nan
        for group, n in numbers.groups.items()
    }


def _dead_modules(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    text = [
        norm
        for factor, norm in zip(facts.factors, numbers.factor_norms, strict=True)
        if factor.reads_text
    ]
    modules = sum(f.reads_text and f.group.endswith(".lora_B") for f in facts.factors)
    silenced = bool(text) and not any(text) and numbers.dead_modules == modules
    return {None: math.nan if silenced else float(numbers.dead_modules)}


def _backward_passes(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    return {
        None: numbers.backward_passes / numbers.micro_steps if numbers.micro_steps else math.nan
    }


def _rate_in_the_middle(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    middle = numbers.step <= JUDGED_SHARE * facts.total_steps
    return {None: numbers.learning_rate / facts.peak_rate if middle else math.nan}


def _rate(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    return {None: numbers.learning_rate / facts.peak_rate}


def _loss_ratio(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    if len(memory.first_losses) < REFERENCE_LOSSES:
        return {None: math.nan}
    reference = median(memory.first_losses)
    return {None: numbers.loss / reference if reference > 0 else math.nan}


def _change(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    return {
        group: n.update_rms / facts.fresh_sizes.get(group.rpartition(".")[0], math.nan)
        for group, n in numbers.groups.items()
    }


def _clipping(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    norm, most = numbers.grad_norm, facts.max_grad_norm
    if norm == 0 or not math.isfinite(norm):
        return {None: math.nan}
    wanted = norm * min(1.0, most / (norm + 1e-6)) if most else norm
    return {None: abs(numbers.clipped_norm / wanted - 1.0)}


def _first_steps_resumed(numbers: StepNumbers, facts: RunFacts, memory: Memory) -> Values:
    if facts.finds_rate:  # steps grow by themselves while the rate does
        return {None: math.nan}
    values: dict[str | None, float] = {}
    for group, before in memory.before.items():
        scale = numbers.groups[group].update_scale if group in numbers.groups else math.nan
        scales: Sequence[float] = (*memory.since.get(group, ()), scale)
        whole = len(scales) == RESUMED_STEPS and before > 0
        values[group] = median(scales) / before if whole else math.nan
    return values


QUANTITIES: Final[Mapping[str, Callable[[StepNumbers, RunFacts, Memory], Values]]] = {
    thresholds.UPDATES_DAMPED.finding: _eps_damping,
    thresholds.ACCUMULATION_ERROR.finding: _accumulation_error,
    thresholds.GRADIENT_IMBALANCE.finding: _balance,
    thresholds.GRADIENT_UNDERFLOW.finding: _zeros_of_live_modules,
    thresholds.DEAD_MODULES.finding: _dead_modules,
    thresholds.BACKWARD_PASSES_MISSING.finding: _backward_passes,
    thresholds.LEARNING_RATE_ZERO.finding: _rate_in_the_middle,
    thresholds.LEARNING_RATE_ABOVE_PLAN.finding: _rate,
    thresholds.LOSS_DIVERGED.finding: _loss_ratio,
    thresholds.UPDATES_TOO_LARGE.finding: _change,
    thresholds.CLIPPING_WRONG.finding: _clipping,
    thresholds.OPTIMIZER_STATE_LOST.finding: _first_steps_resumed,
}
