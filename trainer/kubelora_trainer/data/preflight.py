"""Check of every image before training starts, so that bad ones are found in the first minute.

Every image of the folder is accounted for: found = used + skipped. Each skipped image is named with
its reason, in the report and in preflight.json.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kubelora_api import dataset_spec
from kubelora_trainer.data.buckets import Size, nearest_size, training_sizes, visible_share
from kubelora_trainer.data.caption_files import (
    CAPTION_SUFFIXES,
    METADATA_FILE,
    MetadataListing,
    check_columns,
    check_metadata_format,
    find_caption,
    find_category,
    match_file_names,
    read_listing,
)
from kubelora_trainer.data.caption_transforms import prefixed
from kubelora_trainer.data.files import files_below
from kubelora_trainer.data.images import IMAGE_SUFFIXES, BadImageError, decode_image
from kubelora_trainer.data.preflight_report import Count, PreflightReport, Remark
from kubelora_trainer.data.sources import SourceFolder
from kubelora_trainer.data.token_limits import TokenLimit, describe_truncations
from kubelora_trainer.utils.errors import DatasetError
from kubelora_trainer.utils.text import printable

MIN_VISIBLE_SHARE = 0.5
"""A crop that shows less of its image than this is noted in the report."""
LONG_CAPTION = "caption too long"
DUPLICATE = "exact duplicate"
OnProgress = Callable[[int, int], None]
"""Callback for progress: (done, total)."""


@dataclass(frozen=True)
class Sample:
    """Usable image.

    file: relative to the dataset, with slashes. width, height: upright, in pixels. size: training
    size. category: empty for none. sha256: of the file's bytes. repeats: times it is seen in an
    epoch. loss_weight: weight of its loss. use_prefix: whether its caption gets the prefix.
    """

    path: Path
    file: str
    caption: str
    width: int
    height: int
    size: Size
    category: str
    sha256: str
    repeats: int
    loss_weight: float
    use_prefix: bool


@dataclass(frozen=True)
class _CheckedImage:
    """Result for one image: a sample, or the problem that makes it unusable."""

    file: str
    source: str
    category: str
    sample: Sample | None
    problem: Remark | None
    notes: tuple[Remark, ...]


@dataclass(frozen=True)
class _ImageChecker:
    """Check of single images, with all that it depends on."""

    source: SourceFolder
    settings: dataset_spec.Dataset
    sizes: tuple[Size, ...]
    listing: MetadataListing
    limits: tuple[TokenLimit, ...]

    def __call__(self, image: Path) -> _CheckedImage:
        source = self.source
        file = printable(image.relative_to(source.folder).as_posix())
        if source.label:
            file = f"{source.label}/{file}"
        category = source.category or find_category(image, source.folder, self.listing)
        try:
            sample, notes = self._sample(image, file, category)
        except BadImageError as error:
            problem = Remark(file, error.problem, printable(str(error)), "skipped")
            return _CheckedImage(file, source.label, category, None, problem, ())
        return _CheckedImage(file, source.label, category, sample, None, notes)

    def _sample(self, image: Path, file: str, category: str) -> tuple[Sample, tuple[Remark, ...]]:
        """Return the sample and remarks on it. Raises BadImageError."""
        if problem := _missing_file_problem(image):
            raise BadImageError(*problem)
        decoded = decode_image(image, self.settings)
        width, height = decoded.image.size
        self._check_shape(width, height)
        try:
            caption = find_caption(image, self.listing)
        except DatasetError as error:
            kind = "caption not UTF-8" if "UTF-8" in str(error) else "caption can't be read"
            raise BadImageError(kind, str(error).rstrip(".")) from error
        # The image's own caption at the end again: an empty one is reported otherwise than None.
        caption = caption or self.source.caption or caption
        size = nearest_size(width, height, self.sizes)
        notes = [Remark(file, c.problem, "", c.done) for c in decoded.conversions]
        notes += self._shape_remarks(file, width, height, size)
        notes += self._caption_remarks(file, caption)
        sample = Sample(
            path=image,
            file=file,
            caption=caption or "",
            width=width,
            height=height,
            size=size,
            category=category,
            sha256=decoded.sha256,
            repeats=self.source.repeats,
            loss_weight=self.source.loss_weight,
            use_prefix=self.source.use_prefix,
        )
        return sample, tuple(notes)

    def _check_shape(self, width: int, height: int) -> None:
        short, long = sorted((width, height))
        if short < self.settings.min_short_edge:
            raise BadImageError(
                "too small",
                f"it has {width} x {height} pixels, but dataset.minShortEdge is "
                f"{self.settings.min_short_edge}",
            )
        limit = self.settings.max_aspect_ratio
        if limit is not None and long > limit * short:
            raise BadImageError(
                "extreme aspect ratio",
                f"it has {width} x {height} pixels, {long / short:.3g} to 1, but "
                f"dataset.maxAspectRatio is {limit:g}",
            )

    def _shape_remarks(self, file: str, width: int, height: int, size: Size) -> Iterator[Remark]:
        found = f"{width} x {height}"
        if width < size.width or height < size.height:
            yield Remark(file, "smaller than its training size", found, "enlarged")
        share = visible_share(width, height, size)
        if share < MIN_VISIBLE_SHARE:
            yield Remark(
                file,
                "extreme aspect ratio",
                f"{found}: a crop of {size.width} x {size.height} shows {share:.0%} of it",
                "cropped",
            )

    def _caption_remarks(self, file: str, caption: str | None) -> Iterator[Remark]:
        if not caption:
            problem = "no caption" if caption is None else "empty caption"
            yield Remark(file, problem, "", "trained on the empty caption")
            return
        used = self.source.use_prefix
        encoded = prefixed(caption, self.settings.captions) if used else caption
        found = [one for limit in self.limits if (one := limit.truncation(encoded))]
        if found:
            detail, done = describe_truncations(found)
            yield Remark(file, LONG_CAPTION, detail, done)


def _missing_file_problem(image: Path) -> tuple[str, str] | None:
    """Return problem and reason where there is no file of that name."""
    try:
        if image.is_file():
            return None
        if image.is_symlink():
            return "missing", f"it is a link to {image.readlink()}, which does not exist"
        if image.exists():
            return "not a file", "it is a folder or a device, not a file"
    except OSError as error:  # the name is too long, or a folder can't be entered
        return "can't be read", f"it can't be read: {error.strerror}"
    return "missing", f"it is listed in {METADATA_FILE} but does not exist"


def preflight(
    folder: Path,
    settings: dataset_spec.Dataset,
    limits: tuple[TokenLimit, ...] = (),
    on_progress: OnProgress = lambda done, total: None,
    extra: Sequence[SourceFolder] = (),
) -> tuple[tuple[Sample, ...], PreflightReport]:
    """Check every image of a dataset.

    Args:
        folder: The dataset's folder.
        settings: ``dataset`` of the job.
        limits: Token limits of the text encoders; without them captions are not checked.
        on_progress: Called with (images checked, images in all); may raise to stop.
        extra: Further source folders.

    Returns:
        The usable samples of ``folder``, then of ``extra``, each sorted by name; and the report,
        which has what is wrong with images (see ``require_usable_images``).

    Raises:
        DatasetError: There is no image at all, or metadata.jsonl can't be read.
    """
    sizes = training_sizes(settings)
    work: list[tuple[_ImageChecker, Path]] = []
    others, orphans = 0, list[Remark]()
    for source in (SourceFolder(folder, repeats=settings.repeats), *extra):
        files = sorted(files_below(_existing(source)))
        images, listing = _images_of(files, source, settings)
        checker = _ImageChecker(source, settings, sizes, listing, limits)
        work += [(checker, image) for image in images]
        others += _count_other_files(files, images)
        orphans += _orphaned_captions(files, images, source)
    checked: list[_CheckedImage] = []
    # Threads suffice: Pillow's decoders release the GIL. Eight hold eight decoded images at most.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        try:
            for one in pool.map(lambda pair: pair[0](pair[1]), work):
                checked.append(one)
                on_progress(len(checked), len(work))
        except BaseException:  # a stop request: thousands of images may still be queued
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    checked = _mark_duplicates(checked, settings.on_duplicate)
    samples = tuple(one.sample for one in checked if one.sample)
    return samples, _report(folder, settings.resolution, checked, others, orphans)


def _existing(source: SourceFolder) -> Path:
    if not source.folder.is_dir():
        raise DatasetError(f"The dataset {source.folder} is not a folder: see {source.field}.")
    return source.folder


def _images_of(
    files: list[Path], source: SourceFolder, settings: dataset_spec.Dataset
) -> tuple[list[Path], MetadataListing]:
    """Return the images among a source's files, and their metadata."""
    folder = source.folder
    names: dict[Path, list[str]] = {}
    for file in files:
        names.setdefault(file.parent, []).append(file.name)
    check_metadata_format(names)
    metadata = [file for file in files if file.name == METADATA_FILE]
    listing = match_file_names(read_listing(metadata, settings.columns), files)
    check_columns(listing, settings.columns, folder, source.caption, source.category)
    images = sorted(
        {file for file in files if file.suffix.lower() in IMAGE_SUFFIXES} | set(listing.entries)
    )
    if not images:
        raise DatasetError(
            f"The dataset {folder} contains no images ({len(files)} files of other kinds): see "
            f"{source.field}."
        )
    return images, listing


