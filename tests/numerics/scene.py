"""What the runs train on: the demo's model, loaded once, and small copies of its photographs.

Loading is memoised, everything else of a run is real. Photographs are shrunk beforehand, because a
run of ten steps would else spend its time on decoding them.
"""

import copy
import json
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from kubelora_api.names import OutputPath
from kubelora_api.spec import Adapter
from kubelora_trainer.cli.demo import create_demo
from kubelora_trainer.data.token_limits import TokenLimit, load_token_limits
from kubelora_trainer.export.writers import export_diffusers
from kubelora_trainer.lora.adapter import add_adapter, trained_layers
from kubelora_trainer.models.pipeline import BaseModel, load_base_model, load_unet

EDGE = 96
"""Pixels of the photographs; runs train at 64."""


@dataclass(frozen=True)
class Photographs:
    """A folder to write. count: photographs in it. captions: False for empty ones.

    opaque: share of each photograph that is not transparent. plain: photographs of one grey, in a
    category of their own, among them.
    """

    count: int = 8
    captions: bool = True
    opaque: float = 1.0
    plain: int = 0


@dataclass
class Scene:
    """The demo in a folder, and what was loaded from it."""

    folder: Path
    _bases: dict[Hashable, BaseModel] = field(default_factory=dict)
    _limits: dict[Path, tuple[TokenLimit, ...]] = field(default_factory=dict)

    @classmethod
    def create(cls, folder: Path) -> "Scene":
        """Write model and photographs below ``folder``, unless they stand there already."""
        if not (folder / "photos" / "metadata.jsonl").is_file():
            create_demo(folder, "small")
        return cls(folder)

    @property
    def model(self) -> Path:
        """The tiny pipeline."""
        return self.folder / "model"

    def photographs(self, wanted: Photographs) -> Path:
        """The folder of ``wanted``, written at its first use."""
        name = f"small-{wanted.count}-{wanted.captions}-{wanted.opaque}-{wanted.plain}".replace(
            ".", "_"
        ).lower()
        folder = self.folder / name
        if not (folder / "metadata.jsonl").is_file():
            _write(self.folder / "photos", folder, wanted)
        return folder

    @property
    def trained_adapter(self) -> Path:
        """The file of an adapter of rank 4 as a run leaves it: lora_B is not 0."""
        folder = self.folder / "trained"
        if not folder.is_dir():
            unet = load_unet(
                self.model, variant=None, dtype=torch.float32, device=torch.device("cpu")
            )
            modules = add_adapter(unet, Adapter(rank=4), seed=0)
            generator = torch.Generator().manual_seed(0)
            for module in modules:
                with torch.no_grad():
                    module.lora_b.normal_(0, 0.02, generator=generator)
            export_diffusers(unet, trained_layers(modules), folder)
        return folder / OutputPath.DIFFUSERS_WEIGHTS

    def load_base(self, folder: Path, **settings: object) -> BaseModel:
        """A model of the run's own, copied from the one that was loaded at first."""
        key = (folder, *sorted((name, str(value)) for name, value in settings.items()))
        if key not in self._bases:
            self._bases[key] = load_base_model(folder, **settings)  # type: ignore[arg-type]
        base = self._bases[key]
        return replace(
            base,
            unet=copy.deepcopy(base.unet),
            text_encoders=copy.deepcopy(base.text_encoders),
        )

    def token_limits(self, folder: Path) -> tuple[TokenLimit, ...]:
        """Return the tokenizers, loaded once."""
        if folder not in self._limits:
            self._limits[folder] = load_token_limits(folder)
        return self._limits[folder]


def _write(photos: Path, folder: Path, wanted: Photographs) -> None:
    folder.mkdir(exist_ok=True)
    entries = [json.loads(line) for line in (photos / "metadata.jsonl").read_text().splitlines()]
    lines = []
    for index, entry in enumerate(entries[: wanted.count]):
        source = Image.open(photos / entry["file_name"]).convert("RGB").resize((EDGE, EDGE))
        name = Path(entry["file_name"]).with_suffix(".png").name
        picture = np.asarray(source)
        if plain := index < wanted.plain:
            picture = np.full_like(picture, 128)
        if wanted.opaque < 1.0:
            alpha = np.zeros((EDGE, EDGE, 1), dtype=np.uint8)
            alpha[: round(EDGE * wanted.opaque)] = 255
            picture = np.concatenate([picture, alpha], axis=2)
        Image.fromarray(picture).save(folder / name)
        caption = entry["text"] if wanted.captions else ""
        told = {"file_name": name, "text": caption}
        lines.append(json.dumps(told | ({"category": "plain"} if plain else {})))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
