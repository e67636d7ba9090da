"""`kubelora inspect`: a description of a LoRA file, whichever program wrote it.

Files are recognised by their keys alone, so nothing is loaded but the small scalars of alpha.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from kubelora_trainer.lora.init_from_lora import LORA_METADATA, lora_file
from kubelora_trainer.lora.target_modules import matches
from kubelora_trainer.utils.errors import ModelError

_TYPES = {
    "LoHa": re.compile(r"\.hada_(w[12]_[ab]|t[12])$"),
    "LoKr": re.compile(r"\.lokr_(w[12](_[ab])?|t2)$"),
    "IA3": re.compile(r"\.on_input$"),
    "GLoRA": re.compile(r"\.([ab][12]\.weight|bm\.weight)$"),
    "OFT": re.compile(r"\.(oft_blocks|oft_diag|boft_\w+)$"),
    "full weights": re.compile(r"\.(diff|diff_b)$"),
    "norms": re.compile(r"\.(w_norm|b_norm)$"),
}
"""Adapter types of LyCORIS, by the end of their keys."""
_DOWN = re.compile(
    r"\.(lora_down|lora_A|lora\.down|\w+_lora\.down|lora_linear_layer\.down)\.weight$"
)
_UP = re.compile(r"\.(lora_up|lora_B|lora\.up|\w+_lora\.up|lora_linear_layer\.up)\.weight$")
_DORA = re.compile(r"\.(dora_scale|lora_magnitude_vector(\.weight)?)$")
_TUCKER = re.compile(r"\.lora_mid\.weight$")
_ALPHA = re.compile(r"\.alpha$")
_FORMATS = (
    ("kohya", re.compile(r"^lora_(unet|te|te1|te2)_")),
    ("peft", re.compile(r"^base_model\.model\.")),
    ("diffusers, with attention processors", re.compile(r"\.processor\.")),
    ("diffusers", re.compile(r"^(unet|text_encoder|text_encoder_2)\.")),
)
_PARTS = (
    ("text_encoder_2", re.compile(r"^(lora_te2_|text_encoder_2\.)")),
    ("text_encoder", re.compile(r"^(lora_te1?_|text_encoder\.)")),
)


class LoraDescription(BaseModel):
    """What a LoRA file contains.

    Attributes:
        format: Whose keys it uses.
        types: Number of layers by adapter type.
        parts: Number of layers by model.
        ranks: Number of layers by rank.
        alphas: Number of layers by alpha; empty if the file has none, so that the scale is 1.
        dtypes: Number of tensors by type.
        parameters: Number of values in all tensors.
        metadata: As in the file.
    """

    model_config = ConfigDict(frozen=True)

    file: str
    bytes: int
    sha256: str
    format: str
    types: dict[str, int]
    parts: dict[str, int]
    ranks: dict[int, int]
    alphas: dict[float, int]
    dtypes: dict[str, int]
    parameters: int
    metadata: dict[str, str]


def inspect_file(place: Path) -> LoraDescription:
    """Describe the LoRA at ``place``, a file or a directory with one.

    Raises:
        ModelError: It is not there, not a safetensors file, or no LoRA.
    """
    if not place.exists():
        raise ModelError(f"{place}: no such file")
    file = lora_file(place, "inspect")
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
            shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
            dtypes = Counter(str(part.get_dtype()) for part in slices.values())
            alphas = [
                float(opened.get_tensor(key))
                for key, shape in shapes.items()
                if _ALPHA.search(key) and torch.Size(shape).numel() == 1
            ]
            metadata = dict(opened.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a safetensors file, or damaged ({error})") from None
    layers = _layers(shapes)
    if not layers:
        raise ModelError(
            f"{file}: no LoRA; none of its {len(shapes)} tensors has a name that a LoRA uses, such "
            f"as {min(shapes, default='(none)')}"
        )
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    ranks = Counter(shape[0] for key, shape in shapes.items() if _DOWN.search(key) and shape)
    return LoraDescription(
        file=str(file),
        bytes=file.stat().st_size,
        sha256=digest,
        format=next((name for name, keys in _FORMATS if keys.search(min(shapes))), "unknown"),
        types=dict(Counter(layers.values()).most_common()),
        parts=dict(Counter(_part(layer) for layer in layers).most_common()),
        ranks=dict(sorted(ranks.items())),
        alphas=dict(sorted((Counter(alphas) or _peft_alphas(metadata, layers)).items())),
        dtypes=dict(dtypes.most_common()),
        parameters=sum(torch.Size(shape).numel() for shape in shapes.values()),
        metadata=metadata,
    )


def text_of(found: LoraDescription) -> str:
    """Format the description for a terminal; long metadata is cut."""
    rows = [
        ("file", found.file),
        ("size", f"{found.bytes / 1e6:.1f} MB, {found.parameters:,} parameters"),
        ("sha256", found.sha256),
        ("format", found.format),
        ("layers", _counts(found.types)),
        ("models", _counts(found.parts)),
        ("rank", _counts(found.ranks) or "none"),
        ("alpha", _counts(found.alphas) or "none in the file, so the scale is 1"),
        ("types", _counts(found.dtypes)),
    ]
    rows += [
        (key, value if len(value) <= 100 else f"{value[:100]}… ({len(value)} characters)")
        for key, value in sorted(found.metadata.items())
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {_printable(value)}" for name, value in rows)


def _layers(shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the adapter type of each layer, by the stem of its keys."""
    found: dict[str, str] = {}
    for key in shapes:
        for name, pattern in (*_TYPES.items(), ("LoRA", _UP), ("LoRA", _DOWN)):
            if match := pattern.search(key):
                found.setdefault(key[: match.start()] + _projection(match), name)
    stems = {
        pattern: {p.sub("", k) for k in shapes if (p := pattern).search(k)}
        for pattern in (_DORA, _TUCKER)
    }
    for stem, kind in found.items():
        if kind == "LoRA" and stem in stems[_DORA]:
            found[stem] = "DoRA"
        elif kind == "LoRA" and stem in stems[_TUCKER]:
            found[stem] = "LoCon with a core tensor"
    return found


