"""How a node's ranks are started, watched, and what code the whole ends with."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.spawn import start_processes

from kubelora_api.names import ExitCode
from kubelora_api.spec import Workers
from kubelora_trainer.distributed.launcher import (
    RankExit,
    deciding_exit,
    exit_code_of,
    failure_sentence,
    launch,
)
from kubelora_trainer.distributed.topology import LOOPBACK, NodeTopology, RankInfo, node_topology
from kubelora_trainer.utils.errors import (
    ConfigurationError,
    InterruptedRunError,
    NumericalError,
    PeerLostError,
)
from kubelora_trainer.utils.logs import configure_logging
from kubelora_trainer.utils.signals import StopRequest
from tests.tiers.skips import not_applicable
from tests.trainer.fixtures.processes import ended_by


@pytest.fixture(autouse=True)
def deadline(tmp_path: Path) -> Iterator[None]:
    """None of these ranks does anything that takes long."""
    with ended_by(60, tmp_path):
        yield


TWO = NodeTopology(nodes=1, node=0, ranks_per_node=2, address=LOOPBACK, port=0)


@pytest.mark.parametrize(
    ("ends", "rank", "code"),
    [
        ([RankExit(0, 0), RankExit(1, 0)], 0, 0),
        ([RankExit(1, 3), RankExit(0, 4)], 1, 3),
        ([RankExit(0, 4), RankExit(1, 3)], 1, 3),  # who notices may be gone before who caused it
        ([RankExit(1, -9), RankExit(0, 4)], 1, 137),
        ([RankExit(1, 1), RankExit(0, -9, by_launcher=True)], 1, 1),
        ([RankExit(1, 2), RankExit(0, 3)], 0, 3),
        ([RankExit(1, 75), RankExit(0, 75)], 0, 75),
        ([RankExit(3, 1), RankExit(2, 75)], 3, 1),  # another node: no rank 0 here
        ([RankExit(1, 1), RankExit(0, 0)], 0, 0),  # its work is done and proven
        ([RankExit(0, 4), RankExit(1, 4)], 0, 4),  # the cause is on another node
        ([RankExit(2, 0), RankExit(3, 4)], 3, 4),
    ],
)
def test_rank_0_decides_else_the_first_real_cause_and_a_lost_peer_never(
    ends: list[RankExit], rank: int, code: int
) -> None:
    end = deciding_exit(ends)
    assert (end.rank, exit_code_of(end)) == (rank, code)


def test_what_is_said_of_a_rank_that_was_killed() -> None:
    assert failure_sentence(RankExit(1, 3), 4) == (
        "rank 1 of 4 ended with exit code 3, which ended the other ranks"
    )
    assert "killed by SIGKILL" in failure_sentence(RankExit(1, -9), 4)
    assert "memory ran out" in failure_sentence(RankExit(1, -9), 4)


def _end_as(codes: list[type[Exception] | None], rank_info: RankInfo, stop: StopRequest) -> None:
    configure_logging("plain", rank=rank_info.rank, world_size=rank_info.size)
    kind = codes[rank_info.rank]
    if kind is not None:
        raise kind("for a reason")


@pytest.mark.parametrize(
    ("raised", "codes"),
    [
        ([None, None], {0: 0, 1: 0}),
        ([ConfigurationError, PeerLostError], {0: 2, 1: 4}),
        ([PeerLostError, NumericalError], {0: 4, 1: 3}),
        ([InterruptedRunError, InterruptedRunError], {0: 75, 1: 75}),
        ([None, ZeroDivisionError], {0: 0, 1: 1}),
    ],
)
def test_every_ranks_exit_code_is_kept(
    raised: list[type[Exception] | None], codes: dict[int, int]
) -> None:
    ends = launch(partial(_end_as, raised), TWO, lambda: False, start_method="fork")
    assert {end.rank: end.code for end in ends} == codes


def test_a_ranks_last_sentence_names_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    launch(partial(_end_as, [None, NumericalError]), TWO, lambda: False, start_method="fork")
    assert "rank 1: error: for a reason" in capfd.readouterr().err


def _hang(folder: Path, rank_info: RankInfo, stop: StopRequest) -> None:
    """Rank 1 fails; rank 0 notices nothing, as one that waits for a GPU."""
    if rank_info.rank == 1:
        raise NumericalError("for a reason")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "alive").touch()
    time.sleep(600)


def test_a_rank_that_notices_nothing_is_killed_and_is_not_the_cause(tmp_path: Path) -> None:
    ends = launch(partial(_hang, tmp_path), TWO, lambda: False, start_method="fork", grace=1.0)
    assert (tmp_path / "alive").exists()
    assert [(end.rank, end.code, end.by_launcher) for end in ends] == [(1, 3, False), (0, -9, True)]
    assert exit_code_of(deciding_exit(ends)) == 3


def _stuck_after_the_end(rank_info: RankInfo, stop: StopRequest) -> None:
    if rank_info.rank == 1:
        time.sleep(600)


def test_a_rank_that_does_not_end_with_rank_0_is_ended_and_changes_nothing() -> None:
    ends = launch(_stuck_after_the_end, TWO, lambda: False, start_method="fork", grace=1.0)
    assert [(end.rank, end.code, end.by_launcher) for end in ends] == [(0, 0, False), (1, -9, True)]
    assert exit_code_of(deciding_exit(ends)) == 0


def _until_stopped(wait_for: Callable[[int], bool], rank_info: RankInfo, stop: StopRequest) -> None:
    while not stop.requested:
        if wait_for(rank_info.rank):
            return
        time.sleep(0.01)
    raise InterruptedRunError("stopped")


def test_a_stop_reaches_every_rank() -> None:
    begun = time.monotonic()
    ends = launch(
        partial(_until_stopped, lambda rank: False),
        TWO,
        lambda: time.monotonic() - begun > 0.5,
        start_method="fork",
    )
    assert {end.code for end in ends} == {ExitCode.INTERRUPTED}


def _one_is_interrupted(rank_info: RankInfo, stop: StopRequest) -> None:
    if rank_info.rank == 1:
        raise InterruptedRunError("alone")
    _until_stopped(lambda rank: False, rank_info, stop)


def test_the_interruption_of_one_rank_stops_the_others_in_order() -> None:
    ends = launch(_one_is_interrupted, TWO, lambda: False, start_method="fork")
    assert {end.rank: end.code for end in ends} == {0: 75, 1: 75}


def _tell_place(folder: Path, rank_info: RankInfo, stop: StopRequest) -> None:
    (folder / f"{rank_info.rank}").write_text(
        f"{rank_info.local_rank} {rank_info.size} {os.getpid()}"
    )


def test_ranks_are_numbered_through_all_nodes(tmp_path: Path) -> None:
    second = NodeTopology(nodes=2, node=1, ranks_per_node=2, address="first", port=29400)
    ends = launch(partial(_tell_place, tmp_path), second, lambda: False, start_method="fork")
    assert sorted(end.rank for end in ends) == [2, 3]
    assert (tmp_path / "2").read_text().split()[:2] == ["0", "4"]
    assert (tmp_path / "3").read_text().split()[:2] == ["1", "4"]


def test_a_node_has_a_rank_per_gpu_and_at_least_one() -> None:
    assert node_topology(Workers(gpus_per_node=0), {}).size == 1
    assert node_topology(Workers(gpus_per_node=1), {}).size == 1
    four = node_topology(Workers(gpus_per_node=4), {"MASTER_ADDR": "elsewhere"})
    assert (four.size, four.node, four.address) == (4, 0, "127.0.0.1")
    pods = Workers(nodes=3, gpus_per_node=2)
    seen = node_topology(pods, {"MASTER_ADDR": "job-0.job", "JOB_COMPLETION_INDEX": "2"})
    assert seen == NodeTopology(nodes=3, node=2, ranks_per_node=2, address="job-0.job", port=29400)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "a"}, "JOB_COMPLETION_INDEX must be an integer from 0 to 1, found ''"),
        ({"MASTER_ADDR": "a", "JOB_COMPLETION_INDEX": "2"}, "found '2'"),
        (
            {"MASTER_ADDR": "a", "JOB_COMPLETION_INDEX": "0", "MASTER_PORT": "x"},
            "MASTER_PORT must be an integer from 1 to 65535, found 'x'",
        ),
    ],
)
def test_several_nodes_without_a_meeting_place_are_refused(
    environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        node_topology(Workers(nodes=2), environment)


def test_the_launcher_ends_with_its_children_when_it_is_killed(tmp_path: Path) -> None:
    """A launcher of its own process is killed; the system ends its ranks, whatever they wait in."""
    launcher = os.fork()
    if launcher == 0:
        launch(partial(_write_and_wait, tmp_path), TWO, lambda: False, start_method="fork")
        os._exit(0)
    ranks = [tmp_path / "pid0", tmp_path / "pid1"]
    _until(lambda: all(path.exists() and path.read_text() for path in ranks))
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    _until(lambda: not any(_alive(int(path.read_text())) for path in ranks))


def _write_and_wait(folder: Path, rank_info: RankInfo, stop: StopRequest) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    (folder / f"pid{rank_info.rank}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _until(reached: Callable[[], bool]) -> None:
    for _ in range(600):
        if reached():
            return
        time.sleep(0.05)
    pytest.fail(f"not reached within 30 s on {sys.platform}")


def test_ranks_are_started_before_their_meeting_place_has_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork while one of them looks up a name leaves the C library's lock taken for ever."""
    if sys.platform != "linux":
        not_applicable("reads /proc")
    started: list[int] = []

    def log_progress(*arguments: Any, **named: Any) -> Any:
        started.append(threads())
        return start_processes(*arguments, **named)

    monkeypatch.setattr("kubelora_trainer.distributed.launcher.start_processes", log_progress)
    before = threads()
    launch(nothing, TWO, lambda: False, start_method="fork")
    assert started == [before]


def threads() -> int:
    """Of this process, those of C libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


def nothing(rank_info: RankInfo, stop: object) -> None:
    """A rank that is done at once."""
