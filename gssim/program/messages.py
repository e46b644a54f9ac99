"""Sizes of the messages of a push: bytes and entries per sender and owner, densities, and residuals kept on ranks.

[Note: alike buckets] Repeated layers fill buckets with the same parameters, one after another. If their gradients also
have the same statistics (transferred ones do inside the model), equally many entries are sent of them to each owner, in
every step. Such buckets are of one kind: amounts by bucket are computed once for each kind, and their messages are the
same objects.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from gssim import sparsity
from gssim.collectives import Pairs, summed, sums_of_others
from gssim.execution.cache import Hashed, Same
from gssim.plan import Division, absolute_threshold, encodings
from gssim.program.lowering import Lowering, once_a_run, once_a_step, once_for_densities, once_for_statistics
from gssim.program.task import Bucket, MicroBatch
from gssim.sparsity import movements, staleness_steps
from gssim.units import PRECISION_BYTES, Bools, Floats, Ints


def is_thresholded(low: Lowering) -> bool:
    """Return whether this step's pushes are thresholded: a threshold is set, and the dense warm-up steps are over."""
    push = low.push
    return push.threshold is not None and low.step >= push.warmup_steps


def push_matrix(low: Lowering, bucket: Bucket, micro_batch: MicroBatch, place: int) -> Pairs:
    """Return the bytes that each node's rank at `place` sends to each owner for a bucket, as a matrix."""
    if is_thresholded(low):
        return push_sizes(low, micro_batch, place).matrix(bucket)
    return matrix_to_all(low, low.division(bucket).owned[place], low.value_bytes)


@once_a_run
def matrix_to_all(low: Lowering, owned: tuple[int, ...], factor: int) -> Pairs:
    """Return `to_all` as one object for all equal exchanges, since matrices take long to compare."""
    return to_all(owned, factor)


@dataclass(frozen=True, eq=False)
class Messages:
    """Thresholded messages: encoding (an index into `encodings.ENCODINGS`), elements, entries and bytes of each."""

    encoding: Ints
    elements: Floats
    entries: Floats
    size_bytes: Floats

    def priced(self, price: Callable[..., Floats]) -> Floats:
        """Return the time of each message in seconds; `price` gives it by `encoding`, `elements` and `entries`."""
        times_s = np.zeros(self.entries.shape)
        for number, name in enumerate(encodings.ENCODINGS):
            some = self.encoding == number
            if some.any():
                times_s[some] = price(encoding=name, elements=self.elements[some], entries=self.entries[some])
        return times_s


def messages_of(low: Lowering, encoding: str, elements: Floats, entries: Floats) -> Messages:
    """Return messages of `entries` entries, selected from `elements` elements of an owner, in the plan's encoding."""
    elements = np.broadcast_to(elements, entries.shape)
    kinds, size_bytes = encodings.sizes_of(encoding, entries=entries, elements=elements, value_bytes=low.value_bytes)
    return Messages(kinds, elements, entries, size_bytes)


