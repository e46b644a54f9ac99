"""A traced model: its module, its input, and its layers.

[Note: units] For tensor parallelism, a block is cut among ranks in units: an attention head with its part of the
perceptron's columns, or the channels of a norm group. The layers of `Model.sliced_layers` are traced with their blocks
cut. Each quantity is a polynomial in b and s with two parts: one that every rank has, and one that counts once for each
of the u units on the rank. `gssim.scenario.tensor_slices` turns them into ordinary layers.

[Note: sequence parts] With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) the ranks that share sliced
blocks also divide every sequence between these blocks: norms, dropouts and residuals run on p positions of each
sequence. Instead of all-reduces, the inputs of the first linear maps are all-gathered, and the outputs of the last ones
reduce-scattered. Parameters in between (norms) have gradients of the rank's positions only, which are summed over the
ranks after the backward. The layers of `Model.sequence_layers` are traced so.

[Note: context] With context parallelism ranks divide sequences from the embedding to the loss, and each layer runs on p
positions of each sequence. Only attention needs the other positions. By all-to-alls (Jacobs et al. 2023, DeepSpeed
Ulysses, arXiv 2309.14509) each rank gets all positions for its part of the heads, and gives the outputs back. Whole
sequences times a part of the heads are as much as a part of the sequences times all heads, so quantities depend on p
and on p*s, whatever the number of ranks. The layers of `Model.context_layers` are traced so; `units` of a block is the
number of heads with keys and values of their own. Layers that are not traced may state `ring` reductions instead, right
after the attention of each pass, with the bytes of a rank's keys and values: they then run with rings alone
(`plan.context_exchange`).

[Note: experts of parts] If tensor-parallel ranks also divide routed experts, each routes the tokens of its own part of
the sequence. The router is whole on every rank, and its gradient is summed like those of norms. Attention, and experts
that process all tokens, are cut in units. The layers of `Model.expert_sequence_layers` are traced so: a rank has u
units, p positions, and e experts, which process r rows.

[Note: adapters] With low-rank adapters (Hu et al. 2021, LoRA, arXiv 2106.09685) only these are trained. All other
parameters are frozen: they get no gradient, and nothing is saved for one. All costs of adapters are linear in their
LoRA rank, so the layers of `AdaptedLayers` are traced with two ranks, and u is the rank. The backward ends at the first
block; embeddings have none. If context-parallel ranks divide sequences, the costs of adapters grow with the rank times
the positions of a part. What an attention exchanges in its backward depends on which of its inputs get a gradient, so
these layers are traced separately. So are layers with blocks cut among ranks: costs beside the cut columns or rows of a
map grow with the units, and all ranks have partial gradients of the adapters' whole matrices. Divided routed experts
are frozen: ranks exchange rows and gradients of rows, but no gradients of weights. Beside cut blocks and divided
experts, routers that have adapters are not traced: their costs grow with the rank times the positions of a part.

[Note: autocast] Under torch.autocast (automatic mixed precision) parameters, their gradients and the residual stream
stay in fp32, while operands of matrix products and attention are cast to 16 bits. The cast of a weight is saved for the
backward like an activation. Casts that the backward does not need (of biases) live to the end of the forward, but are
counted to the end of their layer's forward. The gradients that embedding and head give to a shared weight need no third
tensor for their sum under autocast, where the head's is a cast. They do in fp32, where it is a view; see [Note: sums in
place] in `gssim.workload.layer`. Layers are traced with the lists of operations that torch has for a CPU. On CUDA
losses and norms run in fp32, which adds an fp32 copy of the logits. Layers that ranks divide are traced under autocast
too. Partial sums of maps that are cut by rows are then exchanged in 16 bits, and so are queries, keys and values under
context parallelism. Gradients of the inputs of maps that are cut by columns, parts of sequences that are gathered, and
rows of experts are exchanged in fp32. Torch's grouped product, of routed experts, is not cast: it runs in fp32.

[Note: operand casts] A CPU has no kernels for operands of two data types. A sum of a tensor in fp32 and one in 16 bits
first copies the latter to fp32, as every elementwise operation does with each of its operands, whole
(`gsreal.model_files.operand_casts`). Under autocast this happens where a block's output in 16 bits is added to the
residual stream, which is the peak of the first stage of a pipeline. The copies are buffers of the category
`operand-casts`. They count on CPUs alone, and not where a profile has the measured workspaces of kernels, which include
them. Older model files lack them, the shipped ones among these.

[Note: precisions] Bytes in 16 bits are not half of those in fp32. A norm that computes in fp32 makes two more copies of
its input then, attention keeps its log-sum-exp in fp32, and kernels have other workspaces. So a model is traced in
fp32 and in bf16, and a workload takes the layers of its own precision. Only if a file lacks them, the bytes of its
layers are scaled. Then what runs in fp32 whatever the precision is wrong, which `Workload.scaled_bytes` says.

[Note: fused kernels] Models are traced as a CPU runs them. With dropout, attention runs as separate operations there:
the scores, the dropout mask and the probabilities of each head have b*s^2 elements, and three such tensors are saved. A
CUDA GPU runs such attention as one kernel, which saves queries, keys, values, the output, the fp32 log-sum-exp of each
query, and the state of the random generator. The mask of any other dropout has one byte for each element on a GPU; on a
CPU, it has the precision of the input. A model with such operations is traced a second time as a GPU runs it, into
`fused_kernels`. These layers are used if all devices of a cluster are CUDA GPUs. Attention that the module computes
itself (Hugging Face's `eager`) consists of separate operations on GPUs too. Without dropout, only heads whose width is
no multiple of 8 differ: in 16 bits, a GPU's flash attention copies queries, keys and values to padded ones, and cuts
off the padding of the output. Such a model has layers of GPUs for 16 bits alone, and its own in fp32.

The kernels are those that torch chooses on compute capability 8.0 and above. Older GPUs run memory-efficient attention
where those run flash attention in fp16, which keeps 8 bytes less. They have no products in bf16, and would run it as
separate operations; but presets state no rate for it, so that such a scenario is refused. AMD's GPUs, which torch also
calls CUDA devices, have kernels of the same two kinds (AOTriton) and are predicted alike; none was measured. On a
`tpu`, attention is predicted as on a CPU, and a Result says so.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from gssim.execution.cache import cached_by_identity
from gssim.units import (
    PRECISION_BYTES,
    Count,
    PositiveFloat,
    PositiveInt,
    Precision,
    Recompute,
    excess,
    omits_defaults,
    shown_value,
    spec,
)
from gssim.workload.layer import Layer, LayerRoles, Parameter, layer_of_rank, sliced_layer

DIVIDED_LISTS = ("sliced_layers", "sequence_layers", "expert_layers", "expert_sequence_layers", "context_layers")
"""Fields of a model with layers of which ranks have a part."""
LAYER_LISTS = ("layers", *DIVIDED_LISTS)
"""Fields of a model with layers: whole ones, and those of which ranks have a part."""


@spec
class HuggingFace:
    """A Hugging Face architecture, built from its config alone: no weights are loaded."""

    model_type: str
    """Architecture as in `AutoConfig.for_model`, for example `gpt2`."""
    auto_class: str = "AutoModelForCausalLM"
    """Class of transformers that builds a model from the config."""
    config: dict[str, Any] = field(default_factory=dict)
    """Differences from the architecture's default config. `use_cache` is off; a hub's code and weights are refused."""
    null: tuple[str, ...] = ()
    """Keys of the config that are null, where the architecture's default is not, such as DeepSeek's `q_lora_rank`."""

    @property
    def settings(self) -> dict[str, Any]:
        """The differences from the default config, those that are null as None."""
        return self.config | dict.fromkeys(self.null)

    _serialized = omits_defaults("null")


Targets = Literal["query-value", "all-linear"] | tuple[str, ...]


@spec
class Adapters:
    """Low-rank adapters (LoRA) beside linear maps of the blocks: only they are trained, everything else is frozen."""

    rank: PositiveInt
    """LoRA rank r of each adapter, whose two matrices are r x inputs and outputs x r."""
    alpha: PositiveFloat = 16.0
    """The output of an adapter is scaled by alpha / rank."""
    targets: Targets = "query-value"
    """Linear maps that get an adapter. `query-value`: those of queries and values in the attention (or the fused one);
    `all-linear`: all in the blocks; or a list of the last parts of their paths, such as `["q_proj", "v_proj"]`."""


@spec
class Module:
    """Source of the real module: a factory by its dotted path, or a Hugging Face config."""

    factory: str | None = None
    """Dotted path of a callable that returns the module. `gsreal` calls those of `gsreal.models` and
    `transformers.models`, and any other with `--trust-code`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    hugging_face: HuggingFace | None = None
    """A Hugging Face architecture, instead of a factory."""
    adapters: Adapters | None = None
    """Adapters that are added to it; `workload.adapters` sets them."""
    frozen: tuple[str, ...] | None = None
    """Names of parameters that are not trained; `workload.frozen` sets them."""

    def __post_init__(self) -> None:
        """Refuse a table with neither or both of factory and hugging_face."""
        if (self.factory is None) == (self.hugging_face is None):
            raise ValueError("exactly one of factory and hugging_face is needed")

    _serialized = omits_defaults("adapters", "frozen")


