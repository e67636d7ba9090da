"""Progress in the terminal: a bar, or occasional lines."""

import logging
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.text import duration_text

logger = logging.getLogger(__name__)


class ProgressView(Protocol):
    """A view that shows each reported step."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, numbers: StepNumbers, seconds_left: float | None) -> None:
        """Show one optimizer step."""


def build_progress(console: Console, total_steps: int, done: int) -> ProgressView:
    """Build a bar on a terminal; otherwise lines, at least 20 per run and one per 50 steps.

    Args:
        console: Console of the progress bar.
        total_steps: Optimizer steps of the run.
        done: Optimizer steps already done.
    """
    if console.is_terminal:
        return BarView(console, total_steps, done)
    return LineView(total_steps, every=max(1, min(50, total_steps // 20)))


class BarView:
    """A rich progress bar: step, loss, gradient norm, time left."""

    def __init__(self, console: Console, total_steps: int, done: int) -> None:
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task: TaskID = self._bar.add_task(
            "training", total=total_steps, completed=done, numbers=""
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, numbers: StepNumbers, seconds_left: float | None) -> None:
        """Update the bar."""
        text = f"loss {numbers.loss:.4f}  grad norm {numbers.grad_norm:.3g}"
        if seconds_left is not None:
            text += f"  ETA {duration_text(seconds_left)}"
        self._bar.update(self._task, completed=numbers.step, numbers=text)


class LineView:
    """One line per ``every`` steps, and for the last step."""

    def __init__(self, total_steps: int, every: int) -> None:
        self._total, self._every = total_steps, every

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, numbers: StepNumbers, seconds_left: float | None) -> None:
        """Print the step if it is due."""
        if numbers.step % self._every and numbers.step != self._total:
            return
        left = "" if seconds_left is None else f" eta={duration_text(seconds_left)}"
        logger.info(
            f"step={numbers.step}/{self._total} loss={numbers.loss:.4f} "
            f"grad_norm={numbers.grad_norm:.4g} lr={numbers.learning_rate:.3g}{left}"
        )
