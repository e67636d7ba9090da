"""What the ranks of a run do as one around training: meet, claim, resume, and compare notes.

Rank 0 alone writes. What must be the same everywhere is either told by it or compared; a node that
sees other data or another model would train on it silently.
"""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from kubelora_trainer.checkpoint.checkpointer import resume, resume_from
from kubelora_trainer.checkpoint.directories import SavedCheckpoint
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.distributed.process_group import SINGLE_PROCESS, ProcessGroup, run_on_rank0
from kubelora_trainer.distributed.reduce_payload import checksum
from kubelora_trainer.distributed.rendezvous import init_process_group_of
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.storage.output_dir import Manifest, OutputFolder, claim_output
from kubelora_trainer.training.context import Run
from kubelora_trainer.training.setup import TrainingInputs
from kubelora_trainer.utils.device import choose_device
from kubelora_trainer.utils.errors import (
    ConfigurationError,
    PeerLostError,
    PeerTimeoutError,
    RunEndedError,
)
from kubelora_trainer.utils.stateful import Stateful


def join_ranks(run: Run) -> ProcessGroup:
    """Join all ranks of the run.

    Raises InterruptedRunError, PeerLostError, and ConfigurationError for a lack of GPUs.
    """
    rank_info, spec = run.options.rank_info, run.job.spec
    if rank_info.size == 1:
        return SINGLE_PROCESS
    device = choose_device(spec, torch.cuda.is_available())
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count < rank_info.ranks_per_node:
            raise ConfigurationError(
                f"workers.gpusPerNode is {rank_info.ranks_per_node}, but this machine has {count} "
                "usable GPUs; lower it, or train where there are as many"
            )
        torch.cuda.set_device(rank_info.local_rank)
    return init_process_group_of(rank_info, device, lambda: run.stop.requested)


def claim_output_on_all_ranks(run: Run, place: Path) -> OutputFolder | Manifest:
    """The output folder that rank 0 has claimed for all, or the manifest of a run that is done."""
    return run_on_rank0(
        run.process_group, lambda: claim_output(place, run.job, run.options.attempt, run.warn)
    )


def resume_on_all_ranks(
    run: Run,
    folder: OutputFolder,
    buffers: AdapterBuffers,
    parts: Mapping[str, Stateful],
) -> tuple[RunPosition, SavedCheckpoint] | None:
    """On every rank the checkpoint that rank 0 found good; None where there is none.

    Raises ConfigurationError where another rank can't read it.
    """
    position: RunPosition | None = None

    def of_first() -> SavedCheckpoint | None:
        nonlocal position
        resumed = resume(folder, buffers, parts, run.warn)
        if resumed is None:
            return None
        position, saved = resumed
        return saved

    saved = run_on_rank0(run.process_group, of_first)
    if saved is None:
        return None
    return position or resume_from(saved, folder, buffers, parts), saved


def wait_for_rank0_to_end(run: Run, ended: RunEndedError) -> None:
    """Where all end alike, wait for rank 0, which saves and tells for all.

    The launcher gives ranks little time after another one's failure.
    """
    if ended.alike and not run.first:
        with suppress(PeerLostError, PeerTimeoutError):
            run.process_group.broadcast_object(None)


def compare(
    process_group: ProcessGroup,
    inputs: TrainingInputs,
    buffers: AdapterBuffers,
    position: RunPosition,
) -> None:
    """Raise ConfigurationError, on every rank, unless all see the same model, data and start."""
    if process_group.share.size == 1:
        return  # reading the whole model would be for nothing
    unet = inputs.base.unet
    own = {
        "the data": inputs.dataset.digest(),
        "the base model": sum(int(checksum(p.detach())) for p in unet.parameters()),
        "the adapter's weights": int(checksum(buffers.masters)),
        "the step to go on from": (position.step, position.micro_step),
    }
    everyone = process_group.all_gather_object(own)
    for rank, theirs in enumerate(everyone):
        odd = [what for what in own if theirs[what] != everyone[0][what]]
        if odd:
            differ = ConfigurationError(
                f"rank {rank} and rank 0 differ in {' and '.join(odd)}; all nodes must see the "
                "same files and run the same versions"
            )
            differ.alike = True
            raise differ
