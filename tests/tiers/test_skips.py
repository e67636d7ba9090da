"""Which skips pass under CI=true, and that none is decided while a file is imported."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DECIDED_AT_IMPORT = {"skipif", "importorskip", "allow_module_level"}
EXAMPLES = """
import pytest
from tests.tiers.skips import not_applicable

@pytest.fixture
def gpu():
    pytest.skip("needs a GPU")

def test_lacks_a_program():
    pytest.skip("needs buildah")

def test_whose_fixture_lacks_something(gpu):
    pass

@pytest.mark.skipif(True, reason="needs root")
def test_skipped_by_a_mark():
    pass

def test_of_another_machine():
    not_applicable("there is a GPU here")

@pytest.mark.xfail(reason="a known fault")
def test_expected_to_fail():
    assert False

def test_that_fails_on_purpose():
    pytest.xfail("needs a GPU")

def test_that_only_says_so():
    pytest.skip("not applicable: needs a GPU")

def test_that_passes():
    pass
"""


def counts(folder: Path, ci: str, source: str = EXAMPLES) -> tuple[str, str]:
    """Output and closing line of pytest over a file of examples."""
    (folder / "test_examples.py").write_text(source)
    arguments = ("-q", "-p", "tests.tiers.skips", "-p", "no:cacheprovider", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-c", os.devnull, *arguments],
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout, done.stdout.splitlines()[-1].partition(" in ")[0]


@pytest.mark.parametrize("ci", ["true", "1", "TRUE"])
def test_under_ci_a_missing_means_is_a_failure_and_says_what_to_do(tmp_path: Path, ci: str) -> None:
    output, closing = counts(tmp_path, ci)
    assert closing == "4 failed, 1 passed, 1 skipped, 2 errors"
    for reason in ("needs buildah", "needs a GPU", "needs root"):
        assert f"skipped: {reason}. Under CI=true every test runs" in output


def test_elsewhere_skips_are_skips(tmp_path: Path) -> None:
    assert counts(tmp_path, "")[1] == "1 passed, 5 skipped, 2 xfailed"


def test_a_file_that_skips_itself_is_a_failure_too(tmp_path: Path) -> None:
    source = "import pytest\npytest.importorskip('no_such_package')\n"
    assert counts(tmp_path, "true", source)[1] == "1 error"


def test_no_test_decides_at_import_whether_it_is_skipped() -> None:
    """What a harness installs later would not be seen: buildah's two tests were lost that way."""
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in DECIDED_AT_IMPORT)
        or (isinstance(node, ast.keyword) and node.arg in DECIDED_AT_IMPORT)
    ]
    assert found == []
