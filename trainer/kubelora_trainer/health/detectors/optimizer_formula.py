"""Detection of an optimizer that does not do what its formula asks, in any single factor.

A few elements of every slot are updated once more, by the formulas of ``update_formulas.py``, from
the gradient, the state and the weights before the step and from the job's own rate and decay. Both
the weights' change and the new state must agree to rounding. Slots are not pooled: one factor at
half its rate is as visible as all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from pydantic import TypeAdapter
from torch import Tensor

from kubelora_api.findings_of_steps import OPTIMIZER_WRONG
from kubelora_api.schema import JsonObject
from kubelora_api.status import Finding
from kubelora_api.training_spec import Training
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart, UpdateFacts
from kubelora_trainer.health.detectors.update_formulas import FORMULAS, StepElements, decay_of
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.optim.param_groups import rate_scales
from kubelora_trainer.telemetry.slot_sample import SAMPLES_PER_SLOT, SlotSample
from kubelora_trainer.telemetry.step_metrics import StepNumbers

_ROUNDINGS: Final = 4.0
"""Roundings of the optimizer's type that a result may be off by."""
_LEAST_SHARE: Final = 1e-3
"""Share of a change that it may be off by: a fused kernel evaluates the formula in another order,
and its square root and quotient err by some 1e-6."""
_FROZEN_STEPS: Final = 3
"""Steps without any change that make a factor frozen where there is no formula."""


@dataclass(frozen=True)
class _Before:
    """What is known before a step: sampled elements, and counts."""

    step: int
    rate: float
    weight: Tensor
    gradient: Tensor
    first: Tensor | None
    second: Tensor | None
    count: Tensor
    own_rate: float


