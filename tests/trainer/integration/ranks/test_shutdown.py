"""Health policies through `kubelora train` with two ranks: what is said, recorded and returned."""

import time
from pathlib import Path
from typing import Any

import pytest

from kubelora_api.names import ENV_ATTEMPT, ENV_TERMINATION_LOG
from kubelora_api.report import FinalReport
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.objective.sdxl_loss import MicroBatchLoss, SdxlObjective
from kubelora_trainer.training.context import Run
from kubelora_trainer.training.lifecycle import conclude
from tests.trainer.fixtures.torch_ranks import TWO, adapter, arguments, far, forking, manifest, run


def settings(*given: str) -> list[str]:
    return [word for setting in given for word in ("--set", f"spec.{setting}")]


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-step 10, which of two ranks the second does, in the window of step 4, gives NaN."""
    forward = SdxlObjective.__call__

    def sometimes(self: SdxlObjective, micro_step: int) -> MicroBatchLoss:
        loss = forward(self, micro_step)
        times = float("nan") if micro_step == 10 else 1.0
        return MicroBatchLoss(loss.loss_sum * times, loss.samples, loss.losses)

    monkeypatch.setattr(SdxlObjective, "__call__", sometimes)


def test_a_rollback_of_two_ranks_trains_what_one_rank_trains(
    tmp_path: Path,
    demo: DemoPaths,
    forked: None,
    broken: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    given = settings("health.policy=Rollback", "checkpoint.everySteps=3")
    one, two = tmp_path / "one", tmp_path / "two"
    assert run([*arguments(one, demo, steps=6), *given]).exit_code == 0
    capfd.readouterr()
    monkeypatch.setenv(ENV_TERMINATION_LOG, str(tmp_path / "termination-log"))
    monkeypatch.setenv(ENV_ATTEMPT, "1")
    done = run([*arguments(two, demo, steps=6), *given, *TWO, "--metrics-port", "0"])
    told = capfd.readouterr()
    assert done.exit_code == 0, told.err + done.output
    assert (
        told.out.count("warning: Training rolled back from step 4 to the checkpoint of step 3") == 1
    )
    assert far(adapter(one), adapter(two)) < 1e-6
    record: Any = manifest(two)["record"]
    assert record["rollback"]["skipped"] == [9, 15]
    final = FinalReport.model_validate_json((tmp_path / "termination-log").read_bytes())
    (finding,) = final.health.findings
    assert finding.name == "RolledBack"
    assert "It came from the micro-batches of rank 1" in finding.message
    assert final.step == 6


@pytest.mark.parametrize(
    ("policy", "code", "state"), [("Suspend", 5, "Suspended"), ("Fail", 3, "Failed")]
)
def test_two_ranks_end_with_the_policys_code_one_checkpoint_and_one_sentence(
    tmp_path: Path,
    demo: DemoPaths,
    forked: None,
    capfd: pytest.CaptureFixture[str],
    policy: str,
    code: int,
    state: str,
) -> None:
    """Weights in bf16 lose their updates; that shows after eight steps."""
    given = settings(
        "training.learningRate=1e-5",
        "precision={masterWeights: bf16, allowLossyPrecision: true}",
        f"health.policy={policy}",
    )
    ended = run([*arguments(tmp_path / "two", demo, steps=12), *given, *TWO])
    told = capfd.readouterr().err + ended.output
    assert ended.exit_code == code, told
    assert told.count("UpdatesLost in") == 1
    assert "rank 1" not in told, "one rank speaks for both"
    (saved,) = (tmp_path / "two" / "out" / "checkpoints").iterdir()
    assert saved.name == "step-000008.3", "read when the window of step 9 is full"
    assert manifest(tmp_path / "two")["state"] == state
    if policy == "Suspend":
        again = run([*arguments(tmp_path / "two", demo, steps=12), *given, *TWO])
        assert again.exit_code == 0, "going on accepts what was found"


def test_a_gradient_that_is_not_finite_is_told_once_and_names_its_rank(
    tmp_path: Path,
    demo: DemoPaths,
    forked: None,
    broken: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    ended = run([*arguments(tmp_path / "two", demo, steps=6), *TWO])
    told = capfd.readouterr().err + ended.output
    assert ended.exit_code == 3, told
    assert told.count("step 4: ") == 1
    assert "from the micro-batches of rank 1; no weight was changed by them" in told


def test_rank_0_is_given_the_time_to_save_and_tell_for_all(
    tmp_path: Path, demo: DemoPaths, forked: None, broken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes three times what the launcher leaves to ranks after another one has failed."""

    def slowly(run: Run, *rest: Any) -> None:
        time.sleep(3.0 if run.first else 0.0)
        conclude(run, *rest)

    monkeypatch.setattr("kubelora_trainer.training.run.conclude", slowly)
    monkeypatch.setattr("kubelora_trainer.training.run_ranks.launch", forking(tmp_path, grace=1.0))
    given = settings("health.policy=Suspend")
    assert run([*arguments(tmp_path / "two", demo, steps=6), *given, *TWO]).exit_code == 5
    assert manifest(tmp_path / "two")["state"] == "Suspended"