@dataclass(frozen=True, eq=False)
class PushSizes:
    """Thresholded pushes of all buckets from the ranks at a place, one on each node."""

    kinds: Sequence[int]
    """Kind of each bucket; see [Note: alike buckets]."""
    classes: Ints
    """Class of the sender on each node; see `_sender_classes`."""
    runs: Ints
    """Run of owners to which each node's rank belongs; see `OwnedPieces`."""
    messages: Messages
    """Messages by kind of bucket, class of senders, and run of owners."""
    parts: Floats
    """Parts of an owner's range with a threshold each, by kind of bucket and run: its pieces of tensors, or the whole.
    """

    def matrix(self, bucket: Bucket) -> Pairs:
        """Return the bytes from each node's rank to each owner for a bucket."""
        kind = self.kinds[bucket.index]
        if kind not in self._matrices:
            self._matrices[kind] = Pairs(self.messages.size_bytes[kind], self.classes, self.runs)
        return self._matrices[kind]

    @cached_property
    def _matrices(self) -> dict[int, Pairs]:
        return {}

    @cached_property
    def _node_kinds(self) -> tuple[Ints, Ints, Ints, Ints]:
        """For each distinct kind of node: its class, run and number of nodes; and the kind of each node."""
        count = int(self.runs[-1]) + 1
        kinds, of_node, nodes = np.unique(self.classes * count + self.runs, return_inverse=True, return_counts=True)
        return kinds // count, kinds % count, nodes, of_node

    def of_node(self, values: Floats, node: int) -> list[float]:
        """Return a node's value for each kind of bucket; `values` are by kind of bucket and kind of node."""
        found: list[float] = values[:, self._node_kinds[3][node]].tolist()
        return found

    @cached_property
    def alike(self) -> Ints:
        """A number by kind of bucket and run. Neighbours with equal numbers own as many elements in as many parts and
        receive the same in a bucket.

        They then also send the same to all others, in the same order: see [Note: neighbours] in `equal_messages`.
        """
        by_run = np.concatenate([self.messages.entries, self.messages.elements, self.parts[:, None]], axis=1)
        changes = (by_run[..., 1:] != by_run[..., :-1]).any(axis=1)
        return np.cumsum(np.pad(changes, ((0, 0), (1, 0))), axis=1)

    @cached_property
    def sent_bytes(self) -> Floats:
        """Bytes that a rank of each kind of node sends, by kind of bucket."""
        return self.to_others(self.messages.size_bytes)

    @cached_property
    def received_bytes(self) -> Floats:
        """Bytes that a rank of each kind of node receives, by kind of bucket."""
        return self.from_others(self.messages.size_bytes)

    def to_others(self, values: Floats) -> Floats:
        """Return `values` summed over a sender's messages to all others, by kind of bucket and kind of node."""
        kind, run, _, _ = self._node_kinds
        return sums_of_others(values, np.bincount(self.runs))[:, kind, run]

    def from_others(self, values: Floats) -> Floats:
        """Return `values` summed over all messages to an owner, by kind of bucket and kind of node."""
        kind, run, _, _ = self._node_kinds
        senders = np.bincount(self.classes, minlength=values.shape[1])[:, None]
        others = senders - (kind == np.arange(len(senders))[:, None])
        return np.asarray((others * values[:, :, run]).sum(axis=1))

    def payloads(self, values: Floats) -> Floats:
        """Return the sum over all messages between different nodes, by bucket."""
        by_kind = self.from_others(values)  # kept in its order in memory, by which sums may differ in the last digit
        by_bucket = by_kind[self.kinds] if by_kind.flags.c_contiguous else np.take(by_kind.T, self.kinds, axis=1).T
        return np.asarray(by_bucket @ self._node_kinds[2].astype(np.float64))


@dataclass(frozen=True, eq=False)
class OthersOf(Sequence[float]):
    """Bytes of the messages from one member to each of the others; the row is looked up on first use."""

    matrix: Pairs
    own: int

    def __len__(self) -> int:
        return len(self.matrix) - 1

    def __getitem__(self, place: Any) -> Any:
        """Return a message's bytes, or those of some."""
        return self._sizes[place]

    def __iter__(self) -> Iterator[float]:
        return iter(self._sizes)

    @cached_property
    def _sizes(self) -> tuple[float, ...]:
        row = self.matrix.row(self.own)
        return (*row[: self.own], *row[self.own + 1 :])


@dataclass(frozen=True, eq=False)
class PushTotals:
    """Totals over all messages that ranks at one place exchange in a step's thresholded pushes."""

    payload_bytes: Floats
    """Bytes of the payloads of each bucket."""
    entries: float


def push_totals(low: Lowering, micro_batch: MicroBatch, place: int) -> PushTotals:
    """Return the totals of `push_sizes`. They are cached for all steps; the messages of many ranks are not."""
    return _push_totals(low, low.step, micro_batch, place)


