"""``docs/architecture.md`` has a line for each package, in the order of import-linter's layers."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def layers(container: str) -> list[str]:
    """Return the packages below ``container``, from the top layer down."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (found,) = (c["layers"] for c in contracts if c.get("containers") == [container])
    return [name for layer in found for name in layer.split(" | ")]


@pytest.mark.parametrize("container", ["kubelora_trainer", "kubelora_operator"])
def test_each_package_has_a_line_in_the_order_of_the_layers(container: str) -> None:
    assert re.findall(rf"^\| \[`\w+`\]\(\S+/{container}/(\w+)\) \|", PAGE, re.MULTILINE) == layers(
        container
    )


@pytest.mark.parametrize(
    "page", [p.name for p in sorted((ROOT / "docs").glob("how-to-add-*.md"))] + ["glossary.md"]
)
def test_the_page_links_the_glossary_and_each_page_on_additions(page: str) -> None:
    assert f"]({page})" in PAGE
