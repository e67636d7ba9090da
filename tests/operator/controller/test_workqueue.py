"""The work queue: one worker for each job, nothing lost, failures wait."""

import asyncio

from kubelora_operator.controller.workqueue import QueueState, WorkQueue


def test_a_key_that_is_added_twice_is_done_once() -> None:
    state: QueueState[str] = QueueState()
    state.add("a", 0)
    state.add("a", 0)
    assert state.get(0) == "a"
    state.done("a")
    assert state.get(100) is None


def test_a_key_added_while_it_is_worked_on_is_done_once_more_and_not_side_by_side() -> None:
    state: QueueState[str] = QueueState()
    state.add("a", 0)
    assert state.get(0) == "a"
    state.add("a", 1)
    assert state.get(5) is None
    assert state.next_ready_at() is None  # nothing to wait for but the worker
    state.done("a")
    assert state.get(5) == "a"


def test_a_busy_key_does_not_hold_up_the_others() -> None:
    state: QueueState[str] = QueueState()
    for key in ("a", "b"):
        state.add(key, 0)
    assert state.get(0) == "a"
    state.add("a", 0)
    assert state.get(0) == "b"


def test_of_two_wishes_the_sooner_counts() -> None:
    state: QueueState[str] = QueueState()
    state.add("a", 10)
    state.add("a", 3)
    state.add("a", 7)
    assert (state.get(2.9), state.next_ready_at(), state.get(3)) == (None, 3, "a")
    state.done("a")
    assert state.get(100) is None


def test_keys_come_in_the_order_in_which_they_are_due() -> None:
    state: QueueState[str] = QueueState()
    for key, at in (("late", 3.0), ("soon", 1.0), ("between", 2.0)):
        state.add(key, at)
    assert [state.get(9) for _ in range(3)] == ["soon", "between", "late"]


def test_failures_wait_twice_as_long_each_time_up_to_a_bound_until_one_goes_well() -> None:
    state: QueueState[str] = QueueState(lambda: 0.0)
    delays = []
    now = 0.0
    state.add("a", now)
    for _ in range(4):
        assert state.get(now) == "a"
        delays.append(state.failed("a", now, longest=5))
        now += delays[-1]
    assert delays == [1, 2, 4, 5]
    assert state.get(now) == "a"
    state.done("a")
    state.add("a", now)
    assert state.get(now) == "a"
    assert state.failed("a", now) == 1


def test_a_backoff_is_spread_and_never_above_its_bound() -> None:
    for part, delay in ((0.0, 30.0), (1.0, 22.5)):
        state: QueueState[str] = QueueState(lambda part=part: part)  # type: ignore[misc]
        for _ in range(40):
            last = state.failed("a", 0)
        assert last == delay


def test_an_echo_does_not_end_a_backoff_but_a_changed_spec_does() -> None:
    state: QueueState[str] = QueueState(lambda: 0.0)
    state.add("a", 0)
    assert state.get(0) == "a"
    state.add("a", 0)  # the echo of a write comes before the end of the look,
    assert state.failed("a", 0, first=8) == 8
    state.add("a", 1)  # or after it
    assert state.get(7.9) is None
    state.add("a", 2, urgent=True)
    assert state.get(2) == "a"


def test_an_urgent_change_during_a_failing_look_is_acted_on_at_once() -> None:
    state: QueueState[str] = QueueState(lambda: 0.0)
    state.add("a", 0)
    assert state.get(0) == "a"
    state.add("a", 1, urgent=True)
    state.failed("a", 2, first=8)
    assert state.get(2) == "a"


def test_nothing_shortens_a_wait_that_the_api_server_asked_for() -> None:
    state: QueueState[str] = QueueState(lambda: 0.0)
    state.add("a", 0)
    assert state.get(0) == "a"
    assert state.failed("a", 0, at_least=20) == 20
    state.add("a", 1, urgent=True)
    assert (state.get(19.9), state.get(20)) == (None, "a")


async def test_no_two_workers_ever_hold_the_same_key_and_all_are_done() -> None:
    loop = asyncio.get_running_loop()
    queue: WorkQueue[int] = WorkQueue(loop.time)
    held: set[int] = set()
    done: list[int] = []

    async def worker() -> None:
        while True:
            key = await queue.get()
            assert key not in held
            held.add(key)
            await asyncio.sleep(0)
            queue.add(key) if done.count(key) < 2 else None
            await asyncio.sleep(0)
            held.discard(key)
            done.append(key)
            queue.done(key)

    workers = [asyncio.create_task(worker()) for _ in range(4)]
    for key in range(10):
        queue.add(key)
    async with asyncio.timeout(10):
        while len(done) < 30:
            assert not any(w.done() for w in workers)
            await asyncio.sleep(0.001)
    for task in workers:
        task.cancel()
    assert sorted(done) == sorted(list(range(10)) * 3)


async def test_a_waiting_worker_is_woken_by_a_key_and_by_a_delay_that_is_over() -> None:
    queue: WorkQueue[str] = WorkQueue(asyncio.get_running_loop().time)
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a", delay=0.01)
    async with asyncio.timeout(10):
        assert await waiting == "a"
