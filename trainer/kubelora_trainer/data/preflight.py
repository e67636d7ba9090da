"""Check of every image before training starts, so that bad ones are found in the first minute.

Every image of the folder is accounted for: found = used + skipped. Each skipped image is named with
its reason, in the report and in preflight.json.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kubelora_api import dataset_spec
from kubelora_trainer.data.buckets import Size, nearest_size, training_sizes, visible_share
from kubelora_trainer.data.caption_files import (
    SIDE_SUFFIXES,
    Caption,
    CaptionFinder,
    build_caption_finder,
    find_category,
)
from kubelora_trainer.data.caption_transforms import PROMPT_SYNTAX, prefixed
from kubelora_trainer.data.files import files_below
from kubelora_trainer.data.images import IMAGE_SUFFIXES, BadImageError, decode_image
from kubelora_trainer.data.kohya_layout import concept_of, concept_source
from kubelora_trainer.data.mask_files import find_masks
from kubelora_trainer.data.metadata_listing import BadRow, is_metadata
from kubelora_trainer.data.preflight_report import (
    CaptionCount,
    Count,
    PreflightReport,
    Remark,
)
from kubelora_trainer.data.sources import SourceFolder
from kubelora_trainer.data.token_limits import TokenLimit, describe_truncations
from kubelora_trainer.utils.errors import DatasetError
from kubelora_trainer.utils.text import printable

MIN_VISIBLE_SHARE = 0.5
"""A crop that shows less of its image than this is noted in the report."""
LONG_CAPTION = "caption too long"
DUPLICATE = "exact duplicate"
UNLISTED = "not in the metadata"
_LEFT_OUT_ON_PURPOSE = frozenset((DUPLICATE, UNLISTED))
"""Problems for which an image is left out without being a bad one."""
OnProgress = Callable[[int, int], None]
"""Callback for progress: (done, total)."""


@dataclass(frozen=True)
class Sample:
    """Usable image.

    file: relative to the dataset, with slashes. width, height: upright, in pixels. size: training
    size. category: empty for none. sha256: of the file's bytes. repeats: times it is seen in an
    epoch. loss_weight: weight of its loss. use_prefix: whether its caption gets the prefix.
    mask_file: weights its loss; part of sha256.
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
    mask_file: Path | None = None


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
    finder: CaptionFinder
    limits: tuple[TokenLimit, ...]
    masks: Mapping[Path, Path]

    def __call__(self, image: Path) -> _CheckedImage:
        source = self.source
        file = source.shown(image)
        category = source.category or find_category(image, source.folder, self.finder.listing)
        try:
            sample, notes = self._sample(image, file, category)
        except BadImageError as error:
            problem = Remark(file, error.problem, printable(str(error)), "skipped")
            return _CheckedImage(file, source.label, category, None, problem, ())
        return _CheckedImage(file, source.label, category, sample, None, notes)

    def _sample(self, image: Path, file: str, category: str) -> tuple[Sample, tuple[Remark, ...]]:
        """Return the sample and remarks on it. Raises BadImageError."""
        if row := self.finder.listing.bad_images.get(image):
            raise BadImageError(row.kind, self._detail(row))
        if problem := _missing_file_problem(image):
            raise BadImageError(*problem)
        if self.settings.layout == "kohya" and concept_of(image, self.source) is None:
            raise BadImageError(UNLISTED, "it is in no folder named like 10_zwx dog")
        caption = self._caption(image)
        decoded = decode_image(image, self.settings, self.masks.get(image))
        width, height = decoded.image.size
        self._check_shape(width, height)
        size = nearest_size(width, height, self.sizes)
        notes = [Remark(file, c.problem, "", c.done) for c in decoded.conversions]
        notes += self._shape_remarks(file, width, height, size)
        notes += self._caption_remarks(file, caption)
        sample = Sample(
            path=image,
            file=file,
            caption=caption.text if caption else "",
            width=width,
            height=height,
            size=size,
            category=category,
            sha256=decoded.sha256,
            repeats=self.source.repeats,
            loss_weight=self.source.loss_weight,
            use_prefix=self.source.use_prefix,
            mask_file=self.masks.get(image),
        )
        return sample, tuple(notes)

    def _detail(self, row: BadRow) -> str:
        return f"{row.where.removeprefix(f'{self.source.folder}/')}: {row.problem}"

    def _caption(self, image: Path) -> Caption | None:
        """Return the image's caption or else its source's. Raises BadImageError."""
        try:
            found = self.finder.find(image)
        except DatasetError as error:
            kind = "caption not UTF-8" if "UTF-8" in str(error) else "caption can't be read"
            raise BadImageError(kind, str(error).rstrip(".")) from error
        if not (found and found.text) and self.source.caption:
            return Caption(self.source.caption)
        listing = self.finder.listing
        if found is None and image not in listing.entries and listing.lists(image):
            raise BadImageError(
                UNLISTED,
                "the metadata of its folder lists other images but not this one, and it has no "
                "caption of its own",
            )
        return found

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

    def _caption_remarks(self, file: str, caption: Caption | None) -> Iterator[Remark]:
        used = self.source.use_prefix
        if caption is None or not caption.text:
            problem = "no caption" if caption is None else "empty caption"
            alone = used and self.settings.captions.prefix
            done = "trained on the prefix alone" if alone else "trained on the empty caption"
            yield Remark(file, problem, "", done)
            return
        if caption.lines > 1:
            yield Remark(file, "caption of several lines", f"{caption.lines} lines", "joined")
        if caption.unused:
            number = f"{caption.unused + 1} captions"
            yield Remark(file, "several captions", number, "the first is used")
        if syntax := [found[0] for found in PROMPT_SYNTAX.finditer(caption.text)]:
            yield Remark(file, "prompt syntax", ", ".join(syntax[:3]), "trained as plain text")
        encoded = prefixed(caption.text, self.settings.captions) if used else caption.text
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
    return "missing", "it is listed in the metadata but does not exist"


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
    sources = [SourceFolder(folder, repeats=settings.repeats), *extra]
    found = [_find_images(source, settings) for source in sources]
    work = [
        (one.checker(image, settings, sizes, limits), image)
        for one in found
        for image in one.images
    ]
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
    checked += [lost for one in found for lost in _lost_rows(one)]
    samples = tuple(one.sample for one in checked if one.sample)
    return samples, _report(folder, settings, checked, found)


