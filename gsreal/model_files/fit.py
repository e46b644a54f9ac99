"""Fits the records of traced steps at several shapes by polynomials in batch size and sequence length."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import groupby
from math import lcm, prod
from operator import attrgetter, mul
from typing import Any, NamedTuple

from gsreal.model_files.recorder import NoPolynomialError, Record, StorageLife, Work
from gssim.units import Recompute
from gssim.workload import (
    FIELDS_OF_TERMS,
    NO_ROLES,
    Buffer,
    Layer,
    Moment,
    Parameter,
    PartialRecomputation,
    Polynomial,
    Reduction,
)
from gssim.workload.layer import OPERAND_CASTS, REPLACED

LOSS = "loss"
"""Name of the last layer, which runs outside any module."""


class Shape(NamedTuple):
    """Sizes that the quantities of a traced step are functions of, by the letters of `Polynomial`; 0: not applicable.

    Where blocks are whole, u stands for another size: the experts that a rank holds, or the rank of adapters; see
    `step.Step.shape`.
    """

    b: int
    """Batch size."""
    s: int | None
    """Sequence length."""
    u: int = 0
    """Units of the slice of each block."""
    p: int = 0
    """Positions of a rank's part of each sequence."""
    r: int = 0
    """Rows that the experts of a rank process."""
    e: int = 0
    """Experts that a rank holds."""
    a: int = 0
    """Rank of adapters."""


Powers = tuple[int, ...]
"""Powers of a shape's sizes in one term, in the order of `Shape`."""
Terms = Mapping[str, tuple[int, int]]
"""Highest powers of b and s in terms, by the other factors of these terms: a key of `FIELDS_OF_TERMS`."""
CONSTANT, SAMPLES, TOKENS, SCORES = (0, 0), (1, 0), (1, 1), (1, 2)
TERMS: dict[str, Terms] = {
    "layers": {"": SCORES},
    "sliced_layers": {"": SCORES, "u": SCORES},
    # quantities on parts of sequences depend on the parts' length alone, not on units
    "sequence_layers": {"": SCORES, "u": SCORES, "p": SAMPLES},
    # everything runs on parts; the FLOP of attention grow with the whole sequence too
    "context_layers": {"": SAMPLES, "p": TOKENS},
    # the work of experts depends on their number and their rows alone
    "expert_layers": {"": SCORES, "u": CONSTANT, "r": CONSTANT},
    "expert_sequence_layers": {"": SCORES, "u": SCORES, "p": SAMPLES, "r": CONSTANT, "e": CONSTANT},
}
"""Terms of the polynomials of layers, by the field of a model that holds these layers."""
TERMS_WITH_ADAPTERS: dict[str, Terms] = {
    "layers": {"": SCORES, "u": SCORES},
    "sliced_layers": {"": SCORES, "u": SCORES, "a": TOKENS, "ua": TOKENS},
    "sequence_layers": {"": SCORES, "u": SCORES, "a": TOKENS, "ua": TOKENS, "p": SAMPLES},
    "context_layers": {"": SAMPLES, "u": SAMPLES, "p": TOKENS, "up": SAMPLES},
    "expert_layers": {"": SCORES, "a": TOKENS, "u": CONSTANT, "r": CONSTANT},
    "expert_sequence_layers": {
        "": SCORES,
        "u": SCORES,
        "a": TOKENS,
        "ua": TOKENS,
        "p": SAMPLES,
        "r": CONSTANT,
        "e": CONSTANT,
    },
}
"""The same for layers with adapters, of any rank."""


