"""Rows of metadata files: JSON Lines, JSON, CSV, TSV and Parquet, in the layouts that tools write.

A row is a mapping from field to value that names one image. What is wrong with a row is a value of
it, so that one bad line is one bad image and not the end of all others.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kubelora_trainer.data.caption_fields import CAPTION_FIELDS, IMAGE_FIELDS, image_field
from kubelora_trainer.data.images import IMAGE_SUFFIXES
from kubelora_trainer.data.text_files import decode_text, encoding_problem, read_bytes
from kubelora_trainer.utils.errors import DatasetError

LINE_SUFFIXES = (".jsonl", ".ndjson")
ROW_SUFFIXES = (*LINE_SUFFIXES, ".json", ".csv", ".tsv", ".parquet")
_DELIMITERS = ",;\t|"
csv.field_size_limit(1 << 24)  # the default of 128 KiB ends the file at one long caption


@dataclass(frozen=True)
class Row:
    """Row of a metadata file.

    where: the file and the place in it. image: the name of its image. fields: all of its values.
    problem: what makes it unusable, with ``kind`` in a few words. kohya: whether tags follow the
    caption.
    """

    where: str
    image: str | None
    fields: Mapping[str, object]
    problem: str | None = None
    kind: str = "bad metadata"
    kohya: bool = False


def read_rows(file: Path) -> list[Row]:
    """Read the rows of a metadata file; empty where its content is of no known layout.

    Raises:
        DatasetError: The file can't be read at all.
    """
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return list(_table_rows(file))
    text = decode_text(read_bytes(file))
    if suffix in (".csv", ".tsv", ".txt"):
        return list(_delimited_rows(file, text))
    document = _document(text)
    if suffix == ".json" and document is None:
        return list(_line_rows(file, text))
    # A .jsonl of one line is a document too, but then a row, not a mapping of names.
    if document is None or (suffix in LINE_SUFFIXES and "\n" not in text.strip()):
        return list(_line_rows(file, text))
    return list(_document_rows(file, document))


def _document(text: str) -> object:
    """Parse text as one JSON document; None where it is none."""
    if encoding_problem(text):
        return None
    try:
        document: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document


def _line_rows(file: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        problem = encoding_problem(line)
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"{problem} of the line" if problem else f"not a JSON object ({error})"
            yield Row(where, None, {}, reason, "caption not UTF-8" if problem else "bad metadata")
            continue
        row = _row(where, entry)
        if problem:
            name = row.image if row.image and not encoding_problem(row.image) else None
            row = Row(where, name, {}, f"{problem} of the line", "caption not UTF-8")
        yield row


def _row(where: str, entry: object) -> Row:
    fields = entry if isinstance(entry, dict) else {}
    field = image_field(list(fields))
    name = fields.get(field) if field else None
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not name:
        return Row(
            where,
            None,
            fields,
            'a line needs a file_name, as in {"file_name": "a.jpg", "text": "a bottle"}',
        )
    return Row(where, name, {key: value for key, value in fields.items() if key != field})


def _document_rows(file: Path, document: object) -> Iterator[Row]:
    """Yield rows of a list of objects, of COCO's captions, or of a mapping by image name."""
    if isinstance(document, dict):
        coco = _coco_rows(file, document)
        if coco is not None:
            yield from coco
            return
        lists = [v for v in document.values() if isinstance(v, list) and v and _all_rows(v)]
        if len(lists) == 1:
            document = lists[0]
        elif image_field(list(document)) and any(name in document for name in CAPTION_FIELDS):
            document = [document]
    if isinstance(document, list):
        for number, entry in enumerate(document, start=1):
            if (
                isinstance(entry, list)
                and len(entry) == 2
                and all(isinstance(one, str) for one in entry)
            ):
                entry = {"file_name": entry[0], "text": entry[1]}
            yield _row(f"{file}, entry {number}", entry)
    elif isinstance(document, dict) and all(
        isinstance(entry, str | dict | list | None) for entry in document.values()
    ):
        for name, entry in document.items():
            kohya = isinstance(entry, dict)
            fields = entry if isinstance(entry, dict) else {"text": entry}
            yield Row(f"{file}, entry {name!r}", name, fields, kohya=kohya)


def _all_rows(items: Sequence[object]) -> bool:
    return all(isinstance(item, dict) and image_field(list(item)) for item in items)


def _coco_rows(file: Path, document: Mapping[str, object]) -> list[Row] | None:
    """Join COCO's images and annotations; the first annotation of an image is its caption."""
    images, annotations = document.get("images"), document.get("annotations")
    if not isinstance(images, list) or not isinstance(annotations, list):
        return None
    captions: dict[object, list[object]] = {}
    for one in annotations:
        if isinstance(one, dict) and "caption" in one:
            captions.setdefault(one.get("image_id"), []).append(one["caption"])
    return [
        Row(
            f"{file}, image {number}",
            str(image.get("file_name")),
            {"captions": captions.get(image.get("id"))},
        )
        for number, image in enumerate(images, start=1)
        if isinstance(image, dict)
    ]


def _delimited_rows(file: Path, text: str) -> Iterator[Row]:
    first = text.lstrip("\n").split("\n", 1)[0]
    tabs = file.suffix.lower() == ".tsv"
    delimiter = "\t" if tabs else max(_DELIMITERS, key=first.count)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    header: list[str] | None = None
    try:
        for cells in lines:
            if not any(cell.strip() for cell in cells):
                continue
            where = f"{file}, line {lines.line_num}"
            if header is None:
                header = [cell.strip() for cell in cells]
                if _is_header(header):
                    continue
                header = ["file_name", "text"]
            problem = encoding_problem(delimiter.join(cells))
            if len(cells) > len(header) and header[-1].lower() in CAPTION_FIELDS:
                # A caption that is not quoted ends at each of its commas; it is the last column.
                last = len(header) - 1
                cells = [*cells[:last], delimiter.join(cells[last:])]
            row = _row(where, dict(zip(header, cells, strict=False)))
            if problem:
                row = Row(where, row.image, {}, f"{problem} of the line", "caption not UTF-8")
            elif len(cells) != len(header):
                row = Row(
                    where,
                    row.image,
                    row.fields,
                    f"it has {len(cells)} columns, not {len(header)}: put text that contains "
                    f"{delimiter!r} in double quotes",
                )
            yield row
    except csv.Error as error:
        yield Row(f"{file}, line {lines.line_num}", None, {}, f"not CSV ({error})")


def _is_header(cells: Sequence[str]) -> bool:
    return image_field(cells) is not None or Path(cells[0]).suffix.lower() not in IMAGE_SUFFIXES


def _table_rows(file: Path) -> Iterator[Row]:
    import pyarrow as pa  # 30 MB, and only tables need it
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            names = [n for n in table.schema_arrow.names if n.lower() in IMAGE_FIELDS]
            others = [
                field.name
                for field in table.schema_arrow
                if field.name not in names and not pa.types.is_binary(field.type)
            ]
            entries = table.read(columns=[*names, *others]).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{file} can't be read: {error}.") from error
    for number, entry in enumerate(entries, start=1):
        yield _row(f"{file}, row {number}", entry)
