"""The faults of the benchmark: what is wrong, which finding must name it, and by which step.

Numbers are those of docs/numerics.md. A limit in steps is the fault's first step, plus the
finding's window, plus what the fault needs to show: no more.
"""

import pickle
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from kubelora_trainer.distributed.launcher import launch
from kubelora_trainer.distributed.topology import LOOPBACK, NodeTopology, RankInfo
from kubelora_trainer.utils.signals import RankStopRequest
from tests.numerics import injections as broken
from tests.numerics.audit_faults import REVERSED_FAULTS, UNSTABLE_FAULTS
from tests.numerics.bench import (
    CONTRACT,
    Configuration,
    Document,
    Injection,
    Observation,
    Observe,
    against_a_baseline,
    continue_run,
    observe_run,
    sound,
)
from tests.numerics.faults import Fault, run_with
from tests.numerics.scene import Photographs, Scene
from tests.numerics.step_faults import (
    AVERAGE_FAULTS,
    BASE_FAULTS,
    GRADIENT_FAULTS,
    JUMP_FAULTS,
    OPTIMIZER_FAULTS,
    OVERFLOW_FAULTS,
    SIZE_FAULTS,
    STATE_FAULTS,
)

LOSSY: Document = {
    "accumulator": {"accumulator": "bf16", "allowLossyPrecision": True},
    "masters": {"masterWeights": "bf16", "allowLossyPrecision": True},
    "both": {"accumulator": "bf16", "masterWeights": "bf16", "allowLossyPrecision": True},
}


