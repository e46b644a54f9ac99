"""What a push sends: bytes and entries of every message of a bucket, and what a rank keeps for it all the time."""

from collections.abc import Mapping, Sequence

from gssim import sparsity
from gssim.cache import Same
from gssim.collectives import Pairs
from gssim.plan import absolute_threshold, encodings
from gssim.program.lowering import Lowering
from gssim.program.task import Bucket, MicroBatch
from gssim.sparsity import movements, staleness_steps
from gssim.units import PRECISION_BYTES


def is_thresholded(low: Lowering) -> bool:
    """Return whether this step's pushes are thresholded: there is a threshold, and the dense steps are over."""
    push = low.push
    return push.threshold is not None and low.step >= push.warmup_steps


def encoding_of(low: Lowering, elements: float, entries: float) -> str:
    """Return how a thresholded message goes."""
    kind = low.push.encoding
    return encodings.chosen(kind, entries=entries, elements=elements, value_bytes=low.value_bytes)


def push_matrix(low: Lowering, bucket: Bucket, micro_batch: MicroBatch, place: int) -> tuple[Pairs, Pairs]:
    """Return bytes and entries that each node's rank at a place sends to each owner for a bucket."""
    unique = low.push.selects
    key = ("push", bucket.index, place, micro_batch) if unique else ("push", low.division(bucket).owned[place])
    if key not in low.found:
        low.found[key] = _new_matrix(low, bucket, micro_batch, place)
    found: tuple[Pairs, Pairs] = low.found[key]
    return found


def _new_matrix(low: Lowering, bucket: Bucket, micro_batch: MicroBatch, place: int) -> tuple[Pairs, Pairs]:
    division = low.division(bucket)
    if not is_thresholded(low):
        owned = division.owned[place]
        return to_everybody(owned, low.value_bytes), to_everybody(owned, 1)
    kinds, numbers = _kinds_of_senders(low, micro_batch)
    rows = [_row(low, bucket, place, *kind) for kind in kinds]
    return Pairs([sizes for sizes, _ in rows], numbers), Pairs([entries for _, entries in rows], numbers)


def _kinds_of_senders(low: Lowering, micro_batch: MicroBatch) -> tuple[Sequence[tuple[int, float]], Sequence[int]]:
    """Return what gradients are means over, see `_samples`, and which of these each node's is; found once."""
    key = ("kinds of senders", micro_batch)
    if key not in low.every_step:
        of_nodes = [_samples(low, micro_batch, sender) for sender in range(low.nodes)]
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(of_nodes))}
        low.every_step[key] = tuple(kinds), [kinds[kind] for kind in of_nodes]
    found: tuple[Sequence[tuple[int, float]], Sequence[int]] = low.every_step[key]
    return found


def _row(
    low: Lowering, bucket: Bucket, place: int, samples: int, part: float
) -> tuple[Sequence[float], Sequence[float]]:
    """Return bytes and entries that go to each owner from those whose gradient is such a mean; see `_samples`."""
    entries = _entries(low, bucket, place, samples, part)
    messages = [*zip(map(float, low.division(bucket).owned[place]), entries, strict=True)]
    sizes = {each: _bytes(low, *each) for each in dict.fromkeys(messages)}  # neighbours' are often equal
    return tuple(sizes[each] for each in messages), tuple(entries)


def _bytes(low: Lowering, elements: float, entries: float) -> float:
    """Return the bytes of a thresholded message."""
    encoding = encoding_of(low, elements, entries)
    return encodings.message_bytes(encoding, entries=entries, elements=elements, value_bytes=low.value_bytes)


def to_everybody(owned: Sequence[float], factor: int) -> Pairs:
    """Return what each rank sends where all send all: every owner's part, but nothing to itself."""
    return Pairs([tuple(float(factor * elements) for elements in owned)], (0,) * len(owned))


def _entries(low: Lowering, bucket: Bucket, place: int, samples: int, part: float) -> list[float]:
    """Return how many elements of each owner's range of a bucket are sent to it; none without samples."""
    ranges = low.division(bucket).ranges(place)
    if not samples:
        return [0.0] * len(ranges)
    if not low.push.selects:
        return [float(last - first) for first, last in ranges]
    ratios, found = _ratios(low, samples, part), []
    for pieces in pieces_of(low, bucket, place):
        sent = 0.0
        for elements, tensor, begin, end in pieces:
            sent += elements * ratios[tensor].over(begin, end)
        found.append(sent)
    return found


Piece = tuple[int, str, float, float]
"""Of a tensor: how many elements, its name, and where they begin and end, as fractions of all."""


