"""Rounding losses while a window is summed: gradients that vanish, sums that drift.

In-place accumulation never shows a micro-step's own gradient. So the sampled elements are set
aside and zeroed before the backward pass; what they hold afterwards is that gradient, and the
sum is then formed here by the same addition that autograd would have done.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kubelora_trainer.telemetry.element_sampling import GroupSample


class AccumulationProbe:
    """Measurement of the accumulator around micro-steps.

    absorbed: fp64 (groups), of the window's last addition. error: fp64 (groups), of the window's
    sum against an fp32 shadow; NaN where there is none. An fp32 accumulator has no shadow: its
    error is below 1e-5 for any window that the API takes, and measuring each micro-step costs time.
    """

    def __init__(self, flat: Tensor, sample: GroupSample) -> None:
        self._flat, self._sample = flat, sample
        groups = len(sample.index)
        self.absorbed = torch.full((groups,), torch.nan, dtype=torch.float64, device=flat.device)
        self.error = torch.full_like(self.absorbed, torch.nan)
        shape = (0, 0) if flat.dtype == torch.float32 else sample.index.shape
        self._shadow = torch.zeros(shape, dtype=torch.float32, device=flat.device)
        self._shadowed = False
        self._window = range(0)
        self._set_aside: Tensor | None = None

    def begin_window(self, window: range, complete: bool, fresh: bool) -> None:
        """Prepare for the first remaining micro-step of a window.

        Args:
            window: The micro-steps of the window.
            complete: Whether every micro-step done so far was measured here; if not, there is no
                shadow because the window's first gradients are unknown.
            fresh: Whether nothing of the window is done yet.
        """
        self._window, self._shadowed = window, complete and self._shadow.numel() > 0
        if fresh or not complete:
            self.absorbed = torch.full_like(self.absorbed, 0.0 if len(window) < 2 else torch.nan)
            self.error = torch.full_like(self.error, torch.nan)
        if fresh:
            self._shadow.zero_()

    def before(self, micro_step: int) -> None:
        """Prepare for a micro-step's backward pass."""
        if self._shadowed or (self._is_last(micro_step) and len(self._window) > 1):
            self._set_aside = self._sample.take(self._flat)
            self._sample.zero(self._flat)

    def after(self, micro_step: int) -> None:
        """Restore the sums after the pass; compute the ratios when the window is complete."""
        before, self._set_aside = self._set_aside, None
        if before is None:
            return
        own = self._sample.take(self._flat)
        total = before + own
        self._sample.put(self._flat, total)
        if self._shadowed:
            self._shadow += own
        if self._is_last(micro_step):
            if len(self._window) > 1:
                self.absorbed = absorbed_ratio(self._sample, before, own, total)
            if self._shadowed:
                self.error = relative_error(self._sample, total, self._shadow)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the unfinished window, for a checkpoint."""
        return {"absorbed": self.absorbed, "error": self.error, "shadow": self._shadow}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what ``tensors`` returned."""
        self.absorbed = tensors["absorbed"].to(self._flat.device)
        self.error = tensors["error"].to(self._flat.device)
        self._shadow.copy_(tensors["shadow"])

    def _is_last(self, micro_step: int) -> bool:
        return micro_step == self._window[-1]


def absorbed_ratio(sample: GroupSample, before: Tensor, addend: Tensor, total: Tensor) -> Tensor:
    """Compute the share of mass lost in ``total = before + addend`` by group, fp64 (groups).

    The larger of Σ|g|·[acc+g == acc] / Σ|g| and Σ|acc|·[acc+g == g] / Σ|acc|; 0 for no mass.

    Args:
        sample: The sampled positions.
        before: The accumulator before the addition, (groups, samples).
        addend: What was added.
        total: Their sum in the accumulator's dtype.
    """
    both = torch.stack([addend, before])
    lost = torch.stack([total == before, total == addend])
    return sample.share(both.abs(), lost).nan_to_num(0.0).amax(0)


def relative_error(sample: GroupSample, found: Tensor, exact: Tensor) -> Tensor:
    """Compute the L2 norm of ``found - exact`` over that of ``exact`` by group, fp64 (groups).

    0 where both are 0, infinite where only ``exact`` is 0.

    Args:
        sample: The sampled positions.
        found: The sum as the accumulator has it, (groups, samples).
        exact: The same sum in fp32.
    """
    off = sample.total((found.double() - exact.double()).square())
    ratio = (off / sample.total(exact.double().square())).sqrt()
    return torch.where(off == 0, torch.zeros_like(ratio), ratio)