def _existing(source: SourceFolder) -> Path:
    if not source.folder.is_dir():
        raise DatasetError(f"The dataset {source.folder} is not a folder: see {source.field}.")
    return source.folder


@dataclass(frozen=True)
class _FoundImages:
    """Images of one source, and all files that were found with them."""

    source: SourceFolder
    files: tuple[Path, ...]
    images: tuple[Path, ...]
    finder: CaptionFinder
    masks: Mapping[Path, Path]

    def checker(
        self,
        image: Path,
        settings: dataset_spec.Dataset,
        sizes: tuple[Size, ...],
        limits: tuple[TokenLimit, ...],
    ) -> _ImageChecker:
        """Build the check of one image, with the settings of its folder.

        Args:
            image: The image.
            settings: ``dataset`` of the job.
            sizes: Training sizes.
            limits: Token limits of the text encoders.
        """
        source = self.source
        if settings.layout == "kohya" and (concept := concept_of(image, source)):
            source = concept_source(source, concept)
        masks = {i: mask for mask, i in self.masks.items()} if settings.mask_files == "use" else {}
        return _ImageChecker(source, settings, sizes, self.finder, limits, masks)


def _find_images(source: SourceFolder, settings: dataset_spec.Dataset) -> _FoundImages:
    """Return the images among a source's files, with their captions."""
    files = sorted(files_below(_existing(source)))
    images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    masks = {} if settings.mask_files == "train" else find_masks(images, source.folder)
    images = [image for image in images if image not in masks]
    finder = build_caption_finder(files, images, source, settings.columns)
    images = sorted({*images, *finder.listing.entries, *finder.listing.bad_images})
    if not images and not finder.listing.bad:
        raise DatasetError(
            f"The dataset {source.folder} contains no images ({len(files)} files of other kinds): "
            f"see {source.field}."
        )
    if settings.layout == "kohya" and not any(concept_of(image, source) for image in images):
        raise DatasetError(
            f"dataset.layout is kohya, but no image of {source.folder} is in a folder named like "
            "'10_zwx dog' (repeats, _, class prompt): name the folders so, or set dataset.layout: "
            "plain."
        )
    return _FoundImages(source, tuple(files), tuple(images), finder, masks)


def _layout_remarks(found: _FoundImages, settings: dataset_spec.Dataset) -> Iterator[Remark]:
    """Yield what looks like another trainer's layout, and masks that weight nothing."""
    if settings.mask_files == "exclude":
        for mask, image in sorted(found.masks.items()):
            detail = f"of {found.source.shown(image)}"
            done = "left out; dataset.maskFiles: use weights the loss by it"
            yield Remark(found.source.shown(mask), "looks like a mask", detail, done)
    if settings.layout == "plain":
        concepts = {
            (image.parent, concept)
            for image in found.images
            if (concept := concept_of(image, found.source))
        }
        for folder, (repeats, prompt, prior) in sorted(concepts):
            what = "prior-preservation images" if prior else "images"
            detail = f"{what} with repeats {repeats} and the caption {prompt!r}"
            done = "trained as subjects, once an epoch; set dataset.layout: kohya"
            yield Remark(found.source.shown(folder), "looks like kohya's layout", detail, done)


