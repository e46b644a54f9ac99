"""A family of small models, trained as a ladder of sizes, whose gradients predict those of models of other sizes.

A family file (`gsreal gradients --ladder`) holds scales for each training of its ladder and each role of a tensor
(query, perceptron's first matrix, norm, ...; in the first, inner and last blocks). At each sampled step there are two
scales: the mean square of the gradient's part that all samples have in common, and that of one sample's deviation from
it. For n samples

   E[g^2] = common + deviation / n

[Note: law] At the first step both scales are powers of width, depth and sequence length, by role. Later they follow a
curve, common to all trainings of a role, over progress. Progress is the step times powers of the learning rate, width
and depth, relative to the ladder's first rung. Beyond the ladder's furthest progress the scales are constant.

[Note: shape] The distribution of |g| / rms, its growth under error feedback, densities of relative thresholds, and
published changes are taken from the family's first rung with the same kind of optimizer, by role and step.

[Note: band] A prediction states a factor on the scale of |g| that covers at least nine in ten of the family's held-out
trainings. Beyond the ladder's sizes the factor grows with the distance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from gssim.execution.files import read_json
from gssim.units import Count, Floats, NonNegativeFloat, PositiveFloat, PositiveInt, spec, spec_with_memory, validated
from gssim.workload.gradient_statistics import EDGES_PER_DECADE, Ratio
from gssim.workload.model import shipped_files

FAMILY_SCHEMA: Literal["gssim.gradient-family/1"] = "gssim.gradient-family/1"
SHAPE_EDGES: tuple[float, ...] = tuple(10.0 ** (k / EDGES_PER_DECADE) for k in range(-2 * EDGES_PER_DECADE, 12))
"""Multiples of the rms of |g| at which tails are kept."""
LEVELS: tuple[float, ...] = tuple(10.0 ** (k / 2) for k in range(-4, 5))
"""Thresholds in units of the rms of |g| at which the growth under error feedback is kept."""
CHANGES: tuple[float, ...] = tuple(10.0 ** (k / 2) for k in range(-6, 7))
"""Thresholds in units of a change (see `change_unit`) at which publications are kept."""
ADAPTIVE = ("adam", "adamw")
DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Densities at which a family's predictions are compared with its own trainings."""
START, WINDOWS = 8, ("start", "run")
"""Number of first steps that are compared separately; the two parts of a training that are compared."""
VOCABULARY_ERROR = math.log(1.5)
"""Added to the error (in squares) if the vocabulary differs from the ladder's: the law of its rows is not measured."""


@spec
class RoleShape:
    """Shape of one role's |g| in one training, at each of the family's `shape_steps`."""

    tails: tuple[tuple[Ratio, ...], ...]
    """Fraction of elements that reach each of `SHAPE_EDGES` times the rms."""
    mean_ratios: tuple[NonNegativeFloat, ...]
    """Mean of |g| relative to its rms."""
    growth: tuple[tuple[PositiveFloat, ...], ...] = ()
    """Factor on the scale of |g|, at each of `LEVELS`, that raises the density as residuals of error feedback do."""
    relative: tuple[tuple[Ratio, ...], ...] = ()
    """Densities of relative thresholds, at the family's `multiples`."""
    relative_feedback: tuple[tuple[Ratio, ...], ...] = ()
    """`relative` with error feedback."""
    changes: tuple[tuple[Ratio, ...], ...] = ()
    """Fraction of elements that are published, at each of `CHANGES`."""