@once_for_densities
def _push_totals(low: Lowering, _step: int, micro_batch: MicroBatch, place: int) -> PushTotals:
    """Return the totals, which plans share whose ranks own and send the same: they may recompute other activations."""

    def totals() -> PushTotals:
        sizes = push_sizes(low, micro_batch, place)
        entries = float(sizes.payloads(sizes.messages.entries).sum())
        return PushTotals(sizes.payloads(sizes.messages.size_bytes), entries)

    kinds, numbers = _sender_classes(low, micro_batch)
    selects = low.push.selects
    sent = [Same(_push_ratios(low, kind)) if selects and kind.samples else bool(kind.samples) for kind in kinds]
    own = (low.push.encoding, low.value_bytes)
    key = (owned_pieces(low, place).identity, tuple(sent), tuple(numbers), *own)
    return low.shared.once("totals of pushes", key, totals, most=MAX_CACHED_DENSITIES)


@once_a_step
def push_sizes(low: Lowering, micro_batch: MicroBatch, place: int) -> PushSizes:
    """Return the messages of a step's thresholded pushes from the ranks at a place, after a micro-batch."""
    pieces, (kinds, numbers) = owned_pieces(low, place), _sender_classes(low, micro_batch)
    entries = np.zeros((len(pieces.elements_owned), len(kinds), len(pieces.members)))
    for number, kind in enumerate(kinds):
        if kind.samples:
            every = not low.push.selects
            entries[:, number] = pieces.elements_owned if every else pieces.entries(_push_ratios(low, kind))
    messages = messages_of(low, low.push.encoding, pieces.elements_owned[:, None], entries)
    parts = pieces.counts if low.compares_by_tensor else np.ones_like(pieces.elements_owned)
    return PushSizes(pieces.kinds, np.array(numbers), pieces.runs, messages, parts)


class Sender(NamedTuple):
    """The inputs of a node's push density: nodes with equal ones push the same fractions."""

    samples: float
    part: float
    """See `_sender_samples`."""
    cut: tuple[tuple[str, float, float], ...] = ()
    """Tensors of which the node owns a part, and that range of theirs, as fractions; only where it counts."""


@once_a_run
def _sender_classes(low: Lowering, micro_batch: MicroBatch) -> tuple[Sequence[Sender], Sequence[int]]:
    """Return the distinct kinds of senders, and each node's index into them."""
    cut = _cut_tensors(low)
    by_node = [Sender(*_sender_samples(low, micro_batch, sender), cut[sender]) for sender in range(low.nodes)]
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(by_node))}
    return tuple(kinds), [kinds[kind] for kind in by_node]


MOST_CUT = 64
"""Nodes up to which each has densities of its own where it owns a part of a tensor. A tensor's owners differ from its
other senders, and that difference is divided by the number of nodes."""


@once_a_run
def _cut_tensors(low: Lowering) -> Sequence[tuple[tuple[str, float, float], ...]]:
    """Return for each node the ranges of tensors that it shares with other owners, where the threshold depends on them.

    A relative threshold does under error feedback: an own range has no residual. Nodes of several places, of which
    each has a part of a bucket, are taken to own no part of what they send.
    """
    if low.push.kind != "relative" or not low.push.error_feedback or low.places > 1 or low.nodes > MOST_CUT:
        return [()] * low.nodes
    found: list[list[tuple[str, float, float]]] = [[] for _ in range(low.nodes)]
    for bucket in low.buckets:
        ranges = _ranges(low, low.division(bucket), 0).tolist()
        start = 0
        for instance, parameter in bucket.members:
            size, name = parameter.elements, instance.name_of(parameter)
            for own, (first, last) in zip(found, ranges, strict=True):
                begin, end = max(first, start) - start, min(last, start + size) - start
                if begin < end and end - begin < size:
                    own.append((name, begin / size, end / size))
            start += size
    return [tuple(own) for own in found]


def to_all(owned: Sequence[float], factor: int) -> Pairs:
    """Return the matrix in which each rank sends every other owner its part; `factor`: bytes of an element."""
    return Pairs([tuple(float(factor * elements) for elements in owned)], (0,) * len(owned))