@spec
class TokenInput:
    """Token ids of shape (batch, sequence)."""

    kind: Literal["tokens"]
    """The form of this table."""
    vocabulary: PositiveInt
    """Number of tokens."""
    task: Literal["next-token", "masked-token", "sequence-classification"] = "next-token"
    """Task of the loss: the next token at each position, masked tokens, or the class of a sequence."""
    maximum_sequence_length: PositiveInt
    """Longest sequence that the model accepts."""
    classes: PositiveInt | None = None
    """Number of classes, for sequence classification only."""
    padding: Count | None = None
    """Padding token for sequence classification, which the model ignores; absent: it attends to all tokens."""

    def __post_init__(self) -> None:
        """Refuse classes without a task that has them, and the reverse."""
        if (self.task == "sequence-classification") != (self.classes is not None):
            given = "" if self.classes is None else f" = {self.classes}"
            raise ValueError(f"classes{given}: needed with task = 'sequence-classification', and only there")
        if self.padding is not None and self.classes is None:
            raise ValueError(f"padding = {self.padding}: only for task = 'sequence-classification'")
        if self.padding is not None and self.padding >= self.vocabulary:
            raise ValueError(f"padding = {self.padding}: not in the vocabulary of {self.vocabulary} tokens")


@spec
class ImageInput:
    """Images of shape (batch, channels, height, width), to be classified."""

    kind: Literal["image"]
    """The form of this table."""
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Shape of one image: channels, height, width."""
    classes: PositiveInt
    """Number of classes."""
    task: Literal["classification"] = "classification"
    """Task of the loss."""


@spec
class _TracedLayers:
    """All layers of a model, traced once undivided and once for each way in which ranks can divide them."""

    layers: tuple[Layer, ...]
    """Layers in the order of the forward."""
    context_layers: tuple[Layer, ...] = ()
    """The layers with whole blocks on parts of the sequences, see [Note: context]; empty: not traced so."""
    sliced_layers: tuple[Layer, ...] = ()
    """The layers with their blocks cut among ranks, see [Note: units]; empty: not traced so."""
    sequence_layers: tuple[Layer, ...] = ()
    """`sliced_layers` with sequences also divided among these ranks, see [Note: sequence parts]; empty: not traced so.
    """
    expert_layers: tuple[Layer, ...] = ()
    """The layers with their routed experts divided among ranks, see [Note: routed rows]; empty: not traced so."""
    expert_sequence_layers: tuple[Layer, ...] = ()
    """`sequence_layers` with routed experts divided too, see [Note: experts of parts]; empty: not traced so."""


@spec
class AdaptedLayers(_TracedLayers):
    """All layers of a model with adapters beside some of its linear maps, see [Note: adapters].

    Sizes are functions of the adapters' LoRA rank too: of whole layers as u, of cut ones as a, beside their units u.
    """

    role: Literal["query-value", "all-linear"] | None = None
    """Value of `workload.adapters.targets` that selects these maps; absent: only their names select them."""
    maps: tuple[str, ...]
    """Names of the maps: the last parts of their paths."""


@spec
class AutocastLayers(_TracedLayers):
    """All layers of a model with fp32 parameters whose forward runs under torch.autocast, see [Note: autocast]."""

    precision: Literal["bf16", "fp16"]
    """Precision of matrix products and attention."""


@spec
class PartlyTrained:
    """Costs of a model's layers where only some of them are trained, for each way in which ranks divide the model.

    Entries are those of the model's field of the same name, in order; see [Note: roles] in `gssim.workload.owned`.
    """

    layers: tuple[LayerRoles, ...] = ()
    """Of undivided layers; empty: not traced, or `Model.layers` have these costs themselves."""
    context_layers: tuple[LayerRoles, ...] = ()
    """Of layers on parts of the sequences, see [Note: context]; empty: not traced so."""
    sliced_layers: tuple[LayerRoles, ...] = ()
    """Of layers with their blocks cut among ranks, see [Note: units]; empty: not traced so."""
    sequence_layers: tuple[LayerRoles, ...] = ()
    """Of these with sequences divided too, see [Note: sequence parts]; empty: not traced so."""
    expert_layers: tuple[LayerRoles, ...] = ()
    """Of layers with their routed experts divided, see [Note: routed rows]; empty: not traced so."""
    expert_sequence_layers: tuple[LayerRoles, ...] = ()
    """Of layers with sequences and routed experts divided, see [Note: experts of parts]; empty: not traced so."""

    _serialized = omits_defaults(*LAYER_LISTS)


@spec
class OtherPrecision(_TracedLayers):
    """All layers of a model as traced in another precision than `Model.traced_precision`, see [Note: precisions]."""

    precision: Precision
    """Precision of the trace; traces in bf16 are taken for fp16 too."""
    adapted: tuple[AdaptedLayers, ...] = ()
    """The layers with trained adapters and all else frozen, for each traced choice of maps."""
    partly_trained: PartlyTrained | None = None
    """Costs of the layers where only some of them are trained; absent: not traced."""

    _serialized = omits_defaults(*DIVIDED_LISTS, "adapted", "partly_trained")


@spec
class FusedKernels(_TracedLayers):
    """Layers as CUDA GPUs run them, where they have kernels that a CPU lacks, see [Note: fused kernels].

    There are those of each trace that differs: in the model's own precision (with all that depends on it but autocast),
    under autocast in each precision, and in each other precision. The others are the model's.
    """

    layers: tuple[Layer, ...] = ()
    """Layers in the order of the forward. Empty: the trace found that GPUs run the model's own, in its precision."""
    adapted: tuple[AdaptedLayers, ...] = ()
    """The layers with trained adapters and all else frozen, for each traced choice of maps."""
    autocast: tuple[AutocastLayers, ...] = ()
    """The layers under torch.autocast, for each traced precision in which they differ."""
    partly_trained: PartlyTrained | None = None
    """Costs of the layers where only some of them are trained; absent: not traced."""
    other_precisions: tuple[OtherPrecision, ...] = ()
    """The layers as traced in other precisions than the model's `traced_precision`, if they differ there."""

    def __post_init__(self) -> None:
        """Refuse lists that belong to layers without these: they would be ignored."""
        given = [name for name in (*DIVIDED_LISTS, "adapted", "partly_trained") if getattr(self, name)]
        if given and not self.layers:
            raise ValueError(f"layers: missing, though {given[0]} is there")

    _serialized = omits_defaults(*LAYER_LISTS, "adapted", "autocast", "partly_trained", "other_precisions")


