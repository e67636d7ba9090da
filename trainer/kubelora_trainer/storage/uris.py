"""Resolution of the job's URIs to local paths.

In a pod the operator mounts claims; on a laptop ``--mount`` maps them to directories. The job file
is the same.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from kubelora_api import names
from kubelora_api.uri import Place, parse_place
from kubelora_trainer.storage.downloads import (
    Content,
    cache_directory,
    download_bucket,
    download_hub,
    wanted_files,
)
from kubelora_trainer.utils.errors import StorageError
from kubelora_trainer.utils.paths import did_you_mean_path, expand_home


def resolve_input(
    uri: str,
    mounts: Mapping[str, Path],
    *,
    content: Content = "dataset",
    variant: str | None = None,
    claims: Path = Path(names.CLAIMS_DIRECTORY),
    cache: Path | None = None,
) -> Path:
    """Resolve ``uri`` to an existing file or directory, after downloading it if it is remote.

    Args:
        uri: URI from the job file.
        mounts: Directory of each claim given by ``--mount claim=DIR``; overrides ``claims``.
        content: Kind of content; of a model or vae only the needed files are downloaded.
        variant: Infix of the weight files to download, such as fp16.
        claims: Directory where a pod's claims are mounted.
        cache: Directory for downloads from buckets; None is the user's cache directory.

    Raises:
        StorageError: It does not exist or cannot be downloaded.
    """
    place = _parse(uri)
    if place.scheme == "hf":
        return download_hub(place, content, variant)
    local = local_path(uri, mounts, claims=claims)
    if local is not None:
        return _existing(uri, local)
    wanted = wanted_files(content, None) if content == "run" else None
    return download_bucket(uri, cache or cache_directory(), wanted)


def local_path(
    uri: str, mounts: Mapping[str, Path], *, claims: Path = Path(names.CLAIMS_DIRECTORY)
) -> Path | None:
    """Return the local path, existing or not, of a claim's or local URI; None for a remote one.

    Args:
        uri: URI from the job file.
        mounts: Directory of each claim given by ``--mount``.
        claims: Directory where a pod's claims are mounted.

    Raises:
        StorageError: The claim is not available here.
    """
    place = _parse(uri)
    if place.scheme == "pvc":
        return _in_claim(place, uri, mounts, claims)
    return expand_home(place.path) if place.scheme == "file" else None


def resolve_output(
    uri: str, mounts: Mapping[str, Path], *, claims: Path = Path(names.CLAIMS_DIRECTORY)
) -> Path:
    """Resolve ``uri`` to a writable output directory, and create it if necessary.

    Args:
        uri: URI from the job file.
        mounts: Directory of each claim given by ``--mount``.
        claims: Directory where a pod's claims are mounted.

    Raises:
        StorageError: It is neither a claim nor a local path, or is not writable.
    """
    folder = _made(uri, "output", mounts, claims)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(
            f"{uri} can't take output: {folder} is not writable for user {os.getuid()}."
        )
    return folder


def resolve_cache(
    uri: str, mounts: Mapping[str, Path], *, claims: Path = Path(names.CLAIMS_DIRECTORY)
) -> Path:
    """Resolve ``uri`` to a cache directory, and create it if necessary; it may be read-only.

    Args:
        uri: URI from the job file.
        mounts: Directory of each claim given by ``--mount``.
        claims: Directory where a pod's claims are mounted.

    Raises:
        StorageError: It is neither a claim nor a local path, or cannot be created.
    """
    return _made(uri, "a cache", mounts, claims)


def _made(uri: str, what: str, mounts: Mapping[str, Path], claims: Path) -> Path:
    folder = local_path(uri, mounts, claims=claims)
    if folder is None:
        raise StorageError(f"{uri} can't take {what}: use pvc://claim/path or a local path.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StorageError(
            f"{uri} can't take {what}: {folder}, or a part of that path, is a file."
        ) from None
    except OSError as error:
        raise StorageError(
            f"{uri} can't take {what}: {folder} can't be created ({error.strerror})."
        ) from error
    return folder


def _parse(uri: str) -> Place:
    try:
        return parse_place(uri)
    except ValueError as error:
        raise StorageError(f"{error}.") from None


def _in_claim(place: Place, uri: str, mounts: Mapping[str, Path], claims: Path) -> Path:
    root = mounts.get(place.root) or claims / place.root
    if not root.is_dir():
        given = "what --mount names" if place.root in mounts else "where a pod mounts it"
        raise StorageError(
            f"The claim {place.root} of {uri} is not here: {root}, {given}, is not a folder. On "
            f"this machine, map it to a directory: --mount {place.root}=DIR."
        )
    folder = root / place.path
    if ".." in Path(place.path).parts:
        raise StorageError(f"{uri} points outside its claim: remove '..'.")
    return folder


def _existing(uri: str, path: Path) -> Path:
    if not path.exists():
        where = "" if uri == str(path) else f" (looked at {path})"
        meant = did_you_mean_path(path) or ": correct the path in the job file."
        raise StorageError(f"{uri} does not exist{where}{meant}")
    return path
