"""The cluster: device types with their costs, devices on hosts, directed links, and costs of the communication library.

Every number in a cluster file has a `source`, beside it or on its table.
"""

from collections import Counter
from copy import copy
from dataclasses import asdict, field
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from gssim.cluster.kernel_rates import KernelRates
from gssim.cluster.measured import (
    CompressionCost,
    Curve,
    CutBlockCost,
    OptimizerCost,
    PostingCost,
    Profile,
    ShardedUnitCost,
    Slowdown,
    UnitCost,
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
    Rate,
    Seconds,
    TimeRatio,
    Variation,
    Watts,
    key_among,
    omits_defaults,
    spec,
)


@spec
class Emulation:
    """Emulation of a device on a core of the lab's machine. All costs are those of the device at this CPU share.

    If its jitter is measured and the number of cores is known, it computes in turns of a millisecond.
    """

    cpu_share_ratio: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Fraction of a core's time in which the device computes; the lab needs at least 0.01."""
    processor: str | None = None
    """Model of the processor on which the costs were measured; absent: they are not measured."""
    cores: PositiveInt | None = None
    """Number of cores among which the lab distributes its devices; absent: devices do not slow each other down."""


@spec
class DeviceType:
    """A type of device: capacities from a data sheet, or costs measured by `gsreal calibrate`."""

    kind: Literal["cpu", "cuda", "tpu"]
    """Kind of hardware; it determines the backend and the memory accounting. On a `tpu`, XLA compiles the step, which
    fuses memory-bound operations, those of the update included, with the matrix products beside them."""
    memory_bytes: PositiveBytes
    """Memory capacity; a plan that needs more does not fit."""
    peak_flop_per_s: dict[Rate, FlopPerSecond]
    """Dense matrix rate by precision; `tf32`: the rate for fp32 values under `workload.tf32`."""
    efficiency_ratio: Annotated[float, Field(gt=0, le=1, strict=True)] = 1.0
    """Fraction of the peak that the matrix products of a training achieve."""
    fp32_efficiency_ratio: Annotated[float, Field(gt=0, le=1, strict=True)] | None = None
    """`efficiency_ratio` for products in fp32, which do not use tensor cores; absent: `efficiency_ratio`."""
    float8_ratio: TimeRatio | None = None
    """Achieved rate of matrix products in 8 bits relative to 16 bits, for `workload.map_precision`; absent: the device
    has no 8-bit products. An H100 reached about 1.8 in a training by torchtitan."""
    memory_bandwidth_bytes_per_s: BytesPerSecond
    """Achieved memory bandwidth of memory-bound operations, usually less than a data sheet's."""
    operation_overhead_s: Seconds = 0.0
    """Host time to launch one operation; a step is never faster than its launches."""
    layer_operation_s: Seconds | None = None
    """On a GPU: host time to issue one operation of a layer, including the time of modules and autograd, for models
    without a profile; absent: `operation_overhead_s`."""
    kernel_s: Seconds | None = None
    """On a GPU: the device's own time for an operation on few elements that the host has issued ahead. Absent: not
    measured; each cast of a master copy then takes `operation_overhead_s`, the host's time, on the device."""
    step_host_s: Seconds | None = None
    """Host time per step of the training loop outside forward, backward and update: the batch, the loss, and logging.
    Absent: none."""
    workspace_bytes: Bytes = 0.0
    """Memory that libraries allocate and keep (cuBLAS workspaces); it counts as allocated."""
    resident_threads: PositiveInt | None = None
    """Threads that all multiprocessors run at once. torch divides large sums among them (kind `cuda`). Absent:
    unlimited."""
    context_bytes: Bytes = 0.0
    """Memory outside the allocator: context and libraries; also communicators, if `communicator_bytes` is 0."""
    communicator_bytes: Bytes = 0.0
    """Memory outside the allocator per process group of a rank (NCCL)."""
    expandable_segments: bool = False
    """Whether PyTorch's allocator uses expandable segments (`PYTORCH_ALLOC_CONF`); only for kind `cuda`."""
    communicating_slowdown_ratio: Slowdown = 1.0
    """Compute time during communication relative to compute time alone, if the bytes keep the processor fully busy. The
    slowdown is proportionally smaller if the links leave the processor idle for part of the time."""
    communicating_excess_ratio: Curve | None = None
    """Measured by rate (like the profiles' key of this name); replaces `communicating_slowdown_ratio`."""
    neighbour_slowdown_ratio: Slowdown = 1.0
    """Compute time while all other devices of the host compute, relative to compute time alone. In the lab, where each
    device is a host of its own: while an equally fast device computes on the same core."""
    step_jitter_ratio: Variation = 0.0
    """Random variation of a step's compute time (standard deviation over median), which makes ranks stragglers."""
    task_jitter_ratio: Variation = 0.0
    """Random variation of a layer's compute time, in addition to the step's."""
    optimizers: dict[str, OptimizerCost] = field(default_factory=dict)
    """Measured update times by optimizer; absent: derived from memory bandwidth."""
    compression: CompressionCost | None = None
    """Measured times of compression; absent: derived from memory bandwidth."""
    posting: PostingCost | None = None
    """Measured times of this device to post messages; absent: the backend's costs."""
    sharded_unit: ShardedUnitCost | None = None
    """Measured costs of FSDP2's units; absent: no extra time."""
    flat_unit: UnitCost | None = None
    """Measured costs of the units that Gradient Sharding gathers (`gs_z3`), including gradient hooks; absent: no extra
    time."""
    cut_block: CutBlockCost | None = None
    """Measured costs of sliced (tensor-parallel) blocks; absent: no extra time."""
    gradient_hook_s: Seconds = 0.0
    """Host time of one gradient hook (per parameter and backward) in the methods that communicate gradients. Under
    Gradient Sharding it includes the other per-parameter work of its step, except the update."""
    replica_hook_s: Seconds | None = None
    """`gradient_hook_s` under DistributedDataParallel; absent: `gradient_hook_s`."""
    replica_forward_s: Seconds | None = None
    """Host time that DistributedDataParallel adds to each forward; absent: none."""
    profiles: tuple[Profile, ...] = ()
    """Measured layers, by model; models without a profile use a roofline of the rates above."""
    kernels: tuple[KernelRates, ...] = ()
    """Measured rates of matrix products and attention by their sizes, at one or several precisions. They apply to
    models of token sequences without a profile; absent: the achieved FLOP/s applies to all."""
    price_usd_per_h: NonNegativeFloat | None = None
    """Price of one hour; absent: results have no costs."""
    busy_power_w: Watts | None = None
    """Power during compute. (Data sheets state the maximum.)"""
    idle_power_w: Watts | None = None
    """Power while waiting for other ranks or inside a collective, which uses few units of the device."""
    lab: Emulation | None = None
    """Emulation in the lab (`gsreal lab`); absent: the device is a whole core."""
    source: str
    """Source of the numbers: a data sheet, or a calibration."""

    _serialized = omits_defaults(
        *("lab", "communicator_bytes", "expandable_segments", "kernels", "kernel_s", "step_host_s", "flat_unit"),
        *("busy_power_w", "idle_power_w", "communicating_excess_ratio", "posting", "resident_threads"),
        *("fp32_efficiency_ratio", "float8_ratio", "replica_hook_s", "replica_forward_s", "layer_operation_s"),
    )


