"""``spec.dataset``: images and captions, and how they are processed before training."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from kubelora_api.decides import Decides
from kubelora_api.schema import LIST_ATOMIC, ApiModel, Rule
from kubelora_api.types import InputPlace, OutputPlace

_DATA = Decides("pixels", "text", "order", held_as=("file", "caption"))
_SHAPE = Decides("pixels", "order", held_as=("view",))
_CAPTION = Decides("text", held_as=("caption",))


class Buckets(ApiModel):
    """Aspect-ratio buckets: training sizes with about the same area as resolution x resolution."""

    enabled: Annotated[bool, _SHAPE] = Field(
        False,
        description="true trains each image at the size closest to its aspect ratio, with one size "
        "per micro-batch; false (default) crops every image to a square.",
    )
    step: Annotated[int, Field(ge=8, le=512, multiple_of=8), _SHAPE] = Field(
        64, description="Edge lengths are multiples of this many pixels, 8 to 512. Default 64."
    )
    min_edge: Annotated[int, Field(ge=8, le=8192), _SHAPE] | None = Field(
        None, description="Shortest edge in pixels, 8 to 8192. Default: half the resolution."
    )
    max_edge: Annotated[int, Field(ge=8, le=8192), _SHAPE] | None = Field(
        None, description="Longest edge in pixels, 8 to 8192. Default: twice the resolution."
    )


class Captions(ApiModel):
    """How each caption is changed before it is tokenized."""

    prefix: Annotated[str, Field(max_length=256), _CAPTION] = Field(
        "",
        description="Text to prepend to every caption, followed by the separator, such as a "
        "trigger word. Up to 256 characters. Default: none.",
    )
    shuffle_tags: Annotated[bool, _CAPTION] = Field(
        False,
        description="Whether to shuffle the caption's tags each time it is used. Default false.",
    )
    keep_tags: Annotated[int, Field(ge=0, le=256), _CAPTION] = Field(
        0,
        description="Number of leading tags that are not shuffled; the prefix never is. Default 0, "
        "0 to 256.",
    )
    separator: Annotated[str, Field(min_length=1, max_length=8), _CAPTION] = Field(
        ",", description="Separator between tags, 1 to 8 characters. Default: a comma."
    )
    max_missing: Annotated[float, Field(ge=0, le=1), Decides("nothing")] = Field(
        0.2,
        description="Maximum share of images without a caption, 0 to 1; the run ends before "
        "training if more have none, or if a source has none at all. 1 trains on empty captions on "
        "purpose. Default 0.2.",
    )


Column = Annotated[str, Field(min_length=1, max_length=128)]


class Columns(ApiModel):
    """Names of columns in .parquet and .arrow files, and of fields in metadata files."""

    image: Annotated[Column, Decides("pixels", "order", held_as=("file",))] = Field(
        "image",
        description="Column with the bytes of the image files, either directly or in the field "
        "bytes of a struct. Default image.",
    )
    caption: Annotated[Column, _CAPTION] = Field(
        "text",
        description="Column or field with the captions. Default text; if it is absent, caption, "
        "prompt, description, tags and other common names are read.",
    )
    category: Annotated[Column, Decides("nothing", resume="no")] = Field(
        "category", description="Column or field with the categories. Default category."
    )


class Source(ApiModel):
    """An additional source of images, used together with dataset.uri."""

    uri: Annotated[InputPlace, _DATA] = Field(
        description="Location of the images, in the same formats as dataset.uri."
    )
    repeats: Annotated[int, Field(ge=1, le=1000), Decides("order")] = Field(
        1, description="How often each image is used per epoch, 1 to 1000. Default 1."
    )
    loss_weight: Annotated[float, Field(gt=0, le=100), Decides("weights")] = Field(
        1.0,
        description="Factor for the loss of these images, for example of prior-preservation "
        "images: "
        "above 0, at most 100. Default 1.",
    )
    category: (
        Annotated[str, Field(min_length=1, max_length=63), Decides("nothing", resume="no")] | None
    ) = Field(
        None,
        description="Category of all these images. Default: the category given with each image.",
    )
    caption: Annotated[str, Field(min_length=1, max_length=2048), _CAPTION] | None = Field(
        None, description="Caption of images that have none. Default: the empty caption."
    )
    use_prefix: Annotated[bool, _CAPTION] = Field(
        True,
        description="Whether to prepend captions.prefix to these captions too; set it to false for "
        "prior-preservation images. Default true.",
    )


def _buckets_hold_the_resolution(dataset: "Dataset") -> bool:
    low, high = dataset.buckets.min_edge, dataset.buckets.max_edge
    return (low is None or low <= dataset.resolution) and (
        high is None or high >= dataset.resolution
    )


class Dataset(ApiModel):
    """The images and captions to train on."""

    uri: Annotated[InputPlace, _DATA] = Field(
        description="Directory with images, and captions in metadata.jsonl (file_name, text) or in "
        ".txt or .caption files next to the images, or in the layouts of other trainers; or with "
        ".parquet, .arrow or .tar files that contain images."
    )
    columns: Columns = Field(default_factory=Columns)
    layout: Annotated[Literal["plain", "kohya"], Decides("order", "text", held_as=("caption",))] = (
        Field(
            "plain",
            description="Meaning of the names of folders: plain (default), the first folder is the "
            "category; kohya, a folder such as 10_zwx dog has repeats 10 and the caption zwx dog "
            "for images without one, and folders below reg are for prior preservation.",
        )
    )
    mask_files: Annotated[
        Literal["exclude", "use", "train"], Decides("pixels", "order", held_as=("file",))
    ] = Field(
        "exclude",
        description="What to do about files named like the mask of an image (NAME-masklabel.png, "
        "NAME_mask.png, mask/NAME.png): exclude (default) leaves them out and reports them, use "
        "weights the loss of each part of the image by its mask, train trains on them as images.",
    )
    repeats: Annotated[int, Field(ge=1, le=1000), Decides("order")] = Field(
        1, description="How often each image of uri is used per epoch, 1 to 1000. Default 1."
    )
    extra_sources: Annotated[list[Source], Field(max_length=16), LIST_ATOMIC] = Field(
        default_factory=list,
        description="Additional sources of images, at most 16. Default: none.",
    )
    resolution: Annotated[int, Field(ge=64, le=4096, multiple_of=8), _SHAPE] = Field(
        1024,
        description="Edge length in pixels of the square to which images are resized and cropped: "
        "64 to 4096, a multiple of 8. Default 1024.",
    )
    caption_dropout: Annotated[float, Field(ge=0, le=1), _CAPTION] = Field(
        0.0,
        description="Fraction of samples, 0 to 1, trained with an empty caption, as needed for "
        "classifier-free guidance. Default 0.",
    )
    captions: Captions = Field(default_factory=Captions)
    buckets: Buckets = Field(default_factory=Buckets)
    crop: Annotated[Literal["random", "center"], Decides("pixels", held_as=("view",))] = Field(
        "random",
        description="Position of the crop when an image is cropped to its training size: random "
        "(default, drawn each time the image is used) or center.",
    )
    flip: Annotated[float, Field(ge=0, le=1), Decides("pixels", held_as=("view",))] = Field(
        0.0,
        description="Fraction of samples, 0 to 1, that are flipped horizontally. Default 0, "
        "because "
        "text and logos would be learned mirrored.",
    )
    cache: Annotated[OutputPlace | None, Decides("nothing")] = Field(
        None,
        description="pvc://claim/path where latents and text embeddings are cached for later runs, "
        "keyed by content, model and transform. Several runs may share it. Latents are cached with "
        "crop: center, or if the image has exactly the shape of its training size; text embeddings "
        "are cached unless tags are shuffled. Default: no cache on disk.",
    )
    on_bad_image: Annotated[Literal["fail", "skip"], Decides("order")] = Field(
        "fail",
        description="What to do about an image that can't be used: fail (default) ends the run "
        "before training, skip omits the image and lists it in preflight.json.",
    )
    on_duplicate: Annotated[Literal["keep", "skip"], Decides("order")] = Field(
        "keep",
        description="What to do about an image file with the same content as another: keep "
        "(default) uses it too and reports it, skip omits it.",
    )
    min_short_edge: Annotated[int, Field(ge=0, le=16384), Decides("order")] = Field(
        0,
        description="Minimum length of an image's shorter edge in pixels, 0 to 16384; smaller "
        "images can't be used. Default 0: small images are enlarged and reported.",
    )
    max_aspect_ratio: Annotated[float, Field(ge=1, le=1000), Decides("order")] | None = Field(
        None,
        description="Maximum ratio of an image's longer edge to its shorter edge, 1 to 1000; other "
        "images can't be used. Default: no limit.",
    )
    background: Annotated[
        str, Field(pattern="^#[0-9a-fA-F]{6}$", max_length=7), Decides("pixels")
    ] = Field(
        "#ffffff",
        description="Background color for transparent pixels, as #rrggbb. Default #ffffff.",
    )
    alpha: Annotated[Literal["background", "mask"], Decides("pixels")] = Field(
        "background",
        description="How transparency is used: background (default) composites the image onto the "
        "background color; mask does the same and also weights the loss of each part of the image "
        "by its opacity, so that transparent parts do not count.",
    )
    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.buckets) || ((!has(self.buckets.minEdge) || self.buckets.minEdge <= "
            "self.resolution) && (!has(self.buckets.maxEdge) || self.buckets.maxEdge >= "
            "self.resolution))",
            message="resolution must be between buckets.minEdge and buckets.maxEdge",
            check=_buckets_hold_the_resolution,
            at="buckets",
        ),
    )