OWN_LAYERS = "_in_file_precision"
"""Field of a model that no file can set; a Result's copy of its scenario holds it. See `Model.in_file_precision`."""


def _refuse_from_file(value: object) -> object:
    """Return a model, or None; raise the error of an unknown key for anything else, which can only be from a file."""
    if value is None or isinstance(value, Model):
        return value
    raise PydanticCustomError("unexpected_keyword_argument", "Unexpected keyword argument")


@spec
class Model:
    """A model as traced from its real module; see `gsreal trace`."""

    name: str
    """Name, which profiles and gradient statistics refer to."""
    source: str
    """Origin of the trace, with versions."""
    module: Module
    """Source of the real module."""
    input: Annotated[TokenInput | ImageInput, Field(discriminator="kind")]
    """Form of a batch."""
    traced_precision: Precision = "fp32"
    """Precision of the traced bytes. A workload in another one takes the layers that `other_precisions` has for it, or
    else these bytes scaled: buffers of integers and masks keep their size, and what modules compute in fp32 whatever
    the precision is scaled too, by which peaks of small models were up to 27 % off. A Result says where bytes are
    scaled."""
    traced_batch_sizes: tuple[PositiveInt, ...]
    """Batch sizes to which the polynomials are fitted; they give all others."""
    traced_one_sample: bool = False
    """Whether steps of one sample were traced too, whose buffers differ: torch copies fewer tensors then. If false, the
    polynomials give them: a GPT-2 with dropout, whose attention has no fused kernel on a CPU, has peaks 1.4 to 3.5 %
    over those predicted where a micro-batch has one sample. It is not said of layers under autocast: if they
    were traced with one sample too, their buffers are marked (`samples=1`, `samples>1`)."""
    traced_sequence_lengths: tuple[PositiveInt, ...] = ()
    """Traced sequence lengths, for models of tokens."""
    exact_sequence: bool = True
    """False if the dependence on the sequence length is not a polynomial; then only `traced_sequence_lengths` may be
    used.
    """
    compiled: bool = False
    """Whether each block is compiled by itself with torch.compile (inductor); `layers` are then of such blocks."""
    compiled_recompute: Recompute = "none"
    """What compiled blocks recompute inside their graphs, as in torchtitan; torch fuses it with the backward.
    `plan.recompute` recomputes whole graphs instead, and explains each of these words."""
    loss_fused: bool = False
    """Whether head and loss are fused; `workload.fused_loss` sets it."""
    buffer_bytes: tuple[Count, ...] = ()
    """Bytes of module buffers (not parameters), one number for each data type. DDP broadcasts them in every forward.
    Floating-point values are given in fp32, and are cast to a workload's precision like parameters."""
    buffer_values: tuple[Literal["floating-point", "integer"], ...] = ()
    """Kind of values of each of `buffer_bytes`; absent: all are floating-point."""
    layers: tuple[Layer, ...]
    """Layers in the order of the forward."""
    sliced_layers: tuple[Layer, ...] = ()
    """The layers with their blocks cut among ranks, see [Note: units]; empty: they cannot be cut."""
    uncut_reason: str | None = None
    """Why the blocks cannot be cut among ranks, with the module's name; absent: they can be, or it is not known."""
    unstaged_reason: str | None = None
    """Why a real run cannot cut the module into pipeline stages, with its class; absent: it can, or it is not known.
    Predictions need no stages of the real module."""
    sequence_layers: tuple[Layer, ...] = ()
    """`sliced_layers` with sequences divided among these ranks too, see [Note: sequence parts]; empty: not possible."""
    expert_layers: tuple[Layer, ...] = ()
    """The layers with their routed experts divided among ranks, see [Note: routed rows]; empty: not possible."""
    expert_tensor_ranks: PositiveInt = 1
    """Number of tensor ranks for which `expert_layers` are cut: their sizes, rows and sums are of one such rank."""
    expert_sequence_layers: tuple[Layer, ...] = ()
    """The layers with sequences divided as in `sequence_layers`, and routed experts divided among these ranks and
    others, see [Note: experts of parts]; empty: not possible."""
    context_layers: tuple[Layer, ...] = ()
    """The layers with whole blocks on parts of the sequences, see [Note: context]; empty: not possible."""
    adapted: tuple[AdaptedLayers, ...] = ()
    """The layers with trained adapters and all else frozen, for each traced choice of maps."""
    autocast: tuple[AutocastLayers, ...] = ()
    """The layers under torch.autocast, for each traced precision."""
    traced_autocast: Literal["bf16", "fp16"] | None = None
    """Precision of torch.autocast under which `layers` were traced; absent: traced without autocast."""
    partly_trained: PartlyTrained | None = None
    """Costs of the layers where only some of them are trained (`workload.frozen`) and ranks divide them; absent: not
    traced."""
    fused_kernels: FusedKernels | None = None
    """The layers as CUDA GPUs run them, where these have kernels that the traced CPU lacks: attention with dropout or
    padded heads, and masks of dropout. They are used if all devices of a cluster are CUDA GPUs. Absent: not traced, or
    the same layers.
    """
    runs_fused_kernels: bool = False
    """Whether `layers`, and the other lists, are those of `fused_kernels`; a cluster of CUDA GPUs sets it."""
    other_precisions: tuple[OtherPrecision, ...] = ()
    """The layers as traced in other precisions than `traced_precision`, for workloads in these."""
    whole_layers: tuple[Layer, ...] = ()
    """For a model with adapters or frozen layers: its layers without them, as profiles have them; else empty."""
    _in_file_precision: Annotated["Model | None", BeforeValidator(_refuse_from_file)] = None
    """For a model with the layers of one of `other_precisions` or of `fused_kernels`: the model with its file's own
    layers. Identities of scenarios are those of these layers, so a Result has them too; see `OWN_LAYERS`."""

    def __post_init__(self) -> None:
        """Refuse a model that is too large, and layers that share a name."""
        sizes = {
            "layers": sum(layer.repeats for layer in self.layers),
            "tensors": sum(layer.repeats * len(layer.parameters) for layer in self.layers),
            "elements": self.elements,
        }
        for name, size in sizes.items():
            if (why := excess(name, size)) is not None:
                raise ValueError(f"layers: {why}")
        for kind, names in (
            ("layers", [layer.name for layer in self.layers]),
            ("modules", [module for layer in self.layers for module in layer.modules]),
        ):
            twice = [name for name, times in Counter(names).items() if times > 1]
            if twice:
                raise ValueError(f"layers: two {kind} are named {twice[0]!r}; each needs a name of its own")
        if self.compiled_recompute != "none" and not self.compiled:
            raise ValueError(f"compiled_recompute = {self.compiled_recompute!r}: needs compiled = true")
        if self.buffer_values and len(self.buffer_values) != len(self.buffer_bytes):
            raise ValueError(f"buffer_values: needs one for each of the {len(self.buffer_bytes)} buffer_bytes")

    _serialized = omits_defaults(
        *("buffer_values", "expert_sequence_layers", "partly_trained", "expert_tensor_ranks"),
        *("compiled", "compiled_recompute", "loss_fused", "unstaged_reason", "other_precisions", OWN_LAYERS),
        *("traced_one_sample", "fused_kernels", "runs_fused_kernels"),
    )

    @property
    def in_file_precision(self) -> "Model":
        """The model with its file's own layers, in the precision of these; itself if it has no others."""
        return self._in_file_precision or self

    def buffer_sizes(self, value_bytes: int) -> tuple[int, ...]:
        """Return the bytes of the module buffers of each data type, if parameters have `value_bytes` per value."""
        values = self.buffer_values or ("floating-point",) * len(self.buffer_bytes)
        return tuple(
            size if kind == "integer" else size * value_bytes // PRECISION_BYTES["fp32"]
            for size, kind in zip(self.buffer_bytes, values, strict=True)
        )

    @property
    def has_unfused_attention(self) -> bool:
        """Whether blocks save tensors of b*s^2 elements, as attention in separate operations does.

        False for a model that was traced at one length only, whose sizes are no functions of s.
        """
        return any(power == 2 for layer in self.layers if layer.block for _, _, power in layer.saved_bytes.terms)

    @property
    def elements(self) -> int:
        """Trained parameters of the whole model."""
        return sum(layer.repeats * layer.elements for layer in self.layers)

    @property
    def frozen_elements(self) -> int:
        """Number of parameters that are not trained; `elements` does not count them."""
        return sum(layer.repeats * layer.frozen_elements for layer in self.layers)


