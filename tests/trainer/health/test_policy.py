"""What each policy makes of a critical finding, in real training of a tiny engine."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from kubelora_api.names import ExitCode
from kubelora_api.spec import Health
from kubelora_api.status import Finding
from kubelora_trainer.checkpoint.checkpointer import surplus
from kubelora_trainer.checkpoint.directories import SavedCheckpoint, list_checkpoints
from kubelora_trainer.health.policy import RollbackRequiredError, verdict_on
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.storage.run_record import Rollback
from kubelora_trainer.training.loop import MicroBatchOutput
from kubelora_trainer.utils.errors import NumericalError, PolicyError, SuspendedByPolicyError
from tests.trainer.fixtures.engine import Engine, Loss

BF16, FP32 = torch.bfloat16, torch.float32
LOSSY = PrecisionPlan(BF16, FP32, BF16)
"""bf16 masters: at this engine's rate most updates are lost, from the first step on."""
FINDING = Finding(
    name="UpdatesLost", severity="critical", group="down.lora_A", since_step=8, message="Do X."
)
WENT_BACK = Rollback(finding=FINDING, found_at=9, back_to=3, skipped=(12, 40))


def broken_at(engine: Engine, *micro_steps: int) -> list[int]:
    """Make the data of some micro-steps give a NaN loss; returns the list of those asked for."""
    objective, asked = engine.parts.objective, []

    def broken(micro_step: int) -> MicroBatchOutput:
        asked.append(micro_step)
        loss = objective(micro_step)
        return Loss(loss.loss_sum * math.nan, 1) if micro_step in micro_steps else loss

    engine.parts = replace(engine.parts, objective=broken)
    return asked


@pytest.mark.parametrize(
    ("policy", "went_back", "due", "code"),
    [
        ("Fail", None, PolicyError, 3),
        ("Suspend", None, SuspendedByPolicyError, 5),
        ("Rollback", WENT_BACK, PolicyError, 3),
    ],
)
def test_a_finding_ends_the_run_as_the_policy_says(
    policy: str, went_back: Rollback | None, due: type[Exception], code: int
) -> None:
    ended = verdict_on(FINDING, Health.model_validate({"policy": policy}), went_back)
    assert type(ended) is due
    assert isinstance(ended, PolicyError | SuspendedByPolicyError)
    assert ended.exit_code == code
    assert str(ended).startswith("UpdatesLost in down.lora_A since step 8: Do X (health.policy")


def test_warn_trains_on_and_rollback_goes_back_the_first_time() -> None:
    assert verdict_on(FINDING, Health(), None) is None
    assert isinstance(verdict_on(FINDING, Health(policy="Rollback"), None), RollbackRequiredError)


def test_suspend_saves_a_checkpoint_and_going_on_accepts_what_was_found(tmp_path: Path) -> None:
    policy = Health(policy="Suspend")
    first = Engine(tmp_path, precision=LOSSY, policy=policy, steps=14, learningRate=1e-6)
    with pytest.raises(SuspendedByPolicyError, match=r"UpdatesLost in .* since step 8") as held:
        first.train()
    assert held.value.exit_code == ExitCode.HELD
    # Found in step 8's numbers, which are read when the window of step 9 is full.
    assert first.saved[-1].path.name == "step-000008.3"
    second = Engine(tmp_path, precision=LOSSY, policy=policy, steps=14, learningRate=1e-6)
    assert second.train().step == 14
    whole = Engine(tmp_path / "w", precision=LOSSY, steps=14, learningRate=1e-6)
    whole.train()
    assert torch.equal(whole.buffers.masters, second.buffers.masters)
    assert second.reporter.watch.verdict == "Critical"


def test_suspend_holds_a_gradient_that_is_not_finite_too_each_time(tmp_path: Path) -> None:
    policy = Health(policy="Suspend")
    for step in (3, 5):
        engine = Engine(tmp_path, policy=policy)
        broken_at(engine, 7, 13)  # in the windows of steps 3 and 5
        with pytest.raises(
            SuspendedByPolicyError, match=rf"GradientNonFinite .* since step {step}"
        ):
            engine.train()
        assert engine.buffers.masters.isfinite().all()
    last = Engine(tmp_path, policy=policy)
    assert last.train().step == 6


def test_rollback_returns_to_the_checkpoint_before_and_goes_on_with_unseen_data(
    tmp_path: Path,
) -> None:
    engine = Engine(tmp_path, policy=Health(policy="Rollback"))
    asked = broken_at(engine, 10)  # in the window of step 4
    position = engine.train(every=3)
    assert position.step == 6
    # Found after the window of step 5 (micro-steps 12 to 14); back to step 3, whose next was 9.
    assert asked == [*range(15), *range(15, 24)]
    assert position.rollback is not None
    assert (position.rollback.back_to, position.rollback.found_at) == (3, 4)
    assert position.rollback.skipped == (9, 15)
    assert "skipped the data of micro-steps 9 to 14" in engine.warnings[0]

    # The same as a run whose data never had those micro-batches.
    other = Engine(tmp_path / "other")
    objective = other.parts.objective
    other.parts = replace(other.parts, objective=lambda m: objective(m if m < 9 else m + 6))
    other.train()
    assert torch.equal(engine.buffers.masters, other.buffers.masters)


