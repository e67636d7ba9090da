"""Flat buffers of the adapter: working copy, gradient accumulator, master weights.

Autograd gives a gradient the parameter's type, so a bf16 parameter would sum its micro-batches in
bf16 and lose small ones. Here every ``p.grad`` is a view of one flat buffer of a chosen type
(``Tensor.grad_dtype``), and the optimizer updates separate master weights of their own type. With
flat buffers, telemetry, normalisation, clipping and checkpoints take a handful of kernels; views
give the optimizer the true shapes.

A bf16 working copy rounds lora_A and lora_B as any bf16 pass would. DoRA's magnitudes are as large
as the norms of the weights and change by 1e-4 of that per step, which is below bf16's spacing of
4e-3 to 8e-3; so forward and backward passes read their master weights directly.

Slots are ordered by group (``down.lora_A``), so that each group is one contiguous range; magnitudes
come last.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import torch
from torch import Tensor
from torch.nn import Parameter

from kubelora_api.schema import JsonObject
from kubelora_trainer.optim.precision import PrecisionPlan, is_magnitude
from kubelora_trainer.utils.errors import NumericalError
from kubelora_trainer.utils.stateful import check_like


@dataclass(frozen=True)
class Factor:
    """One trainable tensor of the adapter.

    Attributes:
        module: Name of the layer it belongs to.
        group: ``block.factor``, such as ``down.lora_A``.
        parameter: The model's parameter.
    """

    module: str
    group: str
    parameter: Parameter

    @property
    def name(self) -> str:
        """``module.lora_A``, unique in the adapter."""
        return f"{self.module}.{self.group.rpartition('.')[2]}"

    @cached_property
    def is_magnitude(self) -> bool:
        """True if passes read the master weight itself and weight decay does not apply."""
        return is_magnitude(self.group)


@dataclass(frozen=True)
class Slot:
    """The location of a factor in every flat buffer: elements ``start`` to ``stop``."""

    factor: Factor
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """First element after the slot."""
        return self.start + prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        """Return the slot's view of ``flat``, in the factor's true shape."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class GroupRange:
    """A group's contiguous range of elements; ``slots`` are its indices among the slots."""

    name: str
    start: int
    stop: int
    slots: range


