"""Text embeddings for SDXL: encoded once per caption, or every time if encoders are trained."""

from collections import OrderedDict

import torch

from kubelora_trainer.models.pipeline import BaseModel
from kubelora_trainer.objective.embedding_cache import TextCache
from kubelora_trainer.utils.device import to_device

CACHED_CAPTIONS = 8192
"""Limit of captions in host memory: about 2.5 GB for SDXL."""


class TextConditions:
    """Embeddings of captions, cached in host memory (0.3 MB each for SDXL in bf16).

    Each caption is encoded alone, so that its values do not depend on the rest of the batch.
    """

    def __init__(
        self, base: BaseModel, cache: TextCache | None = None, *, trained: bool = False
    ) -> None:
        """Create a source of embeddings; nothing is kept if an encoder is ``trained``."""
        self._base, self._cache, self._trained = base, cache, trained
        self._kept: OrderedDict[str, tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def of(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states (n, 77, both encoders' channels) and pooled output (n, channels)."""
        if self._trained:
            encoded = [encode_text(self._base, caption) for caption in captions]
            return torch.cat([hidden for hidden, _ in encoded]), torch.cat([p for _, p in encoded])
        pairs = [self._pair(caption) for caption in captions]
        device = self._base.device
        return (
            to_device(torch.cat([hidden for hidden, _ in pairs]), device),
            to_device(torch.cat([pooled for _, pooled in pairs]), device),
        )

    def _pair(self, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        kept = self._kept.get(caption)
        if kept is None:
            kept = self.ensure_cached(caption)
            self._kept[caption] = kept
            if len(self._kept) > CACHED_CAPTIONS:
                self._kept.popitem(last=False)
        return kept

    def ensure_cached(self, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the caption's embeddings on the CPU, from disk or computed and stored there."""
        kept = self._cache.get(caption) if self._cache else None
        if kept is None:
            with torch.no_grad():
                hidden, pooled = encode_text(self._base, caption)
            kept = (hidden.cpu(), pooled.cpu())
            if self._cache:
                self._cache.put(caption, *kept)
        return kept


def encode_text(base: BaseModel, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a caption: both encoders' penultimate hidden states (1, 77, channels), pooled output.

    Captions beyond 75 tokens are truncated, as in the pipeline.
    """
    hidden, pooled = [], None
    for tokenizer, encoder in zip(base.tokenizers, base.text_encoders, strict=True):
        tokens = tokenizer(
            caption,
            padding="max_length",
            max_length=tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        )
        output = encoder(to_device(tokens.input_ids, encoder.device), output_hidden_states=True)
        hidden.append(output.hidden_states[-2])
        pooled = output[0]
    if pooled is None or pooled.ndim != 2:
        raise TypeError("the second text encoder has no projection")
    return torch.cat(hidden, dim=-1), pooled