def fit_layers(records: Mapping[Shape, Record], check: Record, checked: Shape, terms: Terms) -> list[Layer]:
    """Return all layers, with their quantities fitted as polynomials of the shape in `terms`.

    `check` is the record of a step of shape `checked`, which the polynomials must reproduce.
    """
    first = next(iter(records.values()))
    everything = {**records, checked: check}
    if any(len(r.alive) != len(first.alive) or r.modules != first.modules for r in everything.values()):
        raise NoPolynomialError("the operations depend on batch size or sequence length")

    def fit(read: Any, what: str) -> Polynomial:
        return fit_polynomial({shape: read(record) for shape, record in everything.items()}, checked, what, terms)

    layers = []
    for index, name in enumerate([*first.modules, LOSS]):
        costs: dict[str, Any] = {}
        for key, phase in (("forward", "f"), ("backward", "b")):
            place = (index, phase)
            costs[f"{key}_flop"] = fit(lambda r, p=place: r.flop[p], f"{name}: FLOP")
            if any(r.uncast_flop[place] for r in everything.values()):
                costs[f"{key}_uncast_flop"] = fit(lambda r, p=place: r.uncast_flop[p], f"{name}: uncast FLOP")
            costs[f"{key}_bytes"] = fit(lambda r, p=place: r.bytes_moved[p], f"{name}: bytes")
            costs[f"{key}_streamed_bytes"] = fit(lambda r, p=place: r.streamed[p], f"{name}: streamed bytes")
        if name in first.blocks:
            costs |= _recomputation_costs(first, index, name, fit)
        layers.append(
            Layer(
                name=name,
                modules=(name,) if index < len(first.modules) else (),
                block=name in first.blocks,
                parameters=parameters_of(everything, index, name),
                frozen_parameters=_frozen_parameters(everything, index, name),
                saved_bytes=fit(lambda r, i=index: r.saved[i], f"{name}: saved bytes"),
                output_bytes=fit(lambda r, i=index: r.output[i], f"{name}: output"),
                forward_operations=first.operations[index, "f"],
                backward_operations=first.operations[index, "b"],
                buffers=fit_buffers(everything, checked, index, name, terms),
                units=first.units.get(index),
                experts_per_token=first.experts_per_token.get(index),
                experts=first.experts.get(index),
                reductions=fit_reductions(everything, checked, index, terms),
                linear=first.linear.get(index),
                **costs,
            )
        )
    return layers


def _recomputation_costs(
    first: Record, index: int, name: str, fit: Callable[[Callable[[Record], int], str], Polynomial]
) -> dict[str, Any]:
    """Return the costs of recomputing a block, fully or selectively, and the positions whose outputs are kept."""

    def cost(prefix: str, recompute: Recompute) -> dict[str, Any]:
        def work(record: Record) -> Work:
            return record.until_saved.get(index, {}).get(recompute, Work())

        return {
            f"{prefix}flop": fit(lambda r: work(r).flop, f"{name}: recomputed FLOP"),
            f"{prefix}bytes": fit(lambda r: work(r).bytes_moved, f"{name}: recomputed bytes"),
            f"{prefix}streamed_bytes": fit(lambda r: work(r).streamed, f"{name}: recomputed streamed bytes"),
            f"{prefix}operations": work(first).operations,
        }

    costs = cost("recompute_", "full")
    counted = [-1, *first.counted[index, "f"]]
    costs["recompute_positions"] = counted[costs["recompute_operations"]] + 1
    costs["recompute_after"] = first.recompute_after(index) or None
    costs["recompute_releases"] = releases_of(first, index)
    if index not in first.overwritten:
        costs |= cost("selective_", "selective")
        costs["selective_positions"] = tuple(first.kept[index, "selective"])
        part, positions = cost("", "every-second-product"), tuple(first.kept[index, "every-second-product"])
        costs["every_second_product"] = PartialRecomputation(positions=positions, **part)
    return costs


def releases_of(record: Record, index: int) -> tuple[int, ...]:
    """Return the positions, in a forward that saves nothing, where a layer's saved buffers are freed, in order."""
    counted = [-1, *record.counted[index, "f"]]
    return tuple(
        counted[-1] if alive.unsaved is None else alive.unsaved
        for alive in record.alive
        for _ in alive.parts or (alive.size_bytes,)
        if alive.born[:2] == (index, "f") and alive.freed is not None and alive.freed[1] == "b"
        if alive.freed[0] <= index and not alive.replaced_next
    )


def parameters_of(everything: Mapping[Shape, Record], index: int, module: str) -> tuple[Parameter, ...]:
    """Return the trained parameters that are first used in this layer."""
    first = next(iter(everything.values()))
    parameters = []
    for name, (layer, _, born, ready) in first.parameters.items():
        if layer == index:
            shapes = {key: record.parameters[name][1] for key, record in everything.items()}
            sizes, cut, of_rank, of_experts = _sizes_of_one(shapes)
            moments = _moment(born, index), _moment(ready, index)
            summed = name in first.summed
            short = _name_in_layer(name, module)
            parameters.append(Parameter(short, sizes, *moments, cut, summed, of_experts=of_experts, of_rank=of_rank))
    return tuple(parameters)


def _frozen_parameters(everything: Mapping[Shape, Record], index: int, module: str) -> tuple[Parameter, ...]:
    """Return the frozen parameters that are first used in this layer."""
    first, end = next(iter(everything.values())), Moment("end")
    parameters = []
    for name, (layer, _) in first.frozen.items():
        if layer == index:
            shapes = {key: record.frozen[name][1] for key, record in everything.items()}
            sizes, cut, _, of_experts = _sizes_of_one(shapes)
            parameters.append(Parameter(_name_in_layer(name, module), sizes, end, end, cut, of_experts=of_experts))
    return tuple(parameters)


