"""An adapter that is large because training was long is not one whose rate is too large."""

import pytest

from kubelora_trainer.health.detectors.adapter_size import grown_beyond


@pytest.mark.parametrize(
    ("sizes", "begun", "steps", "wrong"),
    [
        # As measured on the tiny model, one image a step: rates of 1e-3 and 1e-2.
        ((0.3315, 0.1), (0.0, 0.0), 160, []),
        ((0.5248, 0.1), (0.0, 0.0), 320, []),
        ((0.1, 0.364), (0.0, 0.0), 15, [1]),
        ((0.7501, 0.5384), (0.0, 0.0), 25, [0, 1]),
        # Fast, and small: a tenth of the weight after three steps.
        ((0.1, 0.1), (0.0, 0.0), 3, []),
        # Resumed, or initialised from another adapter: 0.01 were gained in four steps, then 0.1.
        ((0.51, 0.1), (0.5, 0.1), 4, []),
        ((0.6, 0.1), (0.5, 0.1), 4, [0]),
        # A size at the very start, before any step.
        ((0.5, 0.5), (0.5, 0.5), 0, []),
    ],
)
def test_a_module_is_beyond_where_it_is_large_and_became_so_fast(
    sizes: tuple[float, ...], begun: tuple[float, ...], steps: int, wrong: list[int]
) -> None:
    assert grown_beyond(0.3, sizes, begun, steps) == wrong