def _lost_rows(found: _FoundImages) -> Iterator[_CheckedImage]:
    """Yield rows of metadata of no known image; each may be an image that is lost."""
    images = found.finder.listing.bad_images
    for row in found.finder.listing.bad:
        if row.image is None or images.get(row.image) is not row:
            file = found.source.shown(Path(row.where))
            problem = Remark(file, row.kind, printable(row.problem), "skipped")
            yield _CheckedImage(file, found.source.label, "", None, problem, ())


def require_usable_images(report: PreflightReport, on_bad_image: Literal["fail", "skip"]) -> None:
    """Check that the images of a report can be trained on; duplicates skipped on request can.

    Raises:
        DatasetError: No image is usable, or one is not and ``on_bad_image`` is fail.
    """
    bad = [remark for remark in report.skipped if remark.problem not in _LEFT_OUT_ON_PURPOSE]
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


def _count_other_files(found: _FoundImages) -> int:
    known = {*found.images, *found.masks, *found.finder.used, *found.finder.listing.fields}
    return sum(
        file not in known
        and not is_metadata(file.name)
        and file.suffix.lower() not in SIDE_SUFFIXES
        for file in found.files
    )


def _orphaned_captions(found: _FoundImages) -> Iterator[Remark]:
    """Yield the captions without an image, which may have been lost while it was copied."""
    read = {*found.finder.used, *found.finder.listing.fields}
    for file in found.files:
        suffix = file.suffix.lower()
        if suffix in SIDE_SUFFIXES and file not in read and not is_metadata(file.name):
            yield Remark(found.source.shown(file), "caption without an image", "", "not used")


def _report(
    folder: Path,
    settings: dataset_spec.Dataset,
    checked: list[_CheckedImage],
    sources: Sequence[_FoundImages],
) -> PreflightReport:
    samples = [one.sample for one in checked if one.sample]
    skipped = tuple(one.problem for one in checked if one.problem)
    notes = (
        *(note for one in checked for note in one.notes),
        *(note for one in sources for note in _orphaned_captions(one)),
        *(note for one in sources for note in _layout_remarks(one, settings)),
    )
    found = Counter(one.category for one in checked)
    used = Counter(sample.category for sample in samples)
    found_in = Counter(one.source or str(folder) for one in checked)
    used_of = Counter(one.source or str(folder) for one in checked if one.sample)
    sizes = Counter(sample.size for sample in samples)
    return PreflightReport(
        folder=str(folder),
        resolution=settings.resolution,
        found=len(checked),
        used=len(samples),
        skipped=skipped,
        notes=notes,
        without_caption=sum(not sample.caption for sample in samples),
        upscaled=sum(note.done == "enlarged" for note in notes),
        duplicates=sum(remark.problem == DUPLICATE for remark in (*notes, *skipped)),
        cut_captions=sum(note.problem == LONG_CAPTION for note in notes),
        other_files=sum(_count_other_files(one) for one in sources),
        captions={one.source.label or str(folder): _captions_of(one, samples) for one in sources},
        categories={name: Count(found[name], used[name]) for name in sorted(found)},
        sources={name: Count(found_in[name], used_of[name]) for name in found_in},
        sizes={f"{size.width}x{size.height}": sizes[size] for size in sorted(sizes)},
    )


def _captions_of(found: _FoundImages, samples: Sequence[Sample]) -> CaptionCount:
    """Count the captions of one source, and name what may hold those that are missing."""
    finder, shown = found.finder, found.source.shown
    own = {sample.path: sample.caption for sample in samples if sample.path in set(found.images)}
    with_caption = {path for path, caption in own.items() if caption}
    silent = {
        file: tuple(name for name in names if name != finder.columns.category)
        for file, names in finder.listing.fields.items()
        if not any(
            path in with_caption for path, row in finder.listing.entries.items() if row.file == file
        )
    }
    missing = len(own) - len(with_caption)
    return CaptionCount(
        used=len(own),
        without=missing,
        prefixed=found.source.use_prefix,
        unread=tuple(shown(file) for file in finder.unread(found.files, found.images))
        if missing
        else (),
        fields={shown(file): names for file, names in silent.items() if names},
    )
