"""metrics.parquet: every step and module once, through kills and resumes."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kubelora_trainer.reporting.run_log import flush_on_error
from kubelora_trainer.telemetry.step_metrics import GROUP_FIELDS
from kubelora_trainer.utils.errors import NumericalError
from tests.trainer.fixtures.engine import Engine, Loss


def rows(path: Path) -> list[dict[str, object]]:
    table: list[dict[str, object]] = pq.read_table(path).to_pylist()
    return table


def test_one_row_per_step_and_factor_with_its_own_norm(tmp_path: Path) -> None:
    engine = Engine(tmp_path, steps=2)
    engine.train()
    table = rows(engine.run_log.finish())
    assert [(r["step"], r["module"], r["factor"]) for r in table[:4]] == [
        (1, "down_blocks.0.to_q", "lora_A"),
        (1, "down_blocks.0.to_q", "lora_B"),
        (1, "up_blocks.0.to_q", "lora_A"),
        (1, "up_blocks.0.to_q", "lora_B"),
    ]
    assert len(table) == 8
    assert table[0]["grad_norm"] == 0.0  # lora_A while lora_B is 0
    for step in (1, 2):
        of_step = [r for r in table if r["step"] == step]
        total = sum(float(str(r["grad_norm"])) ** 2 for r in of_step) ** 0.5
        assert [r["total_grad_norm"] for r in of_step] == pytest.approx([total] * 4, rel=1e-6)


def test_a_factor_has_its_own_balance_and_update_scale(tmp_path: Path) -> None:
    engine = Engine(tmp_path, steps=3, learningRate=1e-3)
    engine.train()
    table = rows(engine.run_log.finish())
    first, last = table[:4], table[-4:]
    # While lora_B is 0 both products of the identity are 0, and lora_A has no gradient: it moves by
    # its decay alone, rate * 0.01 * weight.
    assert [r["lora_balance"] for r in first] == [None] * 4
    assert [r["factor"] for r in first] == ["lora_A", "lora_B"] * 2
    assert 0 < float(str(first[0]["update_scale"])) < 0.05
    # Adam's first step is rate * sign(g). The middle of the five targets is met from the start (x
    # is compared with its mirror image), so a fifth of lora_B has no gradient.
    assert float(str(first[1]["update_scale"])) == pytest.approx(0.8**0.5, rel=1e-3)
    assert all(0 < float(str(r["lora_balance"])) < 0.05 for r in last)
    assert [r["micro_steps"] for r in last] == [r["backward_passes"] for r in last] == [3] * 4
    clipped = [float(str(r["clipped_grad_norm"])) for r in last]
    total = float(str(last[0]["total_grad_norm"]))
    assert clipped == pytest.approx([min(total, 1.0)] * 4, rel=1e-4)


def test_groups_have_a_table_with_every_measurement(tmp_path: Path) -> None:
    engine = Engine(tmp_path, steps=2)
    engine.train()
    factors = rows(engine.run_log.finish())
    groups = rows(tmp_path / "groups.parquet")
    assert [(r["step"], r["group"]) for r in groups[:2]] == [(1, "down.lora_A"), (1, "down.lora_B")]
    assert len(groups) == 8
    assert set(GROUP_FIELDS.values()) < set(groups[0])
    assert groups[0]["accumulation_error_ratio"] is None  # an fp32 accumulator
    assert groups[0]["grad_zero_ratio"] == 1.0
    assert groups[1]["grad_norm"] == factors[1]["grad_norm"]  # one module a group here


def test_rows_are_written_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kubelora_trainer.reporting.run_log.ROWS_IN_MEMORY", 8
    )  # two steps of four factors
    engine = Engine(tmp_path, steps=5)
    engine.train()
    parts = sorted(p.name for p in (tmp_path / "metrics.parts").iterdir())
    assert parts[:2] == [
        "steps-00000001-00000002.parquet",
        "steps-00000003-00000004.parquet",
    ]
    steps = [r["step"] for r in rows(engine.run_log.finish())]
    assert steps == [step for step in range(1, 6) for _ in range(4)]


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    whole = Engine(tmp_path / "whole")
    whole.train()
    Engine(tmp_path / "cut").train(micro_steps=10, every=2)
    again = Engine(tmp_path / "cut")
    again.train()
    assert rows(again.run_log.finish()) == rows(whole.run_log.finish())


def test_the_steps_before_an_error_are_kept_and_come_once_after_a_resume(tmp_path: Path) -> None:
    engine = Engine(tmp_path)  # three micro-steps a step, checkpoints far apart
    objective = engine.parts.objective

    def poisonous(micro_step: int) -> Loss:
        loss = objective(micro_step)
        return Loss(loss.loss_sum * (float("nan") if micro_step == 13 else 1.0), loss.samples)

    object.__setattr__(engine.parts, "objective", poisonous)
    with pytest.raises(NumericalError), flush_on_error(engine.run_log):
        engine.train()
    (part,) = sorted((tmp_path / "metrics.parts").iterdir())
    steps = {r["step"] for r in rows(part)}
    assert steps == {1, 2, 3, 4, 5}  # micro-step 13 is of the fifth
    again = Engine(tmp_path)
    again.train()
    factors = len(again.buffers.slots)
    assert [r["step"] for r in rows(again.run_log.finish())] == [
        step for step in range(1, again.position.step + 1) for _ in range(factors)
    ]


def test_parts_of_an_earlier_version_are_joined_with_what_they_had(tmp_path: Path) -> None:
    """It knew no update scale, had the loss in fp64, and a column that is gone."""
    engine = Engine(tmp_path, steps=3)
    engine.train(every=1)
    first, *_ = sorted((tmp_path / "metrics.parts").iterdir())
    table = pq.read_table(first)
    losses = table["loss"].cast("float64")
    table = table.drop_columns(["update_scale", "loss"])
    pq.write_table(table.append_column("loss", losses).append_column("gone", losses), first)
    joined = pq.read_table(engine.run_log.finish())
    assert joined["step"].to_pylist() == [step for step in (1, 2, 3) for _ in range(4)]
    assert joined.schema.field("loss").type == "float"
    assert joined["loss"].to_pylist()[:4] == losses.to_pylist()
    assert joined["update_scale"].to_pylist()[:4] == [None] * 4
    assert None not in joined["update_scale"].to_pylist()[4:]
    assert joined["gone"].to_pylist() == losses.to_pylist() + [None] * 8


def test_steps_after_the_last_checkpoint_come_again_after_a_kill(tmp_path: Path) -> None:
    killed = Engine(tmp_path / "cut")
    killed.train(micro_steps=9, every=2)
    newest = killed.saved[-1].path  # as if killed between the log's part and the checkpoint
    newest.rename(newest.with_name(".gone"))
    again = Engine(tmp_path / "cut")
    assert again.position.step == 2
    again.train()
    steps = [r["step"] for r in rows(again.run_log.finish())]
    assert steps == [step for step in range(1, 7) for _ in range(4)]


@pytest.mark.parametrize("content", [b"", b"PAR1 and no more", None])
def test_a_part_that_a_crash_has_damaged_costs_its_rows_alone_and_is_told(
    tmp_path: Path, content: bytes | None
) -> None:
    """Parts of steps 1 to 2, 3 to 4 and 5; None: cut in the middle."""
    Engine(tmp_path).train(micro_steps=15, every=2)
    parts = sorted((tmp_path / "metrics.parts").iterdir())
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole[: len(whole) // 2] if content is None else content)
    again = Engine(tmp_path)
    again.train()
    log = again.run_log.finish()
    last = again.position.step
    assert list(dict.fromkeys(row["step"] for row in rows(log))) == [1, 2, *range(5, last + 1)]
    assert [part.name for part in (tmp_path / "metrics.parts").iterdir()] == [
        f"{parts[1].name}.corrupt"
    ]
    assert (
        f"{parts[1].name}.corrupt: damaged, so its rows are missing from the log"
        in again.warnings[-1]
    )


def test_the_documents_example_runs_on_a_real_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(tmp_path, steps=10)
    engine.train()
    engine.run_log.finish()
    text = (Path(__file__).parents[3] / "docs" / "run-log.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(example, names)
    printed = capsys.readouterr().out
    for expected in ("down_blocks.0.to_q", "up_blocks.0.to_q", "up.lora_B"):
        assert expected in printed
    table = rows(tmp_path / "metrics.parquet")
    of_factor = [
        float(str(r["grad_norm"]))
        for r in table
        if (r["module"], r["factor"]) == ("up_blocks.0.to_q", "lora_B")
    ]
    # A fifth of ten steps is two, and a median of two is their mean.
    ratio = (of_factor[8] + of_factor[9]) / (of_factor[0] + of_factor[1])
    assert names["shrunk"]["up_blocks.0.to_q", "lora_B"] == pytest.approx(ratio, rel=1e-5)  # type: ignore[index]


def test_every_column_is_told_in_the_document(tmp_path: Path) -> None:
    engine = Engine(tmp_path, steps=1)
    engine.train()
    tables = (engine.run_log.finish(), tmp_path / "groups.parquet")
    text = (Path(__file__).parents[3] / "docs" / "run-log.md").read_text()
    for path in tables:
        for column in pq.read_schema(path).names:
            assert f"`{column}`" in text, column
