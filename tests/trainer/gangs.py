"""Gangs of processes over gloo, started by the launcher that the product uses.

Ranks are forked from a server that has done nothing but its imports. A fork of the test process
itself would take over whatever its threads (of readers, stores, trackers) hold at that moment. And
no gang may take longer than its deadline: then its ranks' stacks are what the test fails with.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from kubelora_trainer.errors import RunEnded
from kubelora_trainer.gang import ALONE, Gang
from kubelora_trainer.launch import RankEnd, Work, launch
from kubelora_trainer.rendezvous import join_gang
from kubelora_trainer.seats import LOOPBACK, Layout, Seat
from kubelora_trainer.stop_request import StopRequest

InGang = Callable[[Gang, StopRequest], Any]
DEADLINE_SECONDS = 240.0
"""Of a gang, from its start to its end; the slowest takes 10 s alone, and machines are shared."""
SILENCE = timedelta(seconds=120)
"""How long a rank waits for another: below the deadline, so that the product's sentence is seen."""
multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.trainer.engine"])


def run_gang(
    size: int,
    work: InGang,
    results: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    grace: float = 5.0,
    silence: timedelta = SILENCE,
    deadline: float = DEADLINE_SECONDS,
) -> tuple[tuple[RankEnd, ...], list[Any]]:
    """Run ``work`` in ``size`` ranks; how they ended, and what each returned (None: nothing)."""
    results.mkdir(parents=True, exist_ok=True)
    if size == 1:
        return (RankEnd(0, 0),), [work(ALONE, StopRequest())]
    layout = Layout(1, 0, size, LOOPBACK, 0)
    carried = Carried(partial(in_rank, work, results, silence=silence))
    with ended_by(deadline, results):
        ends = launch(carried, layout, stop, start_method="forkserver", grace=grace)
    return ends, [_read(results / f"{rank}.json") for rank in range(size)]


class Carried:
    """A rank's work that closes over anything, as tests' does, on its way to another process."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __call__(self, seat: Seat, stop: StopRequest) -> None:
        self.work(seat, stop)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (cloudpickle.dumps(self.work),)


def _unpacked(work: bytes) -> Carried:
    return Carried(cloudpickle.loads(work))


def in_rank(
    work: InGang, results: Path, seat: Seat, stop: StopRequest, silence: timedelta = SILENCE
) -> None:
    with showing_its_stack(results, seat.rank):
        torch.set_num_threads(1)
        try:
            gang = join_gang(seat, torch.device("cpu"), lambda: stop.requested, silence)
            (results / f"{seat.rank}.json").write_text(json.dumps(work(gang, stop)))
        except RunEnded as ended:
            (results / f"{seat.rank}.said").write_text(f"{int(ended.alike)} {ended}")
            raise


@contextmanager
def showing_its_stack(results: Path, rank: int) -> Iterator[None]:
    """Where this rank is, is written to ``results`` on SIGUSR1, whatever it is waiting in."""
    with (results / f"{rank}.stack").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        yield
        faulthandler.unregister(signal.SIGUSR1)


@contextmanager
def ended_by(seconds: float, results: Path) -> Iterator[None]:
    """Processes that are begun meanwhile end within ``seconds``, or the test fails with stacks."""
    before = set(multiprocessing.active_children())
    late: list[BaseProcess] = []

    def end() -> None:
        late.extend(set(multiprocessing.active_children()) - before)
        for number in (signal.SIGUSR1, signal.SIGKILL):
            for process in late:
                if process.pid is not None and process.is_alive():
                    os.kill(process.pid, number)
            time.sleep(0.5)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if late:
        stacks = [f"rank {p.stem}: {p.read_text()}" for p in sorted(results.glob("*.stack"))]
        pytest.fail(f"{len(late)} ranks had not ended after {seconds:g} s\n" + "\n".join(stacks))


def said(results: Path, rank: int) -> str:
    """The sentence that a rank ended with."""
    return (results / f"{rank}.said").read_text()[2:]


def in_agreement(results: Path, rank: int) -> bool:
    """Whether a rank ended with the sentence of all."""
    return (results / f"{rank}.said").read_text().startswith("1")


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
