"""Batches of a rank, for training and for evaluation on held-out data, and every rank's weight in the loss."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gsreal.data import sources as data
from gsreal.methods.training import Weights
from gsreal.model_files.build import DTYPES, logits_of, loss_of
from gsreal.run.progress import note_progress
from gssim.plan import position_ranges, splitting
from gssim.result import Evaluation
from gssim.scenario import Scenario

Batch = tuple[Tensor, Tensor, Weights]
PREPARED_BYTES, PREPARED_BATCHES = 2**28, 256
"""Limits on the host memory and number of batches prepared before the timed steps."""


def context_place(scenario: Scenario, rank: int) -> tuple[int, int, bool]:
    """Return which part of every sequence a rank has under context parallelism, of how many, and whether in zigzag."""
    mesh = scenario.policies.mesh
    return mesh.place(rank).cp, mesh.cp, scenario.policies.zigzag


def own_positions(whole: Tensor, place: tuple[int, int, bool]) -> Tensor:
    """Return a rank's part of sequences, of shape (batch, sequence); `place`: as `context_place` returns it.

    >>> own_positions(torch.arange(6).view(1, 6), (1, 3, False)).tolist()
    [[2, 3]]
    """
    number, parts, zigzag = place
    if parts == 1:
        return whole
    ranges = position_ranges(whole.shape[1], ranks=parts, rank=number, zigzag=zigzag)
    return torch.cat([whole[:, first:last] for first, last in ranges], 1)


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
        self.copies = scenario.ranks // policies.pp // policies.data_ranks // policies.cp
        """Number of ranks that compute the same loss: they have slices of one replica, or parts of its gradients."""
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
        # a copy from pinned memory does not make the host wait for the device
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True), weights

    def _make_batch(self, step: int) -> Batch:
        seed = self.scenario.run.seed
        pairs = zip(self._loss_terms(seed, step), self.counts, strict=True)
        terms = [count if counts else 0 for count, counts in pairs]
        inputs, targets = self.source.batch(seed=seed, step=step, rows=self.rows[self.rank])
        place = self._place(self.rank)
        inputs, targets = own_positions(inputs, place), own_positions(targets, place)
        inputs, targets = inputs.clone(), targets.clone()  # numpy's own memory would not be counted
        if inputs.is_floating_point():
            inputs = inputs.to(DTYPES[self.scenario.workload.precision])
        ranks = tuple(n * self.copies / sum(terms) for n in terms)
        policies = self.scenario.policies
        joined = self.copies * math.lcm(policies.cp, policies.mesh.expert_stride)
        weights = Weights(ranks, self._micro_batch_weights(targets), joined)
        # a rank holds no more than its stage needs
        inputs = inputs if self.reads else inputs.new_empty(0)
        targets = targets if self.counts[self.rank] else targets.new_empty(0)
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs, targets, weights

    def _place(self, rank: int) -> tuple[int, int, bool]:
        """Return which part of the sequences a rank has; see `context_place`."""
        return context_place(self.scenario, rank)

    def _loss_terms(self, seed: int, step: int) -> list[int]:
        """Return the number of loss terms of each rank's rows, or of its part of their sequences."""
        terms = self.source.loss_terms(seed=seed, step=step, rows=self.rows)
        parts = self.scenario.policies.cp
        if parts == 1:
            return terms
        if getattr(self.scenario.workload.model.input, "task", None) == "next-token":  # a term at every position
            return [count // parts for count in terms]
        targets: dict[tuple[int, int], Tensor] = {}
        for rows in self.rows:
            if (rows.start, rows.stop) not in targets:
                targets[rows.start, rows.stop] = self.source.batch(seed=seed, step=step, rows=rows)[1]
        return [
            data.loss_terms(own_positions(targets[rows.start, rows.stop], self._place(rank)))
            for rank, rows in enumerate(self.rows)
        ]

    def _micro_batch_weights(self, targets: Tensor) -> tuple[float, ...]:
        count = self.scenario.plan.micro_batches
        terms = [data.loss_terms(part) for part in targets.split(splitting.split(len(targets), splitting.even(count)))]
        return tuple(n / sum(terms) for n in terms) if sum(terms) else (1.0 / count,) * count


class HeldOut:
    """This rank's part of the held-out data; all ranks run equally many forwards, because FSDP2's are collectives."""

    def __init__(self, scenario: Scenario, rank: int, device: torch.device) -> None:
        self.device, self.precision = device, DTYPES[scenario.workload.precision]
        self.classifies = getattr(scenario.workload.model.input, "classes", None) is not None
        self.source, samples = data.open_held_out(scenario.workload)
        policies, sizes = scenario.policies, scenario.data_batch_sizes
        # no larger than in training, so that memory that was enough stays enough
        most = max(1, max(sizes) // scenario.plan.micro_batches)
        parts = splitting.split(samples, splitting.even(len(sizes)))
        start = sum(parts[: policies.data_rank(rank)])
        forwards = -(-max(parts) // most)
        self.sizes = splitting.split(parts[policies.data_rank(rank)], splitting.even(forwards))
        self.start = start
        self.place = context_place(scenario, rank)

    def evaluate(self, module: nn.Module, *, step: int) -> Evaluation:
        """Return loss and accuracy on all held-out data, without side effects on the training (a collective)."""
        sums = self.sums(module)
        dist.all_reduce(sums)  # ranks with the same part of the data count it equally: means do not change
        return self.evaluation(sums, step=step)

    def sums(self, module: nn.Module) -> Tensor:
        """Return the sums over this rank's part that `evaluation` takes, without side effects on the training."""
        from torch.distributed.fsdp import FSDPModule

        module.eval()
        with torch.no_grad():
            sums = torch.stack([self._sums(module, *batch) for batch in self._batches()]).sum(0)
        module.train()
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # it kept its parameters gathered for a backward: the next step gathers them as usual
        return sums

    def evaluation(self, sums: Tensor, *, step: int) -> Evaluation:
        """Return loss and accuracy from the sums of all ranks."""
        loss, targets, right, samples = sums.tolist()
        return Evaluation(step=step, loss=loss / targets, accuracy_ratio=right / samples if self.classifies else None)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        start = self.start
        for size in self.sizes:
            note_progress("it evaluates")
            inputs, targets = self.source.batch(seed=0, step=0, rows=slice(start, start + size))
            inputs, targets = own_positions(inputs, self.place), own_positions(targets, self.place)
            inputs = inputs.to(self.precision) if inputs.is_floating_point() else inputs
            yield inputs.to(self.device), targets.to(self.device)
            start += size

    def _sums(self, module: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of losses, their number, the number of correctly classified samples, and of all samples."""
        # others have samples left and need this rank's forward, but modules of Hugging Face run no empty batch
        if not len(inputs):
            module(inputs.new_zeros(1, *inputs.shape[1:]))
            return torch.zeros(4, dtype=torch.float64, device=self.device)
        logits = logits_of(module(inputs))
        terms = data.loss_terms(targets)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = float(loss_of(logits, targets)) * terms if terms else 0.0
        right = int((logits.argmax(-1) == targets).sum()) if self.classifies else 0
        return torch.tensor([loss, terms, right, len(targets)], dtype=torch.float64, device=self.device)
