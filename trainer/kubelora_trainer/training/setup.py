"""Setup of the training inputs: model, adapter, data and objective, from the job's URIs.

Every problem of a job's inputs is found here, before the first step.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from kubelora_api.names import OutputPath
from kubelora_api.spec import Adapter, JobSpec, Model
from kubelora_api.types import TextEncoder
from kubelora_trainer.data.dataset import ImageDataset, build_dataset
from kubelora_trainer.data.preflight_report import PreflightReport, report_text, write_report
from kubelora_trainer.data.sources import resolve_dataset_folder, resolve_extra_sources
from kubelora_trainer.data.token_limits import load_token_limits
from kubelora_trainer.distributed.topology import SINGLE_RANK, RankInfo
from kubelora_trainer.lora.adapter import AdapterModule, add_adapter
from kubelora_trainer.lora.init_from_lora import warm_start
from kubelora_trainer.lora.text_encoder import add_text_adapter
from kubelora_trainer.models.pipeline import BaseModel, load_base_model
from kubelora_trainer.models.sgm_keys import Part
from kubelora_trainer.models.single_file import (
    check_single_file,
    read_header,
    single_file_of,
    unpack,
)
from kubelora_trainer.objective.embedding_cache import NO_CACHE, build_cache
from kubelora_trainer.objective.sdxl_loss import SdxlObjective
from kubelora_trainer.optim.flat_buffers import Factor
from kubelora_trainer.optim.precision import DTYPES
from kubelora_trainer.storage.downloads import cache_directory
from kubelora_trainer.storage.output_dir import OutputFolder
from kubelora_trainer.storage.uris import resolve_cache, resolve_input
from kubelora_trainer.utils.atomic_io import writing_to
from kubelora_trainer.utils.cpu_threads import cpu_quota, thread_count, usable_cores
from kubelora_trainer.utils.device import choose_device
from kubelora_trainer.utils.errors import InterruptedRunError
from kubelora_trainer.utils.progress_log import log_progress

DEFAULT_CONFIG = "hf://stabilityai/stable-diffusion-xl-base-1.0"
"""Source of configurations and tokenizers for single-file models."""


TEXT_PARTS: tuple[TextEncoder, TextEncoder] = ("text_encoder", "text_encoder_2")


@dataclass(frozen=True)
class AdaptedModel:
    """The base model and the adapter that was added to it."""

    base: BaseModel
    modules: tuple[AdapterModule, ...]

    @property
    def trained_encoders(self) -> dict[Part, nn.Module]:
        """Adapted text encoders, by part."""
        parts = {module.part for module in self.modules}
        pairs = zip(TEXT_PARTS, self.base.text_encoders, strict=True)
        return {part: encoder for part, encoder in pairs if part in parts}

    @property
    def frozen_weights(self) -> dict[str, Tensor]:
        """Weights and buffers that passes read and nothing trains, by name."""
        models = {"unet": self.base.unet, **self.trained_encoders}
        return {
            f"{part}.{name}": tensor
            for part, model in models.items()
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
            if not tensor.requires_grad
        }

    @property
    def factors(self) -> list[Factor]:
        """All factors of every module, in the modules' order."""
        return factors_of(self.modules)


@dataclass(frozen=True)
class TrainingInputs(AdaptedModel):
    """The inputs of a run."""

    dataset: ImageDataset
    objective: SdxlObjective


def factors_of(modules: Sequence[AdapterModule]) -> list[Factor]:
    """List the trainable factors of ``modules``."""
    return [
        Factor(module.full_name, f"{module.group_block}.{name}", parameter)
        for module in modules
        for name, parameter in module.factors.items()
    ]