def _projection(match: re.Match[str]) -> str:
    """Return the layer's own name where diffusers' old keys join it to the factor's."""
    factor = match[1] if match.re in (_UP, _DOWN) else ""
    return f".{factor.partition('_lora')[0]}" if factor.endswith(("_lora.up", "_lora.down")) else ""


def _part(layer: str) -> str:
    return next((part for part, pattern in _PARTS if pattern.search(layer)), "unet")


def _peft_alphas(metadata: dict[str, str], layers: Collection[str]) -> Counter[float]:
    """Count alphas as diffusers' adapter metadata gives them: one per model, and patterns."""
    found: Counter[float] = Counter()
    try:
        config = json.loads(metadata.get(LORA_METADATA, "{}"))
        for part in {_part(layer) for layer in layers}:
            patterns = config.get(f"{part}.alpha_pattern") or {}
            for layer in (layer for layer in layers if _part(layer) == part):
                inside = layer.removeprefix(f"{part}.").removeprefix("text_model.")
                own = (value for pattern, value in patterns.items() if matches(pattern, inside))
                found[float(next(own, config[f"{part}.lora_alpha"]))] += 1
    except (ValueError, TypeError, AttributeError, KeyError, re.error):
        return Counter()
    return found


def _counts(counts: dict[str, int] | dict[int, int] | dict[float, int]) -> str:
    """Format ``8 (560), 16 (12)``; a single value without its count of layers."""
    texts = {f"{key:g}" if isinstance(key, float) else str(key): n for key, n in counts.items()}
    return ", ".join(f"{key} ({n})" for key, n in texts.items())


def _printable(text: str) -> str:
    """Escape control characters: a file's metadata must not move the cursor."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
