"""Caption transforms applied before text encoding: the prefix, and shuffled tags."""

import re

import numpy as np

from kubelora_api.dataset_spec import Captions

PROMPT_SYNTAX = re.compile(
    r"\([^()]*:\s*[0-9.]+\)"  # (word:1.2)
    r"|\bBREAK\b"
    r"|\{[^{}]*\|[^{}]*\}"  # {one|another}
    r"|<lora:[^<>]*>"
)
"""Syntax of user interfaces for prompts. Here it is text like any other."""


def prefixed(caption: str, settings: Captions) -> str:
    """Prepend the prefix to the caption; where one of the two is empty, return the other alone."""
    if not settings.prefix:
        return caption
    return f"{settings.prefix}{settings.separator} {caption}" if caption else settings.prefix


def training_caption(caption: str, settings: Captions, tags_seed: int) -> str:
    """Return the caption as it is trained on.

    Args:
        caption: Caption as it was read from the dataset.
        settings: ``dataset.captions`` of the job.
        tags_seed: Seed that alone decides the order of the tags after the kept ones.

    Returns:
        The caption with its tags shuffled, where the job asks for it, and its prefix.
    """
    if settings.shuffle_tags:
        caption = _shuffled(caption, settings, tags_seed)
    return prefixed(caption, settings)


def _shuffled(caption: str, settings: Captions, tags_seed: int) -> str:
    tags = [tag for part in caption.split(settings.separator) if (tag := part.strip())]
    kept, rest = tags[: settings.keep_tags], tags[settings.keep_tags :]
    order = np.random.Generator(np.random.Philox(tags_seed)).permutation(len(rest))
    return f"{settings.separator} ".join([*kept, *(rest[int(index)] for index in order)])
