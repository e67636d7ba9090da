"""The protocol of every detector: the moments it is called at, and its conclusions.

A run has several moments at which something can be seen to be wrong: its start, a micro-batch, a
backward pass, a step's numbers, a checkpoint. A detector overrides the moments it needs; all others
do nothing. It is built in one place (``health/detectors/__init__.py``), run by the watchdog alone,
and known to nothing else: neither the loss nor the training loop names one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from kubelora_api.schema import JsonObject
from kubelora_api.status import Finding
from kubelora_api.thresholds import Event, Threshold
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.lora.adapter import AdapterModule
from kubelora_trainer.objective.micro_batch_facts import MicroBatchFacts
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.ema import ExponentialMovingAverage
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.storage.run_record import Rollback
from kubelora_trainer.telemetry.step_metrics import StepNumbers


@dataclass(frozen=True)
class RunStart:
    """The point that training starts from: its beginning, a checkpoint, or a rollback's checkpoint.

    untrained: whether the adapter is fresh, neither resumed nor initialised from another one.
    step: optimizer steps done. moved: those among them that moved a weight. skipped: those that
    the loss scaler left out. planned_before: optimizer steps that an earlier attempt planned; None
    if unknown. rollback: what a rollback left out, once there was one. frozen: weights of the base
    model that every pass reads, by name. average: of the weights, if there is one.
    """

    reason: Literal["new", "resumed", "rolled back"]
    buffers: AdapterBuffers
    optimizer: AdapterOptimizer
    modules: Sequence[AdapterModule] = ()
    untrained: bool = False
    step: int = 0
    moved: int = 0
    skipped: int = 0
    planned_before: int | None = None
    rollback: Rollback | None = None
    frozen: Mapping[str, Tensor] = field(default_factory=dict)
    average: ExponentialMovingAverage | None = None


@dataclass(frozen=True)
class BackwardFacts:
    """One backward pass that is about to be done.

    step: optimizer step that its window belongs to, from 1. place: from 0, among this rank's passes
    of the window. last: whether it is their last. loss: scalar on the device, before any scaling.
    """

    step: int
    place: int
    last: bool
    loss: Tensor


@dataclass(frozen=True)
class UpdateFacts:
    """One optimizer step that is about to be done; gradients are finished and clipped.

    step: from 1. scale: scalar on the device, what the window's sum was multiplied by: one over its
    samples and over the loss scale, times the clipping coefficient. alone: whether no other rank
    has a part in the gradient.
    """

    step: int
    learning_rate: float
    scale: Tensor
    alone: bool = True


@dataclass(frozen=True)
class AuditFacts:
    """One micro-step that was computed again, and its gradient compared with the loss itself.

    step: optimizer step that it belongs to, from 1. loss: of a forward pass, summed over samples.
    differs: largest relative distance of a factor's gradient between the two passes, where it can
    only come from the hardware; 0 otherwise. factor: where it is largest. descent: change of the
    loss along the gradient, over what the gradient predicts; None where the loss's rounding hides
    it. by_factor: the same by slot for the gradient that arrived at a module's output, NaN where it
    was not measured.
    """

    step: int
    loss: float
    differs: float
    factor: str
    descent: float | None
    by_factor: Sequence[float]


@dataclass(frozen=True)
class Judgement:
    """The conclusions of a detector at one moment.

    raised: findings that show now. cleared: names of findings that no longer show; one that is
    neither raised nor cleared stays as it is. judged: names of findings that could be compared now.
    lines: sentences for the run's log.
    """

    raised: tuple[Finding, ...] = ()
    cleared: frozenset[str] = frozenset()
    judged: frozenset[str] = frozenset()
    lines: tuple[str, ...] = ()


NOTHING = Judgement()


class Detector(Protocol):
    """One thing, or a few related ones, that can be wrong with a run.

    rows: of `kubelora_api.thresholds`, those whose findings it raises.

    Every moment but ``on_micro_batch`` may raise NumericalError where a number must not reach a
    weight: it ends the run whatever ``health.policy`` is (exit code 3). Anything else is a finding.
    """

    rows: Sequence[Threshold | Event] = ()

    def on_start(self, start: RunStart, known: WatchState) -> Judgement:
        """Judge the start of a run, after ``load``; also after a resume and after a rollback."""
        return NOTHING

    def on_micro_batch(self, facts: MicroBatchFacts) -> None:
        """Record what a micro-batch is made of, before its forward pass.

        What is found is raised by ``on_step``. A micro-step may come twice: a compiled model's
        gradients are compared on it.
        """
        return

    def before_backward(self, facts: BackwardFacts) -> None:
        """Look at the accumulator before a backward pass. Nothing here may wait for the device."""
        return

    def on_backward(self) -> None:
        """Check what a backward pass left behind. Nothing here may wait for the device."""
        return

    def on_audit(self, facts: AuditFacts) -> None:
        """Record what an audit of a micro-step showed; what is found is raised by ``on_step``."""
        return

    def before_update(self, update: UpdateFacts) -> None:
        """Look at weights, state and finished gradient before the optimizer step.

        Nothing here may wait for the device.
        """
        return

    def measure(self, step: int) -> Mapping[str, Tensor]:
        """Return tensors on the device to copy to the host with the numbers of ``step``.

        Called after the optimizer step, before the gradient is cleared. They arrive as
        ``StepNumbers.extra`` under the same names, as flat lists. Start a name with the detector's.
        """
        return {}

    def on_step(self, numbers: StepNumbers, known: WatchState) -> Judgement:
        """Judge one optimizer step, once its numbers are on the host: one step late.

        To act every N steps, return `NOTHING` unless ``numbers.step % N == 0``. A step that the
        loss scaler skipped (``numbers.skipped``) moved nothing.
        """
        return NOTHING

    def on_checkpoint(self, step: int, known: WatchState) -> Judgement:
        """Judge the state that is about to be saved after ``step``; may wait for the device.

        Called on every rank, after the numbers of ``step`` were judged.
        """
        return NOTHING

    def state(self) -> JsonObject:
        """Return what a resumed run must remember, as plain JSON, under keys of its own.

        Tensors that must survive a resume belong to the telemetry, whose checkpoint has them.
        """
        return {}

    def load(self, saved: JsonObject) -> None:
        """Restore what ``state`` returned; ``saved`` holds the keys of all detectors.

        A missing key is a checkpoint from before this detector existed: begin empty. Raises
        ValueError for what ``state`` never returned.
        """
        return
