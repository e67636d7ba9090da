"""Every way a run can end badly on purpose, each once, each with its exit code.

The message is the sentence that the person at the terminal, or the job's condition, gets to read:
what was found, where, and what to do.
"""

from typing import ClassVar

from kubelora_api.names import ExitCode
from kubelora_trainer.utils.text import printable


class RunEndedError(Exception):
    """A run stops with a sentence and an exit code of the contract."""

    exit_code: ClassVar[ExitCode]
    alike = False
    """Whether all ranks end with this very sentence; the first of each node then says it alone."""
    reported_elsewhere = False
    """Whether a rank before this one says it, so that it need not be said as often as it is met."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(printable(sentence))


class ConfigurationError(RunEndedError):
    """Job file, model, data or output place are wrong; trying again would not help."""

    exit_code = ExitCode.CONFIGURATION


class ModelError(ConfigurationError):
    """The base model, its single file or the LoRA to start from is missing, damaged or no SDXL."""


class DatasetError(ConfigurationError):
    """Images, captions, metadata or tables of the dataset can't be used."""


class OutputError(ConfigurationError):
    """The output folder, its manifest or a checkpoint can't be read, written or continued."""


class StorageError(ConfigurationError):
    """A URI, a download or a bucket can't be resolved, fetched or written to."""


class NumericalError(RunEndedError):
    """Training would be, or was, numerically wrong."""

    exit_code = ExitCode.NUMERICAL


class PolicyError(NumericalError):
    """A critical finding that ``health.policy`` lets no run go on from; the state was saved."""


class SuspendedByPolicyError(RunEndedError):
    """A critical finding under ``health.policy: Suspend``; a checkpoint waits for the user."""

    exit_code = ExitCode.HELD


class PeerLostError(RunEndedError):
    """Another rank of the run went away; never the cause, which is in that rank's words."""

    exit_code = ExitCode.PEER_LOST


class PeerTimeoutError(RunEndedError):
    """Another rank of the run lives on without a word; it can't tell the cause itself."""

    exit_code = ExitCode.INTERNAL


class UploadError(RunEndedError):
    """The adapter is done, but copying it elsewhere failed in a way that may pass."""

    exit_code = ExitCode.INTERNAL


class InterruptedRunError(RunEndedError):
    """Stopped on request, after a checkpoint."""

    exit_code = ExitCode.INTERRUPTED
