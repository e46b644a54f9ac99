"""Training steps that are traced for each way in which ranks divide a model: its blocks, sequences or experts.

Quantities of its layers are fitted as functions of what a rank then holds, see `fit.TERMS`. Layers with adapters are
functions of their rank too: some of the steps are traced at a second rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from gsreal.model_files.fit import Shape
from gsreal.model_files.recorder import Record
from gsreal.model_files.step import can_divide_sequences, experts_to_divide, fewest_units, record_step
from gssim.workload import Model, TokenInput

TRACED_BATCH_SIZES = (2, 3)
CHECKED_BATCH_SIZE = 5
TRACED_UNITS = (2, 3)
"""Not one alone, which may behave differently: torch treats a dimension of one element as contiguous in any layout."""
TRACED_RANKS = (2, 4)
"""Numbers of ranks that divide sequences in traces; lengths are rounded to multiples of the larger one."""
TRACED_ROWS = (96, 160, 224)
"""Rows that the experts of a rank process in traces; the last in the step that is checked."""
TRACED_ADAPTER_RANKS = (2, 3)
CHECKED_ADAPTER_RANK = 8


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a rank: what it holds of the model, and what it trains on."""

    batch_size: int
    sequence_length: int | None
    units: int | None = None
    """Of the slice of each block; None: blocks are whole."""
    parts: int | None = None
    """Ranks that divide sequences between the sliced parts of blocks."""
    context: int | None = None
    """Ranks that divide sequences everywhere."""
    experts: int = 0
    """That the rank holds, where these are divided."""
    rows: int = 0
    """That they process."""
    rank: int = 0
    """Of the adapters; 0: there are none."""

    @property
    def shape(self) -> Shape:
        """The sizes of which the step's quantities are functions.

        >>> Step(batch_size=2, sequence_length=64, units=3, parts=4).shape
        Shape(b=2, s=64, u=3, p=16, r=0, e=0, a=0)
        >>> Step(batch_size=2, sequence_length=64, experts=4, rows=96, rank=8).shape
        Shape(b=2, s=64, u=4, p=0, r=96, e=0, a=8)
        """
        divided = self.parts or self.context
        positions = (self.sequence_length or 0) // divided if divided else 0
        u, *others = [size for size in (self.units, self.experts, self.rank) if size] or [0]
        experts = self.experts if self.units else 0
        rank = self.rank if others else 0
        return Shape(self.batch_size, self.sequence_length, u, positions, self.rows, experts, rank)


@dataclass(frozen=True)
class Steps:
    """Steps by which layers are fitted."""

    traced: Sequence[Step]
    checked: Step
    """A larger one, which must agree with what is fitted to the others."""
    of_second_rank: Sequence[Step] = ()
    """Those of `traced` to trace again with adapters of another rank."""
    likes: Mapping[int | None, Record] = field(default_factory=dict)
    """Records that exist already of like steps, by the number of ranks that divide sequences everywhere."""

    def with_adapters(self) -> "Steps":
        """Return the steps of a model with adapters."""
        first, second = TRACED_ADAPTER_RANKS
        traced = [replace(step, rank=first) for step in self.traced]
        traced += [replace(step, rank=second) for step in self.of_second_rank]
        return replace(self, traced=traced, checked=replace(self.checked, rank=CHECKED_ADAPTER_RANK))


def record_steps(model: Model, steps: Steps, *, where: str) -> tuple[dict[Shape, Record], Record]:
    """Return the records of the traced steps by their shapes, and that of the checked one."""
    likes = dict(steps.likes)

    def record(step: Step, apart: Record | None = None) -> Record:
        made = record_step(
            _with_rank(model, step.rank) if step.rank else model,
            step.batch_size,
            step.sequence_length,
            step.units,
            step.parts,
            (step.experts, step.rows) if step.experts else None,
            context=step.context,
            where=where,
            like=likes.get(step.context),
            apart=apart,
        )
        likes.setdefault(step.context, made)
        return made

    largest = None
    if model.compiled:  # the largest orders kernels, and shares buffers, for all others
        first = record(steps.traced[0])
        likes.clear()
        largest = record(steps.checked, apart=first)
    records = {step.shape: record(step) for step in steps.traced}
    return records, largest or record(steps.checked)