@dataclass(frozen=True)
class LayerInstance:
    """One layer of the unrolled model: an entry of the model's layers, and the index of its repetition."""

    index: int
    layer: Layer
    repetition: int

    @property
    def module(self) -> str:
        """Dotted path of its module, or the layer's name where it has none."""
        return self.layer.modules[self.repetition] if self.layer.modules else self.layer.name

    def name_of(self, parameter: Parameter) -> str:
        """Return the full dotted name of one of its parameters."""
        return parameter.name.replace("{}", self.module)

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Full dotted names of its parameters."""
        return tuple(map(self.name_of, self.layer.parameters))

    @property
    def held_names(self) -> tuple[str, ...]:
        """`parameter_names`, followed by the names of parameters that are not trained."""
        return (*self.parameter_names, *map(self.name_of, self.layer.frozen_parameters))


def unrolled(model: Model) -> tuple[LayerInstance, ...]:
    """Return every layer of the model in forward order, repetitions one by one."""
    places = [(layer, repetition) for layer in model.layers for repetition in range(layer.repeats)]
    return tuple(LayerInstance(index, layer, repetition) for index, (layer, repetition) in enumerate(places))


def gradient_order(layers: Sequence[LayerInstance]) -> tuple[tuple[int, int], ...]:
    """Return (layer index, parameter index) of all parameters in the order in which gradients become ready."""
    ready = []
    for instance in layers:
        for number, parameter in enumerate(instance.layer.parameters):
            where = instance.index + parameter.ready.layer_offset
            ready.append((-where, parameter.ready.position, instance.index, number))
    return tuple((layer, number) for _, _, layer, number in sorted(ready))


class UntracedLayersError(ValueError):
    """A model lacks the layers with adapters, or the costs of frozen layers, that a workload asks for.

    If only its layers in the workload's precision lack these, the workload takes those of its file, with scaled bytes.
    """


LONGEST_OPTION = 60
"""Most characters of an option in a message that says which command helps."""


@cached_by_identity(maxsize=64)
def _with_adapters(whole: Model, rank: int, alpha: float, targets: Targets) -> Model:
    adapted = next((each for each in whole.adapted if targets in (each.role, each.maps)), None)
    if adapted is None:
        known = ", ".join(f"{each.role!r} ({', '.join(each.maps)})" for each in whole.adapted) or "none"
        option = targets if isinstance(targets, str) else ",".join(targets)
        if len(option) > LONGEST_OPTION or not re.fullmatch(r"[\w.,-]+", option):  # no command to be copied
            option = "NAME,..."
        raise UntracedLayersError(
            f"adapters.targets = {shown_value(targets)}: '{whole.name}' is not traced with adapters there; traced: "
            f"{known}; `gsreal trace FILE --adapters {option} --out NEW`, where FILE is the model's, adds them"
        )
    once: dict[int, Layer] = {}
    for layer in (*adapted.layers, *adapted.context_layers):
        held = sliced_layer(layer, rank, None)
        parameters = tuple(replace(parameter, sliced_dimension=None) for parameter in held.parameters)
        once[id(layer)] = replace(held, parameters=parameters)
    divided = (
        *adapted.sliced_layers,
        *adapted.sequence_layers,
        *adapted.expert_layers,
        *adapted.expert_sequence_layers,
    )
    once |= {id(layer): layer_of_rank(layer, rank) for layer in divided}
    return replace(
        whole,
        module=replace(whole.module, adapters=Adapters(rank=rank, alpha=alpha, targets=targets)),
        layers=tuple(once[id(layer)] for layer in adapted.layers),
        whole_layers=whole.layers,
        adapted=(),
        other_precisions=(),
        sliced_layers=tuple(once[id(layer)] for layer in adapted.sliced_layers),
        sequence_layers=tuple(once[id(layer)] for layer in adapted.sequence_layers),
        expert_layers=tuple(once[id(layer)] for layer in adapted.expert_layers),
        expert_sequence_layers=tuple(once[id(layer)] for layer in adapted.expert_sequence_layers),
        context_layers=tuple(once[id(layer)] for layer in adapted.context_layers),
    )


def with_adapters(model: Model, adapters: Adapters) -> Model:
    """Return the model with adapters, or itself if it has them. Raises ValueError if it is not traced with these."""
    if model.module.adapters == adapters:
        return model
    targets = adapters.targets if isinstance(adapters.targets, str) else tuple(sorted(adapters.targets))
    return _with_adapters(model, adapters.rank, adapters.alpha, targets)


@cached_by_identity(maxsize=64)
def _under_autocast(whole: Model, precision: Literal["bf16", "fp16"]) -> Model:
    traced = next((each for each in whole.autocast if each.precision == precision), None)
    if traced is None:
        raise ValueError(
            f"autocast = '{precision}': '{whole.name}' is not traced under it; `gsreal trace FILE --autocast "
            f"{precision} --out NEW`, where FILE is the model's, does so"
        )
    return replace(
        whole,
        layers=traced.layers,
        traced_precision="fp32",
        traced_autocast=precision,
        autocast=(),
        adapted=(),
        other_precisions=(),
        sliced_layers=traced.sliced_layers,
        sequence_layers=traced.sequence_layers,
        expert_layers=traced.expert_layers,
        expert_sequence_layers=traced.expert_sequence_layers,
        context_layers=traced.context_layers,
    )


def under_autocast(model: Model, precision: Literal["bf16", "fp16"]) -> Model:
    """Return the model with the layers of a forward under torch.autocast, or itself if it has them.

    Raises ValueError if it is not traced under autocast in this precision.
    """
    return model if model.traced_autocast == precision else _under_autocast(model, precision)


@cached_by_identity(maxsize=64)
def _in_precision(model: Model, index: int) -> Model:
    other = model.other_precisions[index]
    names = (*LAYER_LISTS, "adapted", "partly_trained")
    traced: dict[str, Any] = {name: getattr(other, name) for name in names}
    return replace(model, traced_precision=other.precision, autocast=(), other_precisions=(), **traced)


def in_precision(model: Model, precision: Precision) -> Model:
    """Return the model with its layers as traced in a precision, or in one with as many bytes; itself if there are none
    but those that it has.

    Layers that ranks cannot divide in a way in which they can divide the model's are not taken. See [Note: precisions].
    """
    size = PRECISION_BYTES[precision]
    if PRECISION_BYTES[model.traced_precision] == size:
        return model
    known = [
        (each.precision != precision, index)
        for index, each in enumerate(model.other_precisions)
        if PRECISION_BYTES[each.precision] == size
        and all(bool(getattr(each, name)) == bool(getattr(model, name)) for name in LAYER_LISTS)
    ]
    return _in_precision(model, min(known)[1]) if known else model


@cached_by_identity(maxsize=64, objects=2)
def _filed_as(model: Model, filed: Model) -> Model:
    return replace(model, _in_file_precision=filed)


def filed_as(model: Model, filed: Model) -> Model:
    """Return the model with `filed` as its `in_file_precision`; itself if that is so already."""
    return model if model.in_file_precision is filed else _filed_as(model, filed)


def _in_other_kinds(name: str, fused: FusedKernels) -> list[tuple[str, object]]:
    return [(f"{name}[{place}].", each) for place, each in enumerate(getattr(fused, name))]


def _check_same_modules(where: str, found: Sequence[Layer], own: Sequence[Layer]) -> None:
    """Raise ValueError unless layers are of the same modules and parameters as the model's own; none are allowed."""

    def modules(layers: Sequence[Layer]) -> list[tuple[Any, ...]]:
        return [
            (module, layer.block, [(each.name, each.shape) for each in layer.parameters])
            for layer in layers
            for module in layer.modules or (layer.name,)
        ]

    ours, theirs = modules(own), modules(found)
    if not found or ours == theirs:
        return
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    (name, *_), (other, *_) = (each[place] if place < len(each) else (None,) for each in (theirs, ours))
    raise ValueError(
        f"{where}: {'no' if name is None else shown_value(name)} layer of a module where the model has "
        f"{'none' if other is None else shown_value(other)}{' with other parameters' if name == other else ''}"
    )


