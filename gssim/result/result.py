"""The Result of a simulation or a real run: step times, memory, collectives, ranks; and phases computed from spans."""

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, field, fields
from itertools import accumulate, pairwise
from numbers import Integral
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from gssim.errors import UserError
from gssim.execution.files import read_json
from gssim.units import Amount, Finite, PositiveInt, adapter, human_seconds, record, shown_value, spec, validated

if TYPE_CHECKING:
    import polars

SCHEMA: Literal["gssim.result/1"] = "gssim.result/1"

CATEGORIES = {
    "parameters": "the model's parameters as a rank keeps them: replicas, or FSDP2's shards, its master copy",
    "master_copy": "fp32 copies of what a rank updates, beside parameters of lower precision",
    "gradients": "gradients of parameters, from where autograd makes them until they are copied or the update is done",
    "buckets": "flat buffers that gradients are collected in before they travel",
    "optimizer": "what the optimizer keeps between steps",
    "outer_parameters": "parameters after the last synchronization, from which changes are taken (DiLoCo, SparseLoCo)",
    "outer_momentum": "momentum of the outer optimizer (DiLoCo)",
    "activations": "what the forward makes and the backward needs",
    "temporaries": "what is made and freed within a layer's forward or backward, or an update; kernel scratch",
    "communication": "buffers that messages and collectives are sent from and received in",
    "gathered_parameters": "whole parameters, gathered from their shards",
    "residuals": "gradients, or changes of parameters, that were not sent and are kept for later (error feedback)",
    "low_rank_factors": "factors of the gradients with which the next step begins (PowerSGD's warm start)",
    "scratch": "flags and magnitudes in which Gradient Sharding finds what reaches a threshold",
    "input": "the batch: inputs and targets",
    "buffers": "the module's buffers: what it keeps that is no parameter",
    "workspace": "what libraries take from the allocator and keep",
    "rounding": "what blocks of the caching allocator are larger than what is asked of it (CUDA)",
}
"""Categories of memory, and what is booked under each."""

BUSY_RATIO = 0.15
"""A measurement with a larger `core_wait_ratio` in its provenance was disturbed by other work on the machine."""
DRIFT_RATIO = 0.1
"""A measurement whose `device_speed_ratio` differs from 1 by more than this ran at another speed than stated."""
PHASES = ("forward", "backward", "compression", "optimizer", "exposed_communication", "idle")
WAITING_PHASES = ("exposed_communication", "idle")
"""Phases in which a device draws its idle power; in all others it draws its busy power."""
EXPOSED_COPIES = "exposed_copies"
"""Phase that only measurements from profiler traces have: copies between host and device that nothing hides."""
MEASURED_PHASES = (*PHASES, EXPOSED_COPIES)
PHASES_WITHOUT_COMPUTE = (*WAITING_PHASES, EXPOSED_COPIES)
COMPUTE_PHASES = ("forward", "backward")
"""Phases whose time is proportional to a rank's samples; a rank's speed is measured by them."""
UPDATE_PHASES = ("optimizer",)
"""Phases whose time is proportional to a rank's shard."""


class Span(NamedTuple):
    """An interval in which an operation occupied a stream of a rank."""

    rank: int
    stream: str
    label: str
    phase: str
    start_s: float
    end_s: float
    general_labels: tuple[str, ...] = ()
    """More general labels (they distinguish fewer spans), most specific first; empty if not known."""


class Interval(Protocol):
    """An interval of a rank's stream, reduced to its phase and time."""

    @property
    def stream(self) -> str:
        """Name of the stream."""

    @property
    def phase(self) -> str:
        """One of `PHASES`."""

    @property
    def start_s(self) -> float:
        """Its beginning, in seconds."""

    @property
    def end_s(self) -> float:
        """Its end, in seconds."""


T = TypeVar("T", bound=Interval)