@spec
class Device:
    """One device, which runs a rank."""

    name: str
    """Name, which links refer to."""
    type: str
    """A key of `device_types`."""
    host: str
    """Name of the host; devices with the same name share a host."""


@spec
class Link:
    """A connection, in both directions unless `directed`."""

    between: tuple[str, str]
    """Names of devices or switches, sender first."""
    bandwidth_bytes_per_s: BytesPerSecond
    """Bandwidth of one direction."""
    latency_s: Seconds
    """Latency of an empty message."""
    directed: bool = False
    """Whether the link leads from the first to the second only."""
    source: str
    """Source of the numbers."""


def memory_node(host: str) -> str:
    """Return the name of the node of a cluster's wiring that is a host's memory."""
    return f"{host}/memory"


@spec
class HostMemory:
    """Memory of each host. `plan.offload` moves state to it, and the host updates the state there."""

    memory_bytes: PositiveBytes
    """Capacity; a plan whose ranks keep more than that on a host does not fit."""
    memory_bandwidth_bytes_per_s: BytesPerSecond
    """Achieved bandwidth of an optimizer step on all cores of a host; its ranks share it evenly."""
    source: str
    """Source of the numbers."""


COLLECTIVES = (
    *("all-reduce", "reduce-scatter", "all-gather", "broadcast", "reduce", "all-to-all", "send"),
    *("all-gather-v", "reduce-scatter-v", "all-to-all-v"),
)
"""Kinds of collectives that backends carry out."""
CollectiveKind = Annotated[str, key_among(*COLLECTIVES)]
PricedKind = Annotated[str, key_among(*COLLECTIVES, "all-reduce bf16", "all-reduce fp16", "default")]


