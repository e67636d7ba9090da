"""Dataset of images and captions that a run trains on, each read when it is needed."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kubelora_api import dataset_spec
from kubelora_trainer.data.caption_check import require_captions
from kubelora_trainer.data.caption_transforms import prefixed, training_caption
from kubelora_trainer.data.cropping import (
    SizeConditions,
    TrainingImage,
    crop_image,
    size_conditions,
)
from kubelora_trainer.data.images import BadImageError, decode_image
from kubelora_trainer.data.preflight import (
    OnProgress,
    Sample,
    preflight,
    require_usable_images,
)
from kubelora_trainer.data.preflight_report import PreflightReport
from kubelora_trainer.data.sampler import SampleDraw, SampleOrder, groups_of
from kubelora_trainer.data.sources import SourceFolder
from kubelora_trainer.data.token_limits import TokenLimit
from kubelora_trainer.utils.errors import DatasetError

CENTER = 0.5
"""Position of a crop in the middle of the image."""
_DO_NOT_CHANGE = (
    "Don't change the dataset during a run; once the file is restored, the run resumes from its "
    "last checkpoint."
)


@dataclass(frozen=True)
class View:
    """Crop of a sample. across, down: in [0, 1). sizes: the model's size conditions."""

    sample: int
    across: float
    down: float
    mirrored: bool
    sizes: SizeConditions

    def shown(self) -> dict[str, object]:
        """Return all that distinguishes this view from others of the same sample.

        ``sizes`` holds where ``across`` and ``down`` come to lie, in pixels.
        """
        fields = asdict(self)
        return {k: v for k, v in fields.items() if k not in ("sample", "across", "down")}


@dataclass(frozen=True)
class ImageDataset:
    """Usable samples of all sources, in the order of their names in each."""

    samples: tuple[Sample, ...]
    settings: dataset_spec.Dataset
    report: PreflightReport

    def __len__(self) -> int:
        return len(self.samples)

    def digest(self) -> str:
        """Return the sha256 of all that is trained on: images, captions, repeats, weights."""
        digest = hashlib.sha256()
        for s in self.samples:
            entry = [s.sha256, s.caption, s.category, s.repeats, s.loss_weight, s.use_prefix]
            digest.update(json.dumps(entry).encode() + b"\n")
        return digest.hexdigest()

    def order(self, seed: int, batch_size: int) -> SampleOrder:
        """Order the samples in micro-batches of one training size each."""
        entries = [i for i, sample in enumerate(self.samples) for _ in range(sample.repeats)]
        sizes = [self.samples[sample].size for sample in entries]
        groups = tuple(tuple(entries[e] for e in group) for group in groups_of(sizes))
        return SampleOrder(seed, len(entries), batch_size, groups)

    def view(self, draw: SampleDraw) -> View:
        """Return the crop that a draw shows, and whether it is mirrored."""
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
        """Yield all possible views of the samples whose crop is always the same."""
        flip = self.settings.flip
        orientations = (flip == 1.0,) if flip in (0.0, 1.0) else (False, True)
        for sample, entry in enumerate(self.samples):
            if self.has_fixed_crop(sample):
                sizes = size_conditions(entry.width, entry.height, entry.size, CENTER, CENTER)
                for mirrored in orientations:
                    yield View(sample, CENTER, CENTER, mirrored, sizes)

    def all_captions(self) -> list[str]:
        """List the distinct captions that are trained on, provided that tags aren't shuffled."""
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
        """Read the pixels of a view.

        Raises:
            DatasetError: The file was changed or removed since preflight.
        """
        entry = self.samples[view.sample]
        try:
            decoded = decode_image(entry.path, self.settings, entry.mask_file)
        except BadImageError as error:
            raise DatasetError(
                f"{entry.path} passed preflight, but now {error}. {_DO_NOT_CHANGE}"
            ) from error
        if decoded.sha256 != entry.sha256:
            raise DatasetError(f"{entry.path} has changed since preflight. {_DO_NOT_CHANGE}")
        return crop_image(
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
        """Return whether every crop of the sample is the same."""
        entry = self.samples[sample]
        return self.settings.crop == "center" or (
            entry.width * entry.size.height == entry.height * entry.size.width
        )


def build_dataset(
    folder: Path,
    settings: dataset_spec.Dataset,
    *,
    limits: tuple[TokenLimit, ...] = (),
    on_progress: OnProgress = lambda done, total: None,
    publish: Callable[[PreflightReport], None] = lambda report: None,
    extra: Sequence[SourceFolder] = (),
) -> ImageDataset:
    """Check every image in ``folder`` and in ``extra``, and return what can be trained on.

    Args:
        folder: The dataset's folder.
        settings: ``dataset`` of the job.
        limits: Token limits of the text encoders; without them captions are not checked.
        on_progress: Called with (images checked, images in all); may raise to stop.
        publish: Called with the report before an error is raised about it.
        extra: Further source folders.

    Returns:
        The usable samples and the report.

    Raises:
        DatasetError: There are no usable images, a bad one where ``onBadImage`` is fail, metadata
            that can't be read, or fewer captions than the job allows.
    """
    samples, report = preflight(folder, settings, limits, on_progress, extra)
    publish(report)  # first, so that the report of a run that is refused can be read
    require_usable_images(report, settings.on_bad_image)
    require_captions(report, settings)
    return ImageDataset(samples, settings, report)
