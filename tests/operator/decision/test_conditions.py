"""Conditions as metav1 means them."""

from datetime import datetime, timedelta, timezone

from kubelora_api.status import Condition
from kubelora_operator.decision.conditions import MESSAGE_MAX, Conditions, format_time, parse_time
from tests.operator.world import START

LATER = START + timedelta(minutes=5)


def test_the_time_moves_when_the_status_changes_and_not_with_reason_or_message() -> None:
    first = Conditions.start([], 1, START).set("Running", "False", "Starting", "a")
    same = Conditions.start(first.items, 2, LATER).set("Running", "False", "Unschedulable", "b")
    running = same.get("Running")
    assert running is not None
    assert running.last_transition_time == "2026-03-01T12:00:00Z"
    assert (running.reason, running.message, running.observed_generation) == (
        "Unschedulable",
        "b",
        2,
    )
    changed = same.set("Running", "True", "Training", "c").get("Running")
    assert changed is not None
    assert changed.last_transition_time == "2026-03-01T12:05:00Z"


def test_one_condition_of_each_type_in_a_fixed_order() -> None:
    conditions = Conditions.start([], 1, START)
    for kind in ("Failed", "Accepted", "Running", "Accepted"):
        conditions = conditions.set(kind, "True", "X", "")
    assert [c.type for c in conditions.items] == ["Accepted", "Running", "Failed"]


def test_conditions_of_other_writers_are_dropped() -> None:
    foreign = Condition(
        type="Rogue", status="True", last_transition_time=format_time(START), reason="X", message=""
    )
    assert Conditions.start([foreign], 1, START).items == ()


def test_clearing_what_was_never_told_tells_nothing() -> None:
    assert Conditions.start([], 1, START).clear("Queued", "X", "").items == ()


def test_a_message_is_cut_to_what_a_terminal_takes() -> None:
    long = Conditions.start([], 1, START).set("Failed", "True", "X", "a" * 40000).get("Failed")
    assert long is not None
    assert len(long.message) == MESSAGE_MAX


def test_times_are_written_in_utc_and_read_with_a_zone() -> None:
    vienna = timezone(timedelta(hours=1))
    assert format_time(datetime(2026, 3, 1, 13, 0, tzinfo=vienna)) == "2026-03-01T12:00:00Z"
    assert parse_time("2026-03-01T12:00:00Z") == START
    assert parse_time("2026-03-01T12:00:00.000000Z") == START
    assert parse_time("2026-03-01T12:00:00") == START


def test_a_doubtful_condition_is_not_true() -> None:
    conditions = Conditions.start([], 1, START).set("NumericallyHealthy", "Unknown", "X", "")
    assert not conditions.is_true("NumericallyHealthy")
    assert not conditions.is_true("Running")


def test_a_message_that_just_fits_is_whole() -> None:
    fitting = Conditions.start([], 1, START).set("Failed", "True", "X", "a" * MESSAGE_MAX)
    found = fitting.get("Failed")
    assert found is not None
    assert found.message == "a" * MESSAGE_MAX
