"""Several ranks train what one rank trains: the same samples, weights and order, stopped as one."""

import json
import math
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.data.sampler import RankShare, SampleOrder
from kubelora_trainer.distributed.launcher import deciding_exit, exit_code_of, launch
from kubelora_trainer.distributed.process_group import DistributedGroup, ProcessGroup, ReducedWindow
from kubelora_trainer.distributed.reduce_payload import ControlFlags, checksum
from kubelora_trainer.distributed.topology import NodeTopology
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.training.plan import TrainingPlan
from tests.trainer.fixtures.engine import Engine
from tests.trainer.fixtures.processes import DEADLINE_SECONDS, Carried, ended_by, in_rank, run_gang
from tests.trainer.fixtures.rank_runs import BF16, FP32, train_engine


def seen_by(size: int, steps: range, accumulation: int) -> list[list[int]]:
    """Micro-steps of each rank, in its order, over some optimizer steps."""
    plan = TrainingPlan(steps.stop, steps.stop * accumulation, accumulation)
    return [
        [m for step in steps for m in RankShare(rank, size).of(plan.window(step))]
        for rank in range(size)
    ]


@pytest.mark.parametrize(("size", "accumulation"), [(1, 3), (2, 3), (3, 8), (4, 3)])
def test_ranks_share_each_window_and_together_see_every_micro_step_once(
    size: int, accumulation: int
) -> None:
    shares = seen_by(size, range(5), accumulation)
    assert sorted(m for share in shares for m in share) == list(range(5 * accumulation))
    counts = [len(share) for share in seen_by(size, range(1), accumulation)]
    assert max(counts) - min(counts) <= 1


def test_a_rank_reads_ahead_what_it_does_next() -> None:
    for size in (1, 2, 3):
        for rank, share in enumerate(seen_by(size, range(4), 5)):
            following = [RankShare(rank, size).after(m, 5) for m in share]
            assert following[:-1] == share[1:]


def test_a_micro_batch_stays_whole_whatever_the_number_of_ranks() -> None:
    """Two sizes of image, three and two samples: each micro-batch of two is of one size alone."""
    groups = ((0, 1, 2), (3, 4))
    order = SampleOrder(seed=5, samples=5, batch_size=2, groups=groups)
    for share in seen_by(2, range(4), 3):
        for micro_step in share:
            samples = {draw.sample for draw in order.samples_of(micro_step)}
            assert samples <= set(groups[0]) or samples <= set(groups[1])


