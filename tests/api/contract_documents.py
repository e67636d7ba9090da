"""Documents that both judges must agree on: the API server's and `kubelora validate`.

Each wrong one is the right base document with one thing changed, and names the field that the
message must name. The base is written out by hand, not taken from the models.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]
_REMOVE = object()


def base() -> Document:
    return {
        "apiVersion": "kubelora.dev/v1alpha1",
        "kind": "LoraTrainingJob",
        "metadata": {"name": "bottles"},
        "spec": {
            "model": {"uri": "hf://stabilityai/stable-diffusion-xl-base-1.0", "variant": "fp16"},
            "dataset": {"uri": "pvc://photos/bottles", "resolution": 1024},
            "adapter": {"rank": 64, "alpha": 64, "init": "orthogonal"},
            "training": {"steps": 20000, "gradientAccumulation": 8, "learningRate": 1e-4},
            "output": {"uri": "pvc://adapters/bottles"},
        },
    }


@dataclass(frozen=True)
class Wrong:
    """A wrong document: ``path`` set to ``value``; ``field`` is what a message must name."""

    name: str
    path: str
    value: object
    field: str

    def document(self) -> Document:
        return changed(self.path, self.value)


def changed(path: str, value: object, document: Document | None = None) -> Document:
    """The base document (or a copy of another) with one field set, or taken away."""
    result = deepcopy(document) if document else base()
    target: Any = result
    *parents, last = path.split("/")
    for part in parents:
        target = target.setdefault(part, {})
    if value is _REMOVE:
        del target[last]
    else:
        target[last] = value
    return result


WRONG: tuple[Wrong, ...] = (
    Wrong("negative rank", "spec/adapter/rank", -1, "spec.adapter.rank"),
    Wrong("rank as text", "spec/adapter/rank", "64", "spec.adapter.rank"),
    Wrong("rank too large", "spec/adapter/rank", 4096, "spec.adapter.rank"),
    Wrong("alpha 0", "spec/adapter/alpha", 0, "spec.adapter.alpha"),
    Wrong("unknown targets", "spec/adapter/targets", "atention", "spec.adapter.targets"),
    Wrong(
        "a third text encoder",
        "spec/adapter/textEncoders",
        ["text_encoder", "text_encoder_3"],
        "spec.adapter.textEncoders[1]",
    ),
    Wrong("bad target", "spec/adapter/targetPatterns", ["to_(q"], "spec.adapter.targetPatterns"),
    Wrong("empty target", "spec/adapter/targetPatterns", [""], "spec.adapter.targetPatterns"),
    Wrong("dropout of all", "spec/adapter/dropout", 1.0, "spec.adapter.dropout"),
    Wrong("a config by ftp", "spec/model/config", "ftp://host/sdxl", "spec.model.config"),
    Wrong("unknown prediction", "spec/model/predictionType", "x0", "spec.model.predictionType"),
    Wrong(
        "zero terminal SNR with epsilon",
        "spec/model",
        {"uri": "pvc://m/sdxl", "predictionType": "epsilon", "zeroTerminalSnr": True},
        "spec.model.zeroTerminalSnr",
    ),
    Wrong("start by ftp", "spec/adapter/from", "ftp://host/lora", "spec.adapter.from"),
    Wrong("rsLora as text", "spec/adapter/rsLora", "yes", "spec.adapter.rsLora"),
    Wrong("dora as text", "spec/adapter/dora", "yes", "spec.adapter.dora"),
    Wrong(
        "magnitudes in bf16",
        "spec",
        base()["spec"]
        | {
            "adapter": {"dora": True},
            "precision": {"masterWeights": "bf16", "allowLossyPrecision": True},
        },
        "spec.adapter",
    ),
    Wrong("unknown init", "spec/adapter/init", "zeros", "spec.adapter.init"),
    Wrong("bad pattern", "spec/adapter/rankPattern", {"to_(q": 8}, "spec.adapter.rankPattern"),
    Wrong("look-ahead", "spec/adapter/alphaPattern", {"(?=a)": 8}, "spec.adapter.alphaPattern"),
    Wrong("rank 0 by pattern", "spec/adapter/rankPattern", {"to_q": 0}, "spec.adapter.rankPattern"),
    Wrong("steps and epochs", "spec/training/epochs", 3, "spec.training.steps"),
    Wrong("neither steps nor epochs", "spec/training", {"batchSize": 1}, "spec.training.steps"),
    Wrong("steps 0", "spec/training/steps", 0, "spec.training.steps"),
    Wrong("fractional steps", "spec/training/steps", 10.5, "spec.training.steps"),
    Wrong("learning rate 0", "spec/training/learningRate", 0, "spec.training.learningRate"),
    Wrong("a gamma of 0", "spec/training/minSnrGamma", 0, "spec.training.minSnrGamma"),
    Wrong("an offset above 1", "spec/training/noiseOffset", 1.5, "spec.training.noiseOffset"),
    Wrong("alpha as a colour", "spec/dataset/alpha", "#ffffff", "spec.dataset.alpha"),
    Wrong("batch size 0", "spec/training/batchSize", 0, "spec.training.batchSize"),
    Wrong(
        "accumulation 0",
        "spec/training/gradientAccumulation",
        0,
        "spec.training.gradientAccumulation",
    ),
    Wrong(
        "unknown schedule",
        "spec/training/schedule",
        {"name": "cosin"},
        "spec.training.schedule.name",
    ),
    Wrong(
        "beta2 of 1",
        "spec/training/optimizer",
        {"name": "adamw", "beta2": 1},
        "spec.training.optimizer.beta2",
    ),
    Wrong(
        "cycles of a cosine without restarts",
        "spec/training/schedule",
        {"name": "cosine", "cycles": 2},
        "spec.training.schedule.cycles",
    ),
    Wrong(
        "a power of a line",
        "spec/training/schedule",
        {"name": "linear", "power": 2},
        "spec.training.schedule.power",
    ),
    Wrong(
        "an end above the peak",
        "spec/training/schedule",
        {"name": "polynomial", "endFactor": 1.5},
        "spec.training.schedule.endFactor",
    ),
    Wrong(
        "a rate for a bad pattern",
        "spec/training/learningRates",
        {"[": 1e-4},
        "spec.training.learningRates",
    ),
    Wrong(
        "a rate of 0 for a pattern",
        "spec/training/learningRates",
        {"mid.*": 0},
        "spec.training.learningRates",
    ),
    Wrong(
        "two rates for prodigy",
        "spec/training",
        {"steps": 1, "optimizer": {"name": "prodigy"}, "learningRates": {"mid.*": 0.5}},
        "spec.training.learningRates",
    ),
    Wrong(
        "LoRA+ for prodigy",
        "spec/training",
        {"steps": 1, "optimizer": {"name": "prodigy"}, "loraPlusRatio": 16},
        "spec.training.loraPlusRatio",
    ),
    Wrong("a decay of 1", "spec/training/ema", {"decay": 1}, "spec.training.ema.decay"),
    Wrong("unknown optimizer", "spec/training/optimizer", {"name": "adam"}, "optimizer.name"),
    Wrong(
        "an eps for lion",
        "spec/training/optimizer",
        {"name": "lion", "eps": 1e-8},
        "spec.training.optimizer.eps",
    ),
    Wrong(
        "a beta2 for adafactor",
        "spec/training/optimizer",
        {"name": "adafactor", "beta2": 0.999},
        "spec.training.optimizer.beta2",
    ),
    Wrong(
        "adafactor's setting for adamw",
        "spec/training/optimizer",
        {"scaleParameter": True},
        "spec.training.optimizer.scaleParameter",
    ),
    Wrong(
        "prodigy's setting for adamw",
        "spec/training/optimizer",
        {"safeguardWarmup": False},
        "spec.training.optimizer.safeguardWarmup",
    ),
    Wrong(
        "a first guess of 0",
        "spec/training/optimizer",
        {"name": "prodigy", "initialRate": 0},
        "spec.training.optimizer.initialRate",
    ),
    Wrong("unknown scheme", "spec/model/uri", "gs://bucket/model", "spec.model.uri"),
    Wrong("no organisation", "spec/model/uri", "hf://sdxl", "spec.model.uri"),
    Wrong("a path of this machine", "spec/dataset/uri", "/data/photos", "spec.dataset.uri"),
    Wrong("a file URI", "spec/dataset/uri", "file:///data/photos", "spec.dataset.uri"),
    Wrong("stepping out of a claim", "spec/output/uri", "pvc://a/../b", "spec.output.uri"),
    Wrong("unknown output type", "spec/output/dtype", "int8", "spec.output.dtype"),
    Wrong("output on the hub", "spec/output/uri", "hf://me/adapter", "spec.output.uri"),
    Wrong("vae without scheme", "spec/model/vae", "madebyollin/vae", "spec.model.vae"),
    Wrong("a hub's parent", "spec/model/uri", "hf://org/repo/../other", "spec.model.uri"),
    Wrong(
        "a push to a file", "spec/output/push", "hf://org/repo/a.safetensors", "spec.output.push"
    ),
    Wrong("no model", "spec/model", _REMOVE, "spec.model"),
    Wrong("no output", "spec/output", _REMOVE, "spec.output"),
    Wrong("odd resolution", "spec/dataset/resolution", 1001, "spec.dataset.resolution"),
    Wrong("dropout above 1", "spec/dataset/captionDropout", 1.5, "spec.dataset.captionDropout"),
    Wrong("a named colour", "spec/dataset/background", "white", "spec.dataset.background"),
    Wrong("an edge below 0", "spec/dataset/minShortEdge", -1, "spec.dataset.minShortEdge"),
    Wrong("a ratio below 1", "spec/dataset/maxAspectRatio", 0.5, "spec.dataset.maxAspectRatio"),
    Wrong("a cache on the hub", "spec/dataset/cache", "hf://org/repo", "spec.dataset.cache"),
    Wrong(
        "an extra source of this machine",
        "spec/dataset/extraSources",
        [{"uri": "/data/more"}],
        "spec.dataset.extraSources[0].uri",
    ),
    Wrong(
        "a loss weight of 0",
        "spec/dataset/extraSources",
        [{"uri": "pvc://more", "lossWeight": 0}],
        "spec.dataset.extraSources[0].lossWeight",
    ),
    Wrong("no repeats", "spec/dataset/repeats", 0, "spec.dataset.repeats"),
    Wrong("no column", "spec/dataset/columns", {"image": ""}, "spec.dataset.columns.image"),
    Wrong("flip above 1", "spec/dataset/flip", 2, "spec.dataset.flip"),
    Wrong("unknown crop", "spec/dataset/crop", "centre", "spec.dataset.crop"),
    Wrong("odd bucket step", "spec/dataset/buckets", {"step": 60}, "spec.dataset.buckets.step"),
    Wrong(
        "buckets below the resolution",
        "spec/dataset/buckets",
        {"enabled": True, "maxEdge": 512},
        "spec.dataset.buckets",
    ),
    Wrong(
        "buckets above the resolution",
        "spec/dataset/buckets",
        {"enabled": True, "minEdge": 1088},
        "spec.dataset.buckets",
    ),
    Wrong(
        "negative kept tags",
        "spec/dataset/captions",
        {"keepTags": -1},
        "spec.dataset.captions.keepTags",
    ),
    Wrong(
        "no separator",
        "spec/dataset/captions",
        {"separator": ""},
        "spec.dataset.captions.separator",
    ),
    Wrong("a long prefix", "spec/dataset/captions", {"prefix": "x" * 257}, "spec.dataset.captions"),
    Wrong("a share above 1", "spec/dataset/captions", {"maxMissing": 2}, "spec.dataset.captions"),
    Wrong("unknown layout", "spec/dataset/layout", "onetrainer", "spec.dataset.layout"),
    Wrong("unknown masks", "spec/dataset/maskFiles", "ignore", "spec.dataset.maskFiles"),
    Wrong("unknown duplicates", "spec/dataset/onDuplicate", "drop", "spec.dataset.onDuplicate"),
    Wrong(
        "bf16 accumulator",
        "spec/precision",
        {"accumulator": "bf16"},
        "spec.precision.accumulator",
    ),
    Wrong(
        "bf16 master weights",
        "spec/precision",
        {"masterWeights": "bf16"},
        "spec.precision.masterWeights",
    ),
    Wrong("unknown dtype", "spec/precision", {"compute": "fp8"}, "spec.precision.compute"),
    Wrong("an fp16 sum", "spec/precision", {"accumulator": "fp16"}, "spec.precision.accumulator"),
    Wrong(
        "unknown tracker",
        "spec/tracking",
        {"trackers": ["neptune"]},
        "spec.tracking.trackers",
    ),
    Wrong("a queue that is no DNS name", "spec/queueName", "Team Studio", "spec.queueName"),
    Wrong("a queue of an empty label", "spec/queueName", "team..studio", "spec.queueName"),
    Wrong("a queue longer than a label", "spec/queueName", "q" * 64, "spec.queueName"),
    Wrong("scratch without a unit", "spec/podTemplate", {"scratchSize": "9"}, "scratchSize"),
    Wrong("a project with a space", "spec/tracking", {"project": "a b"}, "spec.tracking.project"),
    Wrong("pushed to a claim", "spec/output/push", "pvc://adapters/x", "spec.output.push"),
    Wrong(
        "an unknown condition",
        "spec/health",
        {"dumpGradients": {"when": "absmax <= 1e-4"}},
        "spec.health.dumpGradients.when",
    ),
    Wrong(
        "a condition that ends in and",
        "spec/health",
        {"dumpGradients": {"when": "norm > 1 and "}},
        "spec.health.dumpGradients.when",
    ),
    Wrong(
        "a budget without unit",
        "spec/health",
        {"dumpGradients": {"budget": "1000"}},
        "spec.health.dumpGradients.budget",
    ),
    Wrong(
        "a bad module to dump",
        "spec/health",
        {"dumpGradients": {"modules": ["to_(q"]}},
        "spec.health.dumpGradients.modules",
    ),
    Wrong("compile as text", "spec/training/compile", "yes", "spec.training.compile"),
    Wrong("unknown policy", "spec/health", {"policy": "warn"}, "spec.health.policy"),
    Wrong(
        "a baseline at an unknown place",
        "spec/health",
        {"baseline": "ftp://host/run"},
        "spec.health.baseline",
    ),
    Wrong("keep no checkpoint", "spec/checkpoint", {"keep": 0}, "spec.checkpoint.keep"),
    Wrong("workers 0", "spec/workers", {"nodes": 0}, "spec.workers.nodes"),
    Wrong("workers as a number", "spec/workers", 0, "spec.workers"),
    Wrong("65 nodes", "spec/workers", {"nodes": 65}, "spec.workers.nodes"),
    Wrong("17 GPUs a node", "spec/workers", {"gpusPerNode": 17}, "spec.workers.gpusPerNode"),
    Wrong(
        "more GPUs than micro-batches",
        "spec/workers",
        {"nodes": 3, "gpusPerNode": 3},
        "spec.training",
    ),
    Wrong(
        "hostPath",
        "spec/podTemplate",
        {"volumes": [{"name": "disk", "hostPath": {"path": "/"}}]},
        "spec.podTemplate.volumes[0].hostPath",
    ),
    Wrong(
        "projected token",
        "spec/podTemplate",
        {"volumes": [{"name": "token", "projected": {"sources": []}}]},
        "spec.podTemplate.volumes[0].projected",
    ),
    Wrong(
        "another GPU limit",
        "spec/podTemplate",
        {"resources": {"limits": {"nvidia.com/gpu": 2}}},
        "spec.podTemplate",
    ),
    Wrong(
        "an environment name of ours",
        "spec/podTemplate",
        {"env": [{"name": "KUBELORA_ATTEMPT", "value": "9"}]},
        "spec.podTemplate.env[0].name",
    ),
    Wrong(
        "a label of ours",
        "spec/podTemplate",
        {"labels": {"kubelora.dev/job": "other"}},
        "spec.podTemplate.labels",
    ),
    Wrong(
        "root",
        "spec/podTemplate",
        {"securityContext": {"runAsUser": 0}},
        "spec.podTemplate.securityContext.runAsUser",
    ),
    Wrong(
        "no time for a checkpoint",
        "spec/podTemplate",
        {"terminationGracePeriodSeconds": 5},
        "spec.podTemplate.terminationGracePeriodSeconds",
    ),
    Wrong(
        "memory size without unit",
        "spec/podTemplate",
        {"sharedMemorySize": "lots"},
        "spec.podTemplate.sharedMemorySize",
    ),
    Wrong("a name Indexed Jobs can't have", "metadata/name", "7bottles", "metadata.name"),
    Wrong("a name with a dot", "metadata/name", "bottles.v2", "metadata.name"),
    Wrong("a name too long", "metadata/name", "b" * 41, "metadata.name"),
    Wrong("a typo", "spec/dataset/resolutoin", 512, "spec.dataset.resolutoin"),
    Wrong("a typo of a group", "spec/trainning", {"steps": 1}, "spec.trainning"),
    Wrong(
        "a typo in the pod",
        "spec/podTemplate",
        {"nodeSelectors": {"gpu": "a100"}},
        "spec.podTemplate.nodeSelectors",
    ),
    Wrong("suspend as text", "spec/suspend", "yes", "spec.suspend"),
    Wrong("a deadline of 0", "spec/activeDeadlineSeconds", 0, "activeDeadlineSeconds"),
    Wrong("no time to wait", "spec/pendingDeadlineSeconds", 0, "pendingDeadlineSeconds"),
    Wrong("a negative ttl", "spec/ttlSecondsAfterFinished", -1, "ttlSecondsAfterFinished"),
    Wrong("negative restarts", "spec/restartPolicy", {"maxRestarts": -1}, "maxRestarts"),
)

RIGHT: dict[str, Document] = {
    "the example": base(),
    "least": changed(
        "spec",
        {
            "model": {"uri": "pvc://models"},
            "dataset": {"uri": "s3://bucket/photos"},
            "training": {"epochs": 1},
            "output": {"uri": "pvc://out"},
        },
    ),
    "a revision": changed("spec/model/uri", "hf://org/repo@refs/pr/3"),
    "a file on the hub": changed("spec/model/uri", "hf://org/repo/a/fine.safetensors@v1"),
    "a DoRA": changed("spec/adapter", {"dora": True, "targets": "all", "dropout": 0.1}),
    "lossy, and meant": changed(
        "spec/precision",
        {"accumulator": "bf16", "masterWeights": "bf16", "allowLossyPrecision": True},
    ),
    "prodigy": changed(
        "spec/training",
        {
            "steps": 100,
            "optimizer": {
                "name": "prodigy",
                "rateCoefficient": 2,
                "initialRate": 1e-5,
                "biasCorrection": True,
                "safeguardWarmup": True,
                "weightDecay": 0.01,
            },
        },
    ),
    "a schedule with restarts": changed(
        "spec/training/schedule", {"name": "cosine_with_restarts", "cycles": 3, "warmupSteps": 9}
    ),
    "a polynomial schedule": changed(
        "spec/training/schedule", {"name": "polynomial", "power": 2, "endFactor": 0.1}
    ),
    "rates by factor, LoRA+ and an average": changed(
        "spec/training",
        {
            "steps": 100,
            "learningRates": {r"text_encoder.*": 5e-5, r".*to_k\.lora_B": 1e-3},
            "loraPlusRatio": 16,
            "ema": {"enabled": True, "decay": 0.9999, "warmup": False},
        },
    ),
    "adafactor": changed(
        "spec/training/optimizer",
        {"name": "adafactor", "scaleParameter": True, "beta1": 0.9, "eps": 1e-30},
    ),
    "lion": changed("spec/training/optimizer", {"name": "lion", "beta1": 0.95, "beta2": 0.98}),
    "8-bit state": changed("spec/training/optimizer", {"name": "adamw8bit", "eps": 1e-6}),
    "computed in fp16": changed("spec/precision", {"compute": "fp16"}),
    "tracked": changed(
        "spec/tracking", {"trackers": ["tensorboard", "wandb", "mlflow"], "project": "studio"}
    ),
    "pushed to a bucket": changed("spec/output/push", "s3://adapters/bottles"),
    "pushed to the hub": changed("spec/output/push", "hf://studio/bottles@may"),
    "compiled": changed("spec/training/compile", True),
    "a file in fp16": changed("spec/output/dtype", "fp16"),
    "v-prediction with zero terminal SNR": changed(
        "spec/model",
        {"uri": "pvc://m/sdxl", "predictionType": "v_prediction", "zeroTerminalSnr": True},
    ),
    "zero terminal SNR, as the model predicts": changed("spec/model/zeroTerminalSnr", True),
    "a single file": changed(
        "spec/model",
        {"uri": "pvc://models/sdxl.safetensors", "config": "pvc://models/sdxl-base"},
    ),
    "a warm start": changed("spec/adapter/from", "pvc://adapters/may/adapter/may.safetensors"),
    "both text encoders": changed("spec/adapter/textEncoders", ["text_encoder", "text_encoder_2"]),
    "convolutions": changed("spec/adapter/targets", "all"),
    "target patterns": changed("spec/adapter/targetPatterns", [r"attn2\.to_[kv]", "conv1"]),
    "dropout and rsLora": changed(
        "spec/adapter/rsLora", True, changed("spec/adapter/dropout", 0.1)
    ),
    "patterns": changed("spec/adapter/rankPattern", {r"down_blocks\.\d+.*to_q": 8, "mid.*": 128}),
    "the right GPU limit as a number": changed(
        "spec/podTemplate", {"resources": {"limits": {"nvidia.com/gpu": 1, "memory": "48Gi"}}}
    ),
    "the right GPU limit as text": changed(
        "spec/podTemplate", {"resources": {"limits": {"nvidia.com/gpu": "1", "cpu": 4}}}
    ),
    "a pod of one's own": changed(
        "spec/podTemplate",
        {
            "image": "registry.example/trainer:1",
            "env": [
                {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "t"}}}
            ],
            "envFrom": [{"secretRef": {"name": "more"}}],
            "nodeSelector": {"gpu": "a100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1Gi"}}],
            "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            "labels": {"team": "studio"},
        },
    ),
    "deadlines": changed(
        "spec/activeDeadlineSeconds",
        3600,
        changed("spec/pendingDeadlineSeconds", 1, changed("spec/ttlSecondsAfterFinished", 0)),
    ),
    "a queue, suspended": changed("spec/suspend", True, changed("spec/queueName", "team-studio")),
    "the shortest name": changed("metadata/name", "b"),
    "the longest name": changed("metadata/name", "b" * 40),
    "buckets, mirrored, with tags": changed(
        "spec/dataset",
        {
            "uri": "pvc://photos",
            "buckets": {"enabled": True, "step": 32, "minEdge": 512, "maxEdge": 1024},
            "crop": "center",
            "flip": 0.5,
            "captionDropout": 0.1,
            "cache": "pvc://scratch/cache",
            "repeats": 4,
            "columns": {"image": "photo", "caption": "en", "category": "product"},
            "extraSources": [
                {"uri": "hf://org/photos@main", "repeats": 2, "category": "cans"},
                {
                    "uri": "pvc://photos/class",
                    "lossWeight": 0.5,
                    "caption": "a photo of a bottle",
                    "usePrefix": False,
                },
            ],
            "captions": {
                "prefix": "zwx",
                "shuffleTags": True,
                "keepTags": 2,
                "separator": ";",
                "maxMissing": 1,
            },
        },
    ),
    "strict about its images": changed(
        "spec/dataset",
        {
            "uri": "pvc://photos",
            "onBadImage": "skip",
            "layout": "kohya",
            "maskFiles": "use",
            "onDuplicate": "skip",
            "minShortEdge": 512,
            "maxAspectRatio": 2.5,
            "background": "#8080FF",
        },
    ),
    "weighted losses": changed(
        "spec/training/minSnrGamma",
        5,
        changed("spec/training/noiseOffset", 0.05, changed("spec/dataset/alpha", "mask")),
    ),
    "suspended by its findings": changed("spec/health", {"policy": "Suspend"}),
    "held against a good run": changed(
        "spec/health", {"policy": "Suspend", "baseline": "pvc://adapters/bottles-may"}
    ),
    "back once": changed("spec/health", {"policy": "Rollback"}),
    "back once, with two nodes": changed(
        "spec/workers", {"nodes": 2}, changed("spec/health", {"policy": "Rollback"})
    ),
    "gradients dumped by default": changed("spec/health", {"dumpGradients": {}}),
    "gradients dumped on a condition": changed(
        "spec/health",
        {
            "policy": "Warn",
            "dumpGradients": {
                "modules": [r"attn2\.to_[kv]", "to_q.lora_A"],
                "when": "absmax < 1e-4 and absmax > 0 and zero_ratio < 0.5",
                "budget": "2Gi",
            },
        },
    ),
    "on a CPU": changed("spec/workers", {"gpusPerNode": 0}),
    "as many GPUs as micro-batches": changed("spec/workers", {"nodes": 2, "gpusPerNode": 4}),
    "eight nodes without GPUs": changed("spec/workers", {"nodes": 8, "gpusPerNode": 0}),
    "a null is an absent field": changed("spec/adapter/alpha", None),
}


@dataclass(frozen=True)
class Change:
    """A change of a started job; ``field`` is refused, or None where the change is right."""

    name: str
    edit: Callable[[Document], Document]
    field: str | None


CHANGES: tuple[Change, ...] = (
    Change("the rank", lambda d: changed("spec/adapter/rank", 8, d), "spec.adapter"),
    Change("the steps", lambda d: changed("spec/training/steps", 9, d), "spec.training"),
    Change("the model", lambda d: changed("spec/model/uri", "hf://a/b", d), "spec.model"),
    Change("the data", lambda d: changed("spec/dataset/resolution", 512, d), "spec.dataset"),
    Change("the output", lambda d: changed("spec/output/uri", "pvc://b", d), "spec.output"),
    Change(
        "the precision",
        lambda d: changed("spec/precision", {"compute": "fp32"}, d),
        "spec.precision",
    ),
    Change("the policy", lambda d: changed("spec/health", {"policy": "Suspend"}, d), None),
    Change("suspension", lambda d: changed("spec/suspend", True, d), None),
    Change("a deadline", lambda d: changed("spec/activeDeadlineSeconds", 9, d), None),
    Change("more restarts", lambda d: changed("spec/restartPolicy", {"maxRestarts": 9}, d), None),
    Change(
        "more memory",
        lambda d: changed("spec/podTemplate", {"resources": {"limits": {"memory": "64Gi"}}}, d),
        None,
    ),
    Change("a default written out", lambda d: changed("spec/training/seed", 0, d), None),
)
