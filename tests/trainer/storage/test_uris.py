"""A place becomes a folder, or a sentence that says how to get one."""

from pathlib import Path

import fsspec
import pytest

from kubelora_api.uri import parse_place
from kubelora_trainer.storage.downloads import (
    download_bucket,
    download_hub,
    download_tree,
    wanted_files,
)
from kubelora_trainer.storage.uris import resolve_input, resolve_output
from kubelora_trainer.utils.errors import StorageError


def test_plain_and_file_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    assert resolve_input(str(tmp_path), {}) == tmp_path
    assert resolve_input(f"file://{tmp_path}", {}) == tmp_path
    with pytest.raises(StorageError, match=rf"{tmp_path}/none does not exist"):
        resolve_input(f"{tmp_path}/none", {})


def test_a_claim_is_what_mount_names_or_where_a_pod_mounts_it(tmp_path: Path) -> None:
    (tmp_path / "mine/bottles").mkdir(parents=True)
    (tmp_path / "claims/photos/bottles").mkdir(parents=True)
    claims, uri = tmp_path / "claims", "pvc://photos/bottles"
    assert resolve_input(uri, {}, claims=claims) == claims / "photos/bottles"
    mounts = {"photos": tmp_path / "mine"}
    assert resolve_input(uri, mounts, claims=claims) == tmp_path / "mine/bottles"
    assert resolve_input("pvc://photos", mounts, claims=claims) == tmp_path / "mine"


def test_a_claim_that_is_not_here_says_how_to_stand_in_for_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"claim photos .*--mount photos=DIR"):
        resolve_input("pvc://photos/bottles", {}, claims=tmp_path)
    with pytest.raises(StorageError, match="what --mount names, is not a folder"):
        resolve_input("pvc://photos/x", {"photos": tmp_path / "none"}, claims=tmp_path)
    with pytest.raises(StorageError, match="--mount adapters=DIR"):
        resolve_output("pvc://adapters/x", {}, claims=tmp_path)


def test_a_folder_that_is_not_there_is_answered_with_the_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "bottles" / "may").mkdir(parents=True)
    with pytest.raises(StorageError, match=rf"mean '{tmp_path}/bottles'\?$"):
        resolve_input("pvc://photos/botles/may", {"photos": tmp_path})
    with pytest.raises(StorageError, match=r"correct the path in the job file\.$"):
        resolve_input("pvc://photos/zebra", {"photos": tmp_path})


def test_a_place_never_leaves_its_claim(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"remove '\.\.'"):
        resolve_input("pvc://photos/../secrets", {"photos": tmp_path})


def test_output_folders_are_made_and_files_in_the_way_are_told(tmp_path: Path) -> None:
    mounts = {"adapters": tmp_path}
    assert resolve_output("pvc://adapters/a/b", mounts) == tmp_path / "a/b"
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").write_text("x")
    for uri in ("pvc://adapters/file", "pvc://adapters/file/below"):
        with pytest.raises(StorageError, match="is a file"):
            resolve_output(uri, mounts)
    with pytest.raises(StorageError, match="can't take output: use pvc"):
        resolve_output("hf://org/repo", mounts)


def test_an_unknown_scheme_names_the_known_ones() -> None:
    with pytest.raises(StorageError, match=r"use hf://.*pvc://.*s3://"):
        resolve_input("ftp://host/x", {})


def test_a_snapshot_in_the_hubs_cache_is_used_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache's layout on disk, as huggingface_hub lays it out."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--sdxl"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    (snapshot / "model_index.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_input("hf://org/sdxl", {}, content="model") == snapshot
    assert resolve_input(f"hf://org/sdxl@{commit}", {}, content="model") == snapshot


def test_a_repository_out_of_reach_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match=r"hf://org/none@v1 is not in the local cache"):
        download_hub(parse_place("hf://org/none@v1"), "model", None)


def _fetched(files: list[str], variant: str | None, content: str = "model") -> set[str]:
    from huggingface_hub.utils._paths import filter_repo_objects

    patterns = wanted_files("vae" if content == "vae" else "model", variant)
    return set(filter_repo_objects(files, allow_patterns=patterns))


