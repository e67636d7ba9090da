"""The directories of a dataset, each with the settings that apply to all its images."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kubelora_api import dataset_spec
from kubelora_trainer.data.parquet_images import holds_only_tables, unpack_tables
from kubelora_trainer.storage.uris import resolve_input


@dataclass(frozen=True)
class SourceFolder:
    """A directory of images.

    Attributes:
        folder: The directory.
        label: Prefix of file names in reports; empty for ``dataset.uri``.
        repeats: Times an epoch sees each image.
        loss_weight: Weight of each image's loss.
        category: Category of all its images, or None.
        caption: Caption of images without one, or None.
        use_prefix: True if captions get the prefix.
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
        """The job's field that sets the directory."""
        return "dataset.extraSources" if self.label else "dataset.uri"


def resolve_folder(uri: str, columns: dataset_spec.Columns, mounts: Mapping[str, Path]) -> Path:
    """Resolve ``uri`` to a directory of images; tables are unpacked.

    Args:
        uri: The dataset's location.
        columns: The job's column names.
        mounts: Local directory of each mounted URI.

    Raises:
        DatasetError: The dataset cannot be read.
    """
    place = resolve_input(uri, mounts)
    return unpack_tables(place, columns) if holds_only_tables(place) else place


def _columns_of(source: dataset_spec.Source, columns: dataset_spec.Columns) -> dataset_spec.Columns:
    """Restore the default category column if the source sets one category for all its images."""
    usual = dataset_spec.Columns().category
    return columns.model_copy(update={"category": usual}) if source.category else columns


def resolve_extra_sources(
    settings: dataset_spec.Dataset, mounts: Mapping[str, Path]
) -> tuple[SourceFolder, ...]:
    """Resolve the dataset's extra sources, in their order. Raises DatasetError."""
    return tuple(
        SourceFolder(
            folder=resolve_folder(source.uri, _columns_of(source, settings.columns), mounts),
            label=source.uri.rstrip("/"),
            repeats=source.repeats,
            loss_weight=source.loss_weight,
            category=source.category,
            caption=source.caption,
            use_prefix=source.use_prefix,
        )
        for source in settings.extra_sources
    )
