"""The images and captions that a run trains on, each read on demand."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kubelora_api import dataset_spec
from kubelora_trainer.data.caption_transforms import prefixed, training_caption
from kubelora_trainer.data.cropping import SizeConditions, TrainingImage, cut_image, size_conditions
from kubelora_trainer.data.images import BadImageError, decode_image
from kubelora_trainer.data.preflight import Sample, Tick, check_report, preflight
from kubelora_trainer.data.preflight_report import PreflightReport
from kubelora_trainer.data.sampler import SampleDraw, SampleOrder, groups_of
from kubelora_trainer.data.sources import SourceFolder
from kubelora_trainer.data.token_limits import CaptionLimit
from kubelora_trainer.utils.errors import DatasetError

CENTER = 0.5
"""Position of a centered crop, in [0, 1)."""
_LEAVE_ALONE = (
    "Do not change the dataset during a run; restore the file, and the run resumes from its last "
    "checkpoint."
)


@dataclass(frozen=True)
class View:
    """One crop of a sample.

    Attributes:
        sample: Index of the sample.
        across: Horizontal position in [0, 1).
        down: Vertical position in [0, 1).
        mirrored: True if left and right are swapped.
        sizes: Size conditioning of the model.
    """

    sample: int
    across: float
    down: float
    mirrored: bool
    sizes: SizeConditions

    def shown(self) -> dict[str, object]:
        """Return all that tells this view from others of the same sample.

        ``sizes`` holds where ``across`` and ``down`` come to lie, in pixels.
        """
        fields = asdict(self)
        return {k: v for k, v in fields.items() if k not in ("sample", "across", "down")}


@dataclass(frozen=True)
class ImageDataset:
    """Usable samples of all sources, sorted by name within each source."""

    samples: tuple[Sample, ...]
    settings: dataset_spec.Dataset
    report: PreflightReport

    def __len__(self) -> int:
        return len(self.samples)

    def digest(self) -> str:
        """Hash (sha256) all that is trained on: images, captions, categories, repeats, weights."""
        digest = hashlib.sha256()
        for s in self.samples:
            hashed = [s.sha256, s.caption, s.category, s.repeats, s.loss_weight, s.use_prefix]
            digest.update(json.dumps(hashed).encode() + b"\n")
        return digest.hexdigest()

    def order(self, seed: int, batch_size: int) -> SampleOrder:
        """Build the order of the samples, in micro-batches of one training size each."""
        entries = [i for i, sample in enumerate(self.samples) for _ in range(sample.repeats)]
        sizes = [self.samples[sample].size for sample in entries]
        groups = tuple(tuple(entries[e] for e in group) for group in groups_of(sizes))
        return SampleOrder(seed, len(entries), batch_size, groups)

    def view(self, draw: SampleDraw) -> View:
        """Return the crop and orientation that a draw selects."""
        random = self.settings.crop == "random"
        entry = self.samples[draw.sample]
        across, down = (draw.across, draw.down) if random else (CENTER, CENTER)
        return View(
            sample=draw.sample,
            across=across,
            down=down,
            mirrored=draw.flip < self.settings.flip,
            sizes=size_conditions(entry.width, entry.height, entry.size, across, down),
        )

    def fixed_views(self) -> Iterator[View]:
        """Yield every possible view of the samples whose crop never varies."""
        flip = self.settings.flip
        ways = (flip == 1.0,) if flip in (0.0, 1.0) else (False, True)
        for sample, entry in enumerate(self.samples):
            if self.has_fixed_crop(sample):
                sizes = size_conditions(entry.width, entry.height, entry.size, CENTER, CENTER)
                for mirrored in ways:
                    yield View(sample, CENTER, CENTER, mirrored, sizes)

    def all_captions(self) -> list[str]:
        """List every distinct caption that is trained on, provided tags are not shuffled."""
        settings = self.settings
        captions = {prefixed(s.caption, self._captions_of(s)): None for s in self.samples}
        if settings.caption_dropout > 0:
            captions[""] = None
        return list(captions)

    def caption(self, draw: SampleDraw) -> str:
        """Return the caption that a draw trains on: with prefix and shuffled tags, or dropped."""
        if draw.caption < self.settings.caption_dropout:
            return ""
        sample = self.samples[draw.sample]
        return training_caption(sample.caption, self._captions_of(sample), draw.tags_seed)

    def _captions_of(self, sample: Sample) -> dataset_spec.Captions:
        captions = self.settings.captions
        return captions if sample.use_prefix else captions.model_copy(update={"prefix": ""})

    def image(self, view: View) -> TrainingImage:
        """Load the pixels of a view.

        Raises DatasetError if the file was changed or removed since preflight.
        """
        entry = self.samples[view.sample]
        try:
            decoded = decode_image(entry.path, self.settings.background, self.settings.alpha)
        except BadImageError as error:
            raise DatasetError(
                f"{entry.path} passed preflight, but now {error}. {_LEAVE_ALONE}"
            ) from error
        if decoded.sha256 != entry.sha256:
            raise DatasetError(f"{entry.path} has changed since preflight. {_LEAVE_ALONE}")
        return cut_image(
            decoded.image,
            entry.size,
            view.across,
            view.down,
            mirrored=view.mirrored,
            mask=decoded.mask,
        )

    def loss_weight(self, draw: SampleDraw) -> float:
        """Return the weight of a draw's loss."""
        return self.samples[draw.sample].loss_weight

    def has_fixed_crop(self, sample: int) -> bool:
        """Return True if every crop of the sample is the same."""
        entry = self.samples[sample]
        return self.settings.crop == "center" or (
            entry.width * entry.size.height == entry.height * entry.size.width
        )


def build_dataset(
    folder: Path,
    settings: dataset_spec.Dataset,
    *,
    limits: tuple[CaptionLimit, ...] = (),
    tick: Tick = lambda done, total: None,
    publish: Callable[[PreflightReport], None] = lambda report: None,
    extra: Sequence[SourceFolder] = (),
) -> ImageDataset:
    """Check every image in ``folder`` and ``extra`` and return the usable ones.

    Args:
        folder: Directory of ``dataset.uri``.
        settings: The job's ``spec.dataset``.
        limits: Token limits of the text encoders.
        tick: Progress callback.
        publish: Called with the report, before any error is raised for it.
        extra: Extra sources.

    Raises:
        DatasetError: See `preflight` and `check_report`.
    """
    samples, report = preflight(folder, settings, limits, tick, extra)
    publish(report)
    check_report(report, settings.on_bad_image)
    return ImageDataset(samples, settings, report)
