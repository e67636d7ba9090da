"""This trainer as `kubelora train` puts it together, one optimizer step a call.

Two ways to make a step: with telemetry and all that it feeds (watchdog, metrics, status, run log,
progress), or with neither: then the gradient's norm alone is computed, for clipping. One loop does
both, on the same tensors: two loops of one kind differ by a few per cent in time, by nothing but
where their memory lies. `main` trains a few steps and prints its peak memory, the writing of the
run log included; import_heavy_libraries comes first, as in the command.
"""

import argparse
import json
import resource
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore, Thread
from typing import Any, cast

import torch
from prometheus_client import CollectorRegistry
from rich.console import Console
from torch import Tensor

from benchmarks.job import bench_document
from kubelora_api.documents import parse_job
from kubelora_api.report import RunReport
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.health.detector import RunStart
from kubelora_trainer.health.detectors import Watched, build_detectors
from kubelora_trainer.health.detectors.quantities import facts_of
from kubelora_trainer.health.watchdog import Watchdog
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.reporting.http_server import Exporter
from kubelora_trainer.reporting.metrics import TrainerMetrics
from kubelora_trainer.reporting.progress_bar import LineView
from kubelora_trainer.reporting.run_log import RunLog
from kubelora_trainer.storage.output_dir import Manifest, claim_output
from kubelora_trainer.telemetry.gradient_telemetry import GradientTelemetry
from kubelora_trainer.telemetry.host_transfer import PendingNumbers
from kubelora_trainer.training.context import Run, RunOptions
from kubelora_trainer.training.loop import Parts, train
from kubelora_trainer.training.plan import build_plan
from kubelora_trainer.training.setup import build_training_inputs
from kubelora_trainer.training.step_reporter import Reporter
from kubelora_trainer.training.train_state import build_train_state
from kubelora_trainer.utils.signals import StopRequest


