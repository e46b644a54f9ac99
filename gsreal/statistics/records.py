"""Records of a training's courses for gradient statistics: sketches of gradients and changes, at the sampled steps."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from torch import Tensor

from gsreal.gradient_sharding.thresholds import TINY
from gsreal.statistics.sketches import (
    BLOCKS,
    SMALL,
    BlockSketches,
    Feedback,
    Reached,
    partition,
    rounded,
    sketch,
    typical,
)
from gsreal.statistics.training import Gradients, Replica
from gssim.plan import Push
from gssim.scenario import Scenario

MULTIPLES = tuple(float(f"{2 ** (k / 2):.4g}") for k in range(-2, 10))
"""Of a tensor's mean magnitude: relative thresholds that are looked at. With error feedback the mean keeps up with a
threshold to about twice it; beyond, the fewest elements send: so they are close together."""


class GradientBook:
    """Records of one parameter's gradient, for ranks with the same number of samples."""

    def __init__(
        self, steps: Sequence[int], thresholds: Sequence[float], multiples: Sequence[float], *, small: bool
    ) -> None:
        self.steps, self.thresholds, self.multiples, self.small = steps, thresholds, multiples, small
        self.first: BlockSketches | None = None
        self.courses: list[dict[int, _Page]] = []
        """Pages of each course, by step."""

    def begin(self) -> None:
        """Start a course, with empty residuals."""
        self.feedback = Feedback(self.thresholds, self.multiples)
        self.courses.append({step: _Page() for step in self.steps})

    def see_first(self, gradient: Tensor) -> None:
        """Add a gradient of the first step."""
        self.first = self.first or BlockSketches()
        self.first.add(gradient)

    def see(self, step: int, batch: int, gradient: Tensor) -> None:
        """Add a gradient to a step's page; `batch`: its batch's number in that step."""
        held_against = self.thresholds or self.multiples
        self.courses[-1][step].add(batch, gradient, self.feedback.reached(gradient) if held_against else None)

    def pages(self, step: int) -> list["_Page"]:
        """Return all courses' pages of a step."""
        return [course[step] for course in self.courses]

    def trace(self) -> dict[str, Any]:
        """Return the book as a TensorTrace."""
        pages = [self.pages(step) for step in self.steps]
        looks = [[look for page in every for look in page.looks.values()] for every in pages]
        means = [np.sum([look.sketches.means for look in every], axis=0) for every in looks]
        parts = partition(means, small=self.small)
        has_pairs = all(page.pairs for every in pages for page in every)
        correlations = [rounded(fmean(page.correlation() for page in every), 3) for every in pages] if has_pairs else []
        return {"correlations": correlations, "blocks": [self._block(looks, part) for part in parts]}

    def _block(self, looks: list[list["_Look"]], part: slice) -> dict[str, Any]:
        """Return the records of a range of blocks, as a BlockTrace."""
        fields: dict[str, Any] = {"sketches": [sketch([look.sketches for look in every], part) for every in looks]}
        if self.thresholds:
            fields["feedback"] = [_feedback(every, part) for every in looks]
        if self.multiples:
            fields["relative"] = [_relative(every, part) for every in looks]
        return fields | ({"first": sketch([self.first], part)} if self.first else {})


class _Look:
    """One parameter's gradients over one batch, of several ranks."""

    def __init__(self) -> None:
        self.sketches = BlockSketches()
        self.reached: Reached | None = None

    def add(self, gradient: Tensor, reached: Reached | None) -> None:
        """Add a gradient, and its counts over thresholds with error feedback."""
        self.sketches.add(gradient)
        if reached is not None:
            self.reached = self.reached + reached if self.reached else reached


class _Page:
    """One parameter's gradients at one step of one course: of several ranks, over several batches."""

    def __init__(self) -> None:
        self.looks: dict[int, _Look] = {}
        """By batch."""
        self.directions: Any = 0
        """Sum of the normalised gradients."""
        self.count = self.pairs = 0
        self.cosines = 0.0

    def add(self, batch: int, gradient: Tensor, reached: Reached | None) -> None:
        """Add a gradient over a batch, and its counts over thresholds with error feedback."""
        self.looks.setdefault(batch, _Look()).add(gradient, reached)
        flat = gradient.detach().reshape(-1).double()
        direction = flat / flat.norm().clamp_min(TINY)
        if self.count:
            self.cosines += float(direction @ self.directions)
        self.directions = self.directions + direction
        self.pairs += self.count
        self.count += 1

    def close(self) -> None:
        """End the step: free tensors as large as a gradient."""
        self.directions = 0

    def correlation(self) -> float:
        """Return the mean cosine of two of the gradients."""
        return min(1.0, max(-1.0, self.cosines / self.pairs))


def _feedback(looks: Sequence[_Look], blocks: slice) -> dict[str, Any]:
    """Return the densities with error feedback of a range of blocks, as a FeedbackDensity."""
    sent = typical([_ratios(look, look.reached.sent, blocks) for look in looks if look.reached])
    held = typical([_ratios(look, look.reached.held, blocks) for look in looks if look.reached])
    return {"sent_ratios": _rounded(sent), "held_ratios": [_rounded(levels, 2) for levels in held]}


def _relative(looks: Sequence[_Look], blocks: slice) -> dict[str, Any]:
    """Return the densities of relative thresholds of a range of blocks, as a RelativeDensity."""
    plain, kept = typical([_ratios(look, look.reached.relative, blocks) for look in looks if look.reached])
    return {"sent_ratios": _rounded(plain), "feedback_ratios": _rounded(kept)}