def phases_of(spans: Iterable[Interval], *, start_s: float, end_s: float) -> dict[str, float]:
    """Return the seconds of each phase between `start_s` and `end_s` on one rank's compute stream.

    Where spans nest, the one that began last counts: a wait inside a backward is exposed communication, not backward.
    Time without a span is idle, so the phases always sum to `end_s - start_s`.

    >>> inner = Span(0, "compute", "wait", "exposed_communication", 2.0, 3.0)
    >>> outer = Span(0, "compute", "backward", "backward", 1.0, 4.0)
    >>> phases = phases_of([outer, inner], start_s=0.0, end_s=5.0)
    >>> phases["backward"], phases["exposed_communication"], phases["idle"]
    (2.0, 1.0, 2.0)
    """
    compute = sorted((s for s in spans if s.stream == "compute" and s.end_s > s.start_s), key=lambda s: s.start_s)
    edges = {start_s, end_s}
    for span in compute:
        edges.update(t for t in (span.start_s, span.end_s) if start_s < t < end_s)
    seconds = dict.fromkeys(PHASES, 0.0)
    for left, right, inner in innermost(compute, sorted(edges)):
        phase = inner.phase if inner is not None else "idle"
        seconds[phase] = seconds.get(phase, 0.0) + (right - left)
    return seconds


def innermost(spans: Sequence[T], edges: Sequence[float]) -> Iterator[tuple[float, float, T | None]]:
    """Yield (start, end, the span that began last) between consecutive edges in seconds; None where there is no span.

    `spans`: in the order of their starts. `edges`: ascending; spans that start or end between them are among them.
    """
    active: list[T] = []
    upcoming = 0
    for left, right in pairwise(edges):
        while upcoming < len(spans) and spans[upcoming].start_s <= left:
            active.append(spans[upcoming])
            upcoming += 1
        active = [span for span in active if span.end_s > left]
        yield left, right, active[-1] if active else None


def typical_phases(
    spans: Sequence[Interval], ends_s: Sequence[float], which: Sequence[bool] | None = None
) -> dict[str, float]:
    """Return one rank's phases of a typical step: the mean over steps between the quartiles, scaled to the median step.

    `ends_s`: the start of the first step, then the end of each step. `which`: whether each step counts; by default all.

    >>> work = [Span(0, "compute", "forward", "forward", start, start + 2) for start in (0.0, 3.0, 6.0)]
    >>> phases = typical_phases(work, [0.0, 3.0, 6.0, 9.0])
    >>> phases["forward"], phases["idle"]
    (2.0, 1.0)
    """
    counted = (step for i, step in enumerate(pairwise(ends_s)) if which is None or which[i])
    steps = sorted(counted, key=lambda step: step[1] - step[0])
    quarter = len(steps) // 4
    compute = sorted((s for s in spans if s.stream == "compute" and s.end_s > s.start_s), key=lambda s: s.start_s)
    starts_s = [span.start_s for span in compute]
    latest_s = list(accumulate((span.end_s for span in compute), max))
    typical = [
        phases_of(compute[bisect_right(latest_s, start) : bisect_left(starts_s, end)], start_s=start, end_s=end)
        for start, end in steps[quarter : len(steps) - quarter]
    ]
    names = dict.fromkeys(name for phases in typical for name in phases)
    sums = {name: sum(phases.get(name, 0.0) for phases in typical) for name in names}
    scale = median(end - start for start, end in steps) / sum(sums.values())
    return {name: value * scale for name, value in sums.items()}


LARGER_SIDE = ("all-gather", "reduce-scatter", "gather", "scatter", "all-to-all")
"""Kinds of collectives whose size is that of the larger of their two tensors, input and output."""


