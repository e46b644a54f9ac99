"""What is trained on: folders and files that a scenario names, or real data that every machine has."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gssim.units import PositiveFloat, spec

GlueTask = Literal["CoLA", "SST-2", "MRPC", "QQP", "STS-B", "MNLI", "QNLI", "RTE", "WNLI"]
Mean = Annotated[float, Field(allow_inf_nan=False)]


@spec
class ImageFolder:
    """Images in one folder a class, as ImageNet is distributed: FOLDER/CLASS/NAME.JPEG, or FOLDER/SPLIT/CLASS/..."""

    kind: Literal["image-folder"]
    """The form of this table."""
    folder: str
    """Beside the scenario."""
    split: str = "train"
    """The folder inside that holds the classes; `folder` itself where there is none of this name."""
    augment: bool = False
    """Random resized crop and horizontal flip; else the shorter side is resized and the centre cropped."""
    mean: tuple[Mean, ...] = (0.485, 0.456, 0.406)
    """Of each channel, values being 0..1; a model of one channel takes the average. Default: ImageNet's."""
    std: tuple[PositiveFloat, ...] = (0.229, 0.224, 0.225)
    """The same, of their standard deviation."""
    cache_bytes: Annotated[int, Field(ge=0, strict=True)] = 2**28
    """Decoded images that a rank keeps in host memory, at most."""


@spec
class Glue:
    """A task of the GLUE benchmark as distributed: FOLDER/train.tsv, dev.tsv."""

    kind: Literal["glue"]
    """The form of this table."""
    folder: str
    """Beside the scenario."""
    task: GlueTask
    """Its name in the benchmark."""
    split: str = "train"
    """Which file: SPLIT.tsv (of MNLI also `dev_matched`, `dev_mismatched`)."""
    tokenizer: str | None = None
    """A `tokenizer.json`; by default a token is a byte."""

    def __post_init__(self) -> None:
        """Refuse the task that has no classes."""
        if self.task == "STS-B":
            raise ValueError("task = 'STS-B': its labels are scores (a regression), the loss here is of classes")


@spec
class TextFolder:
    """Text files below a folder, one stream of tokens: .txt (a document each), .jsonl (a line each, field `text`)."""

    kind: Literal["text-folder"]
    """The form of this table."""
    folder: str
    """Beside the scenario."""
    tokenizer: str | None = None
    """A `tokenizer.json`; by default a token is a byte."""
    cache: str | None = None
    """Folder for the file of tokens that is made once and then mapped; the user's cache folder by default."""


def _kind_of(value: Any) -> Any:
    """Return which of the forms a user's value has, as a tag for pydantic; in brackets: no key of the file."""
    if isinstance(value, dict):
        return value.get("kind")
    return "[name]" if isinstance(value, str) else getattr(value, "kind", None)


Data = Annotated[
    Annotated[Literal["auto", "stdlib-bytes", "digits"], Tag("[name]")]
    | Annotated[ImageFolder, Tag("image-folder")]
    | Annotated[Glue, Tag("glue")]
    | Annotated[TextFolder, Tag("text-folder")],
    Discriminator(
        _kind_of,
        custom_error_type="data_kind",
        custom_error_message="Must be 'auto', 'stdlib-bytes', 'digits', or a table with "
        "kind = 'image-folder', 'glue' or 'text-folder'",
    ),
]
PATHS = ("folder", "tokenizer", "cache")
"""Keys of the tables that name files and folders."""
