"""The moving average of the weights, and what is made of it."""

from pathlib import Path

import pytest
import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file
from torch import nn

from kubelora_api.training_spec import Average
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.optim.ema import ExponentialMovingAverage, decay_at
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.training.loop import MicroBatchOutput
from tests.trainer.fixtures.engine import Engine
from tests.trainer.integration.test_interruption import arguments, in_this_process

BF16, FP32 = torch.bfloat16, torch.float32
FINITE, NOT_FINITE = torch.zeros(()), torch.ones(())


def buffers_of(values: list[float], plan: PrecisionPlan) -> AdapterBuffers:
    return AdapterBuffers([Factor("a", "down.lora_A", nn.Parameter(torch.tensor([values])))], plan)


def test_a_constant_decay_is_a_geometric_mean_of_the_past() -> None:
    buffers = buffers_of([0.0], PrecisionPlan(BF16, FP32, FP32))
    average = ExponentialMovingAverage(buffers, Average(enabled=True, decay=0.75, warmup=False))
    for step, weight in enumerate([4.0, 8.0, 16.0]):
        buffers.masters.fill_(weight)
        average.update(step, FINITE)
    # 0 -> 1 -> 1·3/4 + 2 = 2.75 -> 2.75·3/4 + 4 = 6.0625
    assert float(average.weights) == 6.0625


def test_the_decay_warms_up_as_in_diffusers() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    theirs = EMAModel([weight], decay=0.4)
    buffers = buffers_of([1.0, -2.0], PrecisionPlan(FP32, FP32, FP32))
    ours = ExponentialMovingAverage(buffers, Average(enabled=True, decay=0.4))
    for step in range(12):
        weight.data.add_(torch.tensor([0.5, 0.25]) * (step + 1))
        buffers.masters.copy_(weight.data)
        theirs.step([weight])
        ours.update(step, FINITE)
        torch.testing.assert_close(ours.weights, theirs.shadow_params[0], rtol=1e-6, atol=1e-6)
    assert decay_at(Average(decay=0.4), 4) == 5 / 14
    assert decay_at(Average(decay=0.4), 100) == 0.4


def test_a_step_that_moved_nothing_moves_no_average() -> None:
    buffers = buffers_of([1.0], PrecisionPlan(BF16, FP32, FP32))
    average = ExponentialMovingAverage(buffers, Average(enabled=True))
    buffers.masters.fill_(3.0)
    average.update(5, NOT_FINITE)
    assert float(average.weights) == 1.0


def test_the_model_shows_other_weights_and_gets_its_own_back_to_the_bit() -> None:
    for plan in (PrecisionPlan(BF16, FP32, FP32), PrecisionPlan(FP32, FP32, FP32)):
        buffers = buffers_of([0.1, 0.2], plan)
        parameter = buffers.slots[0].factor.parameter
        before, masters = parameter.detach().clone(), buffers.masters.clone()
        with buffers.using_weights(torch.tensor([5.0, 7.0])):
            assert parameter.tolist() == [[5.0, 7.0]]
        assert torch.equal(parameter.detach(), before)
        assert torch.equal(buffers.masters, masters)
        buffers.assert_bound()


def test_a_run_averages_its_masters(tmp_path: Path) -> None:
    plain = Engine(tmp_path / "plain", learningRate=1e-2)
    ema = {"enabled": True, "warmup": False}
    averaged = Engine(tmp_path / "averaged", learningRate=1e-2, ema=ema)
    expected = averaged.buffers.masters.clone()
    seen: list[torch.Tensor] = []
    objective = plain.parts.objective

    def noting(micro_step: int) -> MicroBatchOutput:
        if micro_step and micro_step % 3 == 0:  # a window of three is done
            seen.append(plain.buffers.masters.clone())
        return objective(micro_step)

    object.__setattr__(plain.parts, "objective", noting)
    plain.train()
    seen.append(plain.buffers.masters.clone())
    assert len(seen) == 6
    averaged.train()
    for masters in seen:
        expected = 0.999 * expected + 0.001 * masters
    assert averaged.average is not None
    assert torch.equal(averaged.buffers.masters, plain.buffers.masters)  # training is not touched
    torch.testing.assert_close(averaged.average.weights, expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(averaged.average.weights, averaged.buffers.masters)


@pytest.mark.parametrize(
    ("compute", "dora"), [("bf16", "false"), ("fp32", "false"), ("bf16", "true")]
)
def test_the_exported_files_hold_the_average_and_pass_the_gate(
    tmp_path: Path, demo: DemoPaths, compute: str, dora: str
) -> None:
    files = {}
    for name, ema in (("plain", "false"), ("average", "true")):
        (tmp_path / name).mkdir()
        settings = (
            "spec.training.steps=4",
            "spec.training.gradientAccumulation=1",
            f"spec.precision.compute={compute}",
            f"spec.adapter.dora={dora}",
            f"spec.training.ema={{enabled: {ema}, decay: 0.5, warmup: false}}",
        )
        given = [*arguments(tmp_path / name, demo)]
        given += [part for setting in settings for part in ("--set", setting)]
        done = in_this_process(given)
        assert done.exit_code == 0, done.output
        assert ("average" in done.output) == (ema == "true")
        files[name] = load_file(tmp_path / name / "out/adapter/pytorch_lora_weights.safetensors")
    # lora_B starts at 0 and goes one way at first: its average lags behind.
    ups = [key for key in files["plain"] if "lora_B" in key]
    plain = torch.cat([files["plain"][key].flatten() for key in ups])
    average = torch.cat([files["average"][key].flatten() for key in ups])
    assert 0 < average.norm() < 0.9 * plain.norm()
