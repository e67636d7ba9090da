"""Healthy runs: one factor varied at a time, and not one critical finding or warning among them.

Each is a configuration that people use, or a phase that looks ill and is not: lora_A without a
gradient at the start, a rate of 0, clipping, captions without words.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests.numerics import injections
from tests.numerics.bench import (
    Configuration,
    Injection,
    Observation,
    against_a_baseline,
    continue_run,
    observe_run,
    sound,
)
from tests.numerics.scene import Photographs, Scene

Run = Callable[[Scene, Configuration, int, Path, Injection], Observation]
"""A run, or several in a row, of a configuration and a seed into a folder."""


@dataclass(frozen=True)
class Healthy:
    """One configuration. run: how a run of it is done; as a whole, by itself, if nothing else."""

    name: str
    configuration: Configuration
    injection: Injection = sound
    run: Run = observe_run

    def observe(self, scene: Scene, seed: int, output: Path) -> Observation:
        """The run of a seed."""
        return self.run(scene, self.configuration, seed, output, self.injection)


def resumed(
    scene: Scene, configuration: Configuration, seed: int, output: Path, injection: Injection
) -> Observation:
    """A run that ends in the middle of its tenth window and goes on from its ninth step."""
    every = {"checkpoint": {"everySteps": 9}}
    cut = replace(configuration, spec={**configuration.spec, **every})
    first = observe_run(scene, cut, seed, output, injections.ends_before(10))
    assert first.steps == 9, first
    rest = continue_run(scene, cut, seed, output, injection)
    assert rest.numbers[0].step == 10, rest
    return replace(rest, findings={**first.findings, **rest.findings})


def vary(
    name: str,
    injection: Injection = sound,
    photographs: Photographs | None = None,
    **spec: dict[str, object],
) -> Healthy:
    """The plain job with ``spec``'s fields."""
    return Healthy(name, Configuration(spec, photographs or Photographs()), injection)


