"""Learning rates and threads: pure arithmetic."""

from pathlib import Path

import pytest
import torch
from diffusers.optimization import get_polynomial_decay_schedule_with_warmup, get_scheduler

from kubelora_api.training_spec import Schedule, Training
from kubelora_trainer.optim.lr_schedule import learning_rate
from kubelora_trainer.utils.cpu_threads import cpu_quota, thread_count


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


SCHEDULES = (
    Schedule(),
    Schedule(name="linear"),
    Schedule(name="cosine"),
    Schedule(name="cosine_with_restarts", cycles=1),
    Schedule(name="cosine_with_restarts", cycles=4),
    Schedule(name="polynomial", power=1.0, end_factor=0.0),
    Schedule(name="polynomial", power=2.5, end_factor=0.125),
)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_schedule_gives_diffusers_rates(schedule: Schedule, warmup: int) -> None:
    steps, peak = 40, 3e-4
    spec = schedule.model_copy(update={"warmup_steps": warmup})
    training = Training(steps=steps, learning_rate=peak, schedule=spec)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    if schedule.name == "polynomial":
        theirs = get_polynomial_decay_schedule_with_warmup(
            optimizer,
            warmup,
            steps,
            lr_end=peak * (schedule.end_factor or 0.0),
            power=schedule.power or 1.0,
        )
    else:
        name = "constant_with_warmup" if schedule.name == "constant" else schedule.name
        theirs = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=steps,
            num_cycles=schedule.cycles or 1,
        )
    for step in range(steps + 1):
        expected = theirs.get_last_lr()[0]
        assert learning_rate(training, step, steps) == pytest.approx(expected, rel=1e-9, abs=1e-18)
        optimizer.step()
        theirs.step()


def test_restarts_jump_back_to_the_peak() -> None:
    # Two cycles over eight steps: half a cosine in four, twice.
    once = [1.0, 0.853553390593, 0.5, 0.146446609407]
    restarts = Schedule(name="cosine_with_restarts", cycles=2)
    assert rates(restarts, 8) == pytest.approx(once + once)


def test_a_quadratic_falls_by_the_square_of_what_is_left() -> None:
    quadratic = Schedule(name="polynomial", power=2.0, end_factor=0.5)
    # 1/2 + 1/2 (1 - k/4)²
    assert rates(quadratic, 4) == [1.0, 0.78125, 0.625, 0.53125]


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