@record
class Collective:
    """One kind of collective as posted to the process group, summed over one steady step and all ranks."""

    kind: str
    """`all-reduce`, `reduce-scatter`, `all-gather`, `broadcast`, `all-to-all-v`, `all-gather-v`, `send`."""
    group: tuple[int, ...]
    """The participating ranks, sorted."""
    bytes: int
    """Size of the full tensor, padding included; for data-dependent messages, the size of their dense form."""
    count: int
    """Number of calls in one step."""
    payload_bytes: Amount | None = None
    """Bytes of data-dependent messages: mean per step over all `count` calls together; absent if they equal `bytes`."""

    @property
    def key(self) -> tuple[str, tuple[int, ...], int, int]:
        """The values that must be equal between a prediction and a measurement (design rung a)."""
        return (self.kind, self.group, self.bytes, self.count)


@record
class LinkUse:
    """Traffic in one step over one directed link (simulated), or over each of `count` equal links."""

    name: str
    """Name of the link, or of the first of several."""
    count: int = 1
    bytes: Amount
    utilisation_ratio: Finite


@record
class RankClass:
    """Ranks with equal roles, and the time and memory of each one of them."""

    ranks: tuple[int, ...]
    count: int
    device: str
    peak_allocated_bytes: Amount
    peak_reserved_bytes: Amount | None = None
    """Peak of the memory that the caching allocator reserves (CUDA), including workspaces of libraries. For predictions
    on other devices, the peak of allocated memory. Absent if the device does not have that much."""
    fragmentation_ratio: Finite | None = None
    """Fraction of the reserved bytes that is not allocated at the peak (simulated)."""
    outside_bytes: dict[str, Amount] = field(default_factory=dict)
    """Memory outside the allocator, by purpose; from constants of the cluster file (simulated)."""
    peak_by_category_bytes: dict[str, Finite]
    """Bytes by `CATEGORIES` at the peak; they sum to the peak (simulated)."""
    phases_s: dict[str, Finite]
    host_bytes: dict[str, Amount] = field(default_factory=dict)
    """Memory that the rank keeps on its host, by category (`plan.offload`; simulated)."""
    bytes_sent: Amount | None = None
    bytes_received: Amount | None = None
    batch_share: Finite
    """Fraction of the global batch that each of these ranks trains on; ranks of one replica have the same samples."""
    shard_share: Finite
    """Fraction of the gradients, optimizer states or parameters that each of these ranks owns, where a plan divides
    any."""

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which the rank neither waits nor copies: forward, backward, compression, optimizer."""
        return sum(time_s for phase, time_s in self.phases_s.items() if phase not in PHASES_WITHOUT_COMPUTE)


@spec
class Fit:
    """The rank that exceeds its device's memory by the most; if all devices suffice, the first of the fullest host."""

    rank: int
    category: str
    """The largest category at the peak."""
    excess_bytes: Finite
    memory: Literal["device", "host"] = "device"
    """Whose memory is exceeded; that of a `host` is exceeded by all of its ranks together."""


@spec
class Margin:
    """The rank with the least memory to spare."""

    rank: int
    category: str
    """The largest category at the peak."""
    margin_bytes: Finite
    """Device memory minus reserved memory and memory outside the allocator; negative if it does not fit."""
    memory_bytes: Finite


@spec
class Remedy:
    """A change to the plan, workload or cluster that saves memory, and the resulting margin."""

    change: str
    """An override for `--set`, or a description."""
    fits: bool
    margin: Margin
    """Margin of the rank that has the least; of the fullest host if its memory is exceeded and all devices suffice."""
    saved_bytes: Finite
    """Bytes saved on the rank with the least margin; on the fullest host if its memory is what the plan exceeds."""


@spec
class Density:
    """Fraction of the elements owned by other ranks that were sent, mean over steps; absent without thresholds."""

    push: Finite | None = None
    publish: Finite | None = None
    push_by_step: tuple[Finite, ...] = ()
    """Push density of every timed step (measured)."""
    push_low: Finite | None = None
    """Lower end of the band of `push`, if the gradient statistics were transferred; see `Band`."""
    push_high: Finite | None = None
    """Upper end of the band of `push`."""
    publish_low: Finite | None = None
    publish_high: Finite | None = None


