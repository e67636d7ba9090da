"""Exceptions that end a run, each with its exit code.

The message is what the user reads in the terminal or in the job's condition: what was found, where,
and what to do.
"""

from typing import ClassVar

from kubelora_api.names import ExitCode
from kubelora_trainer.utils.text import printable


class RunEndedError(Exception):
    """A run ends with a message and a documented exit code."""

    exit_code: ClassVar[ExitCode]
    same_on_all_ranks = False
    """True if all ranks end with the same message; only each node's first rank then logs it."""
    reported_elsewhere = False
    """True if a lower rank logs the same message, so that it is logged only once."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(printable(sentence))


class ConfigurationError(RunEndedError):
    """The job file, model, data or output is wrong; a retry would not help."""

    exit_code = ExitCode.CONFIGURATION


class ModelError(ConfigurationError):
    """The base model, single file or initial LoRA is missing, damaged or not SDXL."""


class DatasetError(ConfigurationError):
    """Images, captions, metadata or tables of the dataset cannot be used."""


class OutputError(ConfigurationError):
    """The output directory, its manifest or a checkpoint cannot be read, written or resumed."""


class StorageError(ConfigurationError):
    """A URI, download or bucket cannot be resolved, read or written."""


class NumericalError(RunEndedError):
    """Training is numerically wrong, or would be."""

    exit_code = ExitCode.NUMERICAL

    def __init__(self, sentence: str = "", *, named: bool = False) -> None:
        """named: whether the sentence names the sample that is the cause."""
        super().__init__(sentence)
        self.named = named


class PolicyError(NumericalError):
    """A critical finding after which ``health.policy`` ends the run; the state was saved."""


class SuspendedByPolicyError(RunEndedError):
    """A critical finding under ``health.policy: Suspend``; a checkpoint waits for the user."""

    exit_code = ExitCode.HELD


class OutOfMemoryError(RunEndedError):
    """The memory of the GPU or of the machine ran out."""

    exit_code = ExitCode.OUT_OF_MEMORY


class DeviceError(RunEndedError):
    """The GPU or its driver failed, or cannot be used; no setting of the job changes that."""

    exit_code = ExitCode.DEVICE


class PeerLostError(RunEndedError):
    """Another rank went away. This is never the cause, which is in the other rank's log."""

    exit_code = ExitCode.PEER_LOST


class PeerTimeoutError(RunEndedError):
    """Another rank is alive but does not respond, and cannot report the cause itself."""

    exit_code = ExitCode.INTERNAL


class UploadError(RunEndedError):
    """The adapter is finished, but its upload failed in a way that a retry may fix."""

    exit_code = ExitCode.INTERNAL


class InterruptedRunError(RunEndedError):
    """The run stopped on request, after a checkpoint."""

    exit_code = ExitCode.INTERRUPTED
