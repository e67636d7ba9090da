"""An audit of one micro-step now and then: it is computed again, and compared with the loss.

Three questions that no measurement of a single gradient answers:

- Are the bits the same? The kernels, the operands and their order are, so only a device that
  miscomputes gives others (or kernels that are not deterministic, which a third pass shows).
- Does the loss fall against the gradient? ``L(w + d) - L(w - d)`` over ``<g, 2 d>``, d along g, is
  1 up to rounding and curvature for any gradient of L, and -1 for one with another sign.
- Does each factor's gradient follow from what arrived at its module's output? The product of the
  output's gradient and the module's own change along g is ``<g, g>``, as the module is linear in
  each of its factors; computed in fp32 from the module's input, so that nothing of autograd's own
  way to the factor takes part.

The first of these micro-steps comes early, because most faults are there from the start; later ones
are so rare that they take half a per cent of the time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.func import functional_call

from kubelora_trainer.health.detector import AuditFacts
from kubelora_trainer.lora.adapter import ADAPTER_NAME
from kubelora_trainer.training.recomputation import (
    Recomputation,
    distance,
    same_bits,
    weights_in_use,
)

AUDIT_MICRO_STEPS: Final = 800
"""Micro-steps between two audits: one costs 2 to 3.1 of them, 0.4 % of the time."""
PREDICTED_CHANGE: Final = 0.02
"""Share of the loss that the step along the gradient should change it by: far above the rounding
of a bf16 forward pass, and small enough for the loss to be nearly straight."""
LEAST_CHANGE: Final = 0.01
"""Predicted share of the loss between both sides below which nothing is compared: steps that the
working copy's type rounds away."""
SLOPES_AGREE: Final = 0.4
"""Difference of a negative slope's two measurements, of which one is half as wide, up to which it
is believed: reversed signs read -1 with 0.06 of difference, rounding alone twice at half."""
UNPROVEN_DISTANCE: Final = 0.1
"""Relative distance of a factor's gradient that counts as different while no audit of this process
has shown kernels to be deterministic: bf16 passes in another order differ by 1 %."""
BANDS: Final = 10.0
"""Multiple of the measured distance between two equal passes that counts as different."""


