"""What is written down of one training run: sketches of gradients and changes, at the steps that are looked at."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsreal.statistics.feedback import Feedback
from gsreal.statistics.sketches import BLOCKS, SMALL, BlockSketches, partition, rounded
from gsreal.statistics.training import Gradients, Replica
from gssim.gradients import SKETCH_EDGES


class GradientBook:
    """One parameter's gradient, as ranks with the same number of samples see it."""

    def __init__(self, thresholds: Sequence[float], *, small: bool) -> None:
        self.feedback, self.small = Feedback(thresholds), small
        self.pages: list[_Page] = []

    def begin(self) -> None:
        """Begin the page of a step."""
        self.pages.append(_Page())

    def see(self, gradient: Tensor) -> None:
        """Add a gradient to the page."""
        page = self.pages[-1]
        page.sketches.add(gradient)
        sent, sums = self.feedback.reached(gradient)
        page.sent, page.sums = page.sent + sent, page.sums + sums
        page.total = page.total + gradient.detach().double()
        page.square += float(gradient.double().square().sum())
        page.count += 1

    def trace(self) -> dict[str, Any]:
        """Return the book as a TensorTrace."""
        parts = partition([page.sketches.means for page in self.pages], small=self.small)
        blocks = [
            {
                "sketches": [page.sketches.sketch(part) for page in self.pages],
                "feedback": [page.feedback(part) for page in self.pages] if self.feedback.thresholds else [],
            }
            for part in parts
        ]
        seen = all(page.count > 1 for page in self.pages)
        return {"correlations": [page.correlation() for page in self.pages] if seen else [], "blocks": blocks}


class _Page:
    """One parameter's gradients at one step: of several ranks, and over several batches."""

    def __init__(self) -> None:
        self.sketches = BlockSketches()
        self.sent: Any = 0
        self.sums: Any = 0
        self.total: Any = 0
        self.square, self.count = 0.0, 0

    def feedback(self, blocks: slice) -> dict[str, Any]:
        elements = max(1, int(self.sketches.elements[blocks].sum()))
        return {
            "sent_ratios": [rounded(float(row[blocks].sum()) / elements, 3) for row in self.sent],
            "means": [rounded(float(row[blocks].sum()) / elements, 3) for row in self.sums],
        }

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
            self.pages.append(self.feedback.reached(change)[0])
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
        self, replica: Replica, sampled: Sequence[int], *, push_grid: Sequence[float], publish_grid: Sequence[float]
    ) -> None:
        self.replica, self.sampled = replica, frozenset(sampled)
        self.samples = {rank: replica.scenario.batch_sizes[rank] for rank in replica.feeds}
        whole = sum(parameter.numel() for parameter in replica.parameters.values())
        small = {name: parameter.numel() <= SMALL * whole for name, parameter in replica.parameters.items()}
        self.gradients: dict[int, dict[str, GradientBook]] = defaultdict(
            lambda: {name: GradientBook(push_grid, small=each) for name, each in small.items()}
        )
        self.changes = {name: ChangeBook(publish_grid, small=each) for name, each in small.items() if publish_grid}
        self.keeping = {samples: rank for rank, samples in self.samples.items()}
        """Whose gradients add up under error feedback: the last rank's of those with the same number of samples."""

    def train(self, step: int, more: Sequence[int]) -> None:
        """Train one step and write down what is to be seen; `more`: steps whose batches are looked at besides."""
        looking = step in self.sampled
        if looking:
            for samples in set(self.samples.values()):
                for book in self.gradients[samples].values():
                    book.begin()
            with torch.random.fork_rng(devices=[]):
                for other in more:
                    for rank in self.samples:
                        self._see(rank, self.replica.gradients(other, rank)[0])
        before = self._masters()
        self.replica.step(step, lambda rank, gradients: self._shown(rank, gradients, look=looking))
        for name, master in self._masters().items():
            self.changes[name].add(master - before[name], look=looking)

    def _masters(self) -> Gradients:
        masters = self.replica.masters() if self.changes else {}
        return {name: master.detach().clone() for name, master in masters.items()}

    def _shown(self, rank: int, gradients: Gradients, *, look: bool) -> None:
        if look:
            self._see(rank, gradients)
        if self.keeping[self.samples[rank]] == rank:
            for name, gradient in gradients.items():
                self.gradients[self.samples[rank]][name].feedback.add(gradient)

    def _see(self, rank: int, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            self.gradients[self.samples[rank]][name].see(gradient)

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
