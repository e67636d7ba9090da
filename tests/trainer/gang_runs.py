"""Runs of the tiny engine in several ranks, and what each rank tells of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kubelora_api.dump_spec import DumpGradients
from kubelora_api.spec import Health
from kubelora_trainer.errors import Interrupted
from kubelora_trainer.gang import Gang
from kubelora_trainer.gradient_dump import GradientDump
from kubelora_trainer.precision import PrecisionPlan
from kubelora_trainer.run_log import RunLog
from kubelora_trainer.step_numbers import StepNumbers
from kubelora_trainer.stop_request import StopRequest
from tests.trainer.engine import Engine, Loss, objective_of
from tests.trainer.gangs import InGang

FP32 = PrecisionPlan(torch.float32, torch.float32, torch.float32)
BF16 = PrecisionPlan(torch.bfloat16, torch.float32, torch.float32)


def train_engine(
    path: Path,
    precision: PrecisionPlan = FP32,
    *,
    before: Callable[[Engine, int], None] = lambda engine, micro_step: None,
    stop_after: int | None = None,
    steps: int = 6,
    among: Callable[[Gang], Gang] = lambda gang: gang,
    policy: Health | None = None,
    every: int | None = None,
    times: Callable[[int], float] = lambda micro_step: 1.0,
    dump: dict[str, Any] | None = None,
    **training: object,
) -> InGang:
    """A run of the tiny engine whose micro-batches hold one to three samples.

    before: called on every rank before each of its micro-steps. stop_after: micro-steps after which
    a rank is asked to stop. among: the gang as the run sees it. every: steps between checkpoints;
    None for none but the last. times: what a micro-step's losses are multiplied by. dump:
    ``dumpGradients``, on every rank. Each rank
    returns its weights, what it reported, what it saw.
    """

    settings: dict[str, Any] = {"gradientAccumulation": 3, "learningRate": 1e-3, **training}

    def work(gang: Gang, stop: StopRequest) -> Any:
        gang = among(gang)
        engine = Engine(
            path,
            precision=precision,
            attempt=1,
            gang=gang,
            policy=policy,
            steps=steps,
            **settings,
        )
        objective = objective_of(engine.factors)
        seen: list[int] = []

        def uneven(micro_step: int) -> Loss:
            before(engine, micro_step)
            seen.append(micro_step)
            samples = 1 + micro_step % 3
            losses = [objective(100 * micro_step + n).loss_sum for n in range(samples)]
            return Loss(torch.stack(losses).sum() * times(micro_step), samples)

        engine.parts = replace(engine.parts, objective=uneven)
        if dump is not None:
            dumping = GradientDump(
                engine.folder,
                DumpGradients.model_validate(dump),
                engine.buffers.slots,
                precision.compute,
                engine.warnings.append,
                share=gang.share,
            )
            engine.parts = replace(engine.parts, dump=dumping)
        noted: list[StepNumbers] = []
        engine.reporter._run_log = Noted(engine.run_log, noted)  # type: ignore[assignment]
        position = engine.train(
            micro_steps=stop_after,
            stop=lambda: stop.requested,
            every=every or engine.plan.optimizer_steps,
        )
        if position.step < engine.plan.optimizer_steps and stop.requested:
            raise Interrupted("stopped")
        return {
            "masters": engine.buffers.masters.tolist(),
            "losses": [n.loss for n in noted],
            "norms": [n.grad_norm for n in noted],
            "samples": [n.samples for n in noted],
            "divergence": [n.rank_divergence for n in noted],
            "findings": {f.name: f.since_step for f in engine.reporter.watch.status().findings},
            "messages": [f.message for f in engine.reporter.watch.status().findings],
            "warnings": engine.warnings,
            "scales": [n.loss_scale for n in noted],
            "seen": seen,
            "position": [position.step, position.micro_step],
        }

    return work


@dataclass
class Noted:
    """A step log that keeps what passes through."""

    log: RunLog
    steps: list[StepNumbers]

    def append(self, numbers: StepNumbers) -> None:
        self.steps.append(numbers)
        self.log.append(numbers)

    def rewind(self, step: int) -> None:
        self.log.rewind(step)