def require_usable_images(report: PreflightReport, on_bad_image: Literal["fail", "skip"]) -> None:
    """Check that the images of a report can be trained on; duplicates skipped on request can.

    Raises:
        DatasetError: No image is usable, or one is not and ``on_bad_image`` is fail.
    """
    bad = [remark for remark in report.skipped if remark.problem != DUPLICATE]
    if not bad:
        return
    first = "; ".join(f"{one.file}: {one.detail}" for one in bad[:3])
    more = len(bad) - 3
    listed = first + (f"; and {more} more" if more > 0 else "")
    if not report.used:
        raise DatasetError(f"No image in {report.folder} can be used: {listed}.")
    if on_bad_image == "fail":
        raise DatasetError(
            f"{len(bad)} of {report.found} images in {report.folder} can't be used: {listed}. "
            "Fix or remove them, or set dataset.onBadImage: skip."
        )


def _mark_duplicates(
    checked: Sequence[_CheckedImage], on_duplicate: Literal["keep", "skip"]
) -> list[_CheckedImage]:
    """Note, or skip, every sample with the same bytes as an earlier one."""
    first: dict[str, str] = {}
    marked = []
    for one in checked:
        if one.sample is None:
            marked.append(one)
            continue
        original = first.get(one.sample.sha256)
        if original is None:
            first[one.sample.sha256] = one.file
            marked.append(one)
        elif on_duplicate == "keep":
            note = Remark(one.file, DUPLICATE, f"same bytes as {original}", "kept")
            marked.append(replace(one, notes=(*one.notes, note)))
        else:
            problem = Remark(one.file, DUPLICATE, f"same bytes as {original}", "skipped")
            marked.append(replace(one, sample=None, problem=problem, notes=()))
    return marked


