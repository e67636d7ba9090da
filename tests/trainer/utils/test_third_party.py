"""Start-up imports only what a run needs."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kubelora_trainer.utils.third_party import hidden_packages

AFTER_IMPORTS = """
import gc, json, sys
usual = gc.get_threshold()
from kubelora_trainer.utils.third_party import import_heavy_libraries
import_heavy_libraries()
loaded = [name for name in ("torch", "diffusers", "peft") if name in sys.modules]
spared = ("bitsandbytes", "torchao", "scipy", "boto3", "torchvision", "triton", "pyarrow")
unwanted = [name for name in spared if name in sys.modules]
import scipy
as_before = gc.isenabled() and gc.get_threshold() == usual
from tqdm.auto import tqdm
lock = type(tqdm.get_lock()).__name__
print(json.dumps([loaded, unwanted, scipy.__name__, as_before, lock]))
"""


def test_a_package_that_is_not_needed_is_not_found_until_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quantised.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    with hidden_packages(["quantised"]):
        assert importlib.util.find_spec("quantised") is None
        with pytest.raises(ImportError):
            importlib.import_module("quantised")
    assert importlib.import_module("quantised").loaded
    del sys.modules["quantised"]


def test_a_package_that_is_imported_already_stays() -> None:
    with hidden_packages(["json"]):
        assert importlib.import_module("json").loads("1") == 1
    assert "json" in sys.modules


def test_a_runs_imports_are_those_that_training_needs_and_no_other() -> None:
    """triton is for GPUs; pyarrow comes when the run log is written. scipy is there afterwards.

    Nothing is said of what is not there.
    """
    done = subprocess.run(
        [sys.executable, "-c", AFTER_IMPORTS], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    loaded, unwanted, found_later, collector_as_before, lock = json.loads(
        done.stdout.splitlines()[-1]
    )
    assert loaded == ["torch", "diffusers", "peft"]
    assert unwanted == (["triton"] if torch.cuda.is_available() else [])
    assert found_later == "scipy"
    assert collector_as_before
    assert lock == "RLock"  # of threads: one of processes would be reported as leaked
