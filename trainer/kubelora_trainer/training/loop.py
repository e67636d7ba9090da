"""The training loop, on one page: resume, accumulate, measure, clip, step, report, checkpoint.

All components are passed in; each is documented in its own module.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kubelora_api.status import Finding
from kubelora_api.training_spec import Training
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.distributed.process_group import SINGLE_PROCESS, ProcessGroup, ReducedWindow
from kubelora_trainer.distributed.reduce_payload import ControlFlags
from kubelora_trainer.health.detector import BackwardFacts, UpdateFacts
from kubelora_trainer.health.policy import RollbackRequiredError
from kubelora_trainer.health.watchdog import Watchdog
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.clipping import clip_coefficient
from kubelora_trainer.optim.ema import ExponentialMovingAverage
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.loss_scaler import LossScaler
from kubelora_trainer.optim.lr_schedule import learning_rate
from kubelora_trainer.telemetry.category_losses import CategoryLosses
from kubelora_trainer.telemetry.gradient_dump import GradientDump, MicroStepName
from kubelora_trainer.telemetry.gradient_telemetry import GradientTelemetry
from kubelora_trainer.telemetry.host_transfer import PendingNumbers, StepFacts
from kubelora_trainer.training.plan import TrainingPlan
from kubelora_trainer.training.step_audit import StepAudit
from kubelora_trainer.training.step_replay import StepReplay
from kubelora_trainer.training.step_reporter import Reporter
from kubelora_trainer.utils.errors import (
    DeviceError,
    PolicyError,
    RunEndedError,
    SuspendedByPolicyError,
)

JUDGED_RATE_SHARE = 0.1
"""Below this share of the peak rate (warm-up from 0, a cosine's tail) even fp32 correctly rounds
updates away, so whether weights move is not checked. At a rate of 1e-6, a step of 3e-7 moves a
weight of 0.1 by 40 units in the last place of fp32; a hundredth of it by less than half a unit."""


class MicroBatchOutput(Protocol):
    """The objective's output for one micro-step: losses summed over ``samples`` samples."""

    @property
    def loss_sum(self) -> Tensor:
        """fp32 scalar with a graph."""

    @property
    def samples(self) -> int:
        """Number of samples in the sum."""


@dataclass(frozen=True)
class Parts:
    """The components of a run."""

    training: Training
    plan: TrainingPlan
    objective: Callable[[int], MicroBatchOutput]
    buffers: AdapterBuffers
    optimizer: AdapterOptimizer
    telemetry: GradientTelemetry
    reporter: Reporter
    watchdog: Watchdog
    average: ExponentialMovingAverage | None = None
    categories: CategoryLosses | None = None
    scaler: LossScaler | None = None
    dump: GradientDump | None = None
    audit: StepAudit | None = None
    replay: StepReplay | None = None
    process_group: ProcessGroup = SINGLE_PROCESS

    @property
    def sums(self) -> list[Tensor]:
        """fp64 sums over a window's samples in addition to gradient and loss."""
        return [self.categories.sums] if self.categories else []


def train(
    parts: Parts,
    position: RunPosition,
    *,
    stop: Callable[[], bool],
    checkpoint: Callable[[RunPosition], None],
    checkpoint_every: int,
    roll_back: Callable[[RunPosition, Finding], RunPosition],
    after_step: Callable[[RunPosition], None] = lambda position: None,
) -> RunPosition:
    """Train from ``position`` to the last step.

    Args:
        parts: The components.
        position: Where to start.
        stop: Polled; if it returns True, training returns early: a single rank between micro-steps,
            several ranks together at the end of the window.
        checkpoint: Saves a checkpoint.
        checkpoint_every: Interval of checkpoints in optimizer steps.
        roll_back: Restores an earlier position because of a finding.
        after_step: Called after every optimizer step.

    Returns:
        The position reached.

    Raises:
        NumericalError: A gradient or weight is wrong; raised before it reaches a weight.
        RunEndedError: What the health policy demands.
    """
    if parts.replay:
        parts.replay.objective = parts.objective
        parts.reporter.explain = parts.replay.explain
    while position.step < parts.plan.optimizer_steps:
        in_window = parts.process_group.between_micro_steps(stop)
        position = accumulate_window(parts, position, in_window)
        due = drain_reports(parts.reporter)
        if parts.replay and position.micro_step == parts.plan.window(position.step).stop:
            parts.replay.keep(
                position.step + 1
            )  # after the reports, which the step before explains
        asked = ControlFlags(stop(), due is not None)
        exchanged = parts.process_group.exchange(parts.buffers, position, asked, parts.sums)
        position = exchanged.position
        if exchanged.asked.due:
            position = apply_verdict(parts, due, position, checkpoint, roll_back)
            continue
        if exchanged.asked.stop:
            return position
        pending, position = take_step(parts, exchanged)
        parts.reporter.expect(pending)
        if position.step % checkpoint_every == 0 or position.step == parts.plan.optimizer_steps:
            due = drain_reports(parts.reporter, saving=True)
            rolled_back = apply_verdict(parts, due, position, checkpoint, roll_back)
            if rolled_back is not position:
                position = rolled_back
                continue
            checkpoint(position)
        after_step(position)
    return position


def drain_reports(
    reporter: Reporter, saving: bool = False
) -> RunEndedError | RollbackRequiredError | None:
    """Report pending numbers, and return the error that they demand, as seen by this rank."""
    try:
        reporter.drain(saving)
    except DeviceError:
        raise  # this rank's device alone: the others would blame theirs
    except (RunEndedError, RollbackRequiredError) as due:
        return due
    return None


def apply_verdict(
    parts: Parts,
    due: RunEndedError | RollbackRequiredError | None,
    position: RunPosition,
    checkpoint: Callable[[RunPosition], None],
    roll_back: Callable[[RunPosition, Finding], RunPosition],
) -> RunPosition:
    """Apply the first rank's verdict on every rank.

    Args:
        parts: The components.
        due: This rank's verdict, or None.
        position: The current position.
        checkpoint: Saves a checkpoint.
        roll_back: Restores an earlier position.

    Returns:
        ``position`` itself, or an earlier one to continue from.

    Raises:
        RunEndedError: The verdict ends the run.
    """
    everyones = parts.process_group.all_gather_object(due)
    # A rank knows only its own samples: the one that names the cause is the one to believe.
    by_name = sorted(everyones, key=lambda one: not getattr(one, "named", False))
    verdict = next((one for one in by_name if one is not None), None)
    if verdict is None:
        return position
    if isinstance(verdict, RollbackRequiredError):
        earlier = roll_back(position, verdict.finding)
        return parts.process_group.adopt(earlier, parts.buffers, parts.sums)
    if isinstance(verdict, (PolicyError, SuspendedByPolicyError)):
        checkpoint(position)
    verdict.same_on_all_ranks = True
    raise verdict


def accumulate_window(parts: Parts, position: RunPosition, stop: Callable[[], bool]) -> RunPosition:
    """Run this rank's micro-steps of the window; gradients accumulate in the flat buffer.

    Args:
        parts: The components.
        position: Where to start.
        stop: Polled between micro-steps.

    Returns:
        The position reached, with the window's sums.
    """
    window = parts.plan.window(position.step)
    own, begun = parts.process_group.share.of(window), position.micro_step > window.start
    loss, samples, done = position.window_loss, position.window_samples, position.micro_step
    if parts.replay:
        parts.replay.begin_window(not begun)
    parts.telemetry.begin_window(own, position.micro_step if begun else own.start)
    for micro_step in parts.process_group.share.of(range(position.micro_step, window.stop)):
        if stop():
            break
        of_order = micro_step + position.skipped
        name = MicroStepName(position.step + 1, micro_step - window.start, of_order)
        dumping = parts.dump.micro_step(name) if parts.dump else nullcontext()
        micro_batch = parts.objective(of_order)
        loss_sum = micro_batch.loss_sum
        audited = parts.audit and micro_step == own[0] and parts.audit.begins(name.step)
        last = micro_step == own[-1]
        parts.watchdog.before_backward(
            BackwardFacts(position.step + 1, own.index(micro_step), last, loss_sum.detach())
        )
        with parts.telemetry.micro_step(micro_step), dumping:
            (parts.scaler.scaled(loss_sum) if parts.scaler else loss_sum).backward()
        parts.watchdog.on_backward()
        if parts.replay:
            parts.replay.computed(of_order)
        if parts.audit and audited:
            facts = parts.audit.audit(parts.objective, name.step, of_order, loss_sum.detach())
            parts.watchdog.on_audit(facts)
        loss = loss + micro_batch.loss_sum.detach().double()
        samples += micro_batch.samples
        done = micro_step + 1
    else:
        done = window.stop
    return replace(position, micro_step=done, window_samples=samples, window_loss=loss)


def take_step(parts: Parts, exchanged: ReducedWindow) -> tuple[PendingNumbers, RunPosition]:
    """Turn the finished window into one optimizer step, identical on every rank."""
    position, buffers, telemetry = exchanged.position, parts.buffers, parts.telemetry
    rate = learning_rate(parts.training, position.step, parts.plan.optimizer_steps)
    buffers.assert_bound()
    buffers.normalise(position.window_samples)
    if parts.scaler:
        buffers.scale(parts.scaler.inverse)
    norm = telemetry.measure_gradient()  # before clipping, which would hide its size
    clipping = clip_coefficient(norm, parts.training.max_grad_norm)
    buffers.scale(clipping)
    scale = clipping / position.window_samples
    parts.watchdog.before_update(
        UpdateFacts(
            position.step + 1,
            rate,
            scale * parts.scaler.inverse if parts.scaler else scale,
            alone=parts.process_group.share.size == 1,
        )
    )
    non_finite = (~torch.isfinite(norm)).float()
    with telemetry.update():
        parts.optimizer.step(rate, non_finite)
    if parts.average:
        parts.average.update(position.step, non_finite)
    extra = parts.watchdog.measure(position.step + 1)
    buffers.zero_gradient()
    facts = StepFacts(
        step=position.step + 1,
        learning_rate=rate,
        samples=position.window_samples,
        judge_updates=rate >= JUDGED_RATE_SHARE * parts.training.peak_rate,
        own_rate=parts.optimizer.own_rate,
        broken_ranks=exchanged.broken,
    )
    categories = parts.categories.take() if parts.categories else None
    divergence = torch.full_like(position.window_loss, exchanged.divergence)
    pending = telemetry.pack(facts, position.window_loss, categories, divergence, extra)
    if parts.scaler:
        parts.scaler.update(non_finite)
    no_loss = torch.zeros_like(position.window_loss)
    return pending, replace(position, step=position.step + 1, window_samples=0, window_loss=no_loss)