@dataclass(frozen=True, eq=False)
class OwnedPieces:
    """The pieces of tensors in the ranges of the owners at a place, in order, of one bucket of each kind after another.

    Consecutive owners form a run if the number of entries sent to each is equal whatever the densities: their ranges
    are equally large in every bucket, and lie inside the same block of one tensor. Only the first owner of a run is
    stored.
    """

    kinds: Sequence[int]
    """Kind of each bucket; see [Note: alike buckets]."""
    runs: Ints
    """Index of the run to which each node's owner belongs."""
    elements_owned: Floats
    """Elements of an owner's range, by kind of bucket and run."""
    owner: Ints
    """Index of the range in which each piece lies; ranges are counted over kinds of buckets and runs."""
    elements: Ints
    """Elements of each piece."""
    tensors: tuple[str, ...]
    """Names of the tensors of these buckets."""
    ranges: sparsity.Ranges

    @cached_property
    def members(self) -> Ints:
        """Number of owners of each run."""
        return np.bincount(self.runs)

    @cached_property
    def counts(self) -> Floats:
        """Number of pieces in an owner's range, by kind of bucket and run."""
        whole = self.elements_owned
        return np.bincount(self.owner, minlength=whole.size).reshape(whole.shape).astype(np.float64)

    @cached_property
    def identity(self) -> Hashable:
        """A key that is equal for equal pieces."""
        ranges = self.ranges
        arrays = (self.runs, self.elements_owned, self.owner, self.elements, ranges.tensor, ranges.first, ranges.last)
        return tuple(self.kinds), self.tensors, *(each.tobytes() for each in arrays)

    def entries(self, ratios: Mapping[str, sparsity.Ratios]) -> Floats:
        """Return the number of entries that are sent of every range, given the fraction sent of each tensor."""
        densities = self.ranges.densities([ratios[name] for name in self.tensors])
        whole = self.elements_owned
        return summed(self.owner, self.elements * densities, whole.size).reshape(whole.shape)


def bucket_kind(low: Lowering, bucket: Bucket) -> int:
    """Return the kind of a bucket; see [Note: alike buckets]."""
    return _bucket_kinds(low)[0][bucket.index]


def first_of_kinds(low: Lowering) -> Sequence[Bucket]:
    """Return the first bucket of each kind; see [Note: alike buckets]."""
    return _bucket_kinds(low)[1]


@once_for_statistics
def _bucket_kinds(low: Lowering) -> tuple[Sequence[int], Sequence[Bucket]]:
    """Return the kind of each bucket, and the first bucket of each kind; see [Note: alike buckets]."""
    alike: Mapping[str, str] | None = None
    if low.statistics is not None:  # where owners cut tensors, densities may differ between tensors that are alike
        alike = {} if any(_cut_tensors(low)) else _parameters_alike(low)
    kinds: dict[Hashable, int] = {}
    firsts: list[Bucket] = []
    numbers = []
    for bucket in low.buckets:
        names = ("" if alike is None else alike.get(name, name) for name in bucket.names)
        kind = tuple(zip(names, (id(parameter) for _, parameter in bucket.members), strict=True))
        if kind not in kinds:
            kinds[kind] = len(firsts)
            firsts.append(bucket)
        numbers.append(kinds[kind])
    return numbers, firsts


@once_for_statistics
def owned_pieces(low: Lowering, place: int) -> OwnedPieces:
    """Return which pieces of which tensors owners hold: for one bucket of each kind of equal buckets, and for one owner
    of each run of equal owners.
    """
    kinds, buckets = _bucket_kinds(low)
    names = tuple(name for bucket in buckets for name in bucket.names)
    tensor_sizes = np.array([p.elements for bucket in buckets for _, p in bucket.members], dtype=np.int64)
    starts = np.cumsum(tensor_sizes) - tensor_sizes  # as if all buckets were one
    begins = np.cumsum([0, *(bucket.elements for bucket in buckets)])[:-1]
    by_bucket = [_ranges(low, low.division(bucket), place) for bucket in buckets]
    every = np.stack([each + begin for each, begin in zip(by_bucket, begins, strict=True)])
    firsts = _first_of_runs(every, _block_starts(low, names, starts, tensor_sizes))
    ranges = every[:, firsts].reshape(-1, 2)
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
    # a place has the experts of its part of a tensor, one after another
    parts_of, part = (low.places, place) if low.of_experts else (1, 0)
    fractions = [(part + edge / tensor_sizes[tensor]) / parts_of for edge in (begin, end)]
    parts = sparsity.Ranges(tensor, *fractions)
    owned = (last - first).astype(np.float64).reshape(len(buckets), -1)
    return OwnedPieces(kinds, np.cumsum(firsts) - 1, owned, owner, end - begin, names, parts)


