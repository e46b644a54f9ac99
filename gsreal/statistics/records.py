"""Records of a training's courses for gradient statistics: sketches of gradients and changes, at the sampled steps.

Tensors are sketched block by block. Counts over thresholds with error feedback do not affect the training.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsreal.gradient_sharding.messages import TINY
from gsreal.statistics.training import Gradients, Replica
from gssim.plan import Push
from gssim.scenario import Scenario
from gssim.workload.gradient_statistics import SKETCH_EDGES

BLOCKS = 12
"""Blocks of a tensor: query, key and value have four each, as has every third."""
PARTITIONS = (1, 2, 3, 4, 6, BLOCKS)
ALIKE = 2.0
"""Blocks whose mean magnitudes differ by at most this factor are merged."""
SMALL = 0.01
"""Tensors with at most this fraction of the model's elements are a single block."""
NEARLY_ALL = 0.99
"""Edges that more than this fraction of the nonzero elements reach are left out."""


class BlockSketches:
    """Sums over the blocks of one tensor at one step, of all the gradients that are added."""

    def __init__(self) -> None:
        self.elements: Any = 0
        self.sums: Any = 0
        self.squares: Any = 0
        self.reached: Any = 0

    def add(self, gradient: Tensor) -> None:
        """Add a gradient's elements."""
        magnitudes = gradient.detach().abs().reshape(-1).double()
        edges = torch.tensor(SKETCH_EDGES, dtype=torch.float64, device=magnitudes.device)
        below = torch.bucketize(magnitudes, edges, right=True)
        bins = len(SKETCH_EDGES) + 1
        for number, block in enumerate(below.tensor_split(starts(len(below))[1:])):
            block.add_(number * bins)
        counts = torch.bincount(below, minlength=BLOCKS * bins).view(BLOCKS, bins)
        reached = counts.flip(1).cumsum(1).flip(1).cpu().numpy()
        self.elements, self.reached = self.elements + reached[:, 0], self.reached + reached[:, 1:]
        self.sums, self.squares = self.sums + summed(magnitudes), self.squares + summed(magnitudes.square())

    def totals(self, blocks: slice) -> np.ndarray:
        """Return mean and mean square magnitude of some blocks together, and the fraction that reaches each edge."""
        totals = [self.sums[blocks].sum(), self.squares[blocks].sum(), *self.reached[blocks].sum(0)]
        return np.array(totals) / max(1, int(self.elements[blocks].sum()))

    @property
    def means(self) -> np.ndarray:
        """Mean magnitude of every block."""
        return np.asarray(self.sums / np.maximum(1, self.elements))


def typical(courses: Sequence[np.ndarray]) -> np.ndarray:
    """Return the median over courses, element by element, of arrays of equal shape.

    Gradients of one course can be several times as large for a step, and would dominate a mean.

    >>> typical([np.array([each, 0.0]) for each in (0.1, 0.4, 9.0, 0.2)]).round(3).tolist()
    [0.3, 0.0]
    """
    return np.asarray(np.median(np.array(courses), axis=0))


def sketch(courses: Sequence[BlockSketches], blocks: slice) -> dict[str, Any]:
    """Return the typical sketch of some of the blocks together."""
    mean, square, *reached = typical([each.totals(blocks) for each in courses])
    ratios = np.array(reached)
    first = max(0, int((ratios >= NEARLY_ALL * ratios[0]).sum()) - 1)
    last = max(first + 1, int((ratios > 0).sum()))
    return {
        "mean": rounded(mean),
        "rms": rounded(math.sqrt(square)),
        "first_edge": first,
        "tail_ratios": [rounded(float(ratio), 3) for ratio in ratios[first:last]],
    }


