"""The workload of a scenario: model, batch, precision, optimizer, and the data to train on."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gssim.units import PRECISION_BYTES, NonNegativeFloat, PositiveFloat, PositiveInt, Precision, limited, spec
from gssim.workload.fused_loss import with_fused_loss
from gssim.workload.model import (
    Adapters,
    ImageInput,
    Model,
    UntracedLayersError,
    filed_as,
    in_precision,
    under_autocast,
    with_adapters,
)
from gssim.workload.optimizers import Optimizer, StatePrecision
from gssim.workload.owned import with_frozen_layers
from gssim.workload.quantized import FrozenPrecision

GlueTask = Literal["CoLA", "SST-2", "MRPC", "QQP", "STS-B", "MNLI", "QNLI", "RTE", "WNLI"]
Mean = Annotated[float, Field(allow_inf_nan=False, strict=True)]


@spec
class ImageFolder:
    """Images in a folder per class, as ImageNet is distributed: FOLDER/CLASS/NAME.JPEG, or FOLDER/SPLIT/CLASS/..."""

    kind: Literal["image-folder"]
    """The form of this table."""
    folder: str
    """Path relative to the scenario."""
    split: str = "train"
    """Subfolder that holds the classes; `folder` itself if it has no subfolder of this name."""
    augment: bool = False
    """Random resized crop and horizontal flip; otherwise the shorter side is resized and the centre cropped."""
    mean: tuple[Mean, ...] = (0.485, 0.456, 0.406)
    """Mean of each channel, for values from 0 to 1; a model of one channel takes the average. Default: ImageNet's."""
    std: tuple[PositiveFloat, ...] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, likewise."""
    cache_bytes: Annotated[int, Field(ge=0, strict=True)] = 2**28
    """Largest cache of decoded images in a rank's host memory."""


@spec
class Glue:
    """A task of the GLUE benchmark as distributed: FOLDER/train.tsv, dev.tsv."""

    kind: Literal["glue"]
    """The form of this table."""
    folder: str
    """Path relative to the scenario."""
    task: GlueTask
    """Name of the task in the benchmark."""
    split: str = "train"
    """File to use: SPLIT.tsv (of MNLI also `dev_matched`, `dev_mismatched`)."""
    tokenizer: str | None = None
    """A `tokenizer.json`; by default a token is a byte."""

    def __post_init__(self) -> None:
        """Refuse the regression task."""
        if self.task == "STS-B":
            raise ValueError("task = 'STS-B': its labels are scores (a regression), the loss here is of classes")


@spec
class TextFolder:
    """Text files below a folder, one stream of tokens: .txt (a document each), .jsonl (one per line, field `text`)."""

    kind: Literal["text-folder"]
    """The form of this table."""
    folder: str
    """Path relative to the scenario."""
    tokenizer: str | None = None
    """A `tokenizer.json`; by default a token is a byte."""
    cache: str | None = None
    """Folder for the tokenised file, which is written once and then mapped; default: the user's cache folder."""


def _kind_of(value: Any) -> Any:
    """Return the tag of a user's value for pydantic's union; in brackets, as it is no key of the file."""
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


@spec
class ExpertLoad:
    """Load of the routed experts of each layer, in one of these forms."""

    skew: PositiveFloat | None = None
    """Expert i (from 1) has a load proportional to i to the power of -skew (Zipf's law)."""
    shares: tuple[NonNegativeFloat, ...] | None = None
    """Load of each expert, the same in every layer; normalised to a sum of 1."""
    layers: dict[str, tuple[NonNegativeFloat, ...]] | None = None
    """Load of each expert by layer (the path of its module): the form of measured loads."""

    def __post_init__(self) -> None:
        """Refuse a table with none of the forms, or with several."""
        if sum(form is not None for form in (self.skew, self.shares, self.layers)) != 1:
            raise ValueError("exactly one of skew, shares and layers is needed")

    def __hash__(self) -> int:
        """Return a hash of the loads, also of those by layer: loads are parts of the keys of caches."""
        return hash((self.skew, self.shares, frozenset((self.layers or {}).items())))