@spec
class Band:
    """Range of a prediction whose gradient statistics were not measured on the model but transferred from a family.

    Both ends are simulated: all |g| are lowered and raised by the factor that covers nine in ten of the family's
    held-out trainings; see `gssim.workload.gradient_family`.
    """

    family: str
    """Family from which the statistics are transferred."""
    scale_error_ratio: Finite
    """Factor on the scale of |g| at the ends of the band."""
    density_error_ratio: Finite
    """Largest factor between the density and one end of its band."""
    step_time_low_s: Finite
    step_time_high_s: Finite
    bytes_sent_low: Finite
    """Bytes sent by all ranks in a step, at the lower end."""
    bytes_sent_high: Finite
    peak_allocated_low_bytes: Finite
    """Peak of the rank that needs the most memory, at the lower end."""
    peak_allocated_high_bytes: Finite
    fits_at_both_ends: bool


@spec
class Evaluation:
    """Quality of the model on held-out data (measured)."""

    step: PositiveInt
    """Number of updates so far, including the warm-up."""
    loss: float
    """Mean cross-entropy, in nats, over all targets of the held-out data."""
    accuracy_ratio: Finite | None = None
    """Fraction of samples whose most likely class is right; absent for models that predict tokens."""


@spec
class Division:
    """A new batch split and shard sizes chosen by rebalancing at run time."""

    first_step: int
    """First step with this split; timed steps count from 0, warm-up steps are negative."""
    samples: tuple[int, ...]
    """Samples of each rank."""
    shard_shares: tuple[Finite, ...]
    """Shard share of each rank."""


@spec
class Periods:
    """Inner and outer steps of ranks that synchronize their parameters periodically."""

    every_steps: PositiveInt
    """Number of steps in a period; the last one is an outer step."""
    inner_step_time_s: Amount | None = None
    """Median, over steps, of an inner step's time, averaged over ranks; absent if a period has no inner step. Where
    fragments are synchronized, this and the other times are means over the period's steps of that kind, each being the
    median over the run's periods; exchanges may be in flight during inner steps."""
    begin_step_time_s: Amount | None = None
    """The corresponding time of a step that begins a fragment's exchange, for which a later step waits; absent if there
    is none."""
    outer_step_time_s: Amount
    """The corresponding time of an outer step: its own training, the wait for other ranks and for the exchange, and the
    update of the synchronized parameters."""
    begin_steps: tuple[PositiveInt, ...] = ()
    """Steps of a period, from 1, that begin a fragment's exchange; empty if the last step synchronizes everything."""
    outer_steps: tuple[PositiveInt, ...] = ()
    """Steps of a period, from 1, that end a fragment's exchange, in the order of fragments."""
    outer_bytes: Amount
    """Total size of a period's collectives between replicas: tensors that replicas share after an outer step."""
    outer_bytes_sent: Amount | None = None
    """Bytes that a rank sends to other replicas in a period, for the rank that sends the most (simulated; in the lab
    counted, if replicas are not sharded)."""

    def mean(self, inner: float, outer: float, begin: float = 0.0) -> float:
        """Return a figure's mean over a period, given its values for inner, outer, and exchange-beginning steps.

        >>> Periods(every_steps=4, inner_step_time_s=1.0, outer_step_time_s=3.0, outer_bytes=8.0).mean(1.0, 3.0)
        1.5
        """
        outers = len(self.outer_steps) or 1
        begins = len(set(self.begin_steps) - set(self.outer_steps))
        inners = self.every_steps - outers - begins
        return (inners * inner + begins * begin + outers * outer) / self.every_steps

    @property
    def step_time_s(self) -> float:
        """Mean time of the steps of a period."""
        return self.mean(self.inner_step_time_s or 0.0, self.outer_step_time_s, self.begin_step_time_s or 0.0)


