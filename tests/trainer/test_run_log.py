"""metrics.parquet: every step and module once, through kills and resumes."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.trainer.engine import Engine


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


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    whole = Engine(tmp_path / "whole")
    whole.train()
    Engine(tmp_path / "cut").train(micro_steps=10, every=2)
    again = Engine(tmp_path / "cut")
    again.train()
    assert rows(again.run_log.finish()) == rows(whole.run_log.finish())


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
