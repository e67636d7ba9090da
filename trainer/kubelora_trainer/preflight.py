"""Looks at every image before training starts, so that a bad one is found in the first minute.

Every image of the folder is accounted for: found = used + skipped, and what was skipped is named
with its reason, in the report and in preflight.json.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kubelora_trainer.atomic_files import write_file
from kubelora_trainer.captions import METADATA, SUFFIXES, Listing, caption_of, read_listing
from kubelora_trainer.errors import ConfigurationError
from kubelora_trainer.images import BadImageError, decode_image

READABLE = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
OTHERS = (".avif", ".heic", ".heif", ".jxl", ".jp2", ".tga", ".ppm", ".pgm", ".psd", ".exr", ".hdr")
CAMERA_RAW = (".dng", ".cr2", ".cr3", ".nef", ".arw", ".raw")
IMAGE_SUFFIXES = frozenset(READABLE + OTHERS + CAMERA_RAW)
"""What is taken for an image by its name, also where no decoder is at hand: it is then reported."""


@dataclass(frozen=True)
class Sample:
    """A usable image. file: relative to the dataset, with slashes. Sizes upright, in pixels."""

    file: str
    caption: str
    width: int
    height: int


@dataclass(frozen=True)
class Remark:
    """Something about one file that a person should know."""

    file: str
    text: str


@dataclass(frozen=True)
class PreflightReport:
    """What was found. skipped are the images that can't be used, each with its reason."""

    folder: str
    resolution: int
    found: int
    used: int
    skipped: tuple[Remark, ...]
    notes: tuple[Remark, ...]
    without_caption: int
    upscaled: int
    other_files: int


@dataclass(frozen=True)
class _Judged:
    sample: Sample | None
    problem: Remark | None
    notes: tuple[Remark, ...]


def preflight(
    folder: Path, resolution: int, on_bad_image: Literal["fail", "skip"]
) -> tuple[tuple[Sample, ...], PreflightReport]:
    """Judge every image below ``folder``; samples come sorted by name.

    Raises ConfigurationError when nothing is usable, a caption can't be read, or an image is bad
    and ``on_bad_image`` is fail.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"The dataset {folder} is no folder: see dataset.uri.")
    files = sorted(_walk(folder))
    listing = read_listing([file for file in files if file.name == METADATA], folder)
    images = sorted(
        {file for file in files if file.suffix.lower() in IMAGE_SUFFIXES} | set(listing.captions)
    )
    if not images:
        raise ConfigurationError(
            f"The dataset {folder} holds no images ({len(files)} files of other kinds): see "
            "dataset.uri."
        )
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        judged = list(pool.map(lambda image: _judge(image, folder, resolution, listing), images))
    report = _report(folder, resolution, judged, _others(files, images))
    samples = tuple(one.sample for one in judged if one.sample)
    _refuse(report, on_bad_image)
    return samples, report


def write_report(report: PreflightReport, path: Path) -> None:
    """Write preflight.json, whole or not at all. Raises ConfigurationError."""
    text = json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
    write_file(path, text.encode())


def _walk(folder: Path) -> Iterator[Path]:
    """Files below ``folder``, hidden ones left out; linked folders are entered, once each."""
    seen: set[str] = set()
    for current, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(current)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__MACOSX")))
        yield from (Path(current) / name for name in names if not name.startswith("."))


def _judge(image: Path, folder: Path, resolution: int, listing: Listing) -> _Judged:
    name = image.relative_to(folder).as_posix()
    if not image.is_file():
        reason = f"it is listed in {METADATA} but does not exist"
        return _Judged(None, Remark(name, reason), ())
    try:
        decoded = decode_image(image)
    except BadImageError as error:
        return _Judged(None, Remark(name, str(error)), ())
    caption = caption_of(image, listing)
    width, height = decoded.image.size
    notes = list(decoded.notes)
    if min(width, height) < resolution:
        notes.append(f"upscaled from {width} x {height}")
    if not caption:
        notes.append("no caption" if caption is None else "its caption is empty")
    remarks = tuple(Remark(name, note) for note in notes)
    return _Judged(Sample(name, caption or "", width, height), None, remarks)


def _others(files: list[Path], images: list[Path]) -> int:
    known = set(images)
    return sum(
        file not in known and file.name != METADATA and file.suffix not in SUFFIXES
        for file in files
    )


def _report(
    folder: Path, resolution: int, judged: list[_Judged], other_files: int
) -> PreflightReport:
    samples = [one.sample for one in judged if one.sample]
    return PreflightReport(
        folder=str(folder),
        resolution=resolution,
        found=len(judged),
        used=len(samples),
        skipped=tuple(one.problem for one in judged if one.problem),
        notes=tuple(note for one in judged for note in one.notes),
        without_caption=sum(not sample.caption for sample in samples),
        upscaled=sum(min(sample.width, sample.height) < resolution for sample in samples),
        other_files=other_files,
    )


def _refuse(report: PreflightReport, on_bad_image: Literal["fail", "skip"]) -> None:
    if not report.skipped:
        return
    first = "; ".join(f"{bad.file}: {bad.text}" for bad in report.skipped[:3])
    more = len(report.skipped) - 3
    listed = first + (f"; and {more} more" if more > 0 else "")
    count = f"{len(report.skipped)} of {report.found} images"
    if not report.used:
        raise ConfigurationError(f"No image in {report.folder} can be used: {listed}.")
    if on_bad_image == "fail":
        raise ConfigurationError(
            f"{count} in {report.folder} can't be used: {listed}. Repair or remove them, or set "
            "dataset.onBadImage: skip."
        )
