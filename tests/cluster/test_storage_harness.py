"""A build, whole or killed, leaves nothing mounted, and its images stay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import buildah, kernel, locks, machine
from .harness.places import Places


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Places]:
    """A storage of its own, with an image of one file."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    machine.install(machine.IMAGE_PACKAGES)
    places = Places(cache=tmp_path / "cache", state=tmp_path / "state")
    context = tmp_path / "context"
    context.mkdir()
    (context / "file").write_text("1")
    (context / "Dockerfile").write_text("FROM scratch AS tiny\nCOPY file /\n")
    buildah.folder(places).mkdir(parents=True)
    buildah.build(places, context, "tiny", "localhost/tiny:1")
    yield places
    kernel.unmount_under(places.cache)


def mounted(places: Places) -> list[str]:
    return [point.name for point in kernel.mounts_under(places.cache)]


def leave_mounted(places: Places) -> None:
    """What a build does that is killed half-way."""
    container = buildah.run(places, "from", "localhost/tiny:1").strip()
    buildah.run(places, "mount", container)
    assert mounted(places) == ["merged", "overlay"]


def test_nothing_stays_mounted_behind_the_harness_and_the_next_build_works(
    other: Places, tmp_path: Path
) -> None:
    with buildah.unmounting(other):
        leave_mounted(other)
    assert mounted(other) == []
    buildah.build(other, tmp_path / "context", "tiny", "localhost/tiny:2")
    assert buildah.has_image(other, "localhost/tiny:1")
    assert buildah.has_image(other, "localhost/tiny:2")


def test_a_build_that_is_under_way_keeps_its_mounts(other: Places) -> None:
    leave_mounted(other)
    with locks.exclusive(other, "images"):
        buildah.unmount_if_idle(other)
        assert mounted(other) == ["merged", "overlay"]
    buildah.unmount_if_idle(other)
    assert mounted(other) == []