def test_a_rollback_shows_in_status_and_verdict(tmp_path: Path) -> None:
    engine = Engine(tmp_path, policy=Health(policy="Rollback"))
    broken_at(engine, 10)
    engine.train(every=1)
    told = engine.exporter.report.health
    assert [(f.name, f.severity, f.since_step) for f in told.findings] == [
        ("RolledBack", "warning", 4)
    ]
    assert told.verdict == "Warning"
    assert "GradientNonFinite" in told.findings[0].message


def test_the_run_log_holds_each_step_once_after_a_rollback(tmp_path: Path) -> None:
    engine = Engine(tmp_path, policy=Health(policy="Rollback"))
    broken_at(engine, 10)
    engine.train(every=1)
    steps = pq.read_table(engine.run_log.finish())["step"].to_pylist()
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]
    assert len(steps) == 6 * 4
    assert pq.read_table(tmp_path / "groups.parquet")["step"].to_pylist() == steps


def test_a_second_critical_finding_fails_also_in_a_later_process(tmp_path: Path) -> None:
    policy = Health(policy="Rollback")
    first = Engine(tmp_path, policy=policy)
    broken_at(first, 10)
    first.train(every=1, micro_steps=17)  # stopped after the rollback, in a window
    second = Engine(tmp_path, policy=policy)
    assert second.position.rollback is not None
    asked = broken_at(second, 19)
    with pytest.raises(PolicyError, match=r"already went back to step 3 .*GradientNonFinite"):
        second.train(every=1)
    assert asked[0] == 17


def test_a_run_cut_after_its_rollback_ends_with_the_same_bits(tmp_path: Path) -> None:
    policy = Health(policy="Rollback")
    whole = Engine(tmp_path / "whole", policy=policy)
    broken_at(whole, 10)
    whole.train(every=1)
    first = Engine(tmp_path / "cut", policy=policy)
    broken_at(first, 10)
    first.train(every=1, micro_steps=19)
    second = Engine(tmp_path / "cut", policy=policy)
    second.train(every=1)
    assert torch.equal(whole.buffers.masters, second.buffers.masters)
    assert whole.reporter.watch == second.reporter.watch


def test_without_a_checkpoint_from_before_the_run_fails_with_a_sentence(tmp_path: Path) -> None:
    engine = Engine(tmp_path, policy=Health(policy="Rollback"))
    broken_at(engine, 10)
    with pytest.raises(PolicyError, match="there is no checkpoint from before step 4"):
        engine.train(every=100)


def test_a_fault_that_shows_late_goes_back_to_before_its_first_value(tmp_path: Path) -> None:
    # bf16 masters at a tiny rate: the median over steps 4 to 8 shows it in step 8. With keep=1 all
    # but the newest would be gone; the policy spares them.
    policy = Health(policy="Rollback")
    engine = Engine(tmp_path, precision=LOSSY, policy=policy, keep=1, steps=20, learningRate=1e-6)
    with pytest.raises(PolicyError, match="already went back to step"):
        engine.train(every=1)
    rolled = json.loads((engine.saved[-1].path / "checkpoint.json").read_text())["rollback"]
    assert (rolled["found_at"], rolled["back_to"]) == (8, 3)


def test_hindsight_spares_the_newest_checkpoint_that_is_old_enough_and_all_since() -> None:
    saved = [SavedCheckpoint(Path(f"{s}"), s, 0) for s in (2, 4, 6, 8, 10)]
    assert [c.step for c in surplus(saved, keep=1, oldest_wanted=None)] == [2, 4, 6, 8]
    assert [c.step for c in surplus(saved, keep=1, oldest_wanted=5)] == [2]
    assert [c.step for c in surplus(saved, keep=1, oldest_wanted=6)] == [2, 4]
    assert [c.step for c in surplus(saved, keep=3, oldest_wanted=8)] == [2, 4]
    assert [c.step for c in surplus(saved, keep=1, oldest_wanted=1)] == []


def test_fail_saves_the_state_that_it_fails_in(tmp_path: Path) -> None:
    engine = Engine(
        tmp_path, precision=LOSSY, policy=Health(policy="Fail"), steps=14, learningRate=1e-6
    )
    with pytest.raises(NumericalError, match=r"health\.policy is Fail"):
        engine.train()
    assert [c.path.name for c in list_checkpoints(tmp_path / "checkpoints")] == ["step-000008.3"]


def test_a_resumed_run_tells_of_the_checkpoint_it_came_from_at_once(tmp_path: Path) -> None:
    Engine(tmp_path).train(micro_steps=4)
    again = Engine(tmp_path)
    assert again.exporter.report.checkpoint is not None
    assert again.exporter.report.checkpoint.uri.endswith("/checkpoints/step-000001.1")
    assert again.registry.get_sample_value("kubelora_checkpoint_step") == 1.0
    written = (tmp_path / "checkpoints" / "step-000001.1").stat().st_mtime
    told = again.registry.get_sample_value("kubelora_checkpoint_timestamp_seconds")
    assert told == pytest.approx(written)