@spec
class Rung:
    """One training of a family's ladder, with the scales of its gradients."""

    name: str
    held_back: bool = False
    """Whether the rung is held out: no law is fitted to it, and its densities are predicted from the other rungs."""
    width: PositiveInt
    layers: PositiveInt
    elements: dict[str, PositiveInt]
    """Number of the model's parameters, by role."""
    samples: PositiveInt
    """Samples per rank."""
    sequence_length: PositiveInt | None = None
    learning_rate: PositiveFloat
    optimizer: str
    sampled_steps: tuple[Count, ...]
    common: dict[str, tuple[NonNegativeFloat, ...]]
    """By role, for each of `sampled_steps`: mean square of the gradient's part that all samples have in common."""
    deviation: dict[str, tuple[NonNegativeFloat, ...]]
    """By role, for each of `sampled_steps`: mean square of one sample's deviation from the common part."""
    thresholds: dict[str, tuple[PositiveFloat, ...]]
    """For each part of training (`start`, `run`): thresholds that the mean fractions `DENSITIES` of elements reach."""
    shapes: dict[str, RoleShape] = field(default_factory=dict)
    """Shapes by role; only in the first rung of each kind of optimizer."""

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
    """Sum over all tokens of their squared frequencies."""


@spec_with_memory
class Family:
    """A family of models with its ladder; see the module's notes."""

    schema: Literal["gssim.gradient-family/1"] = FAMILY_SCHEMA
    family: str
    source: str
    shape_steps: tuple[Count, ...]
    multiples: tuple[PositiveFloat, ...]
    progress: dict[str, float]
    """Exponents of learning rate, width and depth in the progress of a step."""
    rows: RowFrequencies | None = None
    scale_error: NonNegativeFloat = 0.0
    """Logarithm of the factor on the scale of |g| that covers nine in ten scales of held-out trainings."""
    slope_errors: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """By size (`width above`, ...): addition to `scale_error`, in squares, for each e-fold beyond the ladder."""
    density_error: NonNegativeFloat = 0.0
    """Logarithm of the factor that covers nine in ten densities of relative thresholds."""
    rungs: tuple[Rung, ...]

    @cached_property
    def digest(self) -> str:
        """Identity of the file's content."""
        return sha256(repr(self).encode()).hexdigest()[:16]

    @cached_property
    def law(self) -> "Law":
        """The law that is fitted to all rungs except the held-out ones."""
        return law_of(self)


@dataclass(frozen=True)
class Question:
    """The model and training whose gradients are to be predicted: the sizes on which they depend."""

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
    """Return the question for a rung's own model and training."""
    return Question(rung.width, rung.layers, rung.sequence_length, rung.learning_rate, rung.optimizer)


# Tails ----------------------------------------------------------------------------------------------------------------

ALMOST_NONE, ALMOST_ALL = 1e-9, 1 - 1e-6


def tail_at(levels: Sequence[float], ratios: Sequence[float], at: Floats) -> Floats:
    """Return the fractions that reach the levels `at`, interpolated from those (`ratios`) that reach `levels`.

    >>> tail_at((0.1, 1.0, 10.0), (0.5, 0.25, 0.0), np.array([0.01, 1.0, 30.0])).round(3).tolist()
    [0.5, 0.25, 0.0]
    """
    first = ratios[0]
    tail = first * np.exp(-np.exp(np.interp(np.log(at), np.log(levels), _straightened(tuple(ratios)))))
    return np.asarray(np.where(tail <= 2 * ALMOST_NONE * first, 0.0, np.where(at <= levels[0], first, tail)))


@lru_cache(maxsize=1024)
def _straightened(ratios: tuple[float, ...]) -> Floats:
    """Return ln(-ln(p / p(0))) of ratios p, which is nearly linear in the logarithm of the level, for normal tails and
    heavier. Most tails of a model are others at another scale, of equal ratios.
    """
    whole = ratios[0] if ratios[0] > 0 else 1.0
    shares = np.array(ratios, dtype=float) / whole
    straightened: Floats = np.log(-np.log(np.clip(shares, ALMOST_NONE, ALMOST_ALL)))
    return straightened


TRIED = np.geomspace(1e-9, 1e2, 400)
"""Thresholds between which those for a density are interpolated."""


def reaching(ratios: Floats) -> Floats:
    """Return the thresholds that fractions `DENSITIES` of the elements reach, given the fractions that reach `TRIED`.

    If a density exceeds the fraction of elements that are not 0, its threshold is the lowest one.
    """
    thresholds: Floats = np.exp(np.interp(-np.array(DENSITIES), -np.asarray(ratios), np.log(TRIED)))
    return thresholds


