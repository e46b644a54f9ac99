"""Checks of every simulated scenario; they use nothing of the lowering that they check.

Each yields a line for whatever is wrong.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

import pytest

from gssim.cluster import Cluster
from gssim.plan import INDEX_BYTES
from gssim.plan.mesh import REPLICA_AXES
from gssim.plan.splitting import shards_inside_experts
from gssim.program import Task, without_messages
from gssim.result import PHASES, Result
from gssim.scenario import Loaded, Scenario, tied_parameters
from gssim.scenario.stages import TiedParameter
from gssim.scenario.tensor_slices import context_part
from gssim.simulation import Simulated, simulate
from gssim.units import PRECISION_BYTES
from gssim.workload import Layer, state_element_bytes, unrolled

RELATIVE = 1e-9
ROUNDED_BYTES = 1e-3
"""Bytes by which what a rank sends or receives may be rounded, where the size of messages depends on the data."""
NORM_BYTES, FLAG_BYTES = 8, 4
"""Bytes that ranks exchange to clip gradients, and to report infinite ones."""


def faults_of(loaded: Loaded, simulated: Simulated) -> Iterator[str]:
    """Yield what is wrong with an answer."""
    scenario, result = loaded.scenario, simulated.result
    yield from _not_finite(result)
    yield from _ranks_left_out(scenario, result)
    yield from _samples(scenario, result)
    yield from _phases(scenario, result)
    yield from _collectives(scenario, result)
    yield from _links(scenario, result)
    yield from _compute_bound(scenario, simulated)
    yield from _memory(scenario, result)
    yield from _left_behind(simulated)


# What ranks do -------------------------------------------------------------------------------------------------------


def _not_finite(result: Result) -> Iterator[str]:
    data = {field.name: getattr(result, field.name) for field in fields(result) if field.name != "scenario"}
    for key, value in _numbers(data):
        if not math.isfinite(value):
            yield f"{key} = {value} is not finite"
        elif value < 0 and "margin" not in key and "first_step" not in key:
            yield f"{key} = {value} is negative"


def _numbers(value: Any, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, float | int):
        yield key, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _numbers(each, f"{key}.{name}")
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from _numbers(each, f"{key}[{number}]")
    elif is_dataclass(value):
        for field in fields(value):
            yield from _numbers(getattr(value, field.name), f"{key}.{field.name}")


def _ranks_left_out(scenario: Scenario, result: Result) -> Iterator[str]:
    told = sorted(rank for entry in result.ranks for rank in entry.ranks)
    if told != list(range(scenario.ranks)):
        yield f"the Result tells of the ranks {told}, the plan has {scenario.ranks}"
    if any(entry.count != len(entry.ranks) for entry in result.ranks):
        yield "a class of ranks has not as many members as it says"
    idle = [device.name for device in scenario.cluster.devices[scenario.ranks :]]
    if list(result.idle_devices) != idle:
        yield f"the devices {idle} take no part, the Result names {list(result.idle_devices)}"


def _samples(scenario: Scenario, result: Result) -> Iterator[str]:
    total, policies = scenario.workload.global_batch_size, scenario.policies
    by_part: dict[int, set[float]] = defaultdict(set)
    for entry in result.ranks:
        for rank in entry.ranks:
            by_part[policies.data_rank(rank)].add(entry.batch_share * total)
    if any(len(each) > 1 for each in by_part.values()):
        yield f"ranks of one replica take different numbers of samples: {dict(by_part)}"
    taken = sum(max(each) for each in by_part.values())
    if len(by_part) != policies.data_ranks or abs(taken - total) > 1e-6:
        yield f"{taken} samples are taken by {len(by_part)} parts, of {total} in {policies.data_ranks}"
    shares: dict[tuple[int, int], float] = defaultdict(float)
    for entry in result.ranks:
        for rank in entry.ranks:
            place = policies.mesh.place(rank)
            shares[place.pp, place.tp] += entry.shard_share
    broken = any(abs(each - 1) > 1e-6 for each in shares.values())
    if broken and policies.gradients == "push" and policies.data_ranks > 1:
        yield f"shards of one part of the model sum to {dict(shares)}"


def _phases(scenario: Scenario, result: Result) -> Iterator[str]:
    types = [scenario.cluster.type_of(rank) for rank in range(scenario.ranks)]
    alone = all(each.neighbour_slowdown_ratio == 1 and not each.step_jitter_ratio for each in types)
    # ranks are told of at a walk's end; where chance or neighbours are in it, ranks' steps do not end in step
    every = [(str(entry.ranks), entry.phases_s) for entry in result.ranks if alone and not result.step_times_s]
    for name, phases in [("all ranks", result.phases_s), *every]:
        whole = sum(phases.values())
        if tuple(phases) != PHASES or abs(whole - result.step_time_s) > RELATIVE * result.step_time_s:
            yield f"phases of {name} sum to {whole} ({', '.join(phases)}), the step takes {result.step_time_s}"


# Bytes ---------------------------------------------------------------------------------------------------------------


def _collectives(scenario: Scenario, result: Result) -> Iterator[str]:
    encoding = {"all-to-all-v": scenario.push.encoding, "all-gather-v": scenario.plan.publish.encoding}
    for entry in result.collectives:
        fewest = encoding.get(entry.kind) in ("auto", "dense")  # else more than all, densely, may be sent
        # each message of a gather goes to all others; the bytes of an exchange are of all pairs
        copies = len(entry.group) - 1 if entry.kind == "all-gather-v" else 1
        dense, payload = entry.bytes * entry.count * copies, entry.payload_bytes
        if fewest and payload is not None and payload > dense * (1 + RELATIVE):
            yield f"{entry.kind} among {entry.group}: payload of {payload} bytes, {dense} if all were sent"
        if not set(entry.group) <= set(range(scenario.ranks)):
            yield f"{entry.kind} among {entry.group}: not all of these are ranks"
    for density in (result.density.push, result.density.publish):
        if density is not None and density > 1 + RELATIVE:
            yield f"density {density}"
    yield from (_compressed_bytes if scenario.policies.compressor else _gradient_bytes)(scenario, result)


def carried(result: Result, *kinds: str) -> dict[tuple[int, ...], int]:
    """Return the bytes of all collectives of some kinds, by their group."""
    found: dict[tuple[int, ...], int] = defaultdict(int)
    for entry in result.collectives:
        if entry.kind in kinds:
            found[entry.group] += entry.bytes * entry.count
    return found


def _gradient_bytes(scenario: Scenario, result: Result) -> Iterator[str]:
    """Compare what collectives carry of gradients with the parameters' own bytes, where blocks are not cut."""
    policies, plan, workload = scenario.policies, scenario.plan, scenario.workload
    if policies.tp > 1 or policies.ranks == 1:
        return
    model, mesh = workload.model, policies.mesh
    # a pipeline sums the gradients of parameters that stages share in the precision in which they are
    reduced = None if policies.gradients == "push" else workload.reduce_precision
    value = PRECISION_BYTES[policies.compress or reduced or workload.precision]
    times = plan.micro_batches if policies.gradient_sync == "micro-batch" else 1
    of_axes = {"dp_replicate": ("dp_replicate", "cp"), "dp_shard": ("dp_shard", "cp")}
    if policies.gradients in ("reduce-scatter", "push"):  # ranks that divide sequences divide the shards too
        of_axes["dp_replicate"] = ("dp_replicate",)
    groups = {
        axis: sorted({tuple(mesh.group(rank, *both)) for rank in range(mesh.ranks)}) for axis, both in of_axes.items()
    }
    exact = model.elements * value * times
    if policies.gradients == "all-reduce" and policies.ep > 1:
        yield from _divided_bytes(scenario, result, value * times)
    elif policies.gradients == "all-reduce" and len(groups["dp_replicate"][0]) > 1:
        flat = plan.method == "zero1" and plan.zero1_implementation == "megatron"  # of which each rank gets its part
        kind = "reduce-scatter" if flat else "all-reduce"
        found = sum(carried(result, kind)[group] for group in groups["dp_replicate"])
        tied = policies.pp > 1  # stages that share a parameter have a copy each
        norms = NORM_BYTES if workload.clip_norm is not None or policies.zero1_implementation == "deepspeed" else 0
        if not exact <= found <= exact + norms and not (tied and found > exact):
            yield f"{kind}s carry {found} bytes, gradients have {exact}"
    if policies.gradients == "reduce-scatter":
        yield from _scattered_bytes(scenario, result, value * times, groups)
    if policies.gradients == "push":
        yield from _pushed_bytes(scenario, result, value * times, groups[policies.push_axis])


