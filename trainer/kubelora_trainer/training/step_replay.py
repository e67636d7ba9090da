"""The cause of a critical finding: the step that shows it is computed again, and compared.

Kept of the newest step are the weights it was computed with and the sum of its gradients. Another
sum is the hardware's fault. The same one is the data's or the code's, or nobody's as far as it can
be known:

| the step again | its inputs | other samples | its samples, drawn again | cause |
|---|---|---|---|---|
| differs | | | | Hardware |
| same, a micro-batch is broken | not finite | | | Data |
| same, a micro-batch is broken | finite | broken as well | | Code |
| same, a micro-batch is broken | finite | fine | broken as well | Data |
| anything else | | | | Unknown |

A micro-batch is broken if its gradient is not finite, or far larger than those of the steps before.
"""

import shlex
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from kubelora_api.findings_of_steps import (
    BASE_MODEL_ALTERED,
    COMPUTATION_UNSTABLE,
    GRADIENT_ALTERED,
    GRADIENT_CORRUPTED,
    MICRO_BATCH_LOST,
    STATE_ALTERED,
)
from kubelora_api.status import Cause, Finding
from kubelora_api.thresholds import GRADIENT_NONFINITE, WORKING_COPY_STALE
from kubelora_trainer.data.sampler import SampleOrder
from kubelora_trainer.health.watch_state import with_cause
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts
from kubelora_trainer.training.recomputation import Recomputation, weights_in_use
from kubelora_trainer.training.step_audit import StepAudit

OTHER_MICRO_STEPS: Final = 4
"""Micro-steps of other samples that a broken one is compared with."""
BROKEN_NORM: Final = 1e3
"""Gradient norm over the median of the steps before from which a micro-batch is broken: losses
alone differ by 250 between the first timestep and the last."""
KEPT_NORMS: Final = 26
"""Steps whose gradient norm is kept, the newest included."""
LOOKED_THROUGH: Final = 2000
"""Micro-steps in which another draw of a sample is looked for: each costs a hash per sample."""
MAX_REPLAYS: Final = 20
"""Findings of an attempt that are replayed: under policy Warn one may come and go for ever."""
MAX_SAMPLES: Final = 4
"""Samples that a finding names, so that the status stays small."""
_WRITTEN_BETWEEN: Final = frozenset(
    row.finding for row in (MICRO_BATCH_LOST, GRADIENT_ALTERED, STATE_ALTERED, WORKING_COPY_STALE)
)
"""Findings of writes into the run's own buffers, which change the sum or the weights that are kept:
such a difference does not show who wrote."""
_OF_A_MICRO_BATCH: Final = frozenset(
    row.finding for row in (GRADIENT_NONFINITE, GRADIENT_CORRUPTED)
)
"""Findings whose effect a single micro-batch's gradient has."""
_OF_THE_WEIGHTS: Final = frozenset(row.finding for row in (BASE_MODEL_ALTERED, STATE_ALTERED))
"""Findings with which broken gradients of every sample are no sign of the code."""


@dataclass(frozen=True)
class RunSite:
    """Where the run computes. run: its output. samples: the name of each sample's file."""

    node: str
    device: str
    run: str
    samples: Sequence[str] = ()


@dataclass(frozen=True)
class _Kept:
    step: int
    micro_steps: tuple[int, ...]
    gradient: Tensor
    weights: list[Tensor]
    scale: Tensor | None


