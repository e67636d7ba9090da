"""Raw gradients on disk: which are written, that they are the micro-batches' own, and no more."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from kubelora_api.gradient_dump_spec import DumpGradients
from kubelora_trainer.cli.main import main
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.dump_condition import parse_condition
from kubelora_trainer.telemetry.gradient_dump import GradientDump, as_computed, bytes_of
from kubelora_trainer.utils.errors import ConfigurationError
from tests.trainer.fixtures.engine import DEFAULT, Engine

BF16, FP32 = torch.bfloat16, torch.float32
EVERYTHING = "norm < 1e30"


def engine_with(
    path: Path, precision: PrecisionPlan = DEFAULT, steps: int = 2, **dump: object
) -> Engine:
    """An engine that dumps; two modules of two factors, windows of three micro-batches."""
    engine = Engine(path, precision=precision, steps=steps)
    spec = DumpGradients.model_validate(dump)
    dumping = GradientDump(
        engine.folder, spec, engine.buffers.slots, precision.compute, engine.warnings.append
    )
    engine.parts = replace(engine.parts, dump=dumping)
    return engine


def files(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "gradients").glob("*"))


def own_gradients(engine: Engine, micro_step: int) -> dict[str, Tensor]:
    """A micro-batch's gradients at the weights of now, by a backward pass that adds to nothing."""
    slots = engine.buffers.slots
    loss = engine.parts.objective(micro_step).loss_sum
    found = torch.autograd.grad(loss, [slot.factor.parameter for slot in slots])
    return {slot.factor.name: g for slot, g in zip(slots, found, strict=True)}


@pytest.mark.parametrize(
    "precision",
    [DEFAULT, PrecisionPlan(FP32, FP32, FP32), PrecisionPlan(BF16, BF16, FP32)],
    ids=["bf16 into fp32", "fp32", "bf16 into bf16"],
)
def test_each_micro_batchs_own_gradient_is_written_in_the_type_it_was_computed_in(
    tmp_path: Path, precision: PrecisionPlan
) -> None:
    engine = engine_with(tmp_path, precision, when=EVERYTHING)
    expected = [own_gradients(engine, micro_step) for micro_step in range(3)]
    engine.train()
    assert files(tmp_path) == [
        f"step-00000{step}.micro-00{place}.safetensors" for step in (1, 2) for place in range(3)
    ]
    for place in range(3):
        found = load_file(tmp_path / "gradients" / f"step-000001.micro-00{place}.safetensors")
        assert found.keys() == expected[place].keys()
        for name, gradient in found.items():
            assert gradient.dtype == precision.compute
            assert torch.equal(gradient.float(), expected[place][name].float()), name


def test_names_and_metadata_tell_step_and_micro_step(tmp_path: Path) -> None:
    engine_with(tmp_path, when=EVERYTHING).train()
    with safe_open(tmp_path / "gradients/step-000002.micro-001.safetensors", "pt") as file:
        about = file.metadata()
    assert (about["step"], about["micro_step_of_window"], about["micro_step"]) == ("2", "1", "4")
    assert (about["when"], about["loss_scale"], about["left_out"]) == (EVERYTHING, "1", "0")


def test_only_modules_that_a_pattern_names_are_written(tmp_path: Path) -> None:
    engine_with(tmp_path, when=EVERYTHING, modules=[r"up_.*to_q", r"to_q\.lora_B"]).train()
    found = load_file(tmp_path / "gradients/step-000001.micro-000.safetensors")
    assert sorted(found) == [
        "down_blocks.0.to_q.lora_B",
        "up_blocks.0.to_q.lora_A",
        "up_blocks.0.to_q.lora_B",
    ]


def test_only_gradients_that_meet_the_condition_are_written(tmp_path: Path) -> None:
    # lora_A's gradient is exactly 0 until lora_B has moved, in step 1.
    engine_with(tmp_path, when="absmax < 1e-9").train()
    assert files(tmp_path) == [f"step-000001.micro-00{place}.safetensors" for place in range(3)]
    found = load_file(tmp_path / "gradients/step-000001.micro-002.safetensors")
    assert sorted(found) == ["down_blocks.0.to_q.lora_A", "up_blocks.0.to_q.lora_A"]


def test_a_healthy_run_writes_nothing_by_default(tmp_path: Path) -> None:
    engine_with(tmp_path).train()
    assert not (tmp_path / "gradients").exists()


def test_a_gradient_that_is_not_finite_is_written_before_it_reaches_the_sum(
    tmp_path: Path,
) -> None:
    engine = engine_with(tmp_path)
    whole = engine.parts.objective

    def objective(micro_step: int) -> object:
        loss = whole(micro_step)
        return replace(loss, loss_sum=loss.loss_sum * math.inf) if micro_step == 4 else loss  # type: ignore[type-var]

    engine.parts = replace(engine.parts, objective=objective)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="NaN or infinite"):
        engine.train()
    assert files(tmp_path) == ["step-000002.micro-001.safetensors"]


