"""The start-up contract: what must be true of a run's first steps.

The errors that this guards against are silent: a layer that no backward pass reaches, an adapter
that changes the model before it has learned anything, a gradient in a dtype other than the
requested one. A broken contract ends the run (exit code 3) and names the module.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kubelora_trainer.lora.adapter import AdapterModule
from kubelora_trainer.lora.factor_names import MAGNITUDE
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Slot
from kubelora_trainer.optim.precision import DTYPE_NAMES
from kubelora_trainer.telemetry.counters import least_travel
from kubelora_trainer.telemetry.step_metrics import StepNumbers
from kubelora_trainer.utils.errors import NumericalError
from kubelora_trainer.utils.text import ranks_named


def check_dtypes(buffers: AdapterBuffers, optimizer: AdapterOptimizer) -> str:
    """Compare the dtypes in use with the plan; returns the line to log."""
    plan = buffers.plan
    found: dict[str, tuple[torch.dtype | None, torch.dtype]] = {
        "working copy": (buffers.slots[0].factor.parameter.dtype, plan.compute),
        "gradients": (_gradient_dtype(buffers.slots[0]), plan.accumulator),
        "master weights": (buffers.master_parameters[0].dtype, plan.masters),
    }
    for what, (dtype, planned) in found.items():
        if dtype != planned:
            raise NumericalError(f"the {what} are {dtype}, but {planned} was asked for")
    moment = optimizer.first_moment
    if moment is not None and moment.itemsize < plan.masters.itemsize:
        raise NumericalError(f"the optimizer's state is {moment.dtype}, below {plan.masters}")
    buffers.assert_bound()
    lines = [f"{what} {DTYPE_NAMES[planned]}" for what, (_, planned) in found.items()]
    if any(slot.factor.is_magnitude for slot in buffers.slots):
        lines.insert(1, f"magnitudes {DTYPE_NAMES[plan.masters]}")
    return ", ".join([*lines, f"optimizer state {optimizer.state_text}"])


def check_fresh_adapter(buffers: AdapterBuffers, modules: Sequence[AdapterModule] = ()) -> None:
    """Check that a fresh adapter changes nothing: |B·A| is 0 because every lora_B is 0.

    DoRA's magnitudes must equal the norms that they are divided by, bit for bit.
    """
    for slot in buffers.slots:
        if _is_up(slot) and bool(slot.of(buffers.masters).count_nonzero()):
            raise NumericalError(
                f"{slot.factor.module}: a fresh adapter must change nothing, but its lora_B is "
                "not 0"
            )
    for module in modules:
        if module.magnitude is not None and not torch.equal(module.magnitude, module.norms()):
            raise NumericalError(
                f"{module.full_name}: a fresh adapter must change nothing, but its magnitudes are "
                "not the norms of the weights"
            )


def check_resumed(optimizer: AdapterOptimizer, step: int, skipped: int, moved: int) -> str:
    """Check that the optimizer has every step that the checkpoint's manifest counts.

    An optimizer that starts from zero is refused before it moves a weight: its first steps are
    several times too large, and no later measurement undoes them.

    Args:
        optimizer: The restored optimizer.
        step: Optimizer steps of the manifest.
        skipped: Steps among them that the loss scaler left out.
        moved: Steps among them at a rate above 0, at least; warm-up begins with a rate of 0.

    Returns:
        The line to log.

    Raises:
        NumericalError: The counts differ.
    """
    done, wanted = optimizer.steps_done, step - skipped
    counted = {wanted, moved} if optimizer.ignores_zero_rate else {wanted}
    if done not in counted:
        raise NumericalError(
            f"the checkpoint is of step {step}, and the optimizer's state should have taken in "
            f"{wanted} gradients, but has {done}: it was not saved with the checkpoint, or not "
            "restored from it. Resume from a checkpoint that has it, or choose another "
            "spec.output.uri to start over"
        )
    return f"optimizer state of {done} steps, as in the checkpoint's manifest"


class ReachedModules:
    """A record of which factors a backward pass reaches, only during the first micro-step."""

    def __init__(self, buffers: AdapterBuffers) -> None:
        self._slots = buffers.slots
        self._reached: set[str] = set()
        self._handles = [
            slot.factor.parameter.register_post_accumulate_grad_hook(self._note(slot.factor.name))
            for slot in buffers.slots
        ]

    def _note(self, name: str) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            self._reached.add(name)

        return hook

    def check(self) -> None:
        """Remove the hooks; raise NumericalError naming the modules that were not reached.

        Later calls do nothing.
        """
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        missed = {s.factor.module for s in self._slots if s.factor.name not in self._reached}
        if missed:
            raise NumericalError(
                f"{_some(sorted(missed))}: no backward pass reached the adapter there, so it "
                "would never learn; it takes no part in the loss"
            )


class FirstGradients:
    """A check that each factor gets a gradient as soon as the mathematics gives it one.

    lora_B and magnitudes in the first step that moves anything; lora_A, whose gradient is a product
    with lora_B, in the next such step. A step moves something when its learning rate is above 0, no
    scaler skipped it, and its window has a loss: masks and min-SNR weights may be 0 for all of it.
    lora_A also waits until small steps have added up so far that lora_B is not 0 in the dtype of
    the passes (`least_travel`).
    """

    def __init__(
        self, slots: Sequence[Slot], moved_before: int, compute: torch.dtype = torch.bfloat16
    ) -> None:
        """moved_before: such steps of earlier attempts. compute: dtype of the passes."""
        self._slots = slots
        self._moved = moved_before
        self._least, self._travelled = least_travel(compute), 0.0

    def rewind(self, moved: int) -> None:
        """Continue from a point at which ``moved`` steps have moved a weight."""
        self._moved, self._travelled = moved, 0.0

    def observe(self, numbers: StepNumbers) -> None:
        """Judge one step. Raises NumericalError naming the modules without a gradient."""
        idle = numbers.learning_rate <= 0 or numbers.loss == 0.0 or numbers.skipped
        if idle or self._moved >= 2:
            return
        waiting = self._moved == 1 and self._travelled < self._least
        self._travelled += numbers.step_size
        if waiting:
            return
        due = ("lora_B", MAGNITUDE) if self._moved == 0 else ("lora_A",)
        self._moved += 1
        for factor in due:
            silent = [
                slot.factor.module
                for slot, norm in zip(self._slots, numbers.factor_norms, strict=True)
                if norm == 0.0 and slot.factor.name.endswith(f".{factor}")
            ]
            if silent:
                raise NumericalError(
                    f"{_some(silent)}: the gradient of {factor} is exactly 0 in step "
                    f"{numbers.step}, where it can't be; it is detached from the loss, or too "
                    "small for the types in use"
                )


def check_finite(slots: Sequence[Slot], numbers: StepNumbers) -> None:
    """Raise NumericalError if the step's gradient was not finite; no weight has moved then.

    Gradients that a smaller loss scale may cure are left to the scaler.
    """
    if numbers.skipped:
        return
    if numbers.nonfinite:
        broken = [
            slot.factor.name
            for slot, norm in zip(slots, numbers.factor_norms, strict=True)
            if not _finite(norm)
        ]
        raise NumericalError(
            f"step {numbers.step}: {numbers.nonfinite} gradient elements are NaN or infinite "
            f"({_some(broken)}){came_from(numbers)}; no weight was changed by them. Look at "
            "the data of this step, the learning rate, or a VAE that overflows in half precision"
        )
    if not _finite(numbers.grad_norm):
        raise NumericalError(
            f"step {numbers.step}: the gradient's norm is too large for fp32; no weight was "
            "changed by it. Lower the learning rate"
        )


def came_from(numbers: StepNumbers) -> str:
    """Describe which of several ranks produced non-finite values; empty if unknown.

    The sum may be infinite although every rank's own part is finite.
    """
    who = ranks_named(numbers.broken_ranks, "")
    return f", from the micro-batches of {who}" if who else ""


def _finite(value: float) -> bool:
    return value - value == 0.0


def _gradient_dtype(slot: Slot) -> torch.dtype | None:
    gradient = slot.factor.parameter.grad
    return None if gradient is None else gradient.dtype


def _is_up(slot: Slot) -> bool:
    return slot.factor.name.endswith("lora_B")


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
