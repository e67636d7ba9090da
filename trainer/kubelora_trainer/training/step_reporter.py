"""Distribution of a step's numbers: watchdog, metrics, status report, run log, progress.

It is in one place so that the loop only calls `expect` and `drain`. Numbers arrive one step late,
because the copy from the device is asynchronous; ``drain`` reads the last.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kubelora_api.names import OutputPath
from kubelora_api.report import RunPhase
from kubelora_api.spec import Health
from kubelora_api.status import CheckpointStatus, Finding
from kubelora_trainer.checkpoint.directories import SavedCheckpoint
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.health import policy as health_policy
from kubelora_trainer.health.detector import RunStart
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.health.watchdog import Watchdog
from kubelora_trainer.optim.flat_buffers import Slot
from kubelora_trainer.reporting.http_server import Board, Exporter
from kubelora_trainer.reporting.metrics import TrainerMetrics
from kubelora_trainer.reporting.progress_bar import ProgressView
from kubelora_trainer.reporting.run_log import NoLog, RunLog
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.telemetry.host_transfer import PendingNumbers
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.telemetry.worst_modules import worst_modules
from kubelora_trainer.utils.errors import DeviceError, SuspendedByPolicyError

logger = logging.getLogger(__name__)

UNSETTLED_STEPS = 3
"""First steps excluded from the gradient-norm range, because lora_B starts at 0."""
PACE_STEPS = 50
"""Number of steps whose mean duration predicts the time left."""


Explain = Callable[[Finding, int, frozenset[str]], Finding]
"""Adds the cause to a finding of a step, given the names of all findings that show."""


class Reporter:
    """A reporter that distributes each step's numbers.

    watchdog: already started, from ``position``. also: called with each step's numbers (trackers).
    """

    def __init__(
        self,
        *,
        slots: tuple[Slot, ...],
        policy: Health,
        watchdog: Watchdog,
        metrics: TrainerMetrics,
        exporter: Exporter | Board,
        run_log: RunLog | NoLog,
        progress: ProgressView,
        position: RunPosition,
        also: Callable[[StepNumbers], None] = lambda numbers: None,
        clock: Callable[[], float] = time.monotonic,
        leave_device: bool = False,
    ) -> None:
        """leave_device: whether a finding that is the hardware's fault ends the attempt.

        An operator starts the next one on another node.
        """
        self._slots, self._policy = slots, policy
        self.watchdog = watchdog
        self._metrics, self._exporter = metrics, exporter
        self._run_log, self._progress = run_log, progress
        self._clock, self._also = clock, also
        self.leave_device = leave_device
        self.explain: Explain | None = None
        self._pending: PendingNumbers | None = None
        self._pace: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=PACE_STEPS + 1)
        self._rollback = position.rollback
        self.norm_range = position.norm_range
        self._useful_seconds = position.useful_seconds

    @property
    def watch(self) -> WatchState:
        """The watchdog's state, as a checkpoint saves it."""
        return self.watchdog.snapshot()

    def expect(self, pending: PendingNumbers) -> None:
        """Keep numbers that are still being copied."""
        self._pending = pending

    def drain(self, saving: bool = False) -> None:
        """Read and report the numbers on their way, if any.

        saving: whether a checkpoint of this step is saved next.
        Raises NumericalError for a gradient that is not finite or a broken start-up contract, and
        what the health policy demands for a critical finding: PolicyError, SuspendedByPolicyError,
        RollbackRequiredError.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._report(pending.read(), saving)

    def rewind(self, position: RunPosition, start: RunStart) -> None:
        """Continue from an earlier position. Raises NumericalError if its state can't be right."""
        self._pending = None
        self._rollback = position.rollback
        self.norm_range = position.norm_range
        self._useful_seconds = position.useful_seconds
        self.watchdog.start(position.watch, start)
        self._run_log.rewind(position.step)
        self._exporter.report = self._exporter.report.model_copy(
            update={"step": position.step, "health": self.watchdog.state.status()}
        )

    def position(self, position: RunPosition) -> RunPosition:
        """Add the reporter's state to ``position``, for a checkpoint."""
        return replace(
            position,
            watch=self.watch,
            norm_range=self.norm_range,
            useful_seconds=self._useful_seconds,
        )

    def phase(self, phase: RunPhase) -> None:
        """Publish the phase of the run."""
        self._exporter.report = self._exporter.report.model_copy(update={"phase": phase})

    def checkpointed(self, saved: SavedCheckpoint, folder: OutputFolder) -> None:
        """Publish the newest checkpoint: just written, or the one resumed from."""
        self._metrics.checkpointed(saved.step, saved.path.stat().st_mtime)
        uri = f"{folder.job.spec.output.uri.rstrip('/')}/{OutputPath.CHECKPOINTS}/{saved.path.name}"
        status = CheckpointStatus(step=saved.step, uri=uri)
        self._exporter.report = self._exporter.report.model_copy(update={"checkpoint": status})

    def _report(self, numbers: StepNumbers, saving: bool) -> None:
        self.watchdog.on_step(numbers)
        if saving:
            self.watchdog.on_checkpoint(numbers.step)
        self._explain(numbers.step)
        self.norm_range = _widen(self.norm_range, numbers.grad_norm, numbers.step)
        seconds, per_second, left = self._timing(numbers)
        self._useful_seconds += seconds
        self._metrics.publish(numbers, self.watchdog.state, seconds)
        self._exporter.report = self._exporter.report.model_copy(
            update={
                "step": numbers.step,
                "loss": _finite_or_none(numbers.loss),
                "category_loss": self._exporter.report.category_loss | _of_categories(numbers),
                "grad_norm": _finite_or_none(numbers.grad_norm),
                "adapter_size": _finite_or_none(numbers.adapter_size)
                or self._exporter.report.adapter_size,
                "learning_rate": significant(numbers.learning_rate),
                "samples_per_second": significant(per_second),
                "seconds_left": significant(left),
                "useful_seconds": self._useful_seconds,
                "health": self.watchdog.state.status(),
            }
        )
        self._exporter.worst_modules = partial(worst_modules, self._slots, numbers)
        self._run_log.append(numbers)
        self._progress.show(numbers, left)
        self._also(numbers)
        self._judge()

    def _judge(self) -> None:
        """Raise the error due. A rollback or a suspension comes before a broken contract."""
        finding = self.watchdog.state.due
        if self.leave_device and finding and finding.cause == "Hardware":
            raise DeviceError(
                f"{health_policy.sentence(finding)}; the next attempt resumes from the last "
                "checkpoint and prefers another node; have this one's device checked"
            )
        due = health_policy.verdict_on(finding, self._policy, self._rollback) if finding else None
        if isinstance(due, SuspendedByPolicyError):
            self.watchdog.accept()
            raise due
        if due and self._policy.policy == "Rollback":
            raise due
        self.watchdog.raise_broken()
        if due:
            raise due

    def _explain(self, step: int) -> None:
        if self.explain is None:
            return
        explain = self.explain
        for finding in self.watchdog.explain(lambda one, active: explain(one, step, active)):
            logger.warning(health_policy.sentence(finding))

    def _timing(self, numbers: StepNumbers) -> tuple[float, float, float]:
        """Compute this step's seconds, samples per second and seconds left, at the recent pace."""
        before = self._pace[-1][0]
        self._pace.append((self._clock(), numbers.samples))
        elapsed = max(self._pace[-1][0] - self._pace[0][0], 1e-9)
        steps = len(self._pace) - 1
        samples = sum(count for _, count in list(self._pace)[1:])
        left = self._exporter.report.total_steps - numbers.step
        return self._pace[-1][0] - before, samples / elapsed, left * elapsed / steps


def _widen(seen: tuple[float, float] | None, norm: float, step: int) -> tuple[float, float] | None:
    if norm - norm != 0.0:
        return seen
    # The first settled step discards the range of the unsettled ones.
    if seen is None or step == UNSETTLED_STEPS + 1:
        return (norm, norm)
    return (min(seen[0], norm), max(seen[1], norm))


def _of_categories(numbers: StepNumbers) -> dict[str, float]:
    """Return losses by category, without values that JSON cannot represent."""
    rounded = {n: _finite_or_none(c.loss) for n, c in numbers.category_losses.items()}
    return {name: loss for name, loss in rounded.items() if loss is not None}


def significant(value: float) -> float:
    """Round to four significant digits: more are noise, and `kubectl get` prints them all."""
    return float(f"{value:.4g}")


def _finite_or_none(value: float) -> float | None:
    return significant(value) if value - value == 0.0 else None