def fragment_periods(
    times_s: Sequence[float],
    *,
    last: int,
    every: int,
    fragments: Sequence[tuple[int, int]],
    outer_bytes: float,
    outer_bytes_sent: float | None,
) -> Periods:
    """Return the kinds of steps of a run that synchronizes fragments of the parameters.

    Args:
        times_s: the ranks' mean times of consecutive steps, at least a period of them.
        last: number, from 1, of the last of these steps in the training.
        every: number of steps in a period.
        fragments: for each fragment, the steps of a period, from 1, that begin and end its exchange.
        outer_bytes: as in `Periods`.
        outer_bytes_sent: as in `Periods`.

    >>> periods = fragment_periods(
    ...     [1.0, 2.0, 4.0, 1.0, 2.0, 6.0], last=6, every=3, fragments=[(2, 3)], outer_bytes=8.0, outer_bytes_sent=None
    ... )
    >>> periods.inner_step_time_s, periods.begin_step_time_s, periods.outer_step_time_s
    (1.0, 2.0, 5.0)
    """
    first = last - len(times_s)
    by_step: dict[int, list[float]] = defaultdict(list)
    for number, time_s in enumerate(times_s):
        by_step[(first + number) % every + 1].append(time_s)
    ends = {end for _, end in fragments}
    begins = {begin for begin, _ in fragments} - ends

    def mean_s(steps: Iterable[int]) -> float | None:
        medians_s = [median(by_step[step]) for step in steps]
        return fmean(medians_s) if medians_s else None

    return Periods(
        every_steps=every,
        inner_step_time_s=mean_s(sorted(by_step.keys() - begins - ends)),
        begin_step_time_s=mean_s(sorted(begins)),
        outer_step_time_s=mean_s(sorted(ends)) or 0.0,
        begin_steps=tuple(begin for begin, _ in fragments),
        outer_steps=tuple(end for _, end in fragments),
        outer_bytes=outer_bytes,
        outer_bytes_sent=outer_bytes_sent,
    )