@pytest.mark.parametrize(
    ("precision", "tolerance"), [(FP32, 2e-7), (BF16, 2e-3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize(
    ("size", "dora"),
    [(2, False), (4, False), (2, True)],
    ids=["uneven", "one without samples", "DoRA"],
)
def test_ranks_agree_with_one_process_on_the_same_global_batch(
    tmp_path: Path, size: int, dora: bool, precision: PrecisionPlan, tolerance: float
) -> None:
    """Windows of three micro-batches: two ranks do two and one, of four ranks one does none."""
    alone_work = train_engine(tmp_path / "1", precision, dora=dora)
    _, (alone,) = run_gang(1, alone_work, tmp_path / "a")
    ends, ranks = run_gang(size, train_engine(tmp_path / "n", precision, dora=dora), tmp_path / "b")
    assert [end.code for end in ends] == [0] * size
    for rank in ranks[1:]:
        assert rank["masters"] == ranks[0]["masters"], "equal to the bit"
        assert rank["losses"] == ranks[0]["losses"]
    assert ranks[0]["samples"] == [6] * 6, "1 + 2 + 3 samples in every window"
    for name in ("losses", "norms"):
        assert ranks[0][name] == pytest.approx(alone[name], rel=tolerance)
    assert ranks[0]["masters"] == pytest.approx(alone["masters"], rel=0, abs=tolerance)
    assert ranks[0]["divergence"] == [0.0] * 6
    assert ranks[0]["findings"] == alone["findings"] == {}
    assert all(math.isnan(d) for d in alone["divergence"])


def test_a_rank_whose_weights_differ_by_one_bit_shows_in_the_divergence(tmp_path: Path) -> None:
    """Rank 1's first weight is moved by one unit in the last place, during the fourth window."""

    def disturb(engine: Engine, micro_step: int) -> None:
        if not engine.first and micro_step == 3 * 3 + 1:
            engine.buffers.masters.view(torch.int32)[0] += 1

    _, ranks = run_gang(2, train_engine(tmp_path / "n", before=disturb), tmp_path / "b")
    for rank in ranks:
        assert rank["divergence"][:4] == [0.0, 0.0, 0.0, 1.0]
        assert all(d > 0 for d in rank["divergence"][3:])


class Unsynchronised(DistributedGroup):
    """Ranks that in one window keep their own gradients, as when an all-reduce went missing."""

    def exchange(
        self,
        buffers: AdapterBuffers,
        position: RunPosition,
        asked: ControlFlags,
        sums: Sequence[Tensor],
    ) -> ReducedWindow:
        own = buffers.gradient.clone()
        exchanged = super().exchange(buffers, position, asked, sums)
        if position.step == 3:
            buffers.gradient.copy_(own)
        return exchanged


def test_a_gradient_that_was_not_synchronised_is_found_in_the_next_step(tmp_path: Path) -> None:
    """The fourth step's is lost; the weights that the fifth is computed with tell of it."""

    def among(process_group: ProcessGroup) -> ProcessGroup:
        return Unsynchronised(process_group.share.rank, process_group.share.size)

    _, ranks = run_gang(2, train_engine(tmp_path / "n", among=among), tmp_path / "b")
    assert ranks[0]["findings"] == {"RanksDiverged": 5}
    assert ranks[0]["divergence"][:4] == [0.0] * 4


def test_the_checksum_is_the_sum_of_bit_patterns() -> None:
    values = torch.tensor([1.0, 2.0, -0.0])  # 0x3f800000, 0x40000000, 0x80000000
    assert checksum(values).item() == 0x3F800000 + 0x40000000 - 0x80000000
    assert checksum(values.bfloat16()).item() == 0x3F80 + 0x4000 - 0x8000


def test_the_number_of_ranks_may_change_at_every_resume(tmp_path: Path) -> None:
    """Two ranks, then one that stops inside a window, then two again: the run of one process.

    Of a DoRA, whose three factors a resume must give to every rank.
    """
    _, (alone,) = run_gang(1, train_engine(tmp_path / "1", dora=True), tmp_path / "a")
    legs = []
    for number, (size, stop_after) in enumerate([(2, 3), (1, 5), (2, None)]):
        work = train_engine(tmp_path / "n", stop_after=stop_after, dora=True)
        ends, ranks = run_gang(size, work, tmp_path / f"leg{number}")
        assert [end.code for end in ends] == [0] * size
        assert all(rank["position"] == ranks[0]["position"] for rank in ranks)
        legs.append(ranks)
    assert legs[0][0]["position"] == [1, 6], "at the end of the window in which it was asked"
    assert legs[1][0]["position"] == [3, 11], "in the middle of a window"
    seen = [m for ranks in legs for rank in ranks for m in rank["seen"]]
    assert sorted(seen) == list(range(18)), "every micro-step once, whoever did it"
    assert legs[2][0]["masters"] == pytest.approx(alone["masters"], rel=0, abs=2e-7)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (3, 2, 1), (2, 3, 4)], ids=str)
def test_any_sequence_of_ranks_sees_the_one_order_of_data_in_the_one_size_of_batch(
    tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    """Windows of four micro-batches; each leg but the last stops after its second."""
    settings: dict[str, Any] = {"gradientAccumulation": 4}
    _, (alone,) = run_gang(1, train_engine(tmp_path / "1", **settings), tmp_path / "a")
    seen: list[int] = []
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        stop = None if last else len(RankShare(0, size).of(range(8)))
        work = train_engine(tmp_path / "n", stop_after=stop, **settings)
        ends, ranks = run_gang(size, work, tmp_path / f"leg{number}")
        assert [end.code for end in ends] == [0] * size
        assert all(rank["masters"] == ranks[0]["masters"] for rank in ranks), "to the bit"
        position = [(6, 24)] if last else [(2 * number + 1, 8 * number + 8)]
        assert {tuple(rank["position"]) for rank in ranks} == set(position)
        done = sorted(m for rank in ranks for m in rank["seen"])
        assert done == list(range(8 * number, 24 if last else 8 * number + 8))
        seen += done
        # 1 + 2 + 3 + 1 samples in the first window, and so on; a stopped leg's last is unfinished.
        batches = [sum(1 + m % 3 for m in range(4 * n, 4 * n + 4)) for n in range(6)]
        first = 0 if number == 0 else 2 * number - 1
        assert ranks[0]["samples"] == batches[first:][: len(ranks[0]["samples"])]
    assert seen == list(range(24))
    assert ranks[0]["masters"] == pytest.approx(alone["masters"], rel=0, abs=2e-7)


def test_a_stop_ends_all_ranks_at_one_window_with_one_checkpoint(tmp_path: Path) -> None:
    marker = tmp_path / "third window"

    def mark(engine: Engine, micro_step: int) -> None:
        if micro_step >= 6:
            marker.touch()
            time.sleep(0.05)

    work = train_engine(tmp_path / "n", before=mark, steps=200)
    ends, _ = run_gang(2, work, tmp_path / "b", stop=marker.exists)
    assert [end.code for end in ends] == [75, 75]
    assert exit_code_of(deciding_exit(ends)) == 75
    (saved,) = (tmp_path / "n" / "checkpoints").iterdir()
    assert saved.name.endswith(".3"), "a whole window of three, not yet turned into a step"


def test_the_ranks_of_two_nodes_meet_at_the_first_nodes_address(tmp_path: Path) -> None:
    """Two launchers, as in two pods; the second is there before the meeting place is."""
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    with ThreadPoolExecutor(1) as elsewhere, ended_by(DEADLINE_SECONDS, tmp_path):
        second = elsewhere.submit(_node, 1, port, tmp_path)
        time.sleep(0.3)
        assert _node(0, port, tmp_path) == 0
        assert second.result() == 0
    _, (alone,) = run_gang(1, train_engine(tmp_path / "1"), tmp_path / "a")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks[0]["masters"] == ranks[1]["masters"]
    assert ranks[0]["masters"] == pytest.approx(alone["masters"], rel=0, abs=2e-7)
    assert (ranks[0]["seen"][:2], ranks[1]["seen"][:2]) == ([0, 2], [1, 4])


def _node(node: int, port: int, folder: Path) -> int:
    """One node's launcher, with one rank; its exit code."""
    layout = NodeTopology(nodes=2, node=node, ranks_per_node=1, address="localhost", port=port)
    work = Carried(partial(in_rank, train_engine(folder / "n"), folder))
    return exit_code_of(
        deciding_exit(launch(work, layout, lambda: False, start_method="forkserver"))
    )