@cached_by_identity(maxsize=64)
def _with_fused_kernels(model: Model) -> Model:
    fused = model.fused_kernels
    assert fused is not None
    for where, kernels in (
        ("", fused),
        *_in_other_kinds("autocast", fused),
        *_in_other_kinds("other_precisions", fused),
    ):
        for name in LAYER_LISTS:
            _check_same_modules(f"fused_kernels.{where}{name}", getattr(kernels, name), getattr(model, name))
    names = (*LAYER_LISTS, "adapted", "partly_trained") if fused.layers else ()
    traced: dict[str, Any] = {name: getattr(fused, name) for name in names}
    for name in ("autocast", "other_precisions"):
        by_precision = {each.precision: each for each in (*getattr(model, name), *getattr(fused, name))}
        traced[name] = tuple(by_precision.values())
    return replace(model, runs_fused_kernels=True, fused_kernels=None, _in_file_precision=model, **traced)


def with_fused_kernels(model: Model) -> Model:
    """Return the model with its layers as CUDA GPUs run them; itself if it was not traced with other layers there.

    See [Note: fused kernels]. Raises ValueError if these layers are not of the modules of its own.
    """
    fused = model.fused_kernels
    if fused is None or not (fused.layers or fused.autocast or fused.other_precisions):
        return model
    return _with_fused_kernels(model)


@cache
def shipped_models() -> dict[str, Path]:
    """Return the model files that come with the package, by name: scenarios may name them instead of a path.

    The package has a link to `scenarios/models` of the repository, where they lie; a wheel holds copies.

    >>> shipped_models()["gpt2-124m"].name
    'gpt2-124m.toml'
    """
    return shipped_files("models", "toml")


def shipped_files(folder: str, suffix: str) -> dict[str, Path]:
    """Return the files with a suffix in one of this package's folders, by name without the suffix."""
    place = Path(str(files("gssim.workload").joinpath(folder)))
    return {path.stem: path for path in sorted(place.glob(f"*.{suffix}"))}