def _block_starts(low: Lowering, names: Sequence[str], starts: Ints, sizes: Ints) -> Floats:
    """Return the offsets, in order, at which blocks of tensors begin for which the statistics have own densities."""
    if low.statistics is None:
        return starts.astype(np.float64)
    tables: list[Mapping[str, Any]] = [*(trace.tensors for trace in low.statistics.traces), low.statistics.changes]
    found = []
    for name, start, size in zip(names, starts.tolist(), sizes.tolist(), strict=True):
        counts = {1, *(len(table[name].blocks) for table in tables if name in table)}
        found += [start + size * number / count for count in counts for number in range(count)]
    return np.unique(np.array(found, dtype=np.float64))


def _first_of_runs(ranges: Ints, block_starts: Floats) -> Bools:
    """Return whether each owner begins a run; `ranges`: first and last element, by bucket and owner.

    >>> ranges = np.array([[[0, 2], [2, 4], [4, 6], [6, 8], [8, 10]]])
    >>> _first_of_runs(ranges, np.array([0.0, 4.0, 9.0])).tolist()
    [True, False, True, False, True]
    """
    owners = ranges.shape[1]
    begins, ends = ranges[..., 0].ravel(), ranges[..., 1].ravel()
    is_first = np.zeros(owners + 1, dtype=bool)
    is_first[0] = True
    is_first[1:-1] = (np.diff(ranges[..., 1] - ranges[..., 0], axis=1) != 0).any(axis=0)
    after = np.searchsorted(begins, block_starts, side="left")  # the first owner that begins there or later
    is_first[after % owners] = True
    cut = after[(after > 0) & (block_starts < ends[after - 1])] - 1
    is_first[cut % owners] = True
    return is_first[:-1]


