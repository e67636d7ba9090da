"""A step on a GPU, without one: torch's fake tensors say they are on CUDA and hold no numbers.

They refuse to mix devices, and to give a number to the host, which would make it wait. What they
can't show is a number that is wrong. Optimizers of other libraries than torch are left out: they
must know on the host whether the gradient is finite, and wait once a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode

from kubelora_api.documents import parse_job
from kubelora_api.spec import Adapter
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.cli.demo import DemoPaths
from kubelora_trainer.data.dataset import build_dataset
from kubelora_trainer.distributed.process_group import ReducedWindow
from kubelora_trainer.distributed.reduce_payload import ControlFlags
from kubelora_trainer.health.detector import RunStart
from kubelora_trainer.health.detectors import Watched, build_detectors
from kubelora_trainer.health.detectors.quantities import facts_of
from kubelora_trainer.health.watch_state import WatchState
from kubelora_trainer.health.watchdog import Watchdog
from kubelora_trainer.lora.adapter import AdapterModule
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from kubelora_trainer.telemetry import counters as window_counts
from kubelora_trainer.telemetry.host_transfer import PendingNumbers
from kubelora_trainer.training.context import Run, RunOptions
from kubelora_trainer.training.loop import Parts, accumulate_window, take_step
from kubelora_trainer.training.plan import build_plan
from kubelora_trainer.training.setup import TrainingInputs, add_adapters
from kubelora_trainer.training.train_state import build_train_state
from kubelora_trainer.utils.signals import StopRequest
from tests.trainer.fixtures.jobs import open_base

CUDA = torch.device("cuda", 0)


def on_the_host(tensor: torch.Tensor) -> bool:
    """Whether a fake tensor says that it is; one that is real has its numbers."""
    return isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


COPIES: dict[Any, tuple[str, ...]] = {
    torch.ops.aten._to_copy.default: ("source",),
    torch.ops.aten.copy_.default: ("target", "source", "non_blocking"),
}
"""Operations that copy, with the names of their arguments."""


class Waits(TorchDispatchMode):
    """Notes every copy between host and device for which the host waits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and on_the_host(args[0]):
            return 0.0  # the host reads its own memory
        result = func(*args, **(kwargs or {}))
        given = dict(zip(COPIES.get(func, ()), args, strict=False)) | (kwargs or {})
        if func in COPIES and not given.get("non_blocking", False):
            source, target = given["source"].device.type, result.device.type
            if source != target:
                self.seen.append(f"{source} to {target}: {tuple(result.shape)}")
        return result


@dataclass
class Event:
    """In place of a CUDA event: whether anybody has waited for it."""

    waited: bool = field(default=False)

    def record(self) -> None:
        """The copy that it stands for is fake."""

    def synchronize(self) -> None:
        self.waited = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Waits]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(window_counts, "device_memory_peak", lambda device: 0.0)
    with FakeTensorMode(allow_non_fake_inputs=True), Waits() as waits:
        yield waits


def moved(model: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Give the model parameters and buffers without numbers on a GPU that is not there.

    new: filled with each parameter's successor, by its id. (`Module.to` can't swap fake tensors.)
    """
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=CUDA)
                new[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = new[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)


def adapter_on_cuda(base: BaseModel, spec: Adapter) -> tuple[AdapterModule, ...]:
    """The model with its adapter, made as ever and then moved."""
    with unset_fake_temporarily():
        modules = add_adapters(base, spec, 0)
    new: dict[int, nn.Parameter] = {}
    for model in (base.unet, base.vae, *base.text_encoders):
        moved(model, new)
    return tuple(
        replace(
            one,
            lora_a=new[id(one.lora_a)],
            lora_b=new[id(one.lora_b)],
            magnitude=None if one.magnitude is None else new[id(one.magnitude)],
        )
        for one in modules
    )


@dataclass
class Rig:
    """Parts and position of a run, and the numbers of its last step, on their way."""

    objective: SdxlObjective
    parts: Parts
    position: RunPosition
    pending: PendingNumbers | None = None

    def window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One optimizer step as the training loop makes it.

        torch's engine asks the device itself; what it does in the end is done here.
        """

        def backward(loss: torch.Tensor) -> None:
            assert loss.requires_grad
            for slot in self.parts.buffers.slots:
                parameter: Any = slot.factor.parameter
                parameter.grad.add_(torch.empty_like(parameter))
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                    hook(parameter)

        monkeypatch.setattr(torch.Tensor, "backward", backward)
        at = accumulate_window(self.parts, self.position, lambda: False)
        alone = ReducedWindow(at, ControlFlags(stop=False), float("nan"))
        self.pending, self.position = take_step(self.parts, alone)


