"""Numbers of every optimizer step, by group and by factor, at negligible cost.

Everything is computed on the device from the flat buffers, in chunks, packed into one tensor and
copied to the host once, asynchronously; it is read a step later, so training never waits for it.
Group numbers become metrics; factor numbers go to the run's log alone.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.moments import Moments
from kubelora_trainer.telemetry.accumulation_probe import AccumulationProbe
from kubelora_trainer.telemetry.category_losses import CategorySums
from kubelora_trainer.telemetry.counters import (
    BackwardPasses,
    DeadModules,
    device_memory_peak,
    host_memory_peak,
)
from kubelora_trainer.telemetry.element_sampling import GroupSample
from kubelora_trainer.telemetry.gradient_stats import CHUNK_ELEMENTS, gradient_sums
from kubelora_trainer.telemetry.host_transfer import (
    EXTRA,
    CopyToHost,
    HostNumbers,
    PendingNumbers,
    StepFacts,
)
from kubelora_trainer.telemetry.lora_balance import BalanceProbe
from kubelora_trainer.telemetry.update_probe import UpdateProbe
from kubelora_trainer.utils.stateful import check_like


class GradientTelemetry:
    """Measurements at the points of a step where each number exists; the loop calls in order.

    A `Stateful`: a run that is resumed in the middle of a window reports the same numbers.
    """

    def __init__(
        self,
        buffers: AdapterBuffers,
        moments: Moments,
        rate_scales: Sequence[float] | None = None,
        loss_scale: Tensor | None = None,
    ) -> None:
        """rate_scales: what each slot's learning rate is multiplied by; None: 1 for all.

        loss_scale: scalar on the device that backward passes are scaled by; what underflows is
        judged on scaled gradients, as they were computed.
        """
        self._buffers, self._loss_scale = buffers, loss_scale
        sample = GroupSample(buffers.groups, buffers.gradient.device)
        self._accumulation = AccumulationProbe(buffers.gradient, sample)
        self._updates = UpdateProbe(buffers, moments, sample, rate_scales)
        self._balance = BalanceProbe(buffers, CHUNK_ELEMENTS)
        self._passes = BackwardPasses(buffers)
        self._dead = DeadModules(buffers.slots, buffers.plan.compute)
        self._gradient = gradient_sums(buffers, loss_scale)
        self._micro_steps, self._next, self._whole = 0, 0, True
        self._measured: dict[str, Tensor] = {}

    def begin_window(self, window: range, micro_step: int) -> None:
        """Prepare for the micro-steps ``micro_step`` to ``window.stop`` of a window."""
        fresh = micro_step == window.start
        self._whole = fresh or self._next == micro_step
        self._micro_steps = len(window)
        if fresh:
            self._passes.go_on_from(0)
        self._accumulation.begin_window(window, self._whole, fresh)

    @contextmanager
    def micro_step(self, micro_step: int) -> Iterator[None]:
        """Wrap one micro-step's backward pass."""
        self._accumulation.before(micro_step)
        yield
        self._accumulation.after(micro_step)
        self._next = micro_step + 1

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the passes of the block out of the count: they are not the window's."""
        count = self._passes.count
        try:
            yield
        finally:
            self._passes.go_on_from(count)

    def measure_gradient(self) -> Tensor:
        """Measure the finished gradient, before clipping.

        Returns the total L2 norm, a fp32 scalar on the device.
        """
        self._measured = self._gradient.measure() | {"pairs": self._balance.measure()}
        return self._measured["norm"].square().sum().sqrt().float()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Wrap the optimizer step, after clipping; the gradient must not be cleared inside."""
        chunks = self._buffers.gradient.split(CHUNK_ELEMENTS)
        norms = [torch.linalg.vector_norm(chunk, dtype=torch.float32) for chunk in chunks]
        self._measured["clipped_norm"] = torch.stack(norms).double().square().sum().sqrt()
        self._updates.before()
        yield
        self._updates.after()

    def pack(
        self,
        facts: StepFacts,
        loss_sum: Tensor,
        categories: CategorySums | None = None,
        rank_divergence: Tensor | None = None,
        extra: Mapping[str, Tensor] | None = None,
    ) -> PendingNumbers:
        """Start the one copy of this step's numbers to the host.

        Args:
            facts: What the host knows of the step.
            loss_sum: Scalar, the window's losses summed over samples.
            categories: The same by category.
            rank_divergence: Scalar, largest minus smallest parameter checksum over the ranks.
            extra: Whatever else is to be read with this step, by names of its own.
        """
        none = torch.zeros(0, dtype=torch.float64, device=loss_sum.device)
        nothing = torch.full_like(loss_sum, math.nan)
        copy = CopyToHost(
            self._measured
            | {
                "absorbed": self._accumulation.absorbed,
                "error": self._accumulation.error,
                "lost": self._updates.lost,
                "scale": self._updates.scale,
                "change": self._updates.change,
                "stale": self._updates.stale,
                "stuck": self._updates.stuck,
                "damping": self._updates.damping,
                "slot_scale": self._updates.slot_scale,
                "loss_sum": loss_sum,
                "categories": categories.sums if categories else none,
                "rank_divergence": nothing if rank_divergence is None else rank_divergence,
                "loss_scale": nothing if self._loss_scale is None else self._loss_scale,
            }
            | {f"{EXTRA}{name}": tensor for name, tensor in (extra or {}).items()}
        )
        host = HostNumbers(
            backward_passes=self._passes.count if self._whole else math.nan,
            micro_steps=self._micro_steps,
            host_memory_peak=host_memory_peak(),
            device_memory_peak=device_memory_peak(self._buffers.gradient.device),
        )
        return PendingNumbers(
            self._buffers, self._balance.pairs, self._dead, facts, host, copy, categories
        )

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the state of the unfinished window, and of second moments in 8 bits."""
        return {**self._accumulation.tensors(), **self._updates.tensors()}

    def scalars(self) -> JsonObject:
        """Return counts, and the micro-step that comes next."""
        return {
            "next": self._next,
            "passes": self._passes.count,
            "dead": self._dead.to_json(),
        }

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore what was saved. Raises ValueError if it does not fit."""
        check_like(self.tensors(), tensors)
        self._accumulation.load(tensors)
        self._updates.load(tensors)
        self._dead.load(scalars["dead"])
        self._passes.go_on_from(scalars["passes"])
        self._next = scalars["next"]
