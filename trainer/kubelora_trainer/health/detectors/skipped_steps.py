"""Detection of steps that fp16 throws away, again and again, because of the same samples.

A loss scaler that settles skips some steps, and one every 2,000 later. What is left of a window
whose step is skipped is nothing: an image that always overflows takes its window with it, every
time, and is never learned. No measurement of gradients shows that, because such a step has none.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from kubelora_api.findings_of_steps import TOO_MANY_SKIPPED
from kubelora_api.schema import JsonObject
from kubelora_api.status import Finding
from kubelora_trainer.health.detector import NOTHING, Detector, Judgement, UpdateFacts
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts
from kubelora_trainer.telemetry.step_metrics import StepNumbers

SHARE_OF_STEPS: Final = 25
"""Steps of which a share is judged."""
KEPT_IN_A_ROW: Final = 3
"""Steps in a row that are not skipped, after which the scale has settled."""
ALWAYS: Final = 2
"""Windows of a sample, all of them skipped, that make it the cause whatever the share is."""
_SHOWN: Final = 3
"""Samples that the message names."""


class SkippedSteps(Detector):
    """The share of skipped steps after settling, and the samples that they have in common."""

    rows = (TOO_MANY_SKIPPED,)

    def __init__(self, names: Sequence[str] = ()) -> None:
        """names: of the samples, in the dataset's order."""
        self._names = names
        self._window: set[int] = set()
        self._windows: dict[int, set[int]] = {}
        self._recent: deque[bool] = deque(maxlen=SHARE_OF_STEPS)
        self._good_in_a_row = 0
        self._settled = False
        self._skipped: dict[int, int] = {}
        self._kept: set[int] = set()

    def on_micro_batch(self, facts: MicroBatchFacts) -> None:
        """Note the samples of the window."""
        self._window.update(facts.samples)

    def before_update(self, update: UpdateFacts) -> None:
        """Close the window."""
        self._windows[update.step], self._window = self._window, set()

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Count the step, and raise what has been skipped too often."""
        samples = self._windows.pop(numbers.step, set())
        skipped = numbers.skipped
        self._good_in_a_row = 0 if skipped else self._good_in_a_row + 1
        self._settled = self._settled or self._good_in_a_row >= KEPT_IN_A_ROW
        if skipped:
            # While the scale settles every sample is skipped, whichever overflows.
            for sample in samples if self._settled else ():
                self._skipped[sample] = self._skipped.get(sample, 0) + 1
        else:
            self._kept |= samples
        if self._settled:
            self._recent.append(skipped)
        return self._judge(numbers.step, skipped, known)

    def _judge(self, step: int, skipped: bool, known: WatchState) -> Judgement:
        share = sum(self._recent) / SHARE_OF_STEPS
        limit, name = TOO_MANY_SKIPPED.limit or 1.0, TOO_MANY_SKIPPED.finding
        never = {s: n for s, n in self._skipped.items() if s not in self._kept}
        always = {s for s, n in never.items() if n >= ALWAYS}
        if not (share > limit or (skipped and always)):
            gone = frozenset({name}) if not any(self._recent) else frozenset[str]()
            return Judgement(cleared=gone)
        if known.shown(name) is not None and not skipped:
            return NOTHING
        earlier = known.shown(name)
        suspects = sorted(never, key=lambda sample: -never[sample])[:_SHOWN]
        shown = ", ".join(self._names[s] if s < len(self._names) else f"{s}" for s in suspects)
        who = f" Samples of which every window was skipped: {shown}." if suspects else ""
        finding = Finding(
            name=name,
            severity=TOO_MANY_SKIPPED.severity,
            value=share,
            threshold=limit,
            since_step=earlier.since_step if earlier else step,
            message=f"{sum(self._recent)} of the last {len(self._recent)} steps were skipped "
            f"because a gradient overflowed.{who} {TOO_MANY_SKIPPED.sentence}",
        )
        return Judgement((finding,))

    def state(self) -> JsonObject:
        """Return the counts."""
        return {
            "skipped_steps": {
                "recent": list(self._recent),
                "in_a_row": self._good_in_a_row,
                "settled": self._settled,
                "window": sorted(self._window),
                "skipped": {str(sample): count for sample, count in self._skipped.items()},
                "kept": sorted(self._kept),
            }
        }

    def load(self, saved: JsonObject) -> None:
        """Restore them."""
        own = saved.get("skipped_steps", {})
        self._recent = deque(own.get("recent", ()), maxlen=SHARE_OF_STEPS)
        self._settled = bool(own.get("settled", False))
        self._skipped = {int(s): int(n) for s, n in own.get("skipped", {}).items()}
        self._kept = set(own.get("kept", ()))
        self._good_in_a_row = int(own.get("in_a_row", 0))
        self._window, self._windows = set(own.get("window", ())), {}