def _tied(scenario: Scenario) -> Sequence[TiedParameter]:
    """Return the parameters of which several stages have a copy."""
    return tied_parameters(unrolled(scenario.workload.model), scenario.stage_ranges) if scenario.policies.pp > 1 else ()


def _scattered_bytes(
    scenario: Scenario, result: Result, value: int, groups: dict[str, list[tuple[int, ...]]]
) -> Iterator[str]:
    """Compare what is reduce-scattered, and all-reduced of shards, with the padded gradients."""
    policies, n = scenario.policies, len(groups["dp_shard"][0])
    if n == 1:
        return
    divided = {p.name for each in scenario.workload.model.expert_layers for p in each.parameters if p.cut is not None}
    own = divided if policies.ep > 1 else set()
    parameters = [p for each in unrolled(scenario.workload.model) for p in each.layer.parameters]
    shapes = [p.shape or (1,) for p in parameters if p.name not in own]
    layers = unrolled(scenario.workload.model)
    for tied in _tied(scenario):
        shapes += [layers[tied.layer].layer.parameters[tied.place].shape] * (len(tied.stages) - 1)
    padded = _padded_elements(shapes, n) * value
    wanted = 0  # bytes of the experts of a rank
    if policies.ep > 1:
        held = [(p.shape[0] // policies.ep, *p.shape[1:]) for p in parameters if p.name in own]
        replicas = n // policies.ep
        # experts that are cut inside need no padding
        rows = 1 if shards_inside_experts(held, replicas=replicas) else replicas
        wanted = _padded_elements(held, rows) * value
    if 1 < policies.ep < n:
        shards = {rank: set(policies.mesh.group(rank, "dp_shard", "cp")) for rank in range(policies.ranks)}
        among = {tuple(each for each in policies.mesh.expert_replicas(rank) if each in shards[rank]) for rank in shards}
        carriers = [carried(result, "reduce-scatter")[group] for group in among]
        found = sum(carriers) / policies.ep / policies.dp_replicate  # each group has the experts of its own stages
        if found != wanted:
            yield f"reduce-scatters of experts carry {found} bytes, padded gradients have {wanted}"
    scattered = [carried(result, "reduce-scatter")[group] for group in groups["dp_shard"]]
    if policies.pp > 1:  # each group holds the gradients of its own stages
        scattered = [sum(scattered) // policies.dp_replicate]
    if policies.in_fragments:  # all steps of a period
        padded *= policies.sync_every_steps or 1
    if set(scattered) != {padded}:
        yield f"reduce-scatters carry {scattered} bytes, padded gradients have {padded}"
    if policies.dp_replicate > 1:
        yield from _replicated_bytes(scenario, result, padded + policies.ep * wanted, groups["dp_replicate"])


def _replicated_bytes(scenario: Scenario, result: Result, padded: int, groups: list[tuple[int, ...]]) -> Iterator[str]:
    """Compare what replicas of shards all-reduce with the padded gradients, or, where they synchronize periodically,
    with the parameters in the optimizer's precision.
    """
    policies, workload, plan = scenario.policies, scenario.workload, scenario.plan
    reduced = sum(carried(result, "all-reduce")[group] for group in groups)
    times = plan.micro_batches if policies.gradient_sync == "micro-batch" else 1
    if policies.sync_every_steps is None:
        if reduced not in (padded, padded // times):
            yield f"all-reduces of shards carry {reduced} bytes, padded gradients have {padded}"
        return
    whole = workload.model.elements * max(4, PRECISION_BYTES[workload.precision])
    if reduced != whole and policies.outer_optimizer != "sparse" and plan.outer.precision == "fp32":
        yield f"all-reduces over replicas carry {reduced} bytes, parameters have {whole}"


def _padded_elements(shapes: list[tuple[int, ...]], shards: int) -> int:
    """Return the elements of tensors that are padded in their first dimension to a multiple of the shards."""
    return sum(math.prod(shape[1:]) * math.ceil(shape[0] / shards) * shards for shape in shapes)


def expert_elements(scenario: Scenario) -> int:
    """Return the elements of all routed experts that ranks divide."""
    return sum(
        layer.repeats * (layer.units or 0) * parameter.elements
        for layer in scenario.workload.model.expert_layers
        for parameter in (layer.parameters if layer.experts_per_token else ())
        if parameter.cut is not None
    )


def _divided_bytes(scenario: Scenario, result: Result, value: int) -> Iterator[str]:
    """Compare what is all-reduced with the experts' gradients, among the ranks that hold the same, and all others'.

    Megatron-LM's optimizer reduce-scatters them, each padded to two elements for every rank.
    """
    flat = scenario.plan.zero1_implementation == "megatron"
    kind = "reduce-scatter" if flat else "all-reduce"
    mesh, model, reduced = scenario.policies.mesh, scenario.workload.model, carried(result, kind)
    experts = expert_elements(scenario)
    replicas = {tuple(mesh.group(rank, *REPLICA_AXES)) for rank in range(mesh.ranks)}  # one of each stage
    whole = sum(reduced[group] for group in replicas)
    parts = sum(reduced[group] for group in {tuple(mesh.expert_replicas(rank)) for rank in range(mesh.ranks)})
    if mesh.replica_ranks == mesh.ep:
        parts = experts * value  # nobody else holds the same
    padding = 2 * mesh.ranks * value if flat else 0
    if mesh.replica_ranks == mesh.ep and not flat:  # they sum squares of gradients, and flags of infinite ones
        workload = scenario.workload
        norms = NORM_BYTES * (workload.clip_norm is not None) + FLAG_BYTES * (workload.loss_scale is not None)
        whole -= norms * len(replicas)
    exact = (model.elements - experts) * value, experts * value
    if not all(size <= found <= size + padding for found, size in zip((whole, parts), exact, strict=True)):
        yield f"{kind}s carry {whole} and {parts} bytes, of {model.elements} elements {experts} are of experts"


def _compressed_bytes(scenario: Scenario, result: Result) -> Iterator[str]:
    """Compare what compressors send with the factors of every tensor, or with the fraction of all elements."""
    mesh = scenario.policies.mesh
    if mesh.ranks == 1:
        return
    shapes = [p.shape or (1,) for each in unrolled(scenario.workload.model) for p in each.layer.parameters]
    group = tuple(range(mesh.ranks))
    options, value = scenario.plan.powersgd, PRECISION_BYTES[scenario.workload.precision]
    if scenario.policies.compressor == "topk":
        elements = sum(map(math.prod, shapes))
        found = carried(result, "all-gather")[group] / (value + INDEX_BYTES) / len(group)
        buckets = sum(entry.count for entry in result.collectives if entry.kind == "all-gather") / 2
        buckets += 2 * scenario.plan.shares.replan  # of 8 bytes: ranks' speeds are gathered too
        if abs(found - scenario.plan.topk.density_ratio * elements) > buckets:
            yield f"all-gathers carry {found} of {elements} elements"
        return
    sent = 0
    for shape in shapes:
        rows, columns = shape[0], math.prod(shape[1:])
        rank = min(rows, columns, options.rank)
        factors = rank * (rows + columns)
        sent += factors if factors * options.min_compression_ratio < rows * columns else rows * columns
    reduced, norms = carried(result, "all-reduce")[group], NORM_BYTES * (scenario.workload.clip_norm is not None)
    if not sent * value <= reduced <= sent * value + norms:
        yield f"all-reduces carry {reduced} bytes, factors and other tensors have {sent * value}"


def _ring_bytes(scenario: Scenario) -> int:
    """Return the bytes of keys, values and their gradients that go around a ring of all ranks in a step.

    n - 1 times in a forward, 2n - 1 times in a backward; of blocks that are checkpointed, once more in the former's.
    Where keys and values are gathered, only their gradients go around, n times.
    """
    ranks, workload = scenario.policies.cp, scenario.workload
    times = (2 if scenario.plan.recompute == "full" else 1) * (ranks - 1) + ranks - 1
    if scenario.policies.gathers_keys:
        times = 0
    device, value = scenario.cluster.type_of(0), PRECISION_BYTES[workload.autocast or workload.precision]
    times += ranks * (1 if device.kind == "cpu" else 4 // min(4, value))  # GPUs send gradients in fp32
    scale = PRECISION_BYTES[workload.precision] / PRECISION_BYTES[workload.model.traced_precision]
    own = sum(
        scale * instance.layer.reductions[0].size_bytes.at(b=scenario.data_batch_sizes[0], s=1)
        for instance in unrolled(context_part(workload.model, scenario.sequence_positions or 0, ring=True))
        if instance.layer.reductions
    )
    return round(ranks * times * own)


def _pushed_bytes(scenario: Scenario, result: Result, value: int, groups: list[tuple[int, ...]]) -> Iterator[str]:
    """Compare with what all but the owner would send densely, had they samples; of those without, nothing comes.

    `value`: bytes of an element in all pushes of a step. Each stage pushes and publishes its own copies.
    """
    policies = scenario.policies
    elements = scenario.workload.model.elements
    elements += sum(tied.elements * (len(tied.stages) - 1) for tied in _tied(scenario))
    mesh, experts = policies.mesh, expert_elements(scenario) if policies.ep > 1 else 0
    of_experts = {tuple(mesh.expert_replicas(rank)) for rank in range(mesh.ranks)} if experts else set()
    replicas = len(mesh.expert_replicas(0))
    if len(groups[0]) > 1 and tuple(mesh.expert_group(0)) not in groups:  # among all ranks rows are sent too
        among = {*groups, *of_experts}
        pushes = [each for each in result.collectives if each.kind == "all-to-all-v" and each.group in among]
        # where messages depend on the data, ranks tell each other first how long they are
        dependent = [entry for entry in pushes if entry.payload_bytes is not None]
        sent = sum(entry.bytes * entry.count for entry in dependent or pushes)
        if (
            not dependent and policies.ring and tuple(policies.mesh.group(0, "cp")) in groups
        ):  # keys go around among the same ranks
            sent -= _ring_bytes(scenario)
        most = ((elements - experts) * (len(groups[0]) - 1) + experts * (replicas - 1)) * value
        if not (sent == most if min(scenario.batch_sizes) else sent <= most):
            yield f"pushes carry {sent} bytes, all but the owners' gradients have {most}"
    if policies.parameters == "replicated" and policies.point_to_point and policies.dp_replicate == 1:
        alone = experts if replicas == 1 else 0  # those that no other rank holds
        whole = (elements - alone) * PRECISION_BYTES[scenario.workload.precision]
        gathers = [entry for entry in result.collectives if entry.kind == "all-gather-v"]
        dependent = [entry for entry in gathers if entry.payload_bytes is not None]
        published = sum(entry.bytes * entry.count for entry in dependent or gathers)
        if published != whole:
            yield f"publications carry {published} bytes, parameters have {whole}"


def _links(scenario: Scenario, result: Result) -> Iterator[str]:
    for link in result.links:
        if link.utilisation_ratio > 1 + RELATIVE:
            yield f"link {link.name} carries {link.bytes} bytes, {link.utilisation_ratio} of what it can"
    sent = sum((entry.bytes_sent or 0.0) * entry.count for entry in result.ranks)
    received = sum((entry.bytes_received or 0.0) * entry.count for entry in result.ranks)
    if abs(sent - received) > RELATIVE * max(sent, received) + ROUNDED_BYTES * scenario.ranks:
        yield f"{sent} bytes are sent, {received} received"
    if len(result.links) == scenario.cluster.wiring.links and all(link.count == 1 for link in result.links):
        yield from _balance(scenario, result)  # else links are told of class by class


def _balance(scenario: Scenario, result: Result) -> Iterator[str]:
    """Compare what every device puts on its links with what it sends."""

    def place(node: str) -> str:  # with offloading a device and its host's memory exchange what is not told of
        is_outside = node in scenario.cluster.switches and not node.endswith("/memory")
        return node if scenario.plan.offload is None or is_outside else node.rsplit("/", 1)[0]

    balance: dict[str, float] = defaultdict(float)
    for link in result.links:
        source, target = map(place, link.name.split(" -> "))
        balance[source] += link.bytes
        balance[target] -= link.bytes
    own: dict[str, float] = defaultdict(float)
    for entry in result.ranks:
        for rank in entry.ranks:
            own[place(scenario.cluster.devices[rank].name)] += (entry.bytes_sent or 0.0) - (entry.bytes_received or 0.0)
    most = max((link.bytes for link in result.links), default=0.0)
    for name, out in balance.items():
        expected = own[name]
        if abs(out - expected) > 1e-6 * most + 1e-3:
            yield f"{name} puts {out} more bytes on its links than it takes from them, and {expected} are its own"


# Time ----------------------------------------------------------------------------------------------------------------


def _flop(layer: Layer, phases: tuple[str, ...], samples: int, length: int) -> float:
    return sum(float(getattr(layer, f"{phase}_flop").at(b=samples, s=length)) for phase in phases)


def model_flop(scenario: Scenario, samples: int) -> float:
    """Return the FLOP of a step on `samples` samples; of its forward alone if layers divide weight gradients."""
    length = scenario.workload.sequence_length or 1
    phases = ("forward",) if scenario.policies.partition == "weight-gradient" else ("forward", "backward")
    return sum(layer.repeats * _flop(layer, phases, samples, length) for layer in scenario.workload.model.layers)


def _compute_bound(scenario: Scenario, simulated: Simulated) -> Iterator[str]:
    policies, workload, result = scenario.policies, scenario.workload, simulated.result
    types = [scenario.cluster.type_of(rank) for rank in range(scenario.ranks)]
    precision = workload.autocast or workload.precision  # of products, which have nearly all FLOP
    if any(each.profiles or each.step_jitter_ratio or precision not in each.peak_flop_per_s for each in types):
        return
    rates = [each.peak_flop_per_s[precision] for each in types]
    copies = scenario.ranks if policies.partition == "weight-gradient" else 1
    least_s = copies * model_flop(scenario, workload.global_batch_size) / sum(rates)
    # ranks do inner steps apart: those of the slowest count only in the mean of a period
    single = () if result.periods else (result.step_time_p10_s, *result.step_times_s)
    for step_s in sorted({result.step_time_s, *single})[:1]:
        if step_s < least_s * (1 - RELATIVE):
            yield f"a step takes {step_s} s, its FLOP {least_s} s on all devices together"
    if result.step_times_s:
        return  # ranks are told of at a walk's end, the step is its median
    unequal = policies.ring and not policies.zigzag  # ranks of a plain ring do more attention, or less
    if policies.tp == policies.pp == policies.ep == 1 and not unequal:  # ranks with few rows of experts do less too
        for rank, samples in enumerate(scenario.batch_sizes):
            own_s = model_flop(scenario, samples) / policies.cp / rates[rank]
            if result.step_time_s < own_s * (1 - RELATIVE):
                yield f"a step takes {result.step_time_s} s, rank {rank}'s FLOP of {samples} samples {own_s} s"
    for role, tasks in enumerate(simulated.typical.machine.program.tasks):
        own_s = sum(task.duration_s for task in tasks if task.stream == "compute" and task.communication is None)
        own_s /= result.periods.every_steps if result.periods else 1
        if result.step_time_s < own_s * (1 - RELATIVE):
            yield f"a step takes {result.step_time_s} s, the tasks of role {role} {own_s} s"


# Memory --------------------------------------------------------------------------------------------------------------


def _memory(scenario: Scenario, result: Result) -> Iterator[str]:
    """Compare peaks with the least that parameters and states take: of all ranks, and where nothing is cut, of each."""
    policies, workload = scenario.policies, scenario.workload
    value, master = PRECISION_BYTES[workload.precision], max(4, PRECISION_BYTES[workload.precision])
    precision = workload.optimizer_state_precision
    kept = state_element_bytes(workload.optimizer, value_bytes=master, precision=precision)
    if scenario.plan.offload is not None:  # the host's memory holds states, and with `parameters` the shards too
        value, kept = value * (scenario.plan.offload != "parameters"), 0
    elements, data = workload.model.elements, policies.mesh.data_ranks
    if policies.ep > 1:
        elements -= expert_elements(scenario) * (policies.ep - 1) // policies.ep
    held_whole, updated_whole = policies.parameters == "replicated", policies.optimizer_state == "replicated"
    # blocks of whole tensors are owned once in all (ZeRO-1), shards once by those among whom they are sharded
    owners = {"all-reduce": 1, "push": 1}.get(policies.gradients, policies.dp_replicate)
    least = elements * (value * (data if held_whole else owners) + kept * (data if updated_whole else owners))
    peaks = {rank: entry.peak_allocated_bytes for entry in result.ranks for rank in entry.ranks}
    if sum(peaks.values()) < least * (1 - RELATIVE):
        yield f"all ranks hold {sum(peaks.values())} bytes at most, parameters and states {least}"
    if policies.tp == policies.pp == 1 and (held_whole or updated_whole):
        own = elements * (value * held_whole + kept * updated_whole)
        if min(peaks.values()) < own * (1 - RELATIVE):
            yield f"a rank holds {min(peaks.values())} bytes at most, its parameters and states {own}"
    for entry in result.ranks:
        parts = sum(entry.peak_by_category_bytes.values())
        if abs(parts - entry.peak_allocated_bytes) > 1e-6 * parts + 1e-3:
            yield f"ranks {entry.ranks}: categories sum to {parts}, the peak is {entry.peak_allocated_bytes}"
        if entry.peak_reserved_bytes is not None and entry.peak_reserved_bytes < entry.peak_allocated_bytes:
            yield f"ranks {entry.ranks}: reserved {entry.peak_reserved_bytes} < {entry.peak_allocated_bytes} allocated"


def _left_behind(simulated: Simulated) -> Iterator[str]:
    """Compare what each role's tasks allocate in a step with what they free: else memory would grow step by step."""
    for role, tasks in enumerate(simulated.typical.machine.program.tasks):
        left: dict[str, float] = defaultdict(float)
        moved_bytes = 0.0
        for part in without_messages(tasks):
            for category, size in (part.need if isinstance(part, Task) else part.template.need).kept:
                left[category] += size
                moved_bytes += abs(size)
        for category, size in left.items():
            if abs(size) > RELATIVE * moved_bytes + ROUNDED_BYTES:
                yield f"a step of role {role} leaves {size} bytes of {category}"


# More of what there is -----------------------------------------------------------------------------------------------

TWICE = 2.0


def faster_links(cluster: Cluster) -> Cluster:
    """Return the cluster with twice the bandwidth on every link."""
    if cluster.topology is not None:
        return replace(cluster, topology=_scaled(cluster.topology))
    return replace(cluster, links=_scaled(cluster.links))


def _scaled(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_scaled(each) for each in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {
        field.name: getattr(value, field.name) * TWICE
        if field.name == "bandwidth_bytes_per_s"
        else _scaled(getattr(value, field.name))
        for field in fields(value)
    }
    return replace(value, **changes)


def faster_devices(cluster: Cluster) -> Cluster:
    """Return the cluster with its first kind of device at twice the rates, and half the time for an operation."""
    name = cluster.devices[0].type
    kind = cluster.device_types[name]
    faster = replace(
        kind,
        peak_flop_per_s={precision: TWICE * rate for precision, rate in kind.peak_flop_per_s.items()},
        memory_bandwidth_bytes_per_s=TWICE * kind.memory_bandwidth_bytes_per_s,
        operation_overhead_s=kind.operation_overhead_s / TWICE,
    )
    return replace(cluster, device_types={**cluster.device_types, name: faster})


def modules_of_stages(scenario: Scenario) -> list[int]:
    """Return `plan.stages` as it resolves: a module that later stages have too (a rotary embedding) counts once."""
    has_module = [bool(each.layer.modules) for each in unrolled(scenario.workload.model)]
    return [sum(has_module[each.start : each.stop]) for each in scenario.stage_ranges]


def slower_by(loaded: Loaded, cluster: Cluster, step_time_s: float) -> float:
    """Return by what part of `step_time_s` the step is longer on another cluster; negative where it is shorter.

    A pipeline keeps its stages: balanced anew over faster devices they are another plan, which may be slower, as the
    balance counts compute alone (neither messages, nor what they slow down, nor the fill of the pipeline).
    """
    plan = loaded.scenario.plan
    if loaded.scenario.policies.mesh.pp > 1 and plan.stages is None:
        plan = replace(plan, stages=tuple(modules_of_stages(loaded.scenario)))
    other = replace(loaded, scenario=replace(loaded.scenario, cluster=cluster, plan=plan))
    return simulate(other, spread=False).result.step_time_s / step_time_s - 1


# What folding must not change ----------------------------------------------------------------------------------------


def of_ranks(result: Result) -> list[dict[str, object]]:
    """Return the outcome of every rank, in order."""
    found = {}
    for entry in result.ranks:
        assert entry.count == len(entry.ranks)
        found |= {
            rank: {
                "device": entry.device,
                "peak": entry.peak_allocated_bytes,
                "categories": entry.peak_by_category_bytes,
                "phases": entry.phases_s,
                "sent": entry.bytes_sent,
                "received": entry.bytes_received,
                "shares": (entry.batch_share, entry.shard_share),
            }
            for rank in entry.ranks
        }
    return [found[rank] for rank in range(len(found))]


def assert_same_as_unfolded(folded: Result, unfolded: Result) -> None:
    """Compare a Result with that of the same scenario of which no ranks, links or flows were taken together."""
    step_s = unfolded.step_time_s
    assert folded.step_time_s == pytest.approx(step_s, rel=RELATIVE)
    assert folded.step_time_p10_s == pytest.approx(unfolded.step_time_p10_s, rel=RELATIVE)
    assert folded.phases_s == pytest.approx(unfolded.phases_s, rel=RELATIVE, abs=RELATIVE * step_s)
    assert folded.collectives == unfolded.collectives
    assert (folded.periods is None) == (unfolded.periods is None)
    if folded.periods and unfolded.periods:
        mine, other = asdict(folded.periods), asdict(unfolded.periods)
        assert (mine["inner_step_time_s"] is None) == (other["inner_step_time_s"] is None)
        for steps in ("begin_steps", "outer_steps"):
            assert mine.pop(steps) == other.pop(steps)
        assert {k: v or 0.0 for k, v in mine.items()} == pytest.approx(
            {k: v or 0.0 for k, v in other.items()}, rel=RELATIVE
        )
    assert folded.fits == unfolded.fits
    ranks, alone = of_ranks(folded), of_ranks(unfolded)
    assert len(ranks) == len(alone)
    for mine, other in zip(ranks, alone, strict=True):
        for key in ("device", "peak", "categories", "shares"):
            assert mine[key] == other[key]
        assert mine["phases"] == pytest.approx(other["phases"], rel=RELATIVE, abs=RELATIVE * step_s)
        for key in ("sent", "received"):
            assert mine[key] == pytest.approx(other[key], rel=RELATIVE, abs=1e-6)
    assert [link.name for link in folded.links] == [link.name for link in unfolded.links]
    for mine, other in zip(folded.links, unfolded.links, strict=True):
        assert mine.bytes == pytest.approx(other.bytes, rel=RELATIVE, abs=1e-6)
        assert mine.utilisation_ratio == pytest.approx(other.utilisation_ratio, rel=2 * RELATIVE, abs=1e-12)
