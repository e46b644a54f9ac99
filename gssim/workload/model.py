"""A model: where its module comes from, what it reads, its layers.

[Note: units] A block that can be cut among ranks (tensor parallelism) is cut in units: an attention head with its part
of the perceptron's columns, or a norm group's channels. The layers of `Model.sliced_layers` are traced with their
blocks cut: each quantity is a polynomial in b and s for what every rank has, and another that counts once for each of
the u units that the rank holds. `gssim.plan.tensor_slices` makes layers as above of them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from gssim.limits import excess
from gssim.units import Count, PositiveInt, Precision, spec
from gssim.workload.layer import Layer


@spec
class HuggingFace:
    """A Hugging Face architecture, built from its config alone: no weights are loaded."""

    model_type: str
    """As in `AutoConfig.for_model`, for example `gpt2`."""
    auto_class: str = "AutoModelForCausalLM"
    """Of transformers: what makes a model of the config."""
    config: dict[str, Any] = field(default_factory=dict)
    """What differs from the architecture's own config. `use_cache` is off; a hub's code and weights are refused."""


@spec
class Module:
    """Where the real module comes from: a factory by its dotted path, or a Hugging Face config."""

    factory: str | None = None
    """Dotted path of what returns the module. `gsreal` calls it: one of `gsreal.models` and `transformers.models`, and
    any other with `--trust-code`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the factory, by name."""
    hugging_face: HuggingFace | None = None
    """In its place."""

    def __post_init__(self) -> None:
        """Refuse none and both."""
        if (self.factory is None) == (self.hugging_face is None):
            raise ValueError("exactly one of factory and hugging_face is needed")


@spec
class TokenInput:
    """Token ids of shape (batch, sequence)."""

    kind: Literal["tokens"]
    """The form of this table."""
    vocabulary: PositiveInt
    """How many tokens there are."""
    task: Literal["next-token", "masked-token", "sequence-classification"] = "next-token"
    """What the loss is of: the next token at each place, masked tokens, or the class of a sequence."""
    maximum_sequence_length: PositiveInt
    """Of what the model takes."""
    classes: PositiveInt | None = None
    """Of sequence classification, and of it alone."""
    padding: Count | None = None
    """Sequence classification: the token that fills sequences up, which the model leaves out; absent: it attends to
    all tokens."""

    def __post_init__(self) -> None:
        """Refuse classes without a task that has them, and the other way round."""
        if (self.task == "sequence-classification") != (self.classes is not None):
            raise ValueError(f"classes = {self.classes}: needed with task = 'sequence-classification', and only there")
        if self.padding is not None and self.classes is None:
            raise ValueError(f"padding = {self.padding}: only sequences to be classified are filled up")
        if self.padding is not None and self.padding >= self.vocabulary:
            raise ValueError(f"padding = {self.padding}: is no token of the vocabulary of {self.vocabulary}")


@spec
class ImageInput:
    """Images of shape (batch, channels, height, width), to be classified."""

    kind: Literal["image"]
    """The form of this table."""
    shape: tuple[PositiveInt, PositiveInt, PositiveInt]
    """Of one image: channels, height, width."""
    classes: PositiveInt
    """How many."""
    task: Literal["classification"] = "classification"
    """What the loss is of."""


@spec
class Model:
    """A model as traced from its real module; see `gsreal trace`."""

    name: str
    """By which profiles and gradient statistics know it."""
    source: str
    """What it was traced from, with which versions."""
    module: Module
    """Where the real module comes from."""
    input: Annotated[TokenInput | ImageInput, Field(discriminator="kind")]
    """What a batch is."""
    traced_precision: Precision = "fp32"
    """Bytes are of this precision, and scaled to a workload's; whole numbers, masks and sums that are kept in fp32 are
    scaled with them, so that a trace in the workload's own precision is the more exact one."""
    traced_batch_sizes: tuple[PositiveInt, ...]
    """Sizes at which the real module was traced; all others follow by polynomials."""
    traced_sequence_lengths: tuple[PositiveInt, ...] = ()
    """The same, for models of tokens."""
    exact_sequence: bool = True
    """False: the sequence dependence is no polynomial; only `traced_sequence_lengths` may be used."""
    buffer_bytes: tuple[Count, ...] = ()
    """Module buffers (not parameters), a number for each data type: DDP broadcasts them in every forward."""
    layers: tuple[Layer, ...]
    """In the order of the forward."""
    sliced_layers: tuple[Layer, ...] = ()
    """The layers with their blocks cut among ranks, see [Note: units]; empty: not known how to cut them."""

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
    """One layer of the unrolled model: the entry it repeats, and which repetition it is."""

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