@spec
class BackendCost:
    """Fixed costs of the communication library, measured or published."""

    overhead_s: dict[PricedKind, Seconds] = field(default_factory=dict)
    """Per call, by kind of collective, in addition to link latencies; `default` for all others. Collectives made of
    point-to-point messages have the costs of the uneven kind: an all-gather those of all-gather-v."""
    overhead_rank_s: dict[PricedKind, Seconds] = field(default_factory=dict)
    """Added to `overhead_s` for each rank of the group beyond two: over gloo, messages of GPUs are copied through the
    host's memory one by one."""
    following_saving_s: dict[PricedKind, Seconds] = field(default_factory=dict)
    """By kind: how much shorter a collective over gloo is if it starts as soon as another on its stream has ended. Its
    code and buffers are then still in the caches, from which compute evicts them. Absent: 0."""
    queued_s: dict[PricedKind, Seconds] = field(default_factory=dict)
    """By kind: the part of the fixed time of such a collective in which it occupies its ranks' processors, so that
    other collectives in progress wait: the time that each collective adds to an asynchronous queue. Absent: 0."""
    message_s: Seconds = 0.0
    """Fixed time of a message, or of a receiver's notice, in addition to the latency of its path: waking up threads. If
    a link's latency was measured from rank to rank, it includes this time."""
    reduction_bytes_per_s: BytesPerSecond | None = None
    """Rate at which received bytes are added to local ones; absent: free."""
    posting_s: Seconds = 0.0
    """Host time to post an exchange of one point-to-point message, whatever its size."""
    posting_message_s: Seconds = 0.0
    """Host time for each further message of the exchange."""
    posting_byte_s: Seconds = 0.0
    """Host time per byte to copy a point-to-point message into the socket; the transfer begins with the first byte."""
    posting_limit_bytes: PositiveBytes | None = None
    """Bytes that the sockets buffer at once; the backend's thread posts the rest while the caller continues. Absent:
    sockets buffer everything."""
    unpacking_s: Seconds = 0.0
    """Host time that a stage of a pipeline takes, before it computes, to unpack the message that it received, whatever
    its size."""
    unpacking_byte_s: Seconds = 0.0
    """The same for each byte of the message."""
    measured_s: dict[CollectiveKind, Curve] = field(default_factory=dict)
    """By kind: the time of a collective of all ranks, by size in bytes. It replaces any formula, with log-log
    interpolation; smaller sizes take as long as the smallest, and beyond the largest, time is proportional to size.
    """
    processor_byte_s: dict[PricedKind, Seconds] = field(default_factory=dict)
    """Processor time of a rank per byte that it sends or receives (copies, the kernel's network code, additions), by
    kind of collective; `default` for all others. All-reduces in 16 bits may have values of their own, `all-reduce bf16`
    and `all-reduce fp16`, here and in `overhead_s`. This time overlaps with the transfer: the longer of the two counts.
    """
    source: str
    """Source of the numbers."""

    _serialized = omits_defaults(
        *("overhead_rank_s", "following_saving_s", "queued_s", "message_s", "posting_message_s"),
        *("posting_limit_bytes", "processor_byte_s", "unpacking_s", "unpacking_byte_s"),
    )


def _generation(value: Any) -> Any:
    """Return the constants for the name of a generation, or a table with the key `generation`; else the value as is."""
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
    """Return the devices of a topology, cached, so that topologies that differ only in their links share them."""
    return tuple(Device(name=name, type=kind, host=host) for name, kind, host in built)


_wiring_of_links = lru_cache(maxsize=64)(wiring_of_links)


