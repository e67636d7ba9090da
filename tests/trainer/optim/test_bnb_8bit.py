"""Second moments in 8 bits: read to the bit, and what makes them stick."""

from pathlib import Path

import pytest
import torch
from bitsandbytes import functional, optim
from torch import Tensor, nn

from kubelora_api.training_spec import Optimizer
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.build import build_optimizer
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.element_sampling import GroupSample
from kubelora_trainer.telemetry.update_probe import UpdateProbe
from tests.trainer.fixtures.engine import Engine

FP32, CPU = torch.float32, torch.device("cpu")
SHAPES = {"a.lora_A": (64, 65), "b.lora_A": (4, 6), "c.lora_A": (70, 90), "d.lora_A": (3, 5)}
"""4160 and 6300 elements, in 8 bits, both with a last block that is not full; 24 and 15 in fp32."""
FINITE, NOT_FINITE = torch.zeros(()), torch.ones(())


def buffers_of(shapes: dict[str, tuple[int, int]]) -> AdapterBuffers:
    generator = torch.Generator().manual_seed(1)
    return AdapterBuffers(
        [
            Factor(name.split(".")[0], "down.lora_A", nn.Parameter(0.1 * started))
            for name, shape in shapes.items()
            for started in [torch.randn(shape, generator=generator)]
        ],
        PrecisionPlan(FP32, FP32, FP32),
    )


