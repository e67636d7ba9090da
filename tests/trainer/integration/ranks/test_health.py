"""What a rank finds, all ranks act on: one decision, one checkpoint, one sentence, one exit code.

Data at fault is of a single micro-batch, which one rank alone has seen: micro-step 10 of windows of
three belongs to rank 1 of two, in the window of step 4.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kubelora_api.names import ExitCode
from kubelora_api.spec import Health
from kubelora_trainer.checkpoint.state import RunPosition
from kubelora_trainer.distributed.launcher import RankExit, deciding_exit, exit_code_of
from kubelora_trainer.distributed.process_group import (
    DistributedGroup,
    ProcessGroup,
    ReducedWindow,
    run_on_rank0,
)
from kubelora_trainer.distributed.reduce_payload import ControlFlags
from kubelora_trainer.optim.flat_buffers import AdapterBuffers
from kubelora_trainer.optim.precision import PrecisionPlan
from kubelora_trainer.utils.errors import ConfigurationError
from kubelora_trainer.utils.signals import StopRequest
from tests.trainer.fixtures.processes import InGang, in_agreement, run_gang, said
from tests.trainer.fixtures.rank_runs import BF16, FP32, train_engine


def broken_at(*micro_steps: int) -> dict[int, float]:
    return dict.fromkeys(micro_steps, math.nan)


class Times:
    """What a micro-step's losses are multiplied by: 1, but for some."""

    def __init__(self, factors: dict[int, float]) -> None:
        self._factors = factors

    def __call__(self, micro_step: int) -> float:
        return self._factors.get(micro_step, 1.0)


def codes(ends: Sequence[RankExit]) -> dict[int, int]:
    assert not any(end.by_launcher for end in ends), "each ended by itself"
    return {end.rank: end.code for end in ends}


def checkpoints(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("policy", "code"), [("Suspend", ExitCode.HELD), ("Fail", ExitCode.NUMERICAL)]
)
def test_all_ranks_end_as_the_policy_says_with_one_checkpoint_and_one_sentence(
    tmp_path: Path, policy: str, code: ExitCode
) -> None:
    """NaN in data that rank 1 alone sees, judged from the sum that both have."""
    work = train_engine(
        tmp_path / "n",
        times=Times(broken_at(10)),
        policy=Health.model_validate({"policy": policy}),
    )
    ends, _ = run_gang(2, work, tmp_path / "b")
    assert codes(ends) == {0: code, 1: code}
    assert exit_code_of(deciding_exit(ends)) == code
    words = [said(tmp_path / "b", rank) for rank in (0, 1)]
    assert words[0] == words[1]
    assert all(in_agreement(tmp_path / "b", rank) for rank in (0, 1)), "rank 0 says it for both"
    if policy == "Suspend":
        assert words[0].startswith("GradientNonFinite")
        assert "It came from the micro-batches of rank 1" in words[0]
        # Found in step 4's numbers, which are read when the window of step 5 is full.
        assert checkpoints(tmp_path / "n") == ["step-000004.3"]
    else:
        assert "NaN or infinite" in words[0]
        assert "from the micro-batches of rank 1" in words[0]


LOSSY = PrecisionPlan(BF16.compute, FP32.accumulator, BF16.compute)
"""bf16 masters: at 1e-6 most updates are lost, from the first step on."""


def test_a_finding_that_lasts_fails_both_ranks_after_a_checkpoint(tmp_path: Path) -> None:
    work = train_engine(
        tmp_path / "n",
        LOSSY,
        policy=Health(policy="Fail"),
        steps=14,
        learningRate=1e-6,
    )
    ends, _ = run_gang(2, work, tmp_path / "b")
    assert codes(ends) == {0: 3, 1: 3}
    assert said(tmp_path / "b", 1).startswith("UpdatesLost")
    assert checkpoints(tmp_path / "n") == ["step-000008.3"]


def test_two_ranks_go_back_together_and_train_what_one_trains(tmp_path: Path) -> None:
    """Back to step 3's checkpoint, and on without the data of micro-steps 9 to 14."""

    def work(path: Path) -> InGang:
        return train_engine(
            path, times=Times(broken_at(10)), policy=Health(policy="Rollback"), every=3
        )

    _, (alone,) = run_gang(1, work(tmp_path / "1"), tmp_path / "a")
    ends, ranks = run_gang(2, work(tmp_path / "n"), tmp_path / "b")
    assert codes(ends) == {0: 0, 1: 0}
    assert sorted(m for rank in ranks for m in rank["seen"]) == [*range(15), *range(15, 24)]
    assert ranks[0]["seen"] == [m for n in range(0, 15, 3) for m in (n, n + 2)] + [
        *(15, 17, 18, 20, 21, 23)
    ]
    assert ranks[0]["masters"] == ranks[1]["masters"], "equal to the bit"
    assert ranks[0]["masters"] == pytest.approx(alone["masters"], rel=0, abs=2e-7)
    assert ranks[0]["position"] == ranks[1]["position"] == [6, 18]
    assert ranks[0]["findings"] == {"RolledBack": 4}
    assert "skipped the data of micro-steps 9 to 14" in ranks[0]["messages"][0]
    assert "It came from the micro-batches of rank 1" in ranks[0]["messages"][0]
    assert len(ranks[0]["warnings"]) == 1


