"""Source folders of a dataset, each with the settings that apply to all of its images."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kubelora_api import dataset_spec
from kubelora_trainer.data.parquet_images import is_table_dataset, unpack_tables
from kubelora_trainer.storage.uris import resolve_input
from kubelora_trainer.utils.text import printable


@dataclass(frozen=True)
class SourceFolder:
    """Folder of images.

    label: prefix of its files' names in reports; empty for the dataset's first source. category:
    of all its images. caption: of those that have none.
    """

    folder: Path
    label: str = ""
    repeats: int = 1
    loss_weight: float = 1.0
    category: str | None = None
    caption: str | None = None
    use_prefix: bool = True

    def shown(self, file: Path) -> str:
        """Return a file's name as reports have it: below the source's label."""
        name = printable(file.relative_to(self.folder).as_posix())
        return f"{self.label}/{name}" if self.label else name

    @property
    def field(self) -> str:
        """Field of the job that names the folder."""
        return "dataset.extraSources" if self.label else "dataset.uri"


def resolve_dataset_folder(
    uri: str, columns: dataset_spec.Columns, mounts: Mapping[str, Path]
) -> Path:
    """Resolve a dataset's URI to a folder of images; tables are unpacked.

    Args:
        uri: URI of the dataset.
        columns: Names of the tables' columns.
        mounts: Folder of each claim given by ``--mount``.

    Returns:
        A local folder.

    Raises:
        DatasetError: The URI can't be resolved, or its tables can't be read.
    """
    path = resolve_input(uri, mounts)
    return unpack_tables(path, columns) if is_table_dataset(path) else path


def _columns_of(source: dataset_spec.Source, columns: dataset_spec.Columns) -> dataset_spec.Columns:
    """Make the category column optional for a source with one category for all its images."""
    default = dataset_spec.Columns().category  # the default name alone may be absent from a table
    return columns.model_copy(update={"category": default}) if source.category else columns


def resolve_extra_sources(
    settings: dataset_spec.Dataset, mounts: Mapping[str, Path]
) -> tuple[SourceFolder, ...]:
    """Resolve the dataset's extra sources, in their order.

    Raises:
        DatasetError: A URI can't be resolved, or its tables can't be read.
    """
    return tuple(
        SourceFolder(
            folder=resolve_dataset_folder(
                source.uri, _columns_of(source, settings.columns), mounts
            ),
            label=source.uri.rstrip("/"),
            repeats=source.repeats,
            loss_weight=source.loss_weight,
            category=source.category,
            caption=source.caption,
            use_prefix=source.use_prefix,
        )
        for source in settings.extra_sources
    )