HEALTHY: tuple[Healthy, ...] = (
    vary("plain: B = 0 at the start"),
    vary("fp32 compute", precision={"compute": "fp32"}),
    vary("fp16 compute, the scaler settles", precision={"compute": "fp16"}),
    vary(
        "fault 2: bf16 accumulator, 8 micro-batches",
        precision={"accumulator": "bf16", "allowLossyPrecision": True},
        training={"gradientAccumulation": 8},
    ),
    vary("accumulation 1", training={"gradientAccumulation": 1}),
    vary("accumulation 8", training={"gradientAccumulation": 8}),
    vary("batch size 2", training={"batchSize": 2}),
    vary("warm-up from rate 0", training={"schedule": {"name": "constant", "warmupSteps": 4}}),
    vary("cosine to rate 0", training={"schedule": {"name": "cosine"}, "steps": 20}),
    vary(
        "rate 1e-6, a warm-up of 500 steps",
        training={"learningRate": 1e-6, "schedule": {"name": "constant", "warmupSteps": 500}},
    ),
    vary(
        "fp16 compute, rate 1e-5, a warm-up of 1000 steps",
        precision={"compute": "fp16"},
        training={"learningRate": 1e-5, "schedule": {"name": "constant", "warmupSteps": 1000}},
    ),
    vary(
        "cosine with warm-up",
        training={"schedule": {"name": "cosine", "warmupSteps": 3}, "steps": 20},
    ),
    vary("rate 1e-3", training={"learningRate": 1e-3}),
    vary("rate 1e-5", training={"learningRate": 1e-5}),
    vary("rank 256, alpha 64", adapter={"rank": 256, "alpha": 64.0}),
    vary("rank 1, alpha 64", adapter={"rank": 1, "alpha": 64.0}),
    vary("clipping to 0.01", training={"maxGradNorm": 0.01}),
    vary("clipping to 100", training={"maxGradNorm": 100.0}),
    vary("one image", photographs=Photographs(count=1)),
    vary("two images", photographs=Photographs(count=2)),
    vary(
        "64 micro-batches of one image",
        photographs=Photographs(count=1),
        training={"gradientAccumulation": 64, "steps": 6},
    ),
    *(
        vary(
            f"{name} with warm-up",
            training={
                "optimizer": {"name": name},
                "learningRate": rate,
                "schedule": {"name": "constant", "warmupSteps": 5},
                "steps": 20,
            },
        )
        for name, rate in (("lion", 1e-5), ("prodigy", 1.0), ("adafactor", 1e-4))
    ),
    vary("clipping at work", training={"maxGradNorm": 1e-3}),
    vary("no clipping", training={"maxGradNorm": 0.0}),
    vary("gradient checkpointing", training={"gradientCheckpointing": True}),
    vary("empty captions", photographs=Photographs(captions=False)),
    vary("caption dropout", dataset={"captionDropout": 0.3}),
    vary(
        "dataset smaller than a window",
        photographs=Photographs(count=2),
        training={"gradientAccumulation": 4},
    ),
    vary(
        "epochs, the last window short",
        training={"steps": None, "epochs": 5, "gradientAccumulation": 3},
    ),
    vary("masked loss", photographs=Photographs(opaque=0.5), dataset={"alpha": "mask"}),
    vary("min-SNR", training={"minSnrGamma": 5.0}),
    vary("offset noise", training={"noiseOffset": 0.05}),
    vary("flips and crops", dataset={"flip": 0.5}),
    vary("v-prediction", model={"predictionType": "v_prediction"}),
    vary(
        "v-prediction, zero terminal SNR",
        model={"predictionType": "v_prediction", "zeroTerminalSnr": True},
    ),
    vary(
        "one micro-batch with 300-fold loss",
        injections.scaled_micro_batch(300.0, step=8),
        training={"gradientAccumulation": 4},
    ),
    vary("60 steps of one image each", training={"gradientAccumulation": 1, "steps": 60}),
    vary(
        "60 steps, rate 1e-3, a warm-up of 20 steps",
        training={
            "learningRate": 1e-3,
            "schedule": {"name": "cosine", "warmupSteps": 20},
            "steps": 60,
        },
    ),
    *(
        vary(f"schedule {name}", training={"schedule": {"name": name, **more}, "steps": 20})
        for name, more in (
            ("linear", {}),
            ("cosine_with_restarts", {"cycles": 2}),
            ("polynomial", {"power": 2.0, "endFactor": 0.1}),
        )
    ),
    *(
        vary(name, adapter={"rank": 64}, training={"optimizer": {"name": name}, **more})
        for name, more in (
            ("adamw8bit", {}),
            ("lion", {"learningRate": 1e-5}),
            ("adafactor", {}),
            ("prodigy", {"learningRate": 1.0, "steps": 24}),
        )
    ),
    vary(
        "adamw8bit, all gradients drop to a thousandth",
        injections.scaled_loss(1e-3, from_step=8),
        adapter={"rank": 64},
        training={"optimizer": {"name": "adamw8bit"}, "steps": 24},
    ),
    vary("moving average", training={"ema": {"enabled": True}}),
    vary("LoRA+, ratio 16", training={"loraPlusRatio": 16.0}),
    vary("rates by factor", training={"learningRates": {"mid_block.*": 1e-5}}),
    vary("beta2 0.99", training={"optimizer": {"name": "adamw", "beta2": 0.99}}),
    vary("no weight decay", training={"optimizer": {"name": "adamw", "weightDecay": 0.0}}),
    vary("rank 1", adapter={"rank": 1}),
    vary("rank 16", adapter={"rank": 16}),
    vary("rank 128", adapter={"rank": 128}),
    vary("alpha 1", adapter={"alpha": 1.0}),
    vary("rsLoRA, rank 64", adapter={"rank": 64, "rsLora": True}),
    vary("orthogonal A", adapter={"init": "orthogonal"}),
    vary("gaussian A", adapter={"init": "gaussian"}),
    vary("dropout", adapter={"dropout": 0.1}),
    vary(
        "dropout in layers that read one vector, accumulation 1",
        adapter={"dropout": 0.3, "targets": "all_linear"},
        training={"gradientAccumulation": 1},
    ),
    vary("feed-forward layers too", adapter={"targets": "attention+feed_forward"}),
    vary("all linear layers", adapter={"targets": "all_linear"}),
    vary("convolutions", adapter={"targets": "all"}),
    vary("DoRA", adapter={"dora": True}),
    vary("DoRA, fp32 compute", adapter={"dora": True}, precision={"compute": "fp32"}),
    vary("DoRA, fp16 compute", adapter={"dora": True}, precision={"compute": "fp16"}),
    vary("DoRA, convolutions", adapter={"dora": True, "targets": "all"}),
    vary(
        "DoRA, dropout, rsLoRA, gradient checkpointing",
        adapter={"dora": True, "dropout": 0.1, "rsLora": True},
        training={"gradientCheckpointing": True},
    ),
    vary("DoRA, rate 1e-5", adapter={"dora": True}, training={"learningRate": 1e-5}),
    vary(
        "DoRA, prodigy, rank 64",
        adapter={"dora": True, "rank": 64},
        training={"optimizer": {"name": "prodigy"}, "learningRate": 1.0, "steps": 24},
    ),
    vary("DoRA, empty captions", photographs=Photographs(captions=False), adapter={"dora": True}),
    vary(
        "DoRA, both text encoders",
        adapter={"dora": True, "textEncoders": ["text_encoder", "text_encoder_2"]},
    ),
    Healthy(
        "DoRA, warm start from a plain adapter",
        Configuration({"adapter": {"dora": True}}, warm=True),
    ),
    vary("frozen layers", adapter={"targetPatterns": [r"up_blocks.*to_[qv]"]}),
    vary("first text encoder too", adapter={"textEncoders": ["text_encoder"]}),
    vary("both text encoders too", adapter={"textEncoders": ["text_encoder", "text_encoder_2"]}),
    Healthy("warm start from a trained adapter", Configuration(warm=True)),
    Healthy(
        "against a baseline of another seed",
        Configuration({"training": {"steps": 32}}),
        run=against_a_baseline,
    ),
    Healthy(
        "against a baseline of another seed, cosine",
        Configuration({"training": {"steps": 48, "schedule": {"name": "cosine"}}}),
        run=against_a_baseline,
    ),
    *(
        Healthy(
            f"interrupted and resumed, {name}",
            Configuration({"adapter": {"rank": 64}, "training": training}),
            run=resumed,
        )
        for name, training in (
            ("adamw", {}),
            ("adamw8bit", {"optimizer": {"name": "adamw8bit"}}),
            ("prodigy", {"optimizer": {"name": "prodigy"}, "learningRate": 1.0, "steps": 20}),
        )
    ),
)
