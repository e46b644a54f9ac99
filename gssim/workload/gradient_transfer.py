"""Gradient statistics of models that were never trained, transferred from a ladder of small models of their family.

`gradient_family` describes the sources; this module turns them into statistics of the same form as measured ones.

[Note: rows] Embedding and head have a row for each token, and tokens of text follow Zipf's law. In a batch of n tokens,
a row whose token has frequency f is hit m times, m ~ Poisson(n f), and its elements are normal with

   E[g^2] = a^2 (m + r m (m - 1)) / n^2

where a and r follow from the family's scales and the frequencies of its own vocabulary. The gradient of a row that is
not hit is 0 in an embedding. In a head it is in proportion to the token's predicted probability, about 1 / vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np

from gssim.units import Floats
from gssim.workload.gradient_family import (
    CHANGES,
    KINDS,
    LEVELS,
    SHAPE_EDGES,
    Family,
    Law,
    Question,
    RoleShape,
    at_step,
    scale_error,
    tail_at,
)
from gssim.workload.gradient_rungs import LIKE, THIRDS, Placed, change_unit, placed, sizes_of
from gssim.workload.gradient_statistics import (
    EDGES_PER_DECADE,
    LOWEST_DECADE,
    SKETCH_EDGES,
    BlockTrace,
    ChangeTrace,
    FeedbackDensity,
    GradientStatistics,
    RankTrace,
    RelativeDensity,
    Sketch,
    TensorTrace,
    Transfer,
)
from gssim.workload.model import Model, TokenInput
from gssim.workload.workload import Workload

ROW_GROUPS = 24
"""Number of groups into which an embedding's rows are divided, by frequency of their tokens."""
HITS = 12
"""Number of hits per row up to which numbers of hits are distinguished."""


def transferred_statistics(family: Family, workload: Workload, *, steps: int) -> GradientStatistics:
    """Return statistics of a model's gradients, as the family's ladder predicts them; see the module's notes."""
    width, layers = sizes_of(workload.model)
    question = Question(width, layers, workload.sequence_length, workload.learning_rate, workload.optimizer)
    transferred = _Transferred(family, family.law, question, workload.model, workload.global_batch_size, steps)
    return transferred.statistics(workload.precision)


class _Transferred:
    """One transfer, with the values that all of its tensors share."""

    def __init__(self, family: Family, law: Law, question: Question, model: Model, batch: int, steps: int) -> None:
        self.family, self.law, self.question, self.model, self.batch = family, law, question, model, batch
        self.base = law.base(question.optimizer)
        sampled = [step for step in self.base.sampled_steps if step < steps - 1]
        self.steps, self.sampled = steps, (*sampled, steps - 1)
        self.parameters = placed(model)
        self.samples = sorted({min(batch, 2**k) for k in range(batch.bit_length() + 1)})
        # many tensors share a role; all but the tail is the same for any number of samples per rank
        self.at_steps: dict[tuple[str, int], tuple[float, float]] = {}
        self.curves: dict[tuple[int, str, int], Floats] = {}
        self.relative: dict[tuple[int, int], RelativeDensity] = {}

    def statistics(self, precision: str) -> GradientStatistics:
        """Return the statistics of the model that the family predicts; `precision`: that of its training."""
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
        question, source = self.question, self.model.input
        vocabulary = source.vocabulary if isinstance(source, TokenInput) else 0
        asked = (question, self.model.name, self.batch, self.steps, [(p.name, p.shape) for p in self.parameters])
        return Transfer(
            family=self.family.family,
            digest=sha256(repr((self.family.digest, asked)).encode()).hexdigest()[:16],
            scale_error_ratio=float(f"{math.exp(scale_error(self.family, question, vocabulary)):.3g}"),
            density_error_ratio=float(f"{math.exp(self.family.density_error):.3g}"),
        )

    def _rows_of(self, each: Placed) -> int:
        """Return the number of rows of an embedding or head if it is far larger than the ladder's; else 0."""
        rows = self.family.rows
        if rows is None or each.role not in ("tokens", "head", "tied") or len(each.shape) < 2:
            return 0
        return max(each.shape) if max(each.shape) > 2 * rows.vocabulary else 0

    def _key(self, each: Placed) -> str:
        """Return the family's key for a tensor: that of its role, or of the most similar role that the family has."""
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
        if (key, step) not in self.at_steps:
            common, deviation = (self.law.scale(kind, key, self.question, step) or 0.0 for kind in KINDS)
            self.at_steps[key, step] = common, deviation
        common, deviation = self.at_steps[key, step]
        return common * share**2, deviation * share

    def _rms(self, each: Placed, step: int, samples: int) -> float:
        return self._tail(each, step, samples).rms

    def _tail(self, each: Placed, step: int, samples: int) -> "Tail":
        common, deviation = self._scales(each, step)
        shape = self.base.shapes[self._key(each)]
        if rows := self._rows_of(each):
            return self._row_tail(each, step, samples, rows)
        rms = math.sqrt(common + deviation / samples)
        tails, mean = self._at_step(shape, "tails", step), float(self._at_step(shape, "mean_ratios", step)[0])
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

    def _at_step(self, shape: RoleShape, name: str, step: int) -> Floats:
        which = id(shape), name, step
        if which not in self.curves:
            rows = getattr(shape, name)
            rows = [(each,) for each in rows] if name == "mean_ratios" else rows
            self.curves[which] = at_step(self.family.shape_steps, rows, step)
        return self.curves[which]

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
                growth = np.interp(np.log(levels), np.log(LEVELS), self._at_step(shape, "growth", step))
                sent = tail_at(tail.levels.tolist(), tail.ratios.tolist(), np.array(thresholds) / growth)
                feedback.append(FeedbackDensity(sent_ratios=tuple(sent.tolist())))
            if (id(shape), step) not in self.relative:
                plain, kept = (self._at_step(shape, name, step).tolist() for name in ("relative", "relative_feedback"))
                made = RelativeDensity(sent_ratios=tuple(plain), feedback_ratios=tuple(kept))
                self.relative[id(shape), step] = made
            relative.append(self.relative[id(shape), step])
        sketches = tuple(tail.sketch() for tail in tails)
        return BlockTrace(sketches=sketches, feedback=tuple(feedback), relative=tuple(relative))

    def _changes(self, each: Placed, publish: Sequence[float]) -> ChangeTrace:
        shape, rows = self.base.shapes[self._key(each)], []
        for step in self.sampled:
            rms = self._rms(each, step, self.batch)
            unit = change_unit(self.question.optimizer, self.question.learning_rate, rms)
            sent = tail_at(CHANGES, self._at_step(shape, "changes", step).tolist(), np.array(publish) / unit)
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
    """Return frequencies of groups of tokens, and the number of tokens in each; f is proportional to 1 / (rank + 2.7).

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
    """Return numbers of hits and their probabilities, by group of rows: exact up to `HITS`, the mean for more."""
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