def starts(elements: int) -> list[int]:
    """Return the start of each block of a tensor: blocks are of equal size, or nearly."""
    return [-(-elements * i // BLOCKS) for i in range(BLOCKS)]


def summed(values: Tensor) -> np.ndarray:
    """Return the sum of the values in each block, or the number of true ones; of every row, if there are rows."""
    length, counts = values.shape[-1], values.dtype == torch.bool
    if values.device.type == "cpu" and length >= BLOCKS:  # with fewer, some blocks are empty
        sums = np.add.reduceat(values.numpy(), starts(length), axis=-1, dtype=np.int64 if counts else np.float64)
        return sums.astype(np.float64)
    kind = torch.int64 if counts else torch.float64
    blocks = values.tensor_split(starts(length)[1:], dim=-1)
    return torch.stack([block.sum(-1, dtype=kind) for block in blocks], -1).double().cpu().numpy()


def partition(means: Sequence[np.ndarray], *, small: bool) -> tuple[slice, ...]:
    """Return the fewest parts of equal size that consist of similar blocks; `means`: of every block at every step.

    Which owner has which part of a small tensor matters little: it is one part.
    """
    for count in PARTITIONS[:1] if small else PARTITIONS:
        size = BLOCKS // count
        parts = [[each[i * size : (i + 1) * size] for each in means] for i in range(count)]
        if all(part.max() <= ALIKE * part.min() for steps in parts for part in steps):
            break
    return tuple(slice(i * size, (i + 1) * size) for i in range(count))


def rounded(value: float, digits: int = 4) -> float:
    """Return the value to a few significant digits."""
    return float(f"{value:.{digits}g}")


@dataclass
class Reached:
    """Numbers of elements of each block that reach thresholds, for one gradient or the sum of several."""

    sent: np.ndarray
    """Number of elements, by threshold and block."""
    relative: np.ndarray
    """Number of elements, by whether there is error feedback, by multiple and by block."""

    def __add__(self, other: "Reached") -> "Reached":
        """Return the sum of both."""
        return Reached(self.sent + other.sent, self.relative + other.relative)


ROW_ELEMENTS = 2**19
"""Elements that a CPU processes together: larger intermediate results do not stay in its caches. A GPU has no limit."""


class Feedback:
    """Residuals of one tensor, under each of several thresholds, and of several multiples of the mean magnitude."""

    def __init__(self, thresholds: Sequence[float], multiples: Sequence[float] = ()) -> None:
        self.count, self.absolute = len(thresholds) + len(multiples), len(thresholds)
        self.floors = torch.tensor([*thresholds, *(TINY for _ in multiples)], dtype=torch.float64)[:, None]
        """Least threshold of each row; a row of multiples has one that no zero reaches, even if the mean is zero."""
        self.factors = torch.tensor([*(0.0 for _ in thresholds), *multiples], dtype=torch.float64)[:, None]
        self.residuals = torch.empty(0)
        """A row for each threshold, then for each multiple."""

    def reached(self, values: Tensor) -> Reached:
        """Return the number of elements that reach the thresholds if these values were sent now."""
        flat = self._begun(values)
        held = ((rows, (self.residuals[rows] + flat).abs_()) for rows in self._groups(flat))
        sent = np.concatenate([summed(each >= self._thresholds(rows, each)) for rows, each in held])
        magnitudes, multiples = flat.abs()[None], slice(self.absolute, self.count)
        every = self._thresholds(multiples, magnitudes).tensor_split(len(self._groups(flat)))
        plain = np.concatenate([summed(magnitudes >= thresholds) for thresholds in every])
        return Reached(
            sent=sent[: self.absolute].reshape(-1, BLOCKS),
            relative=np.array([plain, sent[self.absolute :]]).reshape(2, -1, BLOCKS),
        )

    def add(self, values: Tensor) -> None:
        """Add values to the residuals, send what reaches each threshold, and keep the rest."""
        flat = self._begun(values)
        for rows in self._groups(flat):
            magnitudes = self.residuals[rows].add_(flat).abs()
            self.residuals[rows].mul_(magnitudes < self._thresholds(rows, magnitudes))

    def _begun(self, values: Tensor) -> Tensor:
        """Return the values as one row; in the first call, create residuals of zeros on their device."""
        flat = values.detach().reshape(-1).float()
        if not self.residuals.numel():
            self.residuals = flat.new_zeros(self.count, len(flat))
            self.floors, self.factors = self.floors.to(flat.device), self.factors.to(flat.device)
        return flat

    def _groups(self, flat: Tensor) -> list[slice]:
        """Return the groups of rows that are processed together."""
        size = max(1, ROW_ELEMENTS // max(1, len(flat)) if flat.device.type == "cpu" else self.count)
        return [slice(first, first + size) for first in range(0, max(1, self.count), size)]

    def _thresholds(self, rows: slice, magnitudes: Tensor) -> Tensor:
        """Return the thresholds of some rows, by the mean of their magnitudes, or of the only row's."""
        means = magnitudes.mean(1, keepdim=True).double()
        return torch.maximum(self.floors[rows], means * self.factors[rows]).float()


MULTIPLES = tuple(float(f"{2 ** (k / 2):.4g}") for k in range(-2, 10))
"""Relative thresholds that are measured, as multiples of a tensor's mean magnitude. With error feedback the mean keeps
up with a threshold of up to about twice it; beyond that, hardly any elements are sent. So the multiples are close
together.
"""


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
        """Return the fields of a `gssim.workload.gradient_statistics.TensorTrace`, typical over all courses."""
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
        if self.thresholds:  # each a FeedbackDensity
            sent = [[_ratios(look, look.reached.sent, part) for look in every if look.reached] for every in looks]
            fields["feedback"] = [{"sent_ratios": _rounded(typical(courses))} for courses in sent]
        if self.multiples:  # each a RelativeDensity
            sent = [[_ratios(look, look.reached.relative, part) for look in every if look.reached] for every in looks]
            fields["relative"] = [
                {"sent_ratios": _rounded(plain), "feedback_ratios": _rounded(kept)}
                for plain, kept in map(typical, sent)
            ]
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
        """By number of the batch."""
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


def _ratios(look: _Look, counts: np.ndarray, blocks: slice) -> np.ndarray:
    """Return the counted fraction of some blocks' elements; `counts`: by block along the last axis."""
    return np.asarray(counts[..., blocks].sum(-1) / max(1, int(look.sketches.elements[blocks].sum())))


def _rounded(ratios: np.ndarray) -> list[float]:
    return [rounded(float(ratio), 3) for ratio in ratios]


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
        """Return the fields of a `gssim.workload.gradient_statistics.ChangeTrace`, typical over all courses."""
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
        multiples: Sequence[float] = MULTIPLES,
    ) -> None:
        self.push, self.batches = push, batches
        self.sampled = frozenset(sampled)
        self.steps = scenario.run.warmup_steps + scenario.run.steps
        self.samples = {rank: samples for rank, samples in enumerate(scenario.batch_sizes) if samples}
        self.keeping = {samples: rank for rank, samples in self.samples.items()}
        """Rank whose gradients accumulate under error feedback: the last of those with the same number of samples."""
        small = {name: elements <= SMALL * sum(sizes.values()) for name, elements in sizes.items()}
        multiples = () if push.threshold else multiples
        self.gradients = {
            samples: {name: GradientBook(sampled, push_grid, multiples, small=small[name]) for name in sizes}
            for samples in set(self.samples.values())
        }
        """Books of every parameter, by the number of samples."""
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
            if step == self.push.warmup_steps and not self.push.threshold:
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
