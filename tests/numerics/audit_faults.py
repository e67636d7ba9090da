"""The benchmark's faults that an audit finds: signs within autograd, and a device that errs.

Audited are the steps 2, 4, 8, 16 and so on of an attempt; a row's limit is the next audit after the
fault, plus one, because numbers are read a step later.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.numerics import audit_injections as broken
from tests.numerics.faults import Fault, run_with

REVERSED_FAULTS: tuple[Fault, ...] = tuple(
    Fault(
        41,
        name,
        "GradientReversed",
        limit,
        run_with(injection),
        # One factor of a pair with another sign contradicts the other one.
        frozenset({"GradientImbalance"}),
    )
    for name, limit, injection in (
        ("a loss with the wrong sign", 3, broken.with_loss(broken.negated)),
        ("every gradient reversed in autograd", 3, broken.with_loss(broken.reversed_in_autograd)),
        (
            "every gradient reversed in autograd, later",
            9,
            broken.with_loss(broken.reversed_in_autograd, 6),
        ),
        ("every gradient reversed at its factor", 3, broken.reversed_hooks(slice(None))),
        ("lora_A's backward pass of a module reversed", 5, broken.reversed_hooks(slice(5, 6))),
        (
            "lora_B's backward pass of a module reversed",
            3,
            broken.reversed_hooks(slice(-1, None)),
        ),
        ("one module reversed in autograd", 5, broken.reversed_module(11)),
        ("one module reversed in autograd, later", 9, broken.reversed_module(40, 7)),
    )
)


def _one_bit(bit: int) -> Callable[[Tensor], object]:
    def change(gradient: Tensor) -> None:
        flat = gradient.view(-1)
        whole = flat.float().view(torch.int32)
        whole[3] ^= 1 << bit
        flat.copy_(whole.view(flat.float().dtype))

    return change


UNSTABLE_FAULTS: tuple[Fault, ...] = tuple(
    Fault(42, name, "ComputationUnstable", limit, run_with(injection))
    for name, limit, injection in (
        ("one bit of one pass of step 4", 5, broken.one_pass_errs(_one_bit(24), 4)),
        ("one row of one pass of step 8", 9, broken.one_pass_errs(lambda g: g[0].zero_(), 8)),
        ("one pass of step 4 times 1.5", 5, broken.one_pass_errs(lambda g: g.mul_(1.5), 4)),
    )
)
