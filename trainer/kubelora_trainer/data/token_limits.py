"""Token limits of the text encoders, and the text that a caption loses to them.

CLIP's text encoders read 77 tokens, two of which mark start and end. The rest of a longer caption
is never seen. That is not an error, but its owner should know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import CLIPTokenizer

SHOWN_CUTS = 60
"""Number of characters of the truncated text that a report shows."""


@dataclass(frozen=True)
class Cut:
    """Tokens of a caption that an encoder does not read, and their text."""

    encoder: str
    tokens: int
    limit: int
    over: int
    text: str


@dataclass(frozen=True)
class CaptionLimit:
    """The tokenizer of one text encoder. encoder: its name in the pipeline."""

    encoder: str
    tokenizer: CLIPTokenizer

    def cut(self, caption: str) -> Cut | None:
        """Return what is truncated from ``caption``, or None if all of it is read."""
        tokenizer, limit = self.tokenizer, self.tokenizer.model_max_length
        tokens = tokenizer(caption, truncation=False, verbose=False).input_ids
        over = len(tokens) - limit
        if over <= 0:
            return None
        lost = tokenizer.decode(tokens[limit - 1 : -1]).strip()
        return Cut(self.encoder, len(tokens), limit, over, lost)


def caption_limits(model: Path) -> tuple[CaptionLimit, ...]:
    """Load the token limits of the pipeline in ``model``.

    Returns nothing if it is not a pipeline or has no tokenizers: loading the model reports that.
    """
    limits = []
    for encoder, folder in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")):
        try:
            tokenizer = CLIPTokenizer.from_pretrained(model / folder, local_files_only=True)
        except Exception:  # any problem of the model is reported where it is loaded
            return ()
        limits.append(CaptionLimit(encoder, tokenizer))
    return tuple(limits)


def describe_cuts(cuts: Sequence[Cut]) -> tuple[str, str]:
    """Describe what was found and done, for the encoders that truncate one caption."""
    first = cuts[0]
    if len({(cut.tokens, cut.limit) for cut in cuts}) == 1:
        encoders = " and ".join(cut.encoder for cut in cuts)
        found = f"{first.tokens} tokens, {encoders} read {first.limit}"
        if len(cuts) == 1:
            found = f"{first.tokens} tokens, {encoders} reads {first.limit}"
    else:
        found = ", ".join(f"{cut.tokens} tokens of {cut.limit} for {cut.encoder}" for cut in cuts)
    text = first.text if len(first.text) <= SHOWN_CUTS else first.text[: SHOWN_CUTS - 1] + "…"
    return f"{found}: the last {first.over}, {text!r}, are not seen", "cut"
