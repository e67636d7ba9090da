"""Random draws as pure functions of seed, micro-step and slot."""

import hashlib
from typing import Literal

import numpy as np

Purpose = Literal[
    "across", "down", "posterior", "noise", "timestep", "caption", "flip", "tags", "offset"
]


def draw_bits(seed: int, micro_step: int, slot: int, purpose: Purpose) -> int:
    """Draw 64 bits that are independent between any two different arguments (SHA-256).

    Args:
        seed: Seed of the run.
        micro_step: Micro-step, from 0.
        slot: Index within the micro-batch.
        purpose: What the draw is for.
    """
    return _hash(f"{purpose} {seed} {micro_step} {slot}")


def uniform(bits: int) -> float:
    """Convert the 53 highest of 64 bits to a number in [0, 1)."""
    return float((bits >> 11) * 2.0**-53)


def _generator(text: str) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(_hash(text)))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
