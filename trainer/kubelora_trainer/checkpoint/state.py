"""The state of a run that a checkpoint records."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.storage.run_record import Rollback


@dataclass(frozen=True)
class RunPosition:
    """Progress of a run, apart from its tensors.

    Attributes:
        step: Optimizer steps done.
        micro_step: Micro-steps done in the entire run.
        window_samples: Samples seen in the unfinished window.
        window_loss: Sum of their losses, a fp64 scalar that stays on the device so that no
            micro-step waits for it.
        norm_range: Smallest and largest total gradient norm so far, without the first steps.
        useful_seconds: Time spent on the steps done, over all attempts.
        watch: State of the watchdog.
        rollback: What a rollback skipped, if there was one.
    """

    step: int = 0
    micro_step: int = 0
    window_samples: int = 0
    window_loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    norm_range: tuple[float, float] | None = None
    useful_seconds: float = 0.0
    watch: WatchState = field(default_factory=WatchState)
    rollback: Rollback | None = None

    @property
    def skipped(self) -> int:
        """Number of micro-steps by which the data is ahead."""
        return self.rollback.skipped[1] - self.rollback.skipped[0] if self.rollback else 0


class CheckpointManifest(BaseModel):
    """The content of ``checkpoint.json``.

    Attributes:
        layout: Name and shape of each factor, in the buffers' order.
        parts: Scalar state of each component.
        files: sha256 by file name.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    format: Literal[2] = 2
    run_id: str
    attempt: int
    step: int
    micro_step: int
    window_micro_steps: int
    window_samples: int
    window_loss: float
    norm_range: tuple[float, float] | None
    useful_seconds: float = 0.0
    watch: dict[str, Any]
    rollback: Rollback | None = None
    layout: list[tuple[str, tuple[int, ...]]]
    parts: dict[str, JsonObject]
    files: dict[str, str]