class OptimizerFormula(Detector):
    """A comparison of each step of each factor with an independent formula.

    Where there is none (8-bit AdamW, Adafactor) a factor with a gradient must move.
    """

    rows = (OPTIMIZER_WRONG,)

    def __init__(self, training: Training | None) -> None:
        """training: the job's settings; None where the optimizer is not watched."""
        self._training = training
        self._start: RunStart | None = None
        self._before: _Before | None = None
        self._frozen: list[int] = []

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Choose the elements, and look up each factor's rate and decay in the job."""
        if self._training is None:
            return NOTHING
        slots, device = start.buffers.slots, start.buffers.masters.device
        self._start, self._before = start, None
        self._sample = SlotSample(slots, device)
        if len(self._frozen) != len(slots):
            self._frozen = [0] * len(slots)
        decay = decay_of(self._training.optimizer)
        by_slot = [
            (scale, 0.0 if slot.factor.is_magnitude else decay)
            for slot, scale in zip(slots, rate_scales(slots, self._training), strict=True)
        ]
        self._scale, self._decay = (
            torch.tensor(numbers, dtype=torch.float64).unsqueeze(1).to(device)
            for numbers in zip(*by_slot, strict=True)
        )
        return NOTHING

    def before_update(self, update: UpdateFacts) -> None:
        """Take the elements before the step."""
        if self._start is None:
            return
        buffers, optimizer = self._start.buffers, self._start.optimizer
        self._sample.move_to(update.step)
        take, count = self._sample.take, optimizer.step_count
        first, second = optimizer.first_moment, optimizer.second_moment
        exact = isinstance(second, Tensor)
        self._before = _Before(
            update.step,
            update.learning_rate,
            take(buffers.masters),
            take(buffers.gradient).to(buffers.masters.dtype),
            None if first is None else take(first),
            take(second) if exact and second is not None else None,
            count.clone() if isinstance(count, Tensor) else torch.full_like(self._scale[0], count),
            optimizer.own_rate,
        )

    def measure(self, step: int) -> Mapping[str, Tensor]:
        """Compare with the elements after the step."""
        before, self._before = self._before, None
        if before is None or self._start is None or self._training is None or before.step != step:
            return {}
        optimizer, take = self._start.optimizer, self._sample.take
        now = take(self._start.buffers.masters)
        change = now.double() - before.weight.double()
        done = optimizer.step_count - before.count.reshape(())
        found = {
            "optimizer.moved": (change != 0).sum(1),
            "optimizer.live": (before.gradient != 0).sum(1),
            "optimizer.count": done.reshape(1) if isinstance(done, Tensor) else change[0, :1] * 0,
        }
        if self._training.optimizer.name not in FORMULAS:
            return found
        return found | self._compared(before, change)

    def _compared(self, before: _Before, change: Tensor) -> dict[str, Tensor]:
        """Compare change and state with the formula's: by slot, ratio and counts of misses."""
        assert self._start is not None
        assert self._training is not None
        optimizer, take, spec = self._start.optimizer, self._sample.take, self._training.optimizer
        zero = torch.zeros_like(change)
        at = StepElements(
            before.weight.double(),
            before.gradient.double(),
            zero if before.first is None else before.first.double(),
            zero if before.second is None else before.second.double(),
            self._scale * before.rate,
            self._decay,
            before.count.double().reshape(()),
            before.own_rate,
            optimizer.own_rate,
        )
        wanted = FORMULAS[spec.name](spec, at)
        eps = torch.finfo(before.weight.dtype).eps
        rounding = before.weight.double().abs() + wanted.slack
        room = _LEAST_SHARE * wanted.change.abs() + _ROUNDINGS * eps * rounding
        missed = (change - wanted.change).abs() > room
        size = wanted.change.square().sum(1)
        state = torch.zeros_like(missed)
        for old, new, kept in (
            (at.first, wanted.first, optimizer.first_moment),
            (at.second, wanted.second, optimizer.second_moment),
        ):
            if isinstance(kept, Tensor) and new is not None:
                room = _ROUNDINGS * eps * (old.abs() + new.abs() + at.gradient.abs())
                if kept is optimizer.second_moment:
                    room = _ROUNDINGS * eps * torch.maximum(old, new) + _TINY
                state |= (take(kept).double() - new).abs() > room
        return {
            "optimizer.ratio": (change * wanted.change).sum(1) / size,
            "optimizer.missed": missed.sum(1),
            "optimizer.state": state.sum(1),
        }

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise what the worst factor shows."""
        idle = numbers.skipped or numbers.nonfinite or "optimizer.moved" not in numbers.extra
        if idle or self._start is None:
            return NOTHING
        if numbers.learning_rate == 0 and self._start.optimizer.ignores_zero_rate:
            return NOTHING
        told = self._told(numbers)
        if told is None:
            return Judgement(
                cleared=frozenset({OPTIMIZER_WRONG.finding}),
                judged=frozenset({OPTIMIZER_WRONG.finding}),
            )
        earlier = known.shown(OPTIMIZER_WRONG.finding)
        if earlier is not None:
            return NOTHING
        place, value, what = told
        factor = None if place is None else self._start.buffers.slots[place].factor
        worst = f" The worst is {factor.name}." if factor else ""
        finding = Finding(
            name=OPTIMIZER_WRONG.finding,
            severity=OPTIMIZER_WRONG.severity,
            group=factor.group if factor else None,
            value=value,
            threshold=OPTIMIZER_WRONG.limit,
            since_step=numbers.step,
            message=f"{what}{worst} {OPTIMIZER_WRONG.sentence}",
        )
        return Judgement((finding,))

    def state(self) -> JsonObject:
        """Return for how many steps each factor has not moved."""
        return {"frozen": list(self._frozen)} if any(self._frozen) else {}

    def load(self, saved: JsonObject) -> None:
        """Restore them."""
        self._frozen = _COUNTS.validate_python(saved.get("frozen", [])) or [0] * len(self._frozen)

    def _exact_masters(self) -> bool:
        """Whether a small update changes a weight: in 16 bits it is lost, as UpdatesLost shows."""
        return self._start is not None and self._start.buffers.masters.dtype == torch.float32

    def _told(self, numbers: StepNumbers) -> tuple[int | None, float, str] | None:
        """Return slot, value and description of what is wrong; None if nothing is."""
        extra, limit = numbers.extra, OPTIMIZER_WRONG.limit or 0.0
        (counted,) = extra["optimizer.count"]
        if counted > 1:
            return (
                None,
                counted,
                f"The optimizer counted {counted:.0f} steps in step {numbers.step}.",
            )
        for name in ("missed", "state"):
            shares = [count / SAMPLES_PER_SLOT for count in extra.get(f"optimizer.{name}", ())]
            if not shares or max(shares) <= limit:
                continue
            place = shares.index(max(shares))
            wrong = sum(share > limit for share in shares)
            where = f"{wrong} of {len(shares)} factors"
            if name == "state":
                what = f"The state of {where} is not what gradient and formula make of it."
            else:
                ratio = extra["optimizer.ratio"][place]
                what = (
                    f"{where} moved by another amount than the formula gives for their gradient, "
                    f"state, rate and decay: the worst by {ratio:.3g} times that."
                )
            return place, max(shares), what
        return self._frozen_slot(extra)

    def _frozen_slot(self, extra: Mapping[str, Sequence[float]]) -> tuple[int, float, str] | None:
        """Return the first factor that has not moved for some steps, where there is no formula."""
        if "optimizer.missed" in extra or not self._exact_masters():
            return None
        both = zip(extra["optimizer.moved"], extra["optimizer.live"], strict=True)
        still = [moved == 0 and live > 0 for moved, live in both]
        self._frozen = [n + 1 if one else 0 for n, one in zip(self._frozen, still, strict=True)]
        longest = max(self._frozen)
        if longest < _FROZEN_STEPS:
            return None
        place = self._frozen.index(longest)
        return place, 1.0, f"A factor has a gradient and has not moved for {longest} steps."


_COUNTS: Final = TypeAdapter(list[int])
_TINY: Final = 1e-37
"""Second moments below this are next to fp32's smallest normal number, where a GPU may give 0."""
