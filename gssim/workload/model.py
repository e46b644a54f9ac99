"""A traced model: its module, its input, and its layers.

[Note: units] A block that can be cut among ranks (tensor parallelism) is cut in units: an attention head with its part
of the perceptron's columns, or a norm group's channels. The layers of `Model.sliced_layers` are traced with their
blocks cut: each quantity is a polynomial in b and s for the part that every rank has, and another that counts once for
each of the u units on the rank. `gssim.scenario.tensor_slices` makes ordinary layers of them.

[Note: sequence parts] With sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) the ranks that share sliced
blocks divide every sequence between these: norms, dropouts and residuals run on p positions of each sequence. Inputs of
the first linear maps are all-gathered, and outputs of the last ones reduce-scattered, where they are all-reduced
otherwise. The gradients of parameters in between (norms) are those of the rank's positions: after the backward they
are summed over the ranks. The layers of `Model.sequence_layers` are traced so.

[Note: context] With context parallelism ranks divide sequences from the embedding to the loss, and all of a layer runs
on p positions of each. Only attention needs the others: by all-to-alls (Jacobs et al. 2023, DeepSpeed Ulysses, arXiv
2309.14509) each rank gets all positions of its part of the heads, and gives the outputs back. As whole sequences times
a part of the heads are as much as a part of the sequences times all heads, quantities depend on p, and on p*s, whatever
the number of ranks. The layers of `Model.context_layers` are traced so; `units` of a block is the number of heads that
have keys and values of their own.

[Note: experts of parts] Where ranks divide routed experts besides, each routes the tokens of its own part of the
sequence: the router is whole on every rank, and its gradient is summed as those of norms are. Attention, and experts
that all tokens take, are cut in units. The layers of `Model.expert_sequence_layers` are traced so: a rank has u units,
p positions, and e experts, which process r rows.

[Note: adapters] Low-rank adapters (Hu et al. 2021, LoRA, arXiv 2106.09685) are the only trained parameters: all others
are frozen, get no gradient, and nothing is saved for one. All that adapters do is linear in their rank: the layers of
`AdaptedLayers` are traced with two ranks, u being the rank. The backward ends at the first block, and embeddings have
none. Where context-parallel ranks divide sequences, what adapters do grows with the rank times the positions of a part:
what an attention exchanges in its backward depends on which of its inputs get a gradient, so that these layers are
traced for themselves. So are those with blocks cut among ranks: what is added beside columns or rows of a map that are
cut grows with the units, and the adapters' matrices that are whole have parts of their gradients on all ranks. Where
ranks divide routed experts, these are frozen: rows and the gradients of rows are exchanged, and none of weights.

[Note: autocast] Under torch.autocast (automatic mixed precision) parameters, their gradients and the residual stream
stay in fp32; operands of matrix products and attention are cast to 16 bits. The cast of a weight is saved for the
backward like an activation; those that the backward does not need (of biases) live to the end of the forward, and are
counted to the end of their layer's. Traced with the lists of operations that torch has for a CPU: on CUDA losses and
norms run in fp32, so that logits are there once more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from gssim.execution.cache import Same
from gssim.units import PRECISION_BYTES, Count, PositiveFloat, PositiveInt, Precision, Recompute, excess, spec
from gssim.workload.layer import Layer, layer_of_rank, sliced_layer


@spec
class HuggingFace:
    """A Hugging Face architecture, built from its config alone: no weights are loaded."""

    model_type: str
    """As in `AutoConfig.for_model`, for example `gpt2`."""
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

    @model_serializer(mode="wrap")
    def _without_empty(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data without an empty list of keys that are null."""
        data: dict[str, Any] = inner(self)
        if not data.get("null"):
            data.pop("null", None)
        return data


Targets = Literal["query-value", "all-linear"] | tuple[str, ...]


