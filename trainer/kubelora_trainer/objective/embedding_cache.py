"""Latents and text embeddings kept on disk between runs: what they depend on, and when not to.

A key holds everything that decides the numbers, so that a stale entry can't be met: the image
file's bytes, the transform, the model's weights bit by bit, kind of device and library versions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from kubelora_trainer.data.dataset import ImageDataset, View
from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.tensor_store import TensorStore, key_of, module_digest

CACHE_FORMAT = 3
"""Raised when the code that prepares images or text changes what comes out."""
_LATENT_PACKAGES = ("torch", "diffusers", "pillow")
_TEXT_PACKAGES = ("torch", "transformers")


@dataclass(frozen=True)
class Latent:
    """What is kept of a view.

    moments: mean and log variance of the VAE's posterior, one above the other, (2 channels, h, w).
    mask: (1, h, w), of each element's share of the loss; None where all count.
    """

    moments: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True)
class LatentCache:
    """Latents by view."""

    store: TensorStore
    dataset: ImageDataset
    model: str

    def get(self, view: View) -> Latent | None:
        """What was kept, on the CPU, or None."""
        kept = self.store.get(self._key(view))
        return Latent(kept["moments"], kept.get("mask")) if kept else None

    def put(self, view: View, latent: Latent) -> None:
        """Keep a view's latent."""
        kept = {"moments": latent.moments}
        if latent.mask is not None:
            kept["mask"] = latent.mask
        self.store.put(self._key(view), kept)

    def _key(self, view: View) -> str:
        masked = self.dataset.settings.alpha == "mask"
        return key_of(
            "masked latent" if masked else "latent",
            {
                "model": self.model,
                "file": self.dataset.samples[view.sample].sha256,
                "background": self.dataset.settings.background,
                "crop": view.sizes.crop_top_left,
                "size": view.sizes.target_size,
                "mirrored": view.mirrored,
            },
        )


@dataclass(frozen=True)
class TextCache:
    """Hidden states and pooled text by caption."""

    store: TensorStore
    model: str

    def get(self, caption: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(1, 77, channels) and (1, channels) on the CPU, or None."""
        kept = self.store.get(self._key(caption))
        return (kept["hidden"], kept["pooled"]) if kept else None

    def put(self, caption: str, hidden: torch.Tensor, pooled: torch.Tensor) -> None:
        """Keep a caption's embeddings."""
        self.store.put(self._key(caption), {"hidden": hidden, "pooled": pooled})

    def _key(self, caption: str) -> str:
        return key_of("text", {"model": self.model, "caption": caption})


@dataclass(frozen=True)
class DataCache:
    """What of the data is kept on disk: nothing, latents, text, or both."""

    latents: LatentCache | None = None
    text: TextCache | None = None

    @property
    def takes_more(self) -> bool:
        """Whether anything can be added: not where the disk has refused, or can only be read."""
        return any(part.store.writable for part in (self.latents, self.text) if part)


NO_CACHE = DataCache()


def build_cache(
    folder: Path,
    base: BaseModel,
    dataset: ImageDataset,
    say: Callable[[str], None],
    *,
    text_trained: bool = False,
) -> DataCache:
    """The cache in ``folder``, without what can't be cached rightly; ``say`` is told why.

    text_trained: whether a text encoder has an adapter.
    """
    store = TensorStore(folder, lambda sentence: say(f"warning: {sentence}"))
    if not store.writable:
        say(
            f"cache: {folder} can only be read here; what is in it is used, the rest is computed "
            "each time it is needed"
        )
    text = None
    if text_trained:
        say("cache: text is not cached, for what encodes it is trained (adapter.textEncoders)")
    elif dataset.settings.captions.shuffle_tags:
        say("cache: text is not cached, for tags are shuffled anew each time (captions)")
    else:
        text = TextCache(store, _text_model(base))
    fixed = sum(dataset.has_fixed_crop(sample) for sample in range(len(dataset)))
    if fixed < len(dataset):
        say(
            f"cache: latents of {len(dataset) - fixed} of {len(dataset)} images are not cached, "
            "for their crops are random; dataset.crop: center makes them all alike"
        )
    latents = LatentCache(store, dataset, _vae_model(base)) if fixed else None
    return DataCache(latents, text)


def _vae_model(base: BaseModel) -> str:
    return key_of("vae", {"weights": module_digest(base.vae), **_place(base, _LATENT_PACKAGES)})


def _text_model(base: BaseModel) -> str:
    tokenizers = [
        {
            "vocabulary": key_of("vocabulary", tokenizer.get_vocab()),
            "pad": tokenizer.pad_token_id,
            "length": tokenizer.model_max_length,
        }
        for tokenizer in base.tokenizers
    ]
    encoders = [module_digest(encoder) for encoder in base.text_encoders]
    return key_of(
        "text encoders",
        {"weights": encoders, "tokenizers": tokenizers, **_place(base, _TEXT_PACKAGES)},
    )


def _place(base: BaseModel, packages: tuple[str, ...]) -> dict[str, object]:
    versions = {package: version(package) for package in packages}
    return {"format": CACHE_FORMAT, "device": base.device.type, "versions": versions}
