"""Metadata files of a dataset, read to one listing of images with their captions and categories."""

import re
import unicodedata
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from kubelora_api.dataset_spec import Columns
from kubelora_api.suggestions import did_you_mean, listed
from kubelora_trainer.data.caption_fields import (
    FoundCaption,
    caption_fields,
    caption_of,
    kohya_caption_of,
)
from kubelora_trainer.data.images import IMAGE_SUFFIXES
from kubelora_trainer.data.metadata_rows import ROW_SUFFIXES, Row, read_rows
from kubelora_trainer.utils.errors import DatasetError

METADATA_FILE = "metadata.jsonl"
"""The form that is written here, and that messages recommend."""
_METADATA = re.compile(r"metadata\.(jsonl|ndjson|json|csv|tsv|parquet)")
_KOHYA = re.compile(r"meta_(cap|cap_dd|clean|lat)\.json")
_KOHYA_STEPS = ("meta_cap.json", "meta_cap_dd.json", "meta_clean.json", "meta_lat.json")
"""Files of kohya's scripts in the order in which they are made of each other."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which JSON can escape but UTF-8 can't encode."""


def is_metadata(name: str) -> bool:
    """Return whether a file of that name lists the images of its folder, in any case."""
    return bool(_METADATA.fullmatch(name.lower()) or _KOHYA.fullmatch(name.lower()))


@dataclass(frozen=True)
class CaptionEntry:
    """Row of a metadata file; None where it lacks the field."""

    caption: FoundCaption | None
    category: str | None
    file: Path


@dataclass(frozen=True)
class BadRow:
    """Row that can't be used. where: file and line. image: the image it names, if that is known."""

    where: str
    image: Path | None
    kind: str
    problem: str


@dataclass
class MetadataListing:
    """Entries of metadata files, by image path.

    fields: names of the fields of each file. folders: folders that a file lists. bad: rows that
    can't be used. unused: files that others replace, or that have no rows.
    """

    entries: dict[Path, CaptionEntry] = field(default_factory=dict)
    fields: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    bad: list[BadRow] = field(default_factory=list)
    unused: list[Path] = field(default_factory=list)

    @property
    def bad_images(self) -> dict[Path, BadRow]:
        """Bad rows by image, for images that no other row lists."""
        return {
            row.image: row
            for row in self.bad
            if row.image is not None and row.image not in self.entries
        }

    def lists(self, image: Path) -> bool:
        """Return whether a metadata file in the image's folder, or in one above, lists images."""
        return any(parent in self.folders for parent in image.parents)


class ImageNames:
    """Images of a folder, found by the names that metadata files give them."""

    def __init__(self, folder: Path, files: Collection[Path]) -> None:
        """Index ``files`` below ``folder``."""
        self._folder, self._files = folder, set(files)
        images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
        self._exact = {_composed(file): file for file in sorted(files, reverse=True)}
        self._folded = _unique(images, folded)
        self._stems = _unique(images, lambda file: folded(file.with_suffix("")))
        self._names = _unique(images, lambda file: folded(file.name))
        self._bare = _unique(images, lambda file: folded(file.stem))

    def find(self, name: str, folder: Path) -> Path | None:
        """Return the path of the image called ``name`` in a file in ``folder``.

        A name is a path, with or without the image's suffix, relative to the file's folder or to
        the dataset's. Where no such file exists, an image of that name anywhere in the dataset is
        meant, provided there is one alone: tools write the paths of the machine they ran on.

        Returns:
            None for a name that points outside the dataset; a path that does not exist where there
            is no such image.
        """
        path = PurePosixPath(name.replace("\\", "/") if "/" not in name else name)
        outside = path.is_absolute() or ".." in path.parts or ":" in "".join(path.parts[:1])
        if not outside:
            for base in dict.fromkeys((folder, self._folder)):
                if found := self._at(base / path):
                    return found
        known = self._names.get(folded(path.name)) or self._bare.get(folded(path.name))
        if known is None and not outside:
            return folder / path
        return known

    def knows(self, name: str, folder: Path) -> bool:
        """Return whether there is an image of that name, given in a file in ``folder``."""
        return self.find(name, folder) in self._files

    def _at(self, path: Path) -> Path | None:
        if path in self._files:
            return path
        key = folded(path)
        return self._exact.get(_composed(path)) or self._folded.get(key) or self._stems.get(key)


