"""Every example is a whole job that a cluster takes, and the page of examples names it."""

import re
from pathlib import Path

import pytest

from kubelora_trainer.cli.job_file import load_job_documents
from kubelora_trainer.cli.validate import validate_files

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*/*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_an_example_is_valid_as_the_api_server_judges(file: Path) -> None:
    [line] = validate_files([str(file)], local=False, against=None)
    assert line.endswith(": valid")


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_an_example_says_first_what_it_is_for(file: Path) -> None:
    assert file.read_text().startswith("# ")
    [job] = load_job_documents(str(file))
    assert set(job.document) == {"apiVersion", "kind", "metadata", "spec"}


def test_the_page_names_every_example_and_no_other() -> None:
    page = (EXAMPLES / "README.md").read_text()
    linked = {EXAMPLES / link for link in re.findall(r"\]\(([^)]+)\)", page)}
    assert [link for link in linked if not link.exists()] == []
    # The story's job is told in the story's own page.
    assert set(FILES) - linked == {EXAMPLES / "six-days" / "job.yaml"}


def test_no_two_wishes_write_to_the_same_place() -> None:
    jobs = [load_job_documents(str(f))[0].document for f in (EXAMPLES / "wishes").glob("*.yaml")]
    assert len({job["metadata"]["name"] for job in jobs}) == len(jobs) == 8
    assert len({job["spec"]["output"]["uri"] for job in jobs}) == len(jobs)
