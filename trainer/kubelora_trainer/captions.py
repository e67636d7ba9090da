"""Finds the captions of a dataset: metadata.jsonl first, then a text file beside the image."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kubelora_trainer.errors import ConfigurationError

METADATA = "metadata.jsonl"
SUFFIXES = (".txt", ".caption")


@dataclass(frozen=True)
class Listing:
    """What the metadata files say: caption by image path, None where an entry has no text."""

    captions: Mapping[Path, str | None]


def read_listing(metadata_files: list[Path], root: Path) -> Listing:
    """Read every metadata.jsonl; ``file_name`` is relative to its file's folder.

    Raises ConfigurationError that names file and line.
    """
    captions: dict[Path, str | None] = {}
    for file in metadata_files:
        for number, line in enumerate(read_text(file).split("\n"), start=1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            image, caption = _entry(line, where, file.parent, root)
            if image in captions:
                raise ConfigurationError(f"{where}: {image.name} is listed a second time.")
            captions[image] = caption
    return Listing(captions)


def _entry(line: str, where: str, folder: Path, root: Path) -> tuple[Path, str | None]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigurationError(f"{where}: not a JSON object ({error}).") from None
    name = entry.get("file_name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f'{where}: it needs a file_name, as in {{"file_name": "a.jpg", "text": "a bottle"}}.'
        )
    text = entry.get("text")
    if text is not None and not isinstance(text, str):
        raise ConfigurationError(f"{where}: text must be a string, not {type(text).__name__}.")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ConfigurationError(f"{where}: file_name {name!r} leaves the dataset's folder.")
    return folder / name, None if text is None else text.strip()


def caption_of(image: Path, listing: Listing) -> str | None:
    """The image's caption; None when it has none anywhere. Raises ConfigurationError."""
    listed = listing.captions.get(image)
    if listed is not None:
        return listed
    for suffix in SUFFIXES:
        for beside in (image.with_suffix(suffix), image.with_name(image.name + suffix)):
            if beside.is_file():
                return " ".join(read_text(beside).split())
    return None


def read_text(file: Path) -> str:
    """UTF-8 text, a byte-order mark removed. Raises ConfigurationError with the byte's offset."""
    try:
        content = file.read_bytes()
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{file} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}. Save it "
            "as UTF-8."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{file} can't be read: {error.strerror}.") from error
