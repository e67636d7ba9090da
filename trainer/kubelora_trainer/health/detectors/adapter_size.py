"""Detection of an adapter that has grown beyond what an adaptation is.

Too large a learning rate need not raise the loss, which a model's normalisations bound, and each
step by itself may look like any other. What it always does is to make a layer's update as large
as the layer: ‖s·B·A‖ over ‖W‖, in Frobenius norms. The product is never formed, because
‖B·A‖² = tr(AᵀBᵀB·A) = Σ (BᵀB)∘(A·Aᵀ) needs rank x rank numbers alone.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from kubelora_api.findings_of_steps import ADAPTER_TOO_LARGE
from kubelora_api.status import Finding
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart
from kubelora_trainer.health.detectors.quantities import RunFacts
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.gradient_stats import CHUNK_ELEMENTS
from kubelora_trainer.telemetry.lora_balance import batches_of_one_shape, pairs_of
from kubelora_trainer.telemetry.step_metrics import MODULE_SIZES, StepNumbers

SIZED_EVERY_STEPS: Final = 5
"""Steps from one measurement to the next, which takes as long as that of the balance."""


FASTEST_GROWTH: Final = 0.006
"""Size that an adapter may gain a step, on average since training started. A small step that is
taken long enough also ends with a large adapter, and is meant; a rate that is too large is one that
gets there soon. On the tiny model a rate of 1e-3 gains at most 0.0021 a step in 320 steps (at step
160, and slower from there), 1e-2 gains 0.024 and 0.1 gains 0.7: the limit lies between the first
two, by 3 and 4 times."""

FIRST_STEPS_SIZED: Final = 4
"""First steps that are all measured: a rate that is wrong by a thousand times shows at once, and
what saturates because of it would be found first."""


class AdapterSize(Detector):
    """A comparison of each module's update with the weight that it is added to."""

    rows = (ADAPTER_TOO_LARGE,)

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._modules: list[str] = []
        self._groups: list[str] = []
        self._begun: tuple[int, Sequence[float]] = (0, ())

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Compute the norms of the base model's weights."""
        slots, masters = start.buffers.slots, start.buffers.masters
        by_name = {module.full_name: module for module in start.modules}
        pairs = [p for p in pairs_of(slots) if slots[p.down].factor.module in by_name]
        own = [by_name[slots[pair.down].factor.module] for pair in pairs]
        weights = [module.base_weight for module in own if module.base_weight is not None]
        if not pairs or len(weights) < len(pairs):
            return NOTHING
        self._modules, self._groups = [m.full_name for m in own], [p.block for p in pairs]
        scales = torch.tensor([m.scale for m in own], dtype=torch.float64).to(masters.device)
        self._factor = scales / torch.stack([_norm(weight) for weight in weights])
        batches = list(batches_of_one_shape(slots, pairs, CHUNK_ELEMENTS))
        order = torch.tensor([index for batch in batches for index in batch])
        self._place = order.argsort().to(masters.device)
        self._batches = [
            _Batch(
                [slots[pairs[index].down].of(masters).flatten(1) for index in batch],
                [slots[pairs[index].up].of(masters).flatten(1) for index in batch],
            )
            for batch in batches
        ]
        # What a resumed or initialised adapter already has was not gained by these steps.
        self._begun = (start.step, self._measure().tolist())
        return NOTHING

    def measure(self, step: int) -> Mapping[str, Tensor]:
        """Measure the first steps, and every few later."""
        if not self._modules or (step > FIRST_STEPS_SIZED and step % SIZED_EVERY_STEPS):
            return {}
        return {MODULE_SIZES: self._measure()}

    def _measure(self) -> Tensor:
        norms = [batch.norms() for batch in self._batches]
        return torch.cat(norms)[self._place] * self._factor

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Judge what was measured."""
        sizes = numbers.extra.get(MODULE_SIZES)
        return NOTHING if sizes is None else self._judge(sizes, numbers.step, known)

    def on_checkpoint(self, step: int, known: WatchState) -> Judgement:
        """Measure what is about to be saved."""
        if not self._modules:
            return NOTHING
        return self._judge(self._measure().tolist(), step, known)

    def _judge(self, sizes: Sequence[float], step: int, known: WatchState) -> Judgement:
        limit, name = ADAPTER_TOO_LARGE.limit or math.inf, ADAPTER_TOO_LARGE.finding
        step_begun, sizes_begun = self._begun
        beyond = grown_beyond(limit, sizes, sizes_begun, step - step_begun)
        if self._facts.finds_rate or not beyond:
            return Judgement(cleared=frozenset({name}), judged=frozenset({name}))
        place = max(beyond, key=lambda index: sizes[index])
        earlier = known.shown(name)
        if earlier is not None and (earlier.value or 0.0) >= sizes[place]:
            return NOTHING
        growth = (sizes[place] - sizes_begun[place]) / max(1, step - step_begun)
        finding = Finding(
            name=name,
            severity=ADAPTER_TOO_LARGE.severity,
            group=self._groups[place],
            value=sizes[place],
            threshold=limit,
            since_step=earlier.since_step if earlier else step,
            message=f"The update of {self._modules[place]} is {sizes[place]:.3g} times its weight "
            f"and grows by {growth:.2g} a step, and {len(beyond)} of {len(sizes)} modules are "
            f"beyond the limits of {limit:g} and {FASTEST_GROWTH:g}. "
            f"{ADAPTER_TOO_LARGE.sentence}",
        )
        return Judgement((finding,))


def grown_beyond(
    limit: float, sizes: Sequence[float], begun: Sequence[float], steps: int
) -> list[int]:
    """Return the places of the modules that are too large and became so too fast.

    Args:
        limit: Size that is too large.
        sizes: Of each module, now.
        begun: Of each module, where these steps began.
        steps: Optimizer steps since then.
    """
    room = FASTEST_GROWTH * max(1, steps)
    both = enumerate(zip(sizes, begun, strict=True))
    return [place for place, (now, then) in both if now > limit and now - then > room]


class _Batch:
    """Pairs of one shape, multiplied together."""

    def __init__(self, downs: Sequence[Tensor], ups: Sequence[Tensor]) -> None:
        self._downs, self._ups = downs, ups

    def norms(self) -> Tensor:
        """Compute ‖B·A‖ of each pair: fp64 (pairs)."""
        down, up = torch.stack(list(self._downs)).float(), torch.stack(list(self._ups)).float()
        squares = ((down @ down.mT).double() * (up.mT @ up).double()).sum((1, 2))
        return squares.clamp(min=0).sqrt()


def _norm(weight: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(weight.detach(), dtype=torch.float32)
    return norm.double()
