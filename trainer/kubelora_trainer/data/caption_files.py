"""Captions of a source's images: from metadata files first, then from a file of each image's own.

Tools keep captions in many places. All that can be recognised are read, and the files that could
hold captions but were not read are known by name, so that a caption is never lost silently.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kubelora_api.dataset_spec import Columns
from kubelora_trainer.data.caption_fields import caption_of
from kubelora_trainer.data.images import IMAGE_SUFFIXES
from kubelora_trainer.data.metadata_listing import (
    SURROGATE,
    ImageNames,
    MetadataListing,
    add_rows,
    check_columns,
    folded,
    is_listing_candidate,
    is_metadata,
    read_listing,
)
from kubelora_trainer.data.metadata_rows import read_rows
from kubelora_trainer.data.sources import SourceFolder
from kubelora_trainer.data.text_files import read_text
from kubelora_trainer.utils.errors import DatasetError
from kubelora_trainer.utils.text import printable

TEXT_SUFFIXES = (".txt", ".caption", ".captions", ".cap", ".text", ".tags", ".prompt")
"""Suffixes of text files with one image's caption, the first of them first."""
SIDE_SUFFIXES = (*TEXT_SUFFIXES, ".json")
OTHER_TEXT_SUFFIXES = (
    *(".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".yaml", ".yml", ".toml", ".xml", ".xmp"),
    *(".md", ".html", ".xlsx", ".xls", ".ods", ".db", ".sqlite", ".npz", ".pkl", ".tar", ".zip"),
)
"""Suffixes of further files that may hold captions."""
CAPTION_FOLDERS = frozenset(
    ("caption", "captions", "text", "texts", "txt", "tags", "label", "labels", "prompts", "json")
)
IMAGE_FOLDERS = frozenset(("image", "images", "img", "imgs", "photo", "photos", "pictures", "jpg"))
"""Names of folders that hold nothing but captions, or images, of one set."""


@dataclass(frozen=True)
class Caption:
    """Caption of one image. lines: of its text file. unused: further captions it was given."""

    text: str
    lines: int = 1
    unused: int = 0


class CaptionFinder:
    """Captions of the images of one source."""

    def __init__(
        self,
        files: Collection[Path],
        images: Collection[Path],
        source: SourceFolder,
        columns: Columns,
        listing: MetadataListing,
    ) -> None:
        """Index the files that may hold captions.

        Args:
            files: All files of the source.
            images: Those that are images.
            source: The source.
            columns: Names of the fields with caption and category.
            listing: What its metadata files list.
        """
        self.listing = listing
        self._folder, self.columns = source.folder, columns
        self._beside: dict[str, list[Path]] = {}
        self._apart: dict[tuple[str, ...], list[Path]] = {}
        self.side_fields: dict[Path, tuple[str, ...]] = {}
        known = set(images)
        rank = {suffix: number for number, suffix in enumerate(SIDE_SUFFIXES)}
        candidates = [
            file
            for file in files
            if file.suffix.lower() in rank and not is_metadata(file.name) and file not in known
        ]
        for file in sorted(candidates, key=lambda one: (rank[one.suffix.lower()], one)):
            self._beside.setdefault(folded(file.with_suffix("")), []).append(file)
            parts = self._parts(file)
            if any(part in CAPTION_FOLDERS for part in parts[:-1]):
                self._apart.setdefault(_without(parts, CAPTION_FOLDERS), []).append(file)
        self.used: set[Path] = {file for image in images for file in self.side_files(image)}
        self._read_other_lists(files, images, ImageNames(source.folder, images))

    def side_files(self, image: Path) -> list[Path]:
        """List the files with the image's own caption, the one to read first at the head."""
        by_stem = self._beside.get(folded(image.with_suffix("")), [])
        by_name = self._beside.get(folded(image), [])
        # A name in exactly the image's letters wins: a.txt and A.txt may belong to two images.
        exact = {image.with_suffix(""), image}
        beside = sorted(by_stem + by_name, key=lambda file: file.with_suffix("") not in exact)
        if beside:
            return beside
        parts = self._parts(image)
        for key in (parts, _without(parts, IMAGE_FOLDERS)):
            if found := self._apart.get(key):
                return found
        return []

    def find(self, image: Path) -> Caption | None:
        """Find the image's caption; None when it has none.

        Raises:
            DatasetError: A caption file can't be read.
        """
        listed = self.listing.entries.get(image)
        if listed is not None and listed.caption is not None:
            return Caption(listed.caption.text, unused=listed.caption.unused)
        empty: Caption | None = None
        for file in self.side_files(image):
            found = self._read(file)
            if found is not None and found.text:
                return found
            empty = empty or found
        return empty

    def unread(self, files: Collection[Path], images: Collection[Path]) -> Iterator[Path]:
        """Yield the files that may hold captions and that no caption was read from."""
        read = self.used | set(images) | set(self.listing.fields)
        for file in files:
            suffix = file.suffix.lower()
            if file not in read and suffix in (*SIDE_SUFFIXES, *OTHER_TEXT_SUFFIXES):
                yield file
        yield from (file for file, fields in self.side_fields.items() if fields)

    def _read(self, file: Path) -> Caption | None:
        text = read_text(file)
        if file.suffix.lower() != ".json":
            lines = [line for line in text.splitlines() if line.strip()]
            return Caption(" ".join(text.split()), lines=max(1, len(lines)))
        try:
            document = json.loads(text)
            entry = {"text": document} if isinstance(document, str) else document
            if not isinstance(entry, dict):
                raise ValueError("it has neither an object nor a string")
            found = caption_of(entry, self.columns)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"{file} has no caption that can be read: {error}.") from None
        if found is None:
            self.side_fields[file] = tuple(entry)
            return None
        if half := SURROGATE.search(found.text):
            raise DatasetError(f"{file} contains half a character (\\u{ord(half[0]):04x}).")
        return Caption(found.text, unused=found.unused)

    def _read_other_lists(
        self, files: Collection[Path], images: Collection[Path], names: ImageNames
    ) -> None:
        """Read lists of any other name for images that have no caption so far."""
        without = {
            image
            for image in images
            if not self.side_files(image)
            and ((entry := self.listing.entries.get(image)) is None or entry.caption is None)
        }
        for file in sorted(files) if without else ():
            if is_metadata(file.name) or file in self.used or not is_listing_candidate(file):
                continue
            try:
                rows = read_rows(file)
            except DatasetError:  # of unknown purpose; it is named among the files not read
                continue
            named = [r for r in rows if r.image and names.find(r.image, file.parent) in without]
            found = MetadataListing()
            add_rows(found, named, file, self.columns, names)
            captions = {i: e for i, e in found.entries.items() if e.caption is not None}
            if captions:
                self.listing.entries.update(captions)
                self.listing.fields.update(found.fields)
                self.listing.bad += found.bad
                without -= captions.keys()
            elif named:
                self.side_fields[file] = found.fields[file]

    def _parts(self, file: Path) -> tuple[str, ...]:
        name = file.relative_to(self._folder).with_suffix("")
        if name.suffix.lower() in IMAGE_SUFFIXES:  # NAME.jpg.txt
            name = name.with_suffix("")
        return tuple(folded(part) for part in name.parts)


def build_caption_finder(
    files: Collection[Path], images: Collection[Path], source: SourceFolder, columns: Columns
) -> CaptionFinder:
    """Read the metadata files of a source and index the captions of its images.

    Args:
        files: All files of the source.
        images: Those that are images.
        source: The source.
        columns: Names of the fields with caption and category.

    Raises:
        DatasetError: A metadata file can't be read, or no line has a field that the job names.
    """
    listing = read_listing(files, source.folder, columns, ImageNames(source.folder, files))
    check_columns(listing, columns, source.folder, source.caption, source.category)
    return CaptionFinder(files, images, source, columns, listing)


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


def _without(parts: tuple[str, ...], names: frozenset[str]) -> tuple[str, ...]:
    return (*(part for part in parts[:-1] if part not in names), parts[-1])
