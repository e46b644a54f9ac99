"""Training steps to trace for each way in which ranks divide a model: by its blocks, sequences or experts.

The quantities of a layer are then fitted as functions of what one rank holds, see `fit.TERMS`. With low-rank adapters
they depend on the adapters' rank too, so some steps are traced again at a second adapter rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from gsreal.model_files.fake_module import can_divide_sequences, experts_to_divide, fewest_units
from gsreal.model_files.fit import Shape
from gsreal.model_files.recorder import Record
from gsreal.model_files.step import Step, record_step
from gssim.workload import Model, TokenInput

TRACED_BATCH_SIZES = (2, 3)
CHECKED_BATCH_SIZE = 5
TRACED_UNITS = (2, 3)
"""Units of slices in traces. A single unit may behave differently: torch treats a dimension of one element as
contiguous in any layout.
"""
TRACED_RANKS = (2, 4)
"""Numbers of ranks that divide sequences in traces; lengths are rounded to multiples of the larger one."""
TRACED_ROWS = (96, 160, 224)
"""Rows that the experts of a rank process in traces; the last number is that of the checked step."""
TRACED_ADAPTER_RANKS = (2, 3)
CHECKED_ADAPTER_RANK = 8


@dataclass(frozen=True)
class Steps:
    """Steps to which layers are fitted, and the step that checks the fit."""

    traced: Sequence[Step]
    checked: Step
    """A larger step, which must agree with the fit to the others."""
    of_second_rank: Sequence[Step] = ()
    """Steps of `traced` to trace again with adapters of another rank."""
    likes: Mapping[int | None, Record] = field(default_factory=dict)
    """Existing records of similar steps, by the number of ranks that divide sequences everywhere."""

    def with_adapters(self) -> "Steps":
        """Return the steps of a model with adapters."""
        first, second = TRACED_ADAPTER_RANKS
        traced = [replace(step, rank=first) for step in self.traced]
        traced += [replace(step, rank=second) for step in self.of_second_rank]
        return replace(self, traced=traced, checked=replace(self.checked, rank=CHECKED_ADAPTER_RANK))

    def of_one_sample(self) -> "Steps":
        """Return the steps with one sample each, all of them once."""
        traced = tuple(dict.fromkeys(replace(step, batch_size=1) for step in self.traced))
        return Steps(traced, replace(self.checked, batch_size=1))

    def without_single_units(self) -> "Steps | None":
        """Return the steps with slices of one more unit each, so that none has a single one; None if none has.

        A block of two units is traced with one and two of them, which is exact where it is cut in two. If a single unit
        behaves differently (see `TRACED_UNITS`), which it does where queries share keys, no function of units fits: it
        is then traced with two and three.
        """
        if all(step.units != 1 for step in self.traced):
            return None
        traced, again = (
            [replace(each, units=(each.units or 0) + 1) for each in of] for of in (self.traced, self.of_second_rank)
        )
        return replace(self, traced=traced, of_second_rank=again)


def record_steps(model: Model, steps: Steps, *, where: str) -> tuple[dict[Shape, Record], Record]:
    """Return the records of the traced steps by shape, and the record of the checked step."""
    likes = dict(steps.likes)

    def record(step: Step, apart: Record | None = None) -> Record:
        adapters = model.module.adapters
        if step.rank:
            adapters = adapters and replace(adapters, rank=step.rank)
        made = record_step(
            replace(model, module=replace(model.module, adapters=adapters)),
            step,
            where=where,
            like=likes.get(step.context),
            apart=apart,
        )
        likes.setdefault(step.context, made)
        return made

    largest = None
    if model.compiled:  # the largest step decides the order of kernels and the sharing of buffers for all others
        first = record(steps.traced[0])
        likes.clear()
        largest = record(steps.checked, apart=first)
    records = {step.shape: record(step) for step in steps.traced}
    return records, largest or record(steps.checked)


@dataclass(frozen=True)
class Lengths:
    """Sequence lengths of the traced steps, and that of the checked step; None if the input has no sequences."""

    traced: Sequence[int | None]
    longest: int | None

    def in_parts(self) -> "Lengths":
        """Return multiples that ranks can divide near these lengths; `longest`: None if the only length is none."""
        more = max(TRACED_RANKS)
        rounded = [-(-length // more) * more for length in self.traced if length is not None]
        longest = (self.longest or 0) // more * more
        return Lengths(rounded, None if self.longest in self.traced and self.longest != longest else longest or None)


def whole_steps(lengths: Lengths) -> Steps:
    """Return the steps that trace undivided layers."""
    shapes = product(TRACED_BATCH_SIZES, lengths.traced)
    traced = [Step(batch_size=b, sequence_length=s) for b, s in shapes]
    return Steps(traced, Step(batch_size=CHECKED_BATCH_SIZE, sequence_length=lengths.longest), traced)


def sliced_steps(model: Model, lengths: Lengths, where: str) -> Steps | None:
    """Return the steps that trace sliced blocks, as functions of a slice's units; None if they cannot be traced so.

    The functions below return steps in the same way; each names the sizes that its layers are functions of.
    """
    units = fewest_units(model, where)
    return _sliced_steps(lengths, units) if units > 1 else None


def _sliced_steps(lengths: Lengths, units: int, *, parts: tuple[int, int] | None = None) -> Steps:
    """Return the steps to trace for blocks that tensor ranks slice.

    `parts`: two numbers of ranks that divide sequences, if any do. All sequence lengths are traced with the first. One
    length suffices for the second, as costs of a part of a sequence depend only on its number of positions.
    """
    fewer, more = parts or (None, None)
    several = TRACED_UNITS if units >= max(TRACED_UNITS) else (1, 2)
    places = product(several, TRACED_BATCH_SIZES, lengths.traced)
    traced = [Step(batch_size=b, sequence_length=s, units=u, parts=fewer) for u, b, s in places]
    again = [step for step in traced if step.sequence_length in lengths.traced[:2]]
    if parts:
        last = (several[0], lengths.traced[-1])
        traced += [replace(step, parts=more) for step in traced if (step.units, step.sequence_length) == last]
    checked = Step(batch_size=CHECKED_BATCH_SIZE, sequence_length=lengths.longest, units=units, parts=more)
    return Steps(traced, checked, again)


def sequence_steps(model: Model, lengths: Lengths, where: str) -> Steps | None:
    """Return the steps of sliced blocks with divided sequences, as functions of units and of positions in a part."""
    units, lengths = fewest_units(model, where), lengths.in_parts()
    if units < 2 or lengths.longest is None or not can_divide_sequences(model, where):
        return None
    return _sliced_steps(lengths, units, parts=TRACED_RANKS)


def context_steps(model: Model, lengths: Lengths, where: str) -> Steps | None:
    """Return the steps of layers under context parallelism, as functions of the positions that a rank holds.

    They are traced for one rank, which exchanges with itself, and for the smallest group that divides the heads.
    """
    longest = lengths.longest
    if not isinstance(model.input, TokenInput) or model.input.classes is not None or longest is None:
        return None
    whole = record_step(model, Step(batch_size=TRACED_BATCH_SIZES[0], sequence_length=longest, context=1), where=where)
    heads = max(whole.units.values())
    only = longest if len(lengths.traced) == 1 else 0
    ranks = next((n for n in range(2, heads + 1) if heads % n == 0 and only % n == 0), None)
    if ranks is None:
        return None
    shorter, *_, last = sorted({-(-length // ranks) * ranks for length in lengths.traced if length is not None}) * 2
    again = [Step(batch_size=b, sequence_length=last, context=n) for b, n in product(TRACED_BATCH_SIZES, (1, ranks))]
    traced = [*again]
    if shorter != last:
        traced += [Step(batch_size=b, sequence_length=shorter, context=1) for b in TRACED_BATCH_SIZES]
    checked = Step(batch_size=CHECKED_BATCH_SIZE, sequence_length=longest - longest % ranks, context=ranks)
    return Steps(traced, checked, again, {1: whole})


def expert_steps(model: Model, lengths: Lengths, where: str) -> Steps | None:
    """Return the steps of layers with divided experts, as functions of the experts that a rank holds and their rows.

    A rank holds at least two experts: a single one may behave differently, see `TRACED_UNITS`.
    """
    experts = experts_to_divide(model, where)
    if experts < 4:
        return None
    first, more, last = TRACED_ROWS
    whole = whole_steps(lengths)
    traced = [replace(step, experts=2, rows=first) for step in whole.traced]
    again = [step for step in traced if step.sequence_length in lengths.traced[:2]]
    traced += [replace(traced[-1], experts=_more_than_two(experts)), replace(traced[-1], rows=more)]
    return Steps(traced, replace(whole.checked, experts=2, rows=last), again)


def _more_than_two(experts: int) -> int:
    return experts // 2 if experts > 4 else experts


def expert_sequence_steps(model: Model, lengths: Lengths, where: str) -> Steps | None:
    """Return the steps of sliced blocks with divided sequences and divided experts.

    Quantities are functions of units, of positions in a part, and of the experts that a rank holds and their rows. The
    steps are those of `sequence_steps`, one with more rows and one with more experts; see [Note: experts of parts] in
    `gssim.workload.model`.
    """
    experts, units = experts_to_divide(model, where), fewest_units(model, where, beside_experts=True)
    lengths = lengths.in_parts()
    possible = experts >= 4 and units >= 2 and lengths.longest is not None
    if not possible or not can_divide_sequences(model, where, beside_experts=True):
        return None
    first, more, last = TRACED_ROWS
    parts = _sliced_steps(lengths, units, parts=TRACED_RANKS)
    traced = [replace(step, experts=2, rows=first) for step in parts.traced]
    again = [replace(step, experts=2, rows=first) for step in parts.of_second_rank]
    traced += [replace(traced[-1], rows=more), replace(traced[-1], experts=_more_than_two(experts))]
    return Steps(traced, replace(parts.checked, experts=2, rows=last), again)


DIVIDED_STEPS: dict[str, Callable[[Model, Lengths, str], Steps | None]] = {
    "sliced_layers": sliced_steps,
    "sequence_layers": sequence_steps,
    "context_layers": context_steps,
    "expert_layers": expert_steps,
    "expert_sequence_layers": expert_sequence_steps,
}
"""Functions that choose the steps, by the field of a model that holds the fitted layers."""
