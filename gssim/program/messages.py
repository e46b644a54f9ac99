"""Sizes of the messages of a push: bytes and entries per sender and owner, densities, and residuals kept on each
rank.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gssim import sparsity
from gssim.cache import Same
from gssim.collectives import Pairs, summed
from gssim.plan import absolute_threshold, encodings
from gssim.program.lowering import Lowering
from gssim.program.task import Bucket, MicroBatch
from gssim.sparsity import movements, staleness_steps
from gssim.units import PRECISION_BYTES, Floats, Ints


def is_thresholded(low: Lowering) -> bool:
    """Return whether this step's pushes are thresholded: a threshold is set, and the dense warm-up steps are over."""
    push = low.push
    return push.threshold is not None and low.step >= push.warmup_steps


def encoding_of(low: Lowering, elements: float, entries: float) -> str:
    """Return the encoding of a thresholded message."""
    kind = low.push.encoding
    return encodings.chosen(kind, entries=entries, elements=elements, value_bytes=low.value_bytes)


def push_matrix(low: Lowering, bucket: Bucket, micro_batch: MicroBatch, place: int) -> tuple[Pairs, Pairs]:
    """Return the matrices of bytes and of entries from each node's rank at a place to each owner, for a bucket."""
    if is_thresholded(low):
        return low.once_a_step(_thresholded_matrices, bucket.index, micro_batch, place)
    return low.once_a_step(_dense_matrices, low.division(bucket).owned[place])


def _dense_matrices(low: Lowering, owned: tuple[int, ...]) -> tuple[Pairs, Pairs]:
    return to_all(owned, low.value_bytes), to_all(owned, 1)


def _thresholded_matrices(low: Lowering, bucket: int, micro_batch: MicroBatch, place: int) -> tuple[Pairs, Pairs]:
    kinds, numbers = low.once_a_run(_sender_classes, micro_batch)
    rows = [_message_row(low, low.buckets[bucket], place, *kind) for kind in kinds]
    return Pairs([sizes for sizes, _ in rows], numbers), Pairs([entries for _, entries in rows], numbers)


def _sender_classes(low: Lowering, micro_batch: MicroBatch) -> tuple[Sequence[tuple[int, float]], Sequence[int]]:
    """Return the distinct gradient means over senders (see `_sender_samples`), and the index of the one of each
    node.
    """
    by_node = [_sender_samples(low, micro_batch, sender) for sender in range(low.nodes)]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(by_node))}
    return tuple(kinds), [kinds[kind] for kind in by_node]


def _message_row(
    low: Lowering, bucket: Bucket, place: int, samples: int, part: float
) -> tuple[Sequence[float], Sequence[float]]:
    """Return bytes and entries to each owner from senders whose gradient is such a mean; see `_sender_samples`."""
    entries = _entries_by_owner(low, bucket, place, samples, part)

    def message_bytes(owned: float, sent: float) -> float:
        encoding = encoding_of(low, owned, sent)
        return encodings.message_bytes(encoding, entries=sent, elements=owned, value_bytes=low.value_bytes)

    sizes = of_messages(low.division(bucket).owned[place], entries, message_bytes)
    return tuple(sizes.tolist()), tuple(entries.tolist())


def of_messages(
    elements: Sequence[float], entries: Sequence[float] | Floats, value: Callable[[float, float], Any]
) -> Floats:
    """Return the value of each message by its elements and entries; computed once for neighbours, often equal."""
    owned, sent = np.array(elements, dtype=float), np.asarray(entries)
    changes = np.ones(len(owned), dtype=bool)
    changes[1:] = (owned[1:] != owned[:-1]) | (sent[1:] != sent[:-1])
    runs = list(zip(owned[changes].tolist(), sent[changes].tolist(), strict=True))
    known = {message: value(*message) for message in dict.fromkeys(runs)}
    values: Floats = np.array([known[message] for message in runs])[np.cumsum(changes) - 1]
    return values