@spec
class Adapters:
    """Low-rank adapters (LoRA) beside linear maps of the blocks: they alone are trained, all else is frozen."""

    rank: PositiveInt
    """Rank r of the two matrices of each adapter: r x inputs and outputs x r."""
    alpha: PositiveFloat = 16.0
    """What an adapter adds is scaled by alpha / rank."""
    targets: Targets = "query-value"
    """Maps that get an adapter: those of queries and of values in the attention (or the one that has both), all linear
    maps of the blocks, or the last parts of their paths, such as `["q_proj", "v_proj"]`."""


@spec
class Module:
    """Source of the real module: a factory by its dotted path, or a Hugging Face config."""

    factory: str | None = None
    """Dotted path of a callable that returns the module. `gsreal` calls those of `gsreal.models` and
    `transformers.models`, and any other with `--trust-code`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    hugging_face: HuggingFace | None = None
    """Used instead of a factory."""
    adapters: Adapters | None = None
    """Adapters that are added to it; `workload.adapters` sets them."""
    frozen: tuple[str, ...] | None = None
    """Names of parameters that are not trained; `workload.frozen` sets them."""

    def __post_init__(self) -> None:
        """Refuse neither and both."""
        if (self.factory is None) == (self.hugging_face is None):
            raise ValueError("exactly one of factory and hugging_face is needed")

    @model_serializer(mode="wrap")
    def _without_absent(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data without absent adapters or frozen modules."""
        data: dict[str, Any] = inner(self)
        for key in ("adapters", "frozen"):
            if data.get(key) is None:
                data.pop(key, None)
        return data


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
    """Sequence classification: the padding token, which the model ignores; absent: it attends to all tokens."""

    def __post_init__(self) -> None:
        """Refuse classes without a task that has them, and the reverse."""
        if (self.task == "sequence-classification") != (self.classes is not None):
            raise ValueError(f"classes = {self.classes}: needed with task = 'sequence-classification', and only there")
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
class AdaptedLayers:
    """All layers of a model with adapters beside some of its linear maps, see [Note: adapters]."""

    role: Literal["query-value", "all-linear"] | None = None
    """The value of `workload.adapters.targets` that means these maps; absent: only their names do."""
    maps: tuple[str, ...]
    """Names of the maps: the last parts of their paths."""
    layers: tuple[Layer, ...]
    """Layers in the order of the forward, as functions of the adapters' rank u too."""
    context_layers: tuple[Layer, ...] = ()
    """The same with whole blocks on parts of the sequences, see [Note: context]; empty: not traced so."""
    sliced_layers: tuple[Layer, ...] = ()
    """The layers with their blocks cut among ranks, as functions of units u and of the adapters' rank a; empty: not
    traced so."""
    sequence_layers: tuple[Layer, ...] = ()
    """The same with sequences divided among these ranks, see [Note: sequence parts]; empty: not traced so."""
    expert_layers: tuple[Layer, ...] = ()
    """The layers with their routed experts divided among ranks, see [Note: routed rows], as functions of the adapters'
    rank a too; empty: not traced so."""


