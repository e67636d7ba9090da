"""The table of numerical limits, shared by watchdog, alert rules and documentation.

Each entry defines what is compared with which limit, over how many optimizer steps, and what the
user should do. Every limit has its reason next to it. Quantities that are not a metric are computed
in the trainer's ``health/detectors/quantities.py``; `THRESHOLDS` are limits on what every step
reports, `EVENTS` are found at other times.
"""

from typing import Final

from kubelora_api import metrics
from kubelora_api.finding_rows import Event as Event
from kubelora_api.finding_rows import Threshold as Threshold
from kubelora_api.findings_of_steps import FOLLOWED_STEP_BY_STEP

ACCUMULATION_ERROR_LAW: Final = 1.7e-3
"""Relative error of a bf16 sum of K like-sized addends, over sqrt((K + 1) / 2): the roundings of
the K - 1 sums, each at most 2^-9 of the sum so far, add up like a random walk. Measured 1.7e-3."""


UPDATES_LOST: Final = Threshold(
    finding="UpdatesLost",
    severity="critical",
    metric=metrics.UPDATE_LOST_RATIO,
    op=">",
    limit=0.5,
    window=5,
    skip_steps=3,
    everywhere=True,
    sentence="Most optimizer updates are too small for the weights' dtype and change nothing: set "
    "precision.masterWeights to fp32; where it is, raise the learning rate of these layers.",
    reason="fp32 masters lose under 3 % of updates at any usable rate; bf16 masters lose 82 % of "
    "lora_A's at 1e-4 and 96 to 99 % at 1e-5.",
)
GRADIENT_ABSORBED: Final = Threshold(
    finding="GradientAbsorbed",
    severity="critical",
    metric=metrics.ABSORBED_RATIO,
    op=">",
    limit=0.05,
    window=5,
    skip_steps=3,
    everywhere=True,
    sentence="Gradients vanish while they are accumulated: set precision.accumulator to fp32.",
    reason="An fp32 sum of like-sized addends absorbs nothing; in bf16 a loss of mass above 5 % "
    "means that one addend dominates or that the window is too long for the dtype.",
)
GRADIENT_NONFINITE: Final = Threshold(
    finding="GradientNonFinite",
    severity="critical",
    metric=metrics.GRAD_NONFINITE,
    op=">",
    limit=0.0,
    window=1,
    skip_steps=0,
    everywhere=True,
    sentence="A gradient is NaN or infinite; no weight was changed by it.",
    reason="No finite loss has such a gradient.",
)
GRADIENT_VANISHED: Final = Threshold(
    finding="GradientVanished",
    severity="critical",
    metric=metrics.GRAD_ZERO_RATIO,
    op=">",
    limit=0.999,
    window=5,
    skip_steps=3,
    everywhere=True,
    sentence="Gradients are exactly zero: a layer is detached from the loss, or the dtype in use "
    "has no number small enough.",
    reason="After the first steps a healthy factor has a zero gradient nowhere but in single rows.",
)
ACCUMULATION_ERROR: Final = Threshold(
    finding="AccumulationError",
    severity="critical",
    metric=metrics.ACCUMULATION_ERROR_RATIO,
    op=">",
    limit=3.0,
    window=5,
    skip_steps=3,
    quantity="error of the window's sum, divided by 1.7e-3 * sqrt((K + 1) / 2)",
    sentence="The sum of a window's gradients is far off: micro-batches of one sign drift in a "
    "narrow type. Set precision.accumulator to fp32.",
    reason="Random signs follow the law for every K; coherent addends grow as K instead and reach "
    "5.8 % at K = 256, where the law predicts 1.9 %.",
)
OPTIMIZER_STUCK: Final = Threshold(
    finding="OptimizerStuck",
    severity="critical",
    metric=metrics.OPTIMIZER_STUCK_RATIO,
    op=">",
    limit=0.5,
    window=5,
    skip_steps=3,
    sentence="The optimizer's second moments do not follow the gradients, so steps have the size "
    "that other gradients ask for: keep its state in fp32 (precision.masterWeights fp32; adamw in "
    "place of adamw8bit).",
    reason="A step moves a moment by (1 - beta2) of what it is off, 0.1 %; fp32 shows that down to "
    "6e-8 and leaves nothing stuck, bf16 from 0.4 % on. In 8 bits a step moves a scale that 256 "
    "elements share, so what counts is whether a moment is off by 4 times, which makes a step "
    "wrong by 2: under 2 % of them in healthy runs, half where one gradient in 256 is some 500 "
    "times the rest.",
)
UPDATES_DAMPED: Final = Threshold(
    finding="UpdatesDamped",
    severity="critical",
    metric=metrics.ADAM_EPS_DAMPING_RATIO,
    op="<",
    limit=0.75,
    window=5,
    skip_steps=3,
    quantity="mean of sqrt(v) / (sqrt(v) + eps) of lora_B",
    sentence="The optimizer's eps is as large as the gradients and takes a part of every step, "
    "most from the smallest: raise training.maxGradNorm where it makes gradients tiny, else lower "
    "training.optimizer.eps (default 1e-8).",
    reason="At 0.75 eps is a third of the root of the second moment. lora_B alone is judged: its "
    "gradients have their size from the first step (0.98 with maxGradNorm 1e-3 on the tiny model, "
    "0.5 to 0.6 with eps 1e-4), those of lora_A begin at 0 and may be as small as eps for a while.",
)
GRADIENT_IMBALANCE: Final = Threshold(
    finding="GradientImbalance",
    severity="critical",
    metric=metrics.LORA_BALANCE,
    op=">",
    limit=0.03,
    limits={"bf16": 0.03, "fp16": 0.01, "fp32": 0.01},
    window=5,
    skip_steps=3,
    quantity="pooled difference of A * grad(A)^T and grad(B)^T * B, relative, in blocks where "
    "these have four numbers or more",
    sentence="The gradients of lora_A and lora_B contradict each other: one of them was lost, "
    "counted twice, scaled or cast on its way. Look at what touches gradients between backward "
    "and optimizer.",
    reason="An identity of the chain rule. Rounding gives 2 to 5e-3 in bf16, 0.4 to 1.4e-3 in "
    "scaled fp16, 1e-7 in fp32 (5e-4 where convolutions run in TF32); a lost micro-step gives 0.1 "
    "to 0.7, a double division 1.6. The limit is six times the worst healthy value or more, and a "
    "third of the least fault. docs/numerics.md derives the healthy values.",
)
GRADIENT_UNDERFLOW: Final = Threshold(
    finding="GradientUnderflow",
    severity="critical",
    metric=metrics.GRAD_ZERO_RATIO,
    op=">",
    limit=0.02,
    window=5,
    skip_steps=3,
    quantity="share of exact zeros in the gradients of modules that have one; left out: "
    "embeddings, and lora_A where adapter.dropout leaves columns without input",
    sentence="Part of the gradient is exactly zero: it went through a type that has no number "
    "small enough. Set precision.compute to bf16 and the accumulator to fp32; where they are, "
    "lower training.learningRate: weights that are too large saturate the layers.",
    reason="Sums of products of continuous numbers are zero by chance alone: medians up to 0.15 % "
    "in bf16, 0 in fp32; fp32 gradients that went through fp16 show 2 to 6 % in lora_A. Embeddings "
    "of sizes and time read sines of 0, which are exactly 0.",
)
DEAD_MODULES: Final = Threshold(
    finding="DeadModules",
    severity="critical",
    metric=metrics.DEAD_MODULE_COUNT,
    op=">",
    limit=0.0,
    window=3,
    skip_steps=3,
    quantity="modules without a gradient for ten steps; not judged where they are just all layers "
    "that read the text",
    sentence="Adapter modules no longer get a gradient: they were detached from the loss on the "
    "way.",
    reason="No gradient of a layer in use is exactly zero ten times in a row. Empty captions may "
    "silence every layer that reads the text, and those alone.",
)
BACKWARD_PASSES_MISSING: Final = Threshold(
    finding="BackwardPassesMissing",
    severity="critical",
    metric=metrics.BACKWARD_PASSES,
    op="<",
    limit=1.0,
    window=3,
    skip_steps=0,
    quantity="backward passes per micro-batch of the window",
    sentence="Losses were summed before they were differentiated, so their gradients were added "
    "in the compute type: call backward() for each micro-batch.",
    reason="Each micro-batch has a backward pass of its own.",
)
LEARNING_RATE_ZERO: Final = Threshold(
    finding="LearningRateZero",
    severity="critical",
    metric=metrics.LEARNING_RATE,
    op="==",
    limit=0.0,
    window=3,
    skip_steps=1,
    quantity="learning rate over its peak, in the first nine tenths of the run",
    sentence="The learning rate is 0 in the middle of the run, so nothing is learned: look at "
    "training.schedule.",
    reason="A schedule is 0 in its first step (warm-up) and at its end; cosine with restarts "
    "touches 0 for a single step.",
)
LEARNING_RATE_ABOVE_PLAN: Final = Threshold(
    finding="LearningRateAbovePlan",
    severity="critical",
    metric=metrics.LEARNING_RATE,
    op=">",
    limit=1.001,
    window=3,
    skip_steps=0,
    quantity="learning rate over its peak",
    sentence="The learning rate is above training.learningRate: look at training.schedule.",
    reason="No schedule exceeds its peak; 0.1 % is room for rounding.",
)
LOSS_DIVERGED: Final = Threshold(
    finding="LossDiverged",
    severity="critical",
    metric=metrics.LOSS,
    op=">",
    limit=20.0,
    window=25,
    skip_steps=25,
    quantity="loss over the median of the first 25 steps' losses",
    sentence="The loss has left the range it began in by far: training diverges. Lower "
    "training.learningRate and go back to a checkpoint from before.",
    reason="A fresh adapter starts at the base model's own loss, which training lowers. The best "
    "possible loss goes from 1 to 0.004 with the timestep: at batch 1 without accumulation the "
    "median of ten losses is one of late timesteps now and then, that of 25 is not. 5,000 steps of "
    "such losses, drawn 3,000 times, show none beyond the limit (medians of ten and nine: 5 %).",
)
UPDATES_TOO_LARGE: Final = Threshold(
    finding="UpdatesTooLarge",
    severity="critical",
    metric=metrics.UPDATE_SCALE,
    op=">",
    limit=1.0,
    window=5,
    skip_steps=3,
    quantity="root mean square of a step's parameter changes, over that of a fresh lora_A in the "
    "same block",
    sentence="Every step changes the weights by as much as they are: look at training.schedule, "
    "lower training.learningRate.",
    reason="A fresh lora_A has elements of 1 / sqrt(3 * inputs): 0.01 to 0.03 in SDXL, 0.07 in the "
    "tiny model. Steps of useful rates are 1e-6 to 1e-3, a factor's own rate and LoRA+ included; "
    "prodigy, whose rate is too large for some steps before it settles, reaches 0.45 of it on the "
    "tiny model, a rate of 1 makes 5.",
)
CLIPPING_WRONG: Final = Threshold(
    finding="ClippingWrong",
    severity="critical",
    metric=metrics.CLIPPED_NORM,
    op=">",
    limit=0.02,
    window=3,
    skip_steps=0,
    quantity="relative distance of the clipped gradient's norm from what maxGradNorm makes of the "
    "norm before",
    sentence="Clipping scaled the gradient by another factor than its norm asks for: a norm was "
    "computed of other numbers than were clipped.",
    reason="One multiplication in fp32 errs by 1e-7, in bf16 by 0.4 % of single elements.",
)
WORKING_COPY_STALE: Final = Threshold(
    finding="WorkingCopyStale",
    severity="critical",
    metric=metrics.WORKING_COPY_STALE_RATIO,
    op=">",
    limit=0.0,
    window=1,
    skip_steps=0,
    sentence="The model computes with other weights than the optimizer moves: its copy was not "
    "refreshed after a step, or something else writes into it. Go back to a checkpoint from "
    "before, and look at what touches the adapter's parameters.",
    reason="After every step the working copy is the master weights, rounded: the same bits. A "
    "copy that is not refreshed gives gradients and losses that look correct.",
)
RANKS_DIVERGED: Final = Threshold(
    finding="RanksDiverged",
    severity="critical",
    metric=metrics.RANK_DIVERGENCE,
    op=">",
    limit=0.0,
    window=1,
    skip_steps=0,
    sentence="The ranks' weights differ: a gradient was not synchronised, or a rank computes "
    "wrongly. Go back to a checkpoint from before.",
    reason="All ranks apply the same update to the same bits.",
)
OPTIMIZER_STATE_LOST: Final = Threshold(
    finding="OptimizerStateLost",
    severity="critical",
    metric=metrics.UPDATE_SCALE,
    op=">",
    limit=1.5,
    window=1,
    skip_steps=0,
    quantity="median size of the first three steps after a resume over that of the last five "
    "before it",
    sentence="Steps after the resume are much larger than before it: the optimizer lost its state. "
    "Resume from a checkpoint with its state.",
    reason="Adam's first steps from nothing have a size of 1 (3.2 where its step count is kept), "
    "settled ones 0.2 to 0.6; moments average over ten steps and more, so a healthy size changes "
    "by some per cent from one step to the next. Prodigy is not judged: its steps grow by "
    "themselves while it finds its rate. Whichever the optimizer, a resume is refused where its "
    "state does not know of every step of the checkpoint's manifest; this limit is for what is "
    "lost later.",
)