Load = Annotated[
    Annotated[Literal["balanced"], Tag("[name]")] | Annotated[ExpertLoad, Tag("[table]")],
    Discriminator(lambda value: "[name]" if isinstance(value, str) else "[table]"),  # in brackets: no keys of the file
]
PATHS = ("folder", "tokenizer", "cache")
"""Keys of the tables that name files and folders."""


@spec
class Workload:
    """Model, batch, precision, optimizer and data of a training."""

    model: Model
    """A model file (`gsreal trace`), the name of a shipped one (`gssim models`), or its table."""
    gradients: str | None = None
    """Gradient statistics file, used where a threshold is set: measured by `gsreal gradients` on this model and
    workload. Absent, or `transferred`: statistics of small models of the family, scaled to this one, with an error
    band."""
    global_batch_size: Annotated[PositiveInt, limited("samples")]
    """Samples per step, summed over all ranks."""
    sequence_length: Annotated[PositiveInt, limited("sequence_length")] | None = None
    """Tokens per sample; needed only for models of tokens."""
    precision: Precision = "fp32"
    """Precision of parameters, activations and gradients. With `bf16` and `fp16` the optimizer updates an fp32 master
    copy. A real run in `fp16` has to scale its loss: set `loss_scale`."""
    map_precision: Literal["fp8"] | None = None
    """`fp8`: the matrix products of the blocks' linear maps, forward and backward, run in 8 bits at the device's
    `float8_ratio` times the rate of `precision`, and their inputs and outputs are cast. Everything else, memory
    included, is unchanged (predicted only). Absent: they run in `precision`."""
    gradient_precision: Literal["fp32"] | None = None
    """Precision in which replicas keep gradients until the update; absent: `precision`. `fp32` beside 16-bit parameters
    is Megatron-LM's main_grad. Messages keep `precision` unless `reduce_precision` says otherwise; memory is that of
    fp32, and the update casts no gradients (predicted only)."""
    reduce_precision: Precision | None = None
    """Precision in which gradients are reduced over replicas or shards; absent: `precision`. It is FSDP2's
    `reduce_dtype`. DistributedDataParallel casts each bucket to a copy in it, sums the copy, and casts the sum back
    into the bucket. Gradient Sharding pushes in `precision`, and its owners sum in the optimizer's precision: there
    `fp32` changes nothing.
    """
    autocast: Literal["bf16", "fp16"] | None = None
    """Automatic mixed precision (torch.autocast): matrix products and attention of the forward, and so of the backward,
    run in this precision. Parameters, gradients and their messages stay in `precision`, which must be fp32. Beside
    `plan.tp`, sums of outputs are exchanged in 16 bits, and so are queries, keys and values beside `plan.cp`; products
    of routed experts stay in fp32, as torch does not cast them. With `fp16` set `loss_scale` (torch's GradScaler).
    Absent: everything runs in `precision`."""
    tf32: bool = False
    """Matrix products of fp32 values in TF32, on GPUs that have it (torch.backends.cuda.matmul.allow_tf32). Only the
    rate of the products changes."""
    loss_scale: Literal["dynamic"] | PositiveFloat | None = None
    """Factor on the loss of a training in fp16 or under fp16 autocast. Before the update, gradients are checked for
    infinities and divided by it. `dynamic`: torch's GradScaler (it starts at 65536, is halved when a gradient is
    infinite, whose step is skipped, and doubled after 2000 other steps); predictions have no skipped steps. Absent: no
    scaling.
    """
    optimizer: Optimizer = "adamw"
    """Optimizer, as in torch. `muon`: torch.optim.Muon for the matrices of the model's blocks, with a learning rate
    scaled by their shape so that AdamW's fits (`match_rms_adamw`), and AdamW for everything else. It needs whole
    matrices, so methods that shard them refuse it. With plan.zero1_implementation = `megatron` it is Megatron-LM's
    layer-wise distributed optimizer: each matrix (also of experts) is updated by one rank, everything else in even
    parts."""
    optimizer_implementation: Literal["default", "for-loop", "foreach", "fused"] = "default"
    """Implementation in torch; they differ in memory and time. `default` is foreach on CUDA, for-loop on a CPU, and
    fused on a TPU, where XLA compiles the update. For `muon`, the implementation of its AdamW."""
    optimizer_state_precision: StatePrecision | None = None
    """Precision of the two moments of adam and adamw; absent: that of the master copy. `8-bit`: one byte per value and
    an fp32 scale for each block of 256, as in the Adam of bitsandbytes and torchao; tensors of fewer than 4096 elements
    stay in fp32. `4-bit`: half a byte per value, in blocks of 128. Predicted only. It needs `optimizer_implementation =
    "fused"`: one kernel updates a tensor."""
    learning_rate: PositiveFloat = 1e-3
    """Learning rate, constant over the run."""
    momentum: Annotated[float, Field(ge=0, lt=1, strict=True)] = 0.9
    """Momentum of sgd-momentum, and Nesterov momentum of muon. sgd-momentum with 0 is sgd: torch keeps no momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay as the optimizer defines it: decoupled in adamw."""
    clip_norm: PositiveFloat | None = None
    """Largest norm of all gradients; larger ones are scaled down to it before the update. Absent: no clipping."""
    adapters: Adapters | None = None
    """Low-rank adapters (LoRA), the only trained parameters; absent: all parameters are trained."""
    frozen: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Layers of the model file that are not trained, as patterns of their modules' paths, such as `["transformer.wte",
    "transformer.h.[0-5]"]`. No parameter of such a layer gets a gradient or optimizer state (position embeddings belong
    to the embedding layer), and there is no backward below the first trained layer. Beside `plan.tp`, `plan.cp` or
    `plan.ep`, and for Hugging Face's decoders, the model file needs the costs that `gsreal trace FILE --frozen --out
    NEW` adds. Refused: tied embeddings, adapters, autocast, thresholds of pushes and publications. Absent: all are
    trained."""
    fused_loss: bool = False
    """Compute the loss together with the head, tile by tile (cut cross-entropy). The logits of a batch are then never
    in memory; the backward computes them once more (predicted only)."""
    frozen_precision: FrozenPrecision | None = None
    """Format of the frozen weights of the blocks' linear maps; absent: `precision`. `nf4`: 4 bits, with an fp32 scale
    for each 64 values. `nf4-double`: these scales in 8 bits. `int8`: 8 bits, with a scale for each row. Each forward
    and backward multiplies by a copy in `precision` (QLoRA; predicted only). Needs `adapters` or `frozen`."""
    expert_load: Load = "balanced"
    """Load of routed experts if `plan.ep` divides them: `balanced`, a table, or the name of a TOML or JSON file of that
    table. The rank with the most rows sets the time of a layer."""
    expert_routing: Literal["router", "load"] = "router"
    """How a real run chooses each token's experts. `router`: by the model's router, as the data have it. `load`: so
    that each sample has exactly `expert_load`, whatever the router says (the router's weights then apply to the chosen
    experts). If ranks divide sequences and experts (`plan.cp`, or `plan.tp` with `plan.etp = 1`, beside `plan.ep`),
    each part of a sample has that load, so the training differs from that on one device, which applies it to the whole
    sample. A prediction is of `expert_load` in both: rows and peaks of a run with `router` differ as the router's load
    does."""
    data: Data = "auto"
    """Training data; `auto`: for tokens bytes of Python's standard library, scikit-learn's digits for images."""

    def __post_init__(self) -> None:
        """Refuse shapes and data that do not fit the model."""
        if self.optimizer == "sgd-momentum" and self.momentum == 0:
            object.__setattr__(self, "optimizer", "sgd")
        self._choose_precision()
        source = self.model.input
        if not isinstance(self.data, str) and source.task not in (tasks := TASKS[self.data.kind]):
            allowed = " or ".join(tasks)
            raise ValueError(f"data.kind = '{self.data.kind}': is for {allowed}, the model's task is {source.task}")
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

    def _choose_precision(self) -> None:
        """Select the model's layers of the precision, and of these what else the workload states.

        Identities are those of the layers that the model's file has in its own precision.
        """
        given = self.model
        filed = given.in_file_precision
        same_kernels = given if given.runs_fused_kernels else filed
        own_on_gpus = filed.fused_kernels is not None and not filed.fused_kernels.layers
        if self.autocast is not None:
            traced = same_kernels
        elif own_on_gpus and PRECISION_BYTES[filed.traced_precision] == PRECISION_BYTES[self.precision]:
            traced = filed
        elif PRECISION_BYTES[given.traced_precision] == PRECISION_BYTES[self.precision]:
            traced = given
        else:
            traced = in_precision(same_kernels, self.precision)
        own = self._with_stated_layers(filed)
        if traced is not filed:
            try:
                chosen = filed_as(self._with_stated_layers(traced), own)
            except UntracedLayersError:  # they were traced in the file's own precision alone
                chosen = own
            object.__setattr__(self, "model", chosen)

    def _with_stated_layers(self, model: Model) -> Model:
        """Set the workload's model to `model` with the layers for its precision, training and loss; return that."""
        object.__setattr__(self, "model", model)
        self._choose_layers()
        self._freeze_layers()
        if self.fused_loss:
            object.__setattr__(self, "model", with_fused_loss(self.model))
        elif self.model.loss_fused:
            raise ValueError("fused_loss: missing; head and loss of the model are fused")
        return self.model

    @property
    def scaled_bytes(self) -> str | None:
        """What a reader has to know of bytes that are scaled from another precision; None if none are."""
        model, precision = self.model, self.precision
        if PRECISION_BYTES[precision] == PRECISION_BYTES[model.traced_precision]:
            return None
        return (
            f"memory is uncertain: '{model.name}' is traced in {model.traced_precision}, not in {precision}, so its "
            "bytes are scaled, also of what modules compute in fp32 whatever the precision; peaks were 0.3 % off for "
            "plain GPTs, 3 to 9 % for Llama, Mixtral and Qwen, and 27 % at most for tiny models; `gsreal trace FILE "
            f"--precision {model.traced_precision} --precision {precision} --out NEW` records both"
        )

    def _choose_layers(self) -> None:
        """Select the model's layers with adapters, or under autocast; refuse them if they do not fit the precision."""
        if self.autocast is not None:
            if self.precision != "fp32":
                raise ValueError(f"autocast = '{self.autocast}': needs precision = 'fp32', not '{self.precision}'")
            if self.adapters is not None:
                raise ValueError(f"autocast = '{self.autocast}': cannot run yet beside adapters; leave one out")
            object.__setattr__(self, "model", under_autocast(self.model, self.autocast))
        elif self.model.traced_autocast is not None:
            raise ValueError(f"autocast: missing; the model is traced under autocast in {self.model.traced_autocast}")
        if self.tf32 and self.precision != "fp32":
            raise ValueError(f"tf32 = true: for matrix products in fp32, precision = '{self.precision}'; leave it out")
        if self.adapters is not None:
            object.__setattr__(self, "model", with_adapters(self.model, self.adapters))
        elif self.model.module.adapters is not None:
            raise ValueError("adapters: missing; the model has adapters")

    def _freeze_layers(self) -> None:
        """Replace the model by the one with frozen layers; refuse adapters and autocast beside them."""
        if self.frozen_precision is not None and self.adapters is None and self.frozen is None:
            raise ValueError(f"frozen_precision = '{self.frozen_precision}': needs adapters or frozen layers")
        if self.frozen is None:
            if self.model.module.frozen is not None:
                raise ValueError("frozen: missing; layers of the model are frozen")
            return
        if self.adapters is not None:
            raise ValueError("frozen: adapters freeze all else already; leave one out")
        if self.autocast is not None:
            raise ValueError(f"autocast = '{self.autocast}': cannot run yet beside frozen layers; leave one out")
        object.__setattr__(self, "model", with_frozen_layers(self.model, self.frozen))


TASKS = {
    "image-folder": ("classification",),
    "glue": ("sequence-classification",),
    "text-folder": ("next-token", "masked-token"),
}
"""Tasks for which each kind of data can be used."""
