"""Caption transforms before the text encoders: a prefix, and shuffled tags."""

import numpy as np

from kubelora_api.dataset_spec import Captions


def prefixed(caption: str, settings: Captions) -> str:
    """Put the prefix in front of the caption; return either alone if the other is empty."""
    if not settings.prefix:
        return caption
    return f"{settings.prefix}{settings.separator} {caption}" if caption else settings.prefix


def training_caption(caption: str, settings: Captions, tags_seed: int) -> str:
    """Transform a caption as it is trained on.

    Args:
        caption: The image's caption.
        settings: The job's ``dataset.captions``.
        tags_seed: Seed that alone determines the order of the shuffled tags.
    """
    if settings.shuffle_tags:
        caption = _shuffled(caption, settings, tags_seed)
    return prefixed(caption, settings)


def _shuffled(caption: str, settings: Captions, tags_seed: int) -> str:
    tags = [tag for part in caption.split(settings.separator) if (tag := part.strip())]
    kept, rest = tags[: settings.keep_tags], tags[settings.keep_tags :]
    order = np.random.Generator(np.random.Philox(tags_seed)).permutation(len(rest))
    return f"{settings.separator} ".join([*kept, *(rest[int(place)] for place in order)])
