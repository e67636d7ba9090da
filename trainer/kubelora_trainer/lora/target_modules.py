"""Selection of the layers to adapt: by family name, or by patterns over their names."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from torch import nn

from kubelora_api.suggestions import nearest
from kubelora_trainer.utils.errors import ConfigurationError

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_T = TypeVar("_T")
FEED_FORWARD = ("ff.net.0.proj", "ff.net.2")


def target_names(unet: nn.Module, targets: str, patterns: Sequence[str] = ()) -> list[str]:
    """Select the layers to adapt, in the UNet's order.

    Args:
        unet: The base model.
        targets: "attention", "attention+feed_forward", "all_linear", or "all" (with convolutions).
        patterns: Patterns over all linear layers and convolutions, instead of ``targets``.

    Raises:
        ConfigurationError: A pattern matches no layer.
    """
    layers = [n for n, layer in unet.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if patterns:
        check_patterns("targetPatterns", patterns, layers)
        return [name for name in layers if any(matches(pattern, name) for pattern in patterns)]
    if targets == "all":
        return layers
    linear = [name for name in layers if isinstance(unet.get_submodule(name), nn.Linear)]
    if targets == "all_linear":
        return linear
    ends = ATTENTION if targets == "attention" else ATTENTION + FEED_FORWARD
    return [name for name in linear if name.endswith(tuple(f".{end}" for end in ends))]


def matches(pattern: str, name: str) -> bool:
    """Apply peft's rule: a pattern matches the entire name, or its end after a dot."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def matching(patterns: Mapping[str, _T], names: Sequence[str]) -> dict[str, _T]:
    """Keep the patterns that match a name; peft warns about any other."""
    return {p: value for p, value in patterns.items() if any(matches(p, name) for name in names)}


def check_patterns(field: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Check that every pattern of ``adapter.<field>`` matches a name.

    Args:
        field: Field of ``spec.adapter`` that holds the patterns.
        patterns: The patterns.
        names: Names to match.

    Raises:
        ConfigurationError: A pattern matches no name.
    """
    what = "layers of the UNet" if field == "targetPatterns" else "adapted modules"
    require_matches(f"adapter.{field}", patterns, names, what, "widen adapter.targets")


def require_matches(
    field: str, patterns: Iterable[str], names: Sequence[str], what: str, instead: str
) -> None:
    """Check that every pattern of ``field`` matches one of ``names``.

    Args:
        field: Path of the field, for the message.
        patterns: The patterns.
        names: Names to match.
        what: What the names are, such as "adapted modules".
        instead: Alternative advice to correcting the pattern.

    Raises:
        ConfigurationError: A pattern matches no name.
    """
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise ConfigurationError(
                f"{field}: {pattern!r} matches none of the {len(names)} {what}, such as "
                f"{names[0]}{suggest_parts(pattern, names)}. Correct it, or {instead}."
            )


def suggest_parts(pattern: str, names: Iterable[str]) -> str:
    """Suggest corrections for misspelt parts: ``; did you mean 'attn2' for 'atn2'?``."""
    parts = dict.fromkeys(part for name in names for part in name.split("."))
    words = re.findall(r"[A-Za-z_]\w+", re.sub(r"\\.", " ", pattern))
    strange = [word for word in words if not any(word in part for part in parts)]
    meant = [f"{near!r} for {word!r}" for word in strange if (near := nearest(word, parts))]
    return f"; did you mean {' and '.join(meant)}?" if meant else ""
