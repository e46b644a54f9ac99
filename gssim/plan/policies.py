"""Policies that a plan resolves to on a cluster: the input of lowering and of the real backend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any, Literal

from gssim.errors import UserError
from gssim.plan.mesh import AXES, DATA_AXES, Mesh
from gssim.plan.methods import METHODS, SHARDED
from gssim.plan.plan import DDP_FIRST_BUCKET_BYTES, Plan, default_plan
from gssim.units import Precision

RUNS_TODAY = frozenset(
    {
        ("replicated", "local", "replicated"),
        ("replicated", "all-reduce", "replicated"),
        ("replicated", "all-reduce", "sharded"),
        ("gathered", "reduce-scatter", "sharded"),
        ("sharded", "reduce-scatter", "sharded"),
        ("replicated", "periodic", "replicated"),
        ("replicated", "push", "sharded"),
        ("gathered", "push", "sharded"),
        ("sharded", "push", "sharded"),
    }
)
"""(parameters, gradients, optimizer_state) that can be simulated; what cannot run for real yet, `gsreal` refuses."""
DIVIDES_WEIGHT_GRADIENTS = frozenset({("replicated", "local", "sharded")})
"""Such combinations in which ranks divide the weight gradients of layers (`partition`)."""


@dataclass(frozen=True)
class Policies:
    """A plan with every policy resolved: the input of lowering and of the real backend."""

    partition: str
    parameters: str
    gradients: str
    gradient_sync: str
    optimizer_state: str
    dp_replicate: int
    dp_shard: int
    tp: int
    pp: int
    push_axis: str = "dp_shard"
    """The data axis along which gradients are pushed; along the other one they are reduce-scattered first."""
    slices: str = "even"
    """How the axis tp cuts blocks: `even`, natively where PyTorch can, or by the shard `shares`."""
    publish_overlaps: bool = False
    """Whether the next forward begins while published (or, under Megatron-LM's optimizer, gathered) parameters are in
    flight."""
    compress: Precision | None = None
    """16-bit format in which buckets of gradients are all-reduced; None: the workload's precision."""
    zero1_implementation: str = "torch"
    """The program whose ZeRO-1 it is, if gradients are all-reduced and optimizer states sharded; see `Plan`."""
    frees_gradients: bool = False
    """Whether all-reduced gradients are freed, except for those of the part that a rank updates (DeepSpeed)."""
    compressor: str | None = None
    """`powersgd` or `topk`: how buckets of gradients are compressed beyond their precision; None: not at all."""
    sync_every_steps: int | None = None
    """Steps from one synchronization of the parameters to the next; None: ranks' parameters are always equal."""
    outer_optimizer: Literal["nesterov", "sparse"] | None = None
    """What a synchronization does with the ranks' changes of the parameters; None: parameters are averaged instead."""
    in_fragments: bool = False
    """Whether a synchronization is cut in fragments, whose exchanges go on behind the steps that follow."""
    exchange: str = "backend"
    """`point-to-point` or `backend`."""
    ep: int = 1
    """Ranks in a row, of those that hold the same part of the model, that divide the experts of each layer."""
    etp: int | None = None
    """Ranks of a tensor group that divide each of these experts; None: all."""
    sequence_parallel: bool = False
    """Whether the ranks of the axis tp divide sequences among them between the cut parts of blocks."""
    cp: int = 1
    """Ranks that divide sequences among them."""
    ring: bool = False
    """Whether they attend to blocks of keys and values, as in a ring, and do not exchange heads."""
    gathers_keys: bool = False
    """Whether they gather the keys and values of all these blocks at once."""
    zigzag: bool = False
    """Whether they have the positions of the balanced division."""
    ring_overlaps: bool = False
    """Whether they attend to one of these blocks while they exchange keys, values and gradients of others."""

    @property
    def cuts_natively(self) -> bool:
        """Whether blocks of linear maps are cut by DTensor: evenly, with whole sequences, and without replicas.

        DistributedDataParallel, of a single replica too, and Gradient Sharding take no DTensors; replicas that
        synchronize periodically are cut as DDP's are, which is faster. With parts of sequences blocks are cut as they
        are with replicas.
        """
        replicas = self.gradients in ("push", "periodic", "all-reduce")
        whole = not self.sequence_parallel and self.cp == 1
        return self.tp > 1 and self.slices == "even" and whole and not replicas

    @property
    def point_to_point(self) -> bool:
        """Whether exchanges are made of point-to-point messages, not by the backend's collectives."""
        return self.exchange == "point-to-point"

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the parallel axes."""
        return Mesh(**{name: getattr(self, name) for name in (*AXES, "ep", "etp")})

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the mesh axes."""
        return self.mesh.ranks

    @property
    def data_ranks(self) -> int:
        """Number of parts into which the batch is divided: one, for all, where ranks divide the weight gradients."""
        return 1 if self.partition == "weight-gradient" else self.mesh.data_ranks

    @property
    def replica_ranks(self) -> int:
        """Number of ranks that reduce their gradients together: `cp` for each of the parts of the batch."""
        return self.data_ranks * self.cp

    @property
    def shards(self) -> int:
        """Number of ranks among which state is sharded, where it is: those of `dp_shard` and of `cp`."""
        return self.dp_shard * self.cp

    @property
    def shards_replicas(self) -> bool:
        """Whether replicas that synchronize periodically are sharded, each among several ranks."""
        return self.sync_every_steps is not None and self.dp_shard > 1

    @property
    def replica_size(self) -> int:
        """Number of ranks among which each replica is divided, where replicas synchronize periodically."""
        return self.dp_shard * self.tp

    @property
    def divides_replicas(self) -> bool:
        """Whether replicas that synchronize periodically are divided among ranks: sharded, or cut."""
        return self.sync_every_steps is not None and self.replica_size > 1

    def replica_of(self, rank: int) -> range:
        """Return the ranks among which the replica of a rank is divided, where replicas synchronize periodically.

        >>> resolve(Plan(method="diloco", dp_shard=2), devices=4).replica_of(3)
        range(2, 4)
        """
        first = rank - rank % self.replica_size
        return range(first, first + self.replica_size)

    def joins_replicas(self, group: Sequence[int]) -> bool:
        """Return whether sorted ranks are of several replicas that synchronize periodically."""
        return group[-1] not in self.replica_of(group[0])

    def data_rank(self, rank: int) -> int:
        """Return the index of the part of the batch that a rank trains on."""
        return 0 if self.partition == "weight-gradient" else self.mesh.data_rank(rank)


def usual_exchange(gradients: str, *, backend: str = "gloo") -> str:
    """Return the default exchange for a method's gradients, used where the plan does not set one.

    >>> usual_exchange("reduce-scatter"), usual_exchange("reduce-scatter", backend="nccl"), usual_exchange("all-reduce")
    ('point-to-point', 'backend', 'backend')
    """
    own = gradients == "push" or (gradients == "reduce-scatter" and backend == "gloo")
    return "point-to-point" if own else "backend"


def resolve(plan: Plan, *, devices: int, hosts: Sequence[str] = (), backend: str = "gloo") -> Policies:
    """Return the plan's policies on a cluster: the method's presets, overridden by what the user set.

    The axes together make `plan.ranks` ranks, or all `devices`; `single` makes one. The method's own axis, where the
    user does not size it, gets the ranks that the others leave; where it is sized, `dp_replicate` does, if the method
    can have replicas. Replicas that synchronize periodically are sharded as under `zero3` among several `dp_shard`.
    Methods of two levels put the devices of a host on one axis and the hosts on the other; `hosts`
    names each device's. Raises UserError where the axes do not make that number.
    """
    method = METHODS[plan.method]
    of_deepspeed = plan.method == "zero2" and plan.zero2_implementation == "deepspeed"
    if of_deepspeed:  # its stage 2 is its stage 1, with gradients that are reduced after every micro-batch
        method = replace(METHODS["zero1"], gradient_sync="micro-batch")
    in_replicas = SHARDED if method.sync_every_steps and (plan.dp_shard or 1) > 1 else {}
    policies: dict[str, Any] = {
        name: getattr(plan, name) or in_replicas.get(name) or getattr(method, name)
        for name in ("partition", "parameters", "gradients", "gradient_sync", "optimizer_state")
    }
    if plan.pp > 1 and plan.gradient_sync is None:  # torch's stages send gradients after the last micro-batch
        policies["gradient_sync"] = "step"
    policies["exchange"] = plan.exchange or usual_exchange(policies["gradients"], backend=backend)
    pushes = policies["gradients"] == "push" and policies["parameters"] == "replicated"
    axes = _axes(plan, devices, hosts)
    if of_deepspeed:  # it partitions over all data-parallel ranks, which count as replicas here
        axes |= {"dp_replicate": axes["dp_replicate"] * axes["dp_shard"], "dp_shard": 1}
    implementation = "deepspeed" if of_deepspeed else plan.zero1_implementation
    publishes = pushes or (policies["gradients"] == "all-reduce" and implementation == "megatron")
    ring = plan.cp > 1 and plan.context_exchange != "all-to-all"
    return Policies(
        **policies | axes,
        zero1_implementation=implementation,
        frees_gradients=implementation == "deepspeed",
        push_axis=method.push_axis,
        slices=method.slices,
        compress=plan.compress or method.compress,
        compressor=method.compressor,
        sync_every_steps=plan.sync_every_steps or method.sync_every_steps,
        outer_optimizer=method.outer_optimizer,
        in_fragments=method.in_fragments,
        publish_overlaps=publishes and plan.overlap and bool(plan.publish.overlap),
        sequence_parallel=plan.sequence_parallel,
        ep=plan.ep,
        etp=None if plan.ep == 1 or plan.etp == plan.tp else plan.etp,
        ring=ring,
        gathers_keys=ring and plan.context_exchange == "gather",
        zigzag=ring and plan.context_split == "zigzag",
        ring_overlaps=ring and plan.context_overlap,
    )


def _axes(plan: Plan, devices: int, hosts: Sequence[str]) -> dict[str, int]:
    """Return the sizes of all axes: those that the plan sets, and the method's own axis filled up with the rest."""
    if plan.ranks is not None and plan.ranks > devices:
        raise UserError(f"plan.ranks = {plan.ranks}: the cluster has {devices} devices; allowed: at most {devices}")
    axes = {
        "dp_replicate": plan.dp_replicate or 1,
        "dp_shard": plan.dp_shard or 1,
        "cp": plan.cp,
        "tp": plan.tp,
        "pp": plan.pp,
    }
    if plan.method == "single":
        if plan.ranks not in (None, 1):
            raise UserError(f"plan.ranks = {plan.ranks}: method 'single' takes one; allowed: 1, or leave it out")
        return axes
    ranks, sized = plan.ranks or devices, prod(axes.values())
    if sized > ranks:
        has = f"the cluster has {devices} devices" if plan.ranks is None else f"plan.ranks = {ranks}"
        raise UserError(f"{_sizes_of(plan, axes)}: needs {sized} ranks, but {has}")
    absent = _absent_axes(plan)
    if len(absent) > 1:
        return axes | _levels(plan, hosts[:ranks] or [""] * ranks)
    if sized == ranks:
        return axes
    if not absent or ranks % sized:
        raise _unfilled(plan, axes, ranks, absent)
    return axes | {absent[0]: ranks // sized}


def _absent_axes(plan: Plan) -> list[str]:
    """Return the axes that the plan leaves unsized and the remaining ranks fill: at most one, or two of a method with
    two levels, whose sizes follow from the hosts.
    """
    sized = _sized_axes(plan)
    method = METHODS[plan.method]
    if method.two_levels:
        return [name for name in DATA_AXES if name not in sized]
    # methods that shard state, or cut the model into slices or stages, can have replicas with all-reduced gradients
    replicates = (plan.gradients or method.gradients) in ("all-reduce", "reduce-scatter")
    return [name for name in (method.axis, *(["dp_replicate"] if replicates else [])) if name not in sized][:1]


def _sized_axes(plan: Plan) -> list[str]:
    unsized = default_plan(plan.method)
    return [name for name in AXES if getattr(plan, name) != getattr(unsized, name)]


def _sizes_of(plan: Plan, axes: Mapping[str, int]) -> str:
    """Return the axes that the plan sets, as a product."""
    return " * ".join(f"plan.{name} = {axes[name]}" for name in _sized_axes(plan))


def _unfilled(plan: Plan, axes: dict[str, int], ranks: int, absent: Sequence[str]) -> UserError:
    """Return the error for axes whose sizes neither make nor divide the number of ranks."""
    made, given = prod(axes.values()), _sizes_of(plan, axes)
    of = f"the {ranks} devices of the cluster" if plan.ranks is None else f"plan.ranks = {ranks}"
    fewer = f"plan.ranks = {ranks - ranks % made if absent else made}, which leaves the other devices out"
    if absent:
        return UserError(
            f"{given}: does not divide {of}, the rest of which plan.{absent[0]} takes; allowed: a product that divides "
            f"{ranks}, or {fewer}"
        )
    return UserError(f"{given}: makes {made} of {of}; allowed: {_fuller(plan, axes, ranks)}, or {fewer}")


def _fuller(plan: Plan, axes: dict[str, int], ranks: int) -> str:
    """Return the allowed alternatives that size the axes so that no device is left out."""
    times, rest = divmod(ranks, prod(axes.values()))
    if rest:
        return f"a product of {ranks}"
    own = METHODS[plan.method].axis
    ways = [f"plan.{own} = {times * axes[own]}"]
    if own in ("tp", "pp"):
        ways.append("method 'ddp' or 'zero1' for replicas")
    return ", ".join(ways)


def _levels(plan: Plan, hosts: Sequence[str]) -> dict[str, int]:
    """Return the sizes of the axes inside hosts and across them; `hosts`: the host of every rank."""
    runs = [len(list(devices)) for _, devices in groupby(hosts)]
    if len(set(runs)) > 1 or len(runs) > len(set(hosts)):
        raise UserError(
            f"plan.method = '{plan.method}': hosts have {', '.join(map(str, runs))} devices one after another; "
            "set plan.dp_replicate or plan.dp_shard"
        )
    inside, rest = divmod(runs[0], plan.cp * plan.tp)
    if rest or len(runs) % plan.pp:
        cut = f"plan.tp = {plan.tp}" if plan.cp == 1 else f"plan.cp * plan.tp = {plan.cp * plan.tp}"
        axis = cut if rest else f"plan.pp = {plan.pp}"
        of = f"the {runs[0]} devices of a host" if rest else f"the {len(runs)} hosts"
        raise UserError(
            f"{axis}: does not divide {of}, on which method '{plan.method}' has its axes; allowed: a divisor, or set "
            "plan.dp_replicate or plan.dp_shard"
        )
    return {"dp_replicate": len(runs) // plan.pp, "dp_shard": inside}


def refuse_what_cannot_run(plan: Plan, policies: Policies, *, file: str) -> None:
    """Raise UserError for a combination of policies that is not implemented; nothing is ignored silently."""
    _refuse_combination(plan, policies, file)
    _refuse_freed_gradients(plan, policies, file)
    if policies.compress:
        _refuse_compression(plan, policies, file)
    _refuse_compressor(plan, policies, file)
    _refuse_periods(plan, policies, file)
    if policies.ep > 1:
        _refuse_divided_experts(plan, policies, file)
    elif plan.etp not in (None, policies.tp):
        raise UserError(f"{file}: plan.etp = {plan.etp}: no experts are divided (plan.ep = 1); leave it out")
    if policies.parameters != "replicated" and policies.push_axis == "dp_replicate":
        raise UserError(
            f"{file}: plan.parameters = '{policies.parameters}': cannot run yet with method '{plan.method}'; "
            "allowed today: 'replicated'"
        )
    plain = policies.parameters == "replicated" and policies.push_axis == "dp_shard"
    if policies.gradients == "push" and not plain and not policies.point_to_point:
        raise UserError(
            f"{file}: plan.exchange = '{policies.exchange}': cannot run yet with method '{plan.method}'; "
            "allowed today: 'point-to-point'"
        )
    if policies.gradients == "all-reduce" and plan.first_bucket_bytes != DDP_FIRST_BUCKET_BYTES:
        raise UserError(
            f"{file}: plan.first_bucket_bytes = {plan.first_bucket_bytes!r}: cannot run yet; "
            f"allowed today: {DDP_FIRST_BUCKET_BYTES}"
        )


def _refuse_combination(plan: Plan, policies: Policies, file: str) -> None:
    combination = (policies.parameters, policies.gradients, policies.optimizer_state)
    divides = policies.partition == "weight-gradient"
    if combination not in (DIVIDES_WEIGHT_GRADIENTS if divides else RUNS_TODAY):
        names = ("parameters", "gradients", "optimizer_state")
        chosen = ", ".join(f"{name} = '{value}'" for name, value in zip(names, combination, strict=True))
        raise UserError(
            f"{file}: plan.method = '{plan.method}': cannot run yet with {chosen}; allowed today: "
            "what a method sets itself; `gssim support` lists the methods"
        )
    if policies.tp > 1 and divides:
        raise UserError(
            f"{file}: plan.tp = {policies.tp}: cannot run yet beside plan.partition = 'weight-gradient'; "
            "allowed today: 1"
        )


def _refuse_freed_gradients(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse DeepSpeed's ZeRO-2 for other methods, and what it cannot be combined with."""
    where = f"{file}: plan.zero2_implementation = '{plan.zero2_implementation}'"
    if plan.zero2_implementation == "torch":
        return
    if plan.method != "zero2":
        raise UserError(f"{where}: method '{plan.method}' is not 'zero2'; leave it out")
    if plan.zero1_implementation != "torch":
        raise UserError(
            f"{where}: plan.zero1_implementation = '{plan.zero1_implementation}' is for 'zero1'; leave one of them out"
        )
    if policies.optimizer_state != "sharded":
        raise UserError(
            f"{where}: plan.optimizer_state = '{policies.optimizer_state}': each rank updates a part; allowed: "
            "'sharded'"
        )
    for axis, why in (("pp", "DeepSpeed's pipelines take no ZeRO-2"), ("ep", "it cannot run yet beside that")):
        if getattr(policies, axis) > 1:
            raise UserError(f"{where}: plan.{axis} = {getattr(policies, axis)}: {why}; allowed: 1, or 'torch'")
    if policies.gradient_sync != "micro-batch":
        raise UserError(
            f"{where}: plan.gradient_sync = '{policies.gradient_sync}': gradients are freed after every micro-batch; "
            "allowed: 'micro-batch', or leave it out"
        )


def _refuse_divided_experts(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse expert parallelism that does not divide the data ranks, or beside policies that it cannot run with yet."""
    where = f"{file}: plan.ep = {policies.ep}"
    # one tensor group has nobody to reduce gradients with, and its ranks may divide experts
    alone = policies.gradients == "local" and policies.etp is not None
    replicated = policies.gradients == "all-reduce" or alone
    pushes = policies.gradients == "push"
    if policies.sync_every_steps or (not replicated and not pushes and policies.gradients != "reduce-scatter"):
        hint = _or_among_tensor_ranks(policies) if policies.gradients == "local" else ""
        raise UserError(
            f"{where}: cannot run yet with method '{plan.method}'; allowed today: methods that all-reduce, "
            f"reduce-scatter or push gradients (ddp, zero1, zero2, zero3, fsdp, hsdp, gs, gs_z3, gs_hier){hint}"
        )
    if pushes and plan.shares.shards in ("memory", "cost"):
        raise UserError(
            f"{where}: plan.shares.shards = '{plan.shares.shards}': what ranks that divide experts own is not weighed "
            "yet; allowed: 'even', 'compute', or shares"
        )
    if pushes and not policies.point_to_point and plan.shares.shards != "even":
        raise UserError(
            f"{where}: plan.exchange = 'backend': cannot run yet with shards that are not even (plan.shares.shards); "
            "allowed: 'point-to-point'"
        )
    if plan.zero1_implementation == "deepspeed":
        raise UserError(
            f"{where}: cannot run yet with plan.zero1_implementation = 'deepspeed': its buffers of gradients of "
            "experts, which are reduced over fewer ranks, are not modelled; allowed: 'torch', 'megatron'"
        )
    _refuse_expert_axes(plan, policies, file, replicated=replicated)
    if not replicated and not pushes and policies.shards % policies.mesh.expert_stride:
        ranks = policies.shards if policies.etp is None else policies.shards * policies.tp // policies.etp
        raise UserError(
            f"{where}: experts are divided among the ranks that shard a replica, of which there are {ranks}; "
            "allowed: a divisor of these"
        )
    if replicated and plan.gradient_sync == "micro-batch":
        raise UserError(f"{where}: cannot run yet with plan.gradient_sync = 'micro-batch'; allowed today: 'step'")
    if plan.shares.replan:
        raise UserError(f"{where}: plan.shares.replan = True: ranks that divide experts need as many samples each")


def _or_among_tensor_ranks(policies: Policies) -> str:
    return ", or plan.etp = 1: among tensor ranks too" if policies.tp > 1 and policies.etp is None else ""


def _refuse_expert_axes(plan: Plan, policies: Policies, file: str, *, replicated: bool) -> None:
    """Refuse axes that experts cannot be divided on; `replicated`: whether gradients are, after they are reduced."""
    where = f"{file}: plan.ep = {policies.ep}"
    replicas = policies.replica_ranks
    if policies.etp is None and replicas % policies.ep:
        of = "data ranks" if policies.cp == 1 else "data ranks and their parts of sequences (plan.cp)"
        raise UserError(
            f"{where}: experts are divided among {of} in a row, of which there are {replicas}; allowed: a divisor of "
            f"these{_or_among_tensor_ranks(policies)}"
        )
    if policies.etp is not None:
        divided, ranks = policies.etp * policies.ep, policies.tp * replicas
        if policies.tp % policies.etp:
            raise UserError(
                f"{file}: plan.etp = {policies.etp}: must divide plan.tp = {policies.tp}; allowed: a divisor"
            )
        if ranks % divided or divided % policies.tp:
            least = policies.tp // policies.etp
            sizes = [str(ep) for ep in range(least, ranks + 1, least) if ranks % (policies.etp * ep) == 0]
            raise UserError(
                f"{file}: plan.etp = {policies.etp}: times {policies.ep} (plan.ep) must be a multiple of plan.tp = "
                f"{policies.tp}, and a divisor of the {ranks} ranks of tensor groups and data; allowed: plan.ep = "
                f"{' or '.join(sizes)}"
            )
    flat = plan.zero1_implementation == "megatron" or policies.optimizer_state == "replicated"
    if policies.tp > 1 and policies.etp != 1 and not (replicated and flat):
        raise UserError(
            f"{where}: cannot run yet with plan.tp = {policies.tp} and method '{plan.method}'; allowed today: 'ddp', "
            "'zero1' with plan.zero1_implementation = 'megatron', or plan.etp = 1"
        )
    if policies.tp > 1 and policies.cp > 1 and policies.etp != 1:
        raise UserError(
            f"{where}: cannot run yet with plan.cp = {policies.cp} beside plan.tp = {policies.tp}: layers with divided "
            "experts that are cut too are not known on parts of sequences; allowed today: 1 for one of these, or "
            "plan.etp = 1"
        )


def _refuse_periods(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse options of periodic synchronization where there is none, and what cannot be combined with it yet."""
    periodic = [name for name, method in METHODS.items() if method.sync_every_steps]
    is_periodic = plan.method in periodic
    own = SHARDED["gradients"] if policies.shards_replicas else "periodic"
    if (policies.gradients != own) if is_periodic else (policies.gradients == "periodic"):
        raise UserError(
            f"{file}: plan.gradients = '{policies.gradients}': cannot run with method '{plan.method}'; allowed: "
            f"'periodic' with {', '.join(periodic)} and only there, or 'reduce-scatter' where these shard replicas "
            "(plan.dp_shard)"
        )
    for key, kind in (("outer", "nesterov"), ("sparse_outer", "sparse")):
        if getattr(plan, key) != getattr(default_plan(plan.method), key) and policies.outer_optimizer != kind:
            outer = [name for name, method in METHODS.items() if method.outer_optimizer == kind]
            raise UserError(
                f"{file}: plan.{key}: method '{plan.method}' has no such outer optimizer; allowed with "
                f"{', '.join(outer)}"
            )
    _refuse_fragments(plan, policies, file)
    chosen = plan.sparse_outer
    if chosen.chunk_entries > chosen.chunk_elements:
        raise UserError(
            f"{file}: plan.sparse_outer.chunk_entries = {chosen.chunk_entries}: a chunk has "
            f"{chosen.chunk_elements} elements (plan.sparse_outer.chunk_elements); allowed: at most so many"
        )
    if not is_periodic:
        if plan.sync_every_steps is not None:
            raise UserError(
                f"{file}: plan.sync_every_steps = {plan.sync_every_steps}: method '{plan.method}' synchronizes in "
                f"every step; allowed with {', '.join(periodic)}"
            )
        return
    _refuse_divided_replicas(plan, policies, file)
    if plan.shares.replan:
        raise UserError(
            f"{file}: plan.shares.replan = True: ranks of method '{plan.method}' do not meet in every step; "
            "allowed: false"
        )


def _refuse_divided_replicas(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse pp, cp and tp inside of replicas that synchronize periodically, where they cannot be combined yet."""
    for axis in ("pp", "cp"):
        if getattr(policies, axis) > 1:
            raise UserError(
                f"{file}: plan.{axis} = {getattr(policies, axis)}: cannot run yet with method '{plan.method}'; "
                "allowed today: 1"
            )
    rounds = policies.outer_optimizer == "sparse" or (policies.outer_optimizer and plan.outer.precision == "int8")
    if policies.tp > 1 and rounds:
        raise UserError(
            f"{file}: plan.tp = {policies.tp}: method '{plan.method}' rounds changes in blocks of a rank's own slices, "
            "so that copies of what is not cut would differ; allowed: local_sgd, or diloco and streaming_diloco with "
            "plan.outer.precision = 'fp32'"
        )


def _refuse_fragments(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse fragments where there are none, or whose synchronizations do not follow one another in a period."""
    every, streaming = policies.sync_every_steps or 1, plan.streaming
    if not policies.in_fragments:
        if streaming != default_plan(plan.method).streaming:
            names = ", ".join(name for name, method in METHODS.items() if method.in_fragments)
            raise UserError(
                f"{file}: plan.streaming: method '{plan.method}' synchronizes no fragments; allowed with {names}"
            )
        return
    if streaming.fragments > every:
        raise UserError(
            f"{file}: plan.streaming.fragments = {streaming.fragments}: each is synchronized in a step of its own, and "
            f"a period has {every} steps (plan.sync_every_steps); allowed: at most {every}"
        )
    apart = every // streaming.fragments
    if streaming.delay_steps >= apart:
        raise UserError(
            f"{file}: plan.streaming.delay_steps = {streaming.delay_steps}: {streaming.fragments} fragments are "
            f"synchronized in {every} steps (plan.sync_every_steps), one begins after the one before has ended; "
            f"allowed: less than {apart}"
        )
    if streaming.delay_steps and not plan.overlap:
        raise UserError(
            f"{file}: plan.overlap = False: exchanges go on behind {streaming.delay_steps} steps "
            "(plan.streaming.delay_steps); allowed: true, or no such steps"
        )


def _refuse_compressor(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse options of compressors where there are none, and what cannot be combined with them yet."""
    kind, usual = policies.compressor, default_plan(plan.method)
    for name in ("powersgd", "topk"):
        if getattr(plan, name) != getattr(usual, name) and kind != name:
            methods = [each.name for each in METHODS.values() if each.compressor == name]
            raise UserError(
                f"{file}: plan.{name}: method '{plan.method}' does not compress gradients so; allowed with "
                f"{', '.join(methods)}"
            )
    if kind is None:
        return
    with_method = f"with method '{plan.method}'"
    if policies.gradients != "all-reduce":
        raise UserError(
            f"{file}: plan.gradients = '{policies.gradients}': cannot run {with_method}; allowed: 'all-reduce'"
        )
    if plan.compress:
        raise UserError(f"{file}: plan.compress = '{plan.compress}': cannot run yet {with_method}; leave it out")
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(policies, axis) > 1:
            raise UserError(
                f"{file}: plan.{axis} = {getattr(policies, axis)}: cannot run yet {with_method}; allowed today: 1"
            )
    if policies.gradient_sync == "micro-batch" and plan.micro_batches > 1:
        raise UserError(
            f"{file}: plan.gradient_sync = 'micro-batch': cannot run {with_method}: gradients that are summed already "
            "would be compressed again; allowed: 'step'"
        )
    if policies.zero1_implementation != "torch":
        raise UserError(
            f"{file}: {plan.zero_implementation_key} = '{policies.zero1_implementation}': cannot run yet "
            f"{with_method}; allowed: 'torch'"
        )


def _refuse_compression(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse compressed all-reduces of gradients where no buckets are all-reduced, and what cannot be combined yet."""
    asked = f"plan.compress = '{plan.compress}'" if plan.compress else f"plan.method = '{plan.method}'"
    if policies.gradients != "all-reduce":
        names = [name for name, method in METHODS.items() if method.gradients == "all-reduce"]
        raise UserError(
            f"{file}: {asked}: with method '{plan.method}' and gradients = '{policies.gradients}' no buckets are "
            f"all-reduced; allowed with {', '.join(names)}"
        )
    if policies.pp > 1:
        raise UserError(
            f"{file}: {asked}: gradients of a pipeline's replicas cannot be compressed yet; allowed with plan.pp = 1"
        )
    if policies.zero1_implementation != "torch":
        raise UserError(
            f"{file}: {asked}: cannot run yet with {plan.zero_implementation_key} = "
            f"'{policies.zero1_implementation}'; allowed with 'torch'"
        )
