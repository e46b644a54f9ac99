"""Gradient statistics of models that nobody has trained, transferred from a ladder of small models of the family.

A family file (`gsreal gradients --ladder`) holds, for each training of its ladder and each role of a tensor (query,
perceptron's first matrix, norm, ...; in the first, inner and last blocks), two scales at each sampled step: the mean
square of the gradient that all samples have in common, and that of one sample's deviation from it. For n samples

    E[g^2] = common + deviation / n

[Note: law] At the first step both scales are powers of width, depth and sequence length, by role. From there they
follow a curve that the role's trainings have in common, in units of progress: the step times powers of the learning
rate, width and depth, relative to the ladder's first rung. Beyond the ladder's furthest progress they are constant.

[Note: shape] The distribution of |g| / rms, its growth under error feedback, densities of relative thresholds, and
published changes are those of the family's first rung of the same kind of optimizer, by role and step.

[Note: rows] Embedding and head have a row for each token, and text has tokens by Zipf's law. Of n tokens in a batch a
row with frequency f is hit m times, m ~ Poisson(n f), and its elements are normal with

    E[g^2] = a^2 (m + r m (m - 1)) / n^2

where a and r follow from the family's scales and the frequencies of its own vocabulary. A row that is not hit has a
gradient of 0 in an embedding, and of the token's predicted probability, about 1 / vocabulary, in a head.

[Note: band] A prediction states a factor on the scale of |g| that covers at least nine in ten of the family's held-back
trainings; beyond the ladder's sizes it grows with the distance.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np

from gssim.execution.files import read_json
from gssim.units import Count, Floats, NonNegativeFloat, PositiveFloat, PositiveInt, spec, spec_with_memory, validated
from gssim.workload.gradient_statistics import (
    EDGES_PER_DECADE,
    LOWEST_DECADE,
    SKETCH_EDGES,
    BlockTrace,
    ChangeTrace,
    FeedbackDensity,
    GradientStatistics,
    RankTrace,
    Ratio,
    RelativeDensity,
    Sketch,
    TensorTrace,
    Transfer,
)
from gssim.workload.model import Model, TokenInput, unrolled
from gssim.workload.workload import Workload

FAMILY_SCHEMA: Literal["gssim.gradient-family/1"] = "gssim.gradient-family/1"
SHAPE_EDGES: tuple[float, ...] = tuple(10.0 ** (k / EDGES_PER_DECADE) for k in range(-2 * EDGES_PER_DECADE, 12))
"""Multiples of the rms of |g| at which tails are kept."""
LEVELS: tuple[float, ...] = tuple(10.0 ** (k / 2) for k in range(-4, 5))
"""Thresholds in units of the rms of |g| at which the growth under error feedback is kept."""
CHANGES: tuple[float, ...] = tuple(10.0 ** (k / 2) for k in range(-6, 7))
"""Thresholds in units of a change (see `change_unit`) at which publications are kept."""
ADAPTIVE = ("adam", "adamw")
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Densities at which a family's predictions are compared with its trainings."""
START, WINDOWS = 8, ("start", "run")
"""Number of steps that are compared by themselves; parts of a training that are compared."""
ROW_GROUPS = 24
"""Groups of rows of an embedding, by frequency of their tokens."""
HITS = 12
"""Numbers of tokens in a row that are told apart."""
VOCABULARY_ERROR = math.log(1.5)
"""Added to the error, in squares, where the vocabulary is another than the ladder's: its row law is not measured."""


@spec
class RoleShape:
    """Shape of one role's |g| in one training, at each of the family's `shape_steps`."""

    tails: tuple[tuple[Ratio, ...], ...]
    """Fraction of elements that reach each of `SHAPE_EDGES` times the rms."""
    mean_ratios: tuple[NonNegativeFloat, ...]
    """Mean over rms of |g|."""
    growth: tuple[tuple[PositiveFloat, ...], ...] = ()
    """Factor on the scale of |g| by which residuals of error feedback raise the density, at each of `LEVELS`."""
    relative: tuple[tuple[Ratio, ...], ...] = ()
    """Densities of relative thresholds, at the family's `multiples`."""
    relative_feedback: tuple[tuple[Ratio, ...], ...] = ()
    """The same with error feedback."""
    changes: tuple[tuple[Ratio, ...], ...] = ()
    """Fraction of elements that are published, at each of `CHANGES`."""


@spec
class Rung:
    """One training of a family's ladder, with the scales of its gradients."""

    name: str
    held_back: bool = False
    """Whether no law is fitted to it: its densities are predicted from the other rungs."""
    width: PositiveInt
    layers: PositiveInt
    elements: dict[str, PositiveInt]
    """Parameters of the model, by role."""
    samples: PositiveInt
    """Samples of a rank."""
    sequence_length: PositiveInt | None = None
    learning_rate: PositiveFloat
    optimizer: str
    sampled_steps: tuple[Count, ...]
    common: dict[str, tuple[NonNegativeFloat, ...]]
    """By role, for each of `sampled_steps`: mean square of what all samples' gradients have in common."""
    deviation: dict[str, tuple[NonNegativeFloat, ...]]
    """The same of one sample's deviation from it."""
    thresholds: dict[str, tuple[PositiveFloat, ...]]
    """Thresholds that a mean of `DENSITIES` of all elements reach over the first `start` steps, and over the `run`."""
    shapes: dict[str, RoleShape] = field(default_factory=dict)
    """By role; in the first rung of each kind of optimizer."""

    def weights(self, window: str) -> Floats:
        """Return the weight of each sampled step in a mean over the steps of one of `WINDOWS`."""
        last = self.sampled_steps[-1] + 1
        steps = np.log1p(np.arange(min(START, last) if window == "start" else last))
        rows = [np.interp(steps, np.log1p(self.sampled_steps), row).mean() for row in np.eye(len(self.sampled_steps))]
        return np.array(rows)


