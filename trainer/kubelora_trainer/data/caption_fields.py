"""Names under which tools store an image's file name and its caption, and the caption's form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kubelora_api.dataset_spec import Columns

CAPTION_FIELDS = (
    "text",  # Hugging Face, and the default of dataset.columns.caption
    "caption",  # kohya's scripts, img2dataset, LLaVA and BLIP scripts
    "captions",
    "prompt",
    "description",
    "txt",  # WebDataset
    "sentence",
    "sentences",
    "raw",  # Karpathy's splits, within a sentence
    "tag_string",  # Danbooru
    "tags",
    "alt_text",
    "title",
)
"""Fields read for captions while dataset.columns.caption has its default, the first that is set."""
IMAGE_FIELDS = (
    "file_name",  # Hugging Face's imagefolder
    "filename",
    "file",
    "image",
    "image_path",
    "image_file",
    "image_name",
    "image_id",
    "img",
    "img_path",
    "filepath",
    "file_path",
    "path",
    "key",  # WebDataset
    "name",
    "id",
)
"""Fields read for an image's file name, the first that a line has."""


@dataclass(frozen=True)
class FoundCaption:
    """Caption from a field. unused: further captions of the same image, of which one is used."""

    text: str
    unused: int = 0


def image_field(fields: Sequence[str]) -> str | None:
    """Return the field that holds the image's name."""
    return _first(IMAGE_FIELDS, fields)


def caption_fields(fields: Sequence[str], columns: Columns) -> list[str]:
    """List the fields that may hold the caption, best first; only the job's where it names one."""
    if columns.caption != Columns().caption:
        return [columns.caption] if columns.caption in fields else []
    lower = {field.lower(): field for field in reversed(fields)}
    return [lower[name] for name in CAPTION_FIELDS if name in lower]


def caption_of(entry: Mapping[str, object], columns: Columns) -> FoundCaption | None:
    """Return the caption of a line or side file; None where it has none.

    Raises:
        ValueError: The value is no text; the message names the field and the type.
    """
    empty: FoundCaption | None = None
    for field in caption_fields(list(entry), columns):
        found = _text(entry[field], field)
        if found is not None and found.text:
            return found
        empty = empty or found
    return empty


def kohya_caption_of(entry: Mapping[str, object], columns: Columns) -> FoundCaption | None:
    """Return the caption of an entry in kohya's JSON, whose tags follow its caption.

    Raises:
        ValueError: The value is no text.
    """
    found = caption_of(entry, columns)
    if found is None or columns.caption != Columns().caption or not entry.get("caption"):
        return found
    tags = _text(entry.get("tags"), "tags")
    return FoundCaption(f"{found.text}, {tags.text}") if tags and tags.text else found


def _first(names: Sequence[str], fields: Sequence[str]) -> str | None:
    lower = {field.lower(): field for field in reversed(fields)}
    return next((lower[name] for name in names if name in lower), None)


def _text(value: object, field: str) -> FoundCaption | None:
    """Return a field's value as text: lists of tags joined, the first of several captions."""
    if value is None:
        return None
    if isinstance(value, str):
        return FoundCaption(value.strip())
    if isinstance(value, Mapping):  # taggers write {tag: score}; others nest the text
        nested = caption_of(value, Columns())
        if nested is not None:
            return nested
        if value and all(isinstance(score, int | float) for score in value.values()):
            return FoundCaption(", ".join(str(tag) for tag in value))
    if isinstance(value, list | tuple):
        texts = [one for item in value if (one := _text(item, field)) is not None]
        if not texts:
            return None
        if "tag" in field.lower():
            return FoundCaption(", ".join(one.text for one in texts))
        return FoundCaption(texts[0].text, unused=len(texts) - 1)
    raise ValueError(f"{field} must be a string, not {type(value).__name__}")