def build_training_inputs(
    spec: JobSpec,
    mounts: Mapping[str, Path],
    output: OutputFolder,
    say: Callable[[str], None],
    *,
    stop: Callable[[], bool] = lambda: False,
    rank_info: RankInfo = SINGLE_RANK,
    at_once: Callable[[str], AbstractContextManager[None]] = lambda doing: nullcontext(),
) -> TrainingInputs:
    """Load dataset (first, because checking it is fast), model and adapter.

    Args:
        spec: The job's spec.
        mounts: Directory of each claim.
        output: The output directory, where rank 0 writes the preflight report.
        say: Called with each message.
        stop: Polled between images, so that a long preflight can be stopped.
        rank_info: This rank.
        at_once: Context in which a signal aborts work that cannot poll (downloads, loading);
            it is given a description of the work.

    Raises:
        InterruptedRunError: The run was stopped.
        ConfigurationError: An input is missing, damaged or of the wrong kind.
    """
    device = choose_device(spec, torch.cuda.is_available())
    with at_once("while the model was fetched"):
        model_folder, vae = _model_folders(spec.model, mounts, say)

    def publish(report: PreflightReport) -> None:
        if rank_info.rank != 0:
            return
        with writing_to(output.path):
            write_report(report, output.place(OutputPath.PREFLIGHT))
        say(report_text(report))

    progress = log_progress("data: images read", say)

    def tick(done: int, total: int) -> None:
        if stop():
            raise InterruptedRunError(
                f"stopped while the data was checked, {done} of {total} images; nothing is lost, "
                "the same command starts again"
            )
        progress(done, total)

    with at_once("while the data was fetched"):
        folder = resolve_dataset_folder(spec.dataset.uri, spec.dataset.columns, mounts)
        extra = resolve_extra_sources(spec.dataset, mounts)
    dataset = build_dataset(
        folder,
        spec.dataset,
        extra=extra,
        limits=load_token_limits(model_folder),
        on_progress=tick,
        publish=publish,
    )
    with at_once("while the model was read"):
        base = _load(spec, model_folder, vae, device)
        modules = add_adapters(base, spec.adapter, spec.training.seed)
        if spec.adapter.from_:
            place = resolve_input(spec.adapter.from_, mounts, content="adapter")
            say(f"adapter: initialised from {warm_start(modules, base.unet, place)}")
    limit_threads(sum(p.numel() for p in base.unet.parameters()), rank_info.ranks_per_node)
    say(
        f"model: {model_folder} on {device}; adapter: {len(modules)} modules, "
        f"{sum(p.numel() for m in modules for p in m.factors.values()):,} parameters"
    )
    cache = NO_CACHE
    if spec.dataset.cache:
        cache = build_cache(resolve_cache(spec.dataset.cache, mounts), spec, base, dataset, say)
    return TrainingInputs(
        base, modules, dataset, SdxlObjective(base, dataset, spec, cache, rank_info.share)
    )


def load_adapted_model(
    spec: JobSpec, mounts: Mapping[str, Path], device: torch.device, say: Callable[[str], None]
) -> AdaptedModel:
    """Load the model and add the job's adapter with its initial weights; no data is read.

    Args:
        spec: The job's spec.
        mounts: Directory of each claim.
        device: Device of the model.
        say: Called with each message.

    Raises:
        ConfigurationError: The model is missing, damaged or of the wrong kind.
    """
    model_folder, vae = _model_folders(spec.model, mounts, say)
    base = _load(spec, model_folder, vae, device)
    return AdaptedModel(base, add_adapters(base, spec.adapter, spec.training.seed))


def _load(spec: JobSpec, folder: Path, vae: Path | None, device: torch.device) -> BaseModel:
    return load_base_model(
        folder,
        variant=spec.model.variant,
        vae=vae,
        dtype=DTYPES[spec.precision.compute],
        device=device,
        prediction=spec.model.prediction_type,
        zero_terminal_snr=spec.model.zero_terminal_snr,
    )


def add_adapters(base: BaseModel, adapter: Adapter, seed: int) -> tuple[AdapterModule, ...]:
    """Add adapters to the UNet and to the text encoders that the job names.

    Args:
        base: The pipeline.
        adapter: The job's ``spec.adapter``.
        seed: Seed of the initial weights.

    Returns:
        The adapted modules, the UNet's first.
    """
    of_text: list[AdapterModule] = []
    for part, encoder in zip(TEXT_PARTS, base.text_encoders, strict=True):
        if part in adapter.text_encoders:
            of_text += add_text_adapter(encoder, part, adapter, seed)
    names = [module.full_name for module in of_text]
    return (*add_adapter(base.unet, adapter, seed, names), *of_text)


def _model_folders(
    model: Model, mounts: Mapping[str, Path], say: Callable[[str], None]
) -> tuple[Path, Path | None]:
    """Resolve the directories of the pipeline and of its VAE, if the job has another one."""
    folder = _model_folder(model, mounts, say)
    return folder, resolve_input(model.vae, mounts, content="vae") if model.vae else None


def _model_folder(model: Model, mounts: Mapping[str, Path], say: Callable[[str], None]) -> Path:
    """Resolve the pipeline's directory; a single-file checkpoint is converted to one."""
    place = resolve_input(model.uri, mounts, content="model", variant=model.variant)
    file = single_file_of(place)
    if file is None:
        return place
    check_single_file(file, read_header(file))  # before downloading configurations for it
    lender = resolve_input(model.config or DEFAULT_CONFIG, mounts, content="configuration")
    return unpack(file, lender, cache_directory(), say)


def limit_threads(parameters: int, processes: int = 1) -> None:
    """Limit torch to a useful number of threads. processes: ranks that share this machine."""
    cores, quota = max(1, usable_cores() // processes), cpu_quota()
    threads = thread_count(
        parameters, os.environ, cores, None if quota is None else quota / processes
    )
    if threads is not None:
        torch.set_num_threads(threads)
