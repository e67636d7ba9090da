"""Learning rates and threads: pure arithmetic."""

from pathlib import Path

import pytest

from kubelora_api.training_spec import Schedule, Training
from kubelora_trainer.schedule import learning_rate
from kubelora_trainer.threads import cpu_quota, thread_count


def rates(schedule: Schedule, steps: int) -> list[float]:
    training = Training(steps=steps, learning_rate=1.0, schedule=schedule)
    return [learning_rate(training, step, steps) for step in range(steps)]


def test_warm_up_rises_linearly_from_zero() -> None:
    assert rates(Schedule(warmup_steps=4), 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_falls_to_half_in_the_middle() -> None:
    # 1/2 (1 + cos(π k/4)): 1, 0.8536, 0.5, 0.1464
    expected = [1.0, 0.853553390593, 0.5, 0.146446609407]
    assert rates(Schedule(name="cosine"), 4) == pytest.approx(expected)


def test_cosine_begins_after_the_warm_up() -> None:
    assert rates(Schedule(name="cosine", warmup_steps=2), 6) == pytest.approx(
        [0.0, 0.5, 1.0, 0.853553390593, 0.5, 0.146446609407]
    )


def test_threads_follow_the_limit_of_the_pod() -> None:
    large = 2_600_000_000
    assert thread_count(large, {}, cores=64, quota=8.0) == 8
    assert thread_count(large, {}, cores=64, quota=0.5) == 1
    assert thread_count(large, {}, cores=4, quota=None) == 4
    assert thread_count(large, {"OMP_NUM_THREADS": "3"}, cores=64, quota=8.0) is None
    assert thread_count(3_000_000, {}, cores=64, quota=8.0) == 1


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_is_read_from_either_version(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota
