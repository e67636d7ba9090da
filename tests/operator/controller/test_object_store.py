"""The store of the watched objects: what it keeps and reports, and when decisions may begin."""

import pytest

from kubelora_api import names
from kubelora_api.schema import JsonObject
from kubelora_operator.controller.object_store import ObjectStore, is_newer
from kubelora_operator.controller.trim import Kind
from kubelora_operator.controller.watches import sources_of
from kubelora_operator.decision.snapshot import JobKey
from tests.operator.world import UID, document

KEY = ("studio", "bottles")
CHILD = f"bottles-{UID[:5]}-1"


class Rig:
    """A store with its reports; the first lists have arrived and were empty."""

    def __init__(self, namespaces: tuple[str, ...] = (), *, synced: bool = True) -> None:
        self.now = 1.0
        self.reports: list[tuple[JobKey, bool]] = []
        self.sources = sources_of(namespaces)
        self.store = ObjectStore(
            self.sources, lambda key, urgent: self.reports.append((key, urgent)), lambda: self.now
        )
        for source in self.sources if synced else []:
            self.store.listed(source, set(), 0.0)

    def take(self) -> list[tuple[JobKey, bool]]:
        reports, self.reports = self.reports, []
        return reports


def job(version: int, generation: int = 1, **more: object) -> JsonObject:
    found = document() | more
    found["metadata"] |= {"resourceVersion": str(version), "generation": generation}
    return found


def child(version: int, name: str = CHILD, uid: str = "c1", **status: object) -> JsonObject:
    owner = {"kind": names.KIND, "name": "bottles", "uid": UID, "controller": True}
    metadata = {"name": name, "namespace": "studio", "uid": uid, "resourceVersion": str(version)}
    return {"metadata": metadata | {"ownerReferences": [owner]}, "status": status}


def pod(version: int, owner: str = CHILD, **status: object) -> JsonObject:
    reference = {"kind": "Job", "name": owner, "uid": "c1", "controller": True}
    metadata = {
        "name": f"{owner}-0",
        "namespace": "studio",
        "uid": f"pod-{owner}",
        "resourceVersion": str(version),
    }
    return {"metadata": metadata | {"ownerReferences": [reference]}, "status": status}


def test_objects_are_found_by_owner_and_not_by_label() -> None:
    store = Rig().store
    store.deliver(Kind.CHILD, child(1))
    store.deliver(Kind.POD, pod(2, phase="Running"))
    store.deliver(Kind.POD, pod(3, owner="other-0b5e7-1"))
    assert [c["metadata"]["name"] for c in store.children_of("studio", UID)] == [CHILD]
    assert store.children_of("lab", UID) == []
    pods = store.pods_of("studio", f"bottles-{UID[:5]}")
    assert [p["status"] for p in pods] == [{"phase": "Running"}]
    store.remove(Kind.POD, pod(4))
    assert store.pods_of("studio", f"bottles-{UID[:5]}") == []


def test_an_event_of_a_child_or_pod_reports_its_job_by_owner() -> None:
    rig = Rig()
    rig.store.deliver(Kind.CHILD, child(1))
    rig.store.deliver(Kind.POD, pod(2))
    rig.store.remove(Kind.POD, pod(3))
    assert rig.take() == [(KEY, True)] * 3


def test_a_change_of_what_nobody_reads_is_no_report() -> None:
    rig = Rig()
    rig.store.deliver(Kind.CHILD, child(1, active=1))
    rig.take()
    rig.store.deliver(Kind.CHILD, child(2, active=1, ready=1))
    managed = job(3)
    rig.store.deliver(Kind.JOB, managed)
    rig.take()
    metadata = managed["metadata"] | {"resourceVersion": "4", "managedFields": [{}]}
    rig.store.deliver(Kind.JOB, managed | {"metadata": metadata})
    assert rig.take() == []
    stored = rig.store.get_job(*KEY)
    assert stored is not None
    assert stored["metadata"]["resourceVersion"] == "4"
    assert "managedFields" not in stored["metadata"]