THRESHOLDS: Final = (
    UPDATES_LOST,
    GRADIENT_ABSORBED,
    GRADIENT_NONFINITE,
    GRADIENT_VANISHED,
    ACCUMULATION_ERROR,
    OPTIMIZER_STUCK,
    UPDATES_DAMPED,
    GRADIENT_IMBALANCE,
    GRADIENT_UNDERFLOW,
    DEAD_MODULES,
    BACKWARD_PASSES_MISSING,
    LEARNING_RATE_ZERO,
    LEARNING_RATE_ABOVE_PLAN,
    LOSS_DIVERGED,
    UPDATES_TOO_LARGE,
    CLIPPING_WRONG,
    WORKING_COPY_STALE,
    RANKS_DIVERGED,
    OPTIMIZER_STATE_LOST,
)

ROLLED_BACK: Final = Event(
    finding="RolledBack",
    severity="warning",
    quantity="what was measured when training went back",
    sentence="Training returned to an earlier checkpoint and skips the data used since; another "
    "critical finding fails the run.",
    reason="health.policy is Rollback; the message contains the finding that caused it.",
)
LATENTS_CONSTANT: Final = Event(
    finding="LatentsConstant",
    severity="critical",
    quantity="standard deviation of the latents of a category's images",
    limit=0.01,
    sentence="The images of a category have latents without content: the VAE failed on them, or "
    "they are blank. Look at the images; on a VAE that overflows in half precision, set model.vae.",
    reason="SDXL's latents are scaled to a deviation of 1; a photograph of a plain wall has 0.1.",
)
LATENTS_UNSCALED: Final = Event(
    finding="LatentsUnscaled",
    severity="critical",
    quantity="standard deviation of the latents of a category's images",
    limit=3.0,
    sentence="Latents are several times as large as those that the model was made for: the VAE's "
    "scaling_factor was not applied, or is that of another VAE. Look at model.vae and the "
    "scaling_factor in its config.json.",
    reason="A scaling_factor is what brings latents to a deviation of 1 (Rombach et al. 2022, "
    "app. G), of which a category's own may be twice that. Without SDXL's 0.13 they read 7.7.",
)
DRAWS_REPEATED: Final = Event(
    finding="DrawsRepeated",
    severity="critical",
    quantity="samples in a row with one timestep, or with one noise",
    limit=16,
    sentence="Each sample must have a timestep and noise of its own: a generator is reseeded each "
    "time, or draws are rounded to the same value. Stop the run: it learns a single point.",
    reason="Of 1,000 timesteps the same one comes sixteen times in a row with a chance of 1e-45.",
)
BASELINE_DEPARTURE: Final = Event(
    finding="BaselineDeparture",
    severity="critical",
    quantity="gradient norm over the baseline's, medians over 1/24 of the run, two in a row",
    limit=2.0,
    sentence="Gradients have left the range of health.baseline: look at what differs, learning "
    "rate and schedule first. If that is meant, leave health.baseline out.",
    reason="Between seeds the medians differ by some per cent; the limit is the larger of a factor "
    "of 2 and four deviations. A rate cut to a third shows as 0.3 in lora_A from the first bins "
    "on, while the loss stays within 2 %.",
)
STEP_SPIKED: Final = Event(
    finding="StepSpiked",
    severity="warning",
    quantity="logarithm of a step's loss or gradient norm above the median of the 25 steps before, "
    "in deviations of theirs (1.4826 times the median absolute deviation, at least 0.3)",
    limit=8.0,
    sentence="A single step is far above the steps before it: look at its images and captions. If "
    "it happens again on other data, lower training.learningRate; if it does not happen again when "
    "the run is resumed from an earlier checkpoint, suspect the hardware.",
    reason="120 steps of the tiny model in six configurations stay below 2.4 deviations, but for "
    "Prodigy's, whose worst is 4.75 while it finds its rate. The best "
    "possible loss goes from 1 to 0.004 with the timestep: 10,000 losses of one random timestep "
    "each show none beyond the limit. Where all steps are alike, 8 times 0.3 is a factor of 11.",
)
EVENTS: Final = (
    ROLLED_BACK,
    LATENTS_CONSTANT,
    LATENTS_UNSCALED,
    DRAWS_REPEATED,
    BASELINE_DEPARTURE,
    STEP_SPIKED,
)

