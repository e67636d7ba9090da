"""Small job specs and trained-looking adapters for the tests of this room."""

from collections.abc import Sequence
from pathlib import Path

import torch

from kubelora_api.spec import JobSpec
from kubelora_trainer.adapter import AdapterModule
from kubelora_trainer.base_model import BaseModel, load_base_model
from kubelora_trainer.dataset import open_dataset
from kubelora_trainer.demo import DemoPaths
from kubelora_trainer.diffusion import SdxlObjective


def job_spec(
    training: dict[str, object] | None = None, dataset: dict[str, object] | None = None
) -> JobSpec:
    """A valid spec at resolution 64 whose places are never opened."""
    return JobSpec.model_validate(
        {
            "model": {"uri": "model"},
            "dataset": {"uri": "photos", "resolution": 64, **(dataset or {})},
            "training": {"steps": 4, **(training or {})},
            "output": {"uri": "out"},
        }
    )


def open_base(folder: Path, dtype: torch.dtype = torch.float32) -> BaseModel:
    """The demo's model on the CPU."""
    return load_base_model(folder, variant=None, vae=None, dtype=dtype, device=torch.device("cpu"))


def objective_on(base: BaseModel, demo: DemoPaths, spec: JobSpec) -> SdxlObjective:
    """The objective over the demo's photographs."""
    return SdxlObjective(base, open_dataset(demo.photos, spec.dataset), spec)


@torch.no_grad()
def fill_up_projections(modules: Sequence[AdapterModule], scale: float = 0.05) -> None:
    """Numbers in lora_B, as after training: the adapter then changes the output."""
    generator = torch.Generator().manual_seed(4)
    for module in modules:
        values = torch.randn(module.lora_b.shape, generator=generator) * scale
        module.lora_b.copy_(values)
