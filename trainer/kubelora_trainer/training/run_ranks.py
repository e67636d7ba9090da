"""A run of several ranks: launch them, and end with one exit code and report.

Each rank writes its final report to a directory of the launcher; the deciding rank's report becomes
the pod's termination message.
"""

import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

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
from kubelora_trainer.utils.logs import configure_logging, redirect_library_logs
from kubelora_trainer.utils.signals import StopRequest

logger = logging.getLogger(__name__)

REPORTED_BY_THE_RANK = (ExitCode.DONE, ExitCode.INTERRUPTED, ExitCode.HELD)
"""Exit codes that rank 0's own message fully explains."""


def run_ranks(
    job: LoraTrainingJob,
    options: RunOptions,
    layout: NodeTopology,
    stop: StopRequest,
) -> int:
    """Run ``job`` in the ranks of this node and return its exit code.

    Args:
        job: The job.
        options: Options from the command line and environment.
        layout: Ranks of the run and of this node.
        stop: The stop request.
    """
    if layout.node > 0:
        logger.info(
            "rank %d of %d trains with rank 0, whose pod reports for the run",
            layout.node * layout.ranks_per_node,
            layout.size,
        )
    with TemporaryDirectory(prefix="kubelora-") as folder:
        reports = Path(folder)
        work = partial(run_rank, job, options, reports)
        end = deciding_exit(launch(work, layout, lambda: stop.requested))
        code, sentence = exit_code_of(end), failure_sentence(end, layout.size)
        if code not in REPORTED_BY_THE_RANK:
            logger.error(sentence)
        if code == ExitCode.PEER_LOST and layout.nodes > 1:
            _let_failed_pod_end_first(stop)
        if options.termination_log is not None:
            report = final_report(job, options, reports, end, sentence)
            try:
                options.termination_log.write_bytes(report)
            except OSError as error:
                logger.warning(
                    "the final report could not be written to %s: %s",
                    options.termination_log,
                    error.strerror,
                )
    return code


def _let_failed_pod_end_first(stop: StopRequest) -> None:
    """Wait for the failed pod to end by itself.

    When the first pod fails, Kubernetes deletes the others with their messages.
    """
    deadline = time.monotonic() + PEER_GRACE_SECONDS + 10
    while not stop.requested and time.monotonic() < deadline:
        time.sleep(0.1)


def run_rank(
    job: LoraTrainingJob, options: RunOptions, reports: Path, rank_info: RankInfo, stop: StopRequest
) -> None:
    """Run one rank, which writes its final report to ``reports``. Ranks above 0 log only warnings.

    Args:
        job: The job.
        options: Options from the command line and environment.
        reports: Directory of the final reports.
        rank_info: This rank.
        stop: The stop request.
    """
    console = configure_logging(
        options.log_format,
        rank=rank_info.rank,
        world_size=rank_info.size,
        attempt=options.attempt,
    )
    from kubelora_trainer.utils.third_party import import_heavy_libraries

    import_heavy_libraries()  # here, because the launcher does not need them
    redirect_library_logs()
    from kubelora_trainer.training.run import run_job

    own = replace(options, rank_info=rank_info, termination_log=reports / f"{rank_info.rank}.json")
    run_job(job, own, stop, console)


def final_report(
    job: LoraTrainingJob, options: RunOptions, reports: Path, end: RankExit, sentence: str
) -> bytes:
    """Return the deciding rank's own report, or build one if the rank could not write it.

    Args:
        job: The job.
        options: Options from the command line and environment.
        reports: Directory of the final reports.
        end: Exit of the deciding rank.
        sentence: Message of a report that is built here.
    """
    try:
        return (reports / f"{end.rank}.json").read_bytes()
    except FileNotFoundError:
        return FinalReport(
            run_id=run_id_of(job),
            attempt=options.attempt or 0,
            exit_code=exit_code_of(end),
            message=sentence,
        ).to_termination_message()
