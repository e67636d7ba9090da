"""Preflight report, for people (a table) and for programs (preflight.json)."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kubelora_trainer.utils.atomic_io import write_file

TABLE_WIDTH = 120
"""Logs have no terminal whose width counts; most viewers show this many columns."""
NAMED_FILES = 3
"""Files that a row of the table names; preflight.json names all of them."""


@dataclass(frozen=True)
class Remark:
    """Problem of one file that a person should know about.

    problem: its kind, in a few words. detail: what was found. done: what was done about it.
    """

    file: str
    problem: str
    detail: str
    done: str


@dataclass(frozen=True)
class Count:
    """Images of one category or training size."""

    found: int
    used: int


@dataclass(frozen=True)
class CaptionCount:
    """Captions of one source.

    used: images that can be trained on. without: those of them that have no caption, or an empty
    one. prefixed: whether they get dataset.captions.prefix. unread: files that may hold captions,
    but none was read from. fields: names of the fields of each metadata file that has no caption
    for any image.
    """

    used: int
    without: int
    prefixed: bool = True
    unread: tuple[str, ...] = ()
    fields: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class PreflightReport:
    """Result of preflight.

    found = used + len(skipped), always; ValueError otherwise.
    skipped: the images that can't be used, each with its reason. sources: by folder or URI.
    categories: by name, empty for images without one. sizes: used images by training size.
    cut_captions: captions longer than a text encoder reads. other_files: neither images nor
    captions. captions: by source.
    """

    folder: str
    resolution: int
    found: int
    used: int
    skipped: tuple[Remark, ...]
    notes: tuple[Remark, ...]
    without_caption: int
    upscaled: int
    duplicates: int
    cut_captions: int
    other_files: int
    sources: dict[str, Count] = field(default_factory=dict)
    categories: dict[str, Count] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    captions: dict[str, CaptionCount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.found != self.used + len(self.skipped):
            raise ValueError(f"{self.found} found, {self.used} used, {len(self.skipped)} skipped")


def write_report(report: PreflightReport, path: Path) -> None:
    """Write preflight.json atomically.

    Raises:
        OutputError: The disk refuses the write.
    """
    text = json.dumps(asdict(report), indent=2, ensure_ascii=False) + "\n"
    write_file(path, text.encode())


def report_text(report: PreflightReport) -> str:
    """Format the counts, and a table with one row per kind of problem and what was done."""
    lines = [
        f"data: {report.found} images found = {report.used} used + {len(report.skipped)} skipped"
        f" in {report.folder}"
    ]
    if len(report.sources) > 1:
        of = (f"{name} {count.used} of {count.found}" for name, count in report.sources.items())
        lines.append("sources: " + ", ".join(of))
    if set(report.categories) - {""}:
        counts = (
            f"{name or '(none)'} {count.used} of {count.found}"
            for name, count in sorted(report.categories.items())
        )
        lines.append("categories: " + ", ".join(counts))
    if len(report.sizes) > 1:
        sizes = (f"{size} ({count})" for size, count in report.sizes.items())
        lines.append("buckets: " + ", ".join(sizes))
    if report.without_caption:
        lines.append(f"captions: {report.without_caption} of {report.used} images have none")
    if report.other_files:
        lines.append(f"other files, ignored: {report.other_files}")
    if report.skipped or report.notes:
        lines.append(_table(report))
    return "\n".join(lines)


def _table(report: PreflightReport) -> str:
    table = Table(title_justify="left", pad_edge=False, box=None, header_style="")
    for name, wrapped in (("problem", True), ("images", False), ("done", True), ("which", True)):
        table.add_column(
            name, no_wrap=not wrapped, overflow="fold", justify="left" if wrapped else "right"
        )
    groups: dict[tuple[str, str], list[Remark]] = {}
    for remark in (*report.skipped, *report.notes):
        groups.setdefault((remark.problem, remark.done), []).append(remark)
    for (problem, done), remarks in groups.items():
        table.add_row(problem, str(len(remarks)), done, _named(remarks))
    text = io.StringIO()
    console = Console(file=text, width=TABLE_WIDTH, markup=False, highlight=False, emoji=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().split("\n"))


def _named(remarks: Sequence[Remark]) -> str:
    named = "; ".join(
        f"{remark.file} ({remark.detail})" if remark.detail else remark.file
        for remark in remarks[:NAMED_FILES]
    )
    more = len(remarks) - NAMED_FILES
    return f"{named}; and {more} more" if more > 0 else named
