"""A rank that dies or stalls ends the whole gang, within a stated time, and is named."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed

from kubelora_api.names import ExitCode
from kubelora_trainer.distributed.launcher import deciding_exit, exit_code_of, failure_sentence
from kubelora_trainer.distributed.missing_ranks import RankMonitor
from kubelora_trainer.distributed.process_group import ProcessGroup
from kubelora_trainer.utils.errors import PeerLostError, PeerTimeoutError
from kubelora_trainer.utils.signals import StopRequest
from kubelora_trainer.utils.text import ranks_named
from tests.trainer.fixtures.engine import Engine
from tests.trainer.fixtures.processes import run_gang, said
from tests.trainer.fixtures.rank_runs import train_engine

SOON = timedelta(seconds=3)


def sent(number: signal.Signals, rank: int) -> Callable[[Engine, int], None]:
    """In its third window, a rank of four sends itself a signal."""

    def before(engine: Engine, micro_step: int) -> None:
        if engine.parts.process_group.share.rank == rank and micro_step >= 6:
            os.kill(os.getpid(), number)

    return before


def test_a_killed_rank_ends_the_gang_and_is_named(tmp_path: Path) -> None:
    work = train_engine(tmp_path / "n", before=sent(signal.SIGKILL, 1))
    ends, _ = run_gang(2, work, tmp_path / "b")
    assert {end.rank: end.code for end in ends} == {1: -9, 0: ExitCode.PEER_LOST}
    assert not any(end.by_launcher for end in ends), "the other rank noticed by itself"
    assert exit_code_of(deciding_exit(ends)) == 137
    assert "rank 1 of 2 was killed by SIGKILL" in failure_sentence(deciding_exit(ends), 2)
    assert said(tmp_path / "b", 0).startswith("rank 1 of this run's 2 went away")


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_stopped_rank_ends_the_gang_after_the_stated_silence_and_is_named(
    tmp_path: Path, stopped: int
) -> None:
    """As one in a driver that hangs; it can't tell anything, so the others' words are the run's."""
    work = train_engine(
        tmp_path / "n", before=sent(signal.SIGSTOP, stopped), gradientAccumulation=4
    )
    ends, _ = run_gang(3, work, tmp_path / "b", silence=SOON, grace=4.0)
    by_rank = {end.rank: end for end in ends}
    assert (by_rank[stopped].code, by_rank[stopped].by_launcher) == (-9, True)
    assert exit_code_of(deciding_exit(ends)) == ExitCode.INTERNAL
    others = [said(tmp_path / "b", rank) for rank in range(3) if rank != stopped]
    assert all(word.startswith(f"rank {stopped} of this run's 3 ") for word in others)
    decided = said(tmp_path / "b", deciding_exit(ends).rank)
    assert "did not respond for 3 s" in decided
    assert not (tmp_path / "n" / "checkpoints").exists() or not any(
        (tmp_path / "n" / "checkpoints").iterdir()
    )


def _asleep(process_group: ProcessGroup, stop: StopRequest) -> None:
    if process_group.share.rank == 1:
        time.sleep(600)


def test_a_gang_of_these_tests_ends_at_its_deadline_with_its_stacks(tmp_path: Path) -> None:
    with pytest.raises(
        pytest.fail.Exception, match=r"(?s)1 ranks had not ended after 8 s.*_asleep"
    ):
        run_gang(2, _asleep, tmp_path, deadline=8.0, grace=60.0)


class Place:
    """A meeting place where some ranks have come already, or that is gone."""

    def __init__(self, *keys: str, gone: bool = False) -> None:
        self._keys, self._gone = set(keys), gone

    def set(self, key: str, value: str) -> None:
        if self._gone:
            raise RuntimeError("closed")
        self._keys.add(key)

    def check(self, keys: list[str]) -> bool:
        return self._keys.issuperset(keys)

    def set_timeout(self, timeout: timedelta) -> None: ...


def monitor(place: Place | None, waited: float) -> RankMonitor:
    """Of rank 0 of four that waited so many seconds, of 60; later looks are a second apart."""
    ticks = iter([0.0, *(waited + n for n in range(100))])
    return RankMonitor(place, 0, 4, timedelta(seconds=60), lambda: next(ticks))


@pytest.mark.parametrize(
    ("place", "named"),
    [
        (Place("misses/1", "misses/3"), "rank 2 of this run's 4 went away"),
        (Place("misses/3"), "ranks 1 and 2 of this run's 4 went away"),
        (Place(gone=True), "another rank of this run's 4 went away"),
        (None, "another rank of this run's 4 went away"),
    ],
)
def test_who_does_not_miss_anyone_is_missing(place: Place | None, named: str) -> None:
    with pytest.raises(PeerLostError, match=named), monitor(place, 2.0).watching():
        raise RuntimeError("Connection closed by peer")


def test_waiting_in_vain_is_another_ending_than_a_broken_connection() -> None:
    ranks = monitor(Place("misses/2", "misses/3"), 58.0)
    with (
        pytest.raises(PeerTimeoutError, match=r"rank 1 .* did not respond for 60 s"),
        ranks.watching(),
    ):
        raise RuntimeError("Timed out waiting 60000ms for recv operation to complete")
    assert PeerTimeoutError.exit_code == ExitCode.INTERNAL


@pytest.mark.parametrize(("rank", "says_it"), [(1, True), (2, False), (3, False)])
def test_of_those_who_are_left_the_first_says_it(rank: int, says_it: bool) -> None:
    """Rank 0 went away."""
    left = RankMonitor(Place("misses/1", "misses/2", "misses/3"), rank, 4, timedelta(seconds=60))
    with pytest.raises(PeerLostError) as lost, left.watching():
        raise RuntimeError("Connection closed by peer")
    assert lost.value.reported_elsewhere is not says_it


@pytest.mark.parametrize("own", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_what_is_wrong_with_a_ranks_own_device_is_no_peers_fault(own: type[Exception]) -> None:
    error = own.__new__(own)
    with pytest.raises(own), monitor(Place(), 1.0).watching():
        raise error


def test_ranks_are_named_as_one_says_it() -> None:
    assert [ranks_named(ranks, "nobody") for ranks in ([], [3], [1, 2], [0, 4, 5])] == [
        *("nobody", "rank 3", "ranks 1 and 2", "ranks 0, 4 and 5"),
    ]


def test_torchs_own_errors_are_what_the_monitor_catches() -> None:
    assert issubclass(distributed.DistBackendError, RuntimeError)
    assert issubclass(distributed.DistNetworkError, RuntimeError)
