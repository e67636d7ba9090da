"""Tensors on disk under keys that cover all they depend on; an entry is complete or absent.

Runs on several machines may share a store. Files are written under temporary names and renamed. A
digest in front covers key and content, so that a torn, damaged or misplaced file counts as missing.
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
"""Length of the SHA-256 before each file's content."""


def key_of(kind: str, parts: Mapping[str, object]) -> str:
    """Hash ``parts`` (anything JSON can represent) to the key of what is computed from them."""
    text = json.dumps({"kind": kind, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class TensorStore:
    """A directory of small groups of tensors.

    warn: called once if the disk refuses a write; nothing more is written from then on. A read-only
    directory is only read.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._warn = warn
        self._numbers = count()
        self.writable = os.access(folder, os.W_OK | os.X_OK)

    def get(self, key: str) -> dict[str, torch.Tensor] | None:
        """Return what was stored under ``key``, on the CPU; None if it is missing or damaged."""
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
        """Store ``tensors``; a failed write is reported as a warning and not raised."""
        if not self.writable:
            return
        payload = save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})
        path = self._path(key)
        # Unique over the machines, processes and threads that share the store.
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
                f"the cache {self.folder} can't be written: {error.strerror}; free some space or "
                "set dataset.cache to another place. Existing entries are used, the rest is "
                "computed each time it is needed"
            )

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.tensors"


def _digest(key: str, payload: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(payload)
    return digest.digest()


def module_digest(module: nn.Module) -> str:
    """Hash the bits of all weights and buffers, with names, types and shapes (SHA-256)."""

    def one(entry: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = entry
        plain = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    entries = sorted(module.state_dict().items())
    # hashlib releases the GIL, so threads hash several gigabytes of weights in parallel.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return hashlib.sha256(b"".join(pool.map(one, entries))).hexdigest()
