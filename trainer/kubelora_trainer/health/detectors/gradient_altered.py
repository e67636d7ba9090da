"""Detection of gradients that are lost or altered between a backward pass and the optimizer.

The accumulator is followed on a few elements of every slot: empty when a window begins, untouched
between two backward passes, changed by each of them, and at the end, divided and clipped, what the
last pass left. A micro-step that is lost on both factors of a module obeys the chain rule, so that
no measurement of the finished gradient shows it; here each pass is counted on the buffer itself.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from kubelora_api.finding_rows import Event
from kubelora_api.findings_of_steps import (
    ADAPTER_TOO_LARGE,
    GRADIENT_ALTERED,
    MICRO_BATCH_LOST,
)
from kubelora_api.status import Finding
from kubelora_trainer.health.detector import (
    NOTHING,
    BackwardFacts,
    Detector,
    Judgement,
    RunStart,
    UpdateFacts,
)
from kubelora_trainer.health.detectors.quantities import EMBEDDINGS, RunFacts
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.lora.factor_names import DOWN
from kubelora_trainer.telemetry.slot_sample import SlotSample
from kubelora_trainer.telemetry.step_metrics import StepNumbers

_ROWS: Final = (MICRO_BATCH_LOST, GRADIENT_ALTERED)
_BETWEEN, _SILENT, _LOST, _PASSES, _FINAL = (
    f"gradient.{name}" for name in ("between", "silent", "lost", "passes", "final")
)


_Found = tuple[int | None, float, str]
"""Slot (None: of the step), value, and description of what is wrong."""


class GradientAltered(Detector):
    """A record of what happens to sampled elements of the accumulator in a window."""

    rows = _ROWS

    def __init__(self, facts: RunFacts) -> None:
        self._facts = facts
        self._start: RunStart | None = None
        self._judged: tuple[bool, ...] = ()

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Choose the elements."""
        buffers = start.buffers
        self._start = start
        self._sample = SlotSample(buffers.slots, buffers.gradient.device)
        self._none = torch.zeros(
            len(buffers.slots), dtype=torch.int64, device=buffers.gradient.device
        )
        # fp16 may round a micro-batch's own gradient to 0, and a narrow sum may absorb it.
        exact = buffers.plan.accumulator == torch.float32
        exact = exact and buffers.plan.compute != torch.float16
        self._judged = tuple(
            exact and _always_moves(slot.factor.group, facts.reads_text, self._facts.dropout)
            for slot, facts in zip(buffers.slots, self._facts.factors, strict=True)
        )
        self._forget()
        return NOTHING

    def _forget(self) -> None:
        self._begun = False
        self._before: list[Tensor] = []
        self._after: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._measured: dict[str, Tensor] = {}

    def before_backward(self, facts: BackwardFacts) -> None:
        """Take the elements as the pass before left them, or as the window begins."""
        if self._start is None:
            return
        if facts.place == 0:
            self._forget()
            self._begun = True  # else the window was resumed in its middle
            self._sample.move_to(facts.step)
        self._before.append(self._sample.take(self._start.buffers.gradient))
        self._losses.append(facts.loss)

    def on_backward(self) -> None:
        """Take the elements as the pass leaves them. Nothing is compared before the window ends."""
        if self._start is not None and len(self._after) < len(self._before):
            self._after.append(self._sample.take(self._start.buffers.gradient))

    def before_update(self, update: UpdateFacts) -> None:
        """Compare all passes, and the finished gradient with the sum that the last one left."""
        if self._start is None or not self._after or len(self._after) != len(self._before):
            self._forget()
            return
        before, after = torch.stack(self._before), torch.stack(self._after)
        first = torch.zeros_like(before[:1]) if self._begun else before[:1]
        counts = torch.stack(self._losses) != 0  # of masks and weights that are 0 for all of it
        still = (after == before).all(2) & counts.unsqueeze(1)
        final = self._none + torch.nan
        if update.alone:
            wanted = after[-1].double() * update.scale
            found = self._sample.take(self._start.buffers.gradient).double()
            off = torch.linalg.vector_norm(found - wanted, dim=1)
            final = torch.where(off == 0, 0.0, off / torch.linalg.vector_norm(wanted, dim=1))
        between = before != torch.cat([first, after[:-1]])
        self._forget()
        self._measured = {
            _BETWEEN: between.any(2).sum(0),
            _SILENT: still.sum(0),
            _LOST: still.all(1).sum().reshape(1),
            _PASSES: counts.sum().reshape(1),
            _FINAL: final,
        }

    def measure(self, step: int) -> Mapping[str, Tensor]:
        """Return what the window showed."""
        measured, self._measured = self._measured, {}
        return measured

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise what the worst slot shows, once for as long as it lasts."""
        if numbers.skipped or numbers.nonfinite or _PASSES not in numbers.extra:
            return NOTHING
        raised, gone = [], set()
        lost = self._lost_in(numbers, known.shown(ADAPTER_TOO_LARGE.finding) is not None)
        found_by_row = (lost, self._altered(numbers))
        for row, found in zip(_ROWS, found_by_row, strict=True):
            if found is None:
                gone.add(row.finding)
            elif known.shown(row.finding) is None:
                raised.append(self._finding(row, found, numbers.step))
        names = frozenset(row.finding for row in _ROWS)
        return Judgement(tuple(raised), frozenset(gone), names)

    def _finding(self, row: Event, found: _Found, step: int) -> Finding:
        place, value, what = found
        slots = self._start.buffers.slots if self._start else ()
        factor = None if place is None else slots[place].factor
        worst = f" The worst is {factor.name}." if factor else ""
        return Finding(
            name=row.finding,
            severity=row.severity,
            group=factor.group if factor else None,
            value=value,
            threshold=row.limit,
            since_step=step,
            message=f"{what}{worst} {row.sentence}",
        )

    def _lost_in(self, numbers: StepNumbers, saturated: bool) -> _Found | None:
        """Judge what micro-batches changed.

        saturated: whether weights are so large that single modules have no gradient because of it.
        """
        (lost,), (passes,) = numbers.extra[_LOST], numbers.extra[_PASSES]
        if lost:
            what = f"{lost:.0f} of {passes:.0f} micro-batches left the accumulator as it was."
            return None, lost, what
        silent = [
            count if judged and 0 < count < passes else 0.0
            for count, judged in zip(numbers.extra[_SILENT], self._judged, strict=True)
        ]
        if saturated or not any(silent):
            return None
        place = silent.index(max(silent))
        what = f"{silent[place]:.0f} of {passes:.0f} micro-batches left this factor as it was."
        return place, silent[place], what

    def _altered(self, numbers: StepNumbers) -> _Found | None:
        between, final = numbers.extra[_BETWEEN], numbers.extra[_FINAL]
        if any(between):
            wrong = sum(one > 0 for one in between)
            what = f"{wrong} of {len(between)} factors changed between two backward passes."
            return _place_of_most(between), max(between), what
        limit = (GRADIENT_ALTERED.limit or 0.0) * (1.0 if self._exact_sum else _NARROW)
        if not any(one > limit for one in final):
            return None
        wrong = sum(one > limit for one in final)
        what = (
            f"The finished gradient of {wrong} of {len(final)} factors is not what the last "
            "backward pass left, divided and clipped."
        )
        return _place_of_most(final), max(final), what

    @property
    def _exact_sum(self) -> bool:
        return bool(self._start and self._start.buffers.plan.accumulator == torch.float32)


_NARROW: Final = 3.0
"""Factor of the limit for a sum in bf16, which each of three multiplications rounds by 0.4 %."""


def _place_of_most(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: values[place])


def _always_moves(group: str, reads_text: bool, dropout: float) -> bool:
    """Return whether every micro-batch with a loss gives such a factor a gradient.

    Empty captions may silence layers that read the text; lora_A has no gradient where its input is
    0: sines of sizes, and columns that dropout has left out.
    """
    down = group.endswith(DOWN)
    return not reads_text and not (down and (dropout > 0 or group.startswith(EMBEDDINGS)))
