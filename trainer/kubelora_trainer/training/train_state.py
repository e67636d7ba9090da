"""Train state: the adapter in its buffers, and everything else that a checkpoint saves."""

import logging
import os
import platform
from dataclasses import dataclass

import torch

from kubelora_api.names import ENV_NODE
from kubelora_trainer.checkpoint.checkpointer import AVERAGE
from kubelora_trainer.optim.adapter_optimizer import AdapterOptimizer
from kubelora_trainer.optim.build import build_optimizer
from kubelora_trainer.optim.ema import ExponentialMovingAverage, build_ema
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.loss_scaler import LossScaler
from kubelora_trainer.optim.param_groups import rate_scales
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.telemetry.category_losses import CategoryLosses
from kubelora_trainer.telemetry.gradient_dump import GradientDump
from kubelora_trainer.telemetry.gradient_telemetry import GradientTelemetry
from kubelora_trainer.training.compile import compile_if_gradients_match
from kubelora_trainer.training.context import Run
from kubelora_trainer.training.recomputation import Recomputation
from kubelora_trainer.training.setup import TrainingInputs
from kubelora_trainer.training.step_audit import StepAudit
from kubelora_trainer.training.step_replay import RunSite, StepReplay
from kubelora_trainer.utils.stateful import Stateful

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """The adapter, and the components that update and measure it."""

    buffers: AdapterBuffers
    optimizer: AdapterOptimizer
    telemetry: GradientTelemetry
    categories: CategoryLosses
    average: ExponentialMovingAverage | None
    scaler: LossScaler | None

    @property
    def saved_parts(self) -> dict[str, Stateful]:
        """Components that a checkpoint saves in addition to the buffers, by name."""
        parts: dict[str, Stateful | None] = {
            "optimizer": self.optimizer,
            "categories": self.categories,
            "telemetry": self.telemetry,
            AVERAGE: self.average,
            "loss_scaler": self.scaler,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def result(self) -> torch.Tensor:
        """Weights that samples and export use, flat: the average if there is one."""
        return self.average.weights if self.average else self.buffers.masters

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped by the loss scaler so far; waits for the device."""
        return int(self.scaler.skipped) if self.scaler else 0

    def build_dump(self, run: Run, folder: OutputFolder) -> GradientDump | None:
        """Build the writer of raw gradients, if the job asks for them."""
        wanted = run.job.spec.health.dump_gradients
        if wanted is None:
            return None
        return GradientDump(
            folder,
            wanted,
            self.buffers.slots,
            self.buffers.plan.compute,
            run.warn_alone,
            self.scaler.scale if self.scaler else None,
            run.process_group.share,
        )

    def build_audit(
        self, run: Run, folder: OutputFolder, inputs: TrainingInputs
    ) -> tuple[StepAudit, StepReplay]:
        """Build the audit of micro-steps, and the replay of steps with a critical finding."""
        spec = run.job.spec
        recomputation = Recomputation(
            inputs.objective, self.buffers, self.telemetry, self.categories, self.scaler
        )
        audit = StepAudit(
            recomputation,
            [inputs.base.unet, *inputs.trained_encoders.values()],
            spec.training.gradient_accumulation,
            by_module=not spec.training.compile and spec.adapter.dropout == 0,
        )
        place = RunSite(
            os.environ.get(ENV_NODE) or platform.node(),
            run.device_label or "cpu",
            str(folder.path),
            [sample.file for sample in inputs.dataset.samples],
        )
        alone = run.process_group.share.size == 1
        order = inputs.objective.order
        return audit, StepReplay(recomputation, audit, order, place, alone=alone)


def build_train_state(run: Run, inputs: TrainingInputs) -> TrainState:
    """Lay out the adapter in its buffers, and build optimizer, average, scaler and telemetry."""
    training, precision = run.job.spec.training, run.precision
    device = inputs.base.device
    categories = CategoryLosses([s.category for s in inputs.dataset.samples], device)
    tail = run.process_group.tail_elements(categories.sums.numel())
    buffers = AdapterBuffers(inputs.factors, precision, tail)
    if training.compile:
        compile_if_gradients_match(
            inputs.objective, buffers, logger.info, run.warn, process_group=run.process_group
        )
    scales = rate_scales(buffers.slots, training)
    optimizer = build_optimizer(buffers, training.optimizer, scales)
    scaler = LossScaler(buffers.masters.device) if precision.scales_loss else None
    return TrainState(
        buffers=buffers,
        optimizer=optimizer,
        telemetry=GradientTelemetry(buffers, optimizer, scales, scaler.scale if scaler else None),
        categories=categories,
        average=build_ema(buffers, training.ema),
        scaler=scaler,
    )
