"""Findings on what happens within a step and between two: exact laws, and no medians.

They come first among all findings, because each of them names a cause of which the limits of
``thresholds.py`` show the effects. Found in the step itself, whose numbers come one step later.
"""

from typing import Final

from kubelora_api.finding_rows import Event

STATE_ALTERED: Final = Event(
    finding="StateAltered",
    severity="critical",
    quantity="tensors (master weights, optimizer's state) whose bits are not those that the last "
    "step left, by the sum of their bit patterns at a step's end and at the next one's start",
    limit=0.0,
    sentence="Between two steps nothing may write there: the device's memory or another part of "
    "the program did. Go back to a checkpoint from before; if it happens again on another node, "
    "look for code that writes, else replace the device.",
    reason="Integer sums are exact in any order, so that one changed bit is seen and nothing else. "
    "Every step is compared, and every state before it is saved.",
)
MICRO_BATCH_LOST: Final = Event(
    finding="MicroBatchLost",
    severity="critical",
    quantity="micro-batches of a window, with a loss, whose backward pass changed none of the "
    "sampled elements of the accumulator, or none of a single factor that other passes changed",
    limit=0.0,
    sentence="Its gradient was lost on both factors, which their balance can't show: look at what "
    "disables gradients, detaches losses, or restores the accumulator.",
    reason="A gradient of continuous numbers changes an fp32 sum. Not judged by single factors: "
    "layers that read the text, which empty captions silence, inputs that are 0 (sizes, dropout), "
    "sums in bf16 and passes in fp16, which may round a small gradient away. Every step.",
)
GRADIENT_ALTERED: Final = Event(
    finding="GradientAltered",
    severity="critical",
    quantity="relative distance of a factor's finished gradient from what the last backward pass "
    "left, divided by the samples and clipped, on eight elements; or factors that changed "
    "between two passes",
    limit=0.02,
    sentence="Something changes gradients between backward and optimizer: a sign, a part of the "
    "window, a cast. Look at what touches them there.",
    reason="Between two passes the bits stay as they are. Division and clipping round fp32 by 1e-7 "
    "and bf16 by 1 % together (its limit is three times this one); a flipped sign reads 2, one "
    "of K micro-batches that is lost 1 / K or more. Every step, with one rank.",
)
OPTIMIZER_WRONG: Final = Event(
    finding="OptimizerWrong",
    severity="critical",
    quantity="share of eight elements of a factor whose change, or whose new state, differs from "
    "the formula's by more than rounding",
    limit=0.2,
    sentence="Look at what wraps or replaces the optimizer, at its parameter groups' rates and "
    "decay, and at what touches its state.",
    reason="The formula is evaluated in fp64 from gradient, state and weights before the step and "
    "from the job's own rate and decay. fp32 kernels agree to 1e-6 of the change; limits are "
    "1e-3 of it and four roundings. Elements that are next to their rounding's size are within "
    "them. Of adamw8bit and adafactor a factor that does not move in three steps is found. "
    "Every step, other elements each time.",
)
BASE_MODEL_ALTERED: Final = Event(
    finding="BaseModelAltered",
    severity="critical",
    quantity="tensors of the frozen base model whose bits are not those that the run started with",
    limit=0.0,
    sentence="Nothing may write there while an adapter is trained: the device's memory or another "
    "part of the program did, and the adapter learns to make up for it. Go back to a "
    "checkpoint from before; if it happens again on another node, look for code that writes, else "
    "replace the device.",
    reason="Integer sums of the bit patterns, as for StateAltered. Compared every 20 steps, at "
    "checkpoints, and at once where a gradient is not finite.",
)
ADAPTER_TOO_LARGE: Final = Event(
    finding="AdapterTooLarge",
    severity="critical",
    quantity="Frobenius norm of a module's update, scale * B * A, over that of its weight, "
    "where it grew by more than 0.006 a step since training started",
    limit=0.3,
    sentence="An adaptation is a small change of the model; this one replaces it, whatever the "
    "loss is. Lower training.learningRate (or adapter.alpha), and go back to a checkpoint from "
    "before.",
    reason="The tiny model after 14 steps: 1e-3 at a rate of 1e-4, 0.02 at 1e-3, 0.02 with LoRA+ "
    "16, 0.05 at rank 1 and alpha 64, 0.3 at 1e-2, 10 at 0.1; after 60 steps of 1e-3 0.09. "
    "A usable rate gets to the limit in time, one that is too large at once: 1e-3 grows by 0.002 "
    "a step and is at 0.5 after 320, 1e-2 grows by 0.02. "
    "Measured in the first 4 steps, every 5 and at checkpoints. Prodigy is shown and not judged: "
    "while it finds its rate it goes to 1 and beyond on the tiny model.",
)
AVERAGE_STALE: Final = Event(
    finding="AverageStale",
    severity="critical",
    quantity="share of eight elements of a factor whose moving average moved by another amount "
    "than (1 - decay) of its distance from the weight, by more than rounding",
    limit=0.2,
    sentence="The average is what is exported: look at what calls its update, and with which "
    "weights and decay.",
    reason="One multiplication and one sum in fp32. Every step, other elements each time.",
)
GRADIENT_CORRUPTED: Final = Event(
    finding="GradientCorrupted",
    severity="critical",
    quantity="largest gradient element of a factor over the largest of the 25 steps before",
    limit=1e4,
    sentence="No data does that: a bit of an exponent flipped. Go back to a checkpoint from before "
    "this step; if it happens again when the run is resumed from there, look at this step's data "
    "and code, else replace the device.",
    reason="A micro-batch with 300 times the loss reads 300, lora_A's gradient grows by 2 to 10 a "
    "step while lora_B leaves 0. The upper bits of an exponent are factors of 65,536 and more. "
    "From the fourth step on, in the step itself.",
)
TOO_MANY_SKIPPED: Final = Event(
    finding="StepsSkipped",
    severity="critical",
    quantity="share of the last 25 steps that fp16's loss scaler skipped, after three in a row "
    "that it did not; or two windows of one sample, all of them skipped",
    limit=0.1,
    sentence="What is in their windows is never learned: look at these images and captions, or "
    "set precision.compute to bf16, which has fp32's range.",
    reason="A settled scale is tried too high once in 2,000 steps. An image that always overflows "
    "is known after two of its windows, or after the share of its windows is a tenth.",
)
COMPUTATION_UNSTABLE: Final = Event(
    finding="ComputationUnstable",
    severity="critical",
    quantity="largest relative distance of a factor's gradient between two passes of a micro-step",
    limit=0.0,
    sentence="Operands, kernels and their order were the same: the device computes wrongly. Have "
    "it checked and let the run resume on another one.",
    reason="Kernels that have once given the same bits give them again; where they never have, "
    "the distance must be 10 times that of two further passes, and above 0.1. Audited are the "
    "first micro-batch of an attempt's steps 2, 4, 8 and so on, then of one step in every 800 "
    "micro-steps.",
)
GRADIENT_REVERSED: Final = Event(
    finding="GradientReversed",
    severity="critical",
    quantity="change of a micro-step's loss along its gradient, over what the gradient predicts; "
    "the same for each factor and the gradient at its module's output",
    limit=-0.3,
    sentence="A step against such a gradient makes the loss larger: a sign is wrong in the loss or "
    "on the way from it to the factors. Look at hooks, custom backward passes and the loss.",
    reason="A central difference reads 1 and a reversed sign -1; rounding in bf16 and a factor "
    "whose gradient is nearly all noise read 0 at worst. By the audits of ComputationUnstable. "
    "Not judged by factors: DoRA, dropout and compiled models.",
)
FOLLOWED_STEP_BY_STEP: Final = (
    COMPUTATION_UNSTABLE,
    BASE_MODEL_ALTERED,
    STATE_ALTERED,
    ADAPTER_TOO_LARGE,
    MICRO_BATCH_LOST,
    GRADIENT_ALTERED,
    GRADIENT_REVERSED,
    OPTIMIZER_WRONG,
    GRADIENT_CORRUPTED,
    AVERAGE_STALE,
    TOO_MANY_SKIPPED,
)