@once_a_run
def dense_bytes(low: Lowering, elements: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bytes of ranges of a bucket that are sent whole."""
    return tuple(each * low.value_bytes for each in elements)


@once_a_run
def _ranges(low: Lowering, division: Division, place: int) -> Ints:
    """Return the first and the last element of each owner's range in a bucket; for experts, in its place's bucket."""
    ranges = np.array(division.ranges(place), dtype=np.int64)
    return ranges - ranges[0, 0] if low.of_experts else ranges


def _push_ratios(low: Lowering, sender: Sender) -> Mapping[str, sparsity.Ratios]:
    """Return the sent fraction of each tensor in this step.

    Where tensor ranks each have only a partial sum of a gradient (over fewer tokens), they push these partial sums.
    """
    whole, names, tp = _ratios_of_means(low, sender), _partial_names(low), low.policies.tp
    if not names:
        return whole
    parts = _ratios_of_means(low, sender._replace(samples=sender.samples / tp, part=sender.part / tp))
    key = (Same(whole), Same(parts), names)
    return low.shared.once(
        "densities with partial gradients",
        key,
        lambda: {**whole, **{name: parts[name] for name in names}},
        most=MAX_CACHED_DENSITIES,
    )


@once_a_run
def _partial_names(low: Lowering) -> tuple[str, ...]:
    """Return the names of parameters for which each rank of a tensor group has only a partial gradient."""
    if low.policies.tp == 1:
        return ()
    return tuple(instance.name_of(p) for instance, p in low.parameters if p.summed)


def _ratios_of_means(low: Lowering, sender: Sender) -> Mapping[str, sparsity.Ratios]:
    statistics = low.statistics
    assert statistics is not None  # loading demands them

    def ratios_of(name: str, *own: float) -> sparsity.Ratios:
        return sparsity.push_ratios(
            statistics,
            low.push,
            samples=sender.samples,
            tensor=name,
            step=step,
            part=sender.part,
            lag_steps=lag_steps,
            own=(own[0], own[1]) if own else (0.0, 0.0),
        )

    def beside_own() -> Mapping[str, sparsity.Ratios]:
        of_others = _ratios_of_means(low, sender._replace(cut=()))
        return {**of_others, **{name: ratios_of(name, *own) for name, *own in sender.cut}}

    step, lag_steps = _density_step(low)
    key = (Same(statistics), Same(low.scenario.workload.model), low.push, sender, step, lag_steps)
    found = beside_own if sender.cut else lambda: by_parameter(low, ratios_of)
    most = max(MAX_CACHED_DENSITIES, MOST_FRACTIONS // len(_parameters_alike(low)))
    return low.shared.once("densities of pushes", key, found, most=most)


def by_parameter(low: Lowering, ratios_of: Callable[[str], sparsity.Ratios]) -> Mapping[str, sparsity.Ratios]:
    """Return the densities of all parameters, including those of other stages; `ratios_of` gives them by name.

    Parameters with the same statistics are computed once, for example those of one role after a transfer of statistics.
    """
    alike = _parameters_alike(low)
    ratios = {name: ratios_of(name) for name in dict.fromkeys(alike.values())}
    return {name: ratios[first] for name, first in alike.items()}


def _parameters_alike(low: Lowering) -> Mapping[str, str]:
    """Return for every parameter the first one with the same statistics."""
    statistics = low.statistics
    assert statistics is not None  # loading demands them

    def first_alike() -> Mapping[str, str]:
        first: dict[tuple[int, ...], str] = {}
        names = [name for instance in low.whole_layers for name in instance.parameter_names]
        tables: list[Mapping[str, object]] = [*(trace.tensors for trace in statistics.traces), statistics.changes]
        return {name: first.setdefault(tuple(id(each.get(name)) for each in tables), name) for name in names}

    key = Same(statistics), Same(low.scenario.workload.model)
    return low.shared.once("parameters alike", key, first_alike)


def sent_ratios(low: Lowering, micro_batch: MicroBatch) -> tuple[Hashable, ...]:
    """Return the sent fractions of all tensors in this step, for each class of senders with samples."""
    kinds, _ = _sender_classes(low, micro_batch)
    ratios = [_push_ratios(low, kind) for kind in kinds if kind.samples]
    return tuple(in_order(low, each) for each in ratios)


def in_order(low: Lowering, ratios: Mapping[str, sparsity.Ratios]) -> Hashable:
    """Return the fractions of tensors as a key: equal for equal fractions."""
    alike = _parameters_alike(low)
    # of parameters that are alike the first, unless some of these have fractions of their own
    names = ratios if any(_cut_tensors(low)) or _partial_names(low) else dict.fromkeys(alike.values())

    def key() -> Hashable:
        return Hashed(tuple([ratios[name] for name in names]))

    return low.shared.once("order of densities", Same(ratios), key, most=MAX_CACHED_DENSITIES)


@once_a_step
def _density_step(low: Lowering) -> tuple[int, float]:
    """Return the step whose densities apply, and by how many steps the parameters used for compute lag behind.

    After the last sampled step, densities are constant.
    """
    assert low.statistics is not None
    lag_steps, last = _lag_steps(low), low.statistics.sampled_steps[-1]
    if low.step > low.push.warmup_steps and low.step - lag_steps >= last:
        return max(last, low.push.warmup_steps + 1), 0.0
    return low.step, lag_steps


@once_a_step
def _lag_steps(low: Lowering) -> float:
    """Return by how many steps the parameters used for compute lag, because owners do not publish all updates."""
    if not low.thresholds_publish:
        return 0.0
    threshold = absolute_threshold(low.scenario.plan.publish, low.scenario.workload.learning_rate)
    assert threshold is not None
    run = low.scenario.run
    return staleness_steps(_movements(low, max(low.step, run.warmup_steps + run.steps))[: low.step], threshold)


@once_for_statistics
def _movements(low: Lowering, steps: int) -> Sequence[float]:
    """Return the distance by which the mean element moves in each of the first steps."""
    elements = {instance.name_of(p): p.elements for instance, p in low.parameters}
    assert low.statistics is not None
    return movements(low.statistics, elements, steps=steps)


MAX_CACHED_DENSITIES = 1024
"""Maximum number of cached densities. A sweep of thresholds has one per step and threshold. Networks compared under one
plan have one per step, number of samples, and end of a band."""
MOST_FRACTIONS = 2**17
"""Number of cached fractions, one for each tensor of a density: of a model with few tensors, more densities than
`MAX_CACHED_DENSITIES` are cached, as a search needs one for each step, threshold, and size of a micro-batch."""


def _sender_samples(low: Lowering, micro_batch: MicroBatch, node: int) -> tuple[float, float]:
    """Return how many samples a node's gradient averages over, and the fraction that these are of the node's step.

    Where every micro-batch is pushed, the thresholded gradient is this micro-batch's part of the mean over the whole
    step. Where ranks divide a sequence, each has only some of its tokens, which count as that fraction of a sample.
    """
    ranks = low.group[node * low.places : (node + 1) * low.places]
    whole = sum(low.batch_sizes[rank] for rank in ranks)
    samples = sum(low.samples(rank, micro_batch) for rank in ranks) if micro_batch.sent_before else whole
    return samples / low.policies.cp, samples / whole if whole else 0.0


def mean_push_density(low: Lowering) -> float:
    """Return the sent fraction of all elements that are owned on other nodes, over all ranks, in this step."""
    sent = offered = 0.0
    sending = [each for each in low.micro_batches if each.sends_gradients]
    for owners, micro_batch in product(low.all_owners, sending):
        for place in range(owners.places) if is_thresholded(low) else ():
            sent += push_totals(owners, micro_batch, place).entries
        offered += (owners.nodes - 1) * _divided_elements(owners)
        sent += 0.0 if is_thresholded(low) else (owners.nodes - 1) * _divided_elements(owners)
    return sent / offered if offered else 0.0


@once_a_run
def _divided_elements(low: Lowering) -> int:
    """Return the elements of all buckets, each of all of its places."""
    return sum(sum(low.division(bucket).places) for bucket in low.buckets)


# Residuals and scratch ------------------------------------------------------------------------------------------------


def residual_elements(low: Lowering, bucket: Bucket, rank: int) -> int:
    """Return the elements of a bucket for which a rank keeps a residual: those owned by others."""
    low = low.owning(bucket)
    if not low.push.error_feedback:
        return 0
    return low.division(bucket).places[low.place(rank)] - low.pushed_elements(bucket, rank)


def residual_value_bytes(low: Lowering) -> int:
    """Return the bytes of one element of a residual."""
    return PRECISION_BYTES[low.push.error_feedback_precision]


def accumulates_in_residual(low: Lowering) -> bool:
    """Return whether gradients are added to the residual, so that their bucket is freed early.

    Otherwise the residual is added to the gradients: the sum is made in the more precise of the two. bf16 has
    fewer bits of mantissa than fp16, though both have 16 bits.
    """
    kept = low.push.error_feedback_precision
    holds = kept == low.scenario.workload.precision or residual_value_bytes(low) > low.value_bytes
    return low.push.error_feedback is True and holds


def threshold_memory(low: Lowering, rank: int) -> dict[str, float]:
    """Return the persistent memory that thresholding takes on a rank, by category: residuals and scratch."""
    if low.policies.gradients != "push" or (low.push.threshold is None and not low.thresholds_publish):
        return {}
    chunked = low.device(rank).kind == "cpu"
    most = [_most_owned(owners, owners.place(rank)) for owners in low.all_owners]
    range_elements, part_elements = map(max, zip(*most, strict=True))
    flags, magnitudes = encodings.scratch_elements(range_elements, part_elements, chunked=chunked)
    residuals = sum(residual_elements(low, bucket, rank) for bucket in low.buckets)
    scratch = flags + magnitudes * max(low.value_bytes, PRECISION_BYTES["fp32"])
    return {"residuals": float(residuals * residual_value_bytes(low)), "scratch": float(scratch)}


@once_a_run
def _most_owned(low: Lowering, place: int) -> tuple[int, int]:
    """Return the elements of the largest range that one owner has at a place, and of the place's largest part."""
    owned = [low.division(bucket).owned[place] for bucket in low.buckets]
    return max(map(max, owned)), max(map(sum, owned))
