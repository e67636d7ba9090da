"""A table that grows during a run: parts written at checkpoints and joined at the end.

Parts beyond the checkpoint that a run resumes from are dropped, because their steps are repeated.
So every step appears exactly once, in spite of kills and resumes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kubelora_api.names import OutputPath
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.utils.atomic_io import flush_to_disk, sync_folder, writing_to

if TYPE_CHECKING:
    import pyarrow as pa  # imported when rows are written, not before the first step

_PART = re.compile(r"steps-(\d+)-(\d+)\.parquet")


class ParquetParts:
    """Parts in the directory ``parts`` of the output, to be joined to the table ``target``."""

    def __init__(
        self,
        folder: OutputFolder,
        parts: str,
        target: OutputPath,
        resumed_step: int,
        warn: Callable[[str], None],
    ) -> None:
        """Open the parts of a new or resumed run.

        Args:
            folder: The output directory.
            parts: Name of the directory of parts.
            target: The final table.
            resumed_step: Step that the run resumes from.
            warn: Called for each unreadable file; a damaged log does not stop a run.
        """
        self._folder, self._parts = folder, folder.path / parts
        self._target, self._warn = folder.place(target), warn
        with writing_to(self._parts):
            self._parts.mkdir(exist_ok=True)
            self._reopen(resumed_step)
        self.rewind(resumed_step)

    def _reopen(self, step: int) -> None:
        """Split a joined table into parts again, for a run that continues beyond its end.

        The table has everything that the parts had, so parts that a kill left behind are dropped.
        """
        if not self._target.exists():
            return
        import pyarrow as pa
        import pyarrow.compute as pc

        for left in list(self._parts.iterdir()):
            left.unlink()
        for batch in self._batches(self._target):
            rows = pa.Table.from_batches([batch]).filter(pc.field("step") <= step)
            if rows.num_rows:
                steps = pc.min_max(rows["step"])
                self.write(rows, steps["min"].as_py(), steps["max"].as_py())
        self._target.unlink(missing_ok=True)

    def _batches(self, file: Path, schema: "pa.Schema | None" = None) -> "Iterator[pa.RecordBatch]":
        """Yield a file's readable rows; if it is damaged, rename it and warn.

        schema: columns to convert to; those that the file lacks are null.
        """
        import pyarrow as pa
        import pyarrow.dataset as ds

        try:
            yield from ds.dataset(file, schema=schema, format="parquet").to_batches(
                batch_readahead=1  # bounds the memory
            )
        except (pa.ArrowException, OSError) as error:
            renamed = file.with_name(f"{file.name}.corrupt")
            file.replace(renamed)
            self._warn(f"{renamed}: damaged, so its rows are missing from the log ({error})")

    def rewind(self, step: int) -> None:
        """Drop the parts that hold steps after ``step``."""
        with writing_to(self._parts):
            for path in list(self._parts.iterdir()):
                match = _PART.fullmatch(path.name)
                if match is None or int(match[2]) > step:
                    path.unlink()

    def write(self, table: "pa.Table", first: int, last: int) -> None:
        """Write the rows of steps ``first`` to ``last``.

        Args:
            table: The rows.
            first: First step.
            last: Last step.

        Raises:
            OutputError: The disk refuses the write.
        """
        import pyarrow.parquet as pq

        self._folder.check_ownership()
        path = self._parts / f"steps-{first:08d}-{last:08d}.parquet"
        aside = path.with_name(f".{path.name}.part")
        with writing_to(path):
            pq.write_table(table, aside, compression="zstd")
            flush_to_disk(aside)
            aside.replace(path)
            sync_folder(path.parent)

    def finish(self) -> Path:
        """Join all parts, batch by batch, and return the table's path."""
        import pyarrow.parquet as pq

        self._folder.check_ownership()
        target, writer = self._target, None
        aside = target.with_name(f".{target.name}.part")
        with writing_to(target):
            parts = sorted(self._parts.glob("steps-*.parquet"))
            schema = _columns_of_all(parts)
            for part in parts:
                for batch in self._batches(part, schema):
                    writer = writer or pq.ParquetWriter(aside, schema, compression="zstd")
                    writer.write_batch(batch)
            if writer:
                writer.close()
                flush_to_disk(aside)
                aside.replace(target)
                sync_folder(target.parent)
            for part in self._parts.glob("steps-*.parquet"):
                part.unlink()
            with suppress(OSError):  # not empty if it holds damaged files
                self._parts.rmdir()
        return target


def _columns_of_all(parts: Sequence[Path]) -> "pa.Schema":
    """Merge the columns of all parts, with the newest types, as versions may differ."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields: dict[str, pa.Field] = {}
    for part in parts:
        with suppress(pa.ArrowException, OSError):  # reported when its rows are read
            fields |= {field.name: field for field in pq.read_schema(part)}
    return pa.schema(list(fields.values()))
