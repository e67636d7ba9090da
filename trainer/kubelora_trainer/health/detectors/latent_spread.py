"""Detection of a category whose latents have no content, or are not scaled as they should be.

A VAE that overflows in half precision, or a cache filled by one, gives latents that are all alike;
the loss then looks fine, because noise on nothing is easy to predict. Latents that were never
scaled drown the noise instead, and the loss looks even better. Each image is read once, when its
latent is first used.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kubelora_api.status import Finding
from kubelora_api.thresholds import LATENTS_CONSTANT, LATENTS_UNSCALED, Event
from kubelora_trainer.health.detector import Detector, Judgement
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts
from kubelora_trainer.telemetry.step_metrics import StepNumbers

_LEAST = LATENTS_CONSTANT.limit or 0.0
_MOST = LATENTS_UNSCALED.limit or math.inf
ENOUGH_IMAGES = 8
"""Images of a category after which it is judged, or all of them where it has fewer."""


@dataclass
class _Category:
    """fp64 sums by channel over the images seen."""

    wanted: int
    images: int = 0
    elements: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def add(self, latent: Tensor) -> None:
        values = latent.detach().double().cpu().flatten(1)
        self.images += 1
        self.elements += values.shape[1]
        self.total = self.total + values.sum(1)
        self.squares = self.squares + values.square().sum(1)

    @property
    def deviation(self) -> float:
        """Of the channel that varies most, over all positions of all images seen."""
        mean = self.total / self.elements
        variance = (self.squares / self.elements - mean.square()).clamp(min=0)
        return float(variance.sqrt().max())


class LatentSpread(Detector):
    """The deviation of latents, category by category.

    categories: of each sample, in the dataset's order; empty for none.
    """

    rows = (LATENTS_CONSTANT, LATENTS_UNSCALED)

    def __init__(self, categories: Sequence[str]) -> None:
        self._categories = categories
        self._seen: set[int] = set()
        self._by_name = {
            name: _Category(min(ENOUGH_IMAGES, count))
            for name, count in Counter(categories).items()
        }
        self._judged: dict[str, float] = {}

    def on_micro_batch(self, facts: MicroBatchFacts) -> None:
        """Read the latents of images that are used for the first time; waits for the device."""
        for place, sample in enumerate(facts.samples):
            if self._wants(sample):
                self._add(sample, facts.latent(place))

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Raise, once each, what is wrong with a category on either side."""
        found = (f for f in self.findings(numbers.step) if f.name not in known.found)
        return Judgement(tuple(found))

    def _wants(self, sample: int) -> bool:
        """Return whether this sample's latent is still to be read."""
        if not self._categories:
            return False
        category = self._by_name[self._categories[sample]]
        return sample not in self._seen and category.images < category.wanted

    def _add(self, sample: int, latent: Tensor) -> None:
        """Add the scaled latent (channels, h, w) of a sample that is wanted."""
        name = self._categories[sample]
        category = self._by_name[name]
        self._seen.add(sample)
        category.add(latent)
        if category.images == category.wanted:
            self._judged[name] = category.deviation

    def findings(self, step: int) -> tuple[Finding, ...]:
        """Return what is wrong with the worst category on either side, as found in ``step``."""
        if not self._judged:
            return ()
        least = min(self._judged, key=lambda name: self._judged[name])
        most = max(self._judged, key=lambda name: self._judged[name])
        found = []
        if self._judged[least] < _LEAST:
            found.append(self._finding(LATENTS_CONSTANT, least, step))
        if self._judged[most] > _MOST:
            found.append(self._finding(LATENTS_UNSCALED, most, step))
        return tuple(found)

    def _finding(self, event: Event, name: str, step: int) -> Finding:
        return Finding(
            name=event.finding,
            severity=event.severity,
            group=name or None,
            value=self._judged[name],
            threshold=event.limit,
            since_step=step,
            message=event.sentence,
        )
