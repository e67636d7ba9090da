"""Caption lookup: metadata.jsonl first, then a text file next to the image."""

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

METADATA_FILES = "metadata.jsonl"
SUFFIXES = (".txt", ".caption")
UNREAD = ("metadata.csv", "metadata.tsv", "metadata.json", "metadata.parquet")
"""Other metadata formats, which the Hugging Face libraries or other trainers write."""
HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which is not a character."""


@dataclass(frozen=True)
class Entry:
    """An image's entry in metadata.jsonl; None for a field that is absent."""

    caption: str | None
    category: str | None


@dataclass(frozen=True)
class Listing:
    """Entries of all metadata files by image path; ``fields`` are those that any line has."""

    entries: Mapping[Path, Entry]
    fields: tuple[str, ...] = ()


def read_listing(metadata_files: list[Path], columns: Columns) -> Listing:
    """Read every metadata.jsonl; ``file_name`` is relative to the file's directory.

    columns: names of the caption and category fields. Raises DatasetError with file and line.
    """
    entries: dict[Path, Entry] = {}
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
    return Listing(entries, tuple(fields))


def require_fields(
    listing: Listing, columns: Columns, folder: Path, caption: str | None, category: str | None
) -> None:
    """Check that some line of metadata has each field that the job names.

    The default names may be absent.

    Args:
        listing: All metadata.
        columns: The job's field names.
        folder: The dataset's directory, for the message.
        caption: Caption that the source sets for all its images; it then needs no field.
        category: Category that the source sets for all its images, likewise.

    Raises:
        DatasetError: No line has a field that the job names.
    """
    usual, fields = Columns(), listing.fields
    for field, name, default, given in (
        ("caption", columns.caption, usual.caption, caption),
        ("category", columns.category, usual.category, category),
    ):
        if fields and given is None and name not in (default, *fields):
            raise DatasetError(
                f"No line of {METADATA_FILES} in {folder} has a field {name!r}; there are "
                f"{listed(fields)}: name the right one in dataset.columns.{field}"
                f"{did_you_mean(name, fields)}"
            )


def _entry(
    line: str, where: str, folder: Path, columns: Columns, fields: dict[str, None]
) -> tuple[Path, Entry]:
    """Parse one line and add its field names to ``fields``."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not a JSON object ({error}).") from None
    name = entry.get("file_name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise DatasetError(
            f'{where}: it needs a file_name, as in {{"file_name": "a.jpg", "text": "a bottle"}}.'
        )
    fields.update(dict.fromkeys(entry))
    for field in ("file_name", columns.caption, columns.category):
        value = entry.get(field)
        if value is not None and not isinstance(value, str):
            raise DatasetError(f"{where}: {field} must be a string, not {type(value).__name__}.")
        if value is not None and (half := HALF.search(value)):
            raise DatasetError(
                f"{where}: {field} holds half a character (\\u{ord(half[0]):04x}), as in a text "
                "that was cut in the middle of an emoji: fix or remove it."
            )
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DatasetError(
            f"{where}: file_name {name!r} points outside the dataset's folder: move the image into "
            "it."
        )
    caption, category = entry.get(columns.caption), entry.get(columns.category)
    return folder / name, Entry(
        caption=None if caption is None else caption.strip(),
        category=None if category is None else " ".join(category.split()),
    )


def as_on_disk(listing: Listing, files: Collection[Path]) -> Listing:
    """Replace the listing's names by those of the actual files.

    Unicode can spell one name in several ways: macOS decomposes letters and accents (NFD), an
    editor composes them (NFC). A name that matches exactly is kept.
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


def check_caption_files(folders: Mapping[Path, Collection[str]]) -> None:
    """Check that no captions are in an unsupported file, because they would be lost silently.

    folders: names of the files in each directory. If metadata.jsonl or text files hold captions
    too, a table next to them may have another purpose. Raises DatasetError.
    """
    for folder, names in folders.items():
        table = next((name for name in names if name in UNREAD), None)
        if table and not any(n == METADATA_FILES or n.endswith(SUFFIXES) for n in names):
            raise DatasetError(
                f"{folder / table} is not read: convert it to {METADATA_FILES}, one "
                '{"file_name": "a.jpg", "text": "a bottle"} per line, or move it elsewhere.'
            )


def caption_of(image: Path, listing: Listing) -> str | None:
    """Return the image's caption, or None if it has none. Raises DatasetError."""
    listed = listing.entries.get(image)
    if listed is not None and listed.caption is not None:
        return listed.caption
    for suffix in SUFFIXES:
        for file in (image.with_suffix(suffix), image.with_name(image.name + suffix)):
            if file.is_file():
                return " ".join(read_text(file).split())
    return None


def category_of(image: Path, folder: Path, listing: Listing) -> str:
    """Return the image's category.

    Args:
        image: Path of the image.
        folder: The dataset's directory.
        listing: All metadata.

    Returns:
        The category in the metadata, else the first directory below ``folder``, else "".
    """
    listed = listing.entries.get(image)
    if listed is not None and listed.category is not None:
        return listed.category
    parts = image.relative_to(folder).parts
    return printable(parts[0]) if len(parts) > 1 else ""


def read_text(file: Path) -> str:
    """Read UTF-8 text without its byte-order mark.

    Raises DatasetError with the offset of a byte that is not UTF-8.
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
