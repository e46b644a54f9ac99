"""What there is: device types with their costs, devices on hosts, directed links, and the backend's habits.

Every number in a cluster file has a `source`, beside it or on the table that holds it.
"""

from collections import Counter
from copy import copy
from dataclasses import asdict, field
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from gssim.cluster.measured import (
    CompressionCost,
    Curve,
    CutBlockCost,
    OptimizerCost,
    PostingCost,
    Profile,
    ShardedUnitCost,
    Slowdown,
)
from gssim.cluster.nccl_tuning import GENERATIONS, NcclTuning
from gssim.cluster.presets import expanded
from gssim.cluster.topology import Topology, Wiring, build, check_size, wiring_of_links
from gssim.units import (
    Bytes,
    BytesPerSecond,
    Count,
    FlopPerSecond,
    NonNegativeFloat,
    PositiveBytes,
    PositiveInt,
    Precision,
    Seconds,
    Variation,
    Watts,
    spec,
)


@spec
class Emulation:
    """How the lab makes a core of its machine into such a device. All costs are those of the device at this share."""

    cpu_share_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of a core's time in which the device computes; the lab makes devices of 0.01 at least."""
    processor: str | None = None
    """The machine's processor when the costs were measured; absent: they are not."""
    cores: PositiveInt | None = None
    """How many cores the machine has, to which the lab deals its devices; absent: none slows another down there."""