def test_the_budget_bounds_the_folder_and_is_told_once(tmp_path: Path) -> None:
    engine = engine_with(tmp_path, when=EVERYTHING, budget="4Ki", steps=4)
    engine.train()
    written = sum(file.stat().st_size for file in (tmp_path / "gradients").iterdir())
    assert 0 < written <= 4096
    told = [warning for warning in engine.warnings if "budget of 4Ki is used up" in warning]
    assert len(told) == 1
    # A new process of the same run has no budget left either.
    resumed = engine_with(tmp_path, when=EVERYTHING, budget="4Ki", steps=4)
    assert sum(f.stat().st_size for f in (tmp_path / "gradients").iterdir()) == written
    resumed.exporter.close()


def test_a_step_that_comes_again_replaces_its_file(tmp_path: Path) -> None:
    engine_with(tmp_path, when=EVERYTHING).train(micro_steps=2)
    before = files(tmp_path)
    for saved in (tmp_path / "checkpoints").iterdir():
        saved.rename(saved.with_name(f".{saved.name}.gone"))  # as if killed before it
    engine_with(tmp_path, when=EVERYTHING).train(micro_steps=2)
    assert files(tmp_path) == before
    assert len(before) == 2


def test_a_pattern_that_names_nothing_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"dumpGradients.modules: 'to_x' matches none"):
        engine_with(tmp_path, modules=["to_x"])


def test_training_is_the_same_to_the_bit_with_and_without(tmp_path: Path) -> None:
    plain = Engine(tmp_path / "plain", steps=2)
    plain.train()
    dumped = engine_with(tmp_path / "dumped", when=EVERYTHING)
    dumped.train()
    assert torch.equal(plain.buffers.masters, dumped.buffers.masters)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nonfinite", [False, False, True, True]),
        ("absmax < 1e-4", [True, False, False, False]),
        ("absmax > 3.5", [False, True, False, True]),
        ("norm > 4.9 and norm < 5.1", [False, True, False, False]),
        ("zero_ratio > 0.4 and absmax < 1", [True, False, False, False]),
    ],
)
def test_conditions_are_judged_by_their_numbers(text: str, expected: list[bool]) -> None:
    gradients = [[0.0, 1e-5], [3.0, 4.0], [math.nan, 1.0], [math.inf, 1.0]]
    tensors = [torch.tensor(values) for values in gradients]
    assert parse_condition(text).holds(tensors) == expected
    scaled = [tensor * 1024 for tensor in tensors]
    assert parse_condition(text).holds(scaled, torch.tensor(1024.0)) == expected


def test_a_type_is_restored_only_where_every_value_survives() -> None:
    coarse = torch.tensor([1.0, 0.5, math.nan])
    fine = torch.tensor([1.0, 1.0 + 2.0**-20])
    assert as_computed(coarse, BF16).dtype == BF16
    assert as_computed(fine, BF16).dtype == FP32


def test_quantities_are_powers_of_1024() -> None:
    assert [bytes_of(text) for text in ("3Ki", "2Mi", "1Gi")] == [3072, 2097152, 1073741824]


def shown(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(main, ["gradients", *arguments])
    return result.exit_code, result.output.splitlines()


def test_the_command_prints_what_was_dumped(tmp_path: Path) -> None:
    engine_with(tmp_path, when=EVERYTHING).train()
    code, lines = shown(str(tmp_path), "--step", "1", "--module", r"up_.*lora_B")
    assert code == 0
    assert lines[0].split() == [
        *(
            "step",
            "micro",
            "rank",
            "factor",
            "type",
            "shape",
            "norm",
            "absmax",
            "zeros",
            "non-finite",
        ),
    ]
    assert len(lines) == 4
    gradient = load_file(tmp_path / "gradients/step-000001.micro-000.safetensors")
    values = gradient["up_blocks.0.to_q.lora_B"].double()
    zeros = 100 * int((values == 0).sum()) / values.numel()
    assert lines[1].split() == [
        *("1", "0", "0", "up_blocks.0.to_q.lora_B", "bf16", "5x2"),
        f"{float(values.square().sum() ** 0.5):.3e}",
        f"{float(values.abs().max()):.3e}",
        f"{zeros:.1f}%",
        "0",
    ]
    assert shown(str(tmp_path / "gradients"), "--limit", "2")[1][-1] == (
        "22 more rows; raise --limit to see them"
    )
    assert "none of them matches" in shown(str(tmp_path), "--step", "9")[1][-1]


def test_a_folder_without_gradients_and_a_damaged_file_are_sentences(tmp_path: Path) -> None:
    code, lines = shown(str(tmp_path))
    assert code == 2
    assert "no dumped gradients here" in lines[-1]
    (tmp_path / "step-000001.micro-000.safetensors").write_bytes(b"half a file")
    code, lines = shown(str(tmp_path))
    assert code == 2
    assert "damaged" in lines[-1]
    assert shown(str(tmp_path), "--module", "to_(q")[0] == 2