@spec
class Cluster:
    """Devices in rank order and their links: listed one by one, or built from a topology."""

    name: str
    """Name of the cluster, in tables and charts."""
    backend: Literal["gloo", "nccl"]
    """Backend of torch.distributed: gloo on CPUs, nccl on GPUs."""
    device_types: dict[str, Annotated[DeviceType, BeforeValidator(partial(expanded, "devices"))]]
    """Each is a table, or the name of a preset; a table with the key `preset` overrides values of that preset. Or the
    name of a file of these tables, which an override may name as well (`cluster.device_types=FILE`).
    """
    devices: tuple[Device, ...] = ()
    """Devices in rank order. Omit it with a topology, which fills it in."""
    switches: tuple[str, ...] = ()
    """Names of the switches. Omit it with a topology, which fills it in."""
    links: tuple[Annotated[Link, BeforeValidator(partial(expanded, "links"))], ...] = ()
    """Links, each a table that may name a `preset`. Empty with a topology; all links are in `wiring`."""
    topology: Topology | None = None
    """Replaces devices, switches and links. A network of another form (a dragonfly, say) lists these itself."""
    host: HostMemory | None = None
    """Memory of each host. `plan.offload` needs it on devices with memory of their own, with a link from every device
    to the node HOST/memory (a server's `host_memory`, or links to a switch of this name). Absent: not known."""
    backend_cost: BackendCost | None = None
    """Fixed costs of messages and collectives, as a table or the name of a file with it; absent: the links' times."""
    nccl: Annotated[NcclTuning, BeforeValidator(_generation)] | None = None
    """NCCL's constants: the name of a GPU generation (volta, ampere, hopper, blackwell) or of a machine to which they
    were fitted (volta-dgx-1, volta-t4, ampere-dgx-a100), or a table whose key `generation` names the one that it
    overrides. Absent: ampere."""
    algorithms: dict[CollectiveKind, str] = field(default_factory=dict)
    """Algorithm by kind of collective, if not the backend's own; `best`: the one that is predicted to be fastest."""
    cores_per_rank: Count = 0
    """CPU cores to which each rank, including gloo's threads, is pinned in a real run; 0: not pinned."""
    source: str
    """Source of the numbers."""

    def __post_init__(self) -> None:
        """Fill in the devices and switches of a topology; refuse unknown names."""
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
        self._check_types()

    def _check_types(self) -> None:
        for name, kind in self.device_types.items():
            if kind.expandable_segments and kind.kind != "cuda":
                raise ValueError(f"device_types.{name}.expandable_segments: kind {kind.kind!r} has none; allowed: no")
            repeated = [each for each, count in Counter(entry.precision for entry in kind.kernels).items() if count > 1]
            if repeated:
                raise ValueError(f"device_types.{name}.kernels: several of precision {repeated[0]!r}; allowed: one")
            for key in ("layer_operation_s", "kernel_s"):
                if kind.kind != "cuda" and getattr(kind, key) is not None:
                    where = f"device_types.{name}.{key} = {getattr(kind, key)}"
                    raise ValueError(f"{where}: it is of a GPU, not of kind {kind.kind!r}; leave it out")

    def _fill(self, topology: Topology) -> None:
        check_size(topology)
        made = build(topology)
        devices, switches = _devices(made.devices), made.switches
        # `dataclasses.replace` passes on the values that were filled in before
        for key, given, built in (("devices", self.devices, devices), ("switches", self.switches, switches)):
            if given and given != built:
                raise ValueError(f"{key}: given by the topology; leave them out")
        if self.links:
            raise ValueError("links: given by the topology; leave them out")
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
        """Return plain data with either the topology or the devices, switches and links."""
        bare = copy(self)
        if self.topology is not None:  # not converted at all: there may be many
            object.__setattr__(bare, "devices", ())
            object.__setattr__(bare, "switches", ())
        data: dict[str, Any] = inner(bare)
        left_out = ("topology",) if self.topology is None else ("devices", "switches", "links")
        optional = ("host", "nccl", "algorithms")
        return {k: value for k, value in data.items() if k not in left_out and (value or k not in optional)}

    @property
    def wiring(self) -> Wiring:
        """All directed links, as arrays over devices and switches."""
        if self.topology is not None:
            return build(self.topology).wiring
        return _wiring_of_links((*(device.name for device in self.devices), *self.switches), self.links)

    def type_of(self, rank: int) -> DeviceType:
        """Return the type of the device on which `rank` runs."""
        return self.device_types[self.devices[rank].type]