def rig(demo: DemoPaths, base: BaseModel, spec: dict[str, dict[str, object]]) -> Rig:
    training = {"steps": 4, "gradientAccumulation": 2, **spec.pop("training", {})}
    dataset = {"uri": "photos", "resolution": 64, **spec.pop("dataset", {})}
    document = {
        "apiVersion": "kubelora.dev/v1alpha1",
        "kind": "LoraTrainingJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": "model"},
            "dataset": dataset,
            "training": training,
            "output": {"uri": "out"},
            **spec,
        },
    }
    job = parse_job(document, local=True)
    options = RunOptions({}, None, None, None, "")
    run = Run(job, options, StopRequest(), Console(quiet=True))
    photos = build_dataset(demo.photos, job.spec.dataset)
    modules = adapter_on_cuda(base, job.spec.adapter)
    objective = SdxlObjective(base, photos, job.spec)
    inputs = TrainingInputs(base, modules, photos, objective)
    state = build_train_state(run, inputs)
    facts = facts_of(job.spec.training, state.buffers, 4, job.spec.adapter.dropout)
    categories = [sample.category for sample in photos.samples]
    watched = Watched(facts, state.buffers, categories, training=job.spec.training)
    watchdog = Watchdog(build_detectors(watched))
    watchdog.start(WatchState(), RunStart("new", state.buffers, state.optimizer))
    objective.observer = watchdog.on_micro_batch
    parts: Any = Parts(
        training=job.spec.training,
        plan=build_plan(job.spec.training, objective.order),
        objective=state.categories.watching(objective, objective.order),
        buffers=state.buffers,
        optimizer=state.optimizer,
        telemetry=state.telemetry,
        reporter=None,  # type: ignore[arg-type]
        watchdog=watchdog,
        average=state.average,
        categories=state.categories,
        scaler=state.scaler,
    )
    no_loss = torch.zeros((), dtype=torch.float64, device=CUDA)
    return Rig(objective, parts, RunPosition(window_loss=no_loss))


RUNS: dict[str, dict[str, dict[str, object]]] = {
    "defaults": {},
    "weights, noise, average, flips": {
        "training": {"minSnrGamma": 5.0, "noiseOffset": 0.05, "ema": {"decay": 0.99}},
        "dataset": {"captionDropout": 0.1, "flip": 0.5},
    },
    "random crops, buckets, masks": {
        "dataset": {"crop": "random", "buckets": {}, "alpha": "mask"},
    },
    "dropout, convolutions": {"adapter": {"dropout": 0.1, "targets": "all"}},
    "DoRA": {"adapter": {"dora": True, "targets": "all"}},
    "text encoders": {"adapter": {"textEncoders": ["text_encoder", "text_encoder_2"]}},
    "gradient checkpointing": {"training": {"gradientCheckpointing": True}},
    "fp16": {"precision": {"compute": "fp16"}},
}


@pytest.mark.parametrize("spec", RUNS.values(), ids=RUNS)
def test_a_step_mixes_no_devices_and_the_host_never_waits_for_it(
    demo: DemoPaths,
    fake: Waits,
    monkeypatch: pytest.MonkeyPatch,
    spec: dict[str, dict[str, object]],
) -> None:
    with unset_fake_temporarily():
        base = open_base(demo.model)
    at_work = rig(demo, base, dict(spec))
    for micro_step in range(
        2
    ):  # an image is encoded once, unless its crops are random, and looked at once
        at_work.objective.batch(micro_step)
    fake.seen.clear()
    at_work.window(monkeypatch)
    assert fake.seen == []
    assert at_work.pending is not None
    arrived: Any = at_work.pending.copy._event
    assert not arrived.waited
    at_work.pending.copy.read()
    assert arrived.waited