def test_of_a_model_only_the_variants_safetensors_are_fetched() -> None:
    base = "diffusion_pytorch_model"
    plain = {f"unet/{base}.safetensors", "text_encoder/model.safetensors"}
    sharded = {
        f"unet/{base}-00001-of-00002.safetensors",
        f"unet/{base}.safetensors.index.json",
    }
    half = {
        f"unet/{base}.fp16.safetensors",
        f"unet/{base}.fp16-00001-of-00002.safetensors",
        f"unet/{base}-00001-of-00002.fp16.safetensors",
        "unet/diffusion_pytorch_model.safetensors.index.fp16.json",
        "text_encoder/model.fp16.safetensors",
    }
    always = {"model_index.json", "unet/config.json", "tokenizer/merges.txt"}
    never = {
        "sd_xl_base_1.0.safetensors",
        "unet/model.onnx",
        f"unet/{base}.bin",
        "vae_1_0/config.json",
        "text_encoder/flax_model.msgpack",
        "text_encoder/openvino_model.bin",
    }
    files = sorted(plain | sharded | half | always | never)
    assert _fetched(files, None) == plain | sharded | always
    assert _fetched(files, "fp16") == half | always


def test_of_a_vae_the_plain_file_is_fetched() -> None:
    files = ["config.json", "diffusion_pytorch_model.safetensors", "sdxl_vae.safetensors", "x.bin"]
    assert _fetched(files, None, "vae") == set(files[:2])


def test_a_bucket_is_copied_once_and_again_when_it_changes(tmp_path: Path) -> None:
    """fsspec's own in-memory file system stands in for the bucket."""
    system = fsspec.filesystem("memory")
    for name, text in (("a.txt", "1"), ("sub/b.txt", "2"), ("evil.bin", "3")):
        system.pipe(f"/bottles/set/{name}", text.encode())
    first = download_tree(system, "memory://bottles/set", tmp_path)
    names = {str(f.relative_to(first)) for f in first.rglob("*") if f.is_file()}
    assert names == {"a.txt", "sub/b.txt"}
    assert (first / "sub/b.txt").read_text() == "2"
    (first / "a.txt").write_text("kept")
    assert download_tree(system, "memory://bottles/set", tmp_path) == first
    assert (first / "a.txt").read_text() == "kept"
    system.pipe("/bottles/set/c.txt", b"4")
    second = download_tree(system, "memory://bottles/set", tmp_path)
    assert second != first
    assert (second / "c.txt").read_text() == "4"
    assert not list((tmp_path / "buckets").glob(".partial-*"))
    with pytest.raises(StorageError, match=r"can't be downloaded|holds no files"):
        download_tree(system, "memory://bottles/none", tmp_path)


def test_a_file_of_a_bucket_is_copied_by_its_name(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for name in ("sdxl.safetensors", "other.safetensors", "old.ckpt"):
        system.pipe(f"/checkpoints/{name}", name.encode())
    file = download_tree(system, "memory://checkpoints/sdxl.safetensors", tmp_path)
    assert (file.name, file.read_text()) == ("sdxl.safetensors", "sdxl.safetensors")
    assert [found.name for found in file.parent.iterdir()] == ["sdxl.safetensors"]
    with pytest.raises(StorageError, match="pickles are never read"):
        download_tree(system, "memory://checkpoints/old.ckpt", tmp_path)


def test_of_an_earlier_run_in_a_bucket_only_manifest_and_log_are_copied(tmp_path: Path) -> None:
    system = fsspec.filesystem("memory")
    for name in ("manifest.json", "groups.parquet", "checkpoints/step-000500/adapter.safetensors"):
        system.pipe(f"/runs/may/{name}", b"x")
    folder = download_tree(system, "memory://runs/may", tmp_path, wanted_files("run", None))
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert names == {"manifest.json", "groups.parquet"}


def test_a_bucket_without_credentials_is_told_in_a_sentence(tmp_path: Path) -> None:
    from botocore.exceptions import NoCredentialsError

    class Locked:
        def find(self, path: str, *, detail: bool) -> dict[str, dict[str, object]]:
            raise NoCredentialsError

        def get_file(self, rpath: str, lpath: str) -> None:
            raise AssertionError

    with pytest.raises(StorageError, match=r"Unable to locate credentials.*check the name"):
        download_tree(Locked(), "s3://bottles/set", tmp_path)


def test_a_bucket_needs_s3fs_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    known = sys.modules["fsspec.registry"]._registry  # the module's name is taken by a mapping
    monkeypatch.delitem(known, "s3", raising=False)
    with pytest.raises(StorageError, match="pip install s3fs"):
        download_bucket("s3://bucket/prefix", tmp_path)
