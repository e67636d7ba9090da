"""The transfer of a step's numbers to the host, all in one tensor."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from kubelora_trainer.lora.factor_names import DOWN
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Slot
from kubelora_trainer.optim.precision import is_magnitude
from kubelora_trainer.telemetry.category_losses import CategorySums
from kubelora_trainer.telemetry.counters import DeadModules
from kubelora_trainer.telemetry.lora_balance import Pair, balance, pooled
from kubelora_trainer.telemetry.step_metrics import GroupNumbers, StepNumbers

EXTRA = "extra."
"""Prefix of the names of ``StepNumbers.extra`` among the copied tensors."""


@dataclass(frozen=True)
class StepFacts:
    """Facts of a step that the host already has.

    judge_updates: whether the rate was high enough for an unmoved weight to mean anything.
    own_rate: factor that the optimizer itself applied to the rate (Prodigy). broken_ranks: of
    several ranks, those whose part of the gradient was not finite.
    """

    step: int
    learning_rate: float
    samples: int
    judge_updates: bool
    own_rate: float = 1.0
    broken_ranks: tuple[int, ...] = ()

    @property
    def step_size(self) -> float:
        """How far a weight moves where the optimizer's direction is 1."""
        return self.learning_rate * self.own_rate


@dataclass(frozen=True)
class HostNumbers:
    """Numbers of a step that need no copy from a device, as in ``StepNumbers``."""

    backward_passes: float
    micro_steps: int
    host_memory_peak: float
    device_memory_peak: float


class CopyToHost:
    """Tensors of any shape on one device, copied together, asynchronously, as fp64."""

    def __init__(self, measured: Mapping[str, Tensor]) -> None:
        self._sizes = {name: tensor.numel() for name, tensor in measured.items()}
        packed = torch.cat([tensor.detach().double().flatten() for tensor in measured.values()])
        self._event: torch.cuda.Event | None = None
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = packed

    def read(self) -> dict[str, list[float]]:
        """Read the numbers of each tensor, flat; waits for the copy if it is not complete."""
        if self._event is not None:
            self._event.synchronize()
        numbers = iter(self._host.tolist())
        return {name: list(islice(numbers, size)) for name, size in self._sizes.items()}


@dataclass(frozen=True)
class PendingNumbers:
    """A step's numbers on their way to the host. Read each once, in the order of the steps."""

    buffers: AdapterBuffers
    pairs: Sequence[Pair]
    dead: DeadModules
    facts: StepFacts
    host: HostNumbers
    copy: CopyToHost
    categories: CategorySums | None

    def read(self) -> StepNumbers:
        """Read the numbers; waits for the copy if it is not complete."""
        found, facts, slots = self.copy.read(), self.facts, self.buffers.slots
        norms, waiting = found["norm"], self.dead.waiting
        off_and_size = list(zip(found["pairs"][::2], found["pairs"][1::2], strict=True))
        (clipped,), (loss,), (divergence,), (loss_scale,) = (
            found[name] for name in ("clipped_norm", "loss_sum", "rank_divergence", "loss_scale")
        )
        return StepNumbers(
            step=facts.step,
            learning_rate=facts.learning_rate,
            step_size=facts.step_size,
            loss=loss / facts.samples,
            samples=facts.samples,
            grad_norm=math.sqrt(sum(n**2 for n in norms)),
            groups=self._groups(
                found, {} if waiting else pooled(self.pairs, off_and_size), waiting
            ),
            factor_norms=norms,
            factor_absmax=found["absmax"],
            factor_balance=_by_slot(slots, self.pairs, off_and_size),
            factor_update_scale=[
                _over_rate(change, facts.step_size) for change in found["slot_scale"]
            ],
            category_losses=self.categories.read(found["categories"]) if self.categories else {},
            clipped_norm=clipped,
            backward_passes=self.host.backward_passes,
            micro_steps=self.host.micro_steps,
            dead_modules=self.dead.observe(norms, facts.step_size),
            working_copy_stale=found["stale"][0],
            rank_divergence=divergence,
            loss_scale=loss_scale,
            broken_ranks=facts.broken_ranks,
            host_memory_peak=self.host.host_memory_peak,
            device_memory_peak=self.host.device_memory_peak,
            extra={
                name.removeprefix(EXTRA): values
                for name, values in found.items()
                if name.startswith(EXTRA)
            },
        )

    def _groups(
        self,
        found: Mapping[str, Sequence[float]],
        balances: Mapping[str, float],
        waiting: bool,
    ) -> dict[str, GroupNumbers]:
        """Compute the groups' numbers. Updates are not judged where the gradient is not finite.

        waiting: lora_B may still be 0 in the passes, or close to it, which makes lora_A's gradient
        0, or a few of the dtype's smallest numbers.
        """
        moved = all(math.isfinite(norm) for norm in found["norm"])
        judged = moved and self.facts.judge_updates
        by_group: dict[str, GroupNumbers] = {}
        for index, group in enumerate(self.buffers.groups):
            zeros, nonfinite, underflows = found["counts"][3 * index : 3 * index + 3]
            size = group.stop - group.start
            here = slice(group.slots.start, group.slots.stop)
            block, paired = group.name.rpartition(".")[0], not is_magnitude(group.name)
            by_group[group.name] = GroupNumbers(
                grad_norm=math.sqrt(sum(norm**2 for norm in found["norm"][here])),
                grad_absmax=_largest(found["absmax"][here]),
                grad_zero_ratio=math.nan if waiting and group.name.endswith(DOWN) else zeros / size,
                grad_nonfinite=int(nonfinite),
                grad_underflow_ratio=underflows / (size - zeros) if size > zeros else 0.0,
                absorbed_ratio=found["absorbed"][index],
                update_lost_ratio=found["lost"][index] if judged else math.nan,
                accumulation_error_ratio=found["error"][index],
                update_rms=found["change"][index],
                update_scale=_over_rate(found["scale"][index], self.facts.step_size),
                optimizer_stuck_ratio=found["stuck"][index] if moved else math.nan,
                adam_eps_damping_ratio=found["damping"][index],
                lora_balance=balances.get(block, math.nan) if paired else math.nan,
            )
        return by_group


def _by_slot(
    slots: Sequence[Slot], pairs: Sequence[Pair], off_and_size: Sequence[tuple[float, float]]
) -> list[float]:
    """Return the balance of each factor's pair; NaN for a factor without one."""
    by_slot = [math.nan] * len(slots)
    for pair, (off, size) in zip(pairs, off_and_size, strict=True):
        by_slot[pair.down] = by_slot[pair.up] = balance(off, size)
    return by_slot


def _over_rate(change: float, rate: float) -> float:
    return change / rate if rate > 0 else math.nan


def _largest(values: Sequence[float]) -> float:
    """Return the maximum; NaN if any value is NaN."""
    return math.nan if any(math.isnan(v) for v in values) else max(values)