def draw(step: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(count, generator=generator) * 10.0 ** (step % 3 - 2)


def unpacked(library: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> Tensor:
    """All second moments by bitsandbytes' own function, one after the other."""
    moments = []
    for parameter in parameters:
        state = library.state[parameter]
        moment = state["state2"]
        if moment.dtype == torch.uint8:
            scale, code = state["absmax2"], state["qmap2"]
            moment = functional.dequantize_blockwise(moment, absmax=scale, code=code, blocksize=256)
        moments.append(moment.flatten())
    return torch.cat(moments)


def test_moments_are_read_as_bitsandbytes_unpacks_them_and_the_library_trains_as_alone() -> None:
    buffers = buffers_of(SHAPES)
    alone = [nn.Parameter(p.detach().clone()) for p in buffers.master_parameters]
    library: torch.optim.Optimizer = optim.AdamW8bit(alone, lr=1e-2)  # type: ignore[attr-defined,no-untyped-call]
    optimizer = build_optimizer(buffers, Optimizer(name="adamw8bit"))
    everything = torch.arange(buffers.numel)
    for step in range(5):
        buffers.gradient.copy_(draw(step, buffers.numel))
        optimizer.step(1e-2, FINITE)
        for parameter, slot in zip(alone, buffers.slots, strict=True):
            parameter.grad = slot.of(buffers.gradient).clone()
        library.step()
        moment = optimizer.second_moment
        assert moment is not None
        found = moment.index_select(0, everything)
        assert found.dtype == FP32
        assert torch.equal(found, unpacked(library, alone))
        some = torch.tensor([4159, 4160, 4183, 4184, 10483, 10484, 0])  # ends of factors
        assert torch.equal(moment.index_select(0, some), found[some])
    assert torch.equal(buffers.masters, torch.cat([p.detach().flatten() for p in alone]))


def test_moments_are_read_after_a_load_too() -> None:
    first, second = buffers_of(SHAPES), buffers_of(SHAPES)
    trained, loaded = (build_optimizer(b, Optimizer(name="adamw8bit")) for b in (first, second))
    first.gradient.copy_(draw(1, first.numel))
    trained.step(1e-2, FINITE)
    loaded.load({n: t.clone() for n, t in trained.tensors().items()}, trained.scalars())
    everything = torch.arange(first.numel)
    assert trained.second_moment is not None
    assert loaded.second_moment is not None
    found = loaded.second_moment.index_select(0, everything)
    assert found.count_nonzero() == first.numel
    assert torch.equal(found, trained.second_moment.index_select(0, everything))


class Judged:
    """An optimizer in 8 bits of one factor, 64 blocks of 256, and the probe that looks at it."""

    def __init__(self, beta2: float) -> None:
        self.buffers = buffers_of({"a.lora_A": (64, 256)})
        spec = Optimizer(name="adamw8bit", beta2=beta2)
        self.optimizer: AdapterOptimizer = build_optimizer(self.buffers, spec)
        self.probe = UpdateProbe(
            self.buffers, self.optimizer, GroupSample(self.buffers.groups, CPU)
        )
        self.exact = torch.zeros(self.buffers.numel, dtype=torch.float64)
        self.beta2 = beta2

    def step(self, gradient: Tensor, non_finite: Tensor = FINITE) -> float:
        """One step; the share that is stuck."""
        self.buffers.gradient.copy_(gradient)
        self.probe.before()
        self.optimizer.step(0.0, non_finite)
        self.probe.after()
        if not bool(non_finite):
            self.exact = self.beta2 * self.exact + (1 - self.beta2) * gradient.double().square()
        return float(self.probe.stuck[0])

    @property
    def ratio(self) -> Tensor:
        """Second moments over what they should be."""
        moment = self.optimizer.second_moment
        assert moment is not None
        return moment.index_select(0, torch.arange(self.buffers.numel)).double() / self.exact


OUTLIER = torch.where(torch.arange(64 * 256) % 256 == 0, 100.0, 1.0)
"""One element in each block whose gradient is 100 times that of the others."""


def noise(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(64 * 256, generator=generator)


def test_gradients_that_drop_together_take_their_moments_with_them() -> None:
    # Codes stay what they are, and the scale, in fp32, falls by 1 - beta2 in every step.
    judged = Judged(beta2=0.99)
    shares = [judged.step(noise(step) * OUTLIER) for step in range(100)]
    assert max(shares[3:]) < 0.25
    before = judged.ratio
    shares = [judged.step(1e-4 * noise(step) * OUTLIER) for step in range(200)]
    assert max(shares) < 0.25
    torch.testing.assert_close(judged.ratio, before, rtol=1e-4, atol=0)


def test_a_moment_is_stuck_where_its_blocks_largest_keeps_its_gradient() -> None:
    # A step takes off 1 %, a code is 3 % and more at a hundredth of the scale and below.
    judged = Judged(beta2=0.99)
    shares = [judged.step(noise(step) * OUTLIER) for step in range(100)]
    assert max(shares[3:]) < 0.25
    rest = torch.where(OUTLIER == 1.0, 1e-3, 1.0)
    shares = [judged.step(noise(step) * OUTLIER * rest) for step in range(100, 300)]
    assert shares[0] < 0.25
    # Unmoved, they are off by 4 after 138 steps, for 0.99^138 = 1/4, and by 7.5 after 200.
    assert shares[90] < 0.5 < shares[150]
    assert shares[-1] > 0.8
    assert float(judged.ratio[OUTLIER == 1.0].median()) > 3.0
    assert 0.9 < float(judged.ratio[OUTLIER != 1.0].median()) < 1.1


def test_moments_below_the_reach_of_8_bits_are_stuck_at_zero() -> None:
    # The smallest code is 3.25e-7 of the scale, and half of it rounds to 0: gradients below 1/2500.
    judged = Judged(beta2=0.99)
    assert judged.step(noise(0) * torch.where(OUTLIER == 1.0, 1.0, 1e5)) > 0.9


def test_a_step_that_is_left_out_leaves_the_comparison_as_it_is() -> None:
    judged = Judged(beta2=0.99)
    share = [judged.step(noise(step)) for step in range(5)][-1]
    assert judged.step(torch.full((64 * 256,), 1e3), NOT_FINITE) == share
    assert judged.step(noise(5)) < 0.25


def test_a_resumed_run_compares_with_the_same_moments(tmp_path: Path) -> None:
    def engine(name: str) -> Engine:
        optimizer = {"name": "adamw8bit"}
        return Engine(
            tmp_path / name, rank=64, width=64, optimizer=optimizer, gradientAccumulation=2, steps=8
        )

    whole = engine("whole")
    whole.train()
    engine("cut").train(micro_steps=9)
    again = engine("cut")
    assert again.position.step == 4
    again.train()
    ours, theirs = whole.telemetry.tensors(), again.telemetry.tensors()
    assert ours["second_moment"].count_nonzero() > 0
    assert torch.equal(ours["second_moment"], theirs["second_moment"])
    assert whole.reporter.watch == again.reporter.watch
    assert "OptimizerStuck" in again.reporter.watch.detectors["recent"]


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_other_optimizers_need_no_comparison(tmp_path: Path, name: str) -> None:
    engine = Engine(tmp_path, optimizer={"name": name})
    assert "second_moment" not in engine.telemetry.tensors()