def _with_rank(model: Model, rank: int) -> Model:
    adapters = model.module.adapters and replace(model.module.adapters, rank=rank)
    return replace(model, module=replace(model.module, adapters=adapters))


@dataclass(frozen=True)
class Lengths:
    """Sequence lengths at which a model is traced, and that of the step that is checked; None: it has no sequences."""

    traced: Sequence[int | None]
    longest: int | None

    def in_parts(self) -> "Lengths":
        """Return the lengths that ranks can divide: none if the only length is no multiple."""
        more = max(TRACED_RANKS)
        rounded = [-(-length // more) * more for length in self.traced if length is not None]
        longest = (self.longest or 0) // more * more
        return Lengths(rounded, None if self.longest in self.traced and self.longest != longest else longest or None)


def whole_steps(lengths: Lengths) -> Steps:
    """Return the steps of layers that are whole."""
    shapes = product(TRACED_BATCH_SIZES, lengths.traced)
    traced = [Step(batch_size=b, sequence_length=s) for b, s in shapes]
    return Steps(traced, Step(batch_size=CHECKED_BATCH_SIZE, sequence_length=lengths.longest), traced)


def sliced_steps(model: Model, lengths: Lengths, where: str) -> Steps | None:
    """Return the steps of layers whose blocks are sliced, which are functions of the slice's units; None: impossible.

    So with the functions that follow, of which each names its own sizes.
    """
    units = fewest_units(model, where)
    return _sliced(lengths, units) if units > 1 else None


def _sliced(lengths: Lengths, units: int, *, parts: tuple[int, int] | None = None) -> Steps:
    """Return the steps of sliced blocks; with `parts`, sequences are divided by its first number of ranks.

    Parts of its second number are traced at two batch sizes: what is on parts depends on their positions alone.
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
    """Return the steps of sliced blocks with divided sequences: units, and positions of a part."""
    units, lengths = fewest_units(model, where), lengths.in_parts()
    if units < 2 or lengths.longest is None or not can_divide_sequences(model, where):
        return None
    return _sliced(lengths, units, parts=TRACED_RANKS)


def context_steps(model: Model, lengths: Lengths, where: str) -> Steps | None:
    """Return the steps of layers under context parallelism: a rank's positions.

    Traced are one rank, which exchanges with itself, and the fewest that divide the heads.
    """
    longest = lengths.longest
    if not isinstance(model.input, TokenInput) or model.input.classes is not None or longest is None:
        return None
    whole = record_step(model, TRACED_BATCH_SIZES[0], longest, context=1, where=where)
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
    """Return the steps of layers with divided experts: those that are held, and their rows.

    Ranks hold two experts, or more: a single one may behave differently, see `TRACED_UNITS`.
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
    """Return the steps of sliced blocks with divided sequences and experts: units, positions of a part, the experts
    that are held and their rows.

    They are those of `sequence_steps`, and two with other rows and experts; see [Note: experts of parts] in
    `gssim.workload.model`.
    """
    experts, units = experts_to_divide(model, where), fewest_units(model, where, beside_experts=True)
    lengths = lengths.in_parts()
    possible = experts >= 4 and units >= 2 and lengths.longest is not None
    if not possible or not can_divide_sequences(model, where, beside_experts=True):
        return None
    first, more, last = TRACED_ROWS
    parts = _sliced(lengths, units, parts=TRACED_RANKS)
    traced = [replace(step, experts=2, rows=first) for step in parts.traced]
    traced += [replace(traced[-1], rows=more), replace(traced[-1], experts=_more_than_two(experts))]
    return Steps(traced, replace(parts.checked, experts=2, rows=last))


DIVIDED_STEPS: dict[str, Callable[[Model, Lengths, str], Steps | None]] = {
    "sliced_layers": sliced_steps,
    "sequence_layers": sequence_steps,
    "context_layers": context_steps,
    "expert_layers": expert_steps,
    "expert_sequence_layers": expert_sequence_steps,
}
"""By the field of a model with the layers that are fitted."""
