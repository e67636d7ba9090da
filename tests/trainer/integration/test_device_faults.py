"""Runs that memory or the device ends: exit code, sentence, final report and manifest."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from kubelora_api.names import ENV_ATTEMPT, ENV_NODE, ENV_TERMINATION_LOG
from kubelora_api.report import FinalReport
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.cli.main import main
from kubelora_trainer.objective.sdxl_loss import MicroBatchLoss, SdxlObjective
from tests.trainer.cli.test_main import JOB

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
XID = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nSearch for it")


def run(folder: Path, demo: DemoPaths, monkeypatch: pytest.MonkeyPatch) -> tuple[Result, str]:
    """Run the tiny job as a pod would; the result and what is on standard error."""
    monkeypatch.setattr("kubelora_trainer.utils.signals.StopRequest.install", lambda self: None)
    monkeypatch.setenv(ENV_TERMINATION_LOG, str(folder / "termination-log"))
    monkeypatch.setenv(ENV_ATTEMPT, "1")
    (folder / "job.yaml").write_text(JOB)
    (folder / "out").mkdir(exist_ok=True)
    given = [
        *("train", str(folder / "job.yaml"), "--metrics-port", "0"),
        *("--set", "spec.checkpoint.everySteps=1"),
        *("--mount", f"model={demo.model}", "--mount", f"data={demo.photos}"),
        *("--mount", f"output={folder / 'out'}"),
    ]
    result = CliRunner().invoke(main, given)
    return result, result.output + result.stderr


def fail_at(monkeypatch: pytest.MonkeyPatch, micro_step: int, error: Exception) -> None:
    forward = SdxlObjective.__call__

    def failing(self: SdxlObjective, number: int) -> MicroBatchLoss:
        if number == micro_step:
            raise error
        return forward(self, number)

    monkeypatch.setattr(SdxlObjective, "__call__", failing)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NO_MEMORY, 6, "the GPU's memory ran out after step 2: CUDA out of memory"),
        (XID, 7, "the GPU failed (CUDA error: uncorrectable ECC error encountered)"),
    ],
    ids=["memory", "device"],
)
def test_a_fault_in_a_step_ends_with_its_code_and_resumes_from_the_checkpoint(
    tmp_path: Path,
    demo: DemoPaths,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: int,
    said: str,
) -> None:
    with monkeypatch.context() as patch:
        fail_at(patch, 4, error)
        result, text = run(tmp_path, demo, patch)
    assert result.exit_code == code, text
    assert said in text
    assert "Traceback" not in text
    final = FinalReport.model_validate_json((tmp_path / "termination-log").read_bytes())
    assert (final.exit_code, final.step) == (code, 2)
    assert final.message.startswith(said)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["state"] == "Failed"
    again, text = run(tmp_path, demo, monkeypatch)
    assert again.exit_code == 0, text
    assert "resuming from" in text


def test_memory_that_runs_out_while_the_model_is_loaded_is_no_wrong_model(
    tmp_path: Path, demo: DemoPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*given: object, **named: object) -> None:
        raise NO_MEMORY

    monkeypatch.setattr("diffusers.UNet2DConditionModel.from_pretrained", no_memory)
    result, text = run(tmp_path, demo, monkeypatch)
    assert result.exit_code == 6, text
    assert "the GPU's memory ran out while the model was loaded" in text


def test_after_a_fault_of_the_device_the_ending_does_not_touch_it(
    tmp_path: Path, demo: DemoPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call to a device with a poisoned context raises the same error again."""

    def poisoned(*given: object) -> None:
        raise XID

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("empty_cache", "max_memory_allocated", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, poisoned)
    fail_at(monkeypatch, 4, XID)
    result, text = run(tmp_path, demo, monkeypatch)
    assert result.exit_code == 7, text
    assert (tmp_path / "termination-log").exists()


def test_a_device_that_errs_once_is_left_and_the_next_attempt_is_sound(
    tmp_path: Path, demo: DemoPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = SdxlObjective.__call__
    erred: list[int] = []

    def erring(self: SdxlObjective, number: int) -> MicroBatchLoss:
        batch = forward(self, number)
        if number != 4 or erred:
            return batch
        erred.append(number)
        return replace(batch, loss_sum=batch.loss_sum * torch.nan)

    monkeypatch.setenv(ENV_NODE, "gpu-7")
    with monkeypatch.context() as patch:
        patch.setattr(SdxlObjective, "__call__", erring)
        result, text = run(tmp_path, demo, patch)
    assert result.exit_code == 7, text
    final = FinalReport.model_validate_json((tmp_path / "termination-log").read_bytes())
    assert "prefers another node" in final.message
    (finding,) = final.health.findings
    assert (finding.name, finding.cause, finding.node) == ("GradientNonFinite", "Hardware", "gpu-7")
    assert finding.samples
    assert "kubelora replay" in finding.message
    again, text = run(tmp_path, demo, monkeypatch)
    assert again.exit_code == 0, text
    assert "resuming from" in text
