"""Tables and tars of images, unpacked to a folder so that other code reads plain files.

Tables (.parquet, .arrow) are the layout of datasets on the Hugging Face Hub: one column with the
bytes of each image file, one with captions. A tar is a WebDataset, or a folder that was packed.
Unpacked folders stay in the user's cache and are reused.
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubelora_api.dataset_spec import Columns
from kubelora_api.suggestions import did_you_mean, listed
from kubelora_trainer.data.caption_fields import caption_fields, caption_of
from kubelora_trainer.data.files import files_below
from kubelora_trainer.data.images import IMAGE_SUFFIXES
from kubelora_trainer.data.metadata_listing import METADATA_FILE, is_metadata
from kubelora_trainer.storage.downloads import cache_directory
from kubelora_trainer.utils.atomic_io import atomic_folder
from kubelora_trainer.utils.errors import DatasetError

TABLE_SUFFIXES = (".parquet", ".arrow")
TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz")
ROWS_PER_BATCH = 64
"""Rows in memory at a time; each may hold an image of several MB."""
_MAGIC = ((b"\xff\xd8", ".jpg"), (b"\x89PNG", ".png"), (b"RIFF", ".webp"), (b"GIF8", ".gif"))


def is_table_dataset(path: Path) -> bool:
    """Return whether ``path`` is a table or tar, or a folder of these without metadata in it.

    Raises:
        DatasetError: The folder has both tables and images; one kind would be left out.
    """
    if path.is_file():
        return _is_table(path) or _is_tar(path)
    if not path.is_dir() or any(is_metadata(file.name) for file in path.iterdir()):
        return False
    images = sum(file.suffix.lower() in IMAGE_SUFFIXES for file in files_below(path))
    tables = [file for file in _tables(path) if not _is_tar(file)]
    if not tables:  # a tar among images may be a copy of them
        return not images and bool(_tables(path))
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
                if _is_tar(table):
                    _extract(table, f"{number:05d}-" if len(tables) > 1 else "", aside)
                else:
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
    return sorted(
        file for file in files_below(path) if (_is_table(file) or _is_tar(file)) and file.is_file()
    )


def _is_table(file: Path) -> bool:
    return file.suffix.lower() in TABLE_SUFFIXES and not is_metadata(file.name)


def _is_tar(file: Path) -> bool:
    return file.name.lower().endswith(TAR_SUFFIXES)


def _key(tables: list[Path], columns: Columns) -> str:
    """Name the unpacked folder after the tables' paths, sizes and modification times."""
    facts = [
        (os.path.realpath(table), (stat := table.stat()).st_size, stat.st_mtime_ns)
        for table in tables
    ]
    text = json.dumps([facts, columns.document()])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _extract(tar: Path, prefix: str, folder: Path) -> None:
    """Extract the files of a tar. prefix: of their names, which shards may have in common."""
    try:
        with tarfile.open(tar) as opened:
            for member in opened:
                if member.isfile():
                    name = Path(member.name)
                    opened.extract(
                        member.replace(name=str(name.with_name(prefix + name.name)), deep=False),
                        folder,
                        filter="data",  # refuses names that point outside of the folder
                    )
    except (tarfile.TarError, EOFError) as error:
        raise DatasetError(f"{tar} can't be read: {error}; download it again") from error


@dataclass(frozen=True)
class _Names:
    """Columns of one table that are read; None for one that is absent and may be."""

    image: str
    caption: str
    category: str | None