class OurLoop:
    """One optimizer step of `train` a call."""

    def __init__(
        self,
        model: Path,
        photos: Path,
        output: Path,
        *,
        rank: int = 8,
        accumulation: int = 4,
        more: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """more: as in ``bench_document``."""
        document = bench_document(
            model, photos, output, rank=rank, accumulation=accumulation, more=more
        )
        self.job = parse_job(document, local=True)
        spec = self.job.spec
        folder = claim_output(output, self.job, None, print)
        assert not isinstance(folder, Manifest)
        options = RunOptions({}, None, None, None, "")
        run = Run(self.job, options, StopRequest(), Console(quiet=True))
        registry = CollectorRegistry()
        report = RunReport(run_id="bench", attempt=1, phase="Training", total_steps=100_000)
        self._exporter = Exporter(registry, report, 0, any_port=True, everywhere=False)
        self._material = build_training_inputs(spec, {}, folder, lambda sentence: None)
        state = build_train_state(run, self._material)
        self.buffers = buffers = state.buffers
        self._hooks = _hooks_of(buffers)
        self.position = RunPosition()
        self._run_log = RunLog(folder, buffers.slots, 0, print)
        categories = [sample.category for sample in self._material.dataset.samples]
        facts = facts_of(spec.training, buffers, 100_000)
        watched = Watched(facts, buffers, categories, training=spec.training)
        watchdog = Watchdog(build_detectors(watched))
        watchdog.start(self.position.watch, RunStart("new", buffers, state.optimizer))
        self._watchdog = ByTurns(watchdog, Watchdog(()))
        self._material.objective.observer = lambda facts: self._watchdog.on_micro_batch(facts)
        reporter = Reporter(
            slots=buffers.slots,
            policy=spec.health,
            watchdog=watchdog,
            metrics=TrainerMetrics(registry, buffers.plan),
            exporter=self._exporter,
            run_log=self._run_log,
            progress=LineView(100_000, every=50),
            position=self.position,
        )
        self._optimizer, self._sums = state.optimizer, state.optimizer.sums
        self._telemetry = ByTurns(state.telemetry, NormAlone(buffers))
        self._reporter = ByTurns(reporter, Silent())
        self._parts = Parts(
            training=spec.training,
            plan=build_plan(spec.training, self._material.objective.order),
            objective=self._material.objective,
            buffers=buffers,
            optimizer=state.optimizer,
            telemetry=cast(GradientTelemetry, self._telemetry),
            reporter=cast(Reporter, self._reporter),
            watchdog=cast(Watchdog, self._watchdog),
        )
        self._go, self._done, self._leave = Semaphore(0), Semaphore(0), False
        self._trainer = Thread(target=self._train, daemon=True)
        self._trainer.start()

    def _train(self) -> None:
        """`train` itself, held up after each of its optimizer steps."""
        self._go.acquire()
        try:
            train(
                self._parts,
                self.position,
                stop=lambda: self._leave,
                checkpoint=lambda position: None,
                checkpoint_every=10**9,
                roll_back=lambda position, finding: position,
                after_step=self._wait,
            )
        finally:
            self._done.release()

    def _wait(self, position: RunPosition) -> None:
        self.position = position
        self._done.release()
        self._go.acquire()

    def step(self) -> None:
        """A window of micro-batches, one update, the report of the last step that was measured."""
        self._take_turn(True)
        self._make_step()

    def step_without_telemetry(self) -> None:
        """A window of micro-batches, one update."""
        self._take_turn(False)
        for hooks, _ in self._hooks:
            hooks.clear()
        self._make_step()
        for hooks, usual in self._hooks:
            hooks.update(usual)

    def _take_turn(self, first: bool) -> None:
        for part in (self._telemetry, self._reporter, self._watchdog):
            part.first = first
        # Sums at each step's end and start: forgotten, because steps without them lie between.
        self._optimizer.sums = self._sums if first else None
        if self._sums:
            self._sums.forget()

    def _make_step(self) -> None:
        before = self.position.step
        self._go.release()
        self._done.acquire()
        if self.position.step != before + 1:
            raise RuntimeError("training ended; see the traceback of its thread")

    @property
    def compiled(self) -> bool:
        """Whether the UNet is called through a compiler."""
        return self._material.objective.forward is not self._material.base.unet

    @property
    def told(self) -> int:
        """Last step that the status tells of."""
        return self._exporter.report.step or 0

    def close(self) -> None:
        """Write the run log, end the threads that train, read images and serve metrics."""
        self._leave = True
        self._go.release()
        self._trainer.join()
        self._run_log.flush()
        self._material.objective.close()
        self._exporter.close()


def _hooks_of(buffers: AdapterBuffers) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """The hooks by which telemetry counts backward passes: torch's own tables, and copies."""
    tables = [slot.factor.parameter._post_accumulate_grad_hooks for slot in buffers.slots]
    return [(table, dict(table)) for table in tables if table]


class ByTurns:
    """Stands for one of two parts. first: whether for the first one."""

    def __init__(self, one: object, other: object) -> None:
        self._one, self._other, self.first = one, other, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._one if self.first else self._other, name)


class NormAlone(GradientTelemetry):
    """No telemetry: the norm that clipping needs, and nothing else."""

    def __init__(self, buffers: AdapterBuffers) -> None:
        self._flat = buffers.gradient

    def begin_window(self, window: range, micro_step: int) -> None:
        """Nothing to begin."""

    @contextmanager
    def micro_step(self, micro_step: int) -> Iterator[None]:
        """Nothing around a backward pass."""
        yield

    def measure_gradient(self) -> Tensor:
        """The total L2 norm."""
        norm: Tensor = torch.linalg.vector_norm(self._flat, dtype=torch.float32)
        return norm

    @contextmanager
    def update(self) -> Iterator[None]:
        """Nothing around the optimizer step."""
        yield

    def pack(self, *_: object, **__: object) -> PendingNumbers:
        """Nothing is on its way."""
        return None  # type: ignore[return-value]


class Silent(Reporter):
    """Reports nothing to nobody."""

    def __init__(self) -> None: ...

    def drain(self, saving: bool = False) -> None:
        """Nothing came."""

    def expect(self, pending: PendingNumbers) -> None:
        """Nothing will come."""


def main() -> None:
    """Train a few steps in a process of one's own; print one line of JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as output:
        loop = OurLoop(given.model, given.photos, Path(output))
        for _ in range(given.steps):
            loop.step()
        loop.close()
    print(json.dumps({"peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))
