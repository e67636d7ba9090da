"""TensorBoard, Weights & Biases and MLflow, through accelerate's trackers.

Trackers are optional; the run log is the record. If a tracker fails (no network, no login, a full
disk), the failure is reported once, that tracker is disabled, and the run continues.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from accelerate import PartialState
from accelerate.tracking import MLflowTracker, TensorBoardTracker, WandBTracker
from PIL import Image

from kubelora_api.names import ExitCode, OutputPath
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.telemetry.step_metrics import StepNumbers

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
MLFLOW_RUN_TAG = "kubelora.run_id"
_MLFLOW_ENDS = {
    ExitCode.DONE: "FINISHED",
    ExitCode.INTERRUPTED: "KILLED",
    ExitCode.HELD: "KILLED",
}
"""Status by exit code: a run that will resume has not failed."""


class Tracker(Protocol):
    """The interface of a tracker."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Record numbers of an optimizer step."""

    def log_images(self, paths: Sequence[Path], step: int) -> None:
        """Record sample images, one per prompt."""

    def finish(self, exit_code: ExitCode) -> None:
        """Flush, and record how the attempt ended."""


@dataclass
class TensorBoard:
    """Event files in the output directory.

    A new writer with ``purge_step`` makes TensorBoard drop the earlier writer's steps from there
    on: those that are repeated after an interruption or a rollback.
    """

    open_writer: Callable[[int], Any]
    reached: int
    tracker: Any

    @classmethod
    def open(cls, folder: OutputFolder, project: str, step: int) -> "TensorBoard":
        """Start writing after ``step``; later steps of an earlier attempt are dropped.

        Args:
            folder: The output directory.
            project: Name of the project.
            step: Step that the run resumes from.
        """
        place = folder.place(OutputPath.TENSORBOARD)

        def open_writer(done: int) -> Any:
            return _started(TensorBoardTracker(project, place, purge_step=done + 1))

        return cls(open_writer, step, open_writer(step))

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        if step <= self.reached:
            self.tracker.finish()
            self.tracker = self.open_writer(step - 1)
        self.reached = step
        self.tracker.log(values, step=step)

    def log_images(self, paths: Sequence[Path], step: int) -> None:
        """See `Tracker`."""
        for number, path in enumerate(paths):
            pixels = np.asarray(_opened(path))[None]
            self.tracker.log_images({f"samples/{number}": pixels}, step=step, dataformats="NHWC")

    def finish(self, exit_code: ExitCode) -> None:
        """Close the writer; event files have no final status. See `Tracker`."""
        self.tracker.finish()


@dataclass
class WandB:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it only in the output directory.

    reached: the newest step it holds. Steps cannot be removed, so repeated ones are ignored.
    """

    tracker: Any
    reached: int

    @classmethod
    def open(cls, folder: OutputFolder, project: str, step: int) -> "WandB":
        """Resume the run of the same id. Offline, `wandb sync` joins the parts.

        Args:
            folder: The output directory.
            project: Name of the project.
            step: Step that the run resumes from.
        """
        tracker = WandBTracker(
            project,
            name=folder.job.metadata.name,
            id=_identity(folder, step),
            resume="allow",
            dir=str(folder.path),
            config=folder.job.recorded_document(),
        )
        _started(tracker)
        return cls(tracker, max(step, tracker.tracker.step - 1))

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        if step > self.reached:
            self.reached = step
            self.tracker.log(values, step=step)

    def log_images(self, paths: Sequence[Path], step: int) -> None:
        """See `Tracker`."""
        if step >= self.reached:
            for number, path in enumerate(paths):
                self.tracker.log_images({f"samples/{number}": [_opened(path)]}, step=step)

    def finish(self, exit_code: ExitCode) -> None:
        """See `Tracker`."""
        self.tracker.tracker.finish(int(exit_code))


@dataclass
class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in the output directory.

    reached: the newest step it holds; repeated steps are ignored.
    """

    tracker: Any
    reached: int

    @classmethod
    def open(cls, folder: OutputFolder, project: str, step: int) -> "MLflow":
        """Resume the run of the same id.

        Args:
            folder: The output directory.
            project: Name of the project.
            step: Step that the run resumes from.
        """
        # By default MLflow retries for minutes, which would block a training step.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow

        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            # MLflow discourages plain directories, but this one needs no server and no database.
            os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
            place = folder.place(OutputPath.MLFLOW).as_uri()
        mlflow.set_tracking_uri(place)
        identity = _identity(folder, step)
        earlier = mlflow.search_runs(
            search_all_experiments=True,
            filter_string=f"tags.`{MLFLOW_RUN_TAG}` = '{identity}'",
            output_format="list",
        )
        run_id = earlier[0].info.run_id if earlier else None
        tracker = MLflowTracker(
            project,
            run_name=folder.job.metadata.name,
            run_id=run_id,
            tags={MLFLOW_RUN_TAG: identity},
        )
        held = mlflow.MlflowClient().get_metric_history(run_id, "loss") if run_id else []
        return cls(_started(tracker), max([step, *(metric.step for metric in held)]))

    def log(self, values: dict[str, float], step: int) -> None:
        """See `Tracker`."""
        if step > self.reached:
            self.tracker.log(values, step=step)
            self.reached = step

    def log_images(self, paths: Sequence[Path], step: int) -> None:
        """See `Tracker`."""
        for path in paths:
            self.tracker.log_artifact(str(path), "samples")

    def finish(self, exit_code: ExitCode) -> None:
        """See `Tracker`."""
        import mlflow

        mlflow.end_run(_MLFLOW_ENDS.get(exit_code, "FAILED"))