@spec
class Result:
    """Predicted or measured outcome of a scenario."""

    schema: Literal["gssim.result/1"] = SCHEMA
    source: Literal["simulated", "measured"]
    """Whether it was predicted or measured."""
    scenario_id: str
    """Identity of the scenario; predictions and measurements of the same scenario are joined by it."""
    calibration_id: str
    """Identity of the rates, costs and statistics on which a prediction is based."""
    scenario: dict[str, Any]
    """The whole scenario, as plain data."""
    step_time_s: Amount
    """Median over the run's steps; for a run with `periods`, the mean over a period with a median step of each kind."""
    step_time_p10_s: Amount
    """Tenth percentile of the run's steps."""
    step_times_s: tuple[Amount, ...] = ()
    """Time of every timed step (simulated: only if they differ)."""
    phases_s: dict[str, Finite]
    """Seconds of each phase, mean over ranks; they sum to the step time."""
    fits: bool
    """Whether every rank's memory suffices."""
    does_not_fit: Fit | None = None
    """The rank that exceeds its device's memory by the most, and by how much; None if all ranks fit."""
    margin: Margin | None = None
    """Margin of the rank with the least memory to spare (simulated)."""
    remedies: tuple[Remedy, ...] = ()
    """Changes that save memory, the most effective first, if the plan does not fit (`gssim run`)."""
    throughput_samples_per_s: Amount
    """Samples per second, over all ranks."""
    density: Density
    """Fractions of gradients that are pushed, and of parameters that are published; None where everything is."""
    band: Band | None = None
    """Range of the prediction, if gradient statistics were transferred from other models."""
    periods: Periods | None = None
    """Times and bytes of inner and outer steps, if parameters are synchronized periodically. Everything else in the
    Result is then the mean over a period's steps, except memory and collectives: these are an outer step's or, where
    fragments are synchronized, a whole period's."""
    collectives: tuple[Collective, ...]
    """Collectives of a step; equal ones are listed once, with their number."""
    links: tuple[LinkUse, ...] = ()
    """Traffic of a step by link (simulated)."""
    ranks: tuple[RankClass, ...]
    """Ranks with their devices, phases and memory; equal ranks share an entry."""
    idle_devices: tuple[str, ...] = ()
    """Names of the cluster's devices without a rank."""
    loss: tuple[float, ...] = ()
    """Mean loss over the batch of each timed step, before its update (measured)."""
    evaluation: tuple[Evaluation, ...] = ()
    """Evaluations every `run.evaluate_every_steps` and after the last timed step; their time is in no step time."""
    divisions: tuple[Division, ...] = ()
    """Rebalancing at run time; the ranks' shares in the Result are those of the last division."""
    cost_usd_per_step: Amount | None = None
    """Cost of the participating devices per step; absent if a price is not known."""
    energy_j_per_step: Amount | None = None
    """Energy of the participating devices per step, without hosts and network (simulated); absent if a power is not
    known.
    """
    provenance: dict[str, Any] = field(default_factory=dict)
    """Versions and digests of the code, the machine, and the circumstances of the run.

    Measurements also have `core_wait_ratio`: the largest fraction of the timed steps for which a rank waited for a
    core. Those on calibrated CPUs and emulated devices have `device_speed_ratio`: the measured rate of a matrix product
    (before and after the run; in the lab, after it) relative to the rate in the devices' file.
    """

    def __repr__(self) -> str:
        """Return one short line; `to_dict` has all values."""
        return (
            f"<Result {self.scenario.get('name')!r}: {self.scenario['plan']['method']}, {self.source} step "
            f"{human_seconds(self.step_time_s)}, "
            f"{self.throughput_samples_per_s:.4g} samples/s, {'fits' if self.fits else 'does not fit'}>"
        )

    def __hash__(self) -> int:
        """Return a hash by scenario and step time, so that it can be a key: fields hold tables, which have none."""
        return hash((self.source, self.scenario_id, self.step_time_s))

    def to_json(self) -> str:
        """Return the Result as JSON, with keys in schema order; equal Results give the same bytes."""
        data = adapter(Result).dump_python(self, exclude={"scenario"})  # this is plain already, and the largest part
        in_order = {each.name: data.get(each.name, self.scenario) for each in fields(self)}
        return json.dumps(self._without_empty(in_order), indent=2, allow_nan=False) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return the Result as plain data, equal to what `to_json` parses to, with keys in schema order.

        Some keys are left out if they are empty.
        """
        return self._without_empty(adapter(Result).dump_python(self, mode="json"))

    def _without_empty(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the Result's data without keys that are left out if they are empty."""
        if self.periods is None:
            del data["periods"]
        elif not self.periods.begin_steps:
            for name in ("begin_step_time_s", "begin_steps", "outer_steps"):
                del data["periods"][name]
        if self.band is None:
            del data["band"]
        if self.does_not_fit is not None and self.does_not_fit.memory == "device":
            del data["does_not_fit"]["memory"]
        for each in data["ranks"]:
            if not each["host_bytes"]:
                del each["host_bytes"]
        for end in ("push_low", "push_high", "publish_low", "publish_high"):
            if data["density"][end] is None:
                del data["density"][end]
        return data

    def imbalance_s(self, rank: RankClass | int | None = None) -> float:
        """Return the part of exposed communication that is due to unequal compute, of a rank or as the mean over ranks.

        It is the time by which a rank computes less than the one that computes most: it waits as long even where
        messages take no time. The rest is communication that nothing hides, and (in a pipeline) the bubble. Compute is
        the mean over steps: waits for ranks that are the slower ones in some steps only (jitter) count to the rest.

        Args:
            rank: its number, or an entry of `ranks`; None: the mean.

        Raises:
            UserError: there is no such rank.
        """
        computes_s = [each.compute_s for each in self.ranks]
        chosen = list(zip(self.ranks, computes_s, strict=True))
        if rank is not None:
            rank_class = rank if isinstance(rank, RankClass) else self._class_of(rank)
            chosen = [(rank_class, rank_class.compute_s)]
        most_s = max(computes_s)
        waits_s = (
            each.count * min(most_s - compute_s, each.phases_s.get("exposed_communication", 0.0))
            for each, compute_s in chosen
        )
        return sum(waits_s) / sum(each.count for each, _ in chosen)

    def _class_of(self, rank: Any) -> RankClass:
        of_rank = {number: entry for entry in self.ranks for number in entry.ranks}
        if isinstance(rank, bool) or not isinstance(rank, Integral) or rank not in of_rank:
            raise UserError(
                f"rank = {shown_value(rank)}: must be a number from 0 to {len(of_rank) - 1}, or an entry of `ranks`"
            )
        return of_rank[int(rank)]

    def to_frame(self) -> "polars.DataFrame":
        """Return the ranks as a table: one row per class of equal ranks, with units in column names.

        `phase_*_s` are the phases of a step, `peak_*_bytes` the bytes of each memory category at the peak,
        `outside_*_bytes` those outside the allocator, `host_*_bytes` those on the rank's host; `imbalance_s`: see
        there. The step time, the method, and the scenario's name and id are in every row, so tables of several Results
        can be stacked (`polars.concat` with `how="diagonal"`, as they have columns for what they hold).
        """
        dataframe = imported_polars().DataFrame
        whole = {"scenario": self.scenario.get("name"), "scenario_id": self.scenario_id, "source": self.source}
        whole["method"] = self.scenario.get("plan", {}).get("method")
        rows = []
        for rank_class in self.ranks:
            row = asdict(rank_class)
            phases = row.pop("phases_s")
            memory = {"peak": "peak_by_category_bytes", "outside": "outside_bytes", "host": "host_bytes"}
            held = {kind: row.pop(key) for kind, key in memory.items()}
            sizes = {f"{kind}_{name}_bytes": size for kind, of in held.items() for name, size in of.items()}
            row["ranks"] = list(row["ranks"])
            row |= {f"phase_{name}_s": value for name, value in phases.items()} | sizes
            row["imbalance_s"] = self.imbalance_s(rank_class)
            rows.append({**whole, "step_time_s": self.step_time_s, **row})
        numbers = dict.fromkeys(name for row in rows for name, value in row.items() if value is None)
        kinds = dict.fromkeys(numbers, float)  # of a column without any number too
        frame: polars.DataFrame = dataframe(rows, infer_schema_length=None, schema_overrides=kinds)
        return frame


