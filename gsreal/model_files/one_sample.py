"""Traces steps of one sample, and notes which buffers of layers exist only for one sample, or only for several.

See [Note: one sample] in `gssim.workload.layer`. Steps of one sample run fewer operations, as torch skips copies of
what is contiguous already. So their moments are translated into those of steps of several samples, by the names of the
operations that both run.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from gsreal.model_files.divided_steps import Steps, record_steps
from gsreal.model_files.fit import Shape, Terms, fit_buffers, releases_of
from gsreal.model_files.recorder import NoPolynomialError, Record
from gssim.errors import UserError
from gssim.workload import FIELDS_OF_TERMS, Buffer, Layer, Model, Moment
from gssim.workload.layer import ONE_SAMPLE, SEVERAL_SAMPLES


def with_one_sample(
    model: Model, layers: Sequence[Layer], steps: Steps, terms: Terms, of_several: Record, *, where: str
) -> list[Layer]:
    """Return layers (one for each module) with their buffers marked that exist only for one sample, or for several.

    `steps`, `terms`: the steps to which the layers were fitted, and the terms of their quantities; `of_several`: one of
    their records. The layers are unchanged if the buffers of one sample are no polynomials in the other sizes, or if
    the module does not train on one sample (BatchNorm needs several values of each channel).
    """
    alone = steps.of_one_sample()
    without_samples = {letters: (0, of_s) for letters, (_, of_s) in terms.items()}
    try:
        records, largest = record_steps(model, alone, where=where)
        # no term has a power of b, so that b may tell the checked step from one of the same length
        checked = alone.checked.shape._replace(b=0)
        everything = {**records, checked: largest}
        first = next(iter(records.values()))
        if first.modules != of_several.modules or any(len(r.alive) != len(first.alive) for r in everything.values()):
            return list(layers)
        return [
            _with_one_sample_buffers(layer, index, everything, checked, without_samples, of_several)
            for index, layer in enumerate(layers)
        ]
    except (NoPolynomialError, UserError):  # not a fault of the model: its steps of several samples were traced
        return list(layers)


def _with_one_sample_buffers(
    layer: Layer, index: int, everything: Mapping[Shape, Record], checked: Shape, terms: Terms, of_several: Record
) -> Layer:
    """Return the layer at `index` with its buffers, and those of one sample that it lacks, marked."""
    first = next(iter(everything.values()))
    moved = _translation(first, of_several)
    buffers = [
        replace(
            each,
            born=moved(each.born, index),
            freed=moved(each.freed, index),
            handed_on=None if each.handed_on is None else moved(each.handed_on, index),
        )
        for each in fit_buffers(everything, checked, index, layer.name, terms)
    ]
    releases = iter(releases_of(first, index))
    released = {id(each): moved(Moment("f", next(releases)), index).position for each in buffers if each.is_saved}
    released |= zip(map(id, _saved(layer.buffers)), layer.recompute_releases or (), strict=False)

    of_one: dict[tuple[object, ...], list[Buffer]] = defaultdict(list)
    for each in buffers:
        of_one[_buffer_key(each)].append(each)
    merged: list[Buffer] = []
    for buffer in layer.buffers:
        alike = of_one[_buffer_key(buffer)]
        if alike:
            alike.pop()
            merged.append(buffer)
        else:
            merged.append(replace(buffer, samples=SEVERAL_SAMPLES))
            released[id(merged[-1])] = released.get(id(buffer), 0)
    for each in (each for alike in of_one.values() for each in alike):
        merged.append(replace(each, samples=ONE_SAMPLE))
        released[id(merged[-1])] = released.get(id(each), 0)
    if len(merged) == len(layer.buffers) and not any(each.samples for each in merged):
        return layer
    merged.sort(key=lambda each: (each.born.phase != "f", each.born.position))
    if layer.recompute_releases is None:
        return replace(layer, buffers=tuple(merged))
    positions = tuple(released[id(each)] for each in _saved(merged))
    return replace(layer, buffers=tuple(merged), recompute_releases=positions)


def _saved(buffers: Sequence[Buffer]) -> list[Buffer]:
    return [each for each in buffers if each.is_saved]


def _buffer_key(buffer: Buffer) -> tuple[object, ...]:
    """Return what equal buffers of one sample have in common: moments, kind, marks, and bytes of one sample.

    Bytes as the coefficients of the polynomial at one sample, by the powers of its other variables.
    """
    marks = buffer.fixed, buffer.casts_input, buffer.summed_in_place, buffer.pages, buffer.handed_on
    sums: dict[tuple[str, int], int] = defaultdict(int)
    for letters, name in FIELDS_OF_TERMS.items():
        for coefficient, _, power in getattr(buffer.size_bytes, name):
            sums[letters, power] += coefficient
    size = tuple(sorted((key, value) for key, value in sums.items() if value))
    return buffer.born, buffer.freed, buffer.category, marks, size


def _translation(own: Record, other: Record) -> Callable[[Moment, int], Moment]:
    """Return a function that translates a moment of the layer at an index, in `own`, into that of `other`."""
    pairs: dict[tuple[int, str], list[tuple[int, int]]] = {}

    def moved(moment: Moment, index: int) -> Moment:
        place = (index + moment.layer_offset, moment.phase)
        if not own.names.get(place) or not other.names.get(place):
            return moment
        if place not in pairs:  # positions of the operations that both records have, in order
            mine, theirs = own.counted[place], other.counted[place]
            blocks = SequenceMatcher(None, own.names[place], other.names[place], autojunk=False).get_matching_blocks()
            pairs[place] = [(mine[each.a + i], theirs[each.b + i]) for each in blocks for i in range(each.size)]
        return replace(moment, position=_moved_position(moment.position, pairs[place]))

    return moved


def _moved_position(position: int, pairs: Sequence[tuple[int, int]]) -> int:
    """Return the position in the second record of what has `position` in the first: after the same operation.

    >>> [_moved_position(position, [(1, 2), (4, 7)]) for position in (0, 1, 3, 4, 5)]
    [0, 2, 4, 7, 8]
    """
    number = bisect_right([own for own, _ in pairs], position)
    own, other = pairs[number - 1] if number else (0, 0)
    there = other + position - own
    return min(there, pairs[number][1] - 1) if number < len(pairs) else there
