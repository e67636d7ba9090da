"""kohya's layout of a dataset: folders named ``10_zwx dog``, repeats before the class prompt."""

import re
from dataclasses import replace
from pathlib import Path

from kubelora_trainer.data.sources import SourceFolder
from kubelora_trainer.utils.text import printable

_CONCEPT = re.compile(r"(\d{1,4})_(.*\S.*)")
PRIOR_FOLDERS = frozenset(("reg", "regularization", "regularisation", "reg_images"))
"""Folders with prior-preservation images, which must not learn the subject's words."""


def concept_of(image: Path, source: SourceFolder) -> tuple[int, str, bool] | None:
    """Return repeats, class prompt, and whether the image is for prior preservation.

    None for an image that is in no folder of that form.
    """
    relative = image.parent.relative_to(source.folder).parts
    folders = (source.folder.name, *relative)
    found = next((m for part in reversed(folders) if (m := _CONCEPT.fullmatch(part))), None)
    if found is None:
        return None
    prior = any(part.lower() in PRIOR_FOLDERS for part in relative)
    return max(1, int(found[1])), printable(found[2].strip()), prior


def concept_source(source: SourceFolder, concept: tuple[int, str, bool]) -> SourceFolder:
    """Return the source's settings for the images of one concept.

    Args:
        source: The source.
        concept: What ``concept_of`` returned.

    Returns:
        The settings with the concept's repeats and category; its class prompt is the caption of
        images without one, and prior-preservation images get no prefix.
    """
    repeats, prompt, prior = concept
    return replace(
        source,
        repeats=source.repeats * repeats,
        caption=source.caption or prompt,
        category=source.category or (f"reg {prompt}" if prior else prompt),
        use_prefix=source.use_prefix and not prior,
    )
