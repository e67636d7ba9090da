"""The images and captions that a run trains on, each read when it is needed."""

from dataclasses import dataclass
from pathlib import Path

from kubelora_api import spec
from kubelora_trainer.errors import ConfigurationError
from kubelora_trainer.images import BadImageError, Square, cut_square, decode_image
from kubelora_trainer.preflight import PreflightReport, Sample, preflight


@dataclass(frozen=True)
class Dataset:
    """Usable samples of a folder, in the order of their names."""

    folder: Path
    samples: tuple[Sample, ...]
    resolution: int
    report: PreflightReport

    def __len__(self) -> int:
        return len(self.samples)

    def square(self, sample: int, across: float, down: float) -> Square:
        """Training square of one sample, cut at (across, down), each in [0, 1).

        Raises ConfigurationError when the file was changed or removed since preflight.
        """
        entry = self.samples[sample]
        path = self.folder / entry.file
        try:
            image = decode_image(path).image
        except BadImageError as error:
            raise ConfigurationError(f"{path} passed preflight, but now {error}.") from error
        if image.size != (entry.width, entry.height):
            raise ConfigurationError(
                f"{path} was {entry.width} x {entry.height} in preflight and is "
                f"{image.width} x {image.height} now: leave the dataset alone during a run."
            )
        return cut_square(image, self.resolution, across, down)

    def has_fixed_crop(self, sample: int) -> bool:
        """Whether every crop of the sample is the same: its resized image is a square."""
        entry = self.samples[sample]
        return entry.width == entry.height


def open_dataset(folder: Path, settings: spec.Dataset) -> Dataset:
    """Check every image in ``folder`` and return what can be trained on.

    Raises ConfigurationError as ``preflight`` does. The caller writes ``report`` to the output.
    """
    samples, report = preflight(folder, settings.resolution, settings.on_bad_image)
    return Dataset(folder, samples, settings.resolution, report)
