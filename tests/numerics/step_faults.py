"""The benchmark's faults within a step and between two, several members of each kind.

A row's limit is the step of the fault, or the next one where the fault comes after the optimizer,
plus one, because numbers are read a step later.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.numerics import step_injections as broken
from tests.numerics.bench import CONTRACT, Observe
from tests.numerics.faults import Fault, run_with
from tests.numerics.injections import scaled_element

LION: dict[str, object] = {"optimizer": {"name": "lion"}, "learningRate": 1e-5}
ADAFACTOR: dict[str, object] = {"optimizer": {"name": "adafactor"}}
PRODIGY: dict[str, object] = {"optimizer": {"name": "prodigy"}, "learningRate": 1.0}

STATE_FAULTS: tuple[Fault, ...] = (
    *(
        Fault(
            29,
            name,
            "StateAltered",
            limit,
            run_with(injection, training=training),
            # A master that changes between the step and its numbers differs from its copy, and a
            # moment from the formula's.
            frozenset({"WorkingCopyStale", "OptimizerWrong"}),
        )
        for name, limit, injection, training in (
            ("one master times 256", 7, broken.scaled_in_memory(broken.masters, 256.0, 6), {}),
            (
                "one master of lora_B with another sign, at the step's end",
                5,
                broken.scaled_after_the_step(broken.masters, -1.0, 3),
                {},
            ),
            (
                "one first moment times 65536",
                7,
                broken.scaled_in_memory(broken.first_moment, 65536.0, 6),
                {},
            ),
            (
                "one second moment a fourth, at the step's end",
                10,
                broken.scaled_after_the_step(broken.second_moment, 0.25, 8, slot=5),
                {},
            ),
            ("state zeroed mid-run", 8, broken.zeroed_state(6), {}),
            (
                "one momentum of lion times 2",
                5,
                broken.scaled_in_memory(broken.first_moment, 2.0, 4, slot=3),
                LION,
            ),
        )
    ),
)

OPTIMIZER_FAULTS: tuple[Fault, ...] = (
    *(
        Fault(30, name, "OptimizerWrong", limit, run_with(injection, training=training))
        for name, limit, injection, training in (
            ("stepped twice", 2, broken.stepped_twice(), {}),
            ("stepped twice, from step 7 on, lion", 8, broken.stepped_twice(7), LION),
            ("momentum lost", 3, broken.momentum_lost(), {}),
            (
                "momentum lost later, prodigy",
                6,
                broken.momentum_lost(5),
                PRODIGY,
            ),
            ("one factor at half its rate", 2, broken.moved_by(0.5, slice(3, 4)), {}),
            ("one module of many frozen later", 7, broken.moved_by(0.0, slice(-1, None), 6), {}),
            ("every factor at 1.1 times its rate", 3, broken.moved_by(1.1, slice(None), 2), {}),
            (
                "one factor frozen, adafactor",
                7,
                broken.moved_by(0.0, slice(2, 3), 4),
                ADAFACTOR,
            ),
            ("decay without rate", 3, broken.decay_without_rate(0.01), {}),
            ("empty state loaded mid-run", 8, broken.state_loaded_as_new(6), {}),
        )
    ),
)

GRADIENT_FAULTS: tuple[Fault, ...] = (
    *(
        Fault(
            31,
            name,
            "GradientAltered",
            limit,
            run_with(injection, training={"gradientAccumulation": 4}),
            # One factor of a pair with another sign contradicts the other one.
            frozenset({"GradientImbalance"}),
        )
        for name, limit, injection in (
            ("the sign of every gradient", 2, broken.flipped_signs()),
            ("the sign of one module's gradients", 7, broken.flipped_signs(slice(7, 8), 6)),
            ("micro-step 1 of 4 lost on both factors", 4, broken.restored_before(1, 3)),
            ("micro-step 2 of 4 lost on one module", 3, broken.restored_before(2, 2, slice(4, 6))),
            (
                "the last micro-step of 4 lost on both factors",
                2,
                broken.last_micro_step_taken_back(),
            ),
        )
    ),
    *(
        Fault(
            32,
            name,
            "MicroBatchLost",
            limit,
            run_with(injection, training={"gradientAccumulation": 4}),
        )
        for name, limit, injection in (
            ("the last micro-step of 4 without a gradient", 2, broken.detached_micro_step(3)),
            ("micro-step 0 of 4 without a gradient", 6, broken.detached_micro_step(0, 5)),
        )
    ),
)


def _written(step: int, tensor: str, change: Callable[[Tensor], object]) -> Observe:
    return run_with(
        around=lambda: broken.base_weight_changes(step, change, tensor), training={"steps": 22}
    )


def _at_random(weights: Tensor) -> None:
    weights[:64] = torch.randn(64, generator=torch.Generator().manual_seed(3))


BASE_FAULTS: tuple[Fault, ...] = (
    *(
        Fault(33, name, "BaseModelAltered", 21, _written(step, tensor, change))
        for name, step, tensor, change in (
            ("one UNet weight times 256", 5, "conv_in.weight", lambda w: w[100].mul_(256)),
            ("one UNet weight with another sign", 14, "conv_out.weight", lambda w: w[17].neg_()),
            ("random writes into the UNet", 9, "time_embedding.linear_1.weight", _at_random),
        )
    ),
    Fault(
        33,
        "a UNet weight that becomes NaN",
        "BaseModelAltered",
        5,
        _written(4, "conv_in.weight", lambda w: w[5].fill_(torch.nan)),
        frozenset({"GradientNonFinite"}),
    ),
    Fault(
        33,
        "a UNet weight that is loaded as NaN",
        CONTRACT,
        1,
        run_with(around=lambda: broken.base_weight_is_broken(torch.nan)),
    ),
)

SIZE_FAULTS: tuple[Fault, ...] = tuple(
    Fault(
        34,
        name,
        "AdapterTooLarge",
        limit,
        run_with(training={"learningRate": rate, "steps": steps}),
        # As at a rate of 1: a softmax that gives 1 and 0 has the derivative 0.
        frozenset({"GradientUnderflow", "DeadModules", "MicroBatchLost"}),
    )
    for name, rate, limit, steps in (
        ("learning rate 0.1", 0.1, 6, 14),
        ("learning rate 1e-2", 1e-2, 16, 20),
    )
)


def _overflowing(sample: int, accumulation: int) -> Observe:
    return run_with(
        around=lambda: broken.overflows(sample),
        precision={"compute": "fp16"},
        training={"steps": 40, "gradientAccumulation": accumulation},
    )


OVERFLOW_FAULTS: tuple[Fault, ...] = tuple(
    Fault(
        35,
        name,
        "StepsSkipped",
        limit,
        _overflowing(sample, accumulation),
    )
    for name, sample, accumulation, limit in (
        ("one image of 8 overflows in fp16", 3, 1, 40),
        ("one image of 8 overflows in fp16, windows of 2", 6, 2, 30),
    )
)

AVERAGE_FAULTS: tuple[Fault, ...] = tuple(
    Fault(36, name, "AverageStale", limit, run_with(injection, training={"ema": {"enabled": True}}))
    for name, limit, injection in (
        ("moving average never updated", 2, broken.average_moves_by(0.0)),
        ("moving average stops", 8, broken.average_moves_by(0.0, 7)),
        ("moving average of one factor too slow", 5, broken.average_moves_by(0.5, 4, slice(2, 3))),
    )
)

JUMP_FAULTS: tuple[Fault, ...] = tuple(
    Fault(28, name, "GradientCorrupted", step + 1, run_with(injection))
    for name, step, injection in (
        ("bit 30 of one gradient element", 6, broken.flipped_bit(30, 6)),
        ("bit 30 of a small element of lora_B", 12, broken.flipped_bit(30, 12, -1, 100)),
        ("bit 30 of one gradient element in step 4", 4, broken.flipped_bit(30, 4, 5)),
        ("one gradient element times 2^24", 9, scaled_element(2.0**24, step=9)),
    )
)
