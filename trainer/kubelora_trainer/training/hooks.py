"""Callbacks of the training loop: checkpoint, roll back, sample images."""

from collections.abc import Callable
from dataclasses import dataclass

from kubelora_api.status import Finding
from kubelora_trainer.checkpoint.checkpointer import resume_from, save_checkpoint
from kubelora_trainer.checkpoint.directories import SavedCheckpoint
from kubelora_trainer.checkpoint.rollback import position_after_rollback, roll_back_to
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.distributed.process_group import run_on_rank0
from kubelora_trainer.health.watchdog import HINDSIGHT_STEPS, last_healthy_step
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.storage.run_record import Rollback
from kubelora_trainer.training.context import Run
from kubelora_trainer.training.plan import TrainingPlan
from kubelora_trainer.training.publish import draw
from kubelora_trainer.training.setup import TrainingInputs
from kubelora_trainer.training.start import run_start
from kubelora_trainer.training.step_reporter import Reporter
from kubelora_trainer.training.train_state import TrainState


@dataclass(frozen=True)
class RunHooks:
    """The callbacks of one run. Only rank 0 writes."""

    run: Run
    folder: OutputFolder
    inputs: TrainingInputs
    state: TrainState
    plan: TrainingPlan
    reporter: Reporter
    flush_log: Callable[[], None]

    def checkpoint(self, reached: RunPosition) -> None:
        """Save everything that the run needs to resume from ``reached``."""
        if not self.run.first:
            return
        spec = self.run.job.spec
        self.flush_log()
        saved = save_checkpoint(
            self.folder,
            self.state.buffers,
            self.state.saved_parts,
            self.reporter.position(reached),
            reached.micro_step - self.plan.window(reached.step).start,
            spec.checkpoint.keep,
            HINDSIGHT_STEPS if spec.health.policy == "Rollback" else None,
        )
        self.reporter.checkpointed(saved, self.folder)
        self.run.stop.saved(reached.step)

    def roll_back(self, reached: RunPosition, finding: Finding) -> RunPosition:
        """Roll all ranks back to the last healthy checkpoint, and record it."""
        run, folder, state = self.run, self.folder, self.state
        buffers, parts = state.buffers, state.saved_parts
        earlier: RunPosition | None = None

        def on_rank0() -> tuple[SavedCheckpoint, Rollback]:
            nonlocal earlier
            healthy = last_healthy_step(finding)
            back = roll_back_to(folder, buffers, parts, reached, finding, healthy, run.warn)
            earlier = back.position
            return back.saved, back.rollback

        saved, rollback = run_on_rank0(run.process_group, on_rank0)
        if earlier is None:
            earlier = position_after_rollback(resume_from(saved, folder, buffers, parts), rollback)
        # Barrier: every rank must have read the checkpoint before a new one replaces it.
        run.process_group.all_gather_object(None)
        self.reporter.rewind(earlier, run_start(run, self.inputs, state, earlier, "rolled back"))
        self.checkpoint(earlier)
        folder.record = folder.record.model_copy(update={"rollback": rollback})
        if run.first:
            folder.write_manifest("Running")
        return earlier

    def draw_if_due(self, reached: RunPosition) -> None:
        """Generate sample images every ``validation.everySteps``, except after the last step.

        The export generates those.
        """
        every = self.run.job.spec.validation.every_steps
        due = every and reached.step % every == 0 and reached.step < self.plan.optimizer_steps
        if due and self.run.first:
            with self.state.buffers.using_weights(self.state.result):
                draw(self.run, self.folder, self.inputs, reached.step)
