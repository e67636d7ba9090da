"""Adapter of any third-party optimizer to per-factor views of the flat master weights.

The libraries create their state in the first step, each in its own way, and none of them can skip a
step on the device when a gradient is not finite. Both are handled here: state is saved and restored
factor by factor, and a step whose gradient must not be used is never started. For that the host
waits for the device once per optimizer step (only the fused AdamW decides on the device).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_api.training_spec import OptimizerName
from kubelora_trainer.optim.bnb_8bit import EightBitMoment
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.moments import Damping, Elements
from kubelora_trainer.optim.state_sums import StateSums
from kubelora_trainer.utils.errors import ConfigurationError
from kubelora_trainer.utils.stateful import check_like


@dataclass(frozen=True)
class LibraryState:
    """Description of how a library stores its state.

    Attributes:
        text: Format of the state, for people.
        group: Keys of the parameter groups whose values change from step to step.
        constants: Keys of tensors that never change.
        first: Key of the first moment, if it is stored per element in fp32.
        second: Key of the second moment, if it is stored per element in fp32.
        damping: Denominator of the step, from a parameter group and the number of steps done.
        ignores_zero_rate: Whether the library's step does nothing at rate 0, not even count.
    """

    text: str
    group: tuple[str, ...] = ()
    constants: frozenset[str] = field(default_factory=frozenset)
    first: str | None = None
    second: str | None = None
    damping: Callable[[Mapping[str, Any], int], Damping] | None = None
    ignores_zero_rate: bool = False


class LibraryOptimizer:
    """A third-party optimizer over the masters of ``buffers``; see `AdapterOptimizer`.

    Args:
        buffers: Flat buffers of the adapter.
        library: The optimizer, built over the groups of `rate_groups`.
        state: Description of its state.
        state_bytes: Memory of its entire state.
        eight_bits: Its second moments, if they are stored in 8 bits.
    """

    def __init__(
        self,
        buffers: AdapterBuffers,
        library: torch.optim.Optimizer,
        state: LibraryState,
        state_bytes: int,
        eight_bits: EightBitMoment | None = None,
    ) -> None:
        self._buffers, self._library, self._state = buffers, library, state
        self._eight_bits = eight_bits
        self.sums: StateSums | None = None
        self.state_text, self.state_bytes = state.text, state_bytes
        self.ignores_zero_rate = state.ignores_zero_rate
        self._moments: dict[str, Tensor] = {
            name: torch.zeros(buffers.numel, dtype=torch.float32, device=buffers.masters.device)
            for name in (state.first, state.second)
            if name is not None
        }
        self._adopt_all()

    @property
    def first_moment(self) -> Tensor | None:
        """Momentum, flat; None if the library stores none per element."""
        return self._moments.get(self._state.first or "")

    @property
    def second_moment(self) -> Elements | None:
        """Mean of squared gradients, flat; None if there is none or it is factored."""
        return self._eight_bits or self._moments.get(self._state.second or "")

    @property
    def shadow_decay(self) -> float | None:
        """beta2 if second moments are stored in 8 bits."""
        return self._eight_bits.decay if self._eight_bits else None

    @property
    def own_rate(self) -> float:
        """The rate that the library estimated (Prodigy's d), else 1."""
        return float(self._library.param_groups[0].get("d", 1.0))

    @property
    def state_buffers(self) -> Sequence[Tensor]:
        """Flat moments where the library has them, and the rest factor by factor."""
        flat = list(self._moments.values())
        kept = {"step", *self._state.constants, self._state.first, self._state.second}
        for _, state in self._by_factor():
            flat += [v for n, v in state.items() if isinstance(v, Tensor) and n not in kept]
        return flat

    @property
    def step_count(self) -> Tensor | int:
        """Steps that updated the first factor's state."""
        first = self._library.state.get(self._buffers.master_parameters[0], {})
        count: Tensor | int = first.get("step", 0)
        return count

    @property
    def damping(self) -> Damping | None:
        """Denominator of the step; None if the step has another form."""
        damping = self._state.damping
        if damping is None:
            return None
        first = self._library.state.get(self._buffers.master_parameters[0], {})
        return damping(self._library.param_groups[0], int(first.get("step", 0)))

    @property
    def steps_done(self) -> int:
        """Steps that updated the state, of the factor with the fewest."""
        kept = self._library.state
        return min(int(kept.get(m, {}).get("step", 0)) for m in self._buffers.master_parameters)

    def step(self, learning_rate: float, non_finite: Tensor) -> None:
        """Update the masters and publish them; skip the step if the gradient is not finite."""
        if self.sums:
            self.sums.begin()
        if bool(non_finite):
            return
        self._buffers.cast_gradient()
        for group in self._library.param_groups:
            group["lr"] = learning_rate * group["scale"]
        self._library.step()
        self._adopt_moments()
        self._buffers.publish_masters()
        if self.sums:
            self.sums.finish()

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the state of each factor as ``factor/name``; empty before the first step."""
        return {
            f"{factor}/{name}": value
            for factor, state in self._by_factor()
            for name, value in state.items()
            if isinstance(value, Tensor) and name not in self._state.constants
        }

    def scalars(self) -> JsonObject:
        """Return the scalar state of the factors and of the parameter groups."""
        return {
            "factors": {
                factor: {n: v for n, v in state.items() if not isinstance(v, Tensor)}
                for factor, state in self._by_factor()
            },
            "groups": [
                {n: group[n] for n in self._state.group if n in group}
                for group in self._library.param_groups
            ],
        }

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore what `tensors` and `scalars` returned. Raises ValueError if it does not fit."""
        self._check(tensors, scalars)
        for slot, master in zip(self._buffers.slots, self._buffers.master_parameters, strict=True):
            state = self._library.state[master]
            prefix = f"{slot.factor.name}/"
            for name in [n for n in tensors if n.startswith(prefix)]:
                state[name.removeprefix(prefix)] = tensors[name].to(master.device, copy=True)
            state.update(scalars["factors"].get(slot.factor.name, {}))
        for group, saved in zip(self._library.param_groups, scalars["groups"], strict=True):
            group.update(saved)
        self._adopt_all()
        if self.sums:
            self.sums.forget()

    def _check(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        present = self.tensors()
        if present:
            check_like(present, tensors)
        known = {slot.factor.name for slot in self._buffers.slots}
        names = {factor: set[str]() for factor in known}
        for factor, _, name in (key.rpartition("/") for key in tensors):
            if factor not in known:
                raise ValueError(f"{factor} is not a factor of this adapter")
            names[factor].add(name)
        # Before its first step a library has no state to compare with: only check completeness.
        if tensors and (without := [factor for factor, kept in names.items() if not kept]):
            raise ValueError(f"the state of {min(without)} is missing")
        saved, own = scalars["groups"], self.scalars()["groups"]
        if len(saved) != len(own):
            raise ValueError(f"{len(saved)} parameter groups were saved, this run has {len(own)}")
        for theirs, ours in zip(saved, own, strict=True):
            if absent := sorted(ours.keys() - theirs.keys()):
                raise ValueError(f"the parameter group's {absent[0]} is missing")

    def _by_factor(self) -> list[tuple[str, dict[str, object]]]:
        masters = zip(self._buffers.slots, self._buffers.master_parameters, strict=True)
        kept = self._library.state
        return [(slot.factor.name, kept[master]) for slot, master in masters if kept.get(master)]

    def _adopt_all(self) -> None:
        if self._eight_bits:  # once adopted, bitsandbytes updates the views in place
            masters = self._buffers.master_parameters
            self._eight_bits.adopt([self._library.state[master] for master in masters])
        self._adopt_moments()

    def _adopt_moments(self) -> None:
        """Make the moments views of the flat buffers, once the library has created them."""
        for name, flat in self._moments.items():
            for slot, master in zip(
                self._buffers.slots, self._buffers.master_parameters, strict=True
            ):
                state, view = self._library.state.get(master, {}), slot.of(flat)
                if name in state and state[name].data_ptr() != view.data_ptr():
                    view.copy_(state[name])
                    state[name] = view


def default_to(value: float | None, default: float) -> float:
    """Return ``value``, or the optimizer's own ``default`` where the job leaves it out."""
    return default if value is None else value


def total_bytes(buffers: AdapterBuffers, of_shape: Callable[[tuple[int, ...]], int]) -> int:
    """Return the memory of a state that takes ``of_shape`` bytes for a factor of that shape."""
    return sum(of_shape(slot.shape) for slot in buffers.slots)


def import_library(module: str, optimizer: OptimizerName) -> ModuleType:
    """Import ``module``, without the advice on 4-bit models that bitsandbytes logs on import.

    Raises ConfigurationError where that fails.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigurationError(
            f"training.optimizer.name {optimizer} needs {module.split('.')[0]}, which can't be "
            f"imported ({error}): install kubelora with its trainer extra"
        ) from error


def allocate_bitsandbytes_state(library: torch.optim.Optimizer) -> None:
    """Make bitsandbytes' state now and not in its first step, so that it can be seen and saved."""
    for number, group in enumerate(library.param_groups):
        for index, parameter in enumerate(group["params"]):
            library.init_state(group, parameter, number, index)  # type: ignore[attr-defined]
