"""Going back, once, to a checkpoint from before a fault, and on with other data.

The same data would give the same weights to the bit and the same fault again. So every micro-batch
seen since that checkpoint is left out, and training goes on with those that follow, as Chowdhery
et al. 2022 (PaLM, sec. 5.1) did against spikes: a fault of data and state that met is passed by,
a fault of the settings comes again and then fails the run.
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
from kubelora_trainer.health.watchdog import with_finding
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.storage.run_record import Rollback
from kubelora_trainer.utils.errors import PolicyError
from kubelora_trainer.utils.stateful import Stateful


@dataclass(frozen=True)
class RolledBackRun:
    """Where training goes on from, and the checkpoint that other ranks restore too."""

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
    """Restore the newest checkpoint of ``healthy_step`` or before; later ones are removed.

    reached: where the finding was judged; none of the data up to there is used again.
    Raises PolicyError where there is no such checkpoint.
    """
    resumed = resume(folder, buffers, parts, warn, latest_step=healthy_step)
    if resumed is None:
        raise PolicyError(
            f"{sentence(finding)} (health.policy is Rollback, but no checkpoint from before step "
            f"{healthy_step + 1} is left to go back to)"
        )
    position, saved = resumed
    # Before the rollback is recorded: a crash in between must not resume from what is taken back.
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
    """The position of the checkpoint gone back to, which now remembers the rollback."""
    watch = with_finding(position.watch, rollback.as_finding())
    return replace(position, rollback=rollback, watch=watch)
