"""Collective steps around training: rendezvous, output claim, resume, and comparison of inputs.

Only rank 0 writes. Whatever must be equal on all ranks is either broadcast by rank 0 or compared: a
node with other data or another model would train on it silently.
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
from kubelora_trainer.utils.device_faults import allotted_devices
from kubelora_trainer.utils.errors import (
    ConfigurationError,
    DeviceError,
    PeerLostError,
    PeerTimeoutError,
    RunEndedError,
)
from kubelora_trainer.utils.stateful import Stateful


def join_ranks(run: Run) -> ProcessGroup:
    """Form the process group of all ranks.

    Raises InterruptedRunError, PeerLostError, and ConfigurationError or, in a pod, DeviceError if
    there are too few GPUs.
    """
    rank_info, spec = run.options.rank_info, run.job.spec
    if rank_info.size == 1:
        return SINGLE_PROCESS
    device = choose_device(spec, torch.cuda.is_available())
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count < rank_info.ranks_per_node:
            found = (
                f"workers.gpusPerNode is {rank_info.ranks_per_node}, but {count} GPUs are usable"
            )
            if run.options.in_pod:  # the scheduler has chosen a node that has as many
                raise DeviceError(f"{found}; device: {allotted_devices() or 'unknown'}")
            raise ConfigurationError(f"{found} here; lower it, or use a machine with more")
        torch.cuda.set_device(rank_info.local_rank)
    return init_process_group_of(rank_info, device, lambda: run.stop.requested)


def claim_output_on_all_ranks(run: Run, place: Path) -> OutputFolder | Manifest:
    """Claim the output directory on rank 0; return the manifest if the run is already done."""
    return run_on_rank0(
        run.process_group, lambda: claim_output(place, run.job, run.options.attempt, run.warn)
    )


def resume_on_all_ranks(
    run: Run,
    folder: OutputFolder,
    buffers: AdapterBuffers,
    parts: Mapping[str, Stateful],
) -> tuple[RunPosition, SavedCheckpoint] | None:
    """Restore, on every rank, the checkpoint that rank 0 found valid; None if there is none.

    Args:
        run: The run.
        folder: The output directory.
        buffers: Flat buffers of the adapter.
        parts: Further components by name.

    Raises:
        ConfigurationError: Another rank cannot read the checkpoint.
    """
    position: RunPosition | None = None

    def on_rank0() -> SavedCheckpoint | None:
        nonlocal position
        resumed = resume(folder, buffers, parts, run.warn)
        if resumed is None:
            return None
        position, saved = resumed
        return saved

    saved = run_on_rank0(run.process_group, on_rank0)
    if saved is None:
        return None
    return position or resume_from(saved, folder, buffers, parts), saved


def wait_for_rank0_to_end(run: Run, ended: RunEndedError) -> None:
    """If all ranks end for the same reason, wait for rank 0, which saves and reports for all.

    The launcher gives ranks little time after another one's failure.
    """
    if ended.same_on_all_ranks and not run.first:
        with suppress(PeerLostError, PeerTimeoutError):
            run.process_group.broadcast_object(None)


def compare(
    process_group: ProcessGroup,
    inputs: TrainingInputs,
    buffers: AdapterBuffers,
    position: RunPosition,
) -> None:
    """Check that all ranks see the same model, data and starting point.

    Args:
        process_group: The ranks.
        inputs: This rank's inputs.
        buffers: This rank's weights.
        position: This rank's position.

    Raises:
        ConfigurationError: They differ; raised on every rank.
    """
    if process_group.share.size == 1:
        return  # skip reading the entire model
    unet = inputs.base.unet
    own = {
        "the data": inputs.dataset.digest(),
        "the base model": sum(int(checksum(p.detach())) for p in unet.parameters()),
        "the adapter's weights": int(checksum(buffers.masters)),
        "the step to resume from": (position.step, position.micro_step),
    }
    everyone = process_group.all_gather_object(own)
    for rank, theirs in enumerate(everyone):
        different = [what for what in own if theirs[what] != everyone[0][what]]
        if different:
            differ = ConfigurationError(
                f"rank {rank} and rank 0 differ in {' and '.join(different)}; all nodes must see "
                "the same files and run the same versions"
            )
            differ.same_on_all_ranks = True
            raise differ
