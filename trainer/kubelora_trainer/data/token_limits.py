"""Token limits of the text encoders, and the part of a caption that is truncated.

CLIP's text encoders read 77 tokens, two of which mark the beginning and the end; the rest of a
longer caption is never seen. That is not an error, but the dataset's owner should know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import CLIPTokenizer

MAX_SHOWN_CHARACTERS = 60
"""Characters of the truncated text that a report shows: about a line of its table."""


@dataclass(frozen=True)
class Truncation:
    """Tokens of a caption that an encoder does not read, and their text."""

    encoder: str
    tokens: int
    limit: int
    over: int
    text: str


@dataclass(frozen=True)
class TokenLimit:
    """Tokenizer of one text encoder. encoder: its name in the pipeline."""

    encoder: str
    tokenizer: CLIPTokenizer

    def truncation(self, caption: str) -> Truncation | None:
        """Return what is truncated from ``caption``, or None when all of it is read."""
        tokenizer, limit = self.tokenizer, self.tokenizer.model_max_length
        tokens = tokenizer(caption, truncation=False, verbose=False).input_ids
        over = len(tokens) - limit
        if over <= 0:
            return None
        # The encoder reads limit - 1 tokens and the end marker, which is this list's last entry.
        lost = tokenizer.decode(tokens[limit - 1 : -1]).strip()
        return Truncation(self.encoder, len(tokens), limit, over, lost)


def load_token_limits(model: Path) -> tuple[TokenLimit, ...]:
    """Load the token limits of the text encoders of the pipeline in ``model``.

    Returns an empty tuple where ``model`` is not a pipeline's folder or has no tokenizers: loading
    the model reports that.
    """
    limits = []
    for encoder, folder in (("text_encoder", "tokenizer"), ("text_encoder_2", "tokenizer_2")):
        try:
            tokenizer = CLIPTokenizer.from_pretrained(model / folder, local_files_only=True)
        except Exception:  # whatever is wrong with the model is reported when it is loaded
            return ()
        limits.append(TokenLimit(encoder, tokenizer))
    return tuple(limits)


def describe_truncations(found: Sequence[Truncation]) -> tuple[str, str]:
    """Describe what was found and what is done, for the encoders that truncate one caption."""
    first = found[0]
    if len({(one.tokens, one.limit) for one in found}) == 1:
        encoders = " and ".join(one.encoder for one in found)
        verb = "reads" if len(found) == 1 else "read"
        problem = f"{first.tokens} tokens, {encoders} {verb} {first.limit}"
    else:
        problem = ", ".join(
            f"{one.tokens} tokens for {one.encoder}, which reads {one.limit}" for one in found
        )
    text = first.text
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = text[: MAX_SHOWN_CHARACTERS - 1] + "…"
    return f"{problem}: the last {first.over}, {text!r}, are not seen", "truncated"
