"""Detection of weights or optimizer state that something else than the optimizer changed."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from kubelora_api.findings_of_steps import STATE_ALTERED
from kubelora_api.status import Finding
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.optim.state_sums import StateSums
from kubelora_trainer.telemetry.step_metrics import StepNumbers

_WEIGHTS, _STATE = "master weights", "optimizer's state"


class StateAltered(Detector):
    """A comparison of each step's beginning with the end of the one before, bit for bit."""

    rows = (STATE_ALTERED,)

    def __init__(self) -> None:
        self._sums: StateSums | None = None

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Let the optimizer sum at the start and at the end of each step."""
        buffers, optimizer = start.buffers, start.optimizer

        def named() -> list[tuple[str, Sequence[Tensor]]]:
            return [(_WEIGHTS, [buffers.masters]), (_STATE, optimizer.state_buffers)]

        self._sums = optimizer.sums = StateSums(named)
        return NOTHING

    def measure(self, step: int) -> Mapping[str, Tensor]:
        """Return what had changed when the step began."""
        return {} if self._sums is None else {"state.changed": self._sums.changed}

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise what had changed before this step."""
        changed = numbers.extra.get("state.changed", ())
        what = [name for name, one in zip((_WEIGHTS, _STATE), changed, strict=False) if one]
        if not what:
            return Judgement(judged=frozenset({STATE_ALTERED.finding}))
        return _found(what, f"between steps {numbers.step - 1} and {numbers.step}", numbers.step)

    def on_checkpoint(self, step: int, known: WatchState) -> Judgement:
        """Compare once more, so that nothing else is saved than what the step left."""
        if self._sums is None:
            return NOTHING
        changed = self._sums.compare().tolist()
        what = [name for name, one in zip((_WEIGHTS, _STATE), changed, strict=True) if one]
        return _found(what, f"after step {step}", step) if what else NOTHING


def _found(what: Sequence[str], when: str, step: int) -> Judgement:
    finding = Finding(
        name=STATE_ALTERED.finding,
        severity=STATE_ALTERED.severity,
        value=float(len(what)),
        threshold=STATE_ALTERED.limit,
        since_step=step,
        message=f"The {' and the '.join(what)} changed {when}. {STATE_ALTERED.sentence}",
    )
    return Judgement((finding,))
