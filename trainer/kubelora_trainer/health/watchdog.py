"""The watchdog, which runs the detectors and keeps what they found.

It calls every detector at each moment of a run, in the order of their tuple, and merges their
conclusions into one state. Detectors decide what is wrong; ``policy.py`` decides what follows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from kubelora_api.status import Finding
from kubelora_api.thresholds import GRADIENT_NONFINITE, THRESHOLDS
from kubelora_trainer.health.detector import (
    AuditFacts,
    BackwardFacts,
    Detector,
    Judgement,
    RunStart,
    UpdateFacts,
)
from kubelora_trainer.health.watch_state import CAUSE, WatchState, with_cause
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.errors import NumericalError, OutputError


class Watchdog:
    """The detectors of one run, and what they found so far.

    state: what they found; `snapshot` adds the detectors' own state.
    """

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.state = WatchState()
        self._detectors = tuple(detectors)
        self._broken: NumericalError | None = None

    def start(self, saved: WatchState, start: RunStart) -> list[str]:
        """Start from ``saved``; returns the lines to log.

        Raises NumericalError if the start breaks a contract, and OutputError for a state that
        another version saved.
        """
        self.state, self._broken = replace(saved, detectors={}), None
        lines: list[str] = []
        for detector in self._detectors:
            _load(detector, saved)
            concluded = detector.on_start(start, self.state)
            self._take(concluded)
            lines += concluded.lines
        return lines

    def on_micro_batch(self, facts: MicroBatchFacts) -> None:
        """Pass the facts of a micro-batch to the detectors."""
        for detector in self._detectors:
            detector.on_micro_batch(facts)

    def before_backward(self, facts: BackwardFacts) -> None:
        """Let the detectors look at the accumulator before a backward pass."""
        for detector in self._detectors:
            detector.before_backward(facts)

    def on_backward(self) -> None:
        """Check a backward pass. Raises NumericalError for a broken contract."""
        for detector in self._detectors:
            detector.on_backward()

    def on_audit(self, facts: AuditFacts) -> None:
        """Pass what an audit showed to the detectors."""
        for detector in self._detectors:
            detector.on_audit(facts)

    def before_update(self, update: UpdateFacts) -> None:
        """Let the detectors look at everything before the optimizer step."""
        for detector in self._detectors:
            detector.before_update(update)

    def measure(self, step: int) -> dict[str, Tensor]:
        """Collect the tensors that detectors want to read with the numbers of ``step``."""
        wanted: dict[str, Tensor] = {}
        for detector in self._detectors:
            wanted |= detector.measure(step)
        return wanted

    def on_step(self, numbers: StepNumbers) -> None:
        """Judge one optimizer step. A broken contract is kept for `raise_broken`."""
        self._broken = None
        for detector in self._detectors:
            with self._kept():
                self._take(detector.on_step(numbers, self.state))
        self.state = replace(self.state, accepted=self.state.accepted & self.state.active)

    def on_checkpoint(self, step: int) -> None:
        """Judge the state that is about to be saved, after `on_step` with the same step."""
        for detector in self._detectors:
            with self._kept():
                self._take(detector.on_checkpoint(step, self.state))

    def explain(self, cause_of: Callable[[Finding, frozenset[str]], Finding]) -> list[Finding]:
        """Add causes to critical findings that show now and have none; returns those.

        cause_of: given a finding and the names of all that show.
        """
        state = self.state
        unexplained = [
            state.found[name]
            for name in sorted(state.active)
            if state.found[name].severity == "critical" and state.found[name].cause is None
        ]
        explained = [cause_of(finding, state.active) for finding in unexplained]
        found = {**state.found, **{finding.name: finding for finding in explained}}
        self.state = replace(state, found=found)
        return explained

    def raise_broken(self) -> None:
        """Raise the broken contract of the newest step.

        Separate from `on_step` because ``health.policy`` comes first: a rollback undoes the step.
        """
        if self._broken is not None:
            raise self._broken

    def accept(self) -> None:
        """Accept the active findings, because the user resumed the run knowing them.

        They stay accepted while they last: what is found once, such as constant latents, lasts to
        the end of the run. A gradient that is not finite is an event of its own each time.
        """
        accepted = self.state.active - {GRADIENT_NONFINITE.finding}
        self.state = replace(self.state, accepted=accepted)

    def snapshot(self) -> WatchState:
        """Return the state with that of the detectors, for a checkpoint."""
        remembered: dict[str, object] = {}
        for detector in self._detectors:
            remembered |= detector.state()
        return replace(self.state, detectors=remembered)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep the first NumericalError that is raised in the block."""
        try:
            yield
        except NumericalError as broken:
            self._broken = self._broken or broken

    def _take(self, concluded: Judgement) -> None:
        state = self.state
        raised = {f.name: _explained_before(f, state.shown(f.name)) for f in concluded.raised}
        if concluded.judged <= state.judged and not raised and not concluded.cleared & state.active:
            return
        self.state = replace(
            state,
            judged=state.judged | concluded.judged,
            found={**state.found, **raised},
            active=(state.active - concluded.cleared) | raised.keys(),
        )


def _explained_before(finding: Finding, before: Finding | None) -> Finding:
    """Keep the cause of a finding that is raised again while it lasts."""
    if before is None or before.cause is None or finding.cause is not None:
        return finding
    _, _, why = before.message.partition(CAUSE)
    kept = {name: getattr(before, name) for name in ("cause", "samples", "node", "device")}
    return finding.model_copy(update={**kept, "message": with_cause(finding.message, why)})


def last_healthy_step(finding: Finding) -> int:
    """Return the last optimizer step before all values behind the finding."""
    windows = {t.finding: t.window for t in THRESHOLDS}
    return max(0, (finding.since_step or 0) - windows.get(finding.name, 1))


HINDSIGHT_STEPS = max(t.window for t in THRESHOLDS) + 1
"""Steps after which a fault has been found: the longest window, plus one as numbers come late."""


def _load(detector: Detector, saved: WatchState) -> None:
    try:
        detector.load(saved.detectors)
    except ValueError as error:
        raise OutputError(
            f"the checkpoint's state of {type(detector).__name__} is of another form ({error}), so "
            "another version of kubelora saved it; resume with that version, or choose another "
            "spec.output.uri"
        ) from None