def _ratios(look: _Look, counts: np.ndarray, blocks: slice) -> np.ndarray:
    """Return the counted fraction of some blocks' elements; `counts`: by block along the last axis."""
    return np.asarray(counts[..., blocks].sum(-1) / max(1, int(look.sketches.elements[blocks].sum())))


def _rounded(ratios: np.ndarray, digits: int = 3) -> list[float]:
    return [rounded(float(ratio), digits) for ratio in ratios]


class ChangeBook:
    """Records of one parameter's changes, as its owner would publish them."""

    def __init__(self, steps: Sequence[int], thresholds: Sequence[float], elements: int, *, small: bool) -> None:
        self.steps, self.thresholds, self.small = steps, thresholds, small
        self.elements = np.bincount(np.arange(elements) * BLOCKS // elements, minlength=BLOCKS)
        self.courses: list[dict[int, np.ndarray]] = []
        """Number of elements sent in each course, by step, and by threshold and block."""

    def begin(self) -> None:
        """Start a course, with nothing unpublished."""
        self.feedback = Feedback(self.thresholds)
        self.courses.append({})

    def add(self, step: int, change: Tensor) -> None:
        """Add a step's change; if the step is sampled, record the elements sent."""
        if step in self.steps:
            self.courses[-1][step] = self.feedback.reached(change).sent
        self.feedback.add(change)

    def trace(self) -> dict[str, Any]:
        """Return the book as a ChangeTrace."""
        pages = [[course[step] for course in self.courses] for step in self.steps]
        elements = np.maximum(1, self.elements)
        parts = partition([np.sum(every, axis=(0, 1)) / elements for every in pages], small=self.small)
        rows = [[self._sent(every, part) for every in pages] for part in parts]
        return {"blocks": [[_rounded(row) for row in block] for block in rows]}

    def _sent(self, every: Sequence[np.ndarray], part: slice) -> np.ndarray:
        return typical([sent[:, part].sum(1) / max(1, self.elements[part].sum()) for sent in every])


class Books:
    """All records of courses of training under one push policy."""

    def __init__(
        self,
        scenario: Scenario,
        push: Push,
        sampled: Sequence[int],
        sizes: Mapping[str, int],
        *,
        batches: int,
        push_grid: Sequence[float],
        publish_grid: Sequence[float],
    ) -> None:
        self.push, self.batches = push, batches
        self.sampled = frozenset(sampled)
        self.steps = scenario.run.warmup_steps + scenario.run.steps
        self.samples = {rank: samples for rank, samples in enumerate(scenario.batch_sizes) if samples}
        self.keeping = {samples: rank for rank, samples in self.samples.items()}
        """Rank whose gradients accumulate under error feedback: the last of those with the same number of samples."""
        small = {name: elements <= SMALL * sum(sizes.values()) for name, elements in sizes.items()}
        multiples = () if push.threshold else MULTIPLES
        self.gradients = {
            samples: {name: GradientBook(sampled, push_grid, multiples, small=small[name]) for name in sizes}
            for samples in set(self.samples.values())
        }
        """By the number of samples."""
        self.changes = {
            name: ChangeBook(sampled, publish_grid, elements, small=small[name])
            for name, elements in sizes.items()
            if publish_grid
        }

    def begin(self) -> None:
        """Start a course of training."""
        for book in self._gradient_books():
            book.begin()
        for published in self.changes.values():
            published.begin()

    def train(self, replica: Replica, step: int) -> None:
        """Train one step and record its samples."""
        if step in self.sampled:
            self._look_at_other_batches(replica, step)
        before = self._masters(replica)
        replica.step(step, lambda rank, gradients: self._shown(step, rank, gradients))
        for name, master in self._masters(replica).items():
            self.changes[name].add(step, master - before[name])
        if step in self.sampled:
            for book in self._gradient_books():
                book.courses[-1][step].close()

    def _look_at_other_batches(self, replica: Replica, step: int) -> None:
        """Record samples of a step with other batches than its own."""
        with replica.aside():
            for other in range(1, self.batches):
                for rank in self.samples:
                    self._see(step, other, rank, replica.gradients(step + other * self.steps, rank)[0])

    def _gradient_books(self) -> list[GradientBook]:
        return [book for books in self.gradients.values() for book in books.values()]

    def _is_first(self, step: int) -> bool:
        return step == self.push.warmup_steps and not self.push.threshold

    def _masters(self, replica: Replica) -> Gradients:
        masters = replica.masters() if self.changes else {}
        return {name: master.detach().clone() for name, master in masters.items()}

    def _shown(self, step: int, rank: int, gradients: Gradients) -> None:
        self._see(step, 0, rank, gradients)
        if self.keeping[self.samples[rank]] == rank and step >= self.push.warmup_steps:
            for name, gradient in gradients.items():
                self.gradients[self.samples[rank]][name].feedback.add(gradient)

    def _see(self, step: int, batch: int, rank: int, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            book = self.gradients[self.samples[rank]][name]
            if step in self.sampled:
                book.see(step, batch, gradient)
            if self._is_first(step):
                book.see_first(gradient)

    def traces(self) -> list[dict[str, Any]]:
        """Return the books of gradients as RankTraces."""
        return [
            {
                "samples": samples,
                "threshold": self.push.threshold or 0.0,
                "error_feedback": bool(self.push.threshold and self.push.error_feedback),
                "tensors": {name: book.trace() for name, book in books.items()},
            }
            for samples, books in sorted(self.gradients.items())
        ]
