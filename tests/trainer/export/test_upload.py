"""A finished adapter goes to a real S3 server and to a Hub's API; a failed push loses nothing."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from click.testing import Result
from moto.server import ThreadedMotoServer

from kubelora_trainer.cli.demo import DemoPaths
from tests.trainer.fixtures.hub_server import Hub
from tests.trainer.integration.test_interruption import arguments, in_this_process

NAMES = ["manifest.json", "pytorch_lora_weights.safetensors", "tiny.safetensors"]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an S3 server with one bucket, ``adapters``."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset, timeout=10).close()
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("adapters")
    yield f"http://{host}:{port}"
    server.stop()


def _train(folder: Path, demo: DemoPaths, push: str) -> Result:
    folder.mkdir(exist_ok=True)
    if not (folder / "job.yaml").exists():
        arguments(folder, demo)
    given = [
        *("train", str(folder / "job.yaml"), "--set", "spec.training.steps=2"),
        *("--mount", f"model={demo.model}", "--mount", f"data={demo.photos}"),
        *("--mount", f"output={folder / 'out'}", "--set", f"spec.output.push={push}"),
    ]
    return in_this_process(given)


def _manifest(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "out" / "manifest.json").read_text())
    return found


def _pushed(folder: Path) -> object:
    record = _manifest(folder)["record"]
    assert isinstance(record, dict)
    return record["pushed"]


def test_a_bucket_gets_the_adapters_files_and_the_manifest(
    bucket: str, demo: DemoPaths, tmp_path: Path
) -> None:
    done = _train(tmp_path / "run", demo, "s3://adapters/bottles/may")
    assert done.exit_code == 0, done.output
    assert "uploaded: the adapter is at s3://adapters/bottles/may" in done.output
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    found = sorted(system.ls("adapters/bottles/may", detail=False))
    assert [path.rpartition("/")[2] for path in found] == NAMES
    for name in NAMES[1:]:
        local = (tmp_path / "run" / "out" / "adapter" / name).read_bytes()
        assert system.cat(f"adapters/bottles/may/{name}") == local
    manifest = _manifest(tmp_path / "run")
    assert (manifest["state"], _pushed(tmp_path / "run")) == ("Done", "s3://adapters/bottles/may")


def test_what_could_not_be_pushed_is_pushed_by_the_same_job_without_training(
    bucket: str, demo: DemoPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens
        patch.setenv("AWS_MAX_ATTEMPTS", "1")
        failed = _train(tmp_path / "run", demo, "s3://adapters/late")
    assert failed.exit_code == 1
    assert "the adapter is trained and saved in the output folder, but could not be uploaded" in (
        failed.output
    )
    manifest = _manifest(tmp_path / "run")
    assert (manifest["state"], _pushed(tmp_path / "run")) == ("Done", "")
    assert manifest["artifacts"]
    again = _train(tmp_path / "run", demo, "s3://adapters/late")
    assert again.exit_code == 0, again.output
    assert "already done" in again.output
    assert "step=" not in again.output
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    assert len(system.ls("adapters/late")) == 3
    assert _pushed(tmp_path / "run") == "s3://adapters/late"
    third = _train(tmp_path / "run", demo, "s3://adapters/late")
    assert "nothing to do" in third.output


def test_a_bucket_that_does_not_exist_is_a_wrong_configuration(
    bucket: str, demo: DemoPaths, tmp_path: Path
) -> None:
    failed = _train(tmp_path / "run", demo, "s3://nowhere-at-all/x")
    assert failed.exit_code == 2, failed.output
    assert "the bucket does not exist" in failed.output
    assert _manifest(tmp_path / "run")["state"] == "Done"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine, which the run is sent to with a token."""
    served = Hub()
    monkeypatch.setenv("HF_ENDPOINT", served.address)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    yield served
    served.shutdown()


def test_the_hub_gets_one_commit_in_a_private_repository(
    demo: DemoPaths, tmp_path: Path, hub: Hub
) -> None:
    done = _train(tmp_path / "run", demo, "hf://studio/bottles")
    assert done.exit_code == 0, done.output
    assert sorted(hub.committed) == NAMES
    assert hub.created.get("private") is True or hub.created.get("visibility") == "private"
    local = tmp_path / "run" / "out" / "adapter" / NAMES[1]
    assert hub.committed[NAMES[1]] == local.read_bytes()
    assert sum(path.endswith("/commit/main") for path in hub.requests) == 1


def test_a_hub_that_refuses_names_the_token(demo: DemoPaths, tmp_path: Path, hub: Hub) -> None:
    hub.refuse = True
    failed = _train(tmp_path / "run", demo, "hf://studio/bottles")
    assert failed.exit_code == 2, failed.output
    assert "set HF_TOKEN to a token with write access" in failed.output
    assert _manifest(tmp_path / "run")["state"] == "Done"
