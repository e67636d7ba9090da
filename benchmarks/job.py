"""The benchmark's job: the quickstart's, its latents fixed so that they are encoded once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def bench_document(
    model: Path,
    photos: Path,
    output: Path,
    *,
    dataset: dict[str, Any] | None = None,
    steps: int = 100_000,
    rank: int = 8,
    accumulation: int = 4,
    more: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """A LoraTrainingJob on the demo, in micro-batches of one, on the CPU.

    more: fields of ``spec`` by group, which replace those here.
    """
    document: dict[str, Any] = {
        "apiVersion": "kubelora.dev/v1alpha1",
        "kind": "LoraTrainingJob",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"uri": str(model)},
            "dataset": {
                "uri": str(photos),
                "resolution": 64,
                "crop": "center",
                **(dataset or {}),
            },
            "adapter": {"rank": rank},
            "training": {"steps": steps, "gradientAccumulation": accumulation, "device": "cpu"},
            "output": {"uri": str(output)},
            "workers": {"gpusPerNode": 0},
        },
    }
    spec = document["spec"]
    for group, fields in (more or {}).items():
        spec[group] = {**spec.get(group, {}), **fields}
    if spec["training"]["device"] == "cuda":
        spec["workers"] = {"gpusPerNode": 1}
    return document
