"""What a run does between its steps: begin or resume, checkpoint, roll back, draw samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kubelora_api.status import Finding
from kubelora_trainer.checkpoint.checkpointer import RunPosition, resume_from, save_checkpoint
from kubelora_trainer.checkpoint.directories import SavedCheckpoint
from kubelora_trainer.checkpoint.rollback import go_back, gone_back
from kubelora_trainer.data.sampler import Plan
from kubelora_trainer.distributed.process_group import led
from kubelora_trainer.health.policy import Rollback
from kubelora_trainer.health.startup_checks import check_dtypes, check_fresh_adapter, check_resumed
from kubelora_trainer.health.watchdog import HINDSIGHT_STEPS, last_healthy_step
from kubelora_trainer.lora.dora import NO_KOHYA_FILE
from kubelora_trainer.optim.build import rate_warning
from kubelora_trainer.optim.lr_schedule import steps_that_moved
from kubelora_trainer.optim.precision import describe_memory, lossy_warnings
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.training.context import Run
from kubelora_trainer.training.publish import draw
from kubelora_trainer.training.rank_sync import resume_together
from kubelora_trainer.training.setup import Material
from kubelora_trainer.training.step_reporter import Reporter
from kubelora_trainer.training.train_state import Learner


def begin(
    run: Run, folder: OutputFolder, material: Material, learner: Learner
) -> tuple[RunPosition, SavedCheckpoint | None]:
    """Resume or start afresh; check and print the start-up contract."""
    buffers = learner.buffers
    resumed = resume_together(run, folder, buffers, learner.saved_parts)
    beside = {"optimizer state": learner.optimizer.state_bytes}
    if learner.average:
        beside["average"] = 4 * buffers.numel
    run.say(f"contract: {check_dtypes(buffers, learner.optimizer)}")
    run.say(f"memory of the adapter: {describe_memory(buffers.copy_bytes() | beside)}")
    doubtful = rate_warning(run.job.spec.training)
    for sentence in [*lossy_warnings(buffers.plan), *([doubtful] if doubtful else [])]:
        run.warn(sentence)
    if run.job.spec.adapter.dora:
        run.warn(NO_KOHYA_FILE)
    if resumed is None:
        if folder.record.total_steps is not None:  # an earlier attempt came as far as training
            run.say("no checkpoint of this run is left, so it begins at its first step again")
        if not run.job.spec.adapter.from_:
            check_fresh_adapter(buffers, material.modules)
            run.say("contract: a fresh adapter, |B·A| = 0")
        no_loss = torch.zeros((), dtype=torch.float64, device=buffers.masters.device)
        return RunPosition(window_loss=no_loss), None
    position, saved = resumed
    held = check_resumed(learner.optimizer, position.step, learner.skipped_steps)
    run.say(f"contract: {held}")
    run.stop.saved(position.step)
    run.say(f"resuming from {saved.path} at step {position.step}")
    folder.record = folder.record.model_copy(update={"rollback": position.rollback})
    return position, saved


@dataclass(frozen=True)
class Session:
    """The run as the training loop calls back into it. Rank 0 alone writes."""

    run: Run
    folder: OutputFolder
    material: Material
    learner: Learner
    plan: Plan
    reporter: Reporter
    flush_log: Callable[[], None]

    def checkpoint(self, reached: RunPosition) -> None:
        """Save everything that the run needs to go on from ``reached``."""
        if not self.run.first:
            return
        spec = self.run.job.spec
        self.flush_log()
        saved = save_checkpoint(
            self.folder,
            self.learner.buffers,
            self.learner.saved_parts,
            self.reporter.position(reached),
            reached.micro_step - self.plan.window(reached.step).start,
            spec.checkpoint.keep,
            HINDSIGHT_STEPS if spec.health.policy == "Rollback" else None,
        )
        self.reporter.checkpointed(saved, self.folder)
        self.run.stop.saved(reached.step)

    def roll_back(self, reached: RunPosition, finding: Finding) -> RunPosition:
        """Go back to the last healthy checkpoint, on all ranks, and record it."""
        run, folder, learner = self.run, self.folder, self.learner
        buffers, parts = learner.buffers, learner.saved_parts
        earlier: RunPosition | None = None

        def on_first() -> tuple[SavedCheckpoint, Rollback]:
            nonlocal earlier
            healthy = last_healthy_step(finding)
            back = go_back(folder, buffers, parts, reached, finding, healthy, run.warn)
            earlier = back.position
            return back.saved, back.rollback

        saved, rollback = led(run.gang, on_first)
        if earlier is None:
            earlier = gone_back(resume_from(saved, folder, buffers, parts), rollback)
        check_resumed(learner.optimizer, earlier.step, learner.skipped_steps)
        run.gang.gathered(None)  # all have read it, before a new checkpoint takes its place
        moved = steps_that_moved(run.job.spec.training, earlier.step, learner.skipped_steps)
        self.reporter.rewind(earlier, moved)
        self.checkpoint(earlier)
        folder.record = folder.record.model_copy(update={"rollback": rollback})
        if run.first:
            folder.write_manifest("Running")
        return earlier

    def draw_if_due(self, reached: RunPosition) -> None:
        """Draw sample images where ``validation.everySteps`` says so; the end draws its own."""
        every = self.run.job.spec.validation.every_steps
        due = every and reached.step % every == 0 and reached.step < self.plan.optimizer_steps
        if due and self.run.first:
            with self.learner.buffers.showing(self.learner.result):
                draw(self.run, self.folder, self.material, reached.step)
