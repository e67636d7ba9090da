"""Raw gradients on disk: what each micro-batch contributed, before accumulation.

Sums can't tell which micro-batch was at fault, nor what was lost in adding it. So gradients are
caught one step earlier, in autograd's hook before accumulation. Autograd has cast them to the
accumulator's type by then; the type that the backward pass computed in is restored where every
value survives it, so that what is written is what was computed.

One file per micro-step, ``gradients/step-000012.micro-003.safetensors``; tensors are named after
their factor. Of several ranks each writes those of its own micro-steps, within an equal share of
the budget: they need not ask each other, and the names are what they are on a single rank. Without
``dumpGradients`` there is no hook and no cost.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kubelora_api.gradient_dump_spec import DumpGradients
from kubelora_api.names import OutputPath
from kubelora_trainer.data.sampler import ALL_MICRO_STEPS, RankShare
from kubelora_trainer.lora.target_modules import matches, require_matches
from kubelora_trainer.optim.flat_buffers import Slot
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.telemetry.dump_condition import parse_condition
from kubelora_trainer.utils.atomic_io import write_file, writing_to

UNJUDGED_BYTES = 64 << 20
"""Gradients held back on the device until they are judged together."""
_BYTES = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


@dataclass(frozen=True)
class MicroStepName:
    """step: optimizer step that the gradient goes into, from 1. place: in its window, from 0.

    micro_step: over the run, from 0, as the data's order counts.
    """

    step: int
    place: int
    micro_step: int

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"step-{self.step:06d}.micro-{self.place:03d}.safetensors"


class GradientDump:
    """The writer of what ``spec`` asks for. ``micro_step`` wraps each backward pass."""

    def __init__(
        self,
        folder: OutputFolder,
        spec: DumpGradients,
        slots: Sequence[Slot],
        compute: torch.dtype,
        warn: Callable[[str], None],
        loss_scale: Tensor | None = None,
        share: RankShare = ALL_MICRO_STEPS,
    ) -> None:
        """compute: type of the backward pass. loss_scale: what the loss is multiplied by. share:
        of the micro-steps, and so of the budget.

        Raises ConfigurationError for a pattern that matches no module.
        """
        self._folder, self._condition = folder, parse_condition(spec.when)
        self._spec, self._compute = spec, compute
        self._warn, self._loss_scale = warn, loss_scale
        self._place = folder.place(OutputPath.GRADIENTS)
        used = sum(file.stat().st_size for file in dumped_files(self._place))
        self._left = max(0, bytes_of(spec.budget) - used) // share.size
        self._share = share
        self._open = False
        self._unjudged: list[tuple[Slot, Tensor]] = []
        self._unjudged_bytes = 0
        self._chosen: list[tuple[Slot, Tensor]] = []
        self._handles: list[RemovableHandle] = []
        for slot in chosen_slots(slots, spec.modules):
            self._catch(slot)

    @contextmanager
    def micro_step(self, name: MicroStepName) -> Iterator[None]:
        """Wrap one micro-step's backward pass. Raises ConfigurationError if the disk refuses."""
        self._open = True
        try:
            yield
        finally:
            self._open = False
        self._judge()
        if self._chosen:
            self._write(name)
        self._chosen = []

    def _catch(self, slot: Slot) -> None:
        def arrived(gradient: Tensor) -> None:
            if not self._open:
                return
            self._unjudged.append((slot, gradient.detach()))
            self._unjudged_bytes += gradient.nbytes
            if self._unjudged_bytes > UNJUDGED_BYTES:
                self._judge()

        self._handles.append(slot.factor.parameter.register_hook(arrived))

    def _judge(self) -> None:
        gradients = [gradient for _, gradient in self._unjudged]
        held = self._condition.holds(gradients, self._loss_scale)
        for (slot, gradient), wanted in zip(self._unjudged, held, strict=True):
            if wanted:
                self._chosen.append((slot, as_computed(gradient, self._compute).cpu()))
        self._unjudged, self._unjudged_bytes = [], 0

    def _write(self, name: MicroStepName) -> None:
        path = self._place / name.file
        before = path.stat().st_size if path.exists() else 0  # this step comes again, after a kill
        left = self._left + before
        tensors: dict[str, Tensor] = {}
        size = 1024  # of the header without its entries
        for slot, gradient in self._chosen:
            size += gradient.nbytes + len(slot.factor.name) + 128
            if size > left:
                break
            tensors[slot.factor.name] = gradient.contiguous()
        if tensors:
            self._save(path, tensors, name)
            self._left = left - path.stat().st_size
        if len(tensors) < len(self._chosen):
            self._stop(name.step)

    def _save(self, path: Path, tensors: dict[str, Tensor], name: MicroStepName) -> None:
        metadata = {
            "step": str(name.step),
            "micro_step_of_window": str(name.place),
            "micro_step": str(name.micro_step),
            "when": self._spec.when,
            "loss_scale": "1" if self._loss_scale is None else f"{float(self._loss_scale):g}",
            "left_out": str(len(self._chosen) - len(tensors)),
            "rank": str(self._share.rank),
            "run_id": self._folder.run_id,
            "attempt": str(self._folder.attempt),
        }
        self._folder.check_ownership()
        with writing_to(path):
            self._place.mkdir(exist_ok=True)
        write_file(path, save(tensors, metadata))

    def _stop(self, step: int) -> None:
        """Stop because the budget is used up: warn once, and cost nothing from here on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        size = self._share.size
        own = "" if size == 1 else f"this rank's 1/{size} of "
        self._warn(
            f"dumpGradients: {own}the budget of {self._spec.budget} is used up in step {step}; no "
            "more gradients are written. Narrow modules or when, or raise budget"
        )


def chosen_slots(slots: Sequence[Slot], patterns: Sequence[str]) -> list[Slot]:
    """Return slots whose module or factor matches a pattern; all without patterns.

    Raises ConfigurationError for a pattern that matches none.
    """
    names = {slot: (slot.factor.module, slot.factor.name) for slot in slots}
    require_matches(
        "health.dumpGradients.modules",
        patterns,
        [name for both in names.values() for name in both],
        "modules and factors",
        "leave modules out for all",
    )
    return [
        slot
        for slot in slots
        if not patterns or any(matches(p, name) for p in patterns for name in names[slot])
    ]


def as_computed(gradient: Tensor, compute: torch.dtype) -> Tensor:
    """Convert the gradient to the dtype it was computed in if that preserves every value."""
    narrow = gradient.to(compute)
    survived = (narrow.to(gradient.dtype) == gradient) | gradient.isnan()
    return narrow if bool(survived.all()) else gradient


def dumped_files(folder: Path) -> list[Path]:
    """List files of dumped gradients, in the order of steps."""
    return sorted(folder.glob("step-*.safetensors"))


def bytes_of(quantity: str) -> int:
    """Convert a quantity such as ``64Mi`` to bytes."""
    return int(quantity[:-2]) * _BYTES[quantity[-2:]]