def rounded(values: Floats, digits: int = 3) -> tuple[float, ...]:
    """Return the values to a few significant digits."""
    return tuple(float(f"{value:.{digits}g}") for value in values)


# The law --------------------------------------------------------------------------------------------------------------

SIZES = ("width", "layers", "sequence")
KINDS = ("common", "deviation")
LATEST = 160
"""Last step at which training curves have a node of their own, in steps of the ladder's first rung."""
NODES = np.linspace(0.0, math.log1p(LATEST), 9)
RIDGE, SMOOTHNESS, LEVELNESS = 0.1, 0.3, 0.05
"""Weights, relative to squared errors, of exponents, and of second and first differences of curves."""


@dataclass(frozen=True)
class Law:
    """Scales of a family's gradients as functions of a question; see [Note: law]."""

    bases: Mapping[bool, Rung]
    """The first rung with each kind of optimizer, by whether the optimizer is adaptive."""
    progress: Mapping[str, float]
    slopes: Mapping[tuple[str, str], Floats]
    """Exponents of `SIZES` at the first step, by kind and key."""
    curves: Mapping[tuple[bool, str, str], Floats]
    """Change of a scale's logarithm since the first step, at each of `NODES`; by kind of optimizer, kind and key."""

    def base(self, optimizer: str) -> Rung:
        """Return the rung relative to which scales of an optimizer are stated."""
        return self.bases.get(optimizer in ADAPTIVE) or next(iter(self.bases.values()))

    def scale(self, kind: str, key: str, question: Question, step: float) -> float | None:
        """Return a scale (one of `KINDS`) of a role at a step; None if the family has no such role."""
        base = self.base(question.optimizer)
        curve = self.curves.get((base.optimizer in ADAPTIVE, kind, key))
        if curve is None:
            return None
        sizes, ahead = _differences(question_of(base), question, self.progress)
        level = math.log(max(1e-30, getattr(base, kind)[key][0])) + float(sizes @ self.slopes[kind, key])
        return math.exp(level + float(np.interp(math.log1p(step * ahead), NODES, curve)))


def _differences(base: Question, question: Question, progress: Mapping[str, float]) -> tuple[Floats, float]:
    """Return the differences of the logarithms of `SIZES`, and how many steps of the base one step counts for."""
    ours, theirs = question.logarithms(), base.logarithms()
    ahead = sum(exponent * (ours[name] - theirs[name]) for name, exponent in progress.items())
    return np.array([ours[name] - theirs[name] for name in SIZES]), math.exp(ahead)


def law_of(family: Family, without: Sequence[str] = ()) -> Law:
    """Return the law fitted to a family's rungs, except the held-out ones and those named in `without`."""
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
    places, changes = [], []
    for rung in rungs:
        values = getattr(rung, kind).get(key, (0.0,))
        if min(values) > 0:
            ahead = _differences(question_of(base), question_of(rung), family.progress)[1]
            places += [math.log1p(step * ahead) for step in rung.sampled_steps]
            changes += [math.log(value / values[0]) for value in values]
    # weights of `NODES` in the linear interpolation at each place
    rows = np.array([np.interp(places, NODES, column) for column in np.eye(len(NODES))]).T
    bends, rises = (np.diff(np.eye(len(NODES)), n=order, axis=0) for order in (2, 1))
    penalties = np.vstack([SMOOTHNESS * bends, LEVELNESS * rises])
    curve = _fitted(rows, np.array(changes), penalties)
    return np.asarray(curve - curve[0])


def _fitted(rows: Floats, values: Floats, penalties: Floats) -> Floats:
    """Return least-squares coefficients, with the squares of `penalties @ coefficients` added to the errors."""
    solved: Floats = np.linalg.lstsq(
        np.vstack([rows, penalties]), np.concatenate([values, np.zeros(len(penalties))]), rcond=None
    )[0]
    return solved


# Errors of a family's predictions -------------------------------------------------------------------------------------


