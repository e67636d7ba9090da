"""Disk cache of latents and text embeddings between runs: its keys, and what is not cached.

A key covers everything that the values depend on, so that a stale entry is never used: the image
file's bytes and the view of it, or the caption; the model's weights bit by bit, kind of device and
library versions; and every other field that declares an effect on pixels or text.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import CLIPTokenizer

from kubelora_api.decides import Effect, KeyPart, in_key, select
from kubelora_api.schema import JsonObject
from kubelora_api.spec import JobSpec
from kubelora_trainer.data.dataset import ImageDataset, View
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.tensor_store import TensorStore, key_of, module_digest

logger = logging.getLogger(__name__)

CACHE_FORMAT = 5
"""Increment it when the code that prepares images or text changes its output."""
_LATENT_PACKAGES = ("torch", "diffusers", "pillow")
_TEXT_PACKAGES = ("torch", "transformers")
_LATENT_PARTS: tuple[KeyPart, ...] = ("model", "file", "view")
_TEXT_PARTS: tuple[KeyPart, ...] = ("model", "caption")
"""Parts of the keys besides settings. A field that acts through one of these (`Decides.held_as`) is
not in the key by its value, so that runs share entries if only, for example, the crop differs."""


@dataclass(frozen=True)
class Latent:
    """The cached result of a view.

    Attributes:
        moments: Mean and log variance of the VAE's posterior, concatenated, (2 channels, h, w).
        mask: (1, h, w), the weight of each element in the loss; None if all count.
    """

    moments: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class LatentCache:
    """Latents by view. settings: the job's fields that affect a latent."""

    store: TensorStore
    dataset: ImageDataset
    model: str
    settings: JsonObject

    def get(self, view: View) -> Latent | None:
        """Return the stored latent on the CPU, or None."""
        kept = self.store.get(self._key(view))
        return Latent(kept["moments"], kept.get("mask")) if kept else None

    def put(self, view: View, latent: Latent) -> None:
        """Store a view's latent."""
        kept = {"moments": latent.moments}
        if latent.mask is not None:
            kept["mask"] = latent.mask
        self.store.put(self._key(view), kept)

    def _key(self, view: View) -> str:
        file = self.dataset.samples[view.sample].sha256
        parts: dict[str, object] = dict(
            zip(_LATENT_PARTS, (self.model, file, view.shown()), strict=True)
        )
        return key_of("latent", {"settings": self.settings, **parts})


@dataclass(frozen=True)
class TextCache:
    """Hidden states and pooled output by caption. settings: the job's fields that affect text."""

    store: TensorStore
    model: str
    settings: JsonObject

    def get(self, caption: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (1, 77, channels) and (1, channels) on the CPU, or None."""
        kept = self.store.get(self._key(caption))
        return (kept["hidden"], kept["pooled"]) if kept else None

    def put(self, caption: str, hidden: torch.Tensor, pooled: torch.Tensor) -> None:
        """Store a caption's embeddings.

        Args:
            caption: The caption.
            hidden: Hidden states, (1, 77, channels).
            pooled: Pooled output, (1, channels).
        """
        self.store.put(self._key(caption), {"hidden": hidden, "pooled": pooled})

    def _key(self, caption: str) -> str:
        parts: dict[str, object] = dict(zip(_TEXT_PARTS, (self.model, caption), strict=True))
        return key_of("text", {**parts, "settings": self.settings})


@dataclass(frozen=True)
class DataCache:
    """The caches of a run: none, latents, text, or both."""

    latents: LatentCache | None = None
    text: TextCache | None = None

    @property
    def writable(self) -> bool:
        """True if entries can be added: not if the disk has refused a write or is read-only."""
        return any(part.store.writable for part in (self.latents, self.text) if part)


NO_CACHE = DataCache()


def build_cache(
    folder: Path,
    spec: JobSpec,
    base: BaseModel,
    dataset: ImageDataset,
    say: Callable[[str], None],
) -> DataCache:
    """Open the cache in ``folder``, except for what cannot be cached correctly.

    Args:
        folder: Directory of the cache, which several runs may share.
        spec: The job's spec, whose settings become part of the keys.
        base: The model that encodes.
        dataset: The data to encode.
        say: Called with the reason for whatever is not cached.

    Returns:
        The caches of latents and of text; None for one that would be empty.
    """
    store = TensorStore(folder, logger.warning)
    if not store.writable:
        say(
            f"cache: {folder} is read-only here; existing entries are used, the rest is computed "
            "each time it is needed"
        )
    text = None
    if spec.adapter.text_encoders:
        say(
            "cache: text embeddings are not cached because the text encoders are being trained "
            "(adapter.textEncoders)"
        )
    elif dataset.settings.captions.shuffle_tags:
        say("cache: text embeddings are not cached because tags are shuffled every time (captions)")
    else:
        text = TextCache(store, _text_model(base), _settings(spec, "text", _TEXT_PARTS))
    fixed = sum(dataset.has_fixed_crop(sample) for sample in range(len(dataset)))
    if fixed < len(dataset):
        say(
            f"cache: latents of {len(dataset) - fixed} of {len(dataset)} images are not cached "
            "because their crops are random; dataset.crop: center makes crops fixed"
        )
    pixels = _settings(spec, "pixels", _LATENT_PARTS)
    latents = LatentCache(store, dataset, _vae_model(base), pixels) if fixed else None
    return DataCache(latents, text)


def _settings(spec: JobSpec, effect: Effect, parts: tuple[KeyPart, ...]) -> JsonObject:
    return select(spec.document(), type(spec), in_key(effect, parts))


def _vae_model(base: BaseModel) -> str:
    return key_of(
        "vae",
        {
            "weights": module_digest(base.vae),
            "config": _config(base.vae.config),
            **_place(base, _LATENT_PACKAGES),
        },
    )


def _text_model(base: BaseModel) -> str:
    tokenizers = [
        {
            "rules": _rules(tokenizer),
            "pad": tokenizer.pad_token_id,
            "length": tokenizer.model_max_length,
        }
        for tokenizer in base.tokenizers
    ]
    encoders = [module_digest(encoder) for encoder in base.text_encoders]
    return key_of(
        "text encoders",
        {
            "weights": encoders,
            "configs": [_config(encoder.config.to_dict()) for encoder in base.text_encoders],
            "tokenizers": tokenizers,
            **_place(base, _TEXT_PACKAGES),
        },
    )


def _rules(tokenizer: CLIPTokenizer) -> str:
    """Hash how the tokenizer cuts text: vocabulary, merges and normalisation."""
    rules: JsonObject = json.loads(tokenizer.backend_tokenizer.to_str())
    # Set by each call, not by the tokenizer's files.
    return key_of("tokenizer", {**rules, "truncation": None, "padding": None})


def _config(config: Mapping[str, object]) -> dict[str, str]:
    """Drop names that begin with _, such as the directory that the model was loaded from."""
    return {name: repr(value) for name, value in config.items() if not name.startswith("_")}


def _place(base: BaseModel, packages: tuple[str, ...]) -> dict[str, object]:
    versions = {package: version(package) for package in packages}
    return {"format": CACHE_FORMAT, "device": base.device.type, "versions": versions}