def audit_interval(accumulation: int) -> int:
    """Return the optimizer steps between two audits."""
    return -(-AUDIT_MICRO_STEPS // accumulation)


class StepAudit:
    """The audit of one attempt.

    deterministic: whether equal bits were seen. band: largest distance between equal passes.
    """

    def __init__(
        self,
        recomputation: Recomputation,
        models: Sequence[nn.Module],
        accumulation: int,
        *,
        by_module: bool = True,
    ) -> None:
        """by_module: whether modules can be watched: without dropout and compilation."""
        self._recomputation = recomputation
        self._every = audit_interval(accumulation)
        self._layers = _layers(models) if by_module else []
        places = {id(s.factor.parameter): i for i, s in enumerate(recomputation.buffers.slots)}
        self._places = places
        self._first: int | None = None
        self.deterministic, self.band = False, 0.0

    def due(self, step: int) -> bool:
        """Return whether a micro-step of ``step`` (from 1) is audited.

        The second step of an attempt, as lora_A has no gradient in a fresh adapter's first, then at
        twice the distance each time, until the interval is reached.
        """
        self._first = step if self._first is None else self._first
        done = step - self._first + 1
        early = done > 1 and done & (done - 1) == 0 and done < self._every
        return early or step % self._every == 0

    def begins(self, step: int) -> bool:
        """Return whether the pass that comes next, a window's first, is to be audited.

        What is in the accumulator already is no part of its gradient; nothing can be said then.
        """
        return self.due(step) and not bool(self._recomputation.buffers.gradient.any())

    def audit(
        self, objective: Callable[[int], object], step: int, micro_step: int, loss: Tensor
    ) -> AuditFacts:
        """Audit the window's first micro-step, whose gradient alone is in the accumulator.

        Args:
            objective: As the loop called it.
            step: Optimizer step, from 1.
            micro_step: As the data's order counts.
            loss: The loss that the pass was about.
        """
        again = self._recomputation
        recorded = again.buffers.gradient.clone()
        with again.set_aside():
            with self._watched_modules(recorded) as products:
                repeated = again.gradient(objective, [micro_step])
            differs, factor = self.hardware_distance(
                recorded, repeated, lambda: again.gradient(objective, [micro_step])
            )
            own_loss = again.loss(micro_step)
            descent = self._descent(recorded, micro_step, own_loss, abs(float(loss)))
        return AuditFacts(
            step, own_loss, differs, factor, descent, self._by_factor(recorded, products)
        )

    def hardware_distance(
        self, recorded: Tensor, repeated: Tensor, third: Callable[[], Tensor]
    ) -> tuple[float, str]:
        """Return by how much ``recorded`` differs where the hardware alone explains it, else 0.

        Args:
            recorded: The run's own gradient.
            repeated: The same, computed again.
            third: Computes it once more.

        Returns:
            The largest relative distance of a factor, and the factor's name.
        """
        buffers = self._recomputation.buffers
        if same_bits(repeated, recorded):
            self.deterministic = True
            return 0.0, ""
        off, factor = distance(buffers, recorded, repeated)
        spread, _ = distance(buffers, third(), repeated)
        if self.deterministic:
            return off, factor
        if not spread < UNPROVEN_DISTANCE:
            return 0.0, ""  # nothing is known of such kernels
        self.band = max(self.band, spread)
        return (off, factor) if off > max(UNPROVEN_DISTANCE, BANDS * self.band) else (0.0, "")

    def _descent(
        self, recorded: Tensor, micro_step: int, loss: float, differentiated: float
    ) -> float | None:
        """Compare the loss on both sides of the weights, along the gradient, with its product.

        Args:
            recorded: The gradient.
            micro_step: As the data's order counts.
            loss: The loss at the weights.
            differentiated: Size of the loss that the gradient is of, which may have been scaled.
        """
        again = self._recomputation
        if not 0.0 < loss < float("inf") or not 0.0 < differentiated < float("inf"):
            return None
        gradient = recorded.double() * (loss / differentiated)
        if again.scaler:
            gradient = gradient * again.scaler.inverse
        square = float(gradient.square().sum())
        if not 0.0 < square < float("inf"):
            return None
        step = gradient * (PREDICTED_CHANGE * loss / square)
        ratio = self._slope(micro_step, gradient, step, LEAST_CHANGE * loss)
        if ratio is None or ratio > 0.0:
            return ratio
        # A gradient that is not the loss's own may lead anywhere: a slope is the same at any width.
        nearer = self._slope(micro_step, gradient, step / 2, LEAST_CHANGE * loss / 2)
        return ratio if nearer is not None and abs(nearer - ratio) < SLOPES_AGREE else None

    def _slope(self, micro_step: int, gradient: Tensor, step: Tensor, least: float) -> float | None:
        """Return the loss's change from ``w - step`` to ``w + step`` over what it should be.

        The weights are rounded to the type that passes read, and the prediction is that for the
        rounded ones; None if it is below ``least``.
        """
        again = self._recomputation
        read = weights_in_use(again.buffers)
        own = torch.cat([part.double() for part in read])
        sides, losses = [], []
        for moved in (own + step, own - step):
            split = moved.split([part.numel() for part in read])
            rounded = [side.to(part.dtype) for side, part in zip(split, read, strict=True)]
            sides.append(torch.cat([part.double() for part in rounded]))
            with again.using_bits(rounded, None):
                losses.append(again.loss(micro_step))
        predicted = float((gradient * (sides[0] - sides[1])).sum())
        return (losses[0] - losses[1]) / predicted if predicted > least else None

    @contextmanager
    def _watched_modules(self, recorded: Tensor) -> Iterator[dict[int, list[Tensor]]]:
        """Collect by slot the products of output gradients with the module's change along g."""
        products: dict[int, list[Tensor]] = {}
        slots = self._recomputation.buffers.slots

        def watch(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:
                return
            down, up = layer.lora_A[ADAPTER_NAME], layer.lora_B[ADAPTER_NAME]
            scale, given = layer.scaling[ADAPTER_NAME], inputs[0].detach()

            def arrived(gradient: Tensor) -> None:
                with torch.no_grad():
                    for place, change in _changes(self._places, slots, recorded, down, up, given):
                        product = (gradient.detach().float() * change).sum().double() * scale
                        products.setdefault(place, []).append(product)

            output.register_hook(arrived)

        handles = [layer.register_forward_hook(watch) for layer in self._layers]
        try:
            yield products
        finally:
            for handle in handles:
                handle.remove()

    def _by_factor(self, recorded: Tensor, products: dict[int, list[Tensor]]) -> list[float]:
        """Divide the products by what the gradient predicts; NaN without either."""
        slots = self._recomputation.buffers.slots
        found = torch.full((len(slots),), torch.nan, dtype=torch.float64, device=recorded.device)
        for place, parts in products.items():
            square = slots[place].of(recorded).double().square().sum()
            found[place] = torch.stack(parts).sum() / square
        ratios: list[float] = found.tolist()
        return ratios


def _changes(
    places: dict[int, int],
    slots: Sequence[Any],
    recorded: Tensor,
    down: nn.Module,
    up: nn.Module,
    given: Tensor,
) -> Iterator[tuple[int, Tensor]]:
    """Compute in fp32 by how much a module's output changes along each factor's gradient."""
    place_down, place_up = places[id(down.weight)], places[id(up.weight)]
    given = given.float()
    along_down = slots[place_down].of(recorded).float()
    along_up = slots[place_up].of(recorded).float()
    own_down, own_up = down.weight.detach().float(), up.weight.detach().float()  # type: ignore[operator]
    yield (
        place_down,
        functional_call(
            up,
            {"weight": own_up},
            functional_call(down, {"weight": along_down}, given),
        ),
    )
    yield (
        place_up,
        functional_call(
            up,
            {"weight": along_up},
            functional_call(down, {"weight": own_down}, given),
        ),
    )


def _layers(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the adapted layers; with DoRA an output is not linear in its factors."""
    return [
        layer
        for model in models
        for layer in model.modules()
        if isinstance(layer, LoraLayer)
        and ADAPTER_NAME in layer.lora_A
        and not layer.lora_magnitude_vector
        and isinstance(layer, nn.Module)
    ]