@spec
class RowFrequencies:
    """Frequencies of the tokens of the ladder's text."""

    vocabulary: PositiveInt
    squares: PositiveFloat
    """Sum of the squares of all tokens' frequencies."""


@spec_with_memory
class Family:
    """A family of models with its ladder; see the module's notes."""

    schema: Literal["gssim.gradient-family/1"] = FAMILY_SCHEMA
    family: str
    source: str
    shape_steps: tuple[Count, ...]
    multiples: tuple[PositiveFloat, ...]
    progress: dict[str, float]
    """Exponents of learning rate, width and depth in the progress that a step makes."""
    rows: RowFrequencies | None = None
    scale_error: NonNegativeFloat = 0.0
    """Logarithm of the factor on the scale of |g| that covers nine in ten of the held-back scales."""
    slope_errors: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """By size (`width above`, ...): what is added to `scale_error`, in squares, for each e-fold beyond the ladder."""
    density_error: NonNegativeFloat = 0.0
    """Logarithm of the factor on densities of relative thresholds that covers nine in ten."""
    rungs: tuple[Rung, ...]

    @cached_property
    def digest(self) -> str:
        """Identity of the file's content."""
        return sha256(repr(self).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Question:
    """Whose gradients are asked for: sizes of a model and its workload."""

    width: int
    layers: int
    sequence_length: int | None
    learning_rate: float
    optimizer: str

    def logarithms(self) -> dict[str, float]:
        """Return the logarithm of each size on which scales depend."""
        return {
            "width": math.log(self.width),
            "layers": math.log(self.layers),
            "sequence": math.log(self.sequence_length or 1),
            "learning rate": math.log(self.learning_rate),
        }


def question_of(rung: Rung) -> Question:
    """Return the question that a rung answers."""
    return Question(rung.width, rung.layers, rung.sequence_length, rung.learning_rate, rung.optimizer)


# Roles of tensors -----------------------------------------------------------------------------------------------------

ROLES: tuple[tuple[str, str], ...] = (
    (r"norm|\bln_|\bln\b|(^|\.)ln", "norm"),
    (r"position|wpe|token_type", "positions"),
    (r"word_embed|embed_tokens|embed_in|wte|^tokens|\.tokens|embed_out.weight", "tokens"),
    (r"qkv|c_attn|query_key_value", "qkv"),
    (r"(attn|attention).*(\bq|query)|q_proj", "q"),
    (r"(attn|attention).*(\bk|key)|k_proj", "k"),
    (r"(attn|attention).*(\bv|value)|v_proj", "v"),
    (r"(attn|attention).*(out|c_proj|o_proj|dense|proj)|o_proj", "out"),
    (r"gate_up|gate_proj|router|gate\b", "gate"),
    (r"up\b|_up\b|up_proj|c_fc|intermediate|fc1|fc_in|h_to_4h", "up"),
    (r"down|c_proj|output\.dense|fc2|fc_out|4h_to_h", "down"),
    (r"shortcut|downsample", "shortcut"),
    (r"stem|embedder", "stem"),
    (r"head|classifier|predictions\.decoder|predictions\.bias|score|\bfc\b", "head"),
    (r"conv|layer\.\d+\.", "convolution"),
)
"""Patterns of parameters' names, in the order in which they are tried, and roles."""
LIKE = {"gate": "up", "k": "q", "q": "out", "v": "out", "shortcut": "convolution", "stem": "convolution", "up": "out"}
"""Roles that stand for those that a family lacks."""


def role_of(name: str, shape: Sequence[int]) -> str:
    """Return the role of a parameter from its name and shape; a bias has its own.

    >>> role_of("transformer.h.3.attn.c_attn.weight", (768, 2304)), role_of("layers.0.mlp.down_proj.weight", (8, 4))
    ('qkv', 'down')
    >>> role_of("blocks.0.up.bias", (64,)), role_of("blocks.1.norm1.weight", (64,))
    ('up.bias', 'norm.weight')
    """
    text = name.lower()
    role = next((role for pattern, role in ROLES if re.search(pattern, text)), "out")
    if role == "norm":
        return f"norm.{'bias' if text.endswith('bias') else 'weight'}"
    return f"{role}.bias" if len(shape) < 2 and text.endswith("bias") else role


@dataclass(frozen=True)
class Placed:
    """One parameter of a model: its role, its place in depth, and its shape."""

    name: str
    role: str
    place: str
    """`first`, `inner` or `last` block; `before` or `after` the blocks."""
    shape: tuple[int, ...]
    share: float = 1.0
    """Fraction of the tokens that reach it: of a routed expert."""

    @property
    def key(self) -> str:
        """Key of its statistics in a family."""
        return f"{self.place}/{self.role}"


def placed(model: Model) -> tuple[Placed, ...]:
    """Return the parameters of a model with their roles."""
    layers = unrolled(model)
    blocks = [instance.index for instance in layers if instance.layer.block]
    found = []
    chosen = next((layer.experts_per_token for layer in model.expert_layers if layer.experts_per_token), 2)
    for instance in layers:
        if not blocks or instance.index < blocks[0]:
            place = "before"
        elif instance.index > blocks[-1]:
            place = "after"
        else:
            at = blocks.index(instance.index) if instance.index in blocks else 0
            place = "first" if at == 0 else "last" if at == len(blocks) - 1 else "inner"
        for name, parameter in zip(instance.parameter_names, instance.layer.parameters, strict=True):
            expert = "expert" in name and "shared" not in name and len(parameter.shape) == 3
            share = min(1.0, chosen / parameter.shape[0]) if expert else 1.0
            found.append(Placed(name, role_of(name, parameter.shape), place, parameter.shape, share))
    names = {each.role for each in found}
    if "head" not in names or not any(each.role == "head" and len(each.shape) > 1 for each in found):
        found = [replace(each, role="tied") if each.role == "tokens" else each for each in found]
    return tuple(found)


def sizes_of(model: Model) -> tuple[int, int]:
    """Return the width of a model (of its embedding, or of its first convolution) and its number of blocks."""
    layers = unrolled(model)
    shapes = [parameter.shape for instance in layers for parameter in instance.layer.parameters if parameter.shape]
    width = shapes[0][1] if isinstance(model.input, TokenInput) and len(shapes[0]) > 1 else shapes[0][0]
    return width, max(1, sum(instance.layer.block for instance in layers))


def family_of(model: Model) -> str:
    """Return the name of the family whose ladder is nearest to a model."""
    if not isinstance(model.input, TokenInput):
        return "resnet"
    if model.input.task != "next-token":
        return "bert"
    names = [name for instance in unrolled(model) for name in instance.parameter_names]
    return "llama" if any("gate_proj" in name for name in names) else "gpt"


# The law --------------------------------------------------------------------------------------------------------------

SIZES = ("width", "layers", "sequence")
KINDS = ("common", "deviation")
LATEST = 160
"""Step up to which curves of training have values of their own, in steps of the ladder's first rung."""
NODES = np.linspace(0.0, math.log1p(LATEST), 9)
RIDGE, SMOOTHNESS, LEVELNESS = 0.1, 0.3, 0.05
"""Weights of exponents, and of second and first differences of curves, beside the squares of errors."""


@dataclass(frozen=True)
class Law:
    """Scales of a family's gradients as functions of a question; see [Note: law]."""

    bases: Mapping[bool, Rung]
    """The first rung of each kind of optimizer, by whether it is adaptive."""
    progress: Mapping[str, float]
    slopes: Mapping[tuple[str, str], Floats]
    """Exponents of `SIZES` at the first step, by kind and key."""
    curves: Mapping[tuple[bool, str, str], Floats]
    """Change of the logarithm since the first step at each of `NODES`: by optimizer, kind and key."""

    def base(self, optimizer: str) -> Rung:
        """Return the rung to which scales of an optimizer are relative."""
        return self.bases.get(optimizer in ADAPTIVE) or next(iter(self.bases.values()))

    def scale(self, kind: str, key: str, question: Question, step: float) -> float | None:
        """Return a scale (one of `KINDS`) of a role at a step; None where the family has no such role."""
        base = self.base(question.optimizer)
        curve = self.curves.get((base.optimizer in ADAPTIVE, kind, key))
        if curve is None:
            return None
        sizes, ahead = _differences(question_of(base), question, self.progress)
        level = math.log(max(1e-30, getattr(base, kind)[key][0])) + float(sizes @ self.slopes[kind, key])
        return math.exp(level + float(np.interp(math.log1p(step * ahead), NODES, curve)))


def _differences(base: Question, question: Question, progress: Mapping[str, float]) -> tuple[Floats, float]:
    """Return the differences of the logarithms of `SIZES`, and the steps of the base that a step counts for."""
    ours, theirs = question.logarithms(), base.logarithms()
    ahead = sum(exponent * (ours[name] - theirs[name]) for name, exponent in progress.items())
    return np.array([ours[name] - theirs[name] for name in SIZES]), math.exp(ahead)


def law_of(family: Family, without: Sequence[str] = ()) -> Law:
    """Return the law that is fitted to a family's rungs, but for those held back and those named in `without`."""
    bases: dict[bool, Rung] = {}
    for rung in family.rungs:
        if rung.shapes and not rung.held_back:
            bases.setdefault(rung.optimizer in ADAPTIVE, rung)
    rungs = [rung for rung in family.rungs if not rung.held_back and rung.name not in without]
    main = next(iter(bases.values()))
    slopes, curves = {}, {}
    for kind in KINDS:
        for key in main.common:
            slopes[kind, key] = _slopes(family, main, [r for r in rungs if r.optimizer == main.optimizer], kind, key)
        for adaptive, base in bases.items():
            alike = [rung for rung in rungs if (rung.optimizer in ADAPTIVE) == adaptive]
            for key in base.common:
                curves[adaptive, kind, key] = _curve(family, base, alike, kind, key)
    return Law(bases, family.progress, slopes, curves)


def _slopes(family: Family, base: Rung, rungs: Sequence[Rung], kind: str, key: str) -> Floats:
    """Return the exponents of `SIZES` in a scale at the first step."""
    known = [rung for rung in rungs if getattr(rung, kind).get(key, (0.0,))[0] > 0]
    sizes = [_differences(question_of(base), question_of(rung), family.progress)[0] for rung in known]
    start = math.log(max(1e-30, getattr(base, kind)[key][0]))
    firsts = [math.log(getattr(rung, kind)[key][0]) - start for rung in known]
    return _fitted(np.array(sizes).reshape(-1, len(SIZES)), np.array(firsts), RIDGE * np.eye(len(SIZES)))


def _curve(family: Family, base: Rung, rungs: Sequence[Rung], kind: str, key: str) -> Floats:
    """Return the change of the logarithm of a scale since the first step, at each of `NODES`."""
    rows, changes = [], []
    for rung in rungs:
        found = getattr(rung, kind).get(key, (0.0,))
        if min(found) > 0:
            ahead = _differences(question_of(base), question_of(rung), family.progress)[1]
            rows += [_hat(math.log1p(step * ahead)) for step in rung.sampled_steps]
            changes += [math.log(value / found[0]) for value in found]
    bends, rises = (np.diff(np.eye(len(NODES)), n=order, axis=0) for order in (2, 1))
    penalties = np.vstack([SMOOTHNESS * bends, LEVELNESS * rises])
    curve = _fitted(np.array(rows).reshape(-1, len(NODES)), np.array(changes), penalties)
    return np.asarray(curve - curve[0])


def _hat(at: float) -> Floats:
    """Return the weights of `NODES` in the linear interpolation at a place."""
    return np.array([np.interp(at, NODES, row) for row in np.eye(len(NODES))])


def _fitted(rows: Floats, values: Floats, penalties: Floats) -> Floats:
    """Return the coefficients of least squares with squares of `penalties @ coefficients` added."""
    solved: Floats = np.linalg.lstsq(
        np.vstack([rows, penalties]), np.concatenate([values, np.zeros(len(penalties))]), rcond=None
    )[0]
    return solved


# From measured statistics to a rung -----------------------------------------------------------------------------------

THIRDS = ("q", "k", "v")
ALMOST_NONE, ALMOST_ALL = 1e-9, 1 - 1e-6


def _weibull(ratios: Floats) -> Floats:
    """Return ln(-ln(p / p(0))), which is nearly linear in the logarithm of the level, for normal tails and heavier."""
    whole = ratios[0] if ratios[0] > 0 else 1.0
    return np.asarray(np.log(-np.log(np.clip(ratios / whole, ALMOST_NONE, ALMOST_ALL))))


def tail_at(levels: Sequence[float], ratios: Sequence[float], at: Floats) -> Floats:
    """Return the fractions that reach the levels `at`, from those that reach `levels`, the lowest of which all reach.

    >>> tail_at((0.1, 1.0, 10.0), (0.5, 0.25, 0.0), np.array([0.01, 1.0, 30.0])).round(3).tolist()
    [0.5, 0.25, 0.0]
    """
    known = np.asarray(ratios, dtype=float)
    found = known[0] * np.exp(-np.exp(np.interp(np.log(at), np.log(levels), _weibull(known))))
    return np.asarray(np.where(found <= 2 * ALMOST_NONE * known[0], 0.0, np.where(at <= levels[0], known[0], found)))


def _sketch_tail(sketch: Sketch, at: Floats) -> Floats:
    edges = SKETCH_EDGES[sketch.first_edge : sketch.first_edge + len(sketch.tail_ratios) + 1]
    return tail_at(edges, (*sketch.tail_ratios, 0.0)[: len(edges)], at)


@dataclass(frozen=True)
class _Part:
    """A block of a tensor."""

    block: BlockTrace
    correlations: tuple[float, ...]
    elements: float
    tensor: str


def _parts_by_key(trace: RankTrace, parameters: Sequence[Placed]) -> dict[str, list[_Part]]:
    """Return the blocks of tensors by role; a fused query, key and value counts as such, and by its thirds."""
    by_key: dict[str, list[_Part]] = {}
    for each in parameters:
        tensor = trace.tensors[each.name]
        size = math.prod(each.shape) / len(tensor.blocks)
        for number, block in enumerate(tensor.blocks):
            part = _Part(block, tensor.correlations, size, each.name)
            thirds = THIRDS if len(tensor.blocks) % 3 else (THIRDS[number * 3 // len(tensor.blocks)],)
            for role in (each.role, *(thirds if each.role == "qkv" else ())):
                by_key.setdefault(f"{each.place}/{role}", []).append(part)
    return by_key


def rung_of(
    statistics: GradientStatistics,
    parameters: Sequence[Placed],
    *,
    name: str,
    width: int,
    layers: int,
    held_back: bool = False,
    shape_steps: Sequence[int] = (),
) -> Rung:
    """Return a rung from statistics of dense training; with shapes at `shape_steps`, where there are any."""
    trace = next(trace for trace in statistics.traces if not trace.threshold)
    elements: dict[str, int] = {}
    for each in parameters:
        roles = THIRDS if each.role == "qkv" else (each.role,)
        for role in roles:
            key, count = f"{each.place}/{role}", math.prod(each.shape) // len(roles)
            elements[key] = elements.get(key, 0) + count
    common, deviation, shapes = {}, {}, {}
    for key, parts in _parts_by_key(trace, parameters).items():
        weights = np.array([part.elements for part in parts])
        squares = np.array([[sketch.rms**2 for sketch in part.block.sketches] for part in parts])
        alike = np.clip([part.correlations or [1.0] * squares.shape[1] for part in parts], 1e-3, 1.0)
        common[key] = _digits(np.average(squares * alike, axis=0, weights=weights))
        deviation[key] = _digits(np.average(squares * (1 - alike), axis=0, weights=weights) * trace.samples)
        if shape_steps:
            shapes[key] = _shape(statistics, parts, weights, np.sqrt(np.average(squares, 0, weights)), shape_steps)
    rung = Rung(
        name=name,
        held_back=held_back,
        width=width,
        layers=layers,
        elements=elements,
        thresholds={},
        samples=trace.samples,
        sequence_length=statistics.sequence_length,
        learning_rate=statistics.learning_rate,
        optimizer=statistics.optimizer,
        sampled_steps=statistics.sampled_steps,
        common=common,
        deviation=deviation,
        shapes=shapes,
    )
    reached: Floats = np.zeros((len(statistics.sampled_steps), len(TRIED)))
    for each in parameters:
        blocks = trace.tensors[each.name].blocks
        share = math.prod(each.shape) / len(blocks) / sum(math.prod(other.shape) for other in parameters)
        for block in blocks:
            reached += share * np.array([_sketch_tail(sketch, TRIED) for sketch in block.sketches])
    thresholds = {window: _digits(reaching(rung.weights(window) @ reached)) for window in WINDOWS}
    return replace(rung, thresholds=thresholds)


TRIED = np.geomspace(1e-9, 1e2, 400)
"""Thresholds between which those for a density are interpolated."""


def reaching(ratios: Floats) -> Floats:
    """Return the thresholds that `DENSITIES` of the elements reach, given the fractions that reach `TRIED`.

    Densities above the fraction of elements that are not 0 have the lowest threshold.
    """
    thresholds: Floats = np.exp(np.interp(-np.array(DENSITIES), -np.asarray(ratios), np.log(TRIED)))
    return thresholds


def _digits(values: Floats, digits: int = 3) -> tuple[float, ...]:
    return tuple(float(f"{value:.{digits}g}") for value in values)


def _falling(values: Floats) -> tuple[float, ...]:
    """Return ratios that do not rise, to three digits."""
    return _digits(np.minimum.accumulate(np.clip(values, 0.0, 1.0)))


def _shape(
    statistics: GradientStatistics,
    parts: Sequence[_Part],
    weights: Floats,
    rms: Floats,
    shape_steps: Sequence[int],
) -> RoleShape:
    places = [statistics.sampled_steps.index(step) for step in shape_steps if step in statistics.sampled_steps]
    fields: dict[str, list[tuple[float, ...]]] = {name: [] for name in ("tails", "growth", "changes")}
    fields |= {"relative": [], "relative_feedback": []}
    means = []
    for at in places:
        scale = max(float(rms[at]), 1e-30)
        edges = np.array(SHAPE_EDGES)
        tails = _falling(
            np.average([_sketch_tail(part.block.sketches[at], edges * scale) for part in parts], 0, weights)
        )
        fields["tails"].append(tails)
        means.append(float(np.average([part.block.sketches[at].mean for part in parts], weights=weights)) / scale)
        if statistics.feedback_thresholds:
            sent = np.average([part.block.feedback[at].sent_ratios for part in parts], 0, weights)
            fields["growth"].append(_growth(tails, np.array(statistics.feedback_thresholds) / scale, sent))
        if statistics.multiples:
            for field_name, kind in (("relative", "sent_ratios"), ("relative_feedback", "feedback_ratios")):
                rows = np.average([getattr(part.block.relative[at], kind) for part in parts], 0, weights)
                fields[field_name].append(_falling(rows))
        if statistics.changes:
            unit = change_unit(statistics.optimizer, statistics.learning_rate, scale)
            names = dict.fromkeys(part.tensor for part in parts)
            sent = np.mean([np.mean([row[at] for row in statistics.changes[name].blocks], 0) for name in names], 0)
            levels = np.array(statistics.publish_thresholds) / unit
            fields["changes"].append(_falling(tail_at((levels[0] / 1e3, *levels), (1.0, *sent), np.array(CHANGES))))
    return RoleShape(
        tails=tuple(fields["tails"]),
        mean_ratios=_digits(np.array(means)),
        growth=tuple(fields["growth"]),
        relative=tuple(fields["relative"]),
        relative_feedback=tuple(fields["relative_feedback"]),
        changes=tuple(fields["changes"]),
    )


def change_unit(optimizer: str, learning_rate: float, rms: float) -> float:
    """Return the size of a step's change of a parameter: of an adaptive optimizer the learning rate."""
    return learning_rate if optimizer in ADAPTIVE else learning_rate * max(rms, 1e-30)


def _growth(tails: Sequence[float], levels: Floats, sent: Floats) -> tuple[float, ...]:
    """Return the factors on the scale under which the tail has the densities `sent`, at each of `LEVELS`."""
    scales = 10.0 ** (np.arange(-6, 25) / 12)  # factors of 0.3 to 100
    known_levels, known = [], []
    for level, ratio in zip(levels, sent, strict=True):
        if 0 < ratio < 0.98 * tails[0]:
            reached = tail_at(SHAPE_EDGES, tails, level / scales)
            known_levels.append(math.log(level))
            known.append(float(np.interp(ratio, reached, np.log(scales))))
    if not known:
        return (1.0,) * len(LEVELS)
    return _digits(np.exp(np.maximum(0.0, np.interp(np.log(LEVELS), known_levels, known))))


# Errors of a family's predictions -------------------------------------------------------------------------------------


def at_step(steps: Sequence[int], rows: Sequence[Sequence[float]], step: int) -> Floats:
    """Return the values at a step, between those at `steps`, linearly in the logarithm of 1 + step.

    >>> at_step((0, 3), ((1.0,), (2.0,)), 1).tolist()
    [1.5]
    """
    at = float(np.interp(math.log1p(step), np.log1p(steps[: len(rows)]), np.arange(len(rows))))
    low = min(int(at), max(0, len(rows) - 2))
    first, second = np.asarray(rows[low], dtype=float), np.asarray(rows[min(low + 1, len(rows) - 1)], dtype=float)
    values: Floats = first + (at - low) * (second - first)
    return values


def predicted_ratios(family: Family, law: Law, rung: Rung, window: str) -> Floats:
    """Return the predicted fractions of a rung's elements that reach `TRIED`, as a mean over a part of its steps."""
    base, question = law.base(rung.optimizer), question_of(rung)
    ratios: Floats = np.zeros(len(TRIED))
    for key, count in rung.elements.items():
        shape = base.shapes.get(key)
        if shape is None:
            continue
        for weight, step in zip(rung.weights(window), rung.sampled_steps, strict=True):
            common, deviation = (law.scale(kind, key, question, step) or 0.0 for kind in KINDS)
            rms = math.sqrt(common + deviation / rung.samples)
            tails = at_step(family.shape_steps, shape.tails, step)
            ratios += weight * count * tail_at(SHAPE_EDGES, tails.tolist(), TRIED / max(rms, 1e-30))
    return ratios / sum(rung.elements.values())


@dataclass(frozen=True)
class HeldBackError:
    """Errors of one training's densities, predicted from the family's other trainings."""

    rung: str
    window: str
    scales: Floats
    """Logarithm of predicted over measured threshold, for each of `DENSITIES`."""
    densities: Floats
    """Logarithm of predicted density at the measured threshold over the measured one."""
    distances: Mapping[str, float]
    """How far each size lies beyond those of the other rungs, in e-folds."""


def held_back_errors(family: Family) -> list[HeldBackError]:
    """Return the errors of every rung that no shape is of, each predicted from the others that are not held back."""
    errors = []
    for rung in family.rungs:
        if rung.shapes:
            continue
        law, others = law_of(family, (rung.name,)), [r for r in family.rungs if r.name != rung.name]
        apart = distances(replace(family, rungs=tuple(others)), question_of(rung))
        for window in WINDOWS:
            ratios = predicted_ratios(family, law, rung, window)
            measured = np.array(rung.thresholds[window])
            at = np.interp(np.log(measured), np.log(TRIED), ratios)
            errors.append(
                HeldBackError(
                    rung.name,
                    window,
                    np.log(reaching(ratios) / measured),
                    np.log(np.maximum(at, 1e-6) / np.array(DENSITIES)),
                    apart,
                )
            )
    return errors


COVERED = 0.95
"""Fraction of the scales of trainings within the ladder that a band is made for; nine in ten are asked of it."""
LEAST_ERROR = math.log(1.1)
NEAR = 1.0
"""Distance of a near rung, in e-folds: models of half and twice the width or depth are near."""


def with_errors(family: Family) -> Family:
    """Return the family with its band: errors of rungs near the others, and those of rungs beyond them by distance.

    The error of a density at a known scale is what is left of it without the mean over `DENSITIES`.
    """
    errors = held_back_errors(family)
    near = [e for e in errors if max(e.distances.values()) <= NEAR] or errors
    scale = max(LEAST_ERROR, float(np.quantile([abs(e.scales) for e in near], COVERED)))
    density = max(LEAST_ERROR, float(np.quantile([abs(e.densities - e.densities.mean()) for e in near], COVERED)))
    slopes = {}
    for size in (*SIZES, "learning rate"):
        for sides in ((f"{size} above", f"{size} below"), (f"{size} below", f"{size} above")):
            known = [[abs(e.scales) / e.distances[side] for e in errors if e.distances[side] > 0] for side in sides]
            beyond = known[0] or known[1]  # where the ladder has nothing beyond on one side, it is taken for the other
            slopes[sides[0]] = float(np.quantile(np.concatenate(beyond), COVERED)) if beyond else 0.0
    return replace(
        family,
        scale_error=_digits(np.array([scale]))[0],
        density_error=_digits(np.array([density]))[0],
        slope_errors={size: _digits(np.array([value]))[0] for size, value in slopes.items()},
    )


# From a family to the statistics of a model ---------------------------------------------------------------------------


def transferred_statistics(family: Family, workload: Workload, *, steps: int) -> GradientStatistics:
    """Return statistics of a model's gradients as its family's ladder has them; see the module's notes."""
    width, layers = sizes_of(workload.model)
    question = Question(width, layers, workload.sequence_length, workload.learning_rate, workload.optimizer)
    transferred = _Transferred(family, law_of(family), question, workload.model, workload.global_batch_size, steps)
    return transferred.statistics(workload.precision)


class _Transferred:
    """One transfer, with what all of its tensors have in common."""

    def __init__(self, family: Family, law: Law, question: Question, model: Model, batch: int, steps: int) -> None:
        self.family, self.law, self.question, self.model, self.batch = family, law, question, model, batch
        self.base = law.base(question.optimizer)
        sampled = [step for step in self.base.sampled_steps if step < steps - 1]
        self.steps, self.sampled = steps, (*sampled, steps - 1)
        self.parameters = placed(model)
        self.samples = sorted({min(batch, 2**k) for k in range(batch.bit_length() + 1)})

    def statistics(self, precision: str) -> GradientStatistics:
        """Return the statistics."""
        distinct = {(each.key, self._rows_of(each), each.share): each for each in self.parameters}
        elements = np.array([float(math.prod(each.shape)) for each in self.parameters])
        scales = np.array([self._rms(each, 0, self.batch) for each in self.parameters])
        middle = float(np.exp(np.average(np.log(np.maximum(scales, 1e-30)), weights=elements)))
        units = [change_unit(self.question.optimizer, self.question.learning_rate, scale) for scale in scales]
        unit = float(np.exp(np.average(np.log(units), weights=elements)))
        thresholds, publish = _half_decades(middle, -5, 5), _half_decades(unit, -6, 6)
        traces = []
        for samples in self.samples:
            made = {which: self._tensor(each, samples, thresholds) for which, each in distinct.items()}
            tensors = {each.name: made[each.key, self._rows_of(each), each.share] for each in self.parameters}
            traces.append(RankTrace(samples=samples, tensors=tensors))
        changes = {which: self._changes(each, publish) for which, each in distinct.items()}
        return GradientStatistics(
            model=self.model.name,
            precision=precision,
            optimizer=self.question.optimizer,
            learning_rate=self.question.learning_rate,
            global_batch_size=self.batch,
            sequence_length=self.question.sequence_length,
            seed=0,
            steps=self.steps,
            sampled_steps=self.sampled,
            feedback_thresholds=thresholds,
            multiples=self.family.multiples,
            publish_thresholds=publish,
            traces=tuple(traces),
            changes={each.name: changes[each.key, self._rows_of(each), each.share] for each in self.parameters},
            source=f"transferred from the family {self.family.family}: {self.family.source}",
            transfer=self._transfer(),
        )

    def _transfer(self) -> Transfer:
        question = self.question
        asked = (question, self.model.name, self.batch, self.steps, [(p.name, p.shape) for p in self.parameters])
        return Transfer(
            family=self.family.family,
            digest=sha256(repr((self.family.digest, asked)).encode()).hexdigest()[:16],
            scale_error_ratio=float(f"{math.exp(scale_error(self.family, question, self._vocabulary())):.3g}"),
            density_error_ratio=float(f"{math.exp(self.family.density_error):.3g}"),
        )

    def _vocabulary(self) -> int:
        return self.model.input.vocabulary if isinstance(self.model.input, TokenInput) else 0

    def _rows_of(self, each: Placed) -> int:
        """Return the number of rows of an embedding or head that has far more than the ladder's; else 0."""
        rows = self.family.rows
        if rows is None or each.role not in ("tokens", "head", "tied") or len(each.shape) < 2:
            return 0
        return max(each.shape) if max(each.shape) > 2 * rows.vocabulary else 0

    def _key(self, each: Placed) -> str:
        """Return the family's key for a tensor: of the same role, or of what is most like it."""
        keys = self.base.common
        role = "head" if each.role == "tied" else each.role
        bias = ".bias" if role.endswith(".bias") else ""
        tried: list[str] = [role]
        while (role := LIKE.get(role.removesuffix(".bias"), "")) and len(tried) < 5:
            tried.append(role + bias)
        tried += ["norm.bias", "out.bias"] if bias else []
        for name in tried:
            for place in (each.place, "inner", "last", "after", "before", "first"):
                if f"{place}/{name}" in keys:
                    return f"{place}/{name}"
        return next((key for key in keys if key.endswith("norm.weight")), next(iter(keys)))

    def _scales(self, each: Placed, step: int) -> tuple[float, float]:
        """Return the mean squares of the common part and of one sample's deviation."""
        key, share = self._key(each), each.share
        common = self.law.scale("common", key, self.question, step) or 0.0
        deviation = self.law.scale("deviation", key, self.question, step) or 0.0
        return common * share**2, deviation * share

    def _rms(self, each: Placed, step: int, samples: int) -> float:
        return self._tail(each, step, samples).rms

    def _tail(self, each: Placed, step: int, samples: int) -> "Tail":
        common, deviation = self._scales(each, step)
        shape = self.base.shapes[self._key(each)]
        if rows := self._rows_of(each):
            return self._row_tail(each, step, samples, rows)
        rms = math.sqrt(common + deviation / samples)
        tails = self._at_step(shape.tails, step)
        mean = float(self._at_step([(each,) for each in shape.mean_ratios], step)[0])
        return Tail(rms, mean * rms, common / (common + deviation / samples), np.array(SHAPE_EDGES) * rms, tails)

    def _row_tail(self, each: Placed, step: int, samples: int, vocabulary: int) -> "Tail":
        """Return the tail of an embedding or head of a large vocabulary; see [Note: rows]."""
        parts = {"tied": ("tokens", "head")}.get(each.role, (each.role,))
        assert self.family.rows is not None
        own = self.family.rows
        length = self.question.sequence_length or 1
        tokens = samples * length
        frequency, rows = zipf(vocabulary)
        squares = float((frequency**2 * rows).sum())
        hit = tokens * frequency
        counts, chances = _poisson(hit)
        total = np.zeros_like(counts)
        common = deviation = 0.0
        for role in parts:
            place = replace(each, role=role, place="before" if role == "tokens" else "after")
            theirs, own_deviation = self._scales(place, step)
            per_token = own_deviation * length * own.vocabulary  # a^2: of one token in its row
            coherent = min(1.0, theirs * own.vocabulary / max(1e-300, own.squares * per_token))
            variance = per_token * (counts + coherent * counts * np.maximum(0.0, counts - 1)) / tokens**2
            if role == "head":
                variance = np.where(counts > 0, variance, per_token * coherent / vocabulary**2)
            total += variance
            common += theirs * own.vocabulary / vocabulary * squares / own.squares
            deviation += own_deviation * own.vocabulary / vocabulary
        weights = (chances * (rows / vocabulary)[:, None]).ravel()
        scales = np.sqrt(total.ravel())
        rms = math.sqrt(float(weights @ scales**2))
        edges = np.array(SHAPE_EDGES) * rms
        from scipy.special import erfc  # lazy: large vocabularies only

        with np.errstate(divide="ignore"):
            reached = erfc(edges[:, None] / (math.sqrt(2) * np.maximum(scales, 1e-300)))
        tails = (reached * (scales > 0)) @ weights
        mean = math.sqrt(2 / math.pi) * float(weights @ scales)
        return Tail(rms, mean, common / max(1e-300, common + deviation / samples), edges, tails)

    def _at_step(self, rows: Sequence[Sequence[float]], step: int) -> Floats:
        return at_step(self.family.shape_steps, rows, step)

    def _tensor(self, each: Placed, samples: int, thresholds: Sequence[float]) -> TensorTrace:
        parts = [each]
        if each.role == "qkv" and len(each.shape) > 1 and each.shape[0] > each.shape[1]:
            parts = [replace(each, role=role) for role in THIRDS]
        blocks, correlations = [], []
        for part in parts:
            tails = [self._tail(part, step, samples) for step in self.sampled]
            blocks.append(self._block(self.base.shapes[self._key(part)], tails, thresholds))
            correlations.append([tail.correlation for tail in tails])
        return TensorTrace(blocks=tuple(blocks), correlations=tuple(np.mean(correlations, axis=0).tolist()))

    def _block(self, shape: RoleShape, tails: Sequence["Tail"], thresholds: Sequence[float]) -> BlockTrace:
        feedback, relative = [], []
        for step, tail in zip(self.sampled, tails, strict=True):
            if shape.growth:
                levels = np.array(thresholds) / tail.rms
                growth = np.interp(np.log(levels), np.log(LEVELS), self._at_step(shape.growth, step))
                sent = tail_at(tail.levels.tolist(), tail.ratios.tolist(), np.array(thresholds) / growth)
                feedback.append(FeedbackDensity(sent_ratios=tuple(sent.tolist())))
            plain, kept = (self._at_step(rows, step) for rows in (shape.relative, shape.relative_feedback))
            relative.append(RelativeDensity(sent_ratios=tuple(plain.tolist()), feedback_ratios=tuple(kept.tolist())))
        sketches = tuple(tail.sketch() for tail in tails)
        return BlockTrace(sketches=sketches, feedback=tuple(feedback), relative=tuple(relative))

    def _changes(self, each: Placed, publish: Sequence[float]) -> ChangeTrace:
        shape, rows = self.base.shapes[self._key(each)], []
        for step in self.sampled:
            rms = self._rms(each, step, self.batch)
            unit = change_unit(self.question.optimizer, self.question.learning_rate, rms)
            sent = tail_at(CHANGES, self._at_step(shape.changes, step).tolist(), np.array(publish) / unit)
            rows.append(tuple(sent.tolist()))
        return ChangeTrace(blocks=(tuple(rows),))


@dataclass(frozen=True)
class Tail:
    """Distribution of the |g| of one tensor at one step."""

    rms: float
    mean: float
    correlation: float
    levels: Floats
    ratios: Floats

    def sketch(self) -> Sketch:
        """Return the distribution at the edges of sketches."""
        first = math.ceil((math.log10(self.levels[0]) - LOWEST_DECADE) * EDGES_PER_DECADE)
        first = min(max(0, first), len(SKETCH_EDGES) - 2)
        last = math.floor((math.log10(self.levels[-1]) - LOWEST_DECADE) * EDGES_PER_DECADE)
        edges = np.array(SKETCH_EDGES[first : max(first + 1, last + 1)])
        ratios = np.minimum.accumulate(tail_at(self.levels.tolist(), self.ratios.tolist(), edges))
        some = ratios[: max(1, int((ratios > 0).sum()))]
        return Sketch(mean=self.mean, rms=self.rms, first_edge=first, tail_ratios=tuple(some.tolist()))


def zipf(vocabulary: int) -> tuple[Floats, Floats]:
    """Return frequencies of groups of tokens, and the number of tokens in each: f is in proportion to 1 / (rank + 2.7).

    Source: Zipf's law in Mandelbrot's form for words of natural language (Piantadosi 2014, Zipf's word frequency law in
    natural language, Psychonomic Bulletin & Review 21).

    >>> frequency, tokens = zipf(50257)
    >>> round(float(frequency @ tokens), 6), int(tokens.sum())
    (1.0, 50257)
    """
    bounds = np.unique(np.round(np.geomspace(1, vocabulary + 1, ROW_GROUPS + 1)).astype(int))
    tokens = np.diff(bounds)
    weights = (np.log(bounds[1:] + 2.7) - np.log(bounds[:-1] + 2.7)) / tokens
    return weights / (weights * tokens).sum(), tokens.astype(float)


def _poisson(means: Floats) -> tuple[Floats, Floats]:
    """Return numbers of hits and their probabilities, by group of rows: exact for few, the mean for many."""
    few = np.arange(HITS, dtype=float)
    factorials = np.array([math.lgamma(k + 1) for k in few])
    with np.errstate(divide="ignore"):
        logs = few * np.log(np.maximum(means, 1e-300))[:, None] - means[:, None] - factorials
    chances = np.exp(logs)
    rest = np.maximum(0.0, 1 - chances.sum(1))
    beyond = np.maximum(HITS, means)
    counts = np.concatenate([np.tile(few, (len(means), 1)), beyond[:, None]], axis=1)
    return counts, np.concatenate([chances, rest[:, None]], axis=1)


def _half_decades(middle: float, first: int, last: int) -> tuple[float, ...]:
    """Return 10^(k/2) around a magnitude."""
    centre = round(2 * math.log10(middle))
    return tuple(float(f"{10 ** (k / 2):.4g}") for k in range(centre + first, centre + last + 1))


def scale_error(family: Family, question: Question, vocabulary: int = 0) -> float:
    """Return the logarithm of the factor on the scale of |g| that the prediction's band has; see [Note: band]."""
    squares = family.scale_error**2
    for size, distance in distances(family, question).items():
        squares += (family.slope_errors.get(size, 0.0) * distance) ** 2
    if family.rows is not None and vocabulary > 2 * family.rows.vocabulary:
        squares += VOCABULARY_ERROR**2
    return math.sqrt(squares)


def distances(family: Family, question: Question) -> dict[str, float]:
    """Return how far each size lies beyond those of the ladder's rungs, in e-folds."""
    adaptive = question.optimizer in ADAPTIVE
    fitted = [question_of(rung) for rung in family.rungs if not rung.held_back]
    rungs = [each.logarithms() for each in fitted if (each.optimizer in ADAPTIVE) == adaptive]
    rungs = rungs or [each.logarithms() for each in fitted]
    beyond = {}
    for size, value in question.logarithms().items():
        known = [each[size] for each in rungs]
        beyond[f"{size} above"], beyond[f"{size} below"] = max(0.0, value - max(known)), max(0.0, min(known) - value)
    return beyond


@cache
def shipped_families() -> dict[str, Path]:
    """Return the family files that come with the package, by name; they lie in `scenarios/gradients/families`."""
    folder = Path(str(files("gssim.workload").joinpath("families")))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def read_family(path: Path) -> Family:
    """Return the family in the JSON file `path`; raise UserError where it is not one."""
    return validated(Family, read_json(path), file=str(path))
