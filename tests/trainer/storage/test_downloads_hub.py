"""A file or a folder inside a Hub repository, by name and revision, fetched from a Hub's API."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kubelora_api.uri import parse_place
from kubelora_trainer.storage.uris import resolve_input
from kubelora_trainer.utils.errors import StorageError
from tests.trainer.fixtures.hub_server import Hub, download_from

MAIN = {
    "README.md": b"read me",
    "fine.safetensors": b"of main",
    "other.safetensors": b"large, and not asked for",
    "old.ckpt": b"pickled",
    "photos/a.jpg": b"a",
    "photos/a.txt": b"caption",
    "photos/evil.pkl": b"pickled",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    served = Hub()
    served.files = {
        ("org/models", "main"): MAIN,
        ("org/models", "v1"): {"fine.safetensors": b"of v1"},
    }
    download_from(served, tmp_path / "hub", monkeypatch)
    yield served
    served.shutdown()
    served.server_close()


def bodies(hub: Hub) -> list[str]:
    """Names of the files whose content was asked for."""
    return [r.rpartition("/")[2] for r in hub.requests if r.startswith("GET") and "/resolve/" in r]


def test_one_file_is_fetched_and_nothing_beside_it(hub: Hub) -> None:
    file = resolve_input("hf://org/models/fine.safetensors", {}, content="model")
    assert (file.name, file.read_bytes()) == ("fine.safetensors", b"of main")
    assert bodies(hub) == ["fine.safetensors"]


def test_the_revision_stands_behind_the_file(hub: Hub) -> None:
    file = resolve_input("hf://org/models/fine.safetensors@v1", {}, content="model")
    assert file.read_bytes() == b"of v1"
    with pytest.raises(StorageError, match=r"a file goes before the revision: hf://org/repo/file@"):
        resolve_input("hf://org/models@v1/fine.safetensors", {}, content="model")


def test_a_folder_of_a_dataset_is_fetched_without_its_pickles(hub: Hub) -> None:
    folder = resolve_input("hf://org/models/photos", {})
    assert sorted(file.name for file in folder.iterdir()) == ["a.jpg", "a.txt"]
    assert sorted(bodies(hub)) == ["a.jpg", "a.txt"]


def test_a_file_that_is_not_there_is_answered_with_the_one_that_is(hub: Hub) -> None:
    with pytest.raises(StorageError, match=r"holds no fin.safetensors; did you mean 'fine\."):
        resolve_input("hf://org/models/fin.safetensors", {}, content="model")
    with pytest.raises(StorageError, match=r"has no revision v2; known here: main, v1"):
        resolve_input("hf://org/models/fine.safetensors@v2", {}, content="model")
    with pytest.raises(StorageError, match=r"has no revision mian; did you mean 'main'\?"):
        resolve_input("hf://org/models@mian", {}, content="model")
    assert bodies(hub) == []


def test_a_pickle_is_refused_before_anything_is_asked(hub: Hub) -> None:
    with pytest.raises(StorageError, match=r"old.ckpt is a pickle"):
        resolve_input("hf://org/models/old.ckpt", {}, content="model")
    assert hub.requests == []


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("hf://org/repo", ("org/repo", "", None)),
        ("hf://org/repo@refs/pr/3", ("org/repo", "", "refs/pr/3")),
        ("hf://org/repo/a/b.safetensors", ("org/repo", "a/b.safetensors", None)),
        ("hf://org/repo/b.safetensors@v1", ("org/repo", "b.safetensors", "v1")),
    ],
)
def test_a_place_on_the_hub_has_repository_path_and_revision(
    uri: str, parts: tuple[str, str, str | None]
) -> None:
    place = parse_place(uri)
    assert (place.root, place.path, place.revision) == parts
    assert place.name == uri


def test_no_path_leaves_its_repository() -> None:
    for uri in ("hf://org/repo/../other", "hf://org/repo/./x", "hf://org/repo//x", "hf://org"):
        with pytest.raises(ValueError, match="is not a supported URI"):
            parse_place(uri)
