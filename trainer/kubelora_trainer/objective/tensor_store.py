"""Tensors on disk under a key that names all they depend on: there and whole, or not there.

Runs on several machines may share a store. Files are written aside and renamed; a digest in front
covers key and content, so that a torn, damaged or misplaced file counts as missing.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

_DIGEST_BYTES = 32


def key_of(kind: str, parts: Mapping[str, object]) -> str:
    """A name for what was made from ``parts`` (anything that JSON can write)."""
    text = json.dumps({"kind": kind, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class TensorStore:
    """A folder of small groups of tensors.

    warn: is told once when the disk refuses; from then on nothing more is written. A folder that
    can only be read is read.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._numbers = count()
        self.writable = os.access(folder, os.W_OK | os.X_OK)

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """What was put under ``key``, on the CPU; None when it is not there or not whole."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if digest != _digest(key, payload):
            return None
        try:
            return load(payload)
        except SafetensorError:
            return None

    def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep ``tensors``; a disk that refuses is told of, not raised."""
        if not self.writable:
            return
        payload = save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
        path = self._path(key)
        aside = path.with_name(
            f".{path.name}.{os.uname().nodename}.{os.getpid()}.{next(self._numbers)}"
        )
        try:
            path.parent.mkdir(exist_ok=True)
            aside.write_bytes(_digest(key, payload) + payload)
            aside.replace(path)
        except OSError as error:
            self.writable = False
            with suppress(OSError):
                aside.unlink()
            self._warn(
                f"the cache {self.folder} takes no more: {error.strerror}; free some space or set "
                "dataset.cache to another place. What is in it is used, the rest is computed each "
                "time it is needed"
            )

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.tensors"


def _digest(key: str, payload: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(payload)
    return digest.digest()


def module_digest(module: nn.Module) -> str:
    """SHA-256 over the bits of all weights and buffers, their names, types and shapes."""

    def one(entry: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = entry
        plain = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    entries = sorted(module.state_dict().items())
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return hashlib.sha256(b"".join(pool.map(one, entries))).hexdigest()