@spec
class AutocastLayers:
    """All layers of a model with fp32 parameters whose forward runs under torch.autocast, see [Note: autocast]."""

    precision: Literal["bf16", "fp16"]
    """Precision of matrix products and attention."""
    layers: tuple[Layer, ...]
    """Layers in the order of the forward."""


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
    """Precision of the traced bytes, which are scaled to a workload's; integers, masks and sums that stay in fp32 are
    scaled with them, so that a trace in the workload's own precision is more exact."""
    traced_batch_sizes: tuple[PositiveInt, ...]
    """Batch sizes at which the real module was traced; others follow by polynomials."""
    traced_sequence_lengths: tuple[PositiveInt, ...] = ()
    """Traced sequence lengths, for models of tokens."""
    exact_sequence: bool = True
    """False: the dependence on the sequence length is no polynomial; only `traced_sequence_lengths` may be used."""
    compiled: bool = False
    """Each block is compiled by itself with torch.compile (inductor), and `layers` are those of compiled blocks."""
    compiled_recompute: Recompute = "none"
    """What compiled blocks recompute inside of their graphs, as torchtitan's do: torch fuses it with the backward.
    `plan.recompute` recomputes whole graphs instead, and says what each of these words means."""
    loss_fused: bool = False
    """Whether head and loss are in their fused form; `workload.fused_loss` sets it."""
    buffer_bytes: tuple[Count, ...] = ()
    """Module buffers (not parameters), a number for each data type: DDP broadcasts them in every forward. Those of
    floating-point values are given in fp32, and are cast to a workload's precision as parameters are."""
    buffer_values: tuple[Literal["floating-point", "integer"], ...] = ()
    """Values of each of `buffer_bytes`; absent: all are floating-point."""
    layers: tuple[Layer, ...]
    """Layers in the order of the forward."""
    sliced_layers: tuple[Layer, ...] = ()
    """The layers with their blocks cut among ranks, see [Note: units]; empty: they cannot be cut."""
    uncut_reason: str | None = None
    """Why the blocks cannot be cut among ranks, with the name of the module; absent: they can, or it is not known."""
    sequence_layers: tuple[Layer, ...] = ()
    """The same with sequences divided among these ranks, see [Note: sequence parts]; empty: they cannot be."""
    expert_layers: tuple[Layer, ...] = ()
    """The layers with their routed experts divided among ranks, see [Note: routed rows]; empty: they cannot be."""
    expert_tensor_ranks: PositiveInt = 1
    """Tensor ranks for which `expert_layers` are cut: they have the sizes, the rows and the sums of one of so many."""
    expert_sequence_layers: tuple[Layer, ...] = ()
    """The layers with sequences divided as in `sequence_layers`, and routed experts among these ranks and others, see
    [Note: experts of parts]; empty: they cannot be."""
    context_layers: tuple[Layer, ...] = ()
    """The layers with whole blocks on parts of the sequences, see [Note: context]; empty: they cannot run so."""
    adapted: tuple[AdaptedLayers, ...] = ()
    """The layers with trained adapters and all else frozen, for each choice of maps that was traced so."""
    autocast: tuple[AutocastLayers, ...] = ()
    """The layers under torch.autocast, for each precision in which they were traced so."""
    traced_autocast: Literal["bf16", "fp16"] | None = None
    """Precision of torch.autocast under which `layers` were traced; absent: they were traced without."""
    whole_layers: tuple[Layer, ...] = ()
    """Of a model with adapters or frozen layers: its layers without, of which measured profiles are; else empty."""

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

    @model_serializer(mode="wrap")
    def _without_absent(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data without values of buffers that are all floating-point, and without what is as usual."""
        data: dict[str, Any] = inner(self)
        for key in ("buffer_values", "expert_sequence_layers"):
            if not data.get(key):
                data.pop(key, None)
        usual_values = {
            "expert_tensor_ranks": 1,
            "compiled": False,
            "compiled_recompute": "none",
            "loss_fused": False,
        }
        for key, usual in usual_values.items():
            if data.get(key) == usual:
                data.pop(key)
        return data

    def buffer_sizes(self, value_bytes: int) -> tuple[int, ...]:
        """Return the bytes of the module buffers, for each data type, where parameters' values have `value_bytes`."""
        values = self.buffer_values or ("floating-point",) * len(self.buffer_bytes)
        return tuple(
            size if kind == "integer" else size * value_bytes // PRECISION_BYTES["fp32"]
            for size, kind in zip(self.buffer_bytes, values, strict=True)
        )

    @property
    def elements(self) -> int:
        """Trained parameters of the whole model."""
        return sum(layer.repeats * layer.elements for layer in self.layers)

    @property
    def frozen_elements(self) -> int:
        """Parameters that are not trained, which `elements` does not count."""
        return sum(layer.repeats * layer.frozen_elements for layer in self.layers)


@dataclass(frozen=True)
class LayerInstance:
    """One layer of the unrolled model: the entry and the index of its repetition."""

    index: int
    layer: Layer
    repetition: int

    @property
    def module(self) -> str:
        """Dotted path of its module, or the layer's name where it has none."""
        return self.layer.modules[self.repetition] if self.layer.modules else self.layer.name

    @cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """Full dotted names of its parameters."""
        return tuple(parameter.name.replace("{}", self.module) for parameter in self.layer.parameters)

    @property
    def held_names(self) -> tuple[str, ...]:
        """The same, and the names of those that are not trained."""
        frozen = (parameter.name.replace("{}", self.module) for parameter in self.layer.frozen_parameters)
        return (*self.parameter_names, *frozen)


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


@lru_cache(maxsize=64)
def _with_adapters(model: Same, rank: int, alpha: float, targets: Targets) -> Model:
    whole = model.value
    assert isinstance(whole, Model)
    found = next((each for each in whole.adapted if targets in (each.role, each.maps)), None)
    if found is None:
        known = ", ".join(f"{each.role!r} ({', '.join(each.maps)})" for each in whole.adapted) or "none"
        raise ValueError(
            f"adapters.targets = {targets!r}: '{whole.name}' is not traced with adapters there; traced: {known}; "
            "`gsreal trace --adapters` adds others"
        )
    once: dict[int, Layer] = {}
    for layer in (*found.layers, *found.context_layers):
        held = sliced_layer(layer, rank, None)
        parameters = tuple(replace(parameter, sliced_dimension=None) for parameter in held.parameters)
        once[id(layer)] = replace(held, parameters=parameters)
    divided = (*found.sliced_layers, *found.sequence_layers, *found.expert_layers)
    once |= {id(layer): layer_of_rank(layer, rank) for layer in divided}
    return replace(
        whole,
        module=replace(whole.module, adapters=Adapters(rank=rank, alpha=alpha, targets=targets)),
        layers=tuple(once[id(layer)] for layer in found.layers),
        whole_layers=whole.layers,
        adapted=(),
        sliced_layers=tuple(once[id(layer)] for layer in found.sliced_layers),
        sequence_layers=tuple(once[id(layer)] for layer in found.sequence_layers),
        expert_layers=tuple(once[id(layer)] for layer in found.expert_layers),
        expert_sequence_layers=(),
        context_layers=tuple(once[id(layer)] for layer in found.context_layers),
    )


def with_adapters(model: Model, adapters: Adapters) -> Model:
    """Return the model with adapters; itself if it has them. Raises ValueError if it is not traced with such."""
    if model.module.adapters == adapters:
        return model
    targets = adapters.targets if isinstance(adapters.targets, str) else tuple(sorted(adapters.targets))
    return _with_adapters(Same(model), adapters.rank, adapters.alpha, targets)


@lru_cache(maxsize=64)
def _under_autocast(model: Same, precision: Literal["bf16", "fp16"]) -> Model:
    whole = model.value
    assert isinstance(whole, Model)
    found = next((each for each in whole.autocast if each.precision == precision), None)
    if found is None:
        raise ValueError(
            f"autocast = '{precision}': '{whole.name}' is not traced under it; `gsreal trace --autocast {precision}` "
            "does so"
        )
    return replace(
        whole,
        layers=found.layers,
        traced_precision="fp32",
        traced_autocast=precision,
        autocast=(),
        adapted=(),
        sliced_layers=(),
        sequence_layers=(),
        expert_layers=(),
        expert_sequence_layers=(),
        context_layers=(),
    )


def under_autocast(model: Model, precision: Literal["bf16", "fp16"]) -> Model:
    """Return the model with the layers of a forward under torch.autocast; itself if it has them.

    Raises ValueError if it is not traced so.
    """
    return model if model.traced_autocast == precision else _under_autocast(Same(model), precision)
