"""The summary's numbers are the run's, and the command that it ends with works as it stands."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kubelora_trainer.reporting.summary import interpreter
from tests.trainer.fixtures.engine import Engine


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


@pytest.mark.parametrize(("steps", "first_counted"), [(3, 1), (6, 4)])
def test_the_norms_range_is_of_settled_steps_and_of_all_where_a_run_has_none(
    tmp_path: Path, steps: int, first_counted: int
) -> None:
    engine = Engine(tmp_path, steps=steps)
    engine.train()
    log = pq.read_table(engine.run_log.finish()).to_pylist()
    norms = {row["step"]: row["total_grad_norm"] for row in log}
    counted = [norms[step] for step in range(first_counted, steps + 1)]
    assert len(set(counted)) == 3
    assert engine.reporter.norm_range == pytest.approx((min(counted), max(counted)), rel=1e-6)