_KINDS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


class TrackerSet:
    """All trackers of a run; each is disabled at its first failure.

    warn: called once for each tracker that fails.
    """

    def __init__(self, trackers: dict[str, Tracker], warn: Callable[[str], None]) -> None:
        self._trackers, self._warn = trackers, warn

    def log(self, numbers: StepNumbers) -> None:
        """Record one optimizer step."""
        values = {
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "learning_rate": numbers.learning_rate,
            **{f"loss/{name}": c.loss for name, c in numbers.category_losses.items()},
        }
        self._each(lambda tracker: tracker.log(values, numbers.step))

    def log_samples(self, paths: Sequence[Path], step: int) -> None:
        """Record the sample images of a step."""
        if paths:
            self._each(lambda tracker: tracker.log_images(paths, step))

    def finish(self, exit_code: ExitCode) -> None:
        """Flush all trackers and record how the run ended; nothing is tracked afterwards."""
        self._each(lambda tracker: tracker.finish(exit_code))
        self._trackers = {}

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # no error of a tracker may end a run
                del self._trackers[name]
                self._warn(_sentence(name, error))


def build_trackers(folder: OutputFolder, step: int, warn: Callable[[str], None]) -> TrackerSet:
    """Build the trackers of ``spec.tracking``, without those that fail to start.

    Args:
        folder: The output directory.
        step: Step that the run resumes from.
        warn: Called with each warning.
    """
    settings = folder.job.spec.tracking
    opened: dict[str, Tracker] = {}
    if settings.trackers:
        PartialState()  # accelerate's loggers need it
    for name in settings.trackers:
        try:
            opened[name] = _KINDS[name].open(folder, settings.project, step)
        except ImportError:
            warn(
                f"tracking: {name} is not installed; continuing without it. To use it: "
                f"pip install {PACKAGES[name]}"
            )
        except Exception as error:
            warn(_sentence(name, error))
    return TrackerSet(opened, warn)


def _identity(folder: OutputFolder, step: int) -> str:
    """Return the run's id in W&B and MLflow: constant over attempts, new after a fresh start.

    The run id alone does not distinguish a run from the same job trained again after its output was
    deleted: its steps would be appended to the old run, or dropped there.
    """
    if not folder.record.tracking_id:
        # A resumed run without one was started by a version that used the run id.
        fresh = folder.run_id if step else f"{folder.run_id}-{secrets.token_hex(4)}"
        folder.record = folder.record.model_copy(update={"tracking_id": fresh})
        folder.write_manifest("Running")
    return folder.record.tracking_id


def _started(tracker: Any) -> Any:
    # Only one process opens trackers, so accelerate need not filter by rank.
    tracker.main_process_only = False
    try:
        tracker.start()
    except BaseException:
        with suppress(Exception):
            tracker.finish()
        raise
    return tracker


def _opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _sentence(name: str, error: Exception) -> str:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"tracking: {name} failed and is now disabled; continuing without it ({reason})"
