"""The paths of a job's fields, as used by ``--set`` and ``kubectl explain``.

For a path that does not exist the intended one is suggested: the group may be missing
(``training.steps``), or a part may be misspelled (``spec.trainin.steps``).
"""

import re
from collections.abc import Iterable, Iterator

from pydantic import BaseModel

from kubelora_api.job import LoraTrainingJob
from kubelora_api.peer_names import peer_answer
from kubelora_api.schema import model_below
from kubelora_api.suggestions import nearest, suggestion


def field_names(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """Return a model's fields by their names in documents, each with the model below it."""
    return {f.alias or n: model_below(f.annotation) for n, f in model.model_fields.items()}


def field_paths(model: type[BaseModel] = LoraTrainingJob, above: str = "") -> Iterator[str]:
    """Yield every field's path from the document's root, without list indices."""
    for name, below in field_names(model).items():
        yield above + name
        if below is not None:
            yield from field_paths(below, f"{above}{name}.")


def wrong_path(path: str) -> str | None:
    """Describe what is wrong with a field's path and suggest the right one; None if it exists.

    ``path`` starts at the root, with list items as ``[0]``. Keys of maps (patterns, labels) and
    the fields of metadata, which Kubernetes defines, are not checked.
    """
    model: type[BaseModel] | None = LoraTrainingJob
    bare = re.sub(r"\[\d+\]", "", path)
    done = ""
    for part in bare.split("."):
        if model is None or done == "metadata.":
            return None
        known = field_names(model)
        if part not in known:
            meant = _own_spelling(part, known) or peer_answer(part) or _meant(bare)
            return f"{done + part} is not a field{meant or suggestion(part, known)}"
        model, done = known[part], f"{done}{part}."
    return None


def _meant(path: str) -> str:
    """Suggest paths that end in the given one, or else the most similar path."""
    short = {
        one.removeprefix("spec."): one
        for one in field_paths()
        if not one.startswith(("status", "metadata"))
    }
    bare = path.removeprefix("spec.")
    meant = [short[bare]] if bare in short else []
    meant = meant or [whole for one, whole in short.items() if one.endswith(f".{bare}")]
    close = nearest(bare, short)
    if not meant and close:
        meant = [short[close]]
    return f"; did you mean {' or '.join(repr(one) for one in meant[:3])}?" if meant else ""


def _own_spelling(name: str, known: Iterable[str]) -> str | None:
    """Suggest the field of the group that differs from ``name`` in its case or ``_`` alone."""
    letters = name.replace("_", "").replace("-", "").casefold()
    same = next((one for one in known if one.casefold() == letters), None)
    return f"; did you mean {same!r}?" if same else None


def unknown_in(model: type[BaseModel], name: str) -> str:
    """Suggest what was meant by a field that ``model`` does not have."""
    known = field_names(model)
    if answer := _own_spelling(name, known) or peer_answer(name):
        return answer
    elsewhere = [one for one in field_paths() if one.endswith(f".{name}")]
    if nearest(name, known) is None and elsewhere:
        return f"; it belongs at {' or '.join(repr(one) for one in elsewhere[:3])}"
    return suggestion(name, known)
