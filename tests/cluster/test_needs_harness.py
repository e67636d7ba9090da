"""What a machine lacks is a sentence that says what to do, and exit status 1, not a traceback."""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from .harness import __main__ as command
from .harness import cluster, machine
from .harness.errors import HarnessError

Patch = pytest.MonkeyPatch
Said = Callable[..., str]


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> Said:
    """Run the harness's command on empty folders; what it said on standard error."""
    monkeypatch.setenv("KUBELORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KUBELORA_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("KUBECONFIG", raising=False)

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["harness", *arguments])
        assert command.main() == 1
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert "Traceback" not in said
        assert not (tmp_path / "state").exists()
        return said

    return run


def lacking(program: str, monkeypatch: Patch) -> None:
    """A machine whose PATH has everything but one program."""
    found = shutil.which
    monkeypatch.setattr(
        "shutil.which", lambda name, *rest: None if name == program else found(name, *rest)
    )


@pytest.mark.parametrize("arguments", [("up",), ("down",), ("images",)])
def test_without_root(harness: Said, monkeypatch: Patch, arguments: tuple[str, ...]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    said = harness(*arguments)
    assert "need root, and this is user 1000. Run the command as root, or set KUBECONFIG" in said


def test_without_go(harness: Said, monkeypatch: Patch) -> None:
    lacking("go", monkeypatch)
    for arguments in (("tool", "helm"), ("tool", "promtool")):
        said = harness(*arguments)
        assert "Go is not on the PATH" in said
        assert "Install Go 1.26 or newer" in said


def test_an_unknown_tool_names_the_known_ones(harness: Said) -> None:
    assert "No tool is called 'hlem'. Known tools: " in harness("tool", "hlem")


def test_with_a_disk_that_is_almost_full(harness: Said, monkeypatch: Patch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(machine, "require_debian", lambda: None)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**12, 10**12, 2**30))
    said = harness("up")
    assert "1.0 GiB are free at " in said
    assert (
        "3 GiB are needed for the cluster's state. Free some space, or set KUBELORA_CACHE" in said
    )


def test_with_a_disk_that_fills_up_on_the_way(harness: Said, monkeypatch: Patch) -> None:
    def full(places: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/var/lib/etcd/wal")

    monkeypatch.setattr(cluster, "up", full)
    assert harness("up") == (
        "error: no space left on device at /var/lib/etcd/wal: free some, or set KUBELORA_CACHE and "
        "KUBELORA_STATE to a larger disk.\n"
    )


def packages(monkeypatch: Patch, apt: str, tmp_path: Path) -> None:
    """buildah is missing, and this is what apt-get does."""
    program = tmp_path / "bin" / "apt-get"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{apt}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "_POLICY", tmp_path / "policy-rc.d")
    monkeypatch.setattr(machine, "_enabled_units", lambda: set[str]())
    monkeypatch.setattr("os.geteuid", lambda: 0)


def install() -> None:
    machine.install({"buildah": "/nowhere/buildah"})


def test_without_buildah_where_apt_has_none(monkeypatch: Patch, tmp_path: Path) -> None:
    packages(monkeypatch, "echo 'E: Unable to locate package buildah' >&2; exit 100", tmp_path)
    with pytest.raises(HarnessError, match=r"(?s)`apt-get update -qq` failed:.*locate package"):
        install()
    assert not (tmp_path / "policy-rc.d").exists()


def test_without_buildah_where_apt_installs_another_thing(
    monkeypatch: Patch, tmp_path: Path
) -> None:
    packages(monkeypatch, "exit 0", tmp_path)
    with pytest.raises(HarnessError, match="installed buildah, but the programs are not there"):
        install()


def test_without_buildah_where_there_is_no_apt(monkeypatch: Patch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    lacking("apt-get", monkeypatch)
    with pytest.raises(HarnessError, match="this machine is not Debian or Ubuntu"):
        install()


def test_without_buildah_and_without_root(monkeypatch: Patch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(HarnessError, match="Installing buildah needs root, and this is user 1000"):
        install()


def test_a_port_that_another_holds_is_told_with_its_holder() -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(HarnessError, match=rf"Port {port} on 127.0.0.1, which etcd needs, is"):
            machine.require_port("127.0.0.1", port, "etcd")
