"""URIs of models, data and output.

Using the same few schemes everywhere keeps one job file valid on a cluster and on a laptop. This
module only parses URIs; the trainer opens them, and the operator mounts the claims.
"""

import re
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["hf", "pvc", "s3", "file"]

CLUSTER_SCHEMES: tuple[Scheme, ...] = ("hf", "pvc", "s3")
_REPOSITORY = r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
_REVISION = r"(@[A-Za-z0-9._/-]+)?"
REPOSITORY = "repository"
"""Key of the form without a path, for uploads to a repository."""
PATTERNS: dict[str, str] = {
    "hf": _REPOSITORY + r"(/[A-Za-z0-9_][A-Za-z0-9._=+-]*)*" + _REVISION,
    REPOSITORY: _REPOSITORY + _REVISION,
    "pvc": r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[A-Za-z0-9._=@+-]+)*/?",
    "s3": r"s3://[a-z0-9][a-z0-9.-]+[a-z0-9](/[^\s]*)?",
}
FORMS: dict[str, str] = {
    "hf": "hf://org/repo[/path][@revision]",
    REPOSITORY: "hf://org/repo[@branch]",
    "pvc": "pvc://claim/path",
    "s3": "s3://bucket/prefix",
}


@dataclass(frozen=True)
class Place:
    """A parsed URI.

    root: The repository, claim or bucket; empty for a local path.
    path: The path below the root, or the local path.
    """

    scheme: Scheme
    root: str
    path: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """The URI, as used in messages."""
        if self.scheme == "file":
            return self.path
        below = f"/{self.path}" if self.path else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.scheme}://{self.root}{below}{revision}"


def pattern_of(schemes: tuple[str, ...]) -> str:
    """Return an anchored regular expression (RE2 and Python) for URIs of ``schemes``."""
    return "^(" + "|".join(PATTERNS[s] for s in schemes) + ")$"


def forms_of(schemes: tuple[str, ...]) -> str:
    """Return ``a, b or c``: the supported forms, for a message."""
    forms = [FORMS[s] for s in schemes]
    return forms[0] if len(forms) == 1 else ", ".join(forms[:-1]) + " or " + forms[-1]


def is_local(uri: str) -> bool:
    """Return whether ``uri`` is a local path: ``file://…`` or without a scheme."""
    return uri.startswith("file://") or (bool(uri) and "://" not in uri)


def has_parent_step(uri: str) -> bool:
    """Return whether ``uri`` contains a ``..``, which could leave its root."""
    return ".." in uri.split("://", 1)[-1].split("/")


def parse_place(uri: str) -> Place:
    """Parse a URI.

    Raises ValueError, with a sentence, if it has no supported form.
    """
    if is_local(uri):
        return Place("file", "", uri.removeprefix("file://"))
    scheme, _, rest = uri.partition("://")
    if scheme not in PATTERNS or not re.fullmatch(PATTERNS[scheme], uri):
        raise ValueError(f"{uri!r} is not a supported URI: use {forms_of(CLUSTER_SCHEMES)}")
    if scheme == "hf":
        whole, _, revision = rest.partition("@")
        organisation, name, *below = whole.split("/")
        return Place("hf", f"{organisation}/{name}", "/".join(below), revision or None)
    root, _, path = rest.partition("/")
    return Place("pvc" if scheme == "pvc" else "s3", root, path.rstrip("/"))
