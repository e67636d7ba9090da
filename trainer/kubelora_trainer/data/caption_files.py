"""Captions of a dataset: from metadata.jsonl first, then from a text file next to the image."""

import json
import re
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kubelora_api.dataset_spec import Columns
from kubelora_api.suggestions import did_you_mean, listed
from kubelora_trainer.utils.errors import DatasetError
from kubelora_trainer.utils.text import printable

METADATA_FILE = "metadata.jsonl"
CAPTION_SUFFIXES = (".txt", ".caption")
UNSUPPORTED_METADATA = ("metadata.csv", "metadata.tsv", "metadata.json", "metadata.parquet")
"""Other forms of metadata.jsonl, which the Hugging Face libraries or other trainers write."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON can escape but UTF-8 can't encode."""


@dataclass(frozen=True)
class CaptionEntry:
    """Line of metadata.jsonl; None where it lacks the field."""

    caption: str | None
    category: str | None


@dataclass(frozen=True)
class MetadataListing:
    """Entries of all metadata files, by image path. fields: those that at least one line has."""

    entries: Mapping[Path, CaptionEntry]
    fields: tuple[str, ...] = ()


def read_listing(metadata_files: list[Path], columns: Columns) -> MetadataListing:
    """Read every metadata.jsonl; ``file_name`` is relative to its file's folder.

    columns: names of the fields with caption and category.

    Raises:
        DatasetError: A line is invalid; the message names file and line.
    """
    entries: dict[Path, CaptionEntry] = {}
    fields: dict[str, None] = {}
    for file in metadata_files:
        for number, line in enumerate(read_text(file).split("\n"), start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            image, entry = _entry(line, where, file.parent, columns, fields)
            if image in entries:
                raise DatasetError(f"{where}: {image.name} is listed a second time.")
            entries[image] = entry
    return MetadataListing(entries, tuple(fields))


def check_columns(
    listing: MetadataListing,
    columns: Columns,
    folder: Path,
    caption: str | None,
    category: str | None,
) -> None:
    """Check that each field the job names is in some line of metadata; defaults may be absent.

    Args:
        listing: What was read from the metadata files.
        columns: Names of the fields, as the job sets them.
        folder: Folder of the source, for the message.
        caption: Caption that the source sets for its images, which then need no field.
        category: Category that the source sets for its images, which then need no field.

    Raises:
        DatasetError: No line has a field of that name.
    """
    defaults, fields = Columns(), listing.fields
    for field, name, default, given in (
        ("caption", columns.caption, defaults.caption, caption),
        ("category", columns.category, defaults.category, category),
    ):
        if fields and given is None and name not in (default, *fields):
            raise DatasetError(
                f"No line of {METADATA_FILE} in {folder} has a field {name!r}; the fields are "
                f"{listed(fields)}: name the right one in dataset.columns.{field}"
                f"{did_you_mean(name, fields)}"
            )


def _entry(
    line: str, where: str, folder: Path, columns: Columns, fields: dict[str, None]
) -> tuple[Path, CaptionEntry]:
    """Parse one line, and add the names of its fields to ``fields``."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not a JSON object ({error}).") from None
    name = entry.get("file_name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise DatasetError(
            f"{where}: a line needs a file_name, as in "
            '{"file_name": "a.jpg", "text": "a bottle"}.'
        )
    fields.update(dict.fromkeys(entry))
    for field in ("file_name", columns.caption, columns.category):
        value = entry.get(field)
        if value is not None and not isinstance(value, str):
            raise DatasetError(f"{where}: {field} must be a string, not {type(value).__name__}.")
        if value is not None and (half := SURROGATE.search(value)):
            raise DatasetError(
                f"{where}: {field} contains half a character (\\u{ord(half[0]):04x}), as when text "
                "is cut off in the middle of an emoji: fix or remove it."
            )
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DatasetError(f"{where}: file_name {name!r} points outside the dataset's folder.")
    caption, category = entry.get(columns.caption), entry.get(columns.category)
    return folder / name, CaptionEntry(
        caption=None if caption is None else caption.strip(),
        category=None if category is None else " ".join(category.split()),
    )


def match_file_names(listing: MetadataListing, files: Collection[Path]) -> MetadataListing:
    """Return the listing under the names that the files have on disk.

    Unicode has several spellings of one name: macOS decomposes letters and accents (NFD), editors
    compose them (NFC). An entry that already names a file is left as it is.
    """
    known = set(files)
    absent = [image for image in listing.entries if image not in known]
    if not absent:
        return listing
    free = {_composed(file): file for file in known - listing.entries.keys()}
    names = {image: free.pop(_composed(image), image) for image in absent}
    entries = {names.get(image, image): entry for image, entry in listing.entries.items()}
    return replace(listing, entries=entries)


def _composed(path: Path) -> str:
    return unicodedata.normalize("NFC", str(path))


def check_metadata_format(folders: Mapping[Path, Collection[str]]) -> None:
    """Check that no folder keeps its captions in an unsupported format, which would lose them.

    folders: names of the files in each. A table next to metadata.jsonl or text files is accepted:
    it may be for something else.

    Raises:
        DatasetError: A folder has an unsupported metadata file and no other captions.
    """
    for folder, names in folders.items():
        table = next((name for name in names if name in UNSUPPORTED_METADATA), None)
        if table and not any(n == METADATA_FILE or n.endswith(CAPTION_SUFFIXES) for n in names):
            raise DatasetError(
                f"{folder / table} is not read: convert it to {METADATA_FILE}, with one "
                '{"file_name": "a.jpg", "text": "a bottle"} per line, or move it away.'
            )


def find_caption(image: Path, listing: MetadataListing) -> str | None:
    """Find the image's caption; None when it has none.

    Raises:
        DatasetError: A caption file can't be read.
    """
    listed = listing.entries.get(image)
    if listed is not None and listed.caption is not None:
        return listed.caption
    for suffix in CAPTION_SUFFIXES:
        for file in (image.with_suffix(suffix), image.with_name(image.name + suffix)):
            if file.is_file():
                return " ".join(read_text(file).split())
    return None


def find_category(image: Path, folder: Path, listing: MetadataListing) -> str:
    """Find the image's category.

    Args:
        image: Path of the image, below ``folder``.
        folder: Folder of the source.
        listing: What was read from the metadata files.

    Returns:
        The category in metadata, else the name of the first folder below ``folder``; empty for an
        image directly in ``folder``.
    """
    listed = listing.entries.get(image)
    if listed is not None and listed.category is not None:
        return listed.category
    parts = image.relative_to(folder).parts
    return printable(parts[0]) if len(parts) > 1 else ""


def read_text(file: Path) -> str:
    """Read a UTF-8 file without its byte-order mark.

    Raises:
        DatasetError: The file can't be read, or is not UTF-8; the message has the offset.
    """
    try:
        content = file.read_bytes()
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DatasetError(
            f"{file} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}. Save it "
            "as UTF-8."
        ) from None
    except OSError as error:
        raise DatasetError(f"{file} can't be read: {error.strerror}.") from error