def to_all(owned: Sequence[float], factor: int) -> Pairs:
    """Return the matrix of an exchange in which all send all: every owner's part, and nothing to itself."""
    return Pairs([tuple(float(factor * elements) for elements in owned)], (0,) * len(owned))


def _entries_by_owner(low: Lowering, bucket: Bucket, place: int, samples: int, part: float) -> Floats:
    """Return the number of elements of each owner's range of a bucket that are sent to it; 0 without samples."""
    owned = np.array(low.division(bucket).owned[place], dtype=float)
    if not samples:
        return np.zeros(len(owned))
    return owned_pieces(low, bucket, place).entries(_push_ratios(low, samples, part)) if low.push.selects else owned


@dataclass(frozen=True, eq=False)
class OwnedPieces:
    """The pieces of tensors in the ranges of a bucket's owners, in order."""

    owners: int
    owner: Ints
    """Owner of each piece."""
    elements: Ints
    """Elements of each piece."""
    tensors: tuple[str, ...]
    """Names of the bucket's tensors."""
    ranges: sparsity.Ranges

    def entries(self, ratios: Mapping[str, sparsity.Ratios]) -> Floats:
        """Return the number of elements of every owner's range that are sent, given the fraction of each tensor."""
        densities = self.ranges.densities([ratios[name] for name in self.tensors])
        return summed(self.owner, self.elements * densities, self.owners)


def owned_pieces(low: Lowering, bucket: Bucket, place: int) -> OwnedPieces:
    """Return the pieces of tensors in each owner's range of a bucket."""
    return low.once_a_run(_pieces, bucket.index, place)


def _pieces(low: Lowering, number: int, place: int) -> OwnedPieces:
    bucket = low.buckets[number]
    names = tuple(p.name.replace("{}", instance.module) for instance, p in bucket.members)
    tensor_sizes = np.array([p.elements for _, p in bucket.members], dtype=np.int64)
    starts = np.array(bucket.starts, dtype=np.int64)
    ranges = np.array(low.division(bucket).ranges(place), dtype=np.int64)
    first, last = ranges[:, 0], ranges[:, 1]
    # a range is cut where tensors begin
    lowest = np.searchsorted(starts, first, side="right") - 1
    counts = np.where(last > first, np.searchsorted(starts, last, side="left") - lowest, 0)
    owner = np.repeat(np.arange(len(ranges)), counts)
    tensor = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + lowest[owner]
    begin = np.maximum(starts[tensor], first[owner]) - starts[tensor]
    end = np.minimum(starts[tensor] + tensor_sizes[tensor], last[owner]) - starts[tensor]
    some = begin < end
    owner, tensor, begin, end = owner[some], tensor[some], begin[some], end[some]
    parts = sparsity.Ranges(tensor, begin / tensor_sizes[tensor], end / tensor_sizes[tensor])
    return OwnedPieces(len(ranges), owner, end - begin, names, parts)


def _push_ratios(low: Lowering, samples: int, part: float) -> Mapping[str, sparsity.Ratios]:
    """Return the sent fraction of each tensor in this step, for senders whose gradient is such a mean."""
    statistics = low.statistics
    assert statistics is not None  # loading demands them

    def ratios() -> Mapping[str, sparsity.Ratios]:
        names = {p.name.replace("{}", instance.module) for instance, p in low.parameters}
        return {
            name: sparsity.push_ratios(
                statistics, low.push, samples=samples, tensor=name, step=low.step, part=part, lag_steps=lag_steps
            )
            for name in names
        }

    lag_steps = low.once_a_step(_lag_steps)
    key = (Same(statistics), Same(low.scenario.workload.model), low.push, samples, part, low.step, lag_steps)
    return low.shared.once("densities of pushes", key, ratios, most=MAX_CACHED_DENSITIES)


