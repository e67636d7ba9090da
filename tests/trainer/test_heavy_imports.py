"""Start-up imports only what a run needs."""

import importlib.util
import sys
from pathlib import Path

import pytest

from kubelora_trainer.heavy_imports import not_found


def test_a_package_that_is_not_needed_is_not_found_until_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quantised.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with not_found(["quantised"]):
        assert importlib.util.find_spec("quantised") is None
        with pytest.raises(ImportError):
            importlib.import_module("quantised")
    assert importlib.import_module("quantised").loaded
    del sys.modules["quantised"]


def test_a_package_that_is_imported_already_stays() -> None:
    with not_found(["json"]):
        assert importlib.import_module("json").loads("1") == 1
    assert "json" in sys.modules
