"""Nothing is left behind, and nothing that is not the cluster's is touched.

That a whole cluster goes without a trace is checked each time one is taken down: `down` fails with
what it finds. Here is the check itself, on things made for it beside the cluster that runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiers.skips import not_applicable

from .harness import cluster as local_cluster
from .harness import kernel, processes, teardown
from .harness.errors import HarnessError
from .harness.places import Places


@pytest.fixture
def other(tmp_path: Path) -> Places:
    """Folders of a cluster that does not run."""
    return Places(cache=tmp_path / "cache", state=tmp_path / "state")


@pytest.fixture
def sleeper(other: Places) -> Iterator[int]:
    """A component that ignores SIGTERM."""
    other.state.mkdir()
    script = f"trap '' TERM; # {other.state}/config\nwhile true; do sleep 0.1; done"
    pid = processes.spawn(other, "sleeper", ["sh", "-c", script])
    yield pid
    processes.stop(other, "sleeper", grace=0.1)


def test_a_process_that_still_runs_is_found_and_stopped(other: Places, sleeper: int) -> None:
    assert any(f"Process {sleeper} still runs" in line for line in teardown.check_clean(other))
    assert processes.running_pid(other, "sleeper") == sleeper
    processes.stop(other, "sleeper", grace=0.3)
    assert processes.running_pid(other, "sleeper") is None
    assert processes.start_time(sleeper) is None
    assert not any("still runs: sh" in line for line in teardown.check_clean(other))


def test_a_stranger_with_a_remembered_id_is_not_stopped(other: Places, sleeper: int) -> None:
    """After a reboot a pid file may name a process that is someone else's."""
    started = processes.start_time(sleeper)
    assert started is not None
    (other.pids / "etcd").write_text(f"{sleeper} {started - 1}\n")
    processes.stop(other, "etcd", grace=0.1)
    assert processes.start_time(sleeper) == started


def test_a_mount_is_found_and_what_lies_behind_it_survives(other: Places, tmp_path: Path) -> None:
    """A bind mount of a user's folder below the state folder: removing files must not follow it."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    user, point = tmp_path / "user", other.state / "a folder"
    user.mkdir()
    point.mkdir(parents=True)
    (user / "photo").write_text("precious")
    subprocess.run(["mount", "--bind", str(user), str(point)], check=True)
    try:
        assert f"{point} is still mounted." in teardown.check_clean(other)
    finally:
        kernel.unmount_under(other.state)
    assert f"{point} is still mounted." not in teardown.check_clean(other)
    assert (user / "photo").read_text() == "precious"


def test_a_command_for_another_state_folder_leaves_the_running_cluster_alone(
    other: Places, places: Places, cluster: Path, is_local_cluster: bool
) -> None:
    if not is_local_cluster:
        not_applicable("the cluster is not the harness's")
    with pytest.raises(HarnessError, match=f"KUBELORA_STATE={places.state}"):
        teardown.down(other)
    assert kernel.tables()


def test_a_cluster_is_not_taken_down_under_a_test_run(
    places: Places, cluster: Path, is_local_cluster: bool
) -> None:
    """This very run is the one that uses it."""
    if not is_local_cluster:
        not_applicable("the cluster is not the harness's")
    with pytest.raises(HarnessError, match="A test run uses the cluster"):
        local_cluster.down(places)
    assert local_cluster.is_healthy(places)


def test_a_client_of_the_cluster_is_not_taken_for_a_part_of_it(other: Places) -> None:
    waiting = [sys.executable, "-c", "import time; time.sleep(60)", str(other.kubeconfig)]
    client = subprocess.Popen(waiting)
    try:
        assert not any(f"Process {client.pid}" in line for line in teardown.check_clean(other))
    finally:
        client.kill()
        client.wait()
