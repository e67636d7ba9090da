"""Random draws as pure functions of seed, micro-step and slot."""

import hashlib
from typing import Literal

import numpy as np

Purpose = Literal[
    "across", "down", "posterior", "noise", "timestep", "caption", "flip", "tags", "offset"
]


def draw_bits(seed: int, micro_step: int, slot: int, purpose: Purpose) -> int:
    """Derive 64 random bits from the arguments (SHA-256); no two sets of arguments are related.

    Args:
        seed: Seed of the run.
        micro_step: Micro-step, from 0.
        slot: Position of the sample in the micro-batch.
        purpose: What the bits are used for.

    Returns:
        An integer of 64 bits.
    """
    return _hash(f"{purpose} {seed} {micro_step} {slot}")


def uniform(bits: int) -> float:
    """Turn the highest 53 of 64 bits, as many as a double holds, into a number in [0, 1)."""
    return float((bits >> 11) * 2.0**-53)


def _generator(text: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(_hash(text)))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
