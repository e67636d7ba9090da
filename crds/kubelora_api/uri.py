"""Places: where models, data and output live, as URIs.

The same few schemes everywhere keep one job file valid on a cluster and on a laptop. This module
only takes URIs apart; opening them is the trainer's duty, mounting claims the operator's.
"""

import re
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["hf", "pvc", "s3", "file"]

CLUSTER_SCHEMES: tuple[Scheme, ...] = ("hf", "pvc", "s3")
_REPOSITORY = r"hf://[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*"
_REVISION = r"(@[A-Za-z0-9._/-]+)?"
REPOSITORY = "a whole repository"
"""Where a path below the repository has no meaning: a push."""
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

    root: the repository, claim or bucket; empty for a local path. path: below it, or the local one.
    """

    scheme: Scheme
    root: str
    path: str
    revision: str | None = None

    @property
    def name(self) -> str:
        """As a URI: what messages call it."""
        if self.scheme == "file":
            return self.path
        below = f"/{self.path}" if self.path else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.scheme}://{self.root}{below}{revision}"


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
        whole, _, revision = rest.partition("@")
        organisation, name, *below = whole.split("/")
        return Place("hf", f"{organisation}/{name}", "/".join(below), revision or None)
    root, _, path = rest.partition("/")
    return Place("pvc" if scheme == "pvc" else "s3", root, path.rstrip("/"))
