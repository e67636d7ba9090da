"""Downloads from the Hugging Face Hub and from buckets: only the files needed, and no pickles."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from kubelora_api.names import OutputPath
from kubelora_api.suggestions import suggestion
from kubelora_api.uri import Place
from kubelora_trainer.utils.atomic_io import atomic_folder
from kubelora_trainer.utils.errors import StorageError
from kubelora_trainer.utils.paths import expand_home

Content = Literal["model", "configuration", "vae", "dataset", "adapter", "run"]
WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
MODEL_PARTS = ("unet", "vae", "text_encoder", "text_encoder_2")
PICKLES = ("*.bin", "*.ckpt", "*.pt", "*.pth", "*.pkl", "*.pickle")


def cache_directory() -> Path:
    """Return ``kubelora`` in the user's cache directory (XDG_CACHE_HOME)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expand_home(base) / "kubelora"


def wanted_files(content: Content, variant: str | None) -> list[str] | None:
    """List patterns of the files to download; None means everything except pickles."""
    if content == "dataset":
        return None
    if content == "adapter":
        return ["*.safetensors"]
    if content == "run":
        return [OutputPath.MANIFEST, OutputPath.GROUP_LOG]
    if content == "configuration":
        return ["model_index.json", "scheduler/*.json", "tokenizer/*", "tokenizer_2/*"] + [
            f"{part}/config.json" for part in MODEL_PARTS
        ]
    weights = [name for stem in WEIGHT_STEMS for name in _weight_names(stem, variant)]
    if content == "vae":
        plain = list(_weight_names("diffusion_pytorch_model", None))
        return ["config.json", *plain, "vae/config.json", *(f"vae/{name}" for name in plain)]
    parts = [f"{part}/{name}" for part in MODEL_PARTS for name in ("config.json", *weights)]
    return ["model_index.json", "scheduler/*.json", "tokenizer/*", "tokenizer_2/*", *parts]


def _weight_names(stem: str, variant: str | None) -> tuple[str, ...]:
    """List names of single and sharded files; with the variant before or after the number."""
    shard = "-?????-of-?????"
    if variant is None:
        return (
            f"{stem}.safetensors",
            f"{stem}{shard}.safetensors",
            f"{stem}.safetensors.index.json",
        )
    return (
        f"{stem}.{variant}.safetensors",
        f"{stem}{shard}.{variant}.safetensors",
        f"{stem}.{variant}{shard}.safetensors",
        f"{stem}.safetensors.index.{variant}.json",
    )


def download_hub(place: Place, content: Content, variant: str | None) -> Path:
    """Download a snapshot to the Hub's cache.

    Args:
        place: The parsed hf:// URI.
        content: What the repository holds, which determines the files.
        variant: Infix of the weight files.

    Returns:
        The snapshot's directory, or what ``place.path`` names in it.

    Raises:
        StorageError: The download failed.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise StorageError(
            "hf:// URIs need huggingface_hub: pip install 'kubelora[trainer]'."
        ) from None
    revision = place.revision
    if _is_pickle(place.path):
        problem = "is a pickle, which can run code when it is loaded: name a .safetensors file"
        raise StorageError(f"{place.name} {problem}.")
    try:
        snapshot = snapshot_download(
            place.root,
            repo_type=_kind(content),
            revision=revision,
            allow_patterns=_below(place.path, wanted_files(content, variant)),
            ignore_patterns=list(PICKLES),
        )
        return _found(Path(snapshot), place, content)
    except errors.GatedRepoError:
        problem = "requires its terms to be accepted: do so on its page and set HF_TOKEN"
    except errors.RevisionNotFoundError:
        problem = f"has no revision {revision}{_known_revisions(place, content)}"
        if PurePosixPath(revision or "").suffix:
            problem += " (a file goes before the revision: hf://org/repo/file@revision)"
    except errors.RepositoryNotFoundError:
        problem = "does not exist, or is private: correct the name or set HF_TOKEN"
    except errors.LocalEntryNotFoundError:
        problem = (
            "is not in the local cache and the Hub can't be reached: check the network (and "
            "HF_HUB_OFFLINE), or put the files in a folder or claim and use its URI"
        )
    except errors.HFValidationError as error:
        problem = f"is not a repository name ({error})"
    except (errors.HfHubHTTPError, OSError) as error:
        problem = f"can't be downloaded ({str(error).splitlines()[0]}): try again"
    raise StorageError(f"{place.name} {problem}.")


def _known_revisions(place: Place, content: Content) -> str:
    """Suggest the intended branch or tag, or list the existing ones."""
    from huggingface_hub import HfApi

    try:
        refs = HfApi().list_repo_refs(place.root, repo_type=_kind(content))
    except Exception:  # the suggestion is optional
        return ": correct what follows the @"
    return suggestion(place.revision or "", [ref.name for ref in (*refs.branches, *refs.tags)])


def _kind(content: Content) -> Literal["dataset", "model"]:
    return "dataset" if content == "dataset" else "model"


def _is_pickle(path: str) -> bool:
    return any(PurePosixPath(path).match(pattern) for pattern in PICKLES)


def _below(path: str, patterns: list[str] | None) -> list[str] | None:
    """List patterns to download of an entire repository, a directory in it, or one file."""
    if not path:
        return patterns
    if PurePosixPath(path).suffix in (".safetensors", ".parquet", ".arrow"):
        return [path]
    return [path, *(f"{path}/{pattern}" for pattern in patterns or ["*"])]


def _found(snapshot: Path, place: Place, content: Content) -> Path:
    """Return the file or directory that ``place`` names. Raises StorageError with a suggestion."""
    if (snapshot / place.path).exists():
        return snapshot / place.path
    from huggingface_hub import HfApi

    try:
        files = HfApi().list_repo_files(
            place.root, revision=place.revision, repo_type=_kind(content)
        )
    except Exception:  # the suggestion is optional, and the Hub may be unreachable by now
        files = []
    known = [file for file in files if not _is_pickle(file)]
    folders = {str(parent) for file in known for parent in PurePosixPath(file).parents}
    meant = suggestion(place.path, [*known, *sorted(folders - {"."})])
    raise StorageError(f"{place.name}: the repository holds no {place.path}{meant}")


class FileSystem(Protocol):
    """The part of fsspec's interface that a download needs."""

    def find(self, path: str, *, detail: Literal[True]) -> dict[str, dict[str, object]]:
        """List files below ``path`` with their size and etag."""

    def get_file(self, rpath: str, lpath: str) -> None:
        """Copy one remote file to a local path."""


