"""Compression of replicated gradients: hooks of DistributedDataParallel for PowerSGD and top-k, and casts.

What happens, and in which order, is in [Note: compressors] of `gssim.program.compressed`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from gsreal.measure import Timeline, wait_for_release
from gsreal.model_files.build import DTYPES
from gssim.plan import largest_count
from gssim.plan.plan import PowerSGD, TopK, low_rank_of
from gssim.scenario import Scenario, reduce_precision


@dataclass
class Pending:
    """A bucket whose reduction has begun."""

    index: int
    buffer: Tensor
    parts: Sequence[Tensor]
    """Its gradients, as views of the buffer."""
    done: Future[Tensor]
    sums: list[tuple[Tensor, Any]] = field(default_factory=list)
    """Tensors that collectives write, each with the work to wait for."""
    others: list[Tensor] = field(default_factory=list)
    """PowerSGD: gradients that are not compressed."""
    matrices: list[Tensor] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)
    """Factors P of the matrices."""
    right: list[Tensor] = field(default_factory=list)
    """Factors Q of the matrices."""
    all_right: Tensor | None = None
    """The factors Q, one after another."""


class Compressor:
    """Reduces the buckets of a DistributedDataParallel: `hook` is its communication hook.

    In the first `start_step` steps, buckets are all-reduced uncompressed. `overlap`: reductions end after the backward,
    else in the hook.
    """

    def __init__(self, group: dist.ProcessGroup, timeline: Timeline, *, start_step: int, overlap: bool) -> None:
        self.group, self.timeline, self.overlap = group, timeline, overlap
        self.ranks = group.size()
        self.start_step, self.steps = start_step, 0
        self.residuals: dict[int, Tensor] = {}
        """Gradients that were not sent, by bucket."""
        self._pending: list[Pending] = []

    @property
    def state(self) -> list[Tensor]:
        """Tensors that are kept between steps."""
        return list(self.residuals.values())

    # DDP reads these annotations
    def hook(self, _state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        """Begin to reduce a bucket; the future's value is the mean over the ranks."""
        buffer = bucket.buffer()
        done: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if bucket.is_last():
            self.steps += 1
        if self.steps - bucket.is_last() < self.start_step:
            work = self._reduce(buffer.div_(self.ranks))
            if not self.overlap:
                self._wait([work], "all-reduce", bucket.index())
            future: torch.futures.Future[Tensor] = work[1].get_future().then(lambda ended: ended.value()[0])
            return future
        pending = Pending(bucket.index(), buffer, bucket.gradients(), done)
        with self.timeline.span(f"compress bucket {pending.index}", "compression"):
            self.begin(pending)
        if not self.overlap:
            self._end([pending])
        else:
            if not self._pending:  # before DDP's own callback, which waits for the futures and follows its last bucket
                torch.autograd.Variable._execution_engine.queue_callback(self._end_all)
            self._pending.append(pending)
        return done

    def begin(self, pending: Pending) -> None:
        """Compress a bucket and start its collectives."""
        raise NotImplementedError

    def rounds(self) -> Sequence[Callable[[Pending], None]]:
        """Return the functions to apply after the backward, one after another, each to all buckets."""
        raise NotImplementedError

    def _end_all(self) -> None:
        pending, self._pending = self._pending, []
        self._end(pending)

    @torch.no_grad()
    def _end(self, pending: Sequence[Pending]) -> None:
        for round_ in self.rounds():
            for each in pending:
                round_(each)
        for each in pending:
            each.done.set_result(each.buffer)

    def _reduce(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start the sum of a tensor over the ranks, in place."""
        return tensor, dist.all_reduce(tensor, group=self.group, async_op=True)

    def _gather(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Start to gather a tensor of every rank."""
        gathered = tensor.new_empty(self.ranks * tensor.numel())
        return gathered, dist.all_gather_into_tensor(gathered, tensor, group=self.group, async_op=True)

    def _wait(self, sums: Sequence[tuple[Tensor, Any]], what: str, bucket: int) -> None:
        with self.timeline.span(f"wait for {what} bucket {bucket}", "exposed_communication", self.group):
            for _, work in sums:
                work.wait()


class LowRankCompressor(Compressor):
    """Compresses gradients to factors of low rank, with error feedback: PowerSGD."""

    def __init__(
        self, group: dist.ProcessGroup, timeline: Timeline, *, options: PowerSGD, overlap: bool, seed: int
    ) -> None:
        super().__init__(group, timeline, start_step=options.start_step, overlap=overlap)
        self.options = options
        self.random = torch.Generator().manual_seed(seed)  # equal on all ranks
        self.factors: dict[int, Tensor] = {}
        """Factors Q of each bucket's matrices, concatenated, with which the next step begins."""

    @property
    def state(self) -> list[Tensor]:
        """Tensors that are kept between steps."""
        return [*self.residuals.values(), *self.factors.values()]

    @torch.no_grad()
    def begin(self, pending: Pending) -> None:
        """Split the bucket into matrices and others; start the sums of the others and of all P."""
        shapes = []
        for part in pending.parts:
            shape = low_rank_of(self.options, part.shape)
            if shape is None:
                pending.others.append(part)
            else:
                shapes.append(shape)
                pending.matrices.append(part.view(part.shape[0], -1))
        if not shapes:
            pending.sums = [self._reduce(pending.buffer.div_(self.ranks))]
            return
        if self.options.error_feedback:
            errors = self._errors(pending)
            torch._foreach_add_(pending.matrices, errors)
            torch._foreach_copy_(errors, pending.matrices)
        rest = torch.cat([each.view(-1) for each in pending.others]).div_(self.ranks) if pending.others else None
        pending.all_right = self._right(pending, sum(columns * rank for _, columns, rank in shapes))
        pending.right = _matrices(pending.all_right, [(columns, rank) for _, columns, rank in shapes])
        all_left = pending.buffer.new_empty(sum(rows * rank for rows, _, rank in shapes))
        pending.left = _matrices(all_left, [(rows, rank) for rows, _, rank in shapes])
        for matrix, left, right in zip(pending.matrices, pending.left, pending.right, strict=True):
            orthogonalize(right)
            torch.mm(matrix, right, out=left)
        pending.sums = [self._reduce(each) for each in (rest, all_left) if each is not None]

    def rounds(self) -> Sequence[Callable[[Pending], None]]:
        """Return the computation of Q, and of the matrices."""
        return self._factor, self._restore

    def _factor(self, pending: Pending) -> None:
        self._wait(pending.sums, "all-reduce P" if pending.matrices else "all-reduce rest", pending.index)
        if not pending.matrices:
            return
        with self.timeline.span(f"factor bucket {pending.index}", "compression"):
            if pending.others:
                rest = pending.sums[0][0].split([each.numel() for each in pending.others])
                for part, mean in zip(pending.others, rest, strict=True):
                    part.copy_(mean.view_as(part))
                del rest
            pending.sums = []
            for matrix, left, right in zip(pending.matrices, pending.left, pending.right, strict=True):
                orthogonalize(left)
                # without gradients a column of P is zero; Q's column is then kept, as a zero one would stay zero
                right.masked_fill_(left.any(0), 0)
                right.addmm_(matrix.t(), left)
            assert pending.all_right is not None
            pending.sums = [self._reduce(pending.all_right)]

    def _restore(self, pending: Pending) -> None:
        if not pending.matrices:
            return
        self._wait(pending.sums, "all-reduce Q", pending.index)
        with self.timeline.span(f"decompress bucket {pending.index}", "compression"):
            assert pending.all_right is not None
            pending.all_right.div_(self.ranks)
            for matrix, left, right in zip(pending.matrices, pending.left, pending.right, strict=True):
                torch.mm(left, right.t(), out=matrix)
            if self.options.error_feedback:
                torch._foreach_sub_(self._errors(pending), pending.matrices)
        pending.sums, pending.left, pending.right, pending.all_right = [], [], [], None

    def _errors(self, pending: Pending) -> list[Tensor]:
        """Return the residuals of a bucket's matrices: what earlier steps left out."""
        if pending.index not in self.residuals:
            self.residuals[pending.index] = pending.buffer.new_zeros(sum(each.numel() for each in pending.matrices))
        return _matrices(self.residuals[pending.index], [each.shape for each in pending.matrices])

    def _right(self, pending: Pending, elements: int) -> Tensor:
        """Return a bucket's initial factors Q: those of the previous step, or random ones."""
        if pending.index in self.factors:
            return self.factors[pending.index]
        drawn = torch.randn(elements, generator=self.random, dtype=pending.buffer.dtype).to(pending.buffer.device)
        if self.options.warm_start:
            self.factors[pending.index] = drawn
        return drawn


class LargestCompressor(Compressor):
    """Top-k."""

    def __init__(self, group: dist.ProcessGroup, timeline: Timeline, *, options: TopK, overlap: bool) -> None:
        super().__init__(group, timeline, start_step=options.start_step, overlap=overlap)
        self.options = options

    @torch.no_grad()
    def begin(self, pending: Pending) -> None:
        """Find the largest gradients of the bucket, and start to gather every rank's."""
        total = pending.buffer
        if self.options.error_feedback:
            if pending.index not in self.residuals:
                self.residuals[pending.index] = torch.zeros_like(pending.buffer)
            total = self.residuals[pending.index].add_(pending.buffer)
        values, indices = take_largest(total, largest_count(self.options, total.numel()))
        pending.sums = [self._gather(values.div_(self.ranks)), self._gather(indices)]
        pending.left = [values, indices]  # kept alive: the collectives send them

    def rounds(self) -> Sequence[Callable[[Pending], None]]:
        """Return the sum of every rank's entries."""
        return (self._add,)

    def _add(self, pending: Pending) -> None:
        self._wait(pending.sums, "all-gather indices", pending.index)
        with self.timeline.span(f"decompress bucket {pending.index}", "compression"):
            values, indices = (gathered for gathered, _ in pending.sums)
            pending.sums = []
            for sent in pending.left:  # until gloo's thread frees what was sent, it does not free what was gathered
                wait_for_release(sent)
            pending.buffer.zero_()
            # added in the order of ranks, so that the sums are equal on all ranks
            for own, places in zip(values.chunk(self.ranks), indices.chunk(self.ranks), strict=True):
                pending.buffer.index_add_(0, places, own)
        pending.left = []


def take_largest(total: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` elements of largest magnitude and their 32-bit indices; they become zero in `total`."""
    indices = torch.topk(total.abs(), count, sorted=False).indices
    values = total[indices]
    total.index_fill_(0, indices, 0)
    return values, indices.to(torch.int32)


def orthogonalize(matrix: Tensor) -> None:
    """Make a matrix's columns orthonormal, in place: modified Gram-Schmidt, as torch's powerSGD_hook has it."""
    columns = matrix.shape[1]
    for number in range(columns):
        column = matrix[:, number : number + 1]
        # columns of zeros stay zero; torch's orthogonalization_epsilon would bias small gradients
        column.div_(torch.linalg.vector_norm(column).clamp_min_(torch.finfo(matrix.dtype).tiny))
        if number + 1 < columns:
            rest = matrix[:, number + 1 :]
            rest.addmm_(column, column.t() @ rest, alpha=-1)


def _matrices(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return consecutive parts of a flat tensor as matrices."""
    parts = flat.split([rows * columns for rows, columns in shapes])
    return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def cast_type(scenario: Scenario) -> torch.dtype | None:
    """Return the type to which replicated gradients are cast before they are all-reduced; None: they are not cast."""
    precision = scenario.policies.compress or reduce_precision(scenario.workload)
    is_cast = scenario.policies.compress is not None or precision != scenario.workload.precision
    return DTYPES[precision] if is_cast else None


def compressor_of(scenario: Scenario, group: dist.ProcessGroup, timeline: Timeline) -> Compressor | None:
    """Return the compressor of a scenario's plan; None where it has none."""
    plan = scenario.plan
    if scenario.policies.compressor is None:
        return None
    if scenario.policies.compressor == "topk":
        return LargestCompressor(group, timeline, options=plan.topk, overlap=plan.overlap)
    return LowRankCompressor(group, timeline, options=plan.powersgd, overlap=plan.overlap, seed=scenario.run.seed)
