"""Layers of a tensor-parallel rank whose linear maps overlap with the sums or exchanges around them.

They are derived from traced layers, in which a sum follows the whole backward of its map, and an exchange of parts of
sequences precedes or follows whole products. The changes are those that `gsreal.methods.overlapped_maps` makes in real
runs.

[Note: overlapped sums] With `plan.async_input_gradients`, sums of input gradients overlap with the products of weight
gradients:

- An all-reduce begins where the gradient of the map's input is computed, which comes before those of weight and bias.
  It is done in place, without the copy of its operand that the trace has.
- A reduce-scatter begins where the input's gradient of all maps that read the gathered tensor is complete. Only then
  come the gradients of these maps' weights and biases; their inputs, and the gradients of their outputs, live until
  the wait.

Either way the gradients of weights and biases are ready right after the wait for the sum.

[Note: overlapped products] With `plan.tp_overlap` on gloo, products overlap with exchanges of parts of sequences, in a
ring. Let y be the bytes of a rank's part of the exchanged tensor, and x those of the same positions on the other side
of a linear map:

- An all-gather of inputs computes the outputs of all maps that read it, which exist from its begin; the product of one
  part (x) is copied to its places. What is gathered is kept in the order of the ranks: there is no second copy in the
  order of positions.
- A reduce-scatter of outputs makes them part by part. In the place of the whole output there are at most the sum that
  was sent, the one that arrives, the rank's own term (3 y) and the rows that make it (x). The bias is added to the
  result.
- An all-gather of an output's gradient computes that of the input, as in the forward.
- A reduce-scatter of an input's gradient makes it part by part. The gradients of the maps' weights and biases follow,
  each from a copy of the gradient of the map's output in the order of the ranks. All of these, and the gathered input,
  live until then.
- A checkpointed block runs its forward again before anything of its backward, since the first backward node of its last
  map takes the saved weight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

from gssim.errors import UserError
from gssim.workload import Buffer, Layer, Moment, Parameter, Polynomial, Reduction

SUMS = ("all-reduce", "reduce-scatter")
"""Kinds of the collectives that sum over tensor-parallel ranks."""


def end_of(reduction: Reduction) -> int:
    """Return the position at which a layer has the result of a collective."""
    return reduction.moment.position if reduction.awaited is None else reduction.awaited


def input_gradient_sums(layer: Layer) -> list[Reduction]:
    """Return the collectives that sum gradients of inputs over tensor-parallel ranks, in order.

    What else is summed in a backward are statistics of norms over all heads, mostly in fp32 whatever the precision.
    """
    sums = [e for e in layer.reductions if e.moment.phase == "b" and e.kind in SUMS and not e.fixed]
    scatters = [e for e in sums if e.kind == "reduce-scatter"]
    return scatters or sums


def maps_of_sums(layer: Layer, *, rows: bool = False) -> list[list[Parameter]]:
    """Return, for each of `input_gradient_sums`, the weights of the column-parallel maps whose input gradients it sums.

    `rows`: instead, those of row-parallel maps whose weight gradients are computed between that sum and the one before.
    A layer whose forward sums outputs ends with a row-parallel map; all maps cut in its dimension are row-parallel.
    """
    maps = sorted((p for p in layer.parameters if p.sliced and len(p.shape) == 2), key=lambda p: p.ready.position)
    sums_results = any(e.moment.phase == "f" and e.kind in SUMS for e in layer.reductions)
    cut = maps[0].sliced_dimension if maps and sums_results else None
    ends = [end_of(each) + (each.awaited is not None) for each in input_gradient_sums(layer)]
    return [
        [p for p in maps if begin < p.ready.position <= end and (p.sliced_dimension == cut) == rows]
        for begin, end in pairwise((-1, *ends))
    ]


@lru_cache(maxsize=256)
def with_overlapped_sums(layer: Layer) -> Layer:
    """Return a layer whose sums of input gradients overlap with the products that give the weight gradients."""
    for reduction, maps in zip(input_gradient_sums(layer), maps_of_sums(layer), strict=True):
        owners = {each.name.rpartition(".")[0] for each in maps}
        of_maps = [each for each in layer.parameters if each.name.rpartition(".")[0] in owners]
        if maps and not any(each.of_experts for each in maps):
            is_traced = all(each.born.position < reduction.moment.position for each in of_maps)
            change = _with_scatter if reduction.kind == "reduce-scatter" else _with_all_reduce
            layer = (change if is_traced else _with_sum_of_one_operation)(layer, reduction, of_maps)
    return layer


def _with_sum_of_one_operation(layer: Layer, reduction: Reduction, parameters: Sequence[Parameter]) -> Layer:
    """Return a layer that is not traced (of a published run) with such a sum.

    There one operation stands for the whole backward of a map, and its sum has no copy of its operand.
    """
    end = reduction.moment
    ready = {id(each): replace(each, ready=_next(end)) for each in parameters}
    return _replaced(layer, {}, ready, reduction, Moment("b", end.position - 1))


def _with_all_reduce(layer: Layer, reduction: Reduction, parameters: Sequence[Parameter]) -> Layer:
    """Return a layer with one such all-reduce; `parameters`: weight and bias of the map."""
    end = reduction.moment
    as_large = [each for each in layer.buffers if each.born.phase == "b" and each.size_bytes == reduction.size_bytes]
    sent = next(each for each in as_large if each.freed == end)
    copy = next(each for each in as_large if each.born == end)
    places = [sent.born.position, *(each.born.position for each in parameters)]
    begin, later = Moment("b", min(places)), Moment("b", max(places))
    changed = {
        id(each): replace(each, born=later if each.born.position <= begin.position else each.born, ready=_next(end))
        for each in parameters
    }
    return _replaced(layer, {id(sent): None, id(copy): replace(copy, born=begin)}, changed, reduction, begin)


def _with_scatter(layer: Layer, reduction: Reduction, parameters: Sequence[Parameter]) -> Layer:
    """Return a layer with one such reduce-scatter; `parameters`: weights and biases of all maps that read its tensor.

    What a map's backward needs (its input, and the gradient of its output) is freed at the wait; in the trace, right
    after the gradient of its weight.
    """
    end = reduction.moment
    begin = Moment("b", end.position - 1)
    frees = {each.freed.position for each in layer.buffers if each.freed.phase == "b" and not each.freed.layer_offset}
    of_maps = [(each.born.position, each.ready.position) for each in parameters if len(each.shape) == 2]
    after_maps = [min((at for at in frees if born < at < ready), default=None) for born, ready in of_maps]
    changed: dict[int, Buffer | None] = {}
    for buffer in layer.buffers:
        freed = buffer.freed
        if freed.phase == "b" and not freed.layer_offset and freed.position in after_maps:
            changed[id(buffer)] = replace(buffer, freed=end)
        elif buffer.born == end:
            changed[id(buffer)] = replace(buffer, born=begin)
    gradients = {id(each): replace(each, born=end, ready=_next(end)) for each in parameters}
    return _replaced(layer, changed, gradients, reduction, begin)


def _next(moment: Moment) -> Moment:
    return replace(moment, position=moment.position + 1)


def _replaced(
    layer: Layer,
    buffers: dict[int, Buffer | None],
    parameters: dict[int, Parameter],
    reduction: Reduction,
    begin: Moment,
) -> Layer:
    """Return a layer with changed buffers and parameters, by `id` (None: left out), and a sum from `begin` on."""
    kept = (buffers.get(id(each), each) for each in layer.buffers)
    beside = replace(reduction, moment=begin, awaited=reduction.moment.position)
    reductions = [beside if each is reduction else each for each in layer.reductions]
    return replace(
        layer,
        buffers=tuple(each for each in kept if each is not None),
        parameters=tuple(parameters.get(id(each), each) for each in layer.parameters),
        reductions=tuple(reductions),
    )


NEAR = 10
"""Operations after an all-gather within which a trace copies what it brought."""


@lru_cache(maxsize=256)
def with_overlapped_products(layer: Layer, ranks: int, length: int, model: str) -> Layer:
    """Return a layer whose exchanges of parts of sequences overlap with the products of its linear maps.

    `ranks`: number of tensor-parallel ranks; `length`: sequence length; `model`: the model's name, for messages. Raises
    UserError if the layer's trace does not show its products as expected.
    """
    sums = input_gradient_sums(layer)
    if not any(each.kind == "reduce-scatter" for each in sums):
        return layer
    columns, rows = (maps_of_sums(layer, rows=of_rows) for of_rows in (False, True))
    changes = _Changes(layer, ranks, length, model)
    gathers, scatters, gradient_gathers = (
        [each for each in layer.reductions if (each.moment.phase, each.kind) == place]
        for place in (("f", "all-gather"), ("f", "reduce-scatter"), ("b", "all-gather"))
    )
    # the backward comes to the maps in the reverse order; a last gather, of whole sequences, has none
    for gather, maps in zip(gathers, reversed(columns), strict=False):
        changes.gather_inputs(gather, maps)
    for scatter, maps in zip(scatters, reversed(rows), strict=False):
        changes.sum_outputs(scatter, maps)
    begin = -1
    for scatter, of_columns, of_rows in zip(sums, columns, rows, strict=True):
        for gather in gradient_gathers:
            if begin < gather.moment.position < scatter.moment.position:
                changes.gather_gradients(gather, of_rows)
        changes.sum_gradients(scatter, of_columns)
        begin = scatter.moment.position
    return changes.result()


@dataclass
class _Changes:
    """The changes of a layer's buffers, parameters and collectives, by `id` of what they replace."""

    layer: Layer
    ranks: int
    length: int
    model: str
    buffers: dict[int, Buffer | None] = field(default_factory=dict)
    """None: left out."""
    parameters: dict[int, Parameter] = field(default_factory=dict)
    reductions: dict[int, Reduction] = field(default_factory=dict)
    releases: dict[int, int] = field(default_factory=dict)
    """Positions at which a forward that saves nothing frees buffers."""
    added: list[Buffer] = field(default_factory=list)

    def gather_inputs(self, exchange: Reduction, maps: Sequence[Parameter]) -> None:
        """Let the all-gather of the input of `maps` compute their outputs."""
        place, whole = exchange.moment, self._copy_after(exchange)
        (gathered,) = self._exactly(1, (each for each in self._as_large(exchange) if each.born == place))
        self.buffers[id(gathered)] = None
        self.buffers[id(whole)] = replace(whole, born=place)
        self.releases[id(whole)] = place.position
        products = [each for each in self._products() if each.position > place.position][: len(maps)]
        outputs = self._exactly(len(maps), (each for each in self.layer.buffers if each.born in products))
        expected = [self._other_side(exchange, each) for each in maps]
        if not whole.is_saved or sorted(map(str, expected)) != sorted(str(self._at(e.size_bytes)) for e in outputs):
            raise self._unknown()
        for output in outputs:
            self.buffers[id(output)] = replace(output, born=place)
        self._add(place, place, self._other_side(exchange, _widest(maps), parts=1))

    def sum_outputs(self, exchange: Reduction, maps: Sequence[Parameter]) -> None:
        """Let the reduce-scatter of the output of `maps`, which is one map, make it."""
        place = exchange.moment
        product = max((e for e in self._products() if e.position < place.position), key=lambda e: e.position)
        (output,) = self._exactly(1, (each for each in self._as_large(exchange) if each.born == product))
        bias = Polynomial(tuple((c, 0, 0) for c, _, _ in self._divided(exchange, self.length).terms))
        for buffer in self.layer.buffers:
            is_copy = buffer in self._as_large(exchange) and buffer.freed == place
            is_bias = buffer.freed == output.freed and buffer.size_bytes == bias
            if buffer is output or is_copy or is_bias:
                self.buffers[id(buffer)] = None
        self._add(place, place, self._travelling(exchange, maps))

    def gather_gradients(self, exchange: Reduction, maps: Sequence[Parameter]) -> None:
        """Let the all-gather of the gradient of the output of `maps`, which is one map, compute that of the input."""
        place, size = exchange.moment, self._other_side(exchange, _widest(maps))
        copied = self._copy_after(exchange).born.position
        gradients = [
            each
            for each in self.layer.buffers
            if each.born.phase == "b" and each.born.position > copied and self._at(each.size_bytes) == size
        ]
        if not gradients:
            raise self._unknown()
        gradient = min(gradients, key=lambda each: each.born.position)
        self.buffers[id(gradient)] = replace(gradient, born=place)
        self._add(place, place, self._other_side(exchange, _widest(maps), parts=1))

    def sum_gradients(self, exchange: Reduction, maps: Sequence[Parameter]) -> None:
        """Let the reduce-scatter of the gradient of the input of `maps` make it, before those of their weights."""
        end = exchange.moment
        begin = replace(end, position=end.position - len(maps) - 2)
        made, needed = self._summed(exchange), self._ends_of(maps)
        for buffer in self.layer.buffers:
            freed = buffer.freed
            if id(buffer) in made:
                self.buffers[id(buffer)] = None
            elif buffer.born == end:
                self.buffers[id(buffer)] = replace(buffer, born=begin)
            elif freed.phase == "b" and not freed.layer_offset and freed.position in needed:
                changed = self.buffers.get(id(buffer), buffer)
                self.buffers[id(buffer)] = changed and replace(changed, freed=end)
        for number, weight in enumerate(maps, 1):
            born, ready = (replace(end, position=end.position + change) for change in (-number, 1))
            owner = weight.name.rpartition(".")[0]
            for parameter in self.layer.parameters:
                if parameter.name.rpartition(".")[0] == owner:
                    self.parameters[id(parameter)] = replace(parameter, born=born, ready=ready)
            self._add(born, born, self._other_side(exchange, weight))
        self._add(begin, replace(begin, position=begin.position + 1), self._travelling(exchange, maps))
        self.reductions[id(exchange)] = replace(exchange, moment=begin, awaited=end.position)

    def result(self) -> Layer:
        """Return the changed layer."""
        layer, releases = self.layer, self.layer.recompute_releases
        if releases is not None:
            saved = (each for each in layer.buffers if each.is_saved)
            releases = tuple(self.releases.get(id(each), at) for each, at in zip(saved, releases, strict=True))
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

    def _as_large(self, exchange: Reduction) -> list[Buffer]:
        """Return the buffers as large as what is exchanged."""
        return [each for each in self.layer.buffers if each.size_bytes == exchange.size_bytes]

    def _copy_after(self, exchange: Reduction) -> Buffer:
        """Return the copy of what an all-gather brings in the order of positions."""
        place = exchange.moment
        (copy,) = self._exactly(
            1,
            (
                each
                for each in self._as_large(exchange)
                if each.born.phase == place.phase and 0 < each.born.position - place.position < NEAR
            ),
        )
        return copy

    def _summed(self, exchange: Reduction) -> set[int]:
        """Return, by `id`, the buffers of which a reduce-scatter's operand is made.

        These are its copy in the order of the ranks, the sum of the gradients that all maps give, and these gradients:
        each is freed as another is made, or by the reduce-scatter.
        """
        summed, moments = set[int](), [exchange.moment]
        while moments:
            moment = moments.pop()
            for buffer in self._as_large(exchange):
                if buffer.freed == moment and id(buffer) not in summed:
                    summed.add(id(buffer))
                    moments.append(buffer.born)
        return summed

    def _ends_of(self, maps: Sequence[Parameter]) -> set[int | None]:
        """Return the positions at which the traced backward frees what the backwards of these maps need."""
        moments = [each.freed for each in self.layer.buffers]
        frees = [each.position for each in moments if each.phase == "b" and not each.layer_offset]
        return {
            min((at for at in frees if each.born.position < at < each.ready.position), default=None) for each in maps
        }

    def _travelling(self, exchange: Reduction, maps: Sequence[Parameter]) -> Polynomial:
        """Return the bytes that a ring's sum takes beside its result: two parts of it, and the rows of a product."""
        part = self._divided(exchange, self.ranks, factor=2)
        rows = self._other_side(exchange, _widest(maps), parts=1)
        return Polynomial(tuple((c + d, i, j) for (c, i, j), (d, _, _) in zip(part.terms, rows.terms, strict=True)))

    def _other_side(self, exchange: Reduction, weight: Parameter, *, parts: int | None = None) -> Polynomial:
        """Return the bytes of the positions of `parts` ranks (None: of all) on the cut side of a map's product."""
        factor = weight.sliced_size * (parts or self.ranks)
        return self._divided(exchange, self.ranks * (weight.elements // weight.sliced_size), factor=factor)

    def _divided(self, exchange: Reduction, divisor: int, *, factor: int = 1) -> Polynomial:
        """Return the bytes of what is exchanged times `factor / divisor`."""
        terms = [(c * factor, i, j) for c, i, j in self._at(exchange.size_bytes).terms]
        if any(c % divisor for c, _, _ in terms):
            raise self._unknown()
        return Polynomial(tuple((c // divisor, i, j) for c, i, j in terms))

    def _at(self, size: Polynomial) -> Polynomial:
        """Return a size at the sequence length, as a function of the batch size."""
        terms: dict[int, int] = {}
        for c, i, j in size.terms:
            terms[i] = terms.get(i, 0) + c * self.length**j
        return Polynomial(tuple((c, i, 0) for i, c in terms.items()))

    def _add(self, born: Moment, freed: Moment, size: Polynomial) -> None:
        self.added.append(Buffer(born, freed, "temporaries", size))

    def _exactly(self, number: int, buffers: Iterable[Buffer]) -> list[Buffer]:
        """Return buffers of which there must be so many."""
        listed = list(buffers)
        if len(listed) != number:
            raise self._unknown()
        return listed

    def _unknown(self) -> UserError:
        return UserError(
            f"plan.tp_overlap = true: the file of '{self.model}' (workload.model) does not show the products of "
            f"'{self.layer.name}' beside its exchanges, which 'gloo' needs; trace it again with `gsreal trace`, or "
            "leave plan.tp_overlap out"
        )


def _widest(maps: Sequence[Parameter]) -> Parameter:
    """Return the weight with the largest sliced dimension."""
    return max(maps, key=lambda each: each.sliced_size)
