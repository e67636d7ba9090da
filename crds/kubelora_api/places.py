"""Places: where models, data and output live, as URIs.

The same few schemes everywhere keep one job file valid on a cluster and on a laptop. This module
only takes URIs apart; opening them is the trainer's duty, mounting claims the operator's.
"""

import re
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["hf", "pvc", "s3", "file"]

CLUSTER_SCHEMES: tuple[Scheme, ...] = ("hf", "pvc", "s3")
PATTERNS: dict[str, str] = {
    "hf": r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*(@[A-Za-z0-9._/-]+)?",
    "pvc": r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9._=@+-]+)*/?",
    "s3": r"s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/[^\s]*)?",
}
FORMS: dict[str, str] = {
    "hf": "hf://org/repo[@revision]",
    "pvc": "pvc://claim/path",
    "s3": "s3://bucket/prefix",
}


@dataclass(frozen=True)
class Place:
    """A parsed URI. ``root`` is the repository, claim or bucket; empty for a local path."""

    scheme: Scheme
    root: str
    path: str
    revision: str | None = None


def pattern_of(schemes: tuple[str, ...]) -> str:
    """Anchored regular expression (RE2 and Python) that takes a URI of one of ``schemes``."""
    return "^(" + "|".join(PATTERNS[s] for s in schemes) + ")$"


def forms_of(schemes: tuple[str, ...]) -> str:
    """``a, b or c``: how a message names the schemes that are taken."""
    forms = [FORMS[s] for s in schemes]
    return forms[0] if len(forms) == 1 else ", ".join(forms[:-1]) + " or " + forms[-1]


def is_local(uri: str) -> bool:
    """Whether ``uri`` is a path of this machine: ``file://…`` or no scheme at all."""
    return uri.startswith("file://") or (bool(uri) and "://" not in uri)


def has_parent_step(uri: str) -> bool:
    """Whether a ``..`` in ``uri`` could leave the place that it names."""
    return ".." in uri.split("://", 1)[-1].split("/")


def parse_place(uri: str) -> Place:
    """Take ``uri`` apart.

    Raises ValueError, with a sentence, when it has no known form.
    """
    if is_local(uri):
        return Place("file", "", uri.removeprefix("file://"))
    scheme, _, rest = uri.partition("://")
    if scheme not in PATTERNS or not re.fullmatch(PATTERNS[scheme], uri):
        raise ValueError(f"{uri!r} is not a place: use {forms_of(CLUSTER_SCHEMES)}")
    if scheme == "hf":
        repository, _, revision = rest.partition("@")
        return Place("hf", repository, "", revision or None)
    root, _, path = rest.partition("/")
    return Place("pvc" if scheme == "pvc" else "s3", root, path.rstrip("/"))
