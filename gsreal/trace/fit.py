"""From what steps at several shapes showed to functions of batch size and sequence length."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import groupby
from typing import Any

from gsreal.layers import LOSS
from gsreal.trace.recorder import Record, Work
from gssim.workload import Buffer, Layer, Moment, Parameter, Polynomial


class NoPolynomialError(Exception):
    """A quantity that is no polynomial in batch size and sequence length."""


Shape = tuple[int, int | None]


def fitted_layers(records: dict[Shape, Record], check: Record, checked: Shape) -> list[Layer]:
    """Return all layers, their quantities as functions of the shape; `check` is the record that must agree."""
    first = next(iter(records.values()))
    everything = {**records, checked: check}
    if any(len(r.alive) != len(first.alive) or r.modules != first.modules for r in everything.values()):
        raise NoPolynomialError("the operations depend on batch size or sequence length")

    def fit(read: Any, what: str) -> Polynomial:
        return fitted_polynomial({shape: read(record) for shape, record in everything.items()}, checked, what)

    layers = []
    for index, name in enumerate([*first.modules, LOSS]):
        costs: dict[str, Any] = {}
        for key, phase in (("forward", "f"), ("backward", "b")):
            place = (index, phase)
            costs[f"{key}_flop"] = fit(lambda r, p=place: r.flop[p], f"{name}: FLOP")
            costs[f"{key}_bytes"] = fit(lambda r, p=place: r.bytes_moved[p], f"{name}: bytes")
        if name in first.blocks:
            costs |= _recomputed(index, name, fit)
            costs["recompute_operations"] = first.until_saved.get(index, Work()).operations
        layers.append(
            Layer(
                name=name,
                modules=(name,) if index < len(first.modules) else (),
                block=name in first.blocks,
                parameters=parameters_of(first, index, name),
                saved_bytes=fit(lambda r, i=index: r.saved[i], f"{name}: saved bytes"),
                output_bytes=fit(lambda r, i=index: r.output[i], f"{name}: output"),
                forward_operations=first.operations[index, "f"],
                backward_operations=first.operations[index, "b"],
                buffers=fitted_buffers(everything, checked, index, name),
                **costs,
            )
        )
    return layers


def _recomputed(index: int, name: str, fit: Callable[[Callable[[Record], int], str], Polynomial]) -> dict[str, Any]:
    """Return what of a block's forward checkpointing runs again."""
    return {
        "recompute_flop": fit(lambda r: r.until_saved.get(index, Work()).flop, f"{name}: recomputed FLOP"),
        "recompute_bytes": fit(lambda r: r.until_saved.get(index, Work()).bytes_moved, f"{name}: recomputed bytes"),
    }


def parameters_of(record: Record, index: int, module: str) -> tuple[Parameter, ...]:
    """Return the parameters that a layer is the first to use."""
    found = []
    for name, (layer, shape, born, ready) in record.parameters.items():
        if layer == index:
            short = "{}" + name[len(module) :] if name.startswith(module + ".") else name
            found.append(Parameter(short, shape, _moment(born, index), _moment(ready, index)))
    return tuple(found)


def _moment(at: tuple[int, str, int] | None, layer: int) -> Moment:
    return Moment("end") if at is None else Moment(at[1], at[2], at[0] - layer)


def fitted_buffers(everything: dict[Shape, Record], checked: Shape, index: int, name: str) -> tuple[Buffer, ...]:
    """Return the buffers that a layer makes, their sizes as functions of the shape."""
    first = next(iter(everything.values()))
    found = []
    for number, alive in enumerate(first.alive):
        if alive.born[0] != index or (alive.freed == alive.born and alive.size_bytes == 0):
            continue
        sizes = {shape: record.alive[number].size_bytes for shape, record in everything.items()}
        lives = {(record.alive[number].born, record.alive[number].freed) for record in everything.values()}
        if len(lives) > 1:
            raise NoPolynomialError(f"{name}: the lifetime of a buffer depends on batch size or sequence length")
        kept = alive.born[1] == "f" and (alive.freed is None or alive.freed[1] == "b")
        found.append(
            Buffer(
                born=_moment(alive.born, index),
                freed=_moment(alive.freed, index),
                category="activations" if kept else "temporaries",
                size_bytes=fitted_polynomial(sizes, checked, f"{name}: a buffer"),
            )
        )
    return tuple(found)


def fitted_polynomial(values: dict[Shape, int], checked: Shape, what: str) -> Polynomial:
    """Return the polynomial through all values but the checked one, which it must meet too."""
    shapes = [shape for shape in values if shape != checked]
    lengths = {s for _, s in shapes}
    powers = [(i, j) for j in range(len(lengths)) for i in (0, 1)]
    rows = [[Fraction(b**i * (s or 1) ** j) for i, j in powers] for b, s in shapes]
    solution = _solve(rows, [Fraction(values[shape]) for shape in shapes])
    if any(c.denominator != 1 for c in solution):
        raise NoPolynomialError(f"{what} is no whole polynomial in batch size and sequence length")
    terms = tuple((int(c), i, j) for c, (i, j) in zip(solution, powers, strict=True) if c)
    fitted = Polynomial(terms or ((0, 0, 0),))  # what "0" is parsed to
    if fitted.at(b=checked[0], s=checked[1] or 1) != values[checked]:
        raise NoPolynomialError(f"{what} is no polynomial in batch size and sequence length")
    return fitted


def _solve(rows: list[list[Fraction]], values: list[Fraction]) -> list[Fraction]:
    """Return the exact solution of a small square linear system (Gauss-Jordan on fractions)."""
    table = [[*row, value] for row, value in zip(rows, values, strict=True)]
    size = len(table)
    for column in range(size):
        pivot = next(r for r in range(column, size) if table[r][column])
        table[column], table[pivot] = table[pivot], table[column]
        table[column] = [v / table[column][column] for v in table[column]]
        for r in range(size):
            if r != column and table[r][column]:
                factor = table[r][column]
                table[r] = [v - factor * p for v, p in zip(table[r], table[column], strict=True)]
    return [row[-1] for row in table]


def grouped(layers: list[Layer]) -> tuple[Layer, ...]:
    """Return layers with neighbours that differ only in their module put together.

    Of what is left of them where others are frozen, only when buffers end in their neighbours differs, which is found
    again from these. The second has all of it, the model's first layer has not.
    """
    nothing: dict[str, Any] = {"name": "", "modules": (), "untrained_buffers": None, "frozen": None, "deepest": None}
    groups = []
    for _, members in groupby(layers, key=lambda layer: repr(replace(layer, **nothing))):
        run = list(members)
        modules = tuple(m for layer in run for m in layer.modules)
        name = run[0].name.rpartition(".")[0] if len(run) > 1 else run[0].name
        groups.append(replace(run[min(1, len(run) - 1)], name=name or run[0].name, modules=modules))
    return tuple(groups)
