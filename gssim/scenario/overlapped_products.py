"""Layers of a tensor-parallel rank whose products overlap with exchanges of parts of sequences, in a ring.

They are derived from traced layers, in which such an exchange precedes or follows whole products. The changes are those
that `gsreal.methods.overlapped_products` makes in real runs (`plan.tp_overlap` on gloo), where y is a rank's part of a
tensor with the model's width, and x and o are a part of what a map reads and gives on the other side:

- An all-gather of inputs computes the outputs of all maps that read it, which exist from its begin; each is copied to
  its places from the product of one part (o). What is gathered is kept in the order of the ranks, without a second copy
  in the order of positions.
- A reduce-scatter of outputs makes them part by part: of the whole output there are at most the sum that was sent, the
  one that arrives and the rank's own term (3 y), besides the rows that make it (x). The bias is added to the result.
- An all-gather of the output's gradient computes that of the input, in the same way as in the forward.
- A reduce-scatter of the input's gradient makes it part by part. The gradients of the maps' weights and biases follow,
  each from a copy of the gradient of the map's output in the order of the ranks. All of these, and the gathered input,
  live until then.
- A checkpointed block runs its forward again before anything of its backward: the first backward node of its last map
  takes the saved weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from gssim.errors import UserError
from gssim.scenario.overlapped_sums import input_gradient_sums, maps_of_sums
from gssim.workload import Buffer, Layer, Moment, Parameter, Polynomial, Reduction

NEAR = 10
"""Operations within which a collective's copies are made and freed in a trace."""


@lru_cache(maxsize=256)
def with_overlapped_products(layer: Layer, ranks: int, length: int) -> Layer:
    """Return a layer whose exchanges of parts of sequences overlap with the products of its linear maps.

    `ranks`: number of tensor-parallel ranks; `length`: sequence length. Raises UserError if the layer's trace does not
    tell its products, as an old one.
    """
    sums = input_gradient_sums(layer)
    if not any(each.kind == "reduce-scatter" for each in sums):
        return layer
    columns, rows = (maps_of_sums(layer, rows=of_rows) for of_rows in (False, True))
    changes = _Changes(layer, ranks, length)
    forward = [each for each in layer.reductions if each.moment.phase == "f"]
    for kind, change in (("all-gather", changes.gather_inputs), ("reduce-scatter", changes.sum_outputs)):
        exchanges = [each for each in forward if each.kind == kind]
        for exchange, maps in zip(exchanges, reversed(columns if kind == "all-gather" else rows), strict=False):
            change(exchange, maps)
    gathers = [each for each in layer.reductions if (each.moment.phase, each.kind) == ("b", "all-gather")]
    for place, exchange in enumerate(sums):
        before = sums[place - 1].moment.position if place else -1
        for gather in gathers:
            if before < gather.moment.position < exchange.moment.position:
                changes.gather_gradients(gather, rows[place])
        changes.sum_gradients(exchange, columns[place])
    return changes.result()


