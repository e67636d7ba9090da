"""Detection of gradients that leave the range of ``health.baseline`` at the same progress."""

from pydantic import TypeAdapter

from kubelora_api.schema import JsonObject
from kubelora_api.thresholds import BASELINE_DEPARTURE
from kubelora_trainer.health.baseline import Baseline
from kubelora_trainer.health.baseline_envelope import Passage, pass_through
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, RunStart
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.telemetry.step_metrics import StepNumbers

_PASSAGE = TypeAdapter(Passage)


class BaselineDeparture(Detector):
    """A comparison of gradient norms with a baseline's, if there is one."""

    rows = (BASELINE_DEPARTURE,)

    def __init__(self, baseline: Baseline | None, total_steps: int) -> None:
        self._baseline, self._total_steps = baseline, total_steps
        self._passage = Passage()

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Restart the comparison if an earlier attempt measured progress on another length."""
        if start.planned_before not in (None, self._total_steps):
            self._passage = Passage()
        return NOTHING

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Judge each bin of progress with its last step."""
        if self._baseline is None or self._baseline.envelope is None:
            return NOTHING
        name, envelope = BASELINE_DEPARTURE.finding, self._baseline.envelope
        self._passage = pass_through(self._passage, numbers, envelope, self._total_steps)
        if self._passage.departed is None:
            return Judgement(cleared=frozenset({name}))
        finding = self._baseline.finding(self._passage.departed)
        earlier = known.shown(name)
        if earlier is not None:  # it has been shown since it began
            finding = finding.model_copy(update={"since_step": earlier.since_step})
        return Judgement((finding,))

    def state(self) -> JsonObject:
        """Return the run's position in the baseline's range."""
        return {"passage": _PASSAGE.dump_python(self._passage, mode="json")}

    def load(self, saved: JsonObject) -> None:
        """Restore it."""
        self._passage = _PASSAGE.validate_python(saved.get("passage", {}))
