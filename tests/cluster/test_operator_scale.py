"""The operator's benchmark runs, on a control plane that leaves nothing behind."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .harness import machine, processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run keeps its temporary files."""
    return tmp_path_factory.mktemp("scale")


@pytest.fixture(scope="module")
def lines(folder: Path) -> list[str]:
    """What a run with three jobs prints."""
    if os.geteuid() != 0 and not Path(machine.CLUSTER_PACKAGES["etcd-server"]).exists():
        pytest.skip("needs etcd, or root on Debian to install it")
    arguments = ["--jobs", "3", "--run-seconds", "2", "--settled-seconds", "4", "--deadline", "200"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.operator_scale", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(folder)},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_all_figures_of_the_last_line_were_measured(lines: list[str]) -> None:
    last = lines[-1]
    assert last.startswith("bench-operator: n=3 ")
    figures = {name: float(value) for name, value in re.findall(r"(\w+)=(\S+)", last)}
    assert list(figures) == [
        *("n", "last_child_s", "p99_s", "requests", "rss_mib", "complete_ratio", "restart_s")
    ]
    assert all(math.isfinite(value) and value > 0 for value in figures.values())
    # A ConfigMap, a Job and the end in the status can't be had with less.
    assert figures["requests"] >= 3


def test_requests_are_the_operators_own(lines: list[str]) -> None:
    """The bare client's and the controllers' are not among them: one Job a job, not two."""
    (life,) = [line for line in lines if "over its life" in line]
    assert "create jobs 1.00" in life
    assert "create configmaps 1.00" in life
    (agents,) = [line for line in lines if "user agents" in line]
    assert "'kubelora-operator/" in agents
    assert "aiohttp" not in agents


def test_a_settled_state_costs_nothing(lines: list[str]) -> None:
    (settled,) = [line for line in lines if "n=3 settled" in line]
    assert "requests a second 0.00;" in settled
    (restart,) = [line for line in lines if "n=3 restart" in line]
    assert restart.endswith("writes about unchanged jobs 0.00")


def test_nothing_is_left(lines: list[str], folder: Path) -> None:
    assert lines
    assert list(folder.iterdir()) == []
    assert processes.processes_mentioning(str(folder)) == {}