@dataclass
class _Changes:
    """The changes of a layer's buffers, parameters and collectives, by `id` of what they replace."""

    layer: Layer
    ranks: int
    length: int
    buffers: dict[int, Buffer | None] = field(default_factory=dict)
    """None: left out."""
    parameters: dict[int, Parameter] = field(default_factory=dict)
    reductions: dict[int, Reduction] = field(default_factory=dict)
    releases: dict[int, int] = field(default_factory=dict)
    """Position at which a forward that saves nothing frees a buffer."""
    added: list[Buffer] = field(default_factory=list)

    def gather_inputs(self, exchange: Reduction, maps: Sequence[Parameter]) -> None:
        """Let the all-gather of the input of `maps` compute their outputs."""
        place = exchange.moment
        whole = self._kept_after(exchange)
        self.buffers[id(whole)] = replace(whole, born=place)
        self.releases[id(whole)] = place.position
        after = [each for each in self._products() if each.position > place.position]
        for moment in after[: len(maps)]:
            for buffer in self.layer.buffers:
                if buffer.born == moment:
                    self.buffers[id(buffer)] = replace(buffer, born=place)
        self._add(place, place, self._part(exchange, _widest(maps)))

    def sum_outputs(self, exchange: Reduction, maps: Sequence[Parameter]) -> None:
        """Let the reduce-scatter of the output of `maps`, one map, make it."""
        place = exchange.moment
        born = max((each for each in self._products() if each.position < place.position), key=lambda e: e.position)
        output = self._only(
            each for each in self.layer.buffers if each.born == born and each.size_bytes == exchange.size_bytes
        )
        for buffer in self.layer.buffers:
            is_copy = buffer.freed == place and buffer.size_bytes == exchange.size_bytes
            is_bias = (
                buffer.freed == output.freed
                and 0 <= born.position - buffer.born.position
                and buffer.born.phase == "f"
                and not any(i for _, i, _ in buffer.size_bytes.terms)
            )
            if buffer is output or is_copy or is_bias:
                self.buffers[id(buffer)] = None
        size = self._part(exchange).plus(self._part(exchange)).plus(self._part(exchange, _widest(maps)))
        self._add(place, place, size)

    def gather_gradients(self, exchange: Reduction, maps: Sequence[Parameter]) -> None:
        """Let the all-gather of the gradient of the output of `maps`, one map, compute that of their input."""
        place, part = exchange.moment, self._part(exchange, _widest(maps))
        copy = self._copy_after(exchange)
        size = _times(part, self.ranks)
        following = (
            each for each in self.layer.buffers if each.born.phase == "b" and each.born.position > copy.born.position
        )
        found = min((each for each in following if self._at(each.size_bytes) == size), key=_born, default=None)
        if found is None:
            raise self._unknown()
        self.buffers[id(found)] = replace(found, born=place)
        self._add(place, place, part)

    def sum_gradients(self, exchange: Reduction, maps: Sequence[Parameter]) -> None:
        """Let the reduce-scatter of the gradient of the input of `maps` make it, before those of their weights."""
        end = exchange.moment
        begin = replace(end, position=end.position - len(maps) - 2)
        made, pending = set[int](), [end]
        while pending:  # the sum of all maps' gradients is made of two tensors at a time
            moment = pending.pop()
            for buffer in self.layer.buffers:
                if buffer.freed == moment and buffer.size_bytes == exchange.size_bytes and id(buffer) not in made:
                    made.add(id(buffer))
                    pending.append(buffer.born)
        owners = [each.name.rpartition(".")[0] for each in maps]
        ends = self._ends_of(maps)
        for buffer in self.layer.buffers:
            if id(buffer) in made:
                self.buffers[id(buffer)] = None
            elif buffer.born == end:
                self.buffers[id(buffer)] = replace(buffer, born=begin)
            elif (
                buffer.freed.phase == "b" and not buffer.freed.layer_offset and buffer.freed.position in ends
            ):
                changed = self.buffers.get(id(buffer), buffer)
                self.buffers[id(buffer)] = changed and replace(changed, freed=end)
        for parameter in self.layer.parameters:
            owner = parameter.name.rpartition(".")[0]
            if owner in owners:
                born = replace(end, position=end.position - 1 - owners.index(owner))
                ready = replace(end, position=end.position + 1)
                self.parameters[id(parameter)] = replace(parameter, born=born, ready=ready)
        for number, weight in enumerate(maps):
            moment = replace(end, position=end.position - 1 - number)
            self._add(moment, moment, _times(self._part(exchange, weight), self.ranks))
        size = self._part(exchange).plus(self._part(exchange)).plus(self._part(exchange, _widest(maps)))
        self._add(begin, replace(begin, position=begin.position + 1), size)
        self.reductions[id(exchange)] = replace(exchange, moment=begin, awaited=end.position)

    def result(self) -> Layer:
        """Return the changed layer."""
        layer = self.layer
        saved = [each for each in layer.buffers if each.is_saved]
        releases = layer.recompute_releases and tuple(
            self.releases.get(id(each), at) for each, at in zip(saved, layer.recompute_releases, strict=True)
        )
        kept = (self.buffers.get(id(each), each) for each in layer.buffers)
        return replace(
            layer,
            buffers=(*(each for each in kept if each is not None), *self.added),
            parameters=tuple(self.parameters.get(id(each), each) for each in layer.parameters),
            reductions=tuple(self.reductions.get(id(each), each) for each in layer.reductions),
            recompute_releases=releases,
            recompute_after=None,
        )

    def _products(self) -> list[Moment]:
        """Return the moments of a forward's matrix products and attentions."""
        if self.layer.selective_positions is None:
            raise self._unknown()
        return [Moment("f", each) for each in self.layer.selective_positions]

    def _kept_after(self, exchange: Reduction) -> Buffer:
        """Return the copy of what an all-gather brings that is saved for the backward; leaves out what it copies."""
        copy = self._copy_after(exchange)
        if not copy.is_saved:
            raise self._unknown()
        gathered = self._only(
            each
            for each in self.layer.buffers
            if each.born == exchange.moment and each.size_bytes == exchange.size_bytes
        )
        self.buffers[id(gathered)] = None
        return copy

    def _copy_after(self, exchange: Reduction) -> Buffer:
        """Return the copy, in the order of positions, of what an all-gather brings."""
        place = exchange.moment
        return self._only(
            each
            for each in self.layer.buffers
            if each.born.phase == place.phase
            and 0 < each.born.position - place.position < NEAR
            and each.size_bytes == exchange.size_bytes
        )

    def _ends_of(self, maps: Sequence[Parameter]) -> set[int]:
        """Return the positions at which the traced backward frees what these maps' backwards need."""
        frees = {
            each.freed.position
            for each in self.layer.buffers
            if each.freed.phase == "b" and not each.freed.layer_offset
        }
        first = (
            min((at for at in frees if each.born.position < at < each.ready.position), default=None) for each in maps
        )
        return {each for each in first if each is not None}

    def _part(self, exchange: Reduction, weight: Parameter | None = None) -> Polynomial:
        """Return the bytes of a rank's part of what an exchange carries, or of the other side of a map's product."""
        whole = self._at(exchange.size_bytes)
        factor, divisor = 1, self.ranks
        if weight is not None and weight.sliced_dimension is not None:
            factor = weight.shape[weight.sliced_dimension]
            divisor *= prod(weight.shape) // factor
        if any(c * factor % divisor for c, _, _ in whole.terms):
            raise self._unknown()
        return Polynomial(tuple((c * factor // divisor, i, j) for c, i, j in whole.terms))

    def _at(self, size: Polynomial) -> Polynomial:
        """Return a size at the sequence length, as a function of the batch size."""
        terms: dict[int, int] = {}
        for c, i, j in size.terms:
            terms[i] = terms.get(i, 0) + c * self.length**j
        return Polynomial(tuple((c, i, 0) for i, c in terms.items()))

    def _add(self, born: Moment, freed: Moment, size: Polynomial) -> None:
        self.added.append(Buffer(born, freed, "temporaries", size))

    def _only(self, buffers: Sequence[Buffer] | object) -> Buffer:
        found = list(buffers)  # type: ignore[call-overload]
        if len(found) != 1:
            raise self._unknown()
        buffer: Buffer = found[0]
        return buffer

    def _unknown(self) -> UserError:
        return UserError(
            f"plan.tp_overlap = true: the model file does not tell the products of '{self.layer.name}' beside its "
            "exchanges on gloo; trace the model again with `gsreal trace`, or leave it out"
        )


def _born(buffer: Buffer) -> int:
    return buffer.born.position


def _widest(maps: Sequence[Parameter]) -> Parameter:
    """Return the weight with the largest sliced dimension."""
    return max(maps, key=lambda each: each.shape[each.sliced_dimension or 0])


def _times(size: Polynomial, factor: int) -> Polynomial:
    return Polynomial(tuple((c * factor, i, j) for c, i, j in size.terms))
