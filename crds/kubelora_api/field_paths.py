"""The paths of a job's fields, as ``--set`` and ``kubectl explain`` write them.

A path that does not exist is answered with the one that was meant: the group may be missing
(``training.steps``), or a name on the way may be misspelt (``spec.trainin.steps``).
"""

import re
from collections.abc import Iterator

from pydantic import BaseModel

from kubelora_api.job import LoraTrainingJob
from kubelora_api.suggestions import nearest, suggestion


def model_below(annotation: object) -> type[BaseModel] | None:
    """The group of fields that a field holds, alone or in a list; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if found := model_below(argument):
            return found
    return None


def field_names(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """A group's fields as documents name them, each with the group below it."""
    return {f.alias or n: model_below(f.annotation) for n, f in model.model_fields.items()}


def field_paths(model: type[BaseModel] = LoraTrainingJob, above: str = "") -> Iterator[str]:
    """Every field's path from the document's root, without list indices."""
    for name, below in field_names(model).items():
        yield above + name
        if below is not None:
            yield from field_paths(below, f"{above}{name}.")


def wrong_path(path: str) -> str | None:
    """What is wrong with a field's path and what was meant; None for a field that there is.

    path: from the root, list items as ``[0]``. What lies below a map (patterns, labels) and in
    metadata, whose fields are Kubernetes' own, is not judged.
    """
    model: type[BaseModel] | None = LoraTrainingJob
    bare = re.sub(r"\[\d+\]", "", path)
    done = ""
    for part in bare.split("."):
        if model is None or done == "metadata.":
            return None
        known = field_names(model)
        if part not in known:
            return f"{done + part} is no field{_meant(bare) or suggestion(part, known)}"
        model, done = known[part], f"{done}{part}."
    return None


def _meant(path: str) -> str:
    """The paths that end in the one given, the group left out, or the one most like it."""
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


def unknown_in(model: type[BaseModel], name: str) -> str:
    """What was meant by a field that the group ``model`` has not: a name, or another place."""
    known = field_names(model)
    elsewhere = [one for one in field_paths() if one.endswith(f".{name}")]
    if nearest(name, known) is None and elsewhere:
        return f"; it belongs at {' or '.join(repr(one) for one in elsewhere[:3])}"
    return suggestion(name, known)
