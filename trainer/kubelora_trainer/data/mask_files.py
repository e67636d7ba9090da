"""Masks in files of their own, found by the names that other trainers give them."""

from collections.abc import Collection
from pathlib import Path

from kubelora_trainer.data.caption_files import IMAGE_FOLDERS
from kubelora_trainer.data.metadata_listing import folded

MASK_FOLDERS = frozenset(("mask", "masks"))
MASK_ENDINGS = ("-masklabel", "_masklabel", "-mask", "_mask", ".mask")
"""Endings of a mask's name next to its image's; the first is OneTrainer's."""


def find_masks(images: Collection[Path], folder: Path) -> dict[Path, Path]:
    """Return the image of each file that is named like a mask of it.

    A mask is NAME-mask.png or the like next to NAME.jpg, or mask/NAME.png for NAME.jpg or
    images/NAME.jpg. A file without such an image is an image itself.

    Args:
        images: Files with an image's suffix.
        folder: Folder of the source, above all of them.
    """
    by_name: dict[tuple[str, ...], Path] = {}
    masks = {image for image in images if _is_named_like_a_mask(image, folder)}
    for image in sorted(set(images) - masks):
        parts = _parts(image, folder)
        without = (*(part for part in parts[:-1] if part not in IMAGE_FOLDERS), parts[-1])
        by_name.setdefault(parts, image)
        by_name.setdefault(without, image)
    found: dict[Path, Path] = {}
    for mask in masks:
        *above, name = _parts(mask, folder)
        ending = next((one for one in MASK_ENDINGS if name.endswith(one)), "")
        apart = (*(part for part in above if part not in MASK_FOLDERS), name)
        keys = [(*above, name.removesuffix(ending)), apart]
        keys.append((*apart[:-1], name.removesuffix(ending)))
        if key := next((key for key in keys if key in by_name), None):
            found[mask] = by_name[key]
    return found


def _is_named_like_a_mask(image: Path, folder: Path) -> bool:
    *above, name = _parts(image, folder)
    return name.endswith(MASK_ENDINGS) or bool(MASK_FOLDERS & set(above))


def _parts(image: Path, folder: Path) -> tuple[str, ...]:
    return tuple(folded(part) for part in image.relative_to(folder).with_suffix("").parts)
