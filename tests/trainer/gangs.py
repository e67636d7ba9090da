"""Gangs of forked processes over gloo, started by the launcher that the product uses."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kubelora_trainer.gang import ALONE, Gang
from kubelora_trainer.launch import RankEnd, launch
from kubelora_trainer.rendezvous import join_gang
from kubelora_trainer.seats import LOOPBACK, Layout, Seat
from kubelora_trainer.stop_request import StopRequest

InGang = Callable[[Gang, StopRequest], Any]


def run_gang(
    size: int,
    work: InGang,
    results: Path,
    *,
    stop: Callable[[], bool] = lambda: False,
    grace: float = 5.0,
) -> tuple[tuple[RankEnd, ...], list[Any]]:
    """Run ``work`` in ``size`` ranks; how they ended, and what each returned (None: nothing)."""
    results.mkdir(parents=True, exist_ok=True)
    if size == 1:
        return (RankEnd(0, 0),), [work(ALONE, StopRequest())]
    layout = Layout(1, 0, size, LOOPBACK, 0)
    ends = launch(partial(in_rank, work, results), layout, stop, start_method="fork", grace=grace)
    return ends, [_read(results / f"{rank}.json") for rank in range(size)]


def in_rank(work: InGang, results: Path, seat: Seat, stop: StopRequest) -> None:
    gang = join_gang(seat, torch.device("cpu"), lambda: stop.requested)
    (results / f"{seat.rank}.json").write_text(json.dumps(work(gang, stop)))


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None
