"""The GPU benchmark runs anywhere on the tiny model; what becomes of each row is told."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel

from benchmarks import gpu
from benchmarks.gpu_row import guarded
from benchmarks.gpu_rows import (
    DEFAULT_ROWS,
    Row,
    RowNumbers,
    SideNumbers,
    closing_line,
    outcome,
    row_from,
    row_of,
    told,
)
from benchmarks.paired import Ratio
from benchmarks.sdxl_pipeline import SDXL_UNET, TEXT_WIDTHS
from tests.tiers.skips import not_applicable

ROW = Row(4, checkpointing=True)
MEASURED = RowNumbers(
    row="batch1",
    device="H200",
    rounds=8,
    sides={
        "a": SideNumbers(0.5, 4.0, 10.25, True),
        "c": SideNumbers(0.625, 3.2, 12.5, False),
    },
    ratios={"c/a": Ratio(1.25, 1.2, 1.3)},
)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_unet_is_sdxls() -> None:
    """2.57 billion parameters, as published with the model; text of both encoders side by side."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(**SDXL_UNET)
    assert sum(p.numel() for p in unet.parameters()) == 2_567_463_684
    assert sum(TEXT_WIDTHS.values()) == unet.config.cross_attention_dim


def test_without_a_gpu_it_ends_with_one_sentence_and_exit_code_2() -> None:
    if torch.cuda.is_available():
        not_applicable("there is a GPU here")
    done = bench()
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "no usable CUDA GPU here" in done.stderr


def test_the_whole_program_runs_on_a_cpu(tmp_path: Path) -> None:
    place = tmp_path / "numbers" / "gpu.json"
    done = bench(
        *("--device", "cpu", "--layout", "small", "--rows", "batch2+checkpointing"),
        *("--rounds", "2", "--rank", "4", "--out", str(place)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("bench-gpu: c/a=")
    (row,) = json.loads(place.read_text())["rows"]
    assert row["row"] == "batch2+checkpointing"
    assert row["failed"] == ""
    for side in row["sides"].values():  # two micro-batches of two images are a step
        assert side["images_per_second"] * side["seconds"] == pytest.approx(4)
    seconds = {name: side["seconds"] for name, side in row["sides"].items()}
    assert row["ratios"]["c/a"]["value"] == pytest.approx(seconds["c"] / seconds["a"])
    assert row["ratios"]["a/b"]["value"] == pytest.approx(seconds["a"] / seconds["b"])
    assert row["ratios"]["fp32/bf16"]["value"] == pytest.approx(seconds["b"] / seconds["d"])


def test_time_that_is_up_leaves_rows_out_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "_write_pipeline", lambda folder, given: None)
    arguments = ["--device", "cpu", "--layout", "small", "--minutes", "0"]
    arguments += ["--rows", "batch1,batch4+compile", "--out", str(tmp_path / "gpu.json")]
    monkeypatch.setattr(sys, "argv", ["bench-gpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert "batch4+compile: not measured (out of time)" in lines
    assert lines[-1] == "bench-gpu: nothing measured rows=0/2"


def test_a_row_is_named_after_what_it_does() -> None:
    names = DEFAULT_ROWS.split(",")
    assert len(names) == 8
    assert names[:2] == ["batch1", "batch1+checkpointing"]
    assert names[-1] == "batch4+checkpointing+compile"
    assert [row_of(name).name for name in names] == names
    for wrong in ("4", "batch0", "batchx", "batch4+speed", ""):
        with pytest.raises(ValueError, match="is no row"):
            row_of(wrong)


def test_too_little_memory_is_a_row() -> None:
    def measure() -> RowNumbers:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore of it")

    row = guarded(ROW, measure)
    assert list(told(row)) == [
        "batch4+checkpointing: not measured (out of memory: CUDA out of memory. Tried to "
        "allocate 2 GiB.)"
    ]


def test_a_process_that_dies_is_a_row() -> None:
    died = outcome(ROW, -9, "rounds", "", out_of_time=False)
    assert died.failed == "killed by signal 9: it said nothing"
    assert outcome(ROW, -9, "rounds", "", out_of_time=True).failed == "out of time"
    raised = outcome(ROW, 1, "", "Traceback\nRuntimeError: no kernel\n\n", out_of_time=False)
    assert raised.failed == "exit code 1: RuntimeError: no kernel"


def test_numbers_travel_as_one_line_of_json() -> None:
    line = json.dumps(MEASURED.to_json())
    assert row_from(line) == outcome(ROW, 0, line, "a warning", out_of_time=True) == MEASURED


def test_the_last_line_tells_of_the_first_row_that_was_measured() -> None:
    failed = RowNumbers("batch4", "out of memory")
    assert closing_line([failed, MEASURED]) == (
        "bench-gpu: c/a=1.250 [1.200, 1.300] images/s_a=4.00 images/s_c=3.20 peak_gib_a=10.25 "
        "peak_gib_c=12.50 row=batch1 rows=1/2 device=H200 targets c/a>=1.15 a/b<=1.01"
    )
    assert list(told(MEASURED))[1] == (
        "  a (this trainer): 4.00 images/s, 500.0 ms a step, peak 10.25 GiB, compiled"
    )
