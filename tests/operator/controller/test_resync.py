"""The periodic list against what the watches told."""

from kubelora_operator.controller.resync import WatchTracker

A, B = ("studio", "a"), ("studio", "b")


def test_what_was_heard_as_listed_is_no_suspect() -> None:
    tracker = WatchTracker()
    tracker.record(A, "5", now=1)
    assert tracker.compare({A: "5"}, began=10) == set()
    assert tracker.overdue(1000) == []


def test_a_change_that_no_watch_told_of_is_looked_at_and_is_overdue_after_the_grace() -> None:
    tracker = WatchTracker()
    tracker.record(A, "5", now=1)
    assert tracker.compare({A: "6", B: "1"}, began=10) == {A, B}
    assert tracker.overdue(40) == []
    assert sorted(tracker.overdue(41)) == [A, B]
    tracker.record(A, "6", now=42)
    assert tracker.overdue(43) == [B]


def test_repeated_lists_do_not_restart_the_grace() -> None:
    tracker = WatchTracker()
    for began in (10, 30, 45):
        tracker.compare({A: str(began)}, began=began)
    assert tracker.overdue(45) == [A]


def test_a_ghost_is_looked_at_once_and_forgotten() -> None:
    tracker = WatchTracker()
    tracker.record(A, "5", now=1)
    assert tracker.compare({}, began=10) == {A}
    assert tracker.compare({}, began=20) == set()
    assert tracker.overdue(1000) == []


def test_what_was_heard_after_the_list_began_is_newer_than_the_list() -> None:
    tracker = WatchTracker()
    tracker.record(A, "7", now=11)
    tracker.record(B, "1", now=11)
    assert tracker.compare({A: "5"}, began=10) == set()