def imported_polars() -> Any:
    """Import polars, which only tables need; raise UserError if it is not installed."""
    try:
        import polars
    except ImportError:
        raise UserError("a table needs polars: pip install 'gssim[analysis]'") from None
    return polars


def file_name(name: str, scenario_id: str, source: str, repeat: int = 0) -> str:
    """Return the name of a Result's file.

    >>> file_name("ddp", "06206a394dd25997", "measured"), file_name("ddp", "06206a394dd25997", "measured", 2)
    ('ddp.06206a394dd25997.measured.json', 'ddp.06206a394dd25997.measured-2.json')
    """
    return f"{name}.{scenario_id}.{source}{f'-{repeat}' if repeat else ''}.json"


def read_result(path: Path) -> Result:
    """Return the Result in the JSON file `path`; raise UserError where it is not one."""
    return validated(Result, read_json(path), file=str(path))


def merge_collectives(entries: Iterable[Collective]) -> tuple[Collective, ...]:
    """Return the entries in a fixed order, with those of equal kind, group and bytes merged."""
    counts: dict[tuple[str, tuple[int, ...], int], int] = defaultdict(int)
    payloads: dict[tuple[str, tuple[int, ...], int], float | None] = {}
    for entry in entries:
        key = (entry.kind, entry.group, entry.bytes)
        counts[key] += entry.count
        before = payloads.get(key)
        payloads[key] = before if entry.payload_bytes is None else (before or 0.0) + entry.payload_bytes
    return tuple(
        Collective(kind=kind, group=group, bytes=size, count=count, payload_bytes=payloads[kind, group, size])
        for (kind, group, size), count in sorted(counts.items())
    )
