"""Tables of images (.parquet, .arrow), unpacked to a folder so that other code reads plain files.

This is the layout of datasets on the Hugging Face Hub: one column with the bytes of each image
file, one with captions. Unpacked folders stay in the user's cache and are reused.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kubelora_api.dataset_spec import Columns
from kubelora_api.suggestions import did_you_mean, listed
from kubelora_trainer.data.caption_files import METADATA_FILE, UNSUPPORTED_METADATA
from kubelora_trainer.data.files import files_below
from kubelora_trainer.data.images import IMAGE_SUFFIXES
from kubelora_trainer.storage.downloads import cache_directory
from kubelora_trainer.utils.atomic_io import atomic_folder
from kubelora_trainer.utils.errors import DatasetError

TABLE_SUFFIXES = (".parquet", ".arrow")
ROWS_PER_BATCH = 64
"""Rows in memory at a time; each may hold an image of several MB."""
_MAGIC = ((b"\xff\xd8", ".jpg"), (b"\x89PNG", ".png"), (b"RIFF", ".webp"), (b"GIF8", ".gif"))


def is_table_dataset(path: Path) -> bool:
    """Return whether ``path`` is a table, or a folder of tables without a metadata.jsonl in it.

    Raises:
        DatasetError: The folder has both tables and images; one kind would be left out.
    """
    if path.is_file():
        return _is_table(path)
    if (path / METADATA_FILE).is_file() or not (tables := _tables(path)):
        return False
    images = sum(file.suffix.lower() in IMAGE_SUFFIXES for file in files_below(path))
    if images:
        raise DatasetError(
            f"{path} contains {len(tables)} tables, such as {tables[0].name}, and {images} image "
            "files: move them to separate folders and name both, one of them in "
            "dataset.extraSources"
        )
    return True


def unpack_tables(path: Path, columns: Columns, cache: Path | None = None) -> Path:
    """Unpack tables to a folder with one file per row and a metadata.jsonl.

    A row without an image becomes an empty file, which preflight reports.

    Args:
        path: A table, or a folder of tables.
        columns: Names of the columns.
        cache: Where the folder is created; None uses the user's cache directory.

    Returns:
        The folder; the one that is there already where the tables haven't changed.

    Raises:
        DatasetError: A column is missing or of another type, or the disk refuses the write.
    """
    tables = _tables(path)
    target = (cache or cache_directory() / "tables") / _key(tables, columns)
    if target.is_dir():
        return target
    try:
        with atomic_folder(target) as aside:
            for number, table in enumerate(tables):
                _unpack(table, number, columns, aside)
    except OSError as error:
        raise DatasetError(
            f"the tables in {path} can't be unpacked to {target}: {error.strerror}; free some "
            "space, or set XDG_CACHE_HOME to another directory"
        ) from error
    return target


def _tables(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in files_below(path) if _is_table(file) and file.is_file())


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in TABLE_SUFFIXES and file.name not in UNSUPPORTED_METADATA


def _key(tables: list[Path], columns: Columns) -> str:
    """Name the unpacked folder after the tables' paths, sizes and modification times."""
    facts = [
        (os.path.realpath(table), (stat := table.stat()).st_size, stat.st_mtime_ns)
        for table in tables
    ]
    text = json.dumps([facts, columns.document()])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _unpack(table: Path, number: int, columns: Columns, folder: Path) -> None:
    with (folder / METADATA_FILE).open("a", encoding="utf-8") as metadata:
        for row, (image, caption, category) in enumerate(_rows(table, columns)):
            suffix = next((s for magic, s in _MAGIC if image.startswith(magic)), ".png")
            name = f"{number:05d}-{_file_name_part(table)}-row-{row:08d}{suffix}"
            (folder / name).write_bytes(image)
            entry = {
                "file_name": name,
                columns.caption: caption,
                columns.category: category or "",
            }
            metadata.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _file_name_part(table: Path) -> str:
    """Return the table's name in characters that any file name may have, so reports can name it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", table.stem)[:100]  # file systems allow 255 in all


def _rows(table: Path, columns: Columns) -> Iterator[tuple[bytes, str | None, str | None]]:
    import pyarrow as pa  # 30 MB, and only tables need it

    try:
        for batch in _batches(table, columns):
            names = batch.schema.names
            images = batch.column(columns.image).to_pylist()
            texts = [
                batch.column(name).to_pylist() if name in names else [None] * len(images)
                for name in (columns.caption, columns.category)
            ]
            for image, caption, category in zip(images, *texts, strict=True):
                yield (
                    _bytes_of(image, table, columns.image),
                    _text_of(caption, table, columns.caption),
                    _text_of(category, table, columns.category),
                )
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{table} can't be read: {error}; download it again (run git lfs pull if it is a Git "
            "LFS pointer)"
        ) from error


def _batches(table: Path, columns: Columns) -> Iterator[Any]:
    """Yield record batches of the wanted columns that exist."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if table.suffix.lower() == ".parquet":
        with pq.ParquetFile(table) as parquet:
            wanted = _wanted(table, parquet.schema_arrow.names, columns)
            yield from parquet.iter_batches(batch_size=ROWS_PER_BATCH, columns=wanted)
        return
    with pa.memory_map(str(table)) as content:
        try:
            reader = pa.ipc.open_file(content)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        except pa.ArrowInvalid:  # the Hub's library writes streams
            content.seek(0)
            batches = reader = pa.ipc.open_stream(content)
        wanted = _wanted(table, reader.schema.names, columns)
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_PER_BATCH):
                yield batch.slice(start, ROWS_PER_BATCH).select(wanted)


def _wanted(table: Path, names: list[str], columns: Columns) -> list[str]:
    if twice := [name for name in columns.document().values() if names.count(name) > 1]:
        raise DatasetError(f"{table} has {names.count(twice[0])} columns named {twice[0]!r}")
    for field, name, what in (
        ("image", columns.image, "images"),
        ("caption", columns.caption, "captions"),
        ("category", columns.category, "categories"),
    ):
        optional = field == "category" and name == Columns().category
        if name not in names and not optional:
            raise DatasetError(
                f"{table} has no column {name!r}; its columns are {listed(names)}: name the one "
                f"with {what} in dataset.columns.{field}{did_you_mean(name, names)}"
            )
    return [name for name in (columns.image, columns.caption, columns.category) if name in names]


def _bytes_of(value: object, table: Path, column: str) -> bytes:
    if isinstance(value, dict):
        if "bytes" not in value:
            raise DatasetError(
                f"the column {column!r} of {table} is a struct of {', '.join(value)}, but image "
                "files are expected in a field 'bytes': see dataset.columns.image"
            )
        value = value["bytes"]
    if value is None:
        return b""
    if not isinstance(value, bytes):
        raise DatasetError(
            f"the column {column!r} of {table} contains {type(value).__name__}, not the bytes of "
            "image files: see dataset.columns.image"
        )
    return value


def _text_of(value: object, table: Path, column: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise DatasetError(
        f"the column {column!r} of {table} contains {type(value).__name__}, not text: see "
        "dataset.columns"
    )
