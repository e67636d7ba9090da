"""helm and promtool for the chart's tests. Without them they are skipped."""

from pathlib import Path

import pytest
import yaml

from tests.chart import programs
from tests.chart.rendering import MONITORING, Helm, one


def _missing(program: str) -> None:
    pytest.skip(f"{program} is not on the PATH, and Go is not there to build it")


@pytest.fixture(scope="session")
def helm() -> Helm:
    program = programs.find("helm")
    if program is None:
        _missing("helm")
    assert program is not None
    return Helm(program)


@pytest.fixture(scope="session")
def promtools() -> list[Path]:
    found = programs.promtools()
    if not found:
        _missing("promtool")
    return found


@pytest.fixture(scope="session")
def rule_file(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart's PrometheusRule as a rule file, as the Prometheus operator writes it."""
    rules = one(helm.render(MONITORING), "PrometheusRule")["spec"]
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(yaml.safe_dump(rules))
    return path