def _sizes_of_one(shapes: Mapping[Shape, tuple[int, ...]]) -> tuple[tuple[int, ...], int | None, int | None, bool]:
    """Return a parameter's shape for one unit or expert and for adapters of rank 1, and the dimensions that grow.

    `shapes`: the parameter's shape by shape of the step. Returns the shape; the dimension that grows with units or
    experts, if any; the dimension that grows with the adapters' rank in slices, if any; and whether the former counts
    experts. By the way blocks are cut, no parameter grows with both units and experts.
    """
    of_first, first = next(iter(shapes.items()))
    dimensions: list[int | None] = []
    for size_of in (attrgetter("e", "a"), attrgetter("u", "a"), attrgetter("u", "e")):  # equal while u, e or a varies
        alike = [shape for key, shape in shapes.items() if size_of(key) == size_of(of_first)]
        differing = {n for shape in alike for n, size in enumerate(shape) if size != first[n]}
        dimensions.append(differing.pop() if differing else None)
    by_units, by_experts, of_rank = dimensions
    cut = by_units if by_experts is None else by_experts
    counts = {of_rank: of_first.a, cut: of_first.u if by_experts is None else of_first.e}
    sizes = tuple(size // counts.get(dimension, 1) for dimension, size in enumerate(first))
    return sizes, cut, of_rank, by_experts is not None


def _name_in_layer(name: str, module: str) -> str:
    """Return a parameter's name with `{}` in place of its layer's module."""
    return "{}" + name[len(module) :] if name.startswith(module + ".") else name


def fit_reductions(
    everything: Mapping[Shape, Record], checked: Shape, index: int, terms: Terms
) -> tuple[Reduction, ...]:
    """Return a layer's collectives among the ranks that divide it, with their bytes as polynomials of the shape."""
    moments = {
        tuple((each.at, each.kind, each.fixed) for each in record.reductions.get(index, ()))
        for record in everything.values()
    }
    if len(moments) > 1:
        raise NoPolynomialError("the sums over ranks depend on batch size, sequence length or units")
    reductions = []
    for number, (at, kind, fixed) in enumerate(moments.pop()):
        sizes = {shape: record.reductions[index][number].size_bytes for shape, record in everything.items()}
        size = fit_polynomial(sizes, checked, "bytes of a sum over ranks", terms)
        reductions.append(Reduction(_moment(at, index), size, kind, fixed))
    return tuple(reductions)


def _moment(at: tuple[int, str, int] | None, layer: int) -> Moment:
    return Moment("end") if at is None else Moment(at[1], at[2], at[0] - layer)


def fit_buffers(
    everything: Mapping[Shape, Record], checked: Shape, index: int, name: str, terms: Terms
) -> tuple[Buffer, ...]:
    """Return the buffers that a layer creates, with their sizes as polynomials of the shape."""
    first = next(iter(everything.values()))
    last = len(first.modules)
    casts_again = sum(alive.casts_input for alive in first.alive if alive.born[0] == index) > 1
    buffers = []
    for number, alive in enumerate(first.alive):
        if alive.born[0] != index or (alive.freed == alive.born and alive.size_bytes == 0):
            continue
        sizes = {shape: record.alive[number].size_bytes for shape, record in everything.items()}
        lives = {(record.alive[number].born, record.alive[number].freed) for record in everything.values()}
        if len(lives) > 1:
            raise NoPolynomialError(f"{name}: the lifetime of a buffer depends on batch size or sequence length")
        freed = None if alive.replaced_next else alive.freed
        # a cast of parameters lives to the end of the forward; see [Note: autocast] in `gssim.workload.model`
        ends_with_forward = index < last and alive.freed is not None and alive.freed[:2] == (last, "f")
        is_cached = alive.casts_parameter and ends_with_forward
        is_saved = alive.born[1] == "f" and (alive.freed is None or alive.freed[1] == "b")
        of_own_backward = is_saved and alive.freed is not None and alive.freed[0] <= index
        buffer = Buffer(
            born=_moment(alive.born, index),
            freed=Moment("f", first.position_at_end(index)) if is_cached else _moment(freed, index),
            category=_category(alive, is_saved=is_saved),
            size_bytes=fit_polynomial(sizes, checked, f"{name}: a buffer", terms),
            fixed=alive.fixed,
            casts_input=alive.casts_input and casts_again,
            handed_on=_moment(alive.handed_on, index) if alive.handed_on and of_own_backward else None,
            summed_in_place=all(record.alive[number].summed_in_place for record in everything.values()),
        )
        for part in range(len(alive.parts)):
            sizes = {shape: record.alive[number].parts[part] for shape, record in everything.items()}
            polynomial = fit_polynomial(sizes, checked, f"{name}: a part of a buffer", terms)
            buffers.append(replace(buffer, size_bytes=polynomial, pages=True))
        if not alive.parts:
            buffers.append(buffer)
    return tuple(buffers)


def _category(alive: StorageLife, *, is_saved: bool) -> str:
    if alive.casts_operand:
        return OPERAND_CASTS
    return REPLACED if alive.replaced_next else "activations" if is_saved else "temporaries"


def fit_polynomial(values: Mapping[Shape, int], checked: Shape, what: str, terms: Terms) -> Polynomial:
    """Return the polynomial in `terms` through all values except that at `checked`, which it must then reproduce."""
    shapes = [shape for shape in values if shape != checked]
    lengths = len({shape.s for shape in shapes})
    powers = {
        letters: [(i, j) for j in range(min(of_s + 1, lengths)) for i in range(of_b + 1)]
        for letters, (of_b, of_s) in terms.items()
    }
    columns = [(i, j, *(int(letter in letters) for letter in "uprea")) for letters in terms for i, j in powers[letters]]
    inverse, denominator = _inverse(tuple(tuple(size or 1 for size in shape) for shape in shapes), tuple(columns))
    numerators = [sum(map(mul, row, (values[shape] for shape in shapes))) for row in inverse]
    if any(numerator % denominator for numerator in numerators):
        raise NoPolynomialError(f"{what} is no whole polynomial in batch size and sequence length")
    solution = iter(numerator // denominator for numerator in numerators)
    coefficients = {letters: tuple((c, i, j) for i, j in powers[letters] if (c := next(solution))) for letters in terms}
    if not any(coefficients.values()):
        coefficients[""] = ((0, 0, 0),)  # what "0" is parsed to
    fitted = Polynomial(*(coefficients.get(letters, ()) for letters in FIELDS_OF_TERMS))
    of_rows = sum(coefficient * checked.r for coefficient, _, _ in fitted.row_terms)
    held = fitted.with_rank(checked.a).held(checked.u, checked.p, experts=checked.e)
    if held.at(b=checked.b, s=checked.s or 1) + of_rows != values[checked]:
        raise NoPolynomialError(f"{what} is no polynomial in batch size and sequence length")
    return fitted


@cache
def _inverse(sizes: tuple[tuple[int, ...], ...], powers: tuple[Powers, ...]) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Return the inverse of the matrix of the terms at each size, as numerators and their common denominator.

    A term is the product of a size's entries, each raised to its power. All quantities of a model share the matrix, so
    it is inverted once, by Gauss-Jordan elimination on fractions, which is exact.
    """
    count = len(sizes)
    table = [
        [Fraction(prod(map(pow, size, by))) for by in powers] + [Fraction(row == column) for column in range(count)]
        for row, size in enumerate(sizes)
    ]
    for column in range(count):
        pivot = next(r for r in range(column, count) if table[r][column])
        table[column], table[pivot] = table[pivot], table[column]
        table[column] = [v / table[column][column] for v in table[column]]
        for r in range(count):
            if r != column and table[r][column]:
                factor = table[r][column]
                table[r] = [v - factor * p for v, p in zip(table[r], table[column], strict=True)]
    rows = [row[count:] for row in table]
    denominator = lcm(*(v.denominator for row in rows for v in row))
    return tuple(tuple(int(v * denominator) for v in row) for row in rows), denominator


def merge_layers(layers: list[Layer]) -> tuple[Layer, ...]:
    """Merge adjacent layers that differ only in their module.

    Their partial costs, for steps in which other layers are frozen, are not compared: they differ at most in where
    buffers end in adjacent layers, which is recomputed from those layers. A group takes its second layer's, because the
    model's first layer does not have all of them.
    """
    groups: list[Layer] = []
    for _, members in groupby(layers, key=merge_key):
        run = list(members)
        modules = tuple(m for layer in run for m in layer.modules)
        name = run[0].name.rpartition(".")[0] if len(run) > 1 else run[0].name
        if not name or any(group.name == name for group in groups):  # taken by another group of the stack's blocks
            name = run[0].name
        groups.append(replace(run[min(1, len(run) - 1)], name=name, modules=modules))
    return tuple(groups)


def merge_key(layer: Layer) -> str:
    """Return a text that is equal for layers that one entry of a model file may represent."""
    return repr(replace(layer, name="", modules=(), split=None, **NO_ROLES))
