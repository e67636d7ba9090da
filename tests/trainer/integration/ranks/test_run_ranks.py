"""`kubelora train` with several ranks on the CPU: real runs of the tiny model."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import ENV_ATTEMPT, ENV_TERMINATION_LOG
from kubelora_api.report import FinalReport
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.distributed.topology import RankInfo
from kubelora_trainer.training.context import RunOptions
from kubelora_trainer.utils.signals import RankStopRequest
from tests.trainer.fixtures.torch_ranks import TWO, adapter, arguments, far, forking, manifest, run
from tests.trainer.integration.test_interruption import ENTRY


def test_two_ranks_train_what_one_trains_and_rank_0_alone_writes_and_speaks(
    tmp_path: Path, demo: DemoPaths, forked: None, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments(tmp_path / "one", demo)).exit_code == 0
    capfd.readouterr()
    done = run(arguments(tmp_path / "two", demo) + list(TWO))
    told = capfd.readouterr().out
    assert done.exit_code == 0, told + done.output
    assert told.count("step=4/4") == 1
    assert told.count("images found") == 1
    assert manifest(tmp_path / "two")["state"] == "Done"
    assert manifest(tmp_path / "two")["attempt"] == 1
    ones, twos = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    assert max(float(tensor.abs().max()) for tensor in twos.values()) > 1e-3, "it has learned"
    assert far(ones, twos) < 1e-6
    names = [
        sorted(p.name for p in (tmp_path / which / "out").iterdir()) for which in ("one", "two")
    ]
    assert names[0] == names[1]


def signalled(monkeypatch: pytest.MonkeyPatch, rank: int, number: signal.Signals) -> None:
    """The rank gets a signal in its second window (of three micro-steps)."""
    from kubelora_trainer.objective.sdxl_loss import SdxlObjective

    forward = SdxlObjective.__call__

    def struck(self: SdxlObjective, micro_step: int) -> object:
        if self._share.rank == rank and micro_step > 2:
            os.kill(os.getpid(), number)
        return forward(self, micro_step)

    monkeypatch.setattr(SdxlObjective, "__call__", struck)


def test_the_cause_reaches_exit_code_and_termination_message(
    tmp_path: Path, demo: DemoPaths, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is killed in its second micro-step, as by the kernel for want of memory."""
    signalled(monkeypatch, 1, signal.SIGKILL)
    monkeypatch.setenv(ENV_TERMINATION_LOG, str(tmp_path / "termination-log"))
    monkeypatch.setenv(ENV_ATTEMPT, "7")
    ended = run([*arguments(tmp_path / "two", demo), *TWO, "--metrics-port", "0"])
    assert ended.exit_code == 137
    assert "rank 1 of 2 was killed by SIGKILL" in ended.output
    final = FinalReport.model_validate_json((tmp_path / "termination-log").read_bytes())
    assert (final.exit_code, final.attempt) == (137, 7)
    assert "rank 1 of 2 was killed by SIGKILL" in final.message
    assert manifest(tmp_path / "two")["state"] == "Failed"


def test_a_rank_that_stalls_is_named_once_and_in_the_termination_message(
    tmp_path: Path,
    demo: DemoPaths,
    forked: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 stops in its second window; two others wait for it, three seconds, not 30 minutes."""
    from kubelora_trainer.distributed import rendezvous

    signalled(monkeypatch, 0, signal.SIGSTOP)
    soon = partial(rendezvous.init_process_group_of, silence=timedelta(seconds=3))
    monkeypatch.setattr("kubelora_trainer.training.rank_sync.init_process_group_of", soon)
    monkeypatch.setattr("kubelora_trainer.training.run_ranks.launch", forking(tmp_path, grace=4.0))
    monkeypatch.setenv(ENV_TERMINATION_LOG, str(tmp_path / "termination-log"))
    monkeypatch.setenv(ENV_ATTEMPT, "1")
    three = ("--set", "spec.workers.gpusPerNode=3", "--metrics-port", "0")
    ended = run([*arguments(tmp_path / "three", demo), *three])
    assert ended.exit_code == 1, ended.output
    told = capfd.readouterr().err
    assert told.count("rank 0 of this run's 3 did not respond for 3 s") == 1, told
    final = FinalReport.model_validate_json((tmp_path / "termination-log").read_bytes())
    assert final.message.startswith("rank 0 of this run's 3 did not respond for 3 s")
    assert final.exit_code == 1


def test_ranks_that_see_other_data_are_refused_before_training(
    tmp_path: Path,
    demo: DemoPaths,
    forked: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from kubelora_trainer.training import run_ranks as ranks

    def elsewhere(
        job: LoraTrainingJob,
        options: RunOptions,
        reports: Path,
        rank_info: RankInfo,
        stop: RankStopRequest,
    ) -> None:
        if rank_info.rank == 1:
            (tmp_path / "other").mkdir()
            image = next(p for p in sorted(demo.photos.iterdir()) if p.suffix == ".png")
            shutil.copy(image, tmp_path / "other")
            (tmp_path / "other" / image.name).with_suffix(".txt").write_text("a photo")
            mounts = {**options.mounts, "data": tmp_path / "other"}
            options = replace(options, mounts=mounts)
        rank(job, options, reports, rank_info, stop)

    rank = ranks.run_rank
    monkeypatch.setattr(ranks, "run_rank", elsewhere)
    ended = run([*arguments(tmp_path / "two", demo), *TWO])
    assert ended.exit_code == 2
    assert "rank 1 and rank 0 differ in the data" in capfd.readouterr().err


def test_sigterm_stops_both_ranks_with_one_checkpoint_that_one_rank_resumes(
    tmp_path: Path, demo: DemoPaths, forked: None
) -> None:
    """The command as it is typed: the launcher is told, the ranks are processes of their own."""
    given = arguments(tmp_path / "two", demo, steps=30)
    with subprocess.Popen(
        [sys.executable, "-u", "-c", f"if __name__ == '__main__':\n    {ENTRY}", *given, *TWO],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step=2/"):
                os.kill(process.pid, signal.SIGTERM)
                break
        output, error = process.communicate(timeout=300)
    assert process.returncode == 75, output + error
    assert error.count("stopped by SIGTERM") == 1, "rank 0 alone says so"
    assert manifest(tmp_path / "two")["state"] == "Interrupted"
    (saved,) = (tmp_path / "two" / "out" / "checkpoints").iterdir()
    assert saved.name.endswith(".3"), "at a window's end"

    resumed = run(given)
    assert resumed.exit_code == 0, resumed.output
    assert f"resuming from {saved}" in resumed.output
    assert run(arguments(tmp_path / "whole", demo, steps=30)).exit_code == 0
    assert far(adapter(tmp_path / "two"), adapter(tmp_path / "whole")) < 1e-5
