"""Alternating measurement: every round runs each side once, in a new order.

A busy machine slows neighbours in time alike, so rounds are compared as wholes: the interval comes
from drawing whole rounds again (bootstrap), not from single times.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """Mean time of one side over another's, with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def measure_rounds(
    sides: Mapping[str, Callable[[], None]],
    rounds: int,
    *,
    warm_up: int,
    seed: int = 0,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds of each side in each round. The order within a round is drawn anew.

    warm_up: rounds that are run and not counted. clock: the process' CPU time, all its threads.
    """
    order = list(sides)
    shuffle = random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(warm_up + rounds):
        shuffle(order)
        for name in order:
            begun = clock()
            sides[name]()
            if turn >= warm_up:
                times[name].append(clock() - begun)
    return times


def ratio_of(
    numerator: Sequence[float], denominator: Sequence[float], *, draws: int = 4000, seed: int = 0
) -> Ratio:
    """``mean(numerator) / mean(denominator)`` over rounds, paired by their position.

    The interval is the percentile bootstrap's, from ``draws`` resamples of whole rounds.
    """
    over, under = np.asarray(numerator), np.asarray(denominator)
    if over.shape != under.shape or not over.size:
        raise ValueError("both sides must have been measured in every round")
    chosen = np.random.default_rng(seed).integers(0, over.size, size=(draws, over.size))
    ratios = over[chosen].mean(axis=1) / under[chosen].mean(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Ratio(float(over.mean() / under.mean()), float(low), float(high))
