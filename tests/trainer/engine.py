"""A tiny real engine for tests: two modules, a smooth objective, no model to load."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from rich.console import Console
from torch import Tensor, nn

from kubelora_api.documents import parse_job
from kubelora_api.job import LoraTrainingJob
from kubelora_api.report import RunReport
from kubelora_api.spec import Health
from kubelora_api.status import Finding
from kubelora_api.training_spec import Training
from kubelora_trainer.baseline import open_baseline
from kubelora_trainer.buffers import AdapterBuffers, Factor
from kubelora_trainer.checkpoint import RunPosition, resume, resume_from, save_checkpoint
from kubelora_trainer.checkpoint_folders import SavedCheckpoint
from kubelora_trainer.checkpoint_part import CheckpointPart
from kubelora_trainer.dora import channel_norms
from kubelora_trainer.exporter import Exporter, TrainerMetrics
from kubelora_trainer.gang import ALONE, Gang, led
from kubelora_trainer.health import HINDSIGHT_STEPS, last_healthy_step
from kubelora_trainer.health_policy import Rollback
from kubelora_trainer.judging import facts_of
from kubelora_trainer.learning_rates import rate_scales
from kubelora_trainer.loss_scaler import LossScaler
from kubelora_trainer.moving_average import open_average
from kubelora_trainer.optimizer_choice import open_optimizer
from kubelora_trainer.order import Plan
from kubelora_trainer.output import OutputFolder, claim_output
from kubelora_trainer.precision import MAGNITUDE, PrecisionPlan
from kubelora_trainer.progress import LineView
from kubelora_trainer.reporting import Reporter
from kubelora_trainer.rollback import go_back, gone_back
from kubelora_trainer.run_log import RunLog
from kubelora_trainer.run_record import RunRecord
from kubelora_trainer.schedule import steps_that_moved
from kubelora_trainer.startup_contract import FirstGradients
from kubelora_trainer.telemetry import GradientTelemetry
from kubelora_trainer.train import MicroBatch, Parts, train

DEFAULT = PrecisionPlan(torch.bfloat16, torch.float32, torch.float32)


@dataclass(frozen=True)
class Loss:
    loss_sum: Tensor
    samples: int


def job(output: str = "out", **training: object) -> LoraTrainingJob:
    return parse_job(
        {
            "apiVersion": "kubelora.dev/v1alpha1",
            "kind": "LoraTrainingJob",
            "metadata": {"name": "tiny"},
            "spec": {
                "model": {"uri": "model"},
                "dataset": {"uri": "photos", "resolution": 64},
                "training": {"steps": 6, "gradientAccumulation": 3, **training},
                "output": {"uri": output},
            },
        },
        local=True,
    )


def tiny_factors(rank: int = 2, width: int = 5, seed: int = 0, dora: bool = False) -> list[Factor]:
    """Of two modules whose frozen weight is the identity; dora: with magnitudes, all 1 then."""
    factors = []
    for block in ("down", "up"):
        generator = torch.Generator().manual_seed(len(block) + 100 * seed)
        down = nn.Parameter(torch.randn(rank, width, generator=generator))
        up = nn.Parameter(torch.zeros(width, rank))
        factors += [
            Factor(f"{block}_blocks.0.to_q", f"{block}.lora_A", down),
            Factor(f"{block}_blocks.0.to_q", f"{block}.lora_B", up),
        ]
        if dora:
            ones = nn.Parameter(torch.ones(width))
            factors.append(Factor(f"{block}_blocks.0.to_q", f"{block}.{MAGNITUDE}", ones))
    return factors


def objective_of(factors: list[Factor], seed: int = 0) -> Callable[[int], Loss]:
    """A function of the micro-step and the weights: Σ over modules of |q·(x + B·A·x) - y|².

    q: of a DoRA, m / ‖1 + B·A‖ by channel; else 1.
    """
    width = factors[0].parameter.shape[1]
    by_name = {factor.name: factor.parameter for factor in factors}
    modules = {factor.module for factor in factors}
    eye = torch.eye(width)

    def objective(micro_step: int) -> Loss:
        generator = torch.Generator().manual_seed(micro_step + 100_000 * seed)
        x = torch.randn(width, generator=generator)
        total = torch.zeros(())
        for module in sorted(modules):
            down, up = by_name[f"{module}.lora_A"], by_name[f"{module}.lora_B"]
            answer = x + (up @ (down @ x.to(down.dtype))).float()
            if (magnitude := by_name.get(f"{module}.{MAGNITUDE}")) is not None:
                answer = magnitude / channel_norms(eye, down, up, 1.0) * answer
            total = total + (answer - x.flip(0)).square().sum()
        return Loss(total, 1)

    return objective


def _aside(folder: OutputFolder, rank: int) -> OutputFolder:
    """Where a rank that writes nothing of the run may keep its log."""
    path = folder.path / f"rank{rank}"
    path.mkdir(exist_ok=True)
    return OutputFolder(path, folder.job, folder.run_id, folder.attempt)


class Engine:
    """Everything that `run.py` puts together, without model and images."""

    def __init__(
        self,
        path: Path,
        *,
        precision: PrecisionPlan = DEFAULT,
        policy: Health | None = None,
        attempt: int | None = None,
        keep: int = 3,
        gang: Gang = ALONE,
        rank: int = 2,
        width: int = 5,
        draws: int = 0,
        dora: bool = False,
        baseline: Path | None = None,
        **training: object,
    ) -> None:
        self.warnings: list[str] = []
        self.keep = keep
        self.policy = policy or Health()
        self.job = job(str(path), **training)
        self.first = gang.share.rank == 0
        claimed = gang.told_by_first(
            claim_output(path, self.job, attempt, self.warnings.append) if self.first else None
        )
        assert isinstance(claimed, OutputFolder)
        self.folder: OutputFolder = claimed
        self.factors = tiny_factors(rank, width, draws, dora)
        self.buffers = AdapterBuffers(self.factors, precision, gang.tail_elements(0))
        spec: Training = self.job.spec.training
        scales = rate_scales(self.buffers.slots, spec)
        self.optimizer = open_optimizer(self.buffers, spec.optimizer, scales)
        self.average = open_average(self.buffers, spec.ema)
        self.scaler = LossScaler(self.buffers.masters.device) if precision.scales_loss else None
        self.telemetry = GradientTelemetry(
            self.buffers, self.optimizer, scales, self.scaler.scale if self.scaler else None
        )
        self.saved_parts: dict[str, CheckpointPart] = {
            "optimizer": self.optimizer,
            "telemetry": self.telemetry,
        }
        if self.average:
            self.saved_parts["average"] = self.average
        if self.scaler:
            self.saved_parts["loss_scaler"] = self.scaler
        self.resumed = self._resume(gang)
        begin = self.resumed[0] if self.resumed else RunPosition()
        self.position = gang.adopt(begin, self.buffers, [])
        steps = spec.steps or 1
        self.plan = Plan(steps, steps * spec.gradient_accumulation, spec.gradient_accumulation)
        self.folder.record = RunRecord(total_steps=steps, dataset_sha256=f"draws {draws}")
        self.baseline = (
            open_baseline(
                "pvc://a/good", baseline, self.job.document(), {}, f"draws {draws}", steps
            )
            if baseline
            else None
        )
        self.registry = CollectorRegistry()
        report = RunReport(run_id="tiny", attempt=1, phase="Training", total_steps=steps)
        self.exporter = Exporter(self.registry, report, 0, any_port=True, everywhere=False)
        logged = self.folder if self.first else _aside(claimed, gang.share.rank)
        self.run_log = RunLog(logged, self.buffers.slots, self.position.step, self.warnings.append)
        self.reporter = Reporter(
            slots=self.buffers.slots,
            policy=self.policy if self.first else Health(),
            facts=facts_of(spec, self.buffers, steps),
            baseline=self.baseline,
            metrics=TrainerMetrics(self.registry, precision),
            exporter=self.exporter,
            run_log=self.run_log,
            progress=LineView(Console(quiet=True), steps, every=1),
            first_gradients=FirstGradients(
                self.buffers.slots, steps_that_moved(spec, self.position.step)
            ),
            position=self.position,
        )
        self.parts = Parts(
            training=spec,
            plan=self.plan,
            objective=objective_of(self.factors, draws),
            buffers=self.buffers,
            optimizer=self.optimizer,
            telemetry=self.telemetry,
            reporter=self.reporter,
            average=self.average,
            gang=gang,
            scaler=self.scaler,
        )
        self.saved: list[SavedCheckpoint] = []
        if self.resumed:
            self.reporter.checkpointed(self.resumed[1], self.folder)

    def _resume(self, gang: Gang) -> tuple[RunPosition, SavedCheckpoint] | None:
        resumed = None
        if self.first:
            resumed = resume(self.folder, self.buffers, self.saved_parts, self.warnings.append)
        saved = gang.told_by_first(resumed[1] if resumed else None)
        if self.first or saved is None:
            return resumed
        return resume_from(saved, self.folder, self.buffers, self.saved_parts), saved

    def checkpoint(self, position: RunPosition) -> None:
        if not self.first:
            return
        self.run_log.flush()
        window = position.micro_step - self.plan.window(position.step).start
        saved = save_checkpoint(
            self.folder,
            self.buffers,
            self.saved_parts,
            self.reporter.position(position),
            window,
            keep=self.keep,
            hindsight=HINDSIGHT_STEPS if self.policy.policy == "Rollback" else None,
        )
        self.saved.append(saved)
        self.reporter.checkpointed(saved, self.folder)

    def roll_back(self, reached: RunPosition, finding: Finding) -> RunPosition:
        gang, buffers, parts = self.parts.gang, self.buffers, self.saved_parts
        earlier: RunPosition | None = None

        def on_first() -> tuple[SavedCheckpoint, Rollback]:
            nonlocal earlier
            healthy, warn = last_healthy_step(finding), self.warnings.append
            back = go_back(self.folder, buffers, parts, reached, finding, healthy, warn)
            earlier = back.position
            return back.saved, back.rollback

        saved, rollback = led(gang, on_first)
        earlier = earlier or gone_back(resume_from(saved, self.folder, buffers, parts), rollback)
        gang.gathered(None)
        self.reporter.rewind(earlier, earlier.step)
        self.checkpoint(earlier)
        return earlier

    def train(
        self,
        *,
        micro_steps: int | None = None,
        every: int = 100,
        stop: Callable[[], bool] = lambda: False,
    ) -> RunPosition:
        """Train to the end, or checkpoint and leave: after ``micro_steps``, or on ``stop``."""
        done = 0
        objective = self.parts.objective

        def counted(micro_step: int) -> MicroBatch:
            nonlocal done
            done += 1
            return objective(micro_step)

        parts = replace(self.parts, objective=counted)
        try:
            position = train(
                parts,
                self.position,
                stop=lambda: stop() or (micro_steps is not None and done >= micro_steps),
                checkpoint=self.checkpoint,
                checkpoint_every=every,
                roll_back=self.roll_back,
            )
            if position.step < self.plan.optimizer_steps:
                self.checkpoint(position)
        finally:
            self.exporter.close()
        self.position = position
        return position
