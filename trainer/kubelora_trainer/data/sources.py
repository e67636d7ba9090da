"""The folders that a dataset is made of, each with what holds for all its images."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kubelora_api import dataset_spec
from kubelora_trainer.data.parquet_images import has_tables_alone, unpack_tables
from kubelora_trainer.storage.uris import resolve_input


@dataclass(frozen=True)
class SourceFolder:
    """A folder of images.

    label: stands before its files' names in reports; empty for the only source. category, caption:
    of all its images, of those without one.
    """

    folder: Path
    label: str = ""
    repeats: int = 1
    loss_weight: float = 1.0
    category: str | None = None
    caption: str | None = None
    use_prefix: bool = True

    @property
    def field(self) -> str:
        """The job's field that names the folder."""
        return "dataset.extraSources" if self.label else "dataset.uri"


def open_folder(uri: str, columns: dataset_spec.Columns, mounts: Mapping[str, Path]) -> Path:
    """The place as a folder of images; tables are unpacked. Raises DatasetError."""
    place = resolve_input(uri, mounts)
    return unpack_tables(place, columns) if has_tables_alone(place) else place


def _columns_of(source: dataset_spec.Source, columns: dataset_spec.Columns) -> dataset_spec.Columns:
    """A source with one category for all its images needs no column of them."""
    usual = dataset_spec.Columns().category
    return columns.model_copy(update={"category": usual}) if source.category else columns


def open_extra_sources(
    settings: dataset_spec.Dataset, mounts: Mapping[str, Path]
) -> tuple[SourceFolder, ...]:
    """The dataset's extra sources, in their order. Raises DatasetError."""
    return tuple(
        SourceFolder(
            folder=open_folder(source.uri, _columns_of(source, settings.columns), mounts),
            label=source.uri.rstrip("/"),
            repeats=source.repeats,
            loss_weight=source.loss_weight,
            category=source.category,
            caption=source.caption,
            use_prefix=source.use_prefix,
        )
        for source in settings.extra_sources
    )