def _unpack(table: Path, number: int, columns: Columns, folder: Path) -> None:
    with (folder / METADATA_FILE).open("a", encoding="utf-8") as metadata:
        for row, (image, values) in enumerate(_rows(table, columns)):
            suffix = next((s for magic, s in _MAGIC if image.startswith(magic)), ".png")
            name = f"{number:05d}-{_file_name_part(table)}-row-{row:08d}{suffix}"
            (folder / name).write_bytes(image)
            entry = {"file_name": name, columns.category: "", **values}
            metadata.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _file_name_part(table: Path) -> str:
    """Return the table's name in characters that any file name may have, so reports can name it."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", table.stem)[:100]  # file systems allow 255 in all


def _rows(table: Path, columns: Columns) -> Iterator[tuple[bytes, dict[str, object]]]:
    """Yield the bytes of each row's image, with its caption and category by their columns."""
    import pyarrow as pa  # 30 MB, and only tables need it

    try:
        for batch, names in _batches(table, columns):
            images = batch.column(names.image).to_pylist()
            captions = batch.column(names.caption).to_pylist()
            categories = (
                batch.column(names.category).to_pylist() if names.category else [""] * len(images)
            )
            for image, caption, category in zip(images, captions, categories, strict=True):
                if category is not None and not isinstance(category, str):
                    raise _not_text(table, columns.category, category)
                _check_caption(caption, table, names.caption)
                values = {names.caption: caption, columns.category: category or ""}
                yield _bytes_of(image, table, names.image), values
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{table} can't be read: {error}; download it again (run git lfs pull if it is a Git "
            "LFS pointer)"
        ) from error


def _batches(table: Path, columns: Columns) -> Iterator[tuple[Any, _Names]]:
    """Yield record batches of the wanted columns that exist, and their names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if table.suffix.lower() == ".parquet":
        with pq.ParquetFile(table) as parquet:
            names = _names_of(table, parquet.schema_arrow, columns)
            for batch in parquet.iter_batches(batch_size=ROWS_PER_BATCH, columns=_listed(names)):
                yield batch, names
        return
    with pa.memory_map(str(table)) as content:
        try:
            reader = pa.ipc.open_file(content)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        except pa.ArrowInvalid:  # the Hub's library writes streams
            content.seek(0)
            batches = reader = pa.ipc.open_stream(content)
        names = _names_of(table, reader.schema, columns)
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_PER_BATCH):
                yield batch.slice(start, ROWS_PER_BATCH).select(_listed(names)), names


def _listed(names: _Names) -> list[str]:
    return list(dict.fromkeys(n for n in (names.image, names.caption, names.category) if n))


def _names_of(table: Path, schema: Any, columns: Columns) -> _Names:
    """Find the columns; a default name that is absent is replaced by what tools call it."""
    names, default = list(schema.names), Columns()
    if twice := [name for name in columns.document().values() if names.count(name) > 1]:
        raise DatasetError(f"{table} has {names.count(twice[0])} columns named {twice[0]!r}")
    image, captions = columns.image, caption_fields(names, columns)
    if image not in names and image == default.image:
        holders = [field.name for field in schema if _holds_bytes(field.type)]
        image = holders[0] if len(holders) == 1 else image
    caption = captions[0] if captions else columns.caption
    for field, name, what in (
        ("image", image, "images"),
        ("caption", caption, "captions"),
        ("category", columns.category, "categories"),
    ):
        optional = field == "category" and name == default.category
        if name not in names and not optional:
            raise DatasetError(
                f"{table} has no column {name!r}; its columns are {listed(names)}: name the one "
                f"with {what} in dataset.columns.{field}{did_you_mean(name, names)}"
            )
    return _Names(image, caption, columns.category if columns.category in names else None)


def _holds_bytes(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return any(field.name == "bytes" and _holds_bytes(field.type) for field in kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


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


def _check_caption(value: object, table: Path, column: str) -> None:
    """Check that the value is text, or a list of it; how it is used is decided at reading."""
    try:
        caption_of({column: value}, Columns(caption=column))
    except ValueError:
        raise _not_text(table, column, value) from None


def _not_text(table: Path, column: str, value: object) -> DatasetError:
    return DatasetError(
        f"the column {column!r} of {table} contains {type(value).__name__}, not text: see "
        "dataset.columns"
    )
