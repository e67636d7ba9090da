"""The number of a pod's series does not grow with the adapter."""

import json
from pathlib import Path

import torch
import yaml
from diffusers import UNet2DConditionModel
from prometheus_client import CollectorRegistry, generate_latest
from torch import nn

from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.lora.adapter import block_of
from kubelora_trainer.lora.target_modules import target_names
from kubelora_trainer.optim.flat_buffers import AdapterBuffers, Factor
from kubelora_trainer.reporting.metrics import TrainerMetrics
from kubelora_trainer.telemetry.category_losses import MAX_CATEGORIES
from kubelora_trainer.telemetry.step_metrics import CategoryLoss, GroupNumbers, StepNumbers
from tests.trainer.fixtures.engine import DEFAULT

ROOT = Path(__file__).parents[3]
MOST_SERIES = 400
MOST_GROUPS = 24
GROUP = GroupNumbers(1.0, 0.1, 0.0, 0, 0.0, 0.0, 0.0)


def series(groups: list[str]) -> int:
    """Series of a pod that has shown a step with these groups and as many categories as may be."""
    registry = CollectorRegistry()
    categories = {f"category {i}": CategoryLoss(1.0, 1) for i in range(MAX_CATEGORIES)}
    numbers = StepNumbers(
        *(1, 1e-4, 1.0, 8, 1.0, dict.fromkeys(groups, GROUP), [1.0], [1.0]),
        category_losses=categories,
    )
    families = TrainerMetrics(registry, DEFAULT)
    families.publish(numbers, WatchState(), seconds=1.0)
    text = generate_latest(registry).decode()
    return sum(1 for line in text.splitlines() if not line.startswith("#"))


def sdxl_groups(config: Path, targets: str, copies: int) -> list[str]:
    """Groups of adapters on every target of a UNet with SDXL's blocks and depths."""
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(json.loads(config.read_text()))
    factors = [
        Factor(f"{name}.{copy}", f"{block_of(name)}.{factor}", nn.Parameter(torch.zeros(1, 1)))
        for name in target_names(unet, targets)
        for copy in range(copies)
        for factor in ("lora_A", "lora_B")
    ]
    assert len(factors) > 1_000 * copies
    return [group.name for group in AdapterBuffers(factors, DEFAULT).groups]


def test_an_adapter_on_all_of_sdxl_has_as_many_series_as_ten_times_it(full_demo: DemoPaths) -> None:
    config = full_demo.model / "unet" / "config.json"
    of_sdxl = sdxl_groups(config, "all", copies=1)
    assert len(of_sdxl) == 8  # down, mid, up and embed, two factors each
    assert sdxl_groups(config, "all", copies=10) == of_sdxl
    assert series(of_sdxl) < 250


def test_the_most_groups_and_categories_stay_within_the_bound() -> None:
    assert series([f"group{i}" for i in range(MOST_GROUPS)]) <= MOST_SERIES


def test_the_charts_sample_limit_leaves_room_for_twice_the_series_of_a_pod() -> None:
    values = yaml.safe_load((ROOT / "charts" / "kubelora" / "values.yaml").read_text())
    limit = values["monitoring"]["podMonitor"]["sampleLimit"]
    most = series([f"group {i}" for i in range(MOST_GROUPS)])
    assert 2 * most <= limit <= 4 * most