class AdapterBuffers:
    """Flat buffers over all factors, and the views that connect them to autograd and the optimizer.

    Buffers of equal type share memory.

    Attributes:
        working: Type ``plan.compute``. The model's parameters are views of it, except magnitudes,
            which are views of the masters.
        gradient: Type ``plan.accumulator``. Every ``parameter.grad`` is a view of it.
        reduced: The gradient followed by ``tail`` elements that are all-reduced with it.
        masters: Type ``plan.masters``.
        optimizer_gradient: The gradient that the optimizer reads, in the masters' type.
        master_parameters: Per-factor parameters over the masters, in slot order.
    """

    def __init__(self, factors: Iterable[Factor], plan: PrecisionPlan, tail: int = 0) -> None:
        ordered = sorted(factors, key=lambda f: (f.is_magnitude, f.group))
        if not ordered:
            raise ValueError("an adapter without factors has nothing to train")
        self.plan = plan
        self.slots = _lay_out(ordered)
        self.groups = _ranges(self.slots)
        self.numel = self.slots[-1].stop
        device = ordered[0].parameter.device
        self.masters = torch.empty(self.numel, dtype=plan.masters, device=device)
        for slot in self.slots:
            slot.of(self.masters).copy_(slot.factor.parameter.detach())
        rounded = sum(prod(slot.shape) for slot in self.slots if not slot.factor.is_magnitude)
        shared = plan.masters == plan.compute
        self._rounded = self.masters[:rounded]
        self.working = self.masters if shared else self._rounded.to(plan.compute)
        self.reduced = torch.zeros(self.numel + tail, dtype=plan.accumulator, device=device)
        self.gradient = self.reduced[: self.numel]
        self.optimizer_gradient = (
            self.gradient
            if plan.accumulator == plan.masters
            else torch.zeros(self.numel, dtype=plan.masters, device=device)
        )
        self.master_parameters = tuple(self._bind(slot) for slot in self.slots)

    def compute_view(self, slot: Slot) -> Tensor:
        """Return the slot's weights as forward and backward passes read them."""
        return slot.of(self._read_from(slot))

    def _read_from(self, slot: Slot) -> Tensor:
        return self.masters if slot.factor.is_magnitude else self.working

    def _bind(self, slot: Slot) -> Parameter:
        """Make the model's parameter a view of the buffers; return the one for the optimizer."""
        parameter = slot.factor.parameter
        parameter.data = self.compute_view(slot)
        # grad_dtype can only be set while there is no gradient.
        parameter.grad = None
        parameter.grad_dtype = self.plan.accumulator
        parameter.grad = slot.of(self.gradient)
        same_type = parameter.dtype == self.plan.accumulator == self.plan.masters
        if same_type:
            return parameter
        master = Parameter(slot.of(self.masters))
        master.grad = slot.of(self.optimizer_gradient)
        return master

    @contextmanager
    def detached_gradients(self) -> Iterator[None]:
        """Detach all gradients from their parameters temporarily; the buffer keeps its values."""
        for slot in self.slots:
            slot.factor.parameter.grad = None
        try:
            yield
        finally:
            for slot in self.slots:
                slot.factor.parameter.grad = slot.of(self.gradient)

    def zero_gradient(self) -> None:
        """Begin a window. ``zero_grad()`` must never be called: it would drop the views."""
        self.gradient.zero_()

    def normalise(self, samples: int) -> None:
        """Divide the sum over samples by the number of samples actually seen."""
        if samples < 1:
            raise ValueError("a window without samples has no mean gradient")
        self.gradient.div_(samples)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradient by a scalar tensor (clipping), without a host sync."""
        self.gradient.mul_(factor)

    def cast_gradient(self) -> None:
        """Cast the finished gradient to the masters' type, if it differs."""
        if self.optimizer_gradient is not self.gradient:
            self.optimizer_gradient.copy_(self.gradient)

    def publish_masters(self) -> None:
        """Copy the masters into the working copy, rounding to its type."""
        if self.working is not self.masters:
            self.working.copy_(self._rounded)

    def by_factor(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of ``flat``, which is laid out like the masters, by factor name."""
        return {slot.factor.name: slot.of(flat) for slot in self.slots}

    @contextmanager
    def using_weights(self, weights: Tensor) -> Iterator[None]:
        """Compute with other ``weights`` (flat) temporarily, then restore the model's own bits."""
        read = [self.working]
        if self.working is not self.masters:
            read.append(self.masters[self.working.numel() :])  # magnitudes
        own = [part.clone() for part in read]
        for part, shown in zip(read, weights.split([p.numel() for p in read]), strict=True):
            part.copy_(shown)
        try:
            yield
        finally:
            for part, before in zip(read, own, strict=True):
                part.copy_(before)

    def copy_bytes(self) -> dict[str, int]:
        """Return the memory of each copy of the adapter by name; a shared copy is counted once."""
        costs = {name: size * self.numel for name, size in self.plan.bytes_per_parameter().items()}
        if self.working is not self.masters:
            costs["working copy"] = self.working.nbytes
        return costs

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the state of a checkpoint: the masters, and the sum of the unfinished window."""
        return {"masters": self.masters, "gradient": self.gradient}

    def scalars(self) -> JsonObject:
        """Return nothing: all state is tensors."""
        return {}

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore what ``tensors`` returned, and publish the masters."""
        check_like(self.tensors(), tensors)
        self.masters.copy_(tensors["masters"])
        self.gradient.copy_(tensors["gradient"])
        self.publish_masters()

    def assert_bound(self) -> None:
        """Check that every parameter and gradient still uses the buffers' memory.

        It needs no device work, so it runs in every step. Raises NumericalError naming the factor.
        """
        for slot, master in zip(self.slots, self.master_parameters, strict=True):
            parameter = slot.factor.parameter
            for what, found, flat in (
                ("weight", parameter, self._read_from(slot)),
                ("gradient", parameter.grad, self.gradient),
                ("master weight", master, self.masters),
                ("optimizer gradient", master.grad, self.optimizer_gradient),
            ):
                if not _is_view(found, flat, slot):
                    raise NumericalError(
                        f"the {what} of {slot.factor.name} is no longer a view of the flat "
                        "buffer, so gradients would be lost; something replaced the tensor "
                        "(zero_grad, .to(), or a parameter swap)"
                    )


def _is_view(found: Tensor | None, flat: Tensor, slot: Slot) -> bool:
    return (
        found is not None
        and found.dtype == flat.dtype
        and found.data_ptr() == flat.data_ptr() + slot.start * flat.element_size()
        and tuple(found.shape) == slot.shape
        and found.is_contiguous()
    )


def _lay_out(ordered: Sequence[Factor]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    start = 0
    for factor in ordered:
        slots.append(Slot(factor, start, tuple(factor.parameter.shape)))
        start = slots[-1].stop
    return tuple(slots)


def _ranges(slots: Sequence[Slot]) -> tuple[GroupRange, ...]:
    ranges = []
    for name, members in groupby(range(len(slots)), key=lambda place: slots[place].factor.group):
        places = list(members)
        here = range(places[0], places[-1] + 1)
        ranges.append(GroupRange(name, slots[here[0]].start, slots[here[-1]].stop, here))
    return tuple(ranges)
