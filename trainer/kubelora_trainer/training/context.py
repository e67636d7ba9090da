"""A run as its parts share it: the job, what surrounds it, and a way to say something."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kubelora_api.job import LoraTrainingJob
from kubelora_api.status import Artifact
from kubelora_trainer.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from kubelora_trainer.distributed.topology import SINGLE_RANK, RankInfo
from kubelora_trainer.reporting.prometheus import Exporter
from kubelora_trainer.reporting.trackers import TrackerSet
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.utils.signals import StopRequest


@dataclass(frozen=True)
class RunOptions:
    """What the command line and the pod's environment say beside the job.

    mounts: folder of each claim that ``--mount`` names. attempt: the operator's count, None
    locally. resume_command: what to type to go on after an interruption. seat: the place of this
    process among several ranks.
    """

    mounts: Mapping[str, Path]
    metrics_port: int | None
    attempt: int | None
    termination_log: Path | None
    resume_command: str
    rank_info: RankInfo = SINGLE_RANK

    @property
    def in_pod(self) -> bool:
        """Whether an operator counts the attempts."""
        return self.attempt is not None


class Run:
    """A run in progress: where it reports to, and what it says.

    exported: what is recorded as done already; no later failure takes it back.
    """

    def __init__(
        self, job: LoraTrainingJob, options: RunOptions, stop: StopRequest, console: Console
    ) -> None:
        self.job, self.options, self.stop, self.console = job, options, stop, console
        self.begun = time.monotonic()
        self.folder: OutputFolder | None = None
        self.exporter: Exporter | None = None
        self.exported: list[Artifact] = []
        self.tracking: TrackerSet | None = None
        self.process_group: ProcessGroup = SINGLE_PROCESS

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes."""
        return self.options.rank_info.rank == 0

    def say(self, sentence: str) -> None:
        """One line for the person, or the pod's log."""
        self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def warn(self, sentence: str) -> None:
        """A line that must not be missed."""
        self.say(f"warning: {sentence}")

    def warn_alone(self, sentence: str) -> None:
        """A warning that other ranks may have no reason for; here not rank 0 alone speaks."""
        if self.first:
            self.warn(sentence)
        else:
            print(f"warning: rank {self.options.rank_info.rank}: {sentence}", flush=True)