def download_bucket(uri: str, cache: Path, wanted: Sequence[str] | None = None) -> Path:
    """Download everything below an s3:// prefix, or only the files ``wanted`` there.

    Args:
        uri: The s3:// URI.
        cache: Parent of the download.
        wanted: Names of the files to download; None means all except pickles.

    Raises:
        StorageError: The download failed.
    """
    import fsspec

    try:
        system = fsspec.filesystem(uri.partition("://")[0])
    except ImportError:
        raise StorageError(f"{uri} needs the package s3fs: pip install s3fs.") from None
    return download_tree(system, uri, cache, wanted)


def download_tree(
    system: FileSystem, uri: str, cache: Path, wanted: Sequence[str] | None = None
) -> Path:
    """Download the tree below ``uri``; an earlier copy is reused if names, sizes and etags match.

    Args:
        system: The remote file system.
        uri: Prefix, or a single file.
        cache: Parent of the download.
        wanted: Names of the files to download; None means all except pickles.

    Returns:
        The local directory, or the local file if ``uri`` names a single file.

    Raises:
        StorageError: The download failed.
    """
    prefix = uri.partition("://")[2].strip("/")
    try:
        listing = {
            _relative(name.strip("/"), prefix): (name, details)
            for name, details in system.find(prefix, detail=True).items()
            if not _is_pickle(name)
            and (wanted is None or name.strip("/").removeprefix(f"{prefix}/") in wanted)
        }
        if not listing:
            raise StorageError(
                f"{uri} holds no files (pickles are never read): correct the bucket or the prefix."
            )
        folder = cache / "buckets" / _listing_hash(uri, listing)
        if not folder.is_dir():
            _fill(system, listing, folder)
    except _bucket_errors() as error:
        raise StorageError(
            f"{uri} can't be downloaded ({error}): check the name, the credentials and free space."
        ) from error
    alone = [name for name, (remote, _) in listing.items() if remote.strip("/") == prefix]
    return folder / alone[0] if alone else folder


def _bucket_errors() -> tuple[type[Exception], ...]:
    """List the exceptions of a download; S3's client raises some that are not OSErrors."""
    try:
        from botocore.exceptions import BotoCoreError
    except ImportError:
        return (OSError, ValueError)
    return (OSError, ValueError, BotoCoreError)


def _relative(name: str, prefix: str) -> str:
    """Return the path below the prefix, or the file's own name if the prefix is the file."""
    path = PurePosixPath(name)
    return path.name if name == prefix else str(path.relative_to(prefix))


def _listing_hash(uri: str, listing: dict[str, tuple[str, dict[str, object]]]) -> str:
    digest = hashlib.sha256(uri.encode())
    for name, (_, details) in sorted(listing.items()):
        version = details.get("ETag") or details.get("LastModified") or details.get("created")
        digest.update(f"\n{name} {details.get('size')} {version}".encode())
    return digest.hexdigest()[:32]


def _fill(
    system: FileSystem, listing: dict[str, tuple[str, dict[str, object]]], folder: Path
) -> None:
    with atomic_folder(folder) as aside:
        for name, (remote, _) in listing.items():
            if ".." in PurePosixPath(name).parts:
                raise ValueError(f"a file is named {name}")
            target = aside / name
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(remote, str(target))
