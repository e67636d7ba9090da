"""The command that the summary ends with can be typed as it stands."""

import sys
from pathlib import Path

import pytest

from kubelora_trainer.summary import interpreter


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("here/.venv/bin/python", ".venv/bin/python"),
        ("elsewhere/bin/python", "{}/elsewhere/bin/python"),
        ("here/my venv/bin/python", "'my venv/bin/python'"),
    ],
)
def test_the_command_names_the_python_that_has_diffusers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, said: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "executable", str(tmp_path / python))
    assert interpreter() == said.format(tmp_path)
