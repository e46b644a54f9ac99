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
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from gssim.units import Count, PositiveInt, Precision, excess, spec
from gssim.workload.layer import Layer


@spec
class HuggingFace:
    """A Hugging Face architecture, built from its config alone: no weights are loaded."""

    model_type: str
    """As in `AutoConfig.for_model`, for example `gpt2`."""
    auto_class: str = "AutoModelForCausalLM"
    """Class of transformers that builds a model from the config."""
    config: dict[str, Any] = field(default_factory=dict)
    """Differences from the architecture's default config. `use_cache` is off; a hub's code and weights are refused."""


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

    def __post_init__(self) -> None:
        """Refuse neither and both."""
        if (self.factory is None) == (self.hugging_face is None):
            raise ValueError("exactly one of factory and hugging_face is needed")


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
    buffer_bytes: tuple[Count, ...] = ()
    """Module buffers (not parameters), a number for each data type: DDP broadcasts them in every forward."""
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
    context_layers: tuple[Layer, ...] = ()
    """The layers with whole blocks on parts of the sequences, see [Note: context]; empty: they cannot run so."""

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

    @property
    def elements(self) -> int:
        """Parameters of the whole model."""
        return sum(layer.repeats * layer.elements for layer in self.layers)


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
