"""A run of several ranks, as the command starts it: launch them, and end with one code and report.

Each rank writes its final report to a folder of the launcher's; that of the rank which decides
becomes the pod's termination message.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from kubelora_api.job import LoraTrainingJob
from kubelora_api.names import ExitCode
from kubelora_api.report import FinalReport
from kubelora_trainer.distributed.launcher import (
    PEER_GRACE_SECONDS,
    RankExit,
    deciding_exit,
    exit_code_of,
    failure_sentence,
    launch,
)
from kubelora_trainer.distributed.topology import NodeTopology, RankInfo
from kubelora_trainer.storage.output_dir import run_id_of
from kubelora_trainer.training.context import RunOptions
from kubelora_trainer.utils.signals import StopRequest

REPORTED_BY_THE_RANK = (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.HELD)
"""Codes of which rank 0's own last words say all."""


def run_ranks(
    job: LoraTrainingJob,
    options: RunOptions,
    layout: NodeTopology,
    stop: StopRequest,
    tell: Callable[[str], None],
) -> int:
    """Run ``job`` in the ranks of this node; returns its exit code. ``tell`` gets a last word."""
    with TemporaryDirectory(prefix="kubelora-") as folder:
        reports = Path(folder)
        work = partial(run_rank, job, options, reports)
        end = deciding_exit(launch(work, layout, lambda: stop.requested))
        code, sentence = exit_code_of(end), failure_sentence(end, layout.size)
        if code not in REPORTED_BY_THE_RANK:
            tell(f"error: {sentence}")
        if code == ExitCode.PEER_LOST and layout.nodes > 1:
            _let_the_cause_go_first(stop)
        if options.termination_log is not None:
            report = final_report(job, options, reports, end, sentence)
            try:
                options.termination_log.write_bytes(report)
            except OSError as error:
                tell(
                    f"warning: the final report could not be written to "
                    f"{options.termination_log}: {error.strerror}"
                )
    return code


def _let_the_cause_go_first(stop: StopRequest) -> None:
    """Wait for the pod that failed to end by itself.

    The first pod to fail has the others deleted, and their last words with them.
    """
    deadline = time.monotonic() + PEER_GRACE_SECONDS + 10
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.1)


def run_rank(
    job: LoraTrainingJob, options: RunOptions, reports: Path, rank_info: RankInfo, stop: StopRequest
) -> None:
    """One rank's run. Rank 0 alone speaks; each leaves its final report in ``reports``."""
    if rank_info.rank != 0 and rank_info.local_rank == 0:
        print(
            f"rank {rank_info.rank} of {rank_info.size} trains with rank 0, "
            "whose pod reports for the run"
        )
    from kubelora_trainer.utils.third_party import import_heavy_libraries

    import_heavy_libraries()  # of no use to the launcher
    from kubelora_trainer.training.run import run_job

    own = replace(options, rank_info=rank_info, termination_log=reports / f"{rank_info.rank}.json")
    run_job(job, own, stop, Console(quiet=rank_info.rank != 0))


def final_report(
    job: LoraTrainingJob, options: RunOptions, reports: Path, end: RankExit, sentence: str
) -> bytes:
    """The deciding rank's own report; where it could leave none, one that says how it ended."""
    try:
        return (reports / f"{end.rank}.json").read_bytes()
    except FileNotFoundError:
        return FinalReport(
            run_id=run_id_of(job),
            attempt=options.attempt or 0,
            exit_code=exit_code_of(end),
            message=sentence,
        ).to_termination_message()
