"""Checks of how gradients and parameters are exchanged and owned: pushes, thresholds, shares, periods, offload."""

from dataclasses import replace

from gssim.cluster import memory_node
from gssim.errors import UserError
from gssim.plan import Plan, Policies, Push, default_plan
from gssim.plan.encodings import MOST_INDEXED, coo_range_error
from gssim.scenario.scenario import Scenario
from gssim.units import counted, shown_value
from gssim.workload import ImageInput, unrolled
from gssim.workload.owned import unchained


def check_offload(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse state in hosts' memory where the method has none of its kind, or nothing is known about the hosts."""
    plan, cluster = scenario.plan, scenario.cluster
    if plan.offload is None:
        return
    where = f"{file}: plan.offload = '{plan.offload}'"
    runs = ("reduce-scatter",) if plan.offload == "parameters" else ("local", "all-reduce", "reduce-scatter")
    if policies.gradients not in runs or policies.partition != "data" or policies.sync_every_steps:
        allowed = "zero2, zero3 (fsdp) and hsdp" + ("" if plan.offload == "parameters" else ", single, ddp and zero1")
        raise UserError(f"{where}: cannot run with method '{plan.method}'; allowed: {allowed}")
    for axis in ("pp", "ep"):
        in_stages = axis == "pp" and plan.offload == "optimizer" and policies.gradients != "reduce-scatter"
        if getattr(policies, axis) > 1 and not in_stages:
            raise UserError(f"{where}: cannot run yet with plan.{axis} = {getattr(policies, axis)}; allowed today: 1")
    if plan.shares.replan:
        raise UserError(f"{where}: cannot run yet with plan.shares.replan = True; allowed: false")
    devices = cluster.devices[: policies.ranks]
    kinds = {cluster.device_types[device.type].kind for device in devices}
    if kinds == {"cpu"} and plan.offload == "parameters":
        return
    if kinds != {"cuda"}:
        raise UserError(
            f"{where}: a device of kind {sorted(kinds - {'cuda'})[0]!r} has no host with memory of its own that torch "
            "could copy to; allowed on devices of kind 'cuda' alone"
        )
    if cluster.host is None:
        raise UserError(f"{where}: cluster.host: needed: how much the hosts' memory holds, and how fast it is")
    nodes = set(cluster.wiring.names)
    absent = next((device.host for device in devices if memory_node(device.host) not in nodes), None)
    if absent is not None:
        raise UserError(
            f"{where}: the cluster has no node {memory_node(absent)!r} to which state could be copied; set host_memory "
            "and pcie_link of its servers, or link its devices to a switch of this name"
        )


def check_compressor(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse runs that begin before gradients are compressed, and gradients that are scaled or summed otherwise."""
    if policies.compressor is None:
        return
    plan, workload, run = scenario.plan, scenario.workload, scenario.run
    method = f"method '{plan.method}'"
    start = getattr(plan, policies.compressor).start_step
    if run.warmup_steps < start:
        raise UserError(
            f"{file}: run.warmup_steps = {run.warmup_steps}: {method} compresses gradients from step {start} on "
            f"(plan.{policies.compressor}.start_step), and all steps that count are of one kind; allowed: at least "
            f"{start}"
        )
    for key, others in (
        ("reduce_precision", (None, workload.precision)),
        ("gradient_precision", (None, workload.precision)),
        ("loss_scale", (None,)),
    ):
        value = getattr(workload, key)
        if value not in others:
            raise UserError(f"{file}: workload.{key} = {value!r}: cannot run yet with {method}; leave it out")


def check_periods(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse runs that end before the first synchronization of the parameters, and ranks that have nothing to add."""
    every, run = policies.sync_every_steps, scenario.run
    if every is None:
        return
    method = f"method '{scenario.plan.method}'"
    if run.steps < every:
        raise UserError(
            f"{file}: run.steps = {run.steps}: fewer than the {every} steps of {method} from one synchronization to "
            f"the next (plan.sync_every_steps); allowed: at least {every}"
        )
    if run.extrapolate_micro_batches:
        raise UserError(f"{file}: run.extrapolate_micro_batches = True: cannot run yet with {method}; allowed: false")
    layers = sum(bool(each.layer.parameters) for each in unrolled(scenario.workload.model))
    if policies.in_fragments and scenario.plan.streaming.fragments > layers:
        raise UserError(
            f"{file}: plan.streaming.fragments = {scenario.plan.streaming.fragments}: the model has {layers} layers "
            f"with parameters, none of which is cut; allowed: at most {layers}"
        )
    if min(scenario.batch_sizes) == 0:
        raise UserError(
            f"{file}: plan.shares.batch: rank {scenario.batch_sizes.index(0)} has no samples, and {method} averages "
            "what every rank has learned; give each rank at least one"
        )


def check_exchange(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse point-to-point exchanges where a method has none, or the backend's rings are as good."""
    plan, backend = scenario.plan, scenario.cluster.backend
    two_levels = policies.push_axis == "dp_replicate" or policies.parameters != "replicated"
    if plan.exchange == "backend" and policies.gradients == "push" and two_levels:
        raise UserError(
            f"{file}: plan.exchange = 'backend': cannot run yet with method '{plan.method}'; allowed: 'point-to-point'"
        )
    if plan.exchange != "point-to-point":
        return
    asked = f"{file}: plan.exchange = 'point-to-point'"
    if policies.gradients not in ("reduce-scatter", "push"):
        raise UserError(f"{asked}: method '{plan.method}' has no exchange of its own; allowed: 'backend'")
    if policies.gradients == "reduce-scatter" and backend == "nccl":
        raise UserError(f"{asked}: nccl's own collectives are rings already; allowed with nccl: 'backend'")


def check_push(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse settings of pushes where nothing is pushed, and shards that are too long for the indices of COO."""
    plan, push = scenario.plan, scenario.plan.push
    if policies.gradients == "push":
        _check_threshold(scenario, file)
        # COO's indices cannot address shards that are too long, judged by the largest tensor
        tensors = (each.elements for layer in scenario.workload.model.layers for each in layer.parameters)
        largest = max(tensors, default=0)
        for name, table in (("push", push), ("publish", plan.publish)):
            if table.selects and table.encoding == "coo" and largest > MOST_INDEXED:
                elements = largest * max(scenario.shard_shares)
                if elements > MOST_INDEXED:
                    raise UserError(f"{file}: plan.{name}.{coo_range_error(elements)}")
        return
    default = default_plan(plan.method).push
    for key in ("threshold", *NEED_A_THRESHOLD, "encoding"):
        value = getattr(push, key)
        if value != getattr(default, key):
            raise UserError(
                f"{file}: plan.push.{key} = {value!r}: method '{plan.method}' pushes no gradients; "
                "allowed with gs, gs_z3, gs_hier"
            )


def check_publish(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse thresholds and overlap where parameters are not published by bucket, or not by point-to-point messages."""
    method, rules = scenario.plan.method, scenario.plan.publish
    if rules.overlap and policies.gradients == "all-reduce" and policies.zero1_implementation == "megatron":
        _check_gathers_beside_forward(scenario, file)
        rules = replace(rules, overlap=None)
    publishes = policies.gradients == "push" and policies.parameters == "replicated"
    for key in ("threshold", "overlap"):
        value = getattr(rules, key)
        if value is None or value is False:
            continue
        where = f"{file}: plan.publish.{key}"
        if policies.partition == "weight-gradient":
            where += f" = {str(value).lower()}"
            raise UserError(f"{where}: cannot run yet with method '{method}'; allowed today: gs, gs_hier")
        if not publishes:
            own = ", or zero1 with plan.zero1_implementation = 'megatron'" if key == "overlap" else ""
            raise UserError(f"{where}: method '{method}' publishes no parameters; allowed with gs, gs_hier{own}")
    if rules.threshold is not None and not policies.point_to_point:
        raise UserError(
            f"{file}: plan.publish.threshold: the backend's broadcasts cannot carry messages of sizes that depend on "
            "the data yet; allowed with plan.exchange = 'point-to-point'"
        )
    where = f"{file}: plan.publish.overlap = true"
    if rules.overlap and not scenario.plan.overlap:
        raise UserError(f"{where}: plan.overlap = false; allowed: false, or leave it out")
    plain = policies.push_axis == "dp_shard" and policies.point_to_point
    if rules.overlap and scenario.cluster.backend == "gloo" and not plain:
        raise UserError(
            f"{where}: cannot run on gloo with method '{method}' and exchange '{policies.exchange}': only messages "
            "that no rank forwards make progress in the background; allowed: gs with point-to-point"
        )


def _check_gathers_beside_forward(scenario: Scenario, file: str) -> None:
    """Refuse gathers of Megatron-LM's distributed optimizer beside the next forward where they are not modelled."""
    where = f"{file}: plan.publish.overlap = true"
    if not scenario.plan.overlap:
        raise UserError(f"{where}: plan.overlap = false; allowed: false, or leave it out")
    if scenario.cluster.backend != "nccl":
        raise UserError(f"{where}: Megatron-LM's optimizer gathers so with the backend 'nccl' alone; leave it out")
    if scenario.workload.optimizer == "muon":
        why = "ranks own whole matrices, not parts of buckets"
        raise UserError(f"{where}: cannot run yet with workload.optimizer = 'muon': {why}; leave it out")


NEED_A_THRESHOLD = (
    "kind",
    "error_feedback",
    "error_feedback_precision",
    "aggregate",
    "warmup_steps",
    "reestimate_steps",
)


def _check_threshold(scenario: Scenario, file: str) -> None:
    """Refuse options of thresholded pushes where they have no effect."""
    push, default, run = scenario.plan.push, Push(), scenario.run
    set_here = [key for key in NEED_A_THRESHOLD if getattr(push, key) != getattr(default, key)]
    if push.threshold is None:
        if set_here and push.error_feedback is not False:
            key = set_here[0]
            raise UserError(
                f"{file}: plan.push.{key} = {getattr(push, key)!r}: has no effect without plan.push.threshold"
            )
        return
    if push.kind == "target-density" and not 0 < push.threshold <= 1:
        raise UserError(
            f"{file}: plan.push.threshold = {push.threshold:g}: with plan.push.kind = 'target-density' it is the "
            "fraction to be sent; allowed: more than 0, at most 1"
        )
    if push.kind != "target-density" and push.reestimate_steps != default.reestimate_steps:
        raise UserError(
            f"{file}: plan.push.reestimate_steps = {push.reestimate_steps}: plan.push.kind = '{push.kind}' estimates "
            "no threshold; allowed with 'target-density'"
        )
    if push.error_feedback_precision != default.error_feedback_precision and not scenario.push.error_feedback:
        raise UserError(
            f"{file}: plan.push.error_feedback_precision = '{push.error_feedback_precision}': there is no residual; "
            "set plan.push.error_feedback = true"
        )
    if push.warmup_steps >= run.warmup_steps + run.steps:
        raise UserError(
            f"{file}: plan.push.warmup_steps = {push.warmup_steps}: the run has only {run.warmup_steps + run.steps} "
            "steps (run.warmup_steps + run.steps), and none would be thresholded"
        )


def check_shares(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse shares of batches, shards or slices that are not one for each rank, or that the method cannot use."""
    rules = scenario.plan.shares
    cuts_unevenly = policies.slices == "shares"
    shards_unevenly = policies.gradients == "push" or policies.partition == "weight-gradient" or cuts_unevenly
    if rules.shards != "even" and not shards_unevenly:
        raise UserError(
            f"{file}: plan.shares.shards = {shown_value(rules.shards)}: method '{scenario.plan.method}' "
            "cannot shard unevenly; allowed: 'even'"
        )
    owners = policies.tp if cuts_unevenly else policies.mesh.replica_ranks
    for name, wanted, ranks in (("batch", rules.batch, policies.data_ranks), ("shards", rules.shards, owners)):
        if isinstance(wanted, str):
            continue
        if len(wanted) != ranks:
            raise UserError(f"{file}: plan.shares.{name}: {len(wanted)} shares for {ranks} ranks; give one per rank")
        if abs(sum(wanted) - 1) > 1e-6:
            raise UserError(f"{file}: plan.shares.{name} = {list(wanted)}: sums to {sum(wanted):.6g}, must sum to 1")
    _check_batch(scenario, policies.data_ranks, file)
    if rules.shards in ("memory", "cost"):
        _check_owners(scenario, policies, file)
    micro_batches = scenario.plan.micro_batches
    try:
        sizes = scenario.data_batch_sizes if micro_batches > 1 else ()
    except UserError as error:  # the rate of a device is not known
        raise UserError(f"{file}: {error}") from None
    for rank, samples in enumerate(sizes):
        if samples < micro_batches:
            raise UserError(
                f"{file}: plan.micro_batches = {micro_batches}: rank {rank} has {counted(samples, 'sample')}; "
                "allowed: at most one micro-batch for each sample"
            )


def _check_owners(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse shards by memory or cost unless all ranks are owners that are pushed to directly, and the state fits."""
    wanted = scenario.plan.shares.shards
    one_level = policies.push_axis == "dp_shard"
    if policies.gradients != "push" or policies.tp > 1 or not (one_level or wanted == "memory"):
        raise UserError(
            f"{file}: plan.shares.shards = {shown_value(wanted)}: cannot run yet with method '{scenario.plan.method}' "
            f"and plan.tp = {policies.tp}; allowed today: even, compute, or one share per rank (memory: gs, gs_z3, "
            "gs_hier; cost: gs, gs_z3)"
        )
    try:
        _ = scenario.shard_shares
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def refuse_unused_exchange(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse options of context parallelism where there is none."""
    default = default_plan(plan.method)
    for key in ("context_exchange", "context_split", "context_overlap") if policies.cp == 1 else ():
        if (value := getattr(plan, key)) != getattr(default, key):
            raise UserError(
                f"{file}: plan.{key} = {repr(value).lower()}: there are no context-parallel ranks; set plan.cp, or "
                "leave it out"
            )


def _check_batch(scenario: Scenario, ranks: int, file: str) -> None:
    wanted, total = scenario.plan.shares.batch, scenario.workload.global_batch_size
    if wanted == "even" and total % ranks:
        raise UserError(
            f"{file}: workload.global_batch_size = {total}: cannot be divided evenly among {ranks} ranks; "
            "set plan.shares.batch or another size"
        )
    shares = wanted if isinstance(wanted, tuple) else ()
    broken = [share for share in shares if abs(share * total - round(share * total)) > 1e-6]
    if broken:
        raise UserError(
            f"{file}: plan.shares.batch = {list(shares)}: {broken[0]} of global_batch_size = {total} "
            "is no whole number of samples"
        )


def check_scalars(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse scalar parameters where FSDP2 shards: it splits every parameter along its first dimension."""
    if policies.gradients != "reduce-scatter" or scenario.plan.zero2_implementation != "torch":
        return
    layers = unrolled(scenario.workload.model)
    every = (pair for each in layers for pair in zip(each.parameter_names, each.layer.parameters, strict=True))
    named = (name for name, parameter in every if parameter.shape == ())
    if (name := next(named, None)) is not None:
        raise UserError(
            f"{file}: workload.model: '{scenario.workload.model.name}' cannot run with method "
            f"'{scenario.plan.method}': FSDP2 cannot shard a scalar such as {name}; allowed: a model in which its "
            "shape is (1,), or a method without FSDP2, such as ddp"
        )


def check_weight_gradient_owners(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse options that cannot be combined with weight gradients divided among ranks by layers."""
    rules, model = scenario.plan.shares, scenario.workload.model
    if scenario.workload.fused_loss:
        raise UserError(
            f"{file}: workload.fused_loss = true: cannot run with method '{scenario.plan.method}', under which owners "
            "compute weight gradients: one kernel makes those of the head's weight and input; leave it out"
        )
    if rules.batch != "even":
        raise UserError(
            f"{file}: plan.shares.batch = {shown_value(rules.batch)}: method '{scenario.plan.method}' "
            "runs the whole batch on every rank; leave it out"
        )
    if scenario.plan.recompute == "full" and isinstance(model.input, ImageInput):
        raise UserError(
            f"{file}: plan.recompute = 'full': cannot run yet with method '{scenario.plan.method}' and a model of "
            "images: which workspace convolutions take in the backward of a checkpointed block, below which nothing is "
            "trained, is not measured; allowed: none, selective"
        )
    if any(layer.untrained_buffers is None for layer in model.layers):
        why = unchained([instance.layer for instance in unrolled(model)], side_modules=False)
        raise UserError(
            f"{file}: workload.model: '{model.name}' cannot run yet with method '{scenario.plan.method}', whose ranks "
            f"train only some layers: {why}; allowed: other methods"
            if why is not None
            else f"{file}: workload.model: the file of '{model.name}' lacks the costs of layers that a rank does not "
            f"train, which method '{scenario.plan.method}' needs; add them with `gsreal trace FILE --out NEW`, where "
            "FILE is the model's, and set workload.model to NEW"
        )
    owners = sum(layer.repeats for layer in model.layers if layer.elements)
    if policies.ranks > owners:
        raise UserError(
            f"{file}: plan: {policies.ranks} ranks for {owners} layers with parameters; each rank must own one"
        )
    if not isinstance(rules.shards, str) and min(rules.shards) == 0:
        raise UserError(f"{file}: plan.shares.shards = {list(rules.shards)}: each rank must own a layer; none may be 0")
