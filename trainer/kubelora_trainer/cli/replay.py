"""`kubelora replay`: the table of a step's gradients, recomputed and as the run recorded them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kubelora_api.names import OutputPath
from kubelora_trainer.cli.gradients import file_lines
from kubelora_trainer.telemetry.gradient_dump import MicroStepName, dumped_files
from kubelora_trainer.training.replay_run import FactorRow
from kubelora_trainer.utils.errors import OutputError

EQUAL_DIGITS = 1e-6
"""Relative difference up to which two norms are equal: they are recorded in fp32."""


def replay_lines(rows: Sequence[FactorRow]) -> Iterator[str]:
    """Yield a line per factor, and a sentence on all of them."""
    width = max(len(row.name) for row in rows)
    yield f"{'factor'.ljust(width)}  {'recomputed':>12}  {'recorded':>12}  difference"
    for row in rows:
        recorded = "-" if row.recorded is None else f"{row.recorded:.6g}"
        yield f"{row.name.ljust(width)}  {row.found:>12.6g}  {recorded:>12}  {_difference(row)}"
    compared = [row for row in rows if row.recorded is not None]
    other = [row for row in compared if not _equal(row)]
    if not compared:
        yield "The run's log has nothing of this step to compare with."
    elif other:
        yield (
            f"{len(other)} of {len(compared)} factors have another gradient than the run recorded. "
            "With the same versions, kind of device and number of ranks, the hardware of one of "
            "the two is at fault."
        )
    else:
        yield (
            f"All {len(compared)} factors have the gradient that the run recorded: the hardware is "
            "not at fault, so look at the data and the code."
        )


def micro_step_lines(folder: Path, step: int, place: int | None) -> Iterator[str]:
    """Yield where the gradients were written, and the table of one micro-step's.

    Raises OutputError if the step has no such micro-step.
    """
    written = dumped_files(folder / OutputPath.GRADIENTS)
    yield f"gradients of {len(written)} micro-steps: {folder / OutputPath.GRADIENTS}"
    if place is None:
        return
    wanted = MicroStepName(step, place, 0).file
    if wanted not in {file.name for file in written}:
        raise OutputError(f"step {step} has no micro-step {place}; it has 0 to {len(written) - 1}")
    yield from file_lines(folder / OutputPath.GRADIENTS / wanted)


def _equal(row: FactorRow) -> bool:
    if row.recorded is None or row.found != row.found or row.recorded != row.recorded:
        return row.recorded is not None and str(row.found) == str(row.recorded)
    return row.found == row.recorded or (
        abs(row.found - row.recorded) <= EQUAL_DIGITS * abs(row.recorded)
    )


def _difference(row: FactorRow) -> str:
    if row.recorded is None:
        return "not recorded"
    if _equal(row):
        return "none"
    return f"{(row.found - row.recorded) / row.recorded:+.2g}" if row.recorded else "recorded 0"
