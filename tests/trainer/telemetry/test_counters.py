"""Backward passes per window and modules that get no gradient any more."""

import torch

from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.telemetry.counters import BackwardPasses, DeadModules
from tests.trainer.fixtures.engine import objective_of, tiny_factors

BF16, FP32 = torch.bfloat16, torch.float32
MIXED = PrecisionPlan(BF16, FP32, FP32)


def test_each_backward_pass_of_a_window_counts_once() -> None:
    factors = tiny_factors()
    passes = BackwardPasses(AdapterBuffers(factors, MIXED))
    objective = objective_of(factors)
    for _ in range(2):
        passes.go_on_from(0)
        for micro_step in range(8):
            objective(micro_step).loss_sum.backward()
        assert passes.count == 8


def test_losses_summed_before_one_backward_pass_count_once() -> None:
    factors = tiny_factors()
    passes = BackwardPasses(AdapterBuffers(factors, MIXED))
    objective = objective_of(factors)
    passes.go_on_from(0)
    total = torch.zeros(())
    with torch.autocast("cpu", dtype=BF16):
        for micro_step in range(8):
            total = total + objective(micro_step).loss_sum
    total.backward()
    assert passes.count == 1


def test_a_block_out_of_the_loss_does_not_lower_the_count() -> None:
    factors = tiny_factors()
    passes = BackwardPasses(AdapterBuffers(factors, MIXED))
    up_block_alone = objective_of(factors[2:])
    passes.go_on_from(0)
    for micro_step in range(3):
        up_block_alone(micro_step).loss_sum.backward()
    assert passes.count == 3


def counts(dead: DeadModules, steps: int, norms: list[float], rate: float = 1e-3) -> list[int]:
    return [dead.observe(norms, rate) for _ in range(steps)]


def slots_of_two_modules() -> AdapterBuffers:
    return AdapterBuffers(tiny_factors(), MIXED)  # order: A down, B down, A up, B up


def test_a_module_is_dead_after_ten_steps_without_a_gradient_in_one_factor() -> None:
    dead = DeadModules(slots_of_two_modules().slots)
    dead.observe([0.0, 1.0, 0.0, 1.0], 1e-3)  # lora_A has none while lora_B is 0
    assert counts(dead, 11, [0.0, 0.0, 1.0, 1.0]) == [0] * 9 + [1, 1]


def test_one_gradient_in_between_begins_the_count_anew() -> None:
    dead = DeadModules(slots_of_two_modules().slots)
    counts(dead, 9, [0.0, 1.0, 1.0, 1.0])
    dead.observe([1e-30, 1.0, 1.0, 1.0], 1e-3)
    assert counts(dead, 9, [0.0, 1.0, 1.0, 1.0]) == [0] * 9


def test_fp16_gives_lora_b_the_time_that_a_long_warm_up_needs_to_leave_zero() -> None:
    # fp16 rounds what is below 3e-8 to 0. Steps of 1e-6 sum up to its smallest normal number,
    # 6.1e-5, with the 62nd; ten silent steps after it make a dead module.
    dead = DeadModules(slots_of_two_modules().slots, torch.float16)
    assert not dead.waiting
    assert counts(dead, 62 + 9, [0.0, 1.0, 0.0, 1.0], rate=1e-6) == [0] * 71
    assert not dead.waiting
    assert counts(dead, 1, [0.0, 1.0, 0.0, 1.0], rate=1e-6) == [2]


def test_lora_b_is_waited_for_while_it_moves_and_across_a_checkpoint() -> None:
    dead = DeadModules(slots_of_two_modules().slots, torch.float16)
    dead.observe([0.0, 1.0, 0.0, 1.0], 1e-6)
    again = DeadModules(slots_of_two_modules().slots, torch.float16)
    again.load(dead.to_json())
    assert again.waiting
    again.observe([0.0, 1.0, 0.0, 1.0], 1e-4)
    assert not again.waiting


def test_a_checkpoint_that_knows_only_that_weights_moved_is_not_waited_for() -> None:
    dead = DeadModules(slots_of_two_modules().slots, torch.float16)
    dead.load({"silent": [0, 0, 0, 0], "moved": True})
    assert not dead.waiting


def test_nothing_is_dead_before_a_step_could_move_lora_b() -> None:
    dead = DeadModules(slots_of_two_modules().slots)
    assert counts(dead, 30, [0.0, 1.0, 0.0, 1.0], rate=0.0) == [0] * 30