def read_listing(
    files: Collection[Path], folder: Path, columns: Columns, names: ImageNames
) -> MetadataListing:
    """Read every metadata file of a source.

    Args:
        files: All files of the source.
        folder: Folder of the source.
        columns: Names of the fields with caption and category.
        names: The source's images.

    Raises:
        DatasetError: A file can't be read at all.
    """
    listing = MetadataListing()
    metadata = sorted(file for file in files if is_metadata(file.name))
    for file in _without_earlier_steps(metadata, listing.unused):
        rows = read_rows(file)
        foreign = file.suffix.lower() == ".json" and not any(
            row.image and names.knows(row.image, file.parent) for row in rows
        )
        if not rows or foreign:  # a metadata.json may describe anything
            listing.unused.append(file)
            continue
        listing.folders.add(file.parent)
        add_rows(listing, rows, file, columns, names)
    return listing


def add_rows(
    listing: MetadataListing, rows: list[Row], file: Path, columns: Columns, names: ImageNames
) -> None:
    """Add the rows of one file to a listing, the unusable ones to its bad rows."""
    fields: dict[str, None] = {}
    for row in rows:
        fields.update(dict.fromkeys(row.fields))
        image = names.find(row.image, file.parent) if row.image else None
        try:
            entry = _entry(row, file, columns)
            if image is None:
                raise ValueError(f"file_name {row.image!r} points outside the dataset's folder")
            if image in listing.entries:
                earlier = listing.entries[image]
                if earlier.file != file and entry.caption in (None, earlier.caption):
                    continue
                raise ValueError(f"{image.name} is listed a second time")
        except ValueError as error:
            listing.bad.append(BadRow(row.where, image, row.kind, str(error)))
            continue
        listing.entries[image] = entry
    listing.fields[file] = tuple(fields)


def _entry(row: Row, file: Path, columns: Columns) -> CaptionEntry:
    """Return the row's entry. Raises ValueError for what makes it unusable."""
    if row.problem:
        raise ValueError(row.problem)
    caption = (kohya_caption_of if row.kohya else caption_of)(row.fields, columns)
    category = row.fields.get(columns.category)
    if category is not None and not isinstance(category, str):
        raise ValueError(f"{columns.category} must be a string, not {type(category).__name__}")
    texts = {"file_name": row.image, **row.fields}
    for name in ("file_name", columns.category, *caption_fields(list(row.fields), columns)):
        text = texts.get(name)
        if isinstance(text, str) and (half := SURROGATE.search(text)):
            raise ValueError(
                f"{name} contains half a character (\\u{ord(half[0]):04x}), as when text is cut "
                "off in the middle of an emoji: fix or remove it"
            )
    return CaptionEntry(caption, None if category is None else " ".join(category.split()), file)


def _without_earlier_steps(metadata: list[Path], unused: list[Path]) -> Iterator[Path]:
    """Yield metadata files, of kohya's steps in one folder the last alone."""
    last: dict[Path, Path] = {}
    for file in metadata:
        if (name := file.name.lower()) in _KOHYA_STEPS:
            known = last.get(file.parent)
            if known is None or _KOHYA_STEPS.index(known.name.lower()) < _KOHYA_STEPS.index(name):
                last[file.parent] = file
    for file in metadata:
        if file.name.lower() in _KOHYA_STEPS and last[file.parent] != file:
            unused.append(file)
        else:
            yield file


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
    defaults = Columns()
    fields = list(dict.fromkeys(name for names in listing.fields.values() for name in names))
    for of, name, default, given in (
        ("caption", columns.caption, defaults.caption, caption),
        ("category", columns.category, defaults.category, category),
    ):
        if fields and given is None and name not in (default, *fields):
            file = next(iter(listing.fields)).name
            raise DatasetError(
                f"No line of {file} in {folder} has a field {name!r}; the fields are "
                f"{listed(fields)}: name the right one in dataset.columns.{of}"
                f"{did_you_mean(name, fields)}"
            )


def is_listing_candidate(file: Path) -> bool:
    """Return whether a file of another name may list captions."""
    return file.suffix.lower() in (*ROW_SUFFIXES, ".txt")


def _composed(path: Path) -> str:
    """Spell a name in one way: macOS decomposes letters and accents (NFD), editors compose them."""
    return unicodedata.normalize("NFC", str(path))


def folded(path: Path | str) -> str:
    """Spell a name in one way and in one case, to compare it."""
    return unicodedata.normalize("NFC", str(path)).casefold()


def _unique(images: Collection[Path], key: Callable[[Path], str]) -> dict[str, Path]:
    """Map each key to its image, without keys that two images share."""
    found: dict[str, Path | None] = {}
    for image in images:
        found[key(image)] = None if key(image) in found else image
    return {name: image for name, image in found.items() if image is not None}