def resumed_with(
    injection: Injection = sound,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Observe:
    """Eight steps and a checkpoint; then a start whose optimizer is not what was saved."""

    def observe(scene: Scene, seed: int, output: Path) -> Observation:
        configuration = Configuration({"checkpoint": {"everySteps": 8}})
        observe_run(scene, configuration, seed, output, broken.ends_before(9))
        with around():
            return continue_run(scene, configuration, seed, output, injection)

    return observe


def scaled_against_a_baseline(scene: Scene, seed: int, output: Path) -> Observation:
    """A run whose loss is scaled by 1e-4, held against a good one."""
    steps = Configuration({"training": {"steps": 32}})
    return against_a_baseline(scene, steps, seed, output, broken.scaled_loss(1e-4))


def unsynchronised(scene: Scene, seed: int, output: Path) -> Observation:
    """Two ranks over gloo; in step 5 one of them keeps the gradient of its own micro-batches."""
    configuration = Configuration({"workers": {"gpusPerNode": 2}})
    shutil.rmtree(output, ignore_errors=True)
    told = output.with_name("rank-0.pickle")

    def rank(rank_info: RankInfo, stop: RankStopRequest) -> None:
        injection = broken.keeps_its_own_gradient(5) if rank_info.rank == 1 else sound
        seen = continue_run(scene, configuration, seed, output, injection, rank_info)
        if rank_info.rank == 0:
            told.write_bytes(pickle.dumps(seen))

    ends = launch(rank, NodeTopology(1, 0, 2, LOOPBACK, 0), lambda: False, start_method="fork")
    assert all(end.code == 0 for end in ends), ends
    seen: Observation = pickle.loads(told.read_bytes())
    return seen


ONE = Photographs(count=1)
ROUNDED_AFTERWARDS = frozenset({"OptimizerWrong", "StateAltered"})
"""The injection rounds after the optimizer has returned, which is a fault of its own."""
BETWEEN = frozenset({"GradientAltered"})
"""The fault touches gradients between backward and optimizer, which says the same."""

FAULTS: tuple[Fault, ...] = (
    Fault(
        1,
        "bf16 accumulator, 256 coherent micro-batches",
        "AccumulationError",
        8,
        run_with(
            around=broken.one_draw,
            photographs=ONE,
            precision=dict(LOSSY["accumulator"]),
            training={"steps": 8, "gradientAccumulation": 256},
            dataset={"crop": "center"},
            adapter={"rank": 4, "targetPatterns": ["mid_block.*attn.*to_.*"]},  # for speed alone
        ),
        # Sums of both factors are off by 5 %, each in its own way, and the identity with them. What
        # makes them coherent is one draw for all.
        frozenset({"GradientImbalance", "DrawsRepeated"}),
    ),
    *(
        Fault(
            3,
            f"1000-fold term in a bf16 buffer, added {'last' if last else 'first'}",
            "GradientAbsorbed",
            9,
            run_with(
                broken.dominant_term(last),
                precision=dict(LOSSY["accumulator"]),
                training={"gradientAccumulation": 4},
            ),
        )
        for last in (False, True)
    ),
    Fault(
        4,
        "bf16 weights and accumulator, rate 1e-5",
        "UpdatesLost",
        9,
        run_with(precision=dict(LOSSY["both"]), training={"learningRate": 1e-5}),
    ),
    Fault(
        5,
        "bf16 weights, fp32 accumulator, rate 1e-5",
        "UpdatesLost",
        9,
        run_with(precision=dict(LOSSY["masters"]), training={"learningRate": 1e-5}),
    ),
    Fault(
        5,
        "bf16 magnitudes of a DoRA, its matrices in fp32",
        "UpdatesLost",
        9,
        run_with(broken.magnitudes_in(torch.bfloat16), adapter={"rank": 4, "dora": True}),
        sooner=ROUNDED_AFTERWARDS,
    ),
    Fault(
        6,
        "second moment in bf16, gradients drop",
        "OptimizerStuck",
        20,
        run_with(
            lambda parts: broken.second_moment_in(torch.bfloat16)(
                broken.scaled_loss(0.03, from_step=8)(parts)
            ),
            training={"steps": 24},
        ),
        sooner=ROUNDED_AFTERWARDS,
    ),
    Fault(
        6,
        "second moment in 8 bits, all but one in 256 gradients drop",
        "OptimizerStuck",
        # 0.99^-n * (1 - 0.99^(8 + n)) / (1 - 0.99^8) = 4 for n = 21, and five steps for the median:
        # what should fall by 1 % a step rises with its scale instead, which is still filling up.
        34,
        run_with(
            broken.outliers(100.0, dropped=1e-3, from_step=8),
            adapter={"rank": 64},  # smaller factors stay in fp32
            training={"steps": 36, "optimizer": {"name": "adamw8bit", "beta2": 0.99}},
        ),
    ),
    Fault(
        6,
        "second moment in 8 bits, one in 256 gradients is 10,000 times the rest",
        "OptimizerStuck",
        9,
        run_with(
            broken.outliers(1e4),
            adapter={"rank": 64},
            training={"optimizer": {"name": "adamw8bit"}},
        ),
    ),
    Fault(
        7,
        "fp16 backward pass without a scaler",
        "GradientUnderflow",
        9,
        run_with(broken.unscaled, precision={"compute": "fp16"}),
        # What is too small on its way to lora_A is not what is too small on its way to lora_B.
        frozenset({"GradientImbalance"}),
        # In step 2, where lora_B is 1e-4, all of a module's lora_A may be too small, and says so.
        sooner=frozenset({CONTRACT}),
    ),
    Fault(
        8,
        "fp32 gradients cast to fp16",
        "GradientUnderflow",
        9,
        run_with(broken.gradients_through(torch.float16)),
        sooner=BETWEEN,
    ),
    Fault(
        9,
        "loss scaled by 1e-4, against a baseline",
        "BaselineDeparture",
        18,
        scaled_against_a_baseline,
        frozenset({"UpdatesDamped"}),  # gradients of 1e-4 are 1e-8 then, as small as Adam's eps
    ),
    Fault(
        10,
        "Adam's eps 1e-4",
        "UpdatesDamped",
        12,
        run_with(training={"optimizer": {"name": "adamw", "eps": 1e-4}}),
    ),
    *(
        Fault(11, f"{name} in one micro-batch", "GradientNonFinite", 6, run_with(injection))
        for name, injection in (
            ("NaN", broken.non_finite(broken.NAN, step=5)),
            ("Inf", broken.non_finite(broken.INF, step=5)),
        )
    ),
    Fault(
        12,
        "accumulator never zeroed",
        "GradientImbalance",
        9,
        run_with(broken.never_zeroed),
        sooner=BETWEEN,
    ),
    Fault(
        13,
        "one micro-step lost in lora_A",
        "GradientImbalance",
        9,
        run_with(broken.lost_micro_step, training={"gradientAccumulation": 4}),
        sooner=BETWEEN,
    ),
    Fault(
        14,
        "lora_A divided twice by the accumulation count",
        "GradientImbalance",
        9,
        run_with(broken.divided_twice, training={"gradientAccumulation": 4}),
        sooner=BETWEEN,
    ),
    Fault(15, "module detached from the start", CONTRACT, 1, run_with(broken.detached(1))),
    Fault(
        15,
        "module detached on the way",
        "DeadModules",
        18,
        run_with(broken.detached(5), training={"steps": 20}),
    ),
    Fault(
        16,
        "one backward pass for a window's losses",
        "BackwardPassesMissing",
        9,
        run_with(broken.one_backward_per_window(3), training={"gradientAccumulation": 4}),
    ),
    Fault(
        17,
        "learning rate 0 by a schedule bug",
        "LearningRateZero",
        14,
        run_with(
            around=lambda: broken.schedule(lambda step, rate: 0.0 if step > 4 else rate),
            training={"steps": 24},
        ),
    ),
    Fault(
        18,
        "learning rate explodes by a schedule bug",
        "LearningRateAbovePlan",
        9,
        run_with(
            around=lambda: broken.schedule(lambda step, rate: rate * 2.0 ** max(0, step - 5)),
        ),
    ),
    Fault(
        18,
        "learning rate 1, as the job asks",
        # The tiny model's loss stays within its normalisations whatever the weights are.
        "UpdatesTooLarge",
        9,
        run_with(training={"learningRate": 1.0}),
        # Weights of size 1 make every attention certain; a softmax that gives 1 and 0 has the
        # derivative 0, and to_q and to_k with it: in part of the elements, then in all.
        frozenset({"GradientUnderflow", "DeadModules"}),
        sooner=frozenset({"AdapterTooLarge"}),
    ),
    Fault(
        19,
        "lora_B stays 0",
        "OptimizerWrong",
        2,
        run_with(broken.frozen_up_projections),
        sooner=frozenset({"StateAltered"}),
    ),
    Fault(
        21,
        "a rank that keeps its own gradient once",
        "RanksDiverged",
        6,
        unsynchronised,
        # From then on the gradients of two adapters are summed, and held against one of them.
        frozenset({"GradientImbalance"}),
    ),
    Fault(  # known by the manifest's step, before anything has moved
        22,
        "resume without the optimizer's state",
        CONTRACT,
        9,
        resumed_with(around=broken.optimizer_not_loaded),
    ),
    Fault(  # known by the jump in the size of updates
        22,
        "optimizer made anew after the resume",
        "OptimizerStateLost",
        11,
        resumed_with(broken.optimizer_made_anew),
    ),
    Fault(
        23,
        "a category whose latents are zero",
        "LatentsConstant",
        5,
        run_with(
            around=broken.plain_images_encode_to_zero,
            photographs=Photographs(plain=3),
            dataset={"crop": "center"},
        ),
    ),
    Fault(
        24,
        "clipping gets a norm 10000 times too large",
        "ClippingWrong",
        7,
        run_with(broken.wrong_norm(1e4)),
    ),
    Fault(
        25,
        "the working copy is not refreshed any more",
        "WorkingCopyStale",
        11,
        run_with(broken.working_copy_stands_still(10)),
    ),
    Fault(
        26,
        "the VAE's scaling factor is forgotten",
        "LatentsUnscaled",
        5,
        run_with(around=broken.latents_not_scaled, dataset={"crop": "center"}),
    ),
    Fault(  # two samples a step
        27,
        "timesteps stuck at one value",
        "DrawsRepeated",
        9,
        run_with(around=broken.one_timestep),
    ),
    Fault(  # a single step; limits on medians must ignore it
        28,
        "one micro-batch with 300-fold loss, after 25 steps",
        "StepSpiked",
        28,
        run_with(broken.scaled_micro_batch(300.0, step=28), training={"steps": 29}),
    ),
    Fault(
        28,
        "one gradient element of one step times 2^32",
        "GradientCorrupted",
        28,
        run_with(broken.scaled_element(2.0**32, step=28), training={"steps": 29}),
    ),
    *JUMP_FAULTS,
    *STATE_FAULTS,
    *OPTIMIZER_FAULTS,
    *GRADIENT_FAULTS,
    *BASE_FAULTS,
    *SIZE_FAULTS,
    *OVERFLOW_FAULTS,
    *AVERAGE_FAULTS,
    *REVERSED_FAULTS,
    *UNSTABLE_FAULTS,
)
