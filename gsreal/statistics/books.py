"""What is written down of a training's courses: sketches of gradients and changes, at the steps that are looked at."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from gsreal.gradient_sharding.thresholds import TINY
from gsreal.statistics.feedback import Feedback, Reached
from gsreal.statistics.sketches import BLOCKS, SMALL, BlockSketches, partition, rounded
from gsreal.statistics.training import Gradients, Replica
from gssim.gradients import SKETCH_EDGES
from gssim.plan import Push
from gssim.scenario import Scenario

MULTIPLES = tuple(float(f"{2 ** (k / 2):.4g}") for k in range(-2, 10))
"""Of a tensor's mean magnitude: relative thresholds that are looked at. With error feedback the mean keeps up with a
threshold to about twice it; beyond, the fewest elements send: so they are close together."""


class GradientBook:
    """One parameter's gradient, as ranks with the same number of samples see it."""

    def __init__(
        self, steps: Sequence[int], thresholds: Sequence[float], multiples: Sequence[float], *, small: bool
    ) -> None:
        self.thresholds, self.multiples, self.small = thresholds, multiples, small
        self.first: BlockSketches | None = None
        self.pages = {step: _Page() for step in steps}

    def begin(self) -> None:
        """Begin a course, in which nothing is held back yet."""
        self.feedback = Feedback(self.thresholds, self.multiples)

    def see_first(self, gradient: Tensor) -> None:
        """Add a gradient of the first step."""
        self.first = self.first or BlockSketches()
        self.first.add(gradient)

    def see(self, step: int, gradient: Tensor) -> None:
        """Add a gradient to a step's page."""
        held_against = self.thresholds or self.multiples
        self.pages[step].add(gradient, self.feedback.reached(gradient) if held_against else None)

    def trace(self) -> dict[str, Any]:
        """Return the book as a TensorTrace."""
        pages = [*self.pages.values()]
        parts = partition([page.sketches.means for page in pages], small=self.small)
        correlations = [page.correlation() for page in pages] if all(page.pairs for page in pages) else []
        return {"correlations": correlations, "blocks": [self._block(part) for part in parts]}

    def _block(self, part: slice) -> dict[str, Any]:
        """Return what is told of some of the blocks together, as a BlockTrace."""
        pages = [*self.pages.values()]
        found: dict[str, Any] = {"sketches": [page.sketches.sketch(part) for page in pages]}
        if self.thresholds:
            found["feedback"] = [page.feedback(part) for page in pages]
        if self.multiples:
            found["relative"] = [page.relative(part) for page in pages]
        return found | ({"first": self.first.sketch(part)} if self.first else {})


class _Page:
    """One parameter's gradients at one step: of several ranks, over several batches, in several courses."""

    def __init__(self) -> None:
        self.sketches = BlockSketches()
        self.reached: Reached | None = None
        self.directions: Any = 0
        """Of this course's gradients, added up."""
        self.count = self.pairs = 0
        self.cosines = 0.0

    def add(self, gradient: Tensor, reached: Reached | None) -> None:
        """Add a gradient, and what of it thresholds send with error feedback."""
        self.sketches.add(gradient)
        if reached is not None:
            self.reached = self.reached + reached if self.reached else reached
        flat = gradient.detach().reshape(-1).double()
        direction = flat / flat.norm().clamp_min(TINY)
        if self.count:
            self.cosines += float(direction @ self.directions)
        self.directions = self.directions + direction
        self.pairs += self.count
        self.count += 1

    def close(self) -> None:
        """End the course: weights, and what gradients have in common, are others in the next one."""
        self.directions, self.count = 0, 0

    def feedback(self, blocks: slice) -> dict[str, Any]:
        """Return what error feedback sends of some of the blocks, as a FeedbackDensity."""
        assert self.reached is not None
        held = [self._ratios(levels, blocks, digits=2) for levels in self.reached.held]
        return {"sent_ratios": self._ratios(self.reached.sent, blocks), "held_ratios": held}

    def relative(self, blocks: slice) -> dict[str, Any]:
        """Return what relative thresholds send of some of the blocks, as a RelativeDensity."""
        assert self.reached is not None
        plain, kept = (self._ratios(rows, blocks) for rows in self.reached.relative)
        return {"sent_ratios": plain, "feedback_ratios": kept}

    def _ratios(self, rows: np.ndarray, blocks: slice, digits: int = 3) -> list[float]:
        elements = max(1, int(self.sketches.elements[blocks].sum()))
        return [rounded(float(row[blocks].sum()) / elements, digits) for row in rows]

    def correlation(self) -> float:
        """Return the mean cosine of two gradients of one course."""
        return rounded(min(1.0, max(-1.0, self.cosines / self.pairs)), 3)


