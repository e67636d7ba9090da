"""Raw gradients of several ranks: each its own micro-batches', together one rank's files."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file

from kubelora_trainer.cli.main import main
from tests.trainer.fixtures.processes import run_gang
from tests.trainer.fixtures.rank_runs import FP32, train_engine

EVERYTHING = {"when": "norm < 1e30"}


def gradients(path: Path) -> dict[str, Path]:
    return {file.name: file for file in (path / "gradients").iterdir()}


def test_the_files_of_several_ranks_are_those_of_one(tmp_path: Path) -> None:
    """The first step's gradients are of the same weights to the bit, whatever the ranks."""
    run_gang(1, train_engine(tmp_path / "1", FP32, dump=EVERYTHING, steps=2), tmp_path / "a")
    run_gang(2, train_engine(tmp_path / "n", FP32, dump=EVERYTHING, steps=2), tmp_path / "b")
    ones, twos = gradients(tmp_path / "1"), gradients(tmp_path / "n")
    assert sorted(twos) == sorted(ones)
    assert len(twos) == 6
    for place in range(3):
        name = f"step-000001.micro-00{place}.safetensors"
        alone, shared = load_file(ones[name]), load_file(twos[name])
        assert alone.keys() == shared.keys()
        assert all(alone[key].equal(shared[key]) for key in alone)
    ranks = {}
    for name, file in twos.items():
        with safe_open(file, "pt") as about:
            ranks[name[10:].split(".")[1]] = about.metadata()["rank"]
    assert ranks == {"micro-000": "0", "micro-001": "1", "micro-002": "0"}
    shown = CliRunner().invoke(main, ["gradients", str(tmp_path / "n"), "--step", "2"])
    rows = [line.split()[:3] for line in shown.output.splitlines()[1:]]
    assert {tuple(row) for row in rows} == {("2", "0", "0"), ("2", "1", "1"), ("2", "2", "0")}


def test_ranks_share_the_budget_and_each_tells_of_its_own_share(tmp_path: Path) -> None:
    """12 KiB for both: rank 0, which has two of three micro-batches, is the first without."""
    dump = EVERYTHING | {"budget": "12Ki"}
    work = train_engine(tmp_path / "n", FP32, dump=dump, steps=12)
    _, ranks = run_gang(2, work, tmp_path / "b")
    sizes: dict[str, int] = {"0": 0, "1": 0}
    for file in gradients(tmp_path / "n").values():
        with safe_open(file, "pt") as about:
            sizes[about.metadata()["rank"]] += file.stat().st_size
    assert all(0 < size <= 6 << 10 for size in sizes.values()), sizes
    for rank in ranks:
        told = [
            w for w in rank["warnings"] if "this rank's 1/2 of the budget of 12Ki is used up" in w
        ]
        assert len(told) == 1


def test_a_gradient_that_is_not_finite_is_written_by_the_rank_that_met_it(tmp_path: Path) -> None:
    """Rank 1's third micro-batch; rank 0, which never saw it, writes nothing."""
    work = train_engine(
        tmp_path / "n", times=lambda m: float("nan") if m == 7 else 1.0, dump={"when": "nonfinite"}
    )
    run_gang(2, work, tmp_path / "b")
    (file,) = gradients(tmp_path / "n").values()
    assert file.name == "step-000003.micro-001.safetensors"


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_a_step_that_comes_again_on_another_rank_replaces_its_file(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    """Stopped after two windows, whose second is done again from the first's checkpoint."""
    first, second = sizes
    work = train_engine(tmp_path / "n", dump=EVERYTHING, stop_after=6, every=1, steps=3)
    run_gang(first, work, tmp_path / "a")
    before = sorted(gradients(tmp_path / "n"))
    newest = max((tmp_path / "n" / "checkpoints").iterdir())
    newest.rename(newest.with_name(f".{newest.name}.gone"))  # as if killed before it
    run_gang(second, train_engine(tmp_path / "n", dump=EVERYTHING, steps=3), tmp_path / "b")
    after = sorted(gradients(tmp_path / "n"))
    assert set(before) <= set(after)
    assert len(after) == 9
