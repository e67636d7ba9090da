"""`kubelora gradients`: a table of the dumped gradients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kubelora_api.names import OutputPath
from kubelora_trainer.lora.target_modules import matches, suggest_parts
from kubelora_trainer.optim.precision import DTYPE_NAMES
from kubelora_trainer.telemetry.gradient_dump import dumped_files
from kubelora_trainer.utils.errors import OutputError

_HEAD = (
    "step",
    "micro",
    "rank",
    "factor",
    "type",
    "shape",
    "norm",
    "absmax",
    "zeros",
    "non-finite",
)


def file_lines(file: Path) -> Iterator[str]:
    """Yield the table of one file. Raises OutputError if it is damaged."""
    return _table(list(_rows(file, Choice(None, None, 0))))


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    shown = [_HEAD, *rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(_HEAD))]
    for row in shown:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


@dataclass(frozen=True)
class Choice:
    """Selection of gradients. step, pattern: None for all. limit: maximum number of rows."""

    step: int | None
    pattern: str | None
    limit: int


def gradient_lines(folder: Path, choice: Choice) -> Iterator[str]:
    """Yield the lines to print, with a header first and the number of omitted rows last.

    folder: a run's output directory, or the directory of gradients in it. Raises OutputError if
    there are none, or a file is damaged.
    """
    files = dumped_files(folder / OutputPath.GRADIENTS) or dumped_files(folder)
    if not files:
        raise OutputError(
            f"{folder}: no dumped gradients here; spec.health.dumpGradients writes them to the "
            f"folder {OutputPath.GRADIENTS} of a run's output"
        )
    rows = [row for file in files for row in _rows(file, choice)]
    yield from _table(rows[: choice.limit])
    if len(rows) > choice.limit:
        yield f"{len(rows) - choice.limit} more rows; raise --limit to see them"
    elif not rows:
        meant = suggest_parts(choice.pattern or "", _names(files))
        yield f"none of them matches{meant or ';'} omit --step or --module to see all"


def _names(files: list[Path]) -> Iterator[str]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            yield from tensors.keys()


def _rows(file: Path, choice: Choice) -> Iterator[tuple[str, ...]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            about = tensors.metadata() or {}
            step, place = about.get("step", "?"), about.get("micro_step_of_window", "?")
            if choice.step is not None and step != str(choice.step):
                return
            rank = about.get("rank", "?")
            scale = float(about.get("loss_scale", "1"))
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                module = name.rpartition(".")[0]
                if choice.pattern is None or any(
                    matches(choice.pattern, text) for text in (name, module)
                ):
                    yield (step, place, rank, name, *_numbers(tensors.get_tensor(name), scale))
    except (SafetensorError, ValueError) as error:
        raise OutputError(
            f"{file}: not a file of dumped gradients, or damaged ({error}); remove it to see the "
            "others"
        ) from None


def _numbers(gradient: Tensor, loss_scale: float) -> tuple[str, ...]:
    """Compute a row's numbers without the loss scale, as conditions are evaluated."""
    values = gradient.double() / loss_scale
    broken = int((~values.isfinite()).sum())
    return (
        DTYPE_NAMES.get(gradient.dtype, str(gradient.dtype)),
        "x".join(str(size) for size in gradient.shape),
        f"{float(values.norm()):.3e}",
        f"{float(values.abs().max()):.3e}",
        f"{100 * float((values == 0).double().mean()):.1f}%",
        str(broken),
    )
