"""The run log: three tables for notebooks, whose columns ``docs/run-log.md`` documents.

``metrics.parquet``: one row per optimizer step and adapter factor. ``groups.parquet``: one per step
and group, with every measurement that is a metric. ``categories.parquet``, if images have
categories: one per step and category. Values that were not measured in a step are null.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kubelora_api.names import OutputPath
from kubelora_trainer.optim.flat_buffers import Slot
from kubelora_trainer.reporting.arrow_columns import measured_column, name_column, number_column
from kubelora_trainer.reporting.parquet_log import ParquetParts
from kubelora_trainer.storage.output_dir import (
    CATEGORY_LOG_PARTS,
    GROUP_LOG_PARTS,
    RUN_LOG_PARTS,
    OutputFolder,
)
from kubelora_trainer.telemetry.step_metrics import GROUP_FIELDS, StepNumbers
from kubelora_trainer.utils.errors import OutputError

if TYPE_CHECKING:
    import pyarrow as pa  # 30 MiB, imported when rows are written, not before the first step

ROWS_IN_MEMORY = 1 << 18
"""Factor rows buffered before a part is written: about 30 MiB, for any checkpoint interval."""


class RunLog:
    """A log that buffers rows, writes them in parts, and joins the parts at the end."""

    def __init__(
        self,
        folder: OutputFolder,
        slots: Sequence[Slot],
        resumed_step: int,
        warn: Callable[[str], None],
    ) -> None:
        """Open the log of a new or resumed run.

        Args:
            folder: The output directory.
            slots: The adapter's factors.
            resumed_step: Step that the run resumes from.
            warn: Called for each part that a crash has damaged; its rows are lost.
        """

        def parts_of(parts: str, target: OutputPath) -> ParquetParts:
            return ParquetParts(folder, parts, target, resumed_step, warn)

        self._factors = parts_of(RUN_LOG_PARTS, OutputPath.RUN_LOG)
        self._groups = parts_of(GROUP_LOG_PARTS, OutputPath.GROUP_LOG)
        self._categories = parts_of(CATEGORY_LOG_PARTS, OutputPath.CATEGORY_LOG)
        self._names = {
            "module": [s.factor.module for s in slots],
            "factor": [s.factor.name.rpartition(".")[2] for s in slots],
            "group": [s.factor.group for s in slots],
        }
        self._steps: list[StepNumbers] = []

    def rewind(self, step: int) -> None:
        """Drop the rows of all steps after ``step``, because these steps are repeated."""
        self._steps = [numbers for numbers in self._steps if numbers.step <= step]
        for parts in (self._factors, self._groups, self._categories):
            parts.rewind(step)

    def append(self, numbers: StepNumbers) -> None:
        """Buffer one step's rows. Raises OutputError if a part is due and the disk refuses it."""
        self._steps.append(numbers)
        if len(self._steps) * len(self._names["module"]) >= ROWS_IN_MEMORY:
            self.flush()

    def flush(self) -> None:
        """Write the buffered rows as one part. Raises OutputError if the disk refuses it."""
        if not self._steps:
            return
        first, last = self._steps[0].step, self._steps[-1].step
        self._factors.write(_by_factor(self._steps, self._names), first, last)
        self._groups.write(_by_group(self._steps), first, last)
        if any(step.category_losses for step in self._steps):
            self._categories.write(_by_category(self._steps), first, last)
        self._steps = []

    def finish(self) -> Path:
        """Join all parts and return the path of ``metrics.parquet``."""
        self.flush()
        self._categories.finish()
        self._groups.finish()
        return self._factors.finish()


def _by_factor(steps: Sequence[StepNumbers], names: Mapping[str, list[str]]) -> "pa.Table":
    import pyarrow as pa

    count = len(names["module"])

    def of_step(values: list[float], dtype: str) -> "pa.Array":
        return measured_column(np.repeat(np.asarray(values, dtype=dtype), count))

    def of_factor(values: list[Sequence[float]]) -> np.ndarray:
        return np.asarray(values, "float32").ravel()

    columns = {
        "step": of_step([s.step for s in steps], "int32"),
        **{name: name_column(values * len(steps)) for name, values in names.items()},
        "grad_norm": number_column(of_factor([s.factor_norms for s in steps])),
        "grad_absmax": number_column(of_factor([s.factor_absmax for s in steps])),
        "lora_balance": measured_column(of_factor([s.factor_balance for s in steps])),
        "update_scale": measured_column(of_factor([s.factor_update_scale for s in steps])),
        "loss": of_step([s.loss for s in steps], "float32"),
        "learning_rate": of_step([s.learning_rate for s in steps], "float64"),
        "total_grad_norm": of_step([s.grad_norm for s in steps], "float32"),
        "clipped_grad_norm": of_step([s.clipped_norm for s in steps], "float32"),
        "samples": of_step([s.samples for s in steps], "int32"),
        "backward_passes": of_step([s.backward_passes for s in steps], "float32"),
        "micro_steps": of_step([s.micro_steps for s in steps], "int32"),
        "dead_modules": of_step([s.dead_modules for s in steps], "int32"),
    }
    return pa.table(columns)


def _by_group(steps: Sequence[StepNumbers]) -> "pa.Table":
    import pyarrow as pa

    rows = [(step.step, name, group) for step in steps for name, group in step.groups.items()]
    return pa.table(
        {
            "step": number_column(np.asarray([step for step, _, _ in rows], "int32")),
            "group": name_column([name for _, name, _ in rows]),
            **{
                field: measured_column(
                    np.asarray([getattr(g, field) for _, _, g in rows], "float32")
                )
                for field in GROUP_FIELDS.values()
            },
        }
    )


def _by_category(steps: Sequence[StepNumbers]) -> "pa.Table":
    import pyarrow as pa

    rows = [(s.step, name, c) for s in steps for name, c in sorted(s.category_losses.items())]
    return pa.table(
        {
            "step": number_column(np.asarray([step for step, _, _ in rows], "int32")),
            "category": name_column([name for _, name, _ in rows]),
            "loss": number_column(np.asarray([c.loss for _, _, c in rows], "float32")),
            "samples": number_column(np.asarray([c.samples for _, _, c in rows], "int32")),
        }
    )


@contextmanager
def flush_on_error(log: "RunLog | NoLog") -> Iterator[None]:
    """Flush the log if training raises, so that the last steps before the error are kept.

    A run that resumes from an earlier checkpoint drops and repeats them.
    """
    try:
        yield
    except Exception:
        with suppress(OutputError):  # report the original error
            log.flush()
        raise


class NoLog:
    """A log that discards everything, on ranks that do not write it."""

    def append(self, numbers: StepNumbers) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def rewind(self, step: int) -> None:
        """Do nothing."""
