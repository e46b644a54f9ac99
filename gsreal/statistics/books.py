"""What is written down of one training run: sketches of gradients and changes, at the steps that are looked at."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsreal.statistics.feedback import Feedback, Reached
from gsreal.statistics.sketches import BLOCKS, SMALL, BlockSketches, partition, rounded
from gsreal.statistics.training import Gradients, Replica
from gssim.gradients import SKETCH_EDGES

RETRAINED = 5
"""Steps before one that is looked at that are trained with other batches as well."""
MULTIPLES = tuple(float(f"{2 ** (k / 2):.4g}") for k in range(-2, 10))
"""Of a tensor's mean magnitude: relative thresholds that are looked at. With error feedback the mean keeps up with a
threshold to about twice it; beyond, the fewest elements send: so they are close together."""


class GradientBook:
    """One parameter's gradient, as ranks with the same number of samples see it."""

    def __init__(self, thresholds: Sequence[float], multiples: Sequence[float], *, small: bool) -> None:
        self.feedback, self.small = Feedback(thresholds, multiples), small
        self.first: BlockSketches | None = None
        self.pages: list[_Page] = []

    def begin(self) -> None:
        """Begin the page of a step."""
        self.pages.append(_Page())

    def see_first(self, gradient: Tensor) -> None:
        """Add a gradient of the first step."""
        self.first = self.first or BlockSketches()
        self.first.add(gradient)

    def see(self, gradient: Tensor) -> None:
        """Add a gradient to the page."""
        page = self.pages[-1]
        page.sketches.add(gradient)
        if self.feedback.thresholds or self.feedback.multiples:
            reached = self.feedback.reached(gradient)
            page.reached = page.reached + reached if page.reached else reached
        page.total = page.total + gradient.detach().double()
        page.square += float(gradient.double().square().sum())
        page.count += 1

    def trace(self) -> dict[str, Any]:
        """Return the book as a TensorTrace."""
        parts = partition([page.sketches.means for page in self.pages], small=self.small)
        seen = all(page.count > 1 for page in self.pages)
        correlations = [page.correlation() for page in self.pages] if seen else []
        return {"correlations": correlations, "blocks": [self._block(part) for part in parts]}

    def _block(self, part: slice) -> dict[str, Any]:
        """Return what is told of some of the blocks together, as a BlockTrace."""
        found: dict[str, Any] = {"sketches": [page.sketches.sketch(part) for page in self.pages]}
        if self.feedback.thresholds:
            found["feedback"] = [page.feedback(part) for page in self.pages]
        if self.feedback.multiples:
            found["relative"] = [page.relative(part) for page in self.pages]
        return found | ({"first": self.first.sketch(part)} if self.first else {})


class _Page:
    """One parameter's gradients at one step: of several ranks, and over several batches."""

    def __init__(self) -> None:
        self.sketches = BlockSketches()
        self.reached: Reached | None = None
        self.total: Any = 0
        self.square, self.count = 0.0, 0

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
        """Return the mean cosine of two of the gradients, of which there are several, by the length of their sum."""
        others = (self.count - 1) * self.square
        cosine = (float(self.total.square().sum()) - self.square) / others if others else 0.0
        return rounded(min(1.0, max(-1.0, cosine)), 3)


