"""The first thing that a newcomer types: `make quickstart`, run as it stands in the README."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "runs" / "quickstart"


@pytest.fixture(scope="module")
def quickstart() -> str:
    """What `make quickstart` prints, also when a make runs these tests."""
    of_make = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    environment = {k: v for k, v in os.environ.items() if k not in of_make}
    done = subprocess.run(
        ["make", "quickstart"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_it_ends_with_a_summary_that_a_newcomer_understands(quickstart: str) -> None:
    summary = quickstart[-4000:]
    for said in ("Healthy", "gradient norm", "pytorch_lora_weights.safetensors", "samples", "next"):
        assert said.lower() in summary.lower(), summary


def test_everything_that_it_names_is_there(quickstart: str) -> None:
    assert (OUTPUT / "adapter" / "pytorch_lora_weights.safetensors").stat().st_size > 10_000
    assert list((OUTPUT / "samples").glob("*.png"))
    assert (OUTPUT / "metrics.parquet").is_file()
    manifest = json.loads((OUTPUT / "manifest.json").read_text())
    assert manifest["state"].lower() == "done"


def test_all_of_it_is_as_readable_as_any_new_file(quickstart: str, tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    usual = (tmp_path / "new").stat().st_mode
    files = [path for path in OUTPUT.rglob("*") if path.is_file()]
    assert {
        str(path): oct(path.stat().st_mode) for path in files if path.stat().st_mode != usual
    } == {}


def test_the_next_command_works_as_it_is_printed(quickstart: str, tmp_path: Path) -> None:
    command = quickstart.rstrip().splitlines()[-1].strip().replace("first.png", f"{tmp_path}/1.png")
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "-c", command], cwd=ROOT, env=bare, check=True, timeout=300)
    assert (tmp_path / "1.png").stat().st_size > 1000


def test_no_library_gives_advice_in_between(quickstart: str) -> None:
    assert "pip install" not in quickstart


def test_it_starts_afresh_each_time(quickstart: str) -> None:
    stray = OUTPUT / "stray"
    stray.write_text("of an earlier run")
    first = (OUTPUT / "adapter" / "pytorch_lora_weights.safetensors").read_bytes()
    subprocess.run(["make", "quickstart"], cwd=ROOT, check=True, capture_output=True, timeout=600)
    assert not stray.exists()
    assert (OUTPUT / "adapter" / "pytorch_lora_weights.safetensors").read_bytes() == first
