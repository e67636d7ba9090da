"""Gradient clipping, by hand."""

import pytest
import torch

from kubelora_trainer.optim.clipping import clip_coefficient


def test_clipping_scales_to_the_norm_and_leaves_smaller_gradients_alone() -> None:
    # (3, 4) has norm 5; clipped to 1 it is (0.6, 0.8).
    assert float(clip_coefficient(torch.tensor(5.0), 1.0)) == pytest.approx(0.2, rel=1e-6)
    assert float(clip_coefficient(torch.tensor(0.5), 1.0)) == 1.0
    assert float(clip_coefficient(torch.tensor(5.0), 0.0)) == 1.0
    assert float(clip_coefficient(torch.tensor(float("nan")), 1.0)) == 1.0
