"""SIGTERM to a real process: checkpoint, exit 75, and the same bits after resuming."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.cli.main import main
from tests.trainer.cli.test_main import JOB

SPOT_NOTICE = 30
"""Seconds that the shortest notice of a cloud's spot node leaves."""
ENTRY = "from kubelora_trainer.cli.main import main; main(prog_name='kubelora')"


@pytest.fixture(scope="module")
def whole(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The adapter of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    done = in_this_process(arguments(folder, demo))
    assert done.exit_code == 0, done.output
    return adapter(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_resumes_to_the_same_bits(
    tmp_path: Path, demo: DemoPaths, whole: bytes, number: signal.Signals
) -> None:
    given = arguments(tmp_path, demo)
    with subprocess.Popen(
        [sys.executable, "-u", "-c", ENTRY, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step=2/"):
                asked = time.monotonic()
                os.kill(process.pid, number)
                break
        output, error = process.communicate(timeout=300)
    assert time.monotonic() - asked < SPOT_NOTICE, "the checkpoint came too late"
    assert process.returncode == 75, output + error
    assert f"a checkpoint is saved, to resume: kubelora {shlex.join(given)}; " in error
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["state"] == "Interrupted"
    assert not (tmp_path / "out" / "adapter").exists()

    resumed = in_this_process(given)
    assert resumed.exit_code == 0, resumed.output
    assert "resuming from" in resumed.output
    assert adapter(tmp_path) == whole
    saved = [json.loads(p.read_text()) for p in sorted(tmp_path.rglob("checkpoint.json"))]
    spent = [one["useful_seconds"] for one in sorted(saved, key=lambda one: one["micro_step"])]
    assert spent == sorted(spent), "time on the steps before the interruption is kept"
    assert spent[0] > 0


def arguments(folder: Path, demo: DemoPaths) -> list[str]:
    (folder / "job.yaml").write_text(JOB)
    (folder / "out").mkdir()
    return [
        *("train", str(folder / "job.yaml")),
        *("--set", "spec.training.steps=40", "--set", "spec.training.gradientAccumulation=3"),
        *("--mount", f"model={demo.model}", "--mount", f"data={demo.photos}"),
        *("--mount", f"output={folder / 'out'}", "--set", "spec.output.dtype=fp32"),
    ]


def in_this_process(given: list[str]) -> Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kubelora_trainer.utils.signals.StopRequest.install", lambda self: None)
        return CliRunner().invoke(main, given)


def adapter(folder: Path) -> bytes:
    return (folder / "out" / "adapter" / "pytorch_lora_weights.safetensors").read_bytes()
