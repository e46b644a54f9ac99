"""Batches of a rank: its rows of every step's batch, and every rank's weight in the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gsreal.data import sources as data
from gsreal.methods.training import Weights
from gsreal.model_files.build import DTYPES
from gssim.plan import splitting
from gssim.scenario import Scenario

Batch = tuple[Tensor, Tensor, Weights]
PREPARED_BYTES, PREPARED_BATCHES = 2**28, 256
"""Limits on the host memory and number of batches prepared before the timed steps."""


class Feed:
    """This rank's rows of every step's batch, and every rank's fraction of its loss terms."""

    def __init__(self, scenario: Scenario, rank: int, device: torch.device) -> None:
        self.scenario, self.rank, self.device = scenario, rank, device
        policies = scenario.policies
        self.divide(scenario.data_batch_sizes)
        places = [policies.mesh.place(i).pp for i in range(scenario.ranks)]
        self.counts = [place == policies.pp - 1 for place in places]
        """Whether each rank computes a loss: in a pipeline, those of the last stage."""
        self.reads = places[rank] == 0
        self.copies = scenario.ranks // policies.pp // policies.data_ranks
        """Ranks that compute the same loss: those with slices of one replica, or parts of its gradients."""
        self.source = data.open_source(scenario.workload)

    def divide(self, sizes: Sequence[int]) -> None:
        """Set the number of rows of each part of the batch from now on; their sum stays the same."""
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        # the ranks that hold parts of one replica take the same rows
        self.rows = [parts[self.scenario.policies.data_rank(each)] for each in range(self.scenario.ranks)]
        self._prepared: dict[int, Batch] = {}

    def prepare(self, steps: range) -> None:
        """Create the first batches of these steps now, so that no step waits for its data: each is returned once."""
        size = self._make_batch(steps.start)[0].nbytes
        for step in steps[: min(PREPARED_BATCHES, max(1, PREPARED_BYTES // max(1, size)))]:
            self._prepared[step] = self._make_batch(step)

    def at(self, step: int) -> Batch:
        """Return this rank's inputs and targets of a step, and the weights of ranks and micro-batches in its loss."""
        inputs, targets, weights = self._prepared.pop(step) if step in self._prepared else self._make_batch(step)
        return inputs.to(self.device), targets.to(self.device), weights

    def _make_batch(self, step: int) -> Batch:
        seed = self.scenario.run.seed
        pairs = zip(self.source.loss_terms(seed=seed, step=step, rows=self.rows), self.counts, strict=True)
        terms = [count if counts else 0 for count, counts in pairs]
        inputs, targets = self.source.batch(seed=seed, step=step, rows=self.rows[self.rank])
        inputs, targets = inputs.clone(), targets.clone()  # numpy's memory is not the device's, which is counted
        if inputs.is_floating_point():
            inputs = inputs.to(DTYPES[self.scenario.workload.precision])
        ranks = tuple(n * self.copies / sum(terms) for n in terms)
        weights = Weights(ranks, self._micro_batch_weights(targets))
        # a rank holds no more than its stage needs
        inputs = inputs if self.reads else inputs.new_empty(0)
        targets = targets if self.counts[self.rank] else targets.new_empty(0)
        return inputs, targets, weights

    def _micro_batch_weights(self, targets: Tensor) -> tuple[float, ...]:
        count = self.scenario.plan.micro_batches
        terms = [data.loss_terms(part) for part in targets.split(splitting.split(len(targets), splitting.even(count)))]
        return tuple(n / sum(terms) for n in terms) if sum(terms) else (1.0 / count,) * count
