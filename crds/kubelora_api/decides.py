"""What each field of a spec decides, declared at the field itself.

Keys of caches, what a run may resume with, what may change under a started job and what a baseline
is compared in all come from these declarations; no list of fields is kept anywhere else. A field
without one fails a test.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from kubelora_api.schema import JsonObject, metadata_of, model_below

Effect = Literal["pixels", "text", "order", "weights", "norms", "samples", "nothing"]
KeyPart = Literal["file", "view", "caption", "model"]
Resume = Literal["yes", "no", "length"]


@dataclass(frozen=True, init=False)
class Decides:
    """The declaration of a field, or of a group of fields that are all alike.

    effects: ``pixels``: what the VAE makes of an image, or its mask. ``text``: what the text
    encoders make of a caption. ``order``: which samples a step has, and where. ``weights``: the
    adapter in any other way. ``norms``: gradient norms are not comparable between runs that
    differ in it. Not every setting that scales them is declared so: runs that differ in alpha, say,
    are compared on purpose, with the difference in the log. ``samples``: the sample images.
    ``nothing``: none of these in a healthy run; health.policy, say, acts only on a finding.
    held_as: parts of a cache's key that hold all of the field's effect: the image file's bytes, the
    view of it, the caption as it is encoded, the model's weights and configuration. Without one the
    field's value is part of the key.
    resume: whether a run may resume after a change; ``length`` where the schedule allows it.
    live: whether the field may change in a job that has started.
    at_once: whether the operator acts on such a change while an attempt runs; else the next attempt
    does.
    """

    effects: frozenset[Effect]
    held_as: frozenset[KeyPart]
    resume: Resume
    live: bool
    at_once: bool

    def __init__(
        self,
        *effects: Effect,
        held_as: tuple[KeyPart, ...] = (),
        resume: Resume | None = None,
        live: bool = False,
        at_once: bool = False,
    ) -> None:
        """Declare ``effects``; without ``resume`` only a field that decides nothing may change.

        Args:
            *effects: At least one; ``nothing`` only alone.
            held_as: See the class.
            resume: See the class.
            live: See the class.
            at_once: See the class.

        Raises:
            ValueError: Where the declaration contradicts itself.
        """
        if not effects or ("nothing" in effects and len(effects) > 1):
            raise ValueError(f"declare what the field decides, or nothing alone, not {effects}")
        resume = resume or ("yes" if effects == ("nothing",) else "no")
        if live and resume == "no":
            raise ValueError("a field that no run can resume with can't change in a started job")
        object.__setattr__(self, "effects", frozenset(effects))
        object.__setattr__(self, "held_as", frozenset(held_as))
        object.__setattr__(self, "resume", resume)
        if at_once and not live:
            raise ValueError("a field that can't change in a started job has no change to act on")
        object.__setattr__(self, "live", live)
        object.__setattr__(self, "at_once", at_once)


Keep = Callable[[Decides], bool]


def declared(info: FieldInfo) -> Decides | None:
    """Return the declaration at a field, if it has one."""
    return next((item for item in metadata_of(info) if isinstance(item, Decides)), None)


def declarations(
    model: type[BaseModel], above: str = "", inherited: Decides | None = None
) -> Iterator[tuple[str, Decides | None]]:
    """Yield every field below ``model`` with what it, or else a group above it, declares.

    Args:
        model: The group to walk; a group's own fields take its place.
        above: Prefix of the paths.
        inherited: What a group above declares.

    Yields:
        The field's path as documents write it, without list indices, and its declaration; None
        where there is none.
    """
    for name, info in model.model_fields.items():
        path, decides = above + (info.alias or name), declared(info) or inherited
        below = model_below(info.annotation)
        if below is None:
            yield path, decides
        else:
            yield from declarations(below, f"{path}.", decides)


def select(document: Mapping[str, Any], model: type[BaseModel], keep: Keep) -> JsonObject:
    """Return what of a group's ``document`` is declared so that ``keep`` accepts it.

    Args:
        document: The group as a JSON object.
        model: The group's model. A field it does not have (another version's) is kept where the
            group keeps any field of its own: what is not known may decide the same.
        keep: Judges a declaration.

    Returns:
        A document of the same shape; groups of which nothing can be kept are left out.
    """
    return _select(document, model, keep, None)


def _select(
    document: Mapping[str, Any], model: type[BaseModel], keep: Keep, inherited: Decides | None
) -> JsonObject:
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    own = [i for i in fields.values() if model_below(i.annotation) is None]
    keeps_unknown = any(_kept(declared(info) or inherited, keep) for info in own)
    selected: JsonObject = {}
    for name, value in document.items():
        info = fields.get(name)
        if info is None:
            if keeps_unknown:
                selected[name] = value
            continue
        decides, below = declared(info) or inherited, model_below(info.annotation)
        if below is None:
            if _kept(decides, keep):
                selected[name] = value
        elif any(_kept(found, keep) for _, found in declarations(below, inherited=decides)):
            if isinstance(value, Mapping):
                selected[name] = _select(value, below, keep, decides)
            else:
                selected[name] = [_select(item, below, keep, decides) for item in value]
    return selected


def _kept(decides: Decides | None, keep: Keep) -> bool:
    """Judge a declaration; a field without one counts as deciding everything."""
    return decides is None or keep(decides)


def in_key(effect: Effect, parts: Collection[KeyPart]) -> Keep:
    """Return the test for fields whose value belongs in the key of what ``effect`` decides.

    parts: what else the key holds.
    """
    return lambda decides: effect in decides.effects and not decides.held_as & set(parts)


def where_all(model: type[BaseModel], keep: Keep) -> list[str]:
    """Return paths, groups first, below which every field is declared as ``keep`` accepts it."""
    groups, fields = list[str](), list[str]()
    _where_all(model, keep, "", None, groups, fields)
    return groups + fields


def _where_all(
    model: type[BaseModel],
    keep: Keep,
    above: str,
    inherited: Decides | None,
    groups: list[str],
    fields: list[str],
) -> None:
    for name, info in model.model_fields.items():
        path, below = above + (info.alias or name), model_below(info.annotation)
        decides = declared(info) or inherited
        found = [decides] if below is None else [d for _, d in declarations(below, "", decides)]
        if all(d is not None and keep(d) for d in found):
            (fields if above else groups).append(path)
        elif below is not None:
            _where_all(below, keep, f"{path}.", decides, groups, fields)
