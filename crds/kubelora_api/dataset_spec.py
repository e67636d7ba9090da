"""``spec.dataset``: the images and captions, and what happens to them before training."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kubelora_api.schema import LIST_ATOMIC, ApiModel, Rule
from kubelora_api.types import InputPlace, OutputPlace


class Buckets(ApiModel):
    """Aspect-ratio buckets: training sizes of about the area of resolution x resolution."""

    enabled: bool = Field(
        False,
        description="true trains each image at the size nearest to its shape, one size per "
        "micro-batch; false (default) trains every image as a square.",
    )
    step: Annotated[int, Field(ge=8, le=512, multiple_of=8)] = Field(
        64, description="Edges are multiples of this many pixels. Default 64, 8 to 512."
    )
    min_edge: Annotated[int, Field(ge=8, le=8192)] | None = Field(
        None, description="Shortest edge in pixels, 8 to 8192. Default: half the resolution."
    )
    max_edge: Annotated[int, Field(ge=8, le=8192)] | None = Field(
        None, description="Longest edge in pixels, 8 to 8192. Default: twice the resolution."
    )


class Captions(ApiModel):
    """What happens to each caption before the text encoders read it."""

    prefix: Annotated[str, Field(max_length=256)] = Field(
        "",
        description="Put in front of every caption with a separator, such as a trigger word. "
        "Default: nothing. Up to 256 characters.",
    )
    shuffle_tags: bool = Field(
        False,
        description="Shuffle the caption's tags anew each time it is used. Default false.",
    )
    keep_tags: Annotated[int, Field(ge=0, le=256)] = Field(
        0,
        description="First tags of the caption that keep their place when tags are shuffled; the "
        "prefix always does. Default 0, up to 256.",
    )
    separator: Annotated[str, Field(min_length=1, max_length=8)] = Field(
        ",", description="What stands between tags. Default a comma, 1 to 8 characters."
    )


Column = Annotated[str, Field(min_length=1, max_length=128)]


class Columns(ApiModel):
    """Names of the columns of .parquet and .arrow files, and of the fields of metadata.jsonl."""

    image: Column = Field(
        "image",
        description="Column of a table with the image files' bytes, alone or as the field bytes "
        "of a struct. Default image.",
    )
    caption: Column = Field("text", description="Column or field with captions. Default text.")
    category: Column = Field(
        "category", description="Column or field with categories. Default category."
    )


class Source(ApiModel):
    """More images, trained on together with those of dataset.uri."""

    uri: InputPlace = Field(description="Where they are, like dataset.uri.")
    repeats: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="How often an epoch sees each image. Default 1, 1 to 1000."
    )
    loss_weight: Annotated[float, Field(gt=0, le=100)] = Field(
        1.0,
        description="Weight of these images' losses, as prior-preservation images need it. Default "
        "1, above 0, up to 100.",
    )
    category: Annotated[str, Field(min_length=1, max_length=63)] | None = Field(
        None, description="Category of all these images. Default: as found with each image."
    )
    caption: Annotated[str, Field(min_length=1, max_length=2048)] | None = Field(
        None, description="Caption of those without one. Default: the empty caption."
    )
    use_prefix: bool = Field(
        True,
        description="Whether captions.prefix is put in front here too. Default true; false for "
        "prior-preservation images.",
    )


def _buckets_hold_the_resolution(dataset: "Dataset") -> bool:
    low, high = dataset.buckets.min_edge, dataset.buckets.max_edge
    return (low is None or low <= dataset.resolution) and (
        high is None or high >= dataset.resolution
    )


class Dataset(ApiModel):
    """The images and captions to train on."""

    uri: InputPlace = Field(
        description="A folder of images with captions in metadata.jsonl (file_name, text) or in "
        ".txt or .caption files beside them, or of .parquet or .arrow files with images in them."
    )
    columns: Columns = Field(default_factory=Columns)
    repeats: Annotated[int, Field(ge=1, le=1000)] = Field(
        1, description="How often an epoch sees each image of uri. Default 1, 1 to 1000."
    )
    extra_sources: Annotated[list[Source], Field(max_length=16), LIST_ATOMIC] = Field(
        default_factory=list,
        description="More places with images, at most 16. Default: none.",
    )
    resolution: Annotated[int, Field(ge=64, le=4096, multiple_of=8)] = Field(
        1024,
        description="Edge in pixels of the square that images are resized to and cropped from. "
        "Default 1024, 64 to 4096, a multiple of 8.",
    )
    caption_dropout: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Share of samples, 0 to 1, trained on an empty caption, which "
        "classifier-free guidance needs. Default 0.",
    )
    captions: Captions = Field(default_factory=Captions)
    buckets: Buckets = Field(default_factory=Buckets)
    crop: Literal["random", "center"] = Field(
        "random",
        description="Where the part of an image lies that its training size shows: random "
        "(default, anew each time) or center.",
    )
    flip: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="Share of samples, 0 to 1, that are mirrored left to right. Default 0: text "
        "and logos would be learned mirrored.",
    )
    cache: OutputPlace | None = Field(
        None,
        description="pvc://claim/path where latents and text embeddings are kept for later runs, "
        "keyed by content, model and transform. Several runs may share it. Latents are kept for "
        "crop: center, or images of exactly their training size's shape; text embeddings unless "
        "tags are shuffled. Default: no cache on disk.",
    )
    on_bad_image: Literal["fail", "skip"] = Field(
        "fail",
        description="What an image that can't be used does: fail ends the run before training "
        "(default), skip leaves it out and says so in preflight.json.",
    )
    on_duplicate: Literal["keep", "skip"] = Field(
        "keep",
        description="What a file does whose bytes were met before: keep trains on it too and says "
        "so (default), skip leaves it out.",
    )
    min_short_edge: Annotated[int, Field(ge=0, le=16384)] = Field(
        0,
        description="An image whose shorter edge has fewer pixels can't be used. Default 0, up to "
        "16384: small images are enlarged, and noted.",
    )
    max_aspect_ratio: Annotated[float, Field(ge=1, le=1000)] | None = Field(
        None,
        description="An image whose longer edge is more than this many times its shorter one "
        "can't be used. 1 to 1000. Default: no limit.",
    )
    background: Annotated[str, Field(pattern="^#[0-9a-fA-F]{6}$", max_length=7)] = Field(
        "#ffffff",
        description="Colour that transparent pixels are laid on, as #rrggbb. Default #ffffff.",
    )
    alpha: Literal["background", "mask"] = Field(
        "background",
        description="What transparency means: background (default) lays the image on that colour "
        "and trains on all of it; mask does so too, and each part of the image counts in the loss "
        "by its opacity, transparent parts not at all.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.buckets) || ((!has(self.buckets.minEdge) || self.buckets.minEdge <= "
            "self.resolution) && (!has(self.buckets.maxEdge) || self.buckets.maxEdge >= "
            "self.resolution))",
            message="the resolution must lie between buckets.minEdge and buckets.maxEdge",
            check=_buckets_hold_the_resolution,
            at="buckets",
        ),
    )