def pieces_of(low: Lowering, bucket: Bucket, place: int) -> list[list[Piece]]:
    """Return what each owner's range of a bucket has of tensors; found once for all steps."""
    key = ("pieces", bucket.index, place)
    if key not in low.every_step:
        low.every_step[key] = [
            [
                (end - begin, p.name.replace("{}", instance.module), begin / p.elements, end / p.elements)
                for instance, p, begin, end in bucket.inside(first, last)
            ]
            for first, last in low.division(bucket).ranges(place)
        ]
    found: list[list[Piece]] = low.every_step[key]
    return found


def _ratios(low: Lowering, samples: int, part: float) -> Mapping[str, sparsity.Ratios]:
    """Return what is sent of each tensor in this step, by ranks whose gradient is such a mean."""
    statistics = low.statistics
    assert statistics is not None  # loading demands them

    def found() -> Mapping[str, sparsity.Ratios]:
        names = {p.name.replace("{}", instance.module) for instance, p in low.parameters}
        return {
            name: sparsity.push_ratios(
                statistics, low.push, samples=samples, tensor=name, step=low.step, part=part, lag_steps=lag_steps
            )
            for name in names
        }

    lag_steps = _lag_steps(low)
    key = (Same(statistics), Same(low.scenario.workload.model), low.push, samples, part, low.step, lag_steps)
    return low.shared.once("densities of pushes", key, found, most=MOST_DENSITIES)


def _lag_steps(low: Lowering) -> float:
    """Return by how many steps the parameters lag that ranks compute with, where not all of them are published."""
    if not low.thresholds_publish:
        return 0.0
    elements = {p.name.replace("{}", instance.module): p.elements for instance, p in low.parameters}
    threshold = absolute_threshold(low.scenario.plan.publish, low.scenario.workload.learning_rate)
    assert low.statistics is not None
    assert threshold is not None
    return staleness_steps(movements(low.statistics, elements, steps=low.step), threshold)


MOST_DENSITIES = 256
"""Of steps, thresholds and numbers of samples: a sweep of thresholds has as many as steps, for each of them."""


def _samples(low: Lowering, micro_batch: MicroBatch, node: int) -> tuple[int, float]:
    """Return the samples that a node's gradient is a mean over, and which part of the node's mean that is.

    Where every micro-batch is pushed, what is thresholded is its part of the mean over the whole step's samples.
    """
    ranks = low.group[node * low.places : (node + 1) * low.places]
    whole = sum(low.batch_sizes[rank] for rank in ranks)
    samples = sum(low.samples(rank, micro_batch) for rank in ranks) if micro_batch.left else whole
    return samples, samples / whole if whole else 0.0


def mean_density(low: Lowering) -> float:
    """Return the fraction of elements owned on other nodes that all ranks send in this step."""
    sent = offered = 0.0
    for micro_batch in (each for each in low.micro_batches if each.leaves):
        for bucket in low.buckets:
            entries = [push_matrix(low, bucket, micro_batch, place)[1] for place in range(low.places)]
            sent += sum(each.total for each in entries)
            offered += (low.nodes - 1) * bucket.elements
    return sent / offered if offered else 0.0


# What a threshold takes all the time ---------------------------------------------------------------------------------


def kept_elements(low: Lowering, bucket: Bucket, rank: int) -> int:
    """Return the elements of a bucket for which a rank keeps what it has not sent: those that others own."""
    if not low.push.error_feedback:
        return 0
    return low.division(bucket).places[low.place(rank)] - low.pushed_elements(bucket, rank)


def kept_bytes(low: Lowering) -> int:
    """Return the bytes of one element of what is kept."""
    return PRECISION_BYTES[low.push.error_feedback_precision]


def accumulates_in_kept(low: Lowering) -> bool:
    """Return whether gradients are added to what was kept of earlier ones, so that their bucket is not needed longer.

    Else it is added to them: sums are made in the more precise of the two.
    """
    return low.push.error_feedback is True and kept_bytes(low) >= low.value_bytes


def held_for_thresholds(low: Lowering, rank: int) -> dict[str, float]:
    """Return what a rank holds all the time to threshold its gradients: what it has not sent, and scratch."""
    if low.policies.gradients != "push" or (low.push.threshold is None and not low.thresholds_publish):
        return {}
    owned = [low.division(bucket).owned[low.place(rank)] for bucket in low.buckets]
    chunked = low.device(rank).kind == "cpu"
    flags, magnitudes = encodings.scratch_elements(max(map(max, owned)), max(map(sum, owned)), chunked=chunked)
    kept = sum(kept_elements(low, bucket, rank) for bucket in low.buckets)
    scratch = flags + magnitudes * max(low.value_bytes, PRECISION_BYTES["fp32"])
    return {"residuals": float(kept * kept_bytes(low)), "scratch": float(scratch)}