def test_a_change_of_the_status_alone_is_not_urgent() -> None:
    """The operator's own writes come back as events; they must not end the wait after a failure."""
    rig = Rig()
    rig.store.deliver(Kind.JOB, job(1), added=True)
    rig.store.deliver(Kind.JOB, job(2, status={"attempt": 1}))
    rig.store.deliver(Kind.JOB, job(3, generation=2))
    deleting = job(4, generation=2)
    deleting["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:00Z"
    rig.store.deliver(Kind.JOB, deleting)
    rig.store.remove(Kind.JOB, job(5))
    assert rig.take() == [(KEY, True), (KEY, False), (KEY, True), (KEY, True), (KEY, True)]


def test_an_older_version_never_replaces_a_newer_one() -> None:
    rig = Rig()
    rig.store.deliver(Kind.JOB, job(8), added=True)
    rig.take()
    rig.store.record(Kind.JOB, job(10, status={"attempt": 1}))  # the answer to our own write
    rig.store.deliver(Kind.JOB, job(9))
    rig.store.deliver(Kind.JOB, job(10, status={"attempt": 1}))
    found = rig.store.get_job(*KEY)
    assert found is not None
    assert found["status"] == {"attempt": 1}
    assert rig.take() == []


def test_an_answer_that_comes_after_the_deletion_does_not_revive_the_object() -> None:
    rig = Rig()
    rig.store.deliver(Kind.CHILD, child(5))
    rig.store.remove(Kind.CHILD, child(7))
    rig.store.record(Kind.CHILD, child(6))
    assert rig.store.children_of("studio", UID) == []
    # It had only left the selector, and is back.
    rig.store.deliver(Kind.CHILD, child(8))
    assert len(rig.store.children_of("studio", UID)) == 1


def test_no_job_is_reported_before_all_three_kinds_are_listed() -> None:
    rig = Rig(("studio", "lab"), synced=False)
    rig.store.deliver(Kind.JOB, job(1))
    rig.store.deliver(Kind.POD, pod(2))
    studio = [s for s in rig.sources if s.namespace == "studio"]
    for source in studio:
        assert rig.take() == []
        assert not rig.store.synced("studio")
        rig.store.listed(source, {UID, f"pod-{CHILD}"}, 0.0)
    assert rig.take() == [(KEY, True)]
    assert rig.store.synced("studio")
    assert not rig.store.synced("lab")


def test_what_a_list_lacks_is_a_ghost_unless_it_is_newer_than_the_list() -> None:
    rig = Rig()
    rig.store.deliver(Kind.CHILD, child(1))
    rig.now = 10.0
    rig.store.record(Kind.CHILD, child(2, name=f"bottles-{UID[:5]}-2", uid="c2"))
    rig.take()
    children = next(s for s in rig.sources if s.kind is Kind.CHILD)
    rig.store.listed(children, set(), 5.0)
    assert [c["metadata"]["uid"] for c in rig.store.children_of("studio", UID)] == ["c2"]
    assert rig.take() == [(KEY, True)]


def test_a_job_is_new_until_it_has_a_status() -> None:
    rig = Rig()
    rig.store.deliver(Kind.JOB, job(1))
    assert not rig.store.is_new(UID)  # from a list: its status may have been lost
    rig.store.remove(Kind.JOB, job(2))
    rig.store.deliver(Kind.JOB, job(3), added=True)
    assert rig.store.is_new(UID)
    rig.store.record(Kind.JOB, job(4, status={"attempt": 1}))
    rig.store.deliver(Kind.JOB, job(5))
    assert not rig.store.is_new(UID)


@pytest.mark.parametrize(
    ("version", "than", "newer"),
    [("10", "9", True), ("9", "10", False), ("9", "9", False), ("a", "b", True), ("", "", False)],
)
def test_versions_are_compared_as_numbers(version: str, than: str, newer: bool) -> None:
    assert is_newer(version, than) is newer
