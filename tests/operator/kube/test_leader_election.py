"""When a Lease may be taken, by the candidate's own clock. The rest runs in tests/cluster."""

from kubelora_operator.kube.leader_election import (
    ObservedLease,
    Timing,
    can_acquire,
    renewal_record,
)

TIMING = Timing(duration=15, renew_deadline=10, retry=2, request=4)


def lease(holder: str, renewed: str = "2026-03-01T12:00:00.000000Z") -> dict[str, object]:
    spec = {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}
    return {"metadata": {"uid": "l"}, "spec": spec}


def test_a_lease_that_another_renews_is_never_free() -> None:
    seen = ObservedLease(renewal_record(lease("a")), since=100.0)
    assert not can_acquire(lease("a"), seen, "b", 114.9, TIMING)
    assert renewal_record(lease("a")) != renewal_record(lease("a", "2026-03-01T12:00:02.000000Z"))


def test_a_lease_that_stands_still_for_its_duration_is_free() -> None:
    seen = ObservedLease(renewal_record(lease("a")), since=100.0)
    assert not can_acquire(lease("a"), seen, "b", 115.0, TIMING)
    assert can_acquire(lease("a"), seen, "b", 115.1, TIMING)


def test_a_released_lease_and_ones_own_are_free_at_once() -> None:
    for holder in ("", "b"):
        seen = ObservedLease(renewal_record(lease(holder)), since=100.0)
        assert can_acquire(lease(holder), seen, "b", 100.0, TIMING)


def test_a_holder_gives_up_before_a_candidate_may_take_over() -> None:
    default = Timing()
    assert default.request < default.renew_deadline < default.duration
