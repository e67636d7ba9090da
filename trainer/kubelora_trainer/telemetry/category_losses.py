"""Losses by category: an average over bottles, cans and textiles hides that one of them drifts.

Sums stay on the device and are copied to the host with the step's other numbers, so no micro-step
waits. The number of categories is bounded, because each is a label value of a metric: the largest
have their own sum, the rest share one.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.data.sampler import SampleOrder
from kubelora_trainer.objective.sdxl_loss import MicroBatchLoss
from kubelora_trainer.telemetry.step_metrics import CategoryLoss
from kubelora_trainer.utils.device import to_device

MAX_CATEGORIES = 16
"""``other`` included."""
OTHER = "other"
NONE = "uncategorised"


@dataclass(frozen=True)
class CategorySums:
    """A window's sums. sums: fp64 (2, C) on the device: of losses, and of samples."""

    names: tuple[str, ...]
    sums: Tensor

    def read(self, values: Sequence[float]) -> dict[str, CategoryLoss]:
        """Compute mean losses from the flattened sums, of the categories that were seen."""
        count = len(self.names)
        return {
            name: CategoryLoss(values[i] / values[count + i], int(values[count + i]))
            for i, name in enumerate(self.names)
            if values[count + i] > 0
        }


class CategoryLosses:
    """Sums of the unfinished window. A `Stateful`: windows are resumed in their middle.

    categories: of each sample of the dataset, empty for none. Without any there is nothing to sum.
    sums: of the window so far, fp64 (2, C).
    """

    def __init__(self, categories: Sequence[str], device: torch.device) -> None:
        self.names = bounded_names(categories)
        position = {name: i for i, name in enumerate(self.names)}
        if self.names:
            last = position.get(OTHER, 0)
            self._of_sample = [position.get(category or NONE, last) for category in categories]
        self.sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=device)

    def watching(
        self, objective: Callable[[int], MicroBatchLoss], order: SampleOrder
    ) -> Callable[[int], MicroBatchLoss]:
        """Wrap ``objective`` so that every loss is added here."""

        def watched(micro_step: int) -> MicroBatchLoss:
            result = objective(micro_step)
            self.add([draw.sample for draw in order.samples_of(micro_step)], result.losses)
            return result

        return watched

    def add(self, samples: Sequence[int], losses: Tensor) -> None:
        """Add a micro-batch. losses: fp32 (n), of each sample as it is trained on."""
        if not self.names:
            return
        where = to_device(torch.tensor([self._of_sample[s] for s in samples]), losses.device)
        values = torch.stack([losses.detach().double(), torch.ones_like(losses).double()])
        self.sums.index_add_(1, where, values)

    def take(self) -> CategorySums:
        """Return the window's sums, and begin a new window."""
        taken, self.sums = self.sums, torch.zeros_like(self.sums)
        return CategorySums(self.names, taken)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the unfinished window's sums."""
        return {"sums": self.sums}

    def scalars(self) -> JsonObject:
        """Return the names of the categories."""
        return {"names": list(self.names)}

    def load(self, tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
        """Restore sums of the same categories; others (the data has changed) begin at 0."""
        if scalars.get("names") == list(self.names):
            self.sums.copy_(tensors["sums"])


def bounded_names(categories: Sequence[str]) -> tuple[str, ...]:
    """Return the names of categories with a loss of their own, in alphabetical order.

    The categories with the most images, ties by name; ``other`` last if there are more; none if no
    image has a category.
    """
    images = Counter(category or NONE for category in categories)
    if not any(categories):
        return ()
    if len(images) <= MAX_CATEGORIES:
        return tuple(sorted(images))
    images.pop(OTHER, None)
    ranked = sorted(images, key=lambda name: (-images[name], name))
    return (*sorted(ranked[: MAX_CATEGORIES - 1]), OTHER)