def _count_other_files(files: list[Path], images: list[Path]) -> int:
    known = set(images)
    return sum(
        file not in known and file.name != METADATA_FILE and file.suffix not in CAPTION_SUFFIXES
        for file in files
    )


def _orphaned_captions(
    files: list[Path], images: list[Path], source: SourceFolder
) -> Iterator[Remark]:
    """Yield the captions without an image, which may have been lost while it was copied."""
    known = {image.with_suffix("") for image in images} | set(images)
    for file in files:
        if file.suffix in CAPTION_SUFFIXES and file.with_suffix("") not in known:
            name = printable(file.relative_to(source.folder).as_posix())
            where = f"{source.label}/{name}" if source.label else name
            yield Remark(where, "caption without an image", "", "not used")


def _report(
    folder: Path,
    resolution: int,
    checked: list[_CheckedImage],
    other_files: int,
    orphans: Sequence[Remark],
) -> PreflightReport:
    samples = [one.sample for one in checked if one.sample]
    skipped = tuple(one.problem for one in checked if one.problem)
    notes = (*(note for one in checked for note in one.notes), *orphans)
    found = Counter(one.category for one in checked)
    used = Counter(sample.category for sample in samples)
    found_in = Counter(one.source or str(folder) for one in checked)
    used_of = Counter(one.source or str(folder) for one in checked if one.sample)
    sizes = Counter(sample.size for sample in samples)
    return PreflightReport(
        folder=str(folder),
        resolution=resolution,
        found=len(checked),
        used=len(samples),
        skipped=skipped,
        notes=notes,
        without_caption=sum(not sample.caption for sample in samples),
        upscaled=sum(note.done == "enlarged" for note in notes),
        duplicates=sum(remark.problem == DUPLICATE for remark in (*notes, *skipped)),
        cut_captions=sum(note.problem == LONG_CAPTION for note in notes),
        other_files=other_files,
        categories={name: Count(found[name], used[name]) for name in sorted(found)},
        sources={name: Count(found_in[name], used_of[name]) for name in found_in},
        sizes={f"{size.width}x{size.height}": sizes[size] for size in sorted(sizes)},
    )
