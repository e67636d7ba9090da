"""Effects of an optimizer step on the weights, and on the optimizer's own state.

Compares sampled elements before and after the step. Optimizers differ in the state that they
keep; a number that can't be computed from it is NaN.

One step shows whether a second moment stored on its own, in fp32 or a narrower type, moves. It does
not show that for one in 8 bits, which moves with the scale that it shares with 255 others, and in
codes 0.7 % to 7 % apart where a step asks for 0.1 %. So the running mean of the sampled ones is
also kept in fp32, and the share that is far from it is reported.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.moments import Damping, Elements, Moments
from kubelora_trainer.telemetry.element_sampling import GroupSample, SlotSums

SAME_SQUARE = 0.1
"""Within this share a squared gradient is as large as its running mean, which then need not move.
Farther apart, a mean with beta2 up to 0.99999 moves by 1e-6 at least: 16 units in fp32's last
place."""


FAR = 4.0
"""A second moment in 8 bits that is off by more than this factor counts as stuck: it makes a step
wrong by the factor's square root, twice as long or half. docs/numerics.md derives how far rounding
alone goes."""


class UpdateProbe:
    """Measurement of one optimizer step. All results fp64 on the device.

    lost (groups): share of weights that kept their bits although their momentum (their gradient,
    where the optimizer keeps no momentum in this form) is not zero.
    change (groups): root mean square of the change. scale (groups), slot_scale (slots): the same,
    divided by the slot's rate scale and not yet by the rate.
    stuck (groups): share of second moments that kept their bits, of those whose squared gradient
    differs from them; where they share a scale, of those off by more than ``FAR``.
    damping (groups): mean of sqrt(v̂) / (sqrt(v̂) + eps) over those that are not 0.
    stale (1): share of the working copy's elements that are not their masters, rounded.
    """

    def __init__(
        self,
        buffers: AdapterBuffers,
        moments: Moments,
        sample: GroupSample,
        rate_scales: Sequence[float] | None = None,
    ) -> None:
        """rate_scales: factor of each slot's learning rate; None: 1 for all."""
        self._buffers, self._moments, self._sample = buffers, moments, sample
        self._slots = SlotSums(sample, buffers.slots)
        self._rate_scale = self._slots.spread(rate_scales) if rate_scales else None
        self._unknown = torch.full(
            (len(buffers.groups),), torch.nan, dtype=torch.float64, device=buffers.masters.device
        )
        self.lost = self.change = self.scale = self.stuck = self.damping = self._unknown
        self.slot_scale = self._unknown.new_full((len(buffers.slots),), torch.nan)
        self.stale = self._unknown.new_zeros(1)
        held = sample.index < buffers.working.numel()  # magnitudes have no working copy
        self._copied = sample.index.where(held, 0).flatten()
        self._held = sample.weight * held
        self._all_held = self._held.sum()
        self._weights: Tensor | None = None
        self._second: Tensor | None = None
        shape = (0, 0) if moments.shadow_decay is None else sample.index.shape
        self._shadow = torch.zeros(shape, dtype=torch.float32, device=buffers.masters.device)

    def before(self) -> None:
        """Prepare for the optimizer step."""
        self._weights = self._sample.take(self._buffers.masters)
        self._second = self._taken(self._moments.second_moment)

    def after(self) -> None:
        """Measure after the step, before its gradient is cleared."""
        before, second_before = self._weights, self._second
        self._weights = self._second = None
        if before is None:
            return
        now = self._sample.take(self._buffers.masters)
        self.stale = self._stale(now)
        change = now.double() - before.double()
        squares = change.square()
        self.change = self.scale = self._sample.mean(squares).sqrt()
        if self._rate_scale is not None:
            squares = (change / self._rate_scale).square()
            self.scale = self._sample.mean(squares).sqrt()
        self.slot_scale = (self._slots.of(squares) / self._slots.counts).sqrt()
        first = self._moments.first_moment
        # Without momentum a step follows the gradient.
        meant = self._sample.take(self._buffers.optimizer_gradient if first is None else first)
        self.lost = self._sample.mean((now == before) & (meant != 0))
        second = self._taken(self._moments.second_moment)
        if second is not None and second_before is not None:
            gradient = self._sample.take(self._buffers.optimizer_gradient)
            if (decay := self._moments.shadow_decay) is None:
                self.stuck = stuck_ratio(self._sample, second_before, second, gradient)
            else:
                moved = (second != second_before).any()  # else the step was skipped
                mean = decay * self._shadow + (1 - decay) * gradient.float().square()
                self._shadow = torch.where(moved, mean, self._shadow)
                self.stuck = far_ratio(self._sample, second, self._shadow)
            if (damping := self._moments.damping) is not None:
                self.damping = damping_ratio(self._sample, second, damping)

    def tensors(self) -> dict[str, Tensor]:
        """Return the shadow of the second moments for a checkpoint; empty without one."""
        return {"second_moment": self._shadow} if self._shadow.numel() else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``tensors`` returned."""
        if self._shadow.numel():
            self._shadow = tensors["second_moment"].to(self._shadow.device)

    def _stale(self, masters: Tensor) -> Tensor:
        working = self._buffers.working
        if working is self._buffers.masters:
            return self.stale
        read = working.index_select(0, self._copied).view_as(masters)
        differ = (read != masters.to(working.dtype)) * self._held
        return (differ.sum() / self._all_held).reshape(1)

    def _taken(self, flat: Elements | None) -> Tensor | None:
        return None if flat is None else self._sample.take(flat)


def stuck_ratio(sample: GroupSample, before: Tensor, after: Tensor, gradient: Tensor) -> Tensor:
    """Compute the share of second moments that did not move although they should have.

    One should move where g² differs from it by more than ``SAME_SQUARE`` of the larger of both.
    Squares are taken in fp64: one that underflows in the state's dtype should have moved it.

    Args:
        sample: The sampled positions.
        before: Second moments before the step, (groups, samples).
        after: The same after it.
        gradient: What the step used, (groups, samples).

    Returns:
        fp64 (groups); NaN where none should move.
    """
    mean, square = before.double(), gradient.double().square()
    differs = (square - mean).abs() > SAME_SQUARE * torch.maximum(square, mean)
    return sample.share(differs, after == before)


def far_ratio(sample: GroupSample, found: Tensor, exact: Tensor) -> Tensor:
    """Compute the share of ``found`` that is off by more than ``FAR`` times.

    Args:
        sample: The sampled positions.
        found: Second moments as the optimizer has them, (groups, samples).
        exact: As they should be.

    Returns:
        fp64 (groups); NaN where both are all zeros.
    """
    far = (found > FAR * exact) | (found < exact / FAR)
    return sample.share((exact != 0) | (found != 0), far)


def damping_ratio(sample: GroupSample, second: Tensor, damping: Damping) -> Tensor:
    """Compute the mean of sqrt(v̂) / (sqrt(v̂) + eps), v̂ bias-corrected, where v is not 0.

    (Kingma & Ba 2015, algorithm 1.)

    Args:
        sample: The sampled positions.
        second: Second moments v, (groups, samples).
        damping: eps, and the bias correction.

    Returns:
        fp64 (groups); NaN where every v is 0.
    """
    root = (second.double() / damping.correction).sqrt()
    return sample.share(second != 0, root / (root + damping.eps))
