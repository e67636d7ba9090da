"""Check that a source's captions were found, since training on empty ones looks like success."""

from collections.abc import Iterator

from kubelora_api.dataset_spec import Dataset
from kubelora_api.suggestions import listed
from kubelora_trainer.data.preflight_report import CaptionCount, PreflightReport
from kubelora_trainer.utils.errors import DatasetError

NAMED_UNREAD = 5
"""Unread files that the message names; preflight.json has all of them."""
_FORMS = (
    "Captions are read from metadata.jsonl (file_name, text), metadata.csv or kohya's meta_*.json, "
    "and from NAME.txt, NAME.caption or NAME.json next to the images or in a folder captions"
)
_ON_PURPOSE = "to train on empty captions on purpose, set dataset.captions.maxMissing: 1"


def require_captions(report: PreflightReport, settings: Dataset) -> None:
    """Check that captions are missing no more than the job allows.

    Args:
        report: Result of preflight.
        settings: ``dataset`` of the job.

    Raises:
        DatasetError: No image of a source has a caption, no line of a metadata file has one, or
            more than ``captions.maxMissing`` of all images have none.
    """
    limit = settings.captions.max_missing
    if limit >= 1:
        return
    for source, count in report.captions.items():
        if count.fields:
            raise DatasetError(f"{_without_field(source, count)}; {_ON_PURPOSE}.")
        if count.used and count.without == count.used and not _prefix_suffices(count, settings):
            unread = "".join(_unread(count))
            raise DatasetError(
                f"No image in {source} has a caption.{unread} {_FORMS}; {_ON_PURPOSE}."
            )
    counts = report.captions.values()
    counted = [count for count in counts if not _prefix_suffices(count, settings)]
    used, without = (sum(getattr(c, name) for c in counted) for name in ("used", "without"))
    if used and without / used > limit:
        unread = "".join(text for count in counted for text in _unread(count))
        share = -(-100 * without // used) / 100  # rounded up, so that the advice is enough
        raise DatasetError(
            f"{without} of {used} images in {report.folder} have no caption, more than "
            f"dataset.captions.maxMissing ({limit:g}) allows; preflight.json names them.{unread} "
            f"{_FORMS}; to train those images on an empty caption on purpose, set "
            f"dataset.captions.maxMissing: {share:g}."
        )


def _prefix_suffices(count: CaptionCount, settings: Dataset) -> bool:
    """Return whether the prefix is meant as the only caption: nothing else could be one."""
    none = count.without == count.used and not count.unread and not count.fields
    return none and count.prefixed and bool(settings.captions.prefix)


def _without_field(source: str, count: CaptionCount) -> str:
    file, fields = next(iter(count.fields.items()))
    return (
        f"No line of {file} in {source} has a caption; its fields are {listed(fields)}: name the "
        "one with captions in dataset.columns.caption"
    )


def _unread(count: CaptionCount) -> Iterator[str]:
    if count.unread:
        more = len(count.unread) - NAMED_UNREAD
        names = ", ".join(count.unread[:NAMED_UNREAD]) + (f" and {more} more" if more > 0 else "")
        yield f" Not read: {names}."