class ChangeBook:
    """One parameter's changes, as its owner would publish them."""

    def __init__(self, thresholds: Sequence[float], *, small: bool) -> None:
        self.feedback, self.small = Feedback(thresholds), small
        self.pages: list[np.ndarray] = []

    def add(self, change: Tensor, *, look: bool) -> None:
        """Add a step's change; `look`: and write down what of it is sent."""
        if look:
            self.pages.append(self.feedback.reached(change).sent)
            self.elements = np.bincount(np.arange(change.numel()) * BLOCKS // change.numel(), minlength=BLOCKS)
        self.feedback.add(change)

    def trace(self) -> dict[str, Any]:
        """Return the book as a ChangeTrace."""
        parts = partition([page.sum(0) / np.maximum(1, self.elements) for page in self.pages], small=self.small)
        rows = [[page[:, part].sum(1) / max(1, self.elements[part].sum()) for page in self.pages] for part in parts]
        return {"blocks": [[[rounded(float(ratio), 3) for ratio in row] for row in block] for block in rows]}


class Books:
    """All that is written down of one training run."""

    def __init__(
        self,
        replica: Replica,
        sampled: Sequence[int],
        *,
        courses: int,
        push_grid: Sequence[float],
        publish_grid: Sequence[float],
    ) -> None:
        self.replica, self.sampled, self.courses = replica, frozenset(sampled), courses
        self.steps = replica.scenario.run.warmup_steps + replica.scenario.run.steps
        self.turns: dict[int, Callable[[], None]] = {}
        """Where other courses turn off, by the step at which they are looked at."""
        self.samples = {rank: replica.scenario.batch_sizes[rank] for rank in replica.feeds}
        whole = sum(parameter.numel() for parameter in replica.parameters.values())
        small = {name: parameter.numel() <= SMALL * whole for name, parameter in replica.parameters.items()}
        multiples = () if replica.push.threshold else MULTIPLES
        self.gradients = {
            samples: {name: GradientBook(push_grid, multiples, small=each) for name, each in small.items()}
            for samples in set(self.samples.values())
        }
        """By the number of samples."""
        self.changes = {name: ChangeBook(publish_grid, small=each) for name, each in small.items() if publish_grid}
        self.keeping = {samples: rank for rank, samples in self.samples.items()}
        """Whose gradients add up under error feedback: the last rank's of those with the same number of samples."""

    def train(self, step: int) -> None:
        """Train one step and write down what is to be seen."""
        self.turns |= {look: self._saved() for look in self.sampled if step == max(0, look - RETRAINED)}
        if step in self.sampled:
            for books in self.gradients.values():
                for book in books.values():
                    book.begin()
            self._look_at_other_courses(step)
        before = self._masters()
        self.replica.step(step, lambda rank, gradients: self._shown(step, rank, gradients))
        for name, master in self._masters().items():
            self.changes[name].add(master - before[name], look=step in self.sampled)

    def _look_at_other_courses(self, step: int) -> None:
        """Train the latest steps with other batches, and write down what is then to be seen at this one."""
        now, turn = self._saved(), self.turns.pop(step)
        with torch.random.fork_rng(devices=[]):
            for course in range(1, self.courses):
                turn()
                for earlier in range(max(0, step - RETRAINED), step):
                    self.replica.step(earlier, partial(self._keep, earlier), batch=earlier + course * self.steps)
                for rank in self.samples:
                    self._see(step, rank, self.replica.gradients(step + course * self.steps, rank)[0])
        now()

    def _saved(self) -> Callable[[], None]:
        """Return a function that takes the training and what was not sent back to where they are now."""
        if self.courses == 1:
            return lambda: None
        training = self.replica.saved()
        kept = [
            (book.feedback, book.feedback.residuals) for books in self.gradients.values() for book in books.values()
        ]

        def restore() -> None:
            training()
            for feedback, residuals in kept:
                feedback.residuals = residuals

        return restore

    def _is_first(self, step: int) -> bool:
        return step == self.replica.push.warmup_steps and not self.replica.push.threshold

    def _masters(self) -> Gradients:
        masters = self.replica.masters() if self.changes else {}
        return {name: master.detach().clone() for name, master in masters.items()}

    def _shown(self, step: int, rank: int, gradients: Gradients) -> None:
        self._see(step, rank, gradients)
        self._keep(step, rank, gradients)

    def _keep(self, step: int, rank: int, gradients: Gradients) -> None:
        if self.keeping[self.samples[rank]] == rank and step >= self.replica.push.warmup_steps:
            for name, gradient in gradients.items():
                self.gradients[self.samples[rank]][name].feedback.add(gradient)

    def _see(self, step: int, rank: int, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            book = self.gradients[self.samples[rank]][name]
            if step in self.sampled:
                book.see(gradient)
            if self._is_first(step):
                book.see_first(gradient)

    def traces(self) -> list[dict[str, Any]]:
        """Return the books of gradients as RankTraces."""
        push = self.replica.push
        return [
            {
                "samples": samples,
                "threshold": push.threshold or 0.0,
                "error_feedback": bool(push.threshold and push.error_feedback),
                "tensors": {name: book.trace() for name, book in books.items()},
            }
            for samples, books in sorted(self.gradients.items())
        ]

    def thresholds(self, ratios: Sequence[float]) -> tuple[float, ...]:
        """Return, rising, the thresholds that these parts of all gradients reach, to an edge of the sketches."""
        sketches = [p.sketches for books in self.gradients.values() for book in books.values() for p in book.pages]
        reached = sum(each.reached.sum(0) for each in sketches) / sum(each.elements.sum() for each in sketches)
        chosen = {SKETCH_EDGES[int(np.abs(np.log(reached.clip(1e-12)) - np.log(ratio)).argmin())] for ratio in ratios}
        return tuple(float(f"{threshold:.2g}") for threshold in sorted(chosen))
