"""A small part of ``python -m tests.numerics.causes``: faults of each cause."""

from pathlib import Path

import pytest

from tests.numerics.causes import cause_found, injected
from tests.numerics.scene import Scene


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene.create(tmp_path_factory.mktemp("scene"))


@pytest.mark.parametrize("number", range(6))
def test_the_injected_cause_is_found(scene: Scene, tmp_path: Path, number: int) -> None:
    fault = injected(number)
    finding = cause_found(scene, fault, number, tmp_path / "run")
    assert finding is not None
    assert finding.cause == fault.cause
    assert f" Cause: {fault.cause}: " in finding.message
    assert finding.device == "cpu"
    if fault.cause == "Data":
        assert finding.samples
