"""Opens places: a URI of the job file becomes a folder of this machine.

What the operator mounts in a pod, ``--mount`` stands in for on a laptop; the job file is the same.
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
    """The existing folder or file that ``uri`` names, downloaded where it is remote.

    mounts: folder of each claim given by ``--mount claim=DIR``; wins over ``claims``.
    content: what is expected there; of a model or vae only the needed files are fetched.
    variant: infix of the weight files to fetch, such as fp16.
    claims: where a pod's claims are mounted.
    cache: where buckets are downloaded to; None takes the user's cache directory.
    Raises StorageError when it can't be had.
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
    """The path on this machine, there or not, of a claim's or a local URI; None for remote ones.

    Raises StorageError for a claim that is not here.
    """
    place = _parse(uri)
    if place.scheme == "pvc":
        return _in_claim(place, uri, mounts, claims)
    return expand_home(place.path) if place.scheme == "file" else None


def resolve_output(
    uri: str, mounts: Mapping[str, Path], *, claims: Path = Path(names.CLAIMS_DIRECTORY)
) -> Path:
    """The folder for output, made where it was missing, and writable.

    Raises StorageError when it is not a claim or a local path, or can't be written.
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
    """The folder of a cache, made where it was missing; one that can only be read is of use too.

    Raises StorageError when it is not a claim or a local path, or can't be made.
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
            f"{uri} can't take {what}: {folder} can't be made ({error.strerror})."
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
            f"The claim {place.root} of {uri} is not here: {root}, {given}, is no folder. On this "
            f"machine, say what stands in for it: --mount {place.root}=DIR."
        )
    folder = root / place.path
    if ".." in Path(place.path).parts:
        raise StorageError(f"{uri} leaves its claim: remove '..'.")
    return folder


def _existing(uri: str, path: Path) -> Path:
    if not path.exists():
        where = "" if uri == str(path) else f" (looked at {path})"
        meant = did_you_mean_path(path) or ": correct the path in the job file."
        raise StorageError(f"{uri} does not exist{where}{meant}")
    return path
