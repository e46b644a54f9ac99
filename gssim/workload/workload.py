"""What is trained, on how much at a time, and how."""

from typing import Annotated, Literal

from pydantic import Field

from gssim.data import Data, Glue, ImageFolder, TextFolder
from gssim.units import NonNegativeFloat, PositiveFloat, PositiveInt, Precision, limited, spec
from gssim.workload.model import ImageInput, Model, TokenInput


@spec
class Workload:
    """What is trained, on how much at a time, and how."""

    model: Model
    """A model file (`gsreal trace`), or its table."""
    gradients: str | None = None
    """Gradient statistics file: needed where a threshold is set."""
    global_batch_size: Annotated[PositiveInt, limited("samples")]
    """Samples of one step, of all ranks together."""
    sequence_length: Annotated[PositiveInt, limited("sequence_length")] | None = None
    """Tokens of a sample; models of tokens need it, others have none."""
    precision: Precision = "fp32"
    """`bf16`, `fp16`: parameters, activations and gradients in it, and an fp32 master copy that the optimizer updates.
    `fp16` is predicted only: a real run would have to scale its loss."""
    optimizer: Literal["sgd", "sgd-momentum", "adam", "adamw"] = "adamw"
    """As torch has them."""
    optimizer_implementation: Literal["default", "for-loop", "foreach", "fused"] = "default"
    """Which of torch's: `default` is foreach on CUDA, for-loop on a CPU and fused on a TPU, where XLA compiles the
    update; they differ in memory and time."""
    learning_rate: PositiveFloat = 1e-3
    """Constant over the run."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Of sgd-momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """As the optimizer has it: decoupled in adamw."""
    data: Data = "auto"
    """`auto`: bytes of the Python standard library's source for tokens, scikit-learn's digits for images."""

    def __post_init__(self) -> None:
        """Refuse shapes and data that the model cannot take."""
        source = self.model.input
        if not isinstance(self.data, str) and (task := _task_of(self.data, source)) != source.task:
            raise ValueError(f"data.kind = '{self.data.kind}': is for {task}, the model's task is {source.task}")
        if isinstance(source, ImageInput):
            if self.sequence_length is not None:
                raise ValueError("sequence_length: a model of images takes none")
            return
        if self.sequence_length is None:
            raise ValueError("sequence_length: missing; a model of tokens needs it")
        if self.sequence_length > source.maximum_sequence_length:
            raise ValueError(
                f"sequence_length = {self.sequence_length}: the model takes at most {source.maximum_sequence_length}"
            )
        if not self.model.exact_sequence and self.sequence_length not in self.model.traced_sequence_lengths:
            raise ValueError(
                f"sequence_length = {self.sequence_length}: the model was traced only at "
                f"{', '.join(map(str, self.model.traced_sequence_lengths))}"
            )


def _task_of(data: ImageFolder | Glue | TextFolder, source: TokenInput | ImageInput) -> str:
    """Return the task that the data are for; text serves two."""
    if isinstance(data, TextFolder):
        return source.task if source.task in TEXT_TASKS else " or ".join(TEXT_TASKS)
    return "classification" if isinstance(data, ImageFolder) else "sequence-classification"


TEXT_TASKS = ("next-token", "masked-token")