class ChangeBook:
    """One parameter's changes, as its owner would publish them."""

    def __init__(self, steps: Sequence[int], thresholds: Sequence[float], elements: int, *, small: bool) -> None:
        self.thresholds, self.small = thresholds, small
        self.elements = np.bincount(np.arange(elements) * BLOCKS // elements, minlength=BLOCKS)
        self.pages = {step: np.zeros((len(thresholds), BLOCKS)) for step in steps}
        """How many elements are sent, by threshold and block."""
        self.courses = 0

    def begin(self) -> None:
        """Begin a course, in which nothing is held back yet."""
        self.feedback = Feedback(self.thresholds)
        self.courses += 1

    def add(self, step: int, change: Tensor) -> None:
        """Add a step's change; where it is looked at, write down what of it is sent."""
        if step in self.pages:
            self.pages[step] += self.feedback.reached(change).sent
        self.feedback.add(change)

    def trace(self) -> dict[str, Any]:
        """Return the book as a ChangeTrace."""
        elements = np.maximum(1, self.courses * self.elements)
        pages = [*self.pages.values()]
        parts = partition([page.sum(0) / elements for page in pages], small=self.small)
        rows = [[page[:, part].sum(1) / elements[part].sum() for page in pages] for part in parts]
        return {"blocks": [[[rounded(float(ratio), 3) for ratio in row] for row in block] for block in rows]}


class Books:
    """All that is written down of courses of training under one push policy."""

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
        self.warmup = min(scenario.run.warmup_steps, self.steps - 1)
        self.samples = {rank: samples for rank, samples in enumerate(scenario.batch_sizes) if samples}
        self.keeping = {samples: rank for rank, samples in self.samples.items()}
        """Whose gradients add up under error feedback: the last rank's of those with the same number of samples."""
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
        """Begin a course of training."""
        for book in self._gradient_books():
            book.begin()
        for published in self.changes.values():
            published.begin()

    def train(self, replica: Replica, step: int) -> None:
        """Train one step and write down what is to be seen."""
        if step in self.sampled:
            self._look_at_other_batches(replica, step)
        before = self._masters(replica)
        replica.step(step, lambda rank, gradients: self._shown(step, rank, gradients))
        for name, master in self._masters(replica).items():
            self.changes[name].add(step, master - before[name])
        if step in self.sampled:
            for book in self._gradient_books():
                book.pages[step].close()

    def _look_at_other_batches(self, replica: Replica, step: int) -> None:
        """Write down what is to be seen at a step with other batches than its own."""
        with replica.aside():
            for other in range(1, self.batches):
                for rank in self.samples:
                    self._see(step, rank, replica.gradients(step + other * self.steps, rank)[0])

    def _gradient_books(self) -> list[GradientBook]:
        return [book for books in self.gradients.values() for book in books.values()]

    def _is_first(self, step: int) -> bool:
        return step == self.push.warmup_steps and not self.push.threshold

    def _masters(self, replica: Replica) -> Gradients:
        masters = replica.masters() if self.changes else {}
        return {name: master.detach().clone() for name, master in masters.items()}

    def _shown(self, step: int, rank: int, gradients: Gradients) -> None:
        self._see(step, rank, gradients)
        if self.keeping[self.samples[rank]] == rank and step >= self.push.warmup_steps:
            for name, gradient in gradients.items():
                self.gradients[self.samples[rank]][name].feedback.add(gradient)

    def _see(self, step: int, rank: int, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            book = self.gradients[self.samples[rank]][name]
            if step in self.sampled:
                book.see(step, gradient)
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

    def thresholds(self, ratios: Sequence[float]) -> tuple[float, ...]:
        """Return, rising, the thresholds that these parts of gradients reach after the warm-up, to a sketch's edge."""
        pages = [page for book in self._gradient_books() for step, page in book.pages.items() if step >= self.warmup]
        sketches = [page.sketches for page in pages]
        reached = sum(each.reached.sum(0) for each in sketches) / sum(each.elements.sum() for each in sketches)
        chosen = {SKETCH_EDGES[int(np.abs(np.log(reached.clip(1e-12)) - np.log(ratio)).argmin())] for ratio in ratios}
        return tuple(float(f"{threshold:.2g}") for threshold in sorted(chosen))
