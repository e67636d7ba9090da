"""What the pages promise is there: tests that are named, fields that are named, links."""

import re
import signal
from pathlib import Path

import pytest
import yaml

from kubelora_api.names import ExitCode
from kubelora_trainer.cli.main import EPILOG

ROOT = Path(__file__).parents[3]
CRD = ROOT / "crds" / "kubelora.dev_loratrainingjobs.yaml"
TABLE = ROOT / "docs" / "trainer.md"
PAGES = sorted(
    page
    for page in ROOT.glob("**/*.md")
    if not {".venv", "runs", "build", "node_modules"} & set(page.relative_to(ROOT).parts)
)
FIELDS = re.compile(r"`([a-z][A-Za-z0-9.\[\]]*)(?:: [^`]*)?`")


def rows() -> list[list[str]]:
    """Feature, field, test: the cells of every row of the feature table."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def named_tests(cell: str) -> list[tuple[Path, str]]:
    """File and function (or an empty name) of what a cell names; `…` stands for the last file."""
    found: list[tuple[Path, str]] = []
    for name in re.findall(r"`([^`]*(?:test_|…)[^`]*)`", cell):
        file, _, function = name.partition("::")
        folder = "" if file.startswith("tests/") else "tests/trainer"
        path = found[-1][0] if file == "…" else ROOT / folder / file
        found.append((path, function))
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:50])
def test_each_feature_names_a_test_that_is_there(row: list[str]) -> None:
    _, _, proof = row
    tests = named_tests(proof)
    assert tests or "make numerics" in proof
    for path, function in tests:
        assert path.is_file(), path
        assert f"def {function}" in path.read_text(), f"{path.name}: {function}"


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0][:50])
def test_each_field_of_the_table_is_in_the_contract(row: list[str]) -> None:
    (version,) = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    group = ""
    for field in FIELDS.findall(row[1]):
        path = field if "." in field or field in spec["properties"] else f"{group}.{field}"
        group = path.rpartition(".")[0] or group
        node = spec
        for key in re.findall(r"[^.\[\]]+|\[\]", path):
            node = node.get("items") if key == "[]" else node.get("properties", {}).get(key)
            assert node is not None, path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


def anchors(page: Path) -> set[str]:
    """The headings' anchors as they are made on the web: lower case, spaces to dashes."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_readme_and_help_list_every_exit_code_of_the_contract() -> None:
    codes = {*map(int, ExitCode), 128 + signal.SIGINT}  # a second Ctrl-C
    table = (ROOT / "README.md").read_text().partition("| exit code |")[2].partition("\n\n")[0]
    assert {int(n) for n in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == codes
    listed = {
        int(n) for n in re.findall(r"(?:: |, |,\n)(\d+)\s", EPILOG.partition("Exit codes")[2])
    }
    assert listed == codes
