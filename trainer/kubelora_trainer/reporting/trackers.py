"""TensorBoard, Weights & Biases and MLflow, through accelerate's trackers.

A tracker is a comfort, the run log is the record: whatever fails in one (no network, no login, a
full disk) is told once, that tracker is left out from then on, and the run goes on.
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
"""What goes on later was not a failure."""


class Tracker(Protocol):
    """What is asked of a tracker."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Keep numbers of an optimizer step."""

    def log_images(self, paths: Sequence[Path], step: int) -> None:
        """Keep sample images, one a prompt."""

    def finish(self, exit_code: ExitCode) -> None:
        """Write what is not written yet, and how the attempt ended."""


@dataclass
class TensorBoard:
    """Event files in the output folder.

    A new writer tells its readers to drop the steps from ``purge_step`` on that an earlier one
    wrote: those that come again after an interruption or a rollback.
    """

    open_writer: Callable[[int], Any]
    reached: int
    tracker: Any

    @classmethod
    def open(cls, folder: OutputFolder, project: str, step: int) -> "TensorBoard":
        """Steps after ``step`` that an earlier attempt wrote are dropped."""
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
        """See `Tracker`. Event files know no end."""
        self.tracker.finish()


@dataclass
class WandB:
    """A run of Weights & Biases; WANDB_MODE=offline keeps it in the output folder alone.

    reached: the newest step that it holds; its steps can't be taken back, so one that comes again
    is left as it is.
    """

    tracker: Any
    reached: int

    @classmethod
    def open(cls, folder: OutputFolder, project: str, step: int) -> "WandB":
        """Goes on with the run of the same id. Offline, `wandb sync` puts the parts together."""
        tracker = WandBTracker(
            project,
            name=folder.job.metadata.name,
            id=_identity(folder, step),
            resume="allow",
            dir=str(folder.path),
            config=folder.job.document(),
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
    """A run of MLflow, at MLFLOW_TRACKING_URI or in the output folder.

    reached: the newest step that it holds; a step that comes again is left as it is.
    """

    tracker: Any
    reached: int

    @classmethod
    def open(cls, folder: OutputFolder, project: str, step: int) -> "MLflow":
        """Goes on with the run of the same id."""
        # MLflow's own patience, minutes of retries, would be spent inside a training step.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        import mlflow

        place = os.environ.get("MLFLOW_TRACKING_URI")
        if not place:
            # The folder needs no server and no database; this says that it is meant.
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
    """All trackers of a run, each dropped at its first failure.

    warn: is told once for each tracker that fails.
    """

    def __init__(self, trackers: dict[str, Tracker], warn: Callable[[str], None]) -> None:
        self._trackers, self._warn = trackers, warn

    def log(self, numbers: StepNumbers) -> None:
        """Keep one optimizer step."""
        values = {
            "loss": numbers.loss,
            "grad_norm": numbers.grad_norm,
            "learning_rate": numbers.learning_rate,
            **{f"loss/{name}": c.loss for name, c in numbers.category_losses.items()},
        }
        self._each(lambda tracker: tracker.log(values, numbers.step))

    def log_samples(self, paths: Sequence[Path], step: int) -> None:
        """Keep the sample images of a step."""
        if paths:
            self._each(lambda tracker: tracker.log_images(paths, step))

    def finish(self, exit_code: ExitCode) -> None:
        """Write what is not written yet and how it ended; nothing is tracked after it."""
        self._each(lambda tracker: tracker.finish(exit_code))
        self._trackers = {}

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                do(tracker)
            except Exception as error:  # whatever a tracker raises, it must not end a run
                del self._trackers[name]
                self._warn(_sentence(name, error))


def build_trackers(folder: OutputFolder, step: int, warn: Callable[[str], None]) -> TrackerSet:
    """The trackers that ``spec.tracking`` names, those that can be opened. step: resumed from."""
    settings = folder.job.spec.tracking
    opened: dict[str, Tracker] = {}
    if settings.trackers:
        PartialState()  # accelerate's trackers log, and its loggers ask which process this is
    for name in settings.trackers:
        try:
            opened[name] = _KINDS[name].open(folder, settings.project, step)
        except ImportError:
            warn(
                f"tracking: {name} is not installed, so the run goes on without it: "
                f"pip install {PACKAGES[name]}"
            )
        except Exception as error:
            warn(_sentence(name, error))
    return TrackerSet(opened, warn)


def _identity(folder: OutputFolder, step: int) -> str:
    """The run's name in W&B and MLflow: the same over attempts, another after a new beginning.

    The run id alone does not tell a run from the same job, trained anew after its output was
    cleared away: its steps would be appended to the old run's, or dropped there.
    """
    if not folder.record.tracking_id:
        # A run that goes on without one was begun by a version that named it by its run id.
        fresh = folder.run_id if step else f"{folder.run_id}-{secrets.token_hex(4)}"
        folder.record = folder.record.model_copy(update={"tracking_id": fresh})
        folder.write_manifest("Running")
    return folder.record.tracking_id


def _started(tracker: Any) -> Any:
    # One process alone opens trackers, so accelerate need not find out which one it is.
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
    return f"tracking: {name} failed and is left out from here on; the run goes on ({reason})"
