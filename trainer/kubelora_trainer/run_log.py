"""``metrics.parquet``: one row per optimizer step and adapter factor, for notebooks.

Columns:
- ``step`` int32: optimizer steps done, this one included;
- ``module`` string, ``factor`` string (``lora_A`` or ``lora_B``), ``group`` string;
- ``grad_norm`` float32, ``grad_absmax`` float32: of the accumulated gradient before clipping;
- ``loss`` float32, ``learning_rate`` float64, ``total_grad_norm`` float32: of the step, the same
  in all its rows (they compress to nothing).

``categories.parquet``, where images have categories: one row per optimizer step and category that
it saw, with ``step`` int32, ``category`` string, ``loss`` float32 (mean over the category's
samples) and ``samples`` int32.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from kubelora_api.names import OutputPath
from kubelora_trainer.buffers import Slot
from kubelora_trainer.output import CATEGORY_LOG_PARTS, RUN_LOG_PARTS, OutputFolder
from kubelora_trainer.parquet_parts import ParquetParts
from kubelora_trainer.step_numbers import StepNumbers


class RunLog:
    """Collects rows in memory, writes them in parts, joins the parts at the end."""

    def __init__(self, folder: OutputFolder, slots: Sequence[Slot], resumed_step: int) -> None:
        self._factors = ParquetParts(folder, RUN_LOG_PARTS, OutputPath.RUN_LOG, resumed_step)
        self._categories = ParquetParts(
            folder, CATEGORY_LOG_PARTS, OutputPath.CATEGORY_LOG, resumed_step
        )
        self._names = {
            "module": [s.factor.module for s in slots],
            "factor": [s.factor.name.rpartition(".")[2] for s in slots],
            "group": [s.factor.group for s in slots],
        }
        self._steps: list[StepNumbers] = []

    def rewind(self, step: int) -> None:
        """Drop the rows of all steps after ``step``, for they come again."""
        self._steps = [numbers for numbers in self._steps if numbers.step <= step]
        self._factors.rewind(step)
        self._categories.rewind(step)

    def append(self, numbers: StepNumbers) -> None:
        """Keep one step's rows."""
        self._steps.append(numbers)

    def flush(self) -> None:
        """Write the rows kept so far as one part. Raises ConfigurationError if refused."""
        if not self._steps:
            return
        first, last = self._steps[0].step, self._steps[-1].step
        self._factors.write(self._table(), first, last)
        if any(step.category_losses for step in self._steps):
            self._categories.write(_by_category(self._steps), first, last)
        self._steps = []

    def finish(self) -> Path:
        """Join all parts to the two tables; returns the path of ``metrics.parquet``."""
        self.flush()
        self._categories.finish()
        return self._factors.finish()

    def _table(self) -> pa.Table:
        count = len(self._names["module"])
        steps = self._steps

        def of_step(values: list[float], dtype: str) -> np.ndarray:
            return np.repeat(np.asarray(values, dtype=dtype), count)

        columns = {
            "step": of_step([s.step for s in steps], "int32"),
            **{
                name: pa.array(values * len(steps)).dictionary_encode()
                for name, values in self._names.items()
            },
            "grad_norm": np.asarray([s.factor_norms for s in steps], "float32").ravel(),
            "grad_absmax": np.asarray([s.factor_absmax for s in steps], "float32").ravel(),
            "loss": of_step([s.loss for s in steps], "float32"),
            "learning_rate": of_step([s.learning_rate for s in steps], "float64"),
            "total_grad_norm": of_step([s.grad_norm for s in steps], "float32"),
        }
        return pa.table(columns)


def _by_category(steps: Sequence[StepNumbers]) -> pa.Table:
    rows = [(s.step, name, c) for s in steps for name, c in sorted(s.category_losses.items())]
    return pa.table(
        {
            "step": pa.array([step for step, _, _ in rows], "int32"),
            "category": pa.array([name for _, name, _ in rows]).dictionary_encode(),
            "loss": pa.array([c.loss for _, _, c in rows], "float32"),
            "samples": pa.array([c.samples for _, _, c in rows], "int32"),
        }
    )


class NoLog:
    """In place of a log where another rank keeps it."""

    def append(self, numbers: StepNumbers) -> None:
        """Nothing."""
