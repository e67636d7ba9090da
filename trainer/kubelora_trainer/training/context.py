"""Context that the parts of a run share: the job, its environment, and its output to the user."""

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
    """Options from the command line and the pod's environment.

    Attributes:
        mounts: Directory of each claim given by ``--mount``.
        metrics_port: Port of the metrics server; None is the default.
        attempt: The operator's attempt number; None outside a cluster.
        termination_log: File of the pod's termination message.
        resume_command: Command that resumes an interrupted run.
        rank_info: This process among the ranks.
    """

    mounts: Mapping[str, Path]
    metrics_port: int | None
    attempt: int | None
    termination_log: Path | None
    resume_command: str
    rank_info: RankInfo = SINGLE_RANK

    @property
    def in_pod(self) -> bool:
        """True if an operator counts the attempts."""
        return self.attempt is not None


class Run:
    """A run in progress, and its output to the user.

    exported: artifacts already recorded as done, which no later failure undoes.
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
        """True on rank 0, which alone writes files."""
        return self.options.rank_info.rank == 0

    def say(self, sentence: str) -> None:
        """Print one line for the user or the pod's log."""
        self.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def warn(self, sentence: str) -> None:
        """Print a warning."""
        self.say(f"warning: {sentence}")

    def warn_alone(self, sentence: str) -> None:
        """Print a warning that may concern only this rank, even if it is not rank 0."""
        if self.first:
            self.warn(sentence)
        else:
            print(f"warning: rank {self.options.rank_info.rank}: {sentence}", flush=True)
