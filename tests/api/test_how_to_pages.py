"""Each page ``docs/how-to-add-*.md`` lists all the files that a change touches, and no others.

A page names an example that exists (``Example: `lion`.``). Every file that the page lists contains
it, and no other source file of the product does, so a page that falls behind the code fails.
"""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("how-to-add-*.md"))
SOURCES = ("crds/kubelora_api", "operator", "trainer", "charts")
SUFFIXES = {".py", ".yaml", ".json", ".tpl", ".txt"}
GENERATED = re.compile(r"Generated (from|by).*Do not edit", re.IGNORECASE)
# A list item that begins with a link: `1. [`file`](../file): what to write`.
ITEM = re.compile(r"^\d+\. \[`([^`]+)`\]\(([^)#]+)\)", re.MULTILINE)


def examples(page: Path) -> list[str]:
    """Return the names after ``Example:``, up to the end of the sentence."""
    line = re.search(r"^Example: ([^.]*)\.", page.read_text(), re.MULTILINE)
    assert line, f"{page.name} names no example: add a line like 'Example: `lion`.'"
    names = re.findall(r"`([^`]+)`", line[1])
    assert names, f"{page.name}: put the example's name into backticks"
    return names


def listed(page: Path) -> set[str]:
    """Return the files that the page lists."""
    return {name for name, _ in ITEM.findall(page.read_text())}


@cache
def sources() -> dict[str, str]:
    """Return the text of each source file of the product that is written by hand."""
    files = (f for top in SOURCES for f in (ROOT / top).rglob("*") if f.suffix in SUFFIXES)
    texts = {str(f.relative_to(ROOT)): f.read_text() for f in files}
    return {name: text for name, text in texts.items() if not GENERATED.search(text[:200])}


def names_one_of(text: str, names: list[str]) -> bool:
    return any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_listed_file_is_where_its_link_leads(page: Path) -> None:
    found = ITEM.findall(page.read_text())
    assert len(found) >= 3
    for name, target in found:
        assert (page.parent / target).resolve() == ROOT / name, name
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_is_in_every_file_that_the_page_lists(page: Path) -> None:
    names = examples(page)
    without = {f for f in listed(page) if not names_one_of((ROOT / f).read_text(), names)}
    assert without == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_is_in_no_source_file_that_the_page_leaves_out(page: Path) -> None:
    names = examples(page)
    touched = {file for file, text in sources().items() if names_one_of(text, names)}
    assert touched - listed(page) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_lists_a_test(page: Path) -> None:
    assert any(file.startswith("tests/") for file in listed(page))