def test_a_second_finding_fails_both_ranks_also_in_a_later_process(tmp_path: Path) -> None:
    policy = Health(policy="Rollback")
    first = train_engine(
        tmp_path / "n", times=Times(broken_at(10)), policy=policy, every=1, stop_after=9
    )
    ends, ranks = run_gang(2, first, tmp_path / "a")
    assert codes(ends) == {0: 0, 1: 0}
    assert ranks[0]["position"][0] < 6, "stopped after the rollback"
    second = train_engine(tmp_path / "n", times=Times(broken_at(19)), policy=policy, every=1)
    ends, _ = run_gang(2, second, tmp_path / "b")
    assert codes(ends) == {0: 3, 1: 3}
    assert "already went back to step 3 because of GradientNonFinite" in said(tmp_path / "b", 1)


def test_without_a_checkpoint_to_go_back_to_both_ranks_fail_alike(tmp_path: Path) -> None:
    work = train_engine(
        tmp_path / "n", times=Times(broken_at(10)), policy=Health(policy="Rollback")
    )
    ends, _ = run_gang(2, work, tmp_path / "b")
    assert codes(ends) == {0: 3, 1: 3}
    for rank in (0, 1):
        assert "there is no checkpoint from before step 4" in said(tmp_path / "b", rank)
        assert in_agreement(tmp_path / "b", rank)


class Blind(DistributedGroup):
    """Ranks of which the second gets a damaged sum in one window."""

    def exchange(
        self,
        buffers: AdapterBuffers,
        position: RunPosition,
        asked: ControlFlags,
        sums: Sequence[Tensor],
    ) -> ReducedWindow:
        exchanged = super().exchange(buffers, position, asked, sums)
        if self.share.rank == 1 and position.step == 3:
            buffers.gradient[0] = math.nan
        return exchanged


def test_what_one_rank_alone_finds_ends_all_of_them(tmp_path: Path) -> None:
    """Rank 1's copy of the sum is damaged; rank 0's numbers are healthy, yet it ends too."""

    def among(process_group: ProcessGroup) -> ProcessGroup:
        return Blind(process_group.share.rank, process_group.share.size)

    ends, _ = run_gang(2, train_engine(tmp_path / "n", among=among), tmp_path / "b")
    assert codes(ends) == {0: 3, 1: 3}
    assert said(tmp_path / "b", 0) == said(tmp_path / "b", 1)
    assert "step 4: 1 gradient elements are NaN or infinite" in said(tmp_path / "b", 0)


FP16 = PrecisionPlan(torch.float16, FP32.accumulator, FP32.masters)


def test_ranks_skip_the_same_step_where_one_ranks_scaled_gradient_overflows(tmp_path: Path) -> None:
    """Rank 1's micro-step 10 is 2^12 times larger: the scale is halved by both, or by none."""
    work = train_engine(tmp_path / "n", FP16, times=Times({10: 2.0**12}), learningRate=1e-4)
    ends, ranks = run_gang(2, work, tmp_path / "b")
    assert codes(ends) == {0: 0, 1: 0}
    assert ranks[0]["scales"] == ranks[1]["scales"]
    before, after = ranks[0]["scales"][3:5]
    assert after == before / 2, "skipped in step 4"
    assert ranks[0]["masters"] == ranks[1]["masters"]
    assert ranks[0]["findings"] == {}


def _refused_by_first(process_group: ProcessGroup, stop: StopRequest) -> int:
    def act() -> int:
        raise ConfigurationError("the output belongs to another run")

    return run_on_rank0(process_group, act)


def test_what_rank_0_refuses_for_all_is_said_by_all_alike(tmp_path: Path) -> None:
    ends, _ = run_gang(3, _refused_by_first, tmp_path)
    assert codes(ends) == {0: 2, 1: 2, 2: 2}
    for rank in range(3):
        assert said(tmp_path, rank) == "the output belongs to another run"
        assert in_agreement(tmp_path, rank)