class StepReplay:
    """The newest step's operands and result, and the cause of what it shows."""

    def __init__(
        self,
        recomputation: Recomputation,
        audit: StepAudit,
        order: SampleOrder,
        place: RunSite,
        *,
        alone: bool = True,
    ) -> None:
        """alone: whether no other rank has a part in the gradient."""
        self._recomputation, self._audit = recomputation, audit
        self._order, self._place, self._alone = order, place, alone
        self._kept: _Kept | None = None
        self._window: list[int] | None = None
        self._replays = 0
        self._norms: deque[Tensor] = deque(maxlen=KEPT_NORMS)
        self.objective: Callable[[int], object] = recomputation.own

    def begin_window(self, fresh: bool) -> None:
        """Begin to note micro-steps. fresh: whether this process computes all of the window."""
        if fresh:
            self._window = []

    def computed(self, micro_step: int) -> None:
        """Note a micro-step, as the data's order counts."""
        if self._window is not None:
            self._window.append(micro_step)

    def keep(self, step: int) -> None:
        """Copy the finished window's sum, and the weights it was computed with."""
        window, self._window = self._window, None
        if not window:
            self._kept = None
            return
        again = self._recomputation
        norm = torch.linalg.vector_norm(again.buffers.gradient, dtype=torch.float32)
        self._norms.append(norm / len(window))
        weights, kept = weights_in_use(again.buffers), self._kept
        scale = again.scaler.scale.clone() if again.scaler else None
        if kept is None:
            copies = [part.clone() for part in weights]
            gradient = again.buffers.gradient.clone()
            self._kept = _Kept(step, tuple(window), gradient, copies, scale)
            return
        kept.gradient.copy_(again.buffers.gradient)
        for copy, part in zip(kept.weights, weights, strict=True):
            copy.copy_(part)
        self._kept = replace(kept, step=step, micro_steps=tuple(window), scale=scale)

    def explain(self, finding: Finding, step: int, active: frozenset[str]) -> Finding:
        """Add the cause of ``finding``, as the newest step shows it.

        Args:
            finding: The finding, which has no cause yet.
            step: The newest step whose numbers are known.
            active: Names of all findings that it shows.
        """
        if finding.name == COMPUTATION_UNSTABLE.finding:
            return self._with(finding, "Hardware", (), "two passes of one micro-step differ")
        if finding.name in _WRITTEN_BETWEEN:
            why = "something writes into the run's own buffers, and who can't be known"
            return self._with(finding, "Unknown", (), why)
        kept = self._kept
        if kept is None or kept.step != step or self._replays >= MAX_REPLAYS:
            return self._with(finding, "Unknown", (), "the step can't be computed again here")
        self._replays += 1
        again = self._recomputation
        with again.set_aside(), again.using_bits(kept.weights, kept.scale):
            return self._replayed(kept, finding, active)

    def _replayed(self, kept: _Kept, finding: Finding, active: frozenset[str]) -> Finding:
        def once() -> Tensor:
            return self._recomputation.gradient(self.objective, kept.micro_steps)

        off, factor = self._audit.hardware_distance(kept.gradient, once(), once)
        if off:
            how = f"the step computed again has another gradient (in {factor} by {off:.2g})"
            return self._with(finding, "Hardware", self._samples_of(kept.micro_steps), how)
        if not self._alone or finding.name not in _OF_A_MICRO_BATCH:
            others = "" if self._alone else ", and what other ranks computed is not known here"
            return self._with(
                finding, "Unknown", (), f"the step computed again has the same gradient{others}"
            )
        return self._data_or_code(kept, finding, active)

    def _data_or_code(self, kept: _Kept, finding: Finding, active: frozenset[str]) -> Finding:
        last = kept.micro_steps[-1]
        others = [last + 1 + place for place in range(OTHER_MICRO_STEPS)]
        norms = {m: self._norm(m) for m in (*kept.micro_steps, *others)}
        limit = self._limit(norms.values())
        broken = [m for m in kept.micro_steps if not norms[m] <= limit]
        if not broken:
            why = "computed again, no micro-batch of the step shows it"
            return self._with(finding, "Unknown", (), why)
        names = self._samples_of(broken)
        if wrong := self._not_finite(broken):
            return self._with(finding, "Data", wrong, "what is loaded for them is not finite")
        suspects = {draw.sample for m in broken for draw in self._order.samples_of(m)}
        apart = [m for m in norms if self._without(m, suspects)]
        if apart and all(not norms[m] <= limit for m in apart):
            if active & _OF_THE_WEIGHTS:
                why = "every sample shows it, and weights were altered"
                return self._with(finding, "Unknown", names, why)
            return self._with(finding, "Code", (), "every sample shows it, to the same bits")
        again = self._drawn_again(suspects, max(others))
        if again is not None and not self._norm(again) <= limit:
            return self._with(finding, "Data", names, "they show it with every draw, others don't")
        why = "the same bits again, but neither other samples nor other draws of these show it"
        return self._with(finding, "Unknown", names, why)

    def _norm(self, micro_step: int) -> float:
        gradient = self._recomputation.gradient(self.objective, [micro_step])
        return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))

    def _limit(self, norms: Iterable[float]) -> float:
        """Return the norm above which a micro-batch's gradient is broken; NaN is above any.

        Compared are the steps before, or the first step's own micro-batches and those after.
        """
        before = torch.stack([*self._norms][:-1]).tolist() if len(self._norms) > 1 else [*norms]
        finite = [norm for norm in before if _finite(norm)]
        return BROKEN_NORM * statistics.median(finite) if finite else sys.float_info.max

    def _not_finite(self, micro_steps: Sequence[int]) -> tuple[str, ...]:
        """Return the samples whose latent or embedding is not finite."""
        seen: list[MicroBatchFacts] = []
        own, before = self._recomputation.own, self._recomputation.own.observer
        own.observer = seen.append
        try:
            for micro_step in micro_steps:
                self._recomputation.loss(micro_step)
        finally:
            own.observer = before
        wrong = [
            sample
            for facts in seen
            for finite in facts.finite.values()
            for sample, fine in zip(facts.samples, finite.tolist(), strict=True)
            if not fine
        ]
        return self._names(wrong)

    def _without(self, micro_step: int, samples: set[int]) -> bool:
        return not samples & {draw.sample for draw in self._order.samples_of(micro_step)}

    def _drawn_again(self, samples: set[int], after: int) -> int | None:
        """Return a later micro-step with one of ``samples``."""
        later = range(after + 1, after + 1 + LOOKED_THROUGH)
        return next((m for m in later if not self._without(m, samples)), None)

    def _samples_of(self, micro_steps: Sequence[int]) -> tuple[str, ...]:
        return self._names([d.sample for m in micro_steps for d in self._order.samples_of(m)])

    def _names(self, samples: Sequence[int]) -> tuple[str, ...]:
        names, files = list(dict.fromkeys(samples)), self._place.samples
        return tuple(files[s] if s < len(files) else f"sample {s}" for s in names)

    def _with(self, finding: Finding, cause: Cause, samples: Sequence[str], why: str) -> Finding:
        """Add the cause to the finding and to its sentence, which is cut where it is long."""
        shown = [name[-MAX_NAME:] for name in samples[:MAX_SAMPLES]]
        more = f" and {len(samples) - MAX_SAMPLES} more" if len(samples) > MAX_SAMPLES else ""
        of = f" Samples: {', '.join(shown)}{more}." if shown else ""
        where = ""
        if cause == "Hardware":
            where = f" Node {self._place.node}, device {self._place.device}."
        elsewhere = ""
        if self._kept is not None:
            elsewhere = (
                " On another machine: kubelora replay "
                f"{shlex.quote(self._place.run)} --step {self._kept.step}."
            )
        sentence = with_cause(finding.message, f"{cause}: {why}.{where}{of}{elsewhere}")
        return finding.model_copy(
            update={
                "cause": cause,
                "samples": shown or None,
                "node": self._place.node,
                "device": self._place.device,
                "message": sentence,
            }
        )


MAX_NAME: Final = 120
"""Characters of a sample's name, its end: names of files are paths within the dataset."""


def _finite(norm: float) -> bool:
    return norm - norm == 0.0
