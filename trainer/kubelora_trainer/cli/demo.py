"""`kubelora demo`: a tiny SDXL pipeline and a folder of real photographs to try everything with.

The model has SDXL's classes and layout with random weights. Vocabulary and photographs come from
installed packages, so nothing is downloaded and nothing large is stored in the repository.
"""

import json
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kubelora_trainer.models.tiny_sdxl import TinyLayout, write_pipeline
from kubelora_trainer.models.tiny_tokenizer import read_vocabulary
from kubelora_trainer.utils.atomic_io import apply_umask
from kubelora_trainer.utils.errors import ConfigurationError, OutputError

PHOTOGRAPHS: tuple[tuple[str, str], ...] = (
    ("coffee.png", "a cup of coffee on a saucer with a spoon"),
    ("astronaut.png", "a portrait of an astronaut in an orange suit"),
    ("chelsea.png", "a photo of a tabby cat"),
    ("rocket.jpg", "a rocket on its launch pad at night"),
    ("motorcycle_left.png", "a motorcycle in a garage"),
    ("hubble_deep_field.jpg", "a field of distant galaxies"),
    ("coins.png", "a black and white photo of old coins in rows"),
    ("camera.png", "a black and white photo of a man with a camera on a tripod"),
    ("moon.png", "a black and white close-up of the moon"),
    ("gravel.png", "a black and white photo of gravel"),
    ("grass.png", "a black and white photo of grass"),
    ("brick.png", "a black and white photo of a brick wall"),
)
"""Files of scikit-image's wheel and their captions, the most distinctive first."""


@dataclass(frozen=True)
class DemoPaths:
    """Directories of the demo."""

    model: Path
    photos: Path


def create_demo(directory: Path, layout: TinyLayout, *, images: int = 8) -> DemoPaths:
    """Write ``directory/model`` and ``directory/photos``, with the same bytes every time.

    Args:
        directory: Parent directory.
        layout: Size of the model.
        images: Number of photographs, 1 to 12.

    Raises:
        ConfigurationError: An optional package is missing, or a directory holds something else.
    """
    if not 1 <= images <= len(PHOTOGRAPHS):
        raise ConfigurationError(
            f"The demo has 1 to {len(PHOTOGRAPHS)} photographs, not {images}: choose a number in "
            "this range."
        )
    vocabulary = _package_file("open_clip", "bpe_simple_vocab_16e6.txt.gz")
    sources = [_package_file("skimage", f"data/{name}") for name, _ in PHOTOGRAPHS[:images]]
    paths = DemoPaths(model=directory / "model", photos=directory / "photos")
    _clear(paths.model, "model_index.json")
    _clear(paths.photos, "metadata.jsonl")
    try:
        write_pipeline(paths.model, layout, read_vocabulary(vocabulary))
        _write_photos(paths.photos, sources)
        apply_umask(paths.model)
    except OSError as error:
        raise OutputError(f"The demo can't be written to {directory}: {error}.") from error
    return paths


def _package_file(package: str, name: str) -> Path:
    """Locate a data file of an installed package without importing the package."""
    spec = find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / name
        if path.is_file():
            return path
    raise ConfigurationError(
        f"The demo needs {name} from the package {package}, which is not installed: "
        "pip install 'kubelora[demo]'."
    )


def _clear(folder: Path, mark: str) -> None:
    """Remove an earlier demo; anything else there belongs to the user and is kept."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / mark).is_file():
        raise OutputError(
            f"{folder} exists and is not a demo (it has no {mark}): choose another folder."
        )
    shutil.rmtree(folder)


def _write_photos(folder: Path, sources: list[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for source, (name, caption) in zip(sources, PHOTOGRAPHS, strict=False):
        shutil.copyfile(source, folder / name)
        lines.append(json.dumps({"file_name": name, "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
