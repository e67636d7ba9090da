"""``metrics.parquet``: one row per optimizer step and adapter factor, for notebooks.

Columns:
- ``step`` int32: optimizer steps done, this one included;
- ``module`` string, ``factor`` string (``lora_A`` or ``lora_B``), ``group`` string;
- ``grad_norm`` float32, ``grad_absmax`` float32: of the accumulated gradient before clipping;
- ``loss`` float32, ``learning_rate`` float64, ``total_grad_norm`` float32: of the step, the same
  in all its rows (they compress to nothing).

While the run goes on, rows stand in parts that are written whole at each checkpoint; the end joins
them. A part beyond the checkpoint that a run resumes from is dropped, for its steps come again.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kubelora_api.names import OutputPath
from kubelora_trainer.atomic_files import sync_folder, writing_to
from kubelora_trainer.buffers import Slot
from kubelora_trainer.output import RUN_LOG_PARTS, OutputFolder
from kubelora_trainer.step_numbers import StepNumbers

_PART = re.compile(r"steps-(\d+)-(\d+)\.parquet")


class RunLog:
    """Collects rows in memory, writes them in parts, joins the parts at the end."""

    def __init__(self, folder: OutputFolder, slots: Sequence[Slot], resumed_step: int) -> None:
        self._folder = folder
        self._parts = folder.path / RUN_LOG_PARTS
        self._names = {
            "module": [s.factor.module for s in slots],
            "factor": [s.factor.name.rpartition(".")[2] for s in slots],
            "group": [s.factor.group for s in slots],
        }
        self._steps: list[StepNumbers] = []
        with writing_to(self._parts):
            self._parts.mkdir(exist_ok=True)
            for path in list(self._parts.iterdir()):
                match = _PART.fullmatch(path.name)
                if match is None or int(match[2]) > resumed_step:
                    path.unlink()

    def append(self, numbers: StepNumbers) -> None:
        """Keep one step's rows."""
        self._steps.append(numbers)

    def flush(self) -> None:
        """Write the rows kept so far as one part. Raises ConfigurationError if refused."""
        if not self._steps:
            return
        first, last = self._steps[0].step, self._steps[-1].step
        self._folder.assert_ours()
        _write(self._table(), self._parts / f"steps-{first:08d}-{last:08d}.parquet")
        self._steps = []

    def finish(self) -> Path:
        """Join all parts to ``metrics.parquet``, one row group per part; returns its path."""
        self.flush()
        self._folder.assert_ours()
        target = self._folder.place(OutputPath.RUN_LOG)
        parts = sorted(self._parts.glob("steps-*.parquet"))
        aside = target.with_name(f".{target.name}.part")
        if not parts:
            return target
        with writing_to(target):
            with pq.ParquetWriter(aside, pq.read_schema(parts[0]), compression="zstd") as writer:
                for part in parts:
                    writer.write_table(pq.read_table(part))
            aside.replace(target)
            sync_folder(target.parent)
            shutil.rmtree(self._parts)
        return target

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


def _write(table: pa.Table, path: Path) -> None:
    aside = path.with_name(f".{path.name}.part")
    with writing_to(path):
        pq.write_table(table, aside, compression="zstd")
        aside.replace(path)
        sync_folder(path.parent)
