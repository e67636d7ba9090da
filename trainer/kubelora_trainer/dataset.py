"""The images and captions that a run trains on, each read when it is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kubelora_api import spec
from kubelora_trainer.caption_tokens import CaptionLimit
from kubelora_trainer.errors import ConfigurationError
from kubelora_trainer.images import BadImageError, TrainingImage, cut_image, decode_image
from kubelora_trainer.preflight import Sample, Tick, preflight, refuse
from kubelora_trainer.preflight_report import PreflightReport


@dataclass(frozen=True)
class Dataset:
    """Usable samples of a folder, in the order of their names."""

    samples: tuple[Sample, ...]
    settings: spec.Dataset
    report: PreflightReport

    def __len__(self) -> int:
        return len(self.samples)

    def image(
        self, sample: int, across: float, down: float, *, mirrored: bool = False
    ) -> TrainingImage:
        """Training image of one sample, cut at (across, down), each in [0, 1).

        Raises ConfigurationError when the file was changed or removed since preflight.
        """
        entry = self.samples[sample]
        try:
            decoded = decode_image(entry.path, self.settings.background)
        except BadImageError as error:
            raise ConfigurationError(f"{entry.path} passed preflight, but now {error}.") from error
        if decoded.sha256 != entry.sha256:
            raise ConfigurationError(
                f"{entry.path} is another file now than in preflight: leave the dataset alone "
                "during a run."
            )
        return cut_image(decoded.image, entry.size, across, down, mirrored=mirrored)

    def has_fixed_crop(self, sample: int) -> bool:
        """Whether every crop of the sample is the same: once resized it is its training size."""
        entry = self.samples[sample]
        return entry.width * entry.size.height == entry.height * entry.size.width


def open_dataset(
    folder: Path,
    settings: spec.Dataset,
    *,
    limits: tuple[CaptionLimit, ...] = (),
    tick: Tick = lambda done, total: None,
    publish: Callable[[PreflightReport], None] = lambda report: None,
) -> Dataset:
    """Check every image in ``folder`` and return what can be trained on.

    publish: is given the report before anything is refused.
    Raises ConfigurationError as ``preflight`` and ``refuse`` do.
    """
    samples, report = preflight(folder, settings, limits, tick)
    publish(report)
    refuse(report, settings.on_bad_image)
    return Dataset(samples, settings, report)
