"""Context that the parts of a run share: the job, its environment, and its output to the user."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kubelora_api.job import LoraTrainingJob
from kubelora_api.status import Artifact
from kubelora_trainer.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from kubelora_trainer.distributed.topology import SINGLE_RANK, RankInfo
from kubelora_trainer.optim.precision import plan_precision
from kubelora_trainer.reporting.http_server import Exporter
from kubelora_trainer.reporting.trackers import TrackerSet
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.utils.logs import LogFormat
from kubelora_trainer.utils.signals import StopRequest

logger = logging.getLogger(__name__)


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
    log_format: LogFormat = "plain"

    @property
    def in_pod(self) -> bool:
        """True if an operator counts the attempts."""
        return self.attempt is not None


class Run:
    """A run in progress, and its output to the user.

    exported: artifacts already recorded as done, which no later failure undoes.
    device_label: model and UUID of this rank's GPU, for messages; empty on a CPU.
    """

    def __init__(
        self, job: LoraTrainingJob, options: RunOptions, stop: StopRequest, console: Console
    ) -> None:
        self.job, self.options, self.stop, self.console = job, options, stop, console
        self.precision = plan_precision(job.spec.precision)
        self.begun = time.monotonic()
        self.folder: OutputFolder | None = None
        self.exporter: Exporter | None = None
        self.exported: list[Artifact] = []
        self.tracking: TrackerSet | None = None
        self.device_label = ""
        self.process_group: ProcessGroup = SINGLE_PROCESS

    @property
    def first(self) -> bool:
        """True on rank 0, which alone writes files."""
        return self.options.rank_info.rank == 0

    def warn(self, sentence: str) -> None:
        """Log, on rank 0 alone, a warning that concerns all ranks."""
        if self.first:
            logger.warning(sentence)

    def warn_alone(self, sentence: str) -> None:
        """Log a warning that may concern only this rank, even if it is not rank 0."""
        logger.warning(sentence)
