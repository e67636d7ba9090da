"""Rollback, at most once, to a checkpoint from before a fault, skipping the data since.

The same data would give bit-identical weights and the same fault again. So every micro-batch seen
since that checkpoint is skipped and training continues with those that follow, as Chowdhery et al.
2022 (PaLM, sec. 5.1) did against loss spikes. This avoids a fault caused by one batch meeting one
state; a fault of the settings recurs and then fails the run.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kubelora_api.names import OutputPath
from kubelora_api.status import Finding
from kubelora_trainer.checkpoint.checkpointer import resume
from kubelora_trainer.checkpoint.directories import SavedCheckpoint, list_checkpoints
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.health.policy import sentence
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.storage.run_record import Rollback
from kubelora_trainer.utils.errors import PolicyError
from kubelora_trainer.utils.stateful import Stateful


@dataclass(frozen=True)
class RolledBackRun:
    """The restored position, and the checkpoint that other ranks restore too."""

    position: RunPosition
    saved: SavedCheckpoint
    rollback: Rollback


def roll_back_to(
    folder: OutputFolder,
    buffers: AdapterBuffers,
    parts: Mapping[str, Stateful],
    reached: RunPosition,
    finding: Finding,
    healthy_step: int,
    warn: Callable[[str], None],
) -> RolledBackRun:
    """Restore the newest checkpoint at or before ``healthy_step`` and remove later ones.

    Args:
        folder: The output directory.
        buffers: Flat buffers of the adapter.
        parts: Further components by name.
        reached: Position at which the finding was evaluated; data up to it is not used again.
        finding: The cause of the rollback.
        healthy_step: Last step that is known to be healthy.
        warn: Called with each warning.

    Raises:
        PolicyError: There is no such checkpoint.
    """
    resumed = resume(folder, buffers, parts, warn, latest_step=healthy_step)
    if resumed is None:
        raise PolicyError(
            f"{sentence(finding)} (health.policy is Rollback, but there is no checkpoint from "
            f"before step {healthy_step + 1} to roll back to)"
        )
    position, saved = resumed
    # Remove them before recording the rollback: a crash in between must not resume from them.
    for later in list_checkpoints(folder.place(OutputPath.CHECKPOINTS)):
        if later.step > saved.step:
            shutil.rmtree(later.path)
    rollback = Rollback(
        finding=finding,
        found_at=reached.step,
        back_to=position.step,
        skipped=(position.micro_step, reached.micro_step),
    )
    warn(rollback.as_finding().message)
    return RolledBackRun(position_after_rollback(position, rollback), saved, rollback)


def position_after_rollback(position: RunPosition, rollback: Rollback) -> RunPosition:
    """Add the rollback to the position of the restored checkpoint."""
    return replace(position, rollback=rollback)
