"""What a caption becomes before the text encoders read it: a prefix, and tags in another order."""

import numpy as np

from kubelora_api.dataset_spec import Captions


def prefixed(caption: str, settings: Captions) -> str:
    """The caption behind its prefix; either alone where the other is empty."""
    if not settings.prefix:
        return caption
    return f"{settings.prefix}{settings.separator} {caption}" if caption else settings.prefix


def training_caption(caption: str, settings: Captions, tags_seed: int) -> str:
    """The caption as it is trained on.

    tags_seed: decides the order of the tags behind the kept ones, and nothing else does.
    """
    if settings.shuffle_tags:
        caption = _shuffled(caption, settings, tags_seed)
    return prefixed(caption, settings)


def _shuffled(caption: str, settings: Captions, tags_seed: int) -> str:
    tags = [tag for part in caption.split(settings.separator) if (tag := part.strip())]
    kept, rest = tags[: settings.keep_tags], tags[settings.keep_tags :]
    order = np.random.Generator(np.random.Philox(tags_seed)).permutation(len(rest))
    return f"{settings.separator} ".join([*kept, *(rest[int(place)] for place in order)])