@spec
class DeviceType:
    """A kind of device: capacities from a data sheet, or costs measured by `gsreal calibrate`."""

    kind: Literal["cpu", "cuda", "tpu"]
    """What computes there; it decides on the backend that serves it and on how memory is counted. On a `tpu`, XLA
    compiles the step: operations that stream are fused with the products beside them, and so is an update."""
    memory_bytes: PositiveBytes
    """Capacity: what needs more does not fit."""
    peak_flop_per_s: dict[Precision, FlopPerSecond]
    """Dense matrix rate by precision."""
    efficiency_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the peak that a training's matrix products reach."""
    fp32_efficiency_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """The same of products in fp32, which no tensor cores do; absent: `efficiency_ratio`."""
    memory_bandwidth_bytes_per_s: BytesPerSecond
    """Rate at which operations without much arithmetic read and write, usually less than a data sheet's."""
    operation_overhead_s: Seconds = 0.0
    """Host time to issue one operation; a step is never faster than its operations are issued."""
    workspace_bytes: Bytes = 0.0
    """Memory that libraries take from the allocator and keep (cuBLAS workspaces): part of what is allocated."""
    resident_threads: PositiveInt | None = None
    """Threads that all its multiprocessors run at once, to which torch shares out large sums (kind `cuda`); absent: as
    many as there are to share."""
    context_bytes: Bytes = 0.0
    """Memory outside the allocator: context and libraries; communicators too, where these are 0."""
    communicator_bytes: Bytes = 0.0
    """Memory outside the allocator for each group that a rank communicates in (NCCL)."""
    expandable_segments: bool = False
    """Whether the segments of PyTorch's allocator expand (`PYTORCH_ALLOC_CONF`); kind `cuda` alone has it."""
    communicating_slowdown_ratio: Slowdown = 1.0
    """Compute time while this device communicates, over compute time alone: with a processor all busy with the bytes;
    where the links leave it idle for part of the time, that much less."""
    communicating_excess_ratio: Curve | None = None
    """Measured rate by rate (see the profiles' own), instead of `communicating_slowdown_ratio`."""
    neighbour_slowdown_ratio: Slowdown = 1.0
    """Compute time while every other device of the host computes, over compute time alone. In the lab, where each
    device is a host: while one as fast computes on the same core."""
    step_jitter_ratio: Variation = 0.0
    """Random variation of a whole step's compute (standard deviation over median): what makes peers late."""
    task_jitter_ratio: Variation = 0.0
    """Random variation of a single layer's compute, on top of the step's."""
    optimizers: dict[str, OptimizerCost] = field(default_factory=dict)
    """Measured, by optimizer; without, an update goes by memory bandwidth."""
    compression: CompressionCost | None = None
    """Measured; absent: by memory bandwidth."""
    posting: PostingCost | None = None
    """Measured on this device; absent: as the backend's costs say."""
    sharded_unit: ShardedUnitCost | None = None
    """Measured; absent: nothing is added."""
    cut_block: CutBlockCost | None = None
    """Measured; absent: nothing is added."""
    gradient_hook_s: Seconds = 0.0
    """Host time of one gradient hook (per parameter and backward) in the methods that communicate gradients."""
    profiles: tuple[Profile, ...] = ()
    """Measured layers, by model; without, a roofline of the rates above stands in."""
    price_usd_per_h: NonNegativeFloat | None = None
    """What an hour costs; absent: no costs are stated."""
    busy_power_w: Watts | None = None
    """What the device takes while it computes. A data sheet's is the most that it takes."""
    idle_power_w: Watts | None = None
    """The same while it waits, for others or in a collective, which busies few of its units."""
    lab: Emulation | None = None
    """In the lab (`gsreal lab`); absent: a whole core."""
    source: str
    """Where the numbers are from: a data sheet, or a calibration."""

    @model_serializer(mode="wrap")
    def _as_measured(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data: what is absent makes no other calibration."""
        data: dict[str, Any] = inner(self)
        for key in [key for key in ("lab", "communicator_bytes", "expandable_segments") if not data[key]]:
            del data[key]
        optional = (
            "busy_power_w",
            "idle_power_w",
            "communicating_excess_ratio",
            "posting",
            "resident_threads",
            "fp32_efficiency_ratio",
        )
        for key in [key for key in optional if data[key] is None]:
            del data[key]
        return data


@spec
class Device:
    """One device: a rank runs on it. Devices of the same host share it."""

    name: str
    """By which links know it."""
    type: str
    """A key of `device_types`."""
    host: str
    """Devices of one host share its name."""


@spec
class Link:
    """A connection. Its bandwidth is of one direction; both directions exist unless `directed`."""

    between: tuple[str, str]
    """Names of devices or switches, sender first."""
    bandwidth_bytes_per_s: BytesPerSecond
    """Of one direction."""
    latency_s: Seconds
    """Of an empty message."""
    directed: bool = False
    """Whether there is only the way from the first to the second."""
    source: str
    """Where the numbers are from."""


@spec
class BackendCost:
    """Fixed costs of the communication library, measured or published."""

    overhead_s: dict[str, Seconds] = field(default_factory=dict)
    """Per call, by collective kind, on top of link latencies; `default` for all others. What is made of point-to-point
    messages has the costs of the uneven kind: an all-gather those of all-gather-v."""
    message_s: Seconds = 0.0
    """What a message takes beside the latency of its path, whatever its size, and what a receiver's notice does: the
    threads that it wakes. Where a link's latency was measured from rank to rank, that is part of it."""
    reduction_bytes_per_s: BytesPerSecond | None = None
    """Rate at which received bytes are added to local ones; absent: free."""
    posting_s: Seconds = 0.0
    """Host time to hand over an exchange of one point-to-point message, whatever its size."""
    posting_message_s: Seconds = 0.0
    """The same for each message more."""
    posting_byte_s: Seconds = 0.0
    """Host time per byte to copy a point-to-point message into the socket; the transfer begins with the first."""
    posting_limit_bytes: PositiveBytes | None = None
    """What sockets take at once: the backend's thread hands over the rest while the caller goes on. Absent: all."""
    measured_s: dict[str, Curve] = field(default_factory=dict)
    """By kind: the time of a collective of all ranks by its size in bytes, in place of any formula. It is read between
    points on logarithmic scales; smaller sizes take what the smallest does, larger ones in proportion to the largest.
    """
    processor_byte_s: dict[str, Seconds] = field(default_factory=dict)
    """Processor time of a rank for each byte that it sends or receives (copies, the kernel's network code, additions),
    by collective kind; `default` for all others. It goes by while the links carry the bytes: what takes longer counts.
    """
    source: str
    """Where the numbers are from."""

    @model_serializer(mode="wrap")
    def _as_measured(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data: what is absent makes no other calibration."""
        data: dict[str, Any] = inner(self)
        for key in ("message_s", "posting_message_s", "posting_limit_bytes", "processor_byte_s"):
            if not data[key]:
                del data[key]
        return data


def _generation(value: Any) -> Any:
    """Return the constants of a generation that is named, alone or as a table's `generation`; all else as it is."""
    named = value.get("generation") if isinstance(value, dict) else value
    if not isinstance(named, str):
        return value
    if named not in GENERATIONS:
        raise ValueError(f"no such generation; allowed: {', '.join(GENERATIONS)}")
    if isinstance(value, str):
        return GENERATIONS[named]
    changes = {key: each for key, each in value.items() if key != "generation"}
    return {**asdict(GENERATIONS[named]), **changes}


@lru_cache(maxsize=32)
def _devices(built: tuple[tuple[str, str, str], ...]) -> tuple[Device, ...]:
    """Return the devices of a topology; the same where others differ in their links alone."""
    return tuple(Device(name=name, type=kind, host=host) for name, kind, host in built)


@lru_cache(maxsize=64)
def _wiring(names: tuple[str, ...], links: tuple[Link, ...]) -> Wiring:
    return wiring_of_links(names, links)


@spec
class Cluster:
    """Devices and how they are wired, in rank order: one by one, or by a topology that stands for them."""

    name: str
    """By which tables and charts call it."""
    backend: Literal["gloo", "nccl"]
    """Of torch.distributed: gloo on CPUs, nccl on GPUs."""
    device_types: dict[str, Annotated[DeviceType, BeforeValidator(partial(expanded, "devices"))]]
    """Each a table, or the name of a preset; a table with the key `preset` says what differs from it."""
    devices: tuple[Device, ...] = ()
    """In rank order. With a topology, files leave it out: it is filled in."""
    switches: tuple[str, ...] = ()
    """The same."""
    links: tuple[Annotated[Link, BeforeValidator(partial(expanded, "links"))], ...] = ()
    """Empty with a topology; all links are in `wiring`. A table may name a `preset`."""
    topology: Topology | None = None
    """In the place of devices, switches and links."""
    backend_cost: BackendCost | None = None
    """Fixed costs of messages and collectives; absent: only what links take. Or the name of a file of this table."""
    nccl: Annotated[NcclTuning, BeforeValidator(_generation)] | None = None
    """NCCL's constants: a generation of GPUs (volta, ampere, hopper, blackwell), a machine that they were fitted to
    (volta-dgx-1, volta-t4, ampere-dgx-a100), or a table, in which the key `generation` says which of these it starts
    from; ampere's if absent."""
    algorithms: dict[str, str] = field(default_factory=dict)
    """Algorithm by kind of collective, where it is not the backend's own; `best`: what is predicted to be fastest."""
    cores_per_rank: Count = 0
    """CPU cores that each rank, with the threads of gloo, is pinned to in a real run; 0: not pinned."""
    source: str
    """Where the numbers are from."""

    def __post_init__(self) -> None:
        """Fill in what a topology stands for; refuse names that lead nowhere."""
        if self.topology is not None:
            self._fill(self.topology)
        if not self.devices:
            raise ValueError("devices: at least one is needed, or a topology that has one")
        if self.topology is None:
            self._check_names()
        for device in self.devices:
            if device.type not in self.device_types:
                allowed = ", ".join(sorted(self.device_types))
                raise ValueError(f"devices: {device.name!r} has the unknown type {device.type!r}; allowed: {allowed}")
        for name, kind in self.device_types.items():
            if kind.expandable_segments and kind.kind != "cuda":
                raise ValueError(f"device_types.{name}.expandable_segments: kind {kind.kind!r} has none; allowed: no")

    def _fill(self, topology: Topology) -> None:
        check_size(topology)
        found = build(topology)
        devices, switches = _devices(found.devices), found.switches
        # `dataclasses.replace` hands over what was filled in before
        for key, given, built in (("devices", self.devices, devices), ("switches", self.switches, switches)):
            if given and given != built:
                raise ValueError(f"{key}: the topology stands for them; leave them out")
        if self.links:
            raise ValueError("links: the topology stands for them; leave them out")
        object.__setattr__(self, "devices", devices)
        object.__setattr__(self, "switches", switches)

    def _check_names(self) -> None:
        names = Counter([*(device.name for device in self.devices), *self.switches])
        repeated = sorted(name for name, count in names.items() if count > 1)
        if repeated:
            raise ValueError(f"devices and switches: {repeated[0]!r} is named twice")
        for link in self.links:
            for end in link.between:
                if end not in names:
                    raise ValueError(f"links: {end!r} is neither a device nor a switch")
            if link.between[0] == link.between[1]:
                raise ValueError(f"links: {link.between[0]!r} is linked to itself")

    @model_serializer(mode="wrap")
    def _as_written(self, inner: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return plain data with either the topology or what it stands for."""
        bare = copy(self)
        if self.topology is not None:  # not even made into plain data: there may be many
            object.__setattr__(bare, "devices", ())
            object.__setattr__(bare, "switches", ())
        data: dict[str, Any] = inner(bare)
        for key in ("topology",) if self.topology is None else ("devices", "switches", "links"):
            del data[key]
        for key in [key for key in ("nccl", "algorithms") if not data[key]]:
            del data[key]  # what is absent makes no other calibration
        return data

    @property
    def wiring(self) -> Wiring:
        """All directed links, as arrays over devices and switches."""
        if self.topology is not None:
            return build(self.topology).wiring
        return _wiring((*(device.name for device in self.devices), *self.switches), self.links)

    def type_of(self, rank: int) -> DeviceType:
        """Return the type of the device on which `rank` runs."""
        return self.device_types[self.devices[rank].type]