def sent_ratios(low: Lowering, micro_batch: MicroBatch) -> tuple[Hashable, ...]:
    """Return the sent fractions of all tensors in this step, for each class of senders with samples."""
    kinds, _ = low.once_a_run(_sender_classes, micro_batch)
    return tuple(tuple(sorted(_push_ratios(low, *kind).items())) for kind in kinds if kind[0])


def _lag_steps(low: Lowering) -> float:
    """Return the number of steps by which parameters used for compute lag, where not all updates are published."""
    if not low.thresholds_publish:
        return 0.0
    threshold = absolute_threshold(low.scenario.plan.publish, low.scenario.workload.learning_rate)
    assert threshold is not None
    run = low.scenario.run
    return staleness_steps(
        low.once_a_run(_movements, max(low.step, run.warmup_steps + run.steps))[: low.step], threshold
    )


def _movements(low: Lowering, steps: int) -> Sequence[float]:
    """Return the distance by which the mean element moves in each of the first steps."""
    elements = {p.name.replace("{}", instance.module): p.elements for instance, p in low.parameters}
    assert low.statistics is not None
    return movements(low.statistics, elements, steps=steps)


MAX_CACHED_DENSITIES = 256
"""Cached densities by step, threshold and number of samples: a sweep of thresholds has one per step and threshold."""


def _sender_samples(low: Lowering, micro_batch: MicroBatch, node: int) -> tuple[int, float]:
    """Return the number of samples that a node's gradient averages over, and its fraction of the node's step mean.

    Where every micro-batch is pushed, the thresholded gradient is its part of the mean over the samples of the whole
    step.
    """
    ranks = low.group[node * low.places : (node + 1) * low.places]
    whole = sum(low.batch_sizes[rank] for rank in ranks)
    samples = sum(low.samples(rank, micro_batch) for rank in ranks) if micro_batch.sent_before else whole
    return samples, samples / whole if whole else 0.0


def mean_push_density(low: Lowering) -> float:
    """Return the sent fraction of elements owned on other nodes, over all ranks, in this step."""
    sent = offered = 0.0
    for micro_batch in (each for each in low.micro_batches if each.sends_gradients):
        for bucket in low.buckets:
            entries = [push_matrix(low, bucket, micro_batch, place)[1] for place in range(low.places)]
            sent += sum(each.total for each in entries)
            offered += (low.nodes - 1) * bucket.elements
    return sent / offered if offered else 0.0


# Residuals and scratch ------------------------------------------------------------------------------------------------


def residual_elements(low: Lowering, bucket: Bucket, rank: int) -> int:
    """Return the elements of a bucket for which a rank keeps a residual: those owned by others."""
    if not low.push.error_feedback:
        return 0
    return low.division(bucket).places[low.place(rank)] - low.pushed_elements(bucket, rank)


def residual_value_bytes(low: Lowering) -> int:
    """Return the bytes of one element of a residual."""
    return PRECISION_BYTES[low.push.error_feedback_precision]


def accumulates_in_residual(low: Lowering) -> bool:
    """Return whether gradients are added to the residual, so that their bucket is freed early.

    Else the residual is added to the gradients: sums are made in the more precise of the two.
    """
    return low.push.error_feedback is True and residual_value_bytes(low) >= low.value_bytes


def threshold_memory(low: Lowering, rank: int) -> dict[str, float]:
    """Return the persistent memory of thresholding on a rank: residuals, and scratch."""
    if low.policies.gradients != "push" or (low.push.threshold is None and not low.thresholds_publish):
        return {}
    owned = [low.division(bucket).owned[low.place(rank)] for bucket in low.buckets]
    chunked = low.device(rank).kind == "cpu"
    flags, magnitudes = encodings.scratch_elements(max(map(max, owned)), max(map(sum, owned)), chunked=chunked)
    residuals = sum(residual_elements(low, bucket, rank) for bucket in low.buckets)
    scratch = flags + magnitudes * max(low.value_bytes, PRECISION_BYTES["fp32"])
    return {"residuals": float(residuals * residual_value_bytes(low)), "scratch": float(scratch)}
