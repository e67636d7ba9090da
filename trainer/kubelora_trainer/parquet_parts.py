"""A table that grows while a run goes on: parts written at checkpoints, joined at the end.

A part beyond the checkpoint that a run resumes from is dropped, for its steps come again: every
step stands in the table once, through kills and resumes.
"""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from kubelora_api.names import OutputPath
from kubelora_trainer.atomic_files import sync_folder, writing_to
from kubelora_trainer.output import OutputFolder

if TYPE_CHECKING:
    import pyarrow as pa  # loaded when rows are written, not before the first step

_PART = re.compile(r"steps-(\d+)-(\d+)\.parquet")


class ParquetParts:
    """Parts in the folder ``parts`` of the output, and the table ``target`` that they become."""

    def __init__(
        self, folder: OutputFolder, parts: str, target: OutputPath, resumed_step: int
    ) -> None:
        self._folder, self._parts = folder, folder.path / parts
        self._target = folder.place(target)
        with writing_to(self._parts):
            self._parts.mkdir(exist_ok=True)
            self._reopen(resumed_step)
        self.rewind(resumed_step)

    def _reopen(self, step: int) -> None:
        """Take a joined table apart again, for a run that goes on behind its end.

        The table holds all that the parts did, so those that a kill left beside it are dropped.
        """
        if not self._target.exists():
            return
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        for left in list(self._parts.iterdir()):
            left.unlink()
        with pq.ParquetFile(self._target) as joined:
            for number in range(joined.num_row_groups):
                rows = joined.read_row_group(number)
                rows = rows.filter(pc.less_equal(rows["step"], step))
                if rows.num_rows:
                    steps = pc.min_max(rows["step"])
                    self.write(rows, steps["min"].as_py(), steps["max"].as_py())
        self._target.unlink()

    def rewind(self, step: int) -> None:
        """Drop the parts that hold steps after ``step``."""
        with writing_to(self._parts):
            for path in list(self._parts.iterdir()):
                match = _PART.fullmatch(path.name)
                if match is None or int(match[2]) > step:
                    path.unlink()

    def write(self, table: "pa.Table", first: int, last: int) -> None:
        """Write the rows of steps ``first`` to ``last``. Raises ConfigurationError if refused."""
        import pyarrow.parquet as pq

        self._folder.assert_ours()
        path = self._parts / f"steps-{first:08d}-{last:08d}.parquet"
        aside = path.with_name(f".{path.name}.part")
        with writing_to(path):
            pq.write_table(table, aside, compression="zstd")
            aside.replace(path)
            sync_folder(path.parent)

    def finish(self) -> Path:
        """Join all parts, one row group each; returns the table's path."""
        import pyarrow.parquet as pq

        self._folder.assert_ours()
        target = self._target
        parts = sorted(self._parts.glob("steps-*.parquet"))
        aside = target.with_name(f".{target.name}.part")
        if not parts:
            shutil.rmtree(self._parts, ignore_errors=True)
            return target
        with writing_to(target):
            with pq.ParquetWriter(aside, pq.read_schema(parts[0]), compression="zstd") as writer:
                for part in parts:
                    writer.write_table(pq.ParquetFile(part).read())
            aside.replace(target)
            sync_folder(target.parent)
            shutil.rmtree(self._parts)
        return target