def at_step(steps: Sequence[int], rows: Sequence[Sequence[float]], step: int) -> Floats:
    """Return the values at a step, interpolated between `steps`, linearly in the logarithm of 1 + step.

    >>> at_step((0, 3), ((1.0,), (2.0,)), 1).tolist()
    [1.5]
    """
    at = float(np.interp(math.log1p(step), np.log1p(steps[: len(rows)]), np.arange(len(rows))))
    low = min(int(at), max(0, len(rows) - 2))
    first, second = np.asarray(rows[low], dtype=float), np.asarray(rows[min(low + 1, len(rows) - 1)], dtype=float)
    values: Floats = first + (at - low) * (second - first)
    return values


def predicted_ratios(family: Family, law: Law, rung: Rung, window: str) -> Floats:
    """Return the predicted mean fractions of a rung's elements that reach `TRIED`, over one part of its steps."""
    base, question = law.base(rung.optimizer), question_of(rung)
    ratios: Floats = np.zeros(len(TRIED))
    weights = rung.weights(window)
    for key, count in rung.elements.items():
        shape = base.shapes.get(key)
        if shape is None:
            continue
        for weight, step in zip(weights, rung.sampled_steps, strict=True):
            common, deviation = (law.scale(kind, key, question, step) or 0.0 for kind in KINDS)
            rms = math.sqrt(common + deviation / rung.samples)
            tails = at_step(family.shape_steps, shape.tails, step)
            ratios += weight * count * tail_at(SHAPE_EDGES, tails.tolist(), TRIED / max(rms, 1e-30))
    return ratios / sum(rung.elements.values())


@dataclass(frozen=True)
class HeldBackError:
    """Errors of the densities of one training, predicted from the family's other trainings."""

    rung: str
    window: str
    scales: Floats
    """Logarithm of predicted relative to measured threshold, for each of `DENSITIES`."""
    densities: Floats
    """Logarithm of predicted relative to measured density, at the measured threshold."""
    distances: Mapping[str, float]
    """How far each size lies outside the range of the other rungs, in e-folds."""


def held_back_errors(family: Family) -> list[HeldBackError]:
    """Return the errors of every rung that provides no shapes, predicted from the others that are not held out."""
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
"""Fraction of the scales of trainings inside the ladder that a band is made to cover; required are nine in ten."""
LEAST_ERROR = math.log(1.1)
NEAR = 1.0
"""Largest distance of a near rung, in e-folds; models of half and twice the width or depth are near."""


def with_errors(family: Family) -> Family:
    """Return the family with its band, from the errors of near rungs and, by distance, of those beyond them.

    The error of a density at a known scale is its error minus the mean over `DENSITIES`.
    """
    errors = held_back_errors(family)
    near = [e for e in errors if max(e.distances.values()) <= NEAR] or errors
    scale = max(LEAST_ERROR, float(np.quantile([abs(e.scales) for e in near], COVERED)))
    density = max(LEAST_ERROR, float(np.quantile([abs(e.densities - e.densities.mean()) for e in near], COVERED)))
    slopes = {}
    for size in (*SIZES, "learning rate"):
        for sides in ((f"{size} above", f"{size} below"), (f"{size} below", f"{size} above")):
            known = [[abs(e.scales) / e.distances[side] for e in errors if e.distances[side] > 0] for side in sides]
            beyond = known[0] or known[1]  # without rungs beyond on one side, the other side's value is used
            slopes[sides[0]] = float(np.quantile(np.concatenate(beyond), COVERED)) if beyond else 0.0
    return replace(
        family,
        scale_error=rounded(np.array([scale]))[0],
        density_error=rounded(np.array([density]))[0],
        slope_errors={size: rounded(np.array([value]))[0] for size, value in slopes.items()},
    )


def scale_error(family: Family, question: Question, vocabulary: int = 0) -> float:
    """Return the logarithm of the factor on the scale of |g| by which a prediction's band extends; see [Note: band]."""
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
    return shipped_files("families", "json")


def read_family(path: Path) -> Family:
    """Return the family in the JSON file `path`; raise UserError where it is not one."""
    return validated(Family, read_json(path), file=str(path))