FINDINGS: Final[tuple[Threshold | Event, ...]] = (*FOLLOWED_STEP_BY_STEP, *THRESHOLDS, *EVENTS)
"""All findings."""

PRECEDENCE: Final[tuple[Threshold | Event, ...]] = (
    # Exact laws of single steps, whose order is that of their table.
    *FOLLOWED_STEP_BY_STEP,
    # The computation itself is wrong, whatever the settings.
    RANKS_DIVERGED,
    WORKING_COPY_STALE,
    OPTIMIZER_STATE_LOST,
    BACKWARD_PASSES_MISSING,
    CLIPPING_WRONG,
    LATENTS_UNSCALED,
    LATENTS_CONSTANT,
    # A setting is wrong, which makes many other numbers look so.
    LEARNING_RATE_ABOVE_PLAN,
    LEARNING_RATE_ZERO,
    UPDATES_TOO_LARGE,
    # A type is too narrow.
    ACCUMULATION_ERROR,
    DRAWS_REPEATED,
    GRADIENT_ABSORBED,
    UPDATES_LOST,
    OPTIMIZER_STUCK,
    BASELINE_DEPARTURE,
    UPDATES_DAMPED,
    # What the causes above can also look like.
    DEAD_MODULES,
    GRADIENT_UNDERFLOW,
    GRADIENT_IMBALANCE,
    GRADIENT_VANISHED,
    GRADIENT_NONFINITE,
    LOSS_DIVERGED,
    STEP_SPIKED,
    ROLLED_BACK,
)
"""All findings, causes before what follows from them: of several, the first is named first."""
_RANKS: Final = {found.finding: rank for rank, found in enumerate(PRECEDENCE)}


def by_precedence(finding: str) -> int:
    """Return a finding's place in the order of precedence; one of another version comes last."""
    return _RANKS.get(finding, len(_RANKS))
