"""Consistency checks of a scenario: combinations of workload, plan and cluster that cannot run are refused."""

from dataclasses import replace

from gssim.cluster import applied, ends_of, memory_node
from gssim.errors import UserError
from gssim.plan import DATA_AXES, METHODS, Plan, Policies, Push, default_plan
from gssim.plan.encodings import MOST_INDEXED, coo_range_error
from gssim.plan.pipeline_schedule import refuse
from gssim.plan.policies import refuse_what_cannot_run
from gssim.scenario.context_slices import fused_attention, uncombined_reason
from gssim.scenario.device_rates import has_master_copy, layer_profile
from gssim.scenario.expert_load import divided_expert_layers, layer_rows, parts_routed_apart, routes_parts
from gssim.scenario.scenario import Scenario
from gssim.scenario.stages import schedule_of, stage_cut_error, tied_parameters
from gssim.scenario.vocabulary_slices import (
    shares_embedding,
    undivided_embedding_reason,
    undivided_loss_reason,
    units_of_ranks,
)
from gssim.units import excess
from gssim.workload import ImageInput, Model, TokenInput, Workload, unrolled
from gssim.workload.muon import all_matrices


def check(scenario: Scenario, *, file: str) -> None:
    """Raise UserError where workload, plan and cluster are inconsistent."""
    plan = scenario.plan
    try:
        policies = scenario.policies
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if not scenario.workload.model.layers:
        raise UserError(f"{file}: workload.model: has no layers; `gsreal trace` writes them")
    _check_traced_variants(scenario, policies, file)
    _check_compiled(scenario, policies, file)
    _check_sizes(scenario, file)
    _check_push(scenario, policies, file)
    refuse_what_cannot_run(plan, policies, file=file)
    _check_muon(scenario, policies, file)  # before shards are sized
    _check_optimizer_state(scenario.workload, file)
    _check_publish(scenario, policies, file)
    zero1 = (policies.gradients, policies.optimizer_state) == ("all-reduce", "sharded")
    if plan.zero1_implementation != "torch" and not zero1:
        raise UserError(
            f"{file}: plan.zero1_implementation = '{plan.zero1_implementation}': method '{plan.method}' is no ZeRO-1; "
            "allowed: method 'zero1', or leave it out"
        )
    _check_exchange(scenario, policies, file)
    _check_ranks(scenario, policies, file)
    _check_shares(scenario, policies, file)
    _check_pipeline(scenario, policies, file)
    _check_slices(scenario, policies, file)
    _check_sequence_parts(scenario, policies, file)
    _check_tensor_overlap(scenario, policies, file)
    _check_divided_vocabulary(scenario, policies, file)
    _check_experts(scenario, policies, file)
    _refuse_unused_exchange(plan, policies, file)
    _check_context(scenario, policies, file)
    _check_recompute(scenario, policies, file)
    kept_whole = policies.partition == "data" and policies.parameters == "replicated" and policies.gradients != "push"
    if scenario.workload.gradient_precision is not None and not kept_whole:
        raise UserError(
            f"{file}: workload.gradient_precision = '{scenario.workload.gradient_precision}': method '{plan.method}' "
            "keeps no whole gradients until the update; leave it out"
        )
    _check_maps(scenario, file)
    _check_reduction(scenario, policies, file)
    _check_loss_scale(scenario, policies, file)
    _check_clipping(scenario, policies, file)
    _check_periods(scenario, policies, file)
    if policies.partition == "weight-gradient":
        _check_weight_gradient_owners(scenario, policies, file)
    if scenario.network:
        try:
            ends_of(applied(scenario.cluster.wiring, scenario.network), scenario.network)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
    for number in range(len(scenario.run.slowdowns)):
        _check_slowdown(scenario, policies, number, file)
    _check_replanning(scenario, policies, file)
    _check_compressor(scenario, policies, file)
    _check_offload(scenario, policies, file)


def _check_offload(scenario: Scenario, policies: Policies, file: str) -> None:
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


def _check_optimizer_state(workload: Workload, file: str) -> None:
    """Refuse moments in few bits of what is no Adam, or is not updated by one kernel."""
    if workload.optimizer_state_precision is None:
        return
    where = f"{file}: workload.optimizer_state_precision = '{workload.optimizer_state_precision}'"
    if workload.optimizer not in ("adam", "adamw"):
        raise UserError(f"{where}: not for workload.optimizer = '{workload.optimizer}'; allowed: adam, adamw")
    if workload.optimizer_implementation != "fused":
        raise UserError(
            f"{where}: needs workload.optimizer_implementation = 'fused', not '{workload.optimizer_implementation}'"
        )


def _check_muon(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse Muon for models without matrices, and where ranks do not update whole ones."""
    workload, plan = scenario.workload, scenario.plan
    if workload.optimizer != "muon":
        return
    where = f"{file}: workload.optimizer = 'muon'"
    if not all_matrices(workload.model.layers, stacks=True):
        raise UserError(f"{where}: blocks of '{workload.model.name}' have no matrices that are trained; use another")
    whole = policies.parameters == "replicated" and policies.gradients in ("local", "all-reduce", "periodic")
    if policies.shards_replicas:
        raise UserError(
            f"{where}: it orthogonalises whole matrices, and plan.dp_shard = {policies.dp_shard} shards them; allowed "
            f"with method '{plan.method}': 1, or another optimizer"
        )
    if not whole or policies.partition != "data":
        names = [
            name
            for name, each in METHODS.items()
            if each.gradients in ("local", "all-reduce", "periodic") and each.partition == "data" and each.axis != "tp"
        ]
        raise UserError(
            f"{where}: it orthogonalises whole matrices, and method '{plan.method}' shards them; allowed: "
            f"{', '.join(names)}, or another optimizer"
        )
    refused: tuple[tuple[str, object, object], ...] = (
        ("plan.tp", policies.tp, 1),
        ("plan.offload", plan.offload, None),
        ("plan.zero1_implementation", plan.zero1_implementation, "megatron"),
    )
    for key, value, allowed in refused:
        if value not in (allowed, "torch"):
            hint = "leave it out" if allowed is None else f"allowed: {'torch, ' * (allowed == 'megatron')}{allowed}"
            why = "ranks hold parts of the matrices" if key != "plan.offload" else "AdamW alone updates on the host"
            raise UserError(f"{where}: cannot run yet with {key} = {value}: {why}; {hint}")


def _check_compressor(scenario: Scenario, policies: Policies, file: str) -> None:
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


def _check_traced_variants(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse adapters, autocast and frozen layers where plans divide the model's layers, or they do not run so."""
    workload, plan = scenario.workload, scenario.plan
    name = next((key for key in ("adapters", "autocast", "frozen") if getattr(workload, key) is not None), None)
    if name is None:
        return
    where, variant = f"{file}: workload.{name}", "frozen layers" if name == "frozen" else name
    traced = ("tp", "cp", "ep") if name == "adapters" else ()  # of such parts, layers with adapters are traced too
    for key, value in (("tp", policies.tp), ("cp", policies.cp), ("ep", policies.ep)):
        if value > 1 and key not in traced:
            raise UserError(
                f"{where}: cannot run yet beside plan.{key} = {value}: parts of the model are traced without "
                f"{variant}; leave one of them out"
            )
    runs = policies.partition == "data" and policies.sync_every_steps is None
    if name == "frozen":
        if not runs or policies.compressor:
            raise UserError(
                f"{where}: cannot run yet with method '{plan.method}': how it gathers, pushes or compresses beside "
                "frozen layers is not modelled; allowed: methods single, ddp, half, zero1, zero2, zero3 (fsdp), hsdp, "
                "gs, gs_z3, gs_hier"
            )
        for key, threshold in (("push", scenario.push.threshold), ("publish", plan.publish.threshold)):
            if threshold:
                raise UserError(
                    f"{where}: plan.{key}.threshold = {threshold:g}: gradient statistics are of a training of all "
                    "layers; leave it out"
                )
        return
    if not runs or policies.compressor:
        raise UserError(
            f"{where}: cannot run yet with method '{plan.method}'; allowed: methods single, ddp, half, zero1, zero2, "
            "zero3 (fsdp), hsdp, pipeline, gs, gs_z3 and gs_hier"
        )
    if name == "adapters":
        check_adapters(scenario, policies, where)


def check_adapters(scenario: Scenario, policies: Policies, where: str) -> None:
    """Refuse thresholds of adapters, and what slices and divided experts cannot do yet beside adapters, whose own
    weights are frozen.
    """
    plan = scenario.plan
    if policies.gradients == "push" and scenario.push.threshold is not None:
        raise UserError(
            f"{where}: plan.push.threshold = {scenario.push.threshold:g}: adapters have no gradient statistics; "
            "leave it out"
        )
    for key, ranks in (("tp", policies.tp), ("cp", policies.cp)):
        if policies.ep > 1 and ranks > 1:
            raise UserError(
                f"{where}: cannot run yet beside plan.ep = {policies.ep} with plan.{key} = {ranks}: parts of blocks or "
                "sequences with divided experts are traced without adapters; allowed: 1"
            )
    unknown = f"peaks of the first of plan.pp = {policies.pp} stages are not predicted well enough"
    refused = (
        ("plan.cp", policies.cp, 1, "slices with adapters are not traced on parts of sequences"),
        ("plan.embedding_parallel", plan.embedding_parallel, False, "parts of a frozen embedding are not modelled"),
        ("plan.loss_parallel", plan.loss_parallel, False, "parts of a frozen head are not modelled"),
        ("plan.gathered_inputs", plan.gathered_inputs, "kept", "frozen weights need no input for their gradients"),
        ("plan.tp_overlap", plan.tp_overlap, False, "products of frozen weights are fewer than it counts on"),
        ("plan.async_input_gradients", plan.async_input_gradients, False, "frozen weights have no gradients beside it"),
        ("plan.sequence_parallel", policies.pp > 1 and policies.sequence_parallel, False, unknown),
    )
    for key, value, allowed, why in refused if policies.tp > 1 else ():
        if value != allowed:
            said = [f"'{each}'" if isinstance(each, str) else str(each).lower() for each in (value, allowed)]
            raise UserError(
                f"{where}: cannot run yet beside plan.tp = {policies.tp} with {key} = {said[0]}: {why}; allowed: "
                f"{said[1]}"
            )


def _check_compiled(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse what changes the graph of a compiled block, which the model file describes as it is by itself."""
    plan, workload = scenario.plan, scenario.workload
    if not workload.model.compiled:
        return
    where, of = f"{file}: workload.model", f"the blocks of '{workload.model.name}' are compiled"
    if policies.partition == "weight-gradient":
        raise UserError(
            f"{where}: {of}, and method '{plan.method}' cannot run yet with them: their backward is not "
            "traced where it is in part alone; take the model that is not compiled"
        )
    refused: tuple[tuple[str, object, bool, str], ...] = (
        ("plan.tp", policies.tp, policies.tp > 1, "parts of them are not traced; allowed: 1"),
        ("plan.cp", policies.cp, policies.cp > 1, "parts of them are not traced; allowed: 1"),
        ("plan.ep", policies.ep, policies.ep > 1, "parts of them are not traced; allowed: 1"),
        (
            "plan.recompute",
            plan.recompute,
            plan.recompute not in ("none", "full"),
            "it chooses among operations, which are fused; allowed: none, full, or a model of `gsreal trace --compile "
            "--recompute {plan.recompute}`",
        ),
        (
            "plan.recompute",
            plan.recompute,
            plan.recompute != "none" and workload.model.compiled_recompute != "none",
            f"they recompute inside of their graphs (compiled_recompute = '{workload.model.compiled_recompute}'); "
            "allowed: none",
        ),
        (
            "plan.recompute",
            plan.recompute,
            plan.recompute != "none" and policies.pp > 1,
            "how stages run their graphs again is not modelled; allowed: none, or a model of `gsreal trace --compile "
            "--recompute full`",
        ),
        (
            "plan.schedule",
            plan.schedule,
            plan.schedule == "interleaved",
            "what several stages of a rank keep of theirs is not modelled; allowed: 1f1b, gpipe",
        ),
        ("plan.shares.replan", True, plan.shares.replan, "every new batch is compiled again; allowed: false"),
        *(
            (f"workload.{key}", "...", getattr(workload, key) is not None, "they are traced without; leave it out")
            for key in ("adapters", "autocast", "frozen")
        ),
    )
    for key, value, is_refused, why in refused:
        if is_refused:
            said = key if value == "..." else f"{key} = {value!r}"
            raise UserError(f"{where}: {of}, and {said} cannot run yet with them: {why}")


def _check_reduction(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse a precision of reductions where nothing is reduced over replicas or shards, or the plan compresses it."""
    workload, plan = scenario.workload, scenario.plan
    if workload.reduce_precision in (None, workload.precision):
        return
    where = f"{file}: workload.reduce_precision = '{workload.reduce_precision}'"
    if policies.gradients == "push":
        if workload.reduce_precision == "fp32" and has_master_copy(workload):
            return  # as owners sum them anyway
        raise UserError(
            f"{where}: method '{plan.method}' pushes gradients in workload.precision, and owners sum them in that of "
            f"the optimizer; allowed: '{'fp32' if has_master_copy(workload) else workload.precision}', or leave it out"
        )
    if policies.gradients not in ("all-reduce", "reduce-scatter"):
        raise UserError(f"{where}: method '{plan.method}' reduces no gradients over replicas; leave it out")
    if policies.compress:
        raise UserError(
            f"{where}: buckets are all-reduced in '{policies.compress}' (plan.compress, or method 'half'); leave out "
            "one of them"
        )


def _check_loss_scale(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse a scaled loss in other precisions than fp16, and where gradients leave before they can be divided."""
    workload, method = scenario.workload, scenario.plan.method
    if workload.loss_scale is None:
        return
    where = f"{file}: workload.loss_scale = {workload.loss_scale!r}"
    if "fp16" not in (workload.precision, workload.autocast):
        raise UserError(
            f"{where}: gradients in workload.precision = '{workload.precision}' need no scaled loss; leave it out"
        )
    if policies.gradients == "push" or policies.partition == "weight-gradient":
        raise UserError(
            f"{where}: cannot run yet with method '{method}': its owners add up gradients before anyone could check "
            "them for infinities; leave it out"
        )


def _check_clipping(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse gradient clipping where owners do not know which of their gradients other ranks hold too."""
    norm = scenario.workload.clip_norm
    pushes_slices = policies.tp > 1 and policies.gradients == "push"
    if norm is not None and (pushes_slices or policies.partition == "weight-gradient"):
        raise UserError(
            f"{file}: workload.clip_norm = {norm:g}: cannot run yet with method '{scenario.plan.method}' and plan.tp = "
            f"{policies.tp}: owners hold ranges or layers, of slices of some gradients and of the whole of others; "
            "allowed: other methods, or gs and gs_z3 with plan.tp = 1"
        )


def _check_periods(scenario: Scenario, policies: Policies, file: str) -> None:
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


def _check_sizes(scenario: Scenario, file: str) -> None:
    """Refuse steps whose lowering would exceed the limits."""
    layers = sum(layer.repeats for layer in scenario.workload.model.layers)
    run, micro_batches = scenario.run, scenario.plan.micro_batches
    sizes = [("layer_passes", layers * micro_batches, f"plan.micro_batches = {micro_batches}")]
    if scenario.plan.sends_by_data:
        sizes.append(("distinct_steps", run.warmup_steps + run.steps, f"run.steps = {run.steps}"))
    for name, size, key in sizes:
        if (why := excess(name, size)) is not None:
            raise UserError(f"{file}: {key}: {why}")


def _check_slowdown(scenario: Scenario, policies: Policies, number: int, file: str) -> None:
    where, slowdown = f"{file}: run.slowdowns[{number}]", scenario.run.slowdowns[number]
    if slowdown.rank >= policies.ranks:
        raise UserError(f"{where}.rank = {slowdown.rank}: the plan has {policies.ranks} ranks; allowed: a lower number")
    if slowdown.first_step >= scenario.run.steps:
        raise UserError(
            f"{where}.first_step = {slowdown.first_step}: the run has {scenario.run.steps} steps (run.steps); "
            "allowed: a lower number"
        )
    if policies.pp > 1:
        raise UserError(f"{where}: ranks of a pipeline cannot be slowed down yet; leave it out, or plan.pp")


def _check_replanning(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse rebalancing where ranks have no samples of their own, or one has none at all."""
    if not scenario.plan.shares.replan:
        return
    where = f"{file}: plan.shares.replan = True"
    if policies.data_ranks != policies.ranks or policies.ranks == 1:
        raise UserError(
            f"{where}: method '{scenario.plan.method}' with plan.tp = {policies.tp} and plan.pp = {policies.pp} does "
            "not divide the batch among all ranks; allowed: ddp, zero1, zero2, zero3, gs, gs_z3, gs_hier on several"
        )
    if min(scenario.batch_sizes) == 0:
        rank = scenario.batch_sizes.index(0)
        raise UserError(f"{where}: rank {rank} has no samples to measure its speed by; give each rank at least one")


def _check_exchange(scenario: Scenario, policies: Policies, file: str) -> None:
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


def _check_ranks(scenario: Scenario, policies: Policies, file: str) -> None:
    if scenario.plan.method == "single" and policies.ranks != 1:
        raise UserError(f"{file}: plan.method = 'single': takes one rank, but the mesh axes make {policies.ranks}")
    divided = policies.partition == "weight-gradient" or policies.pp > 1
    if policies.gradients == "local" and policies.data_ranks > 1 and not divided:
        raise UserError(
            f"{file}: plan.method = '{scenario.plan.method}': its gradients stay on the rank, but the mesh axes make "
            f"{policies.data_ranks} replicas; allowed: a method that divides the batch (ddp, zero1, zero2, zero3, gs) "
            "with plan.tp beside its own axis, or plan.gradients"
        )
    if policies.partition == "weight-gradient" and policies.dp_replicate > 1:
        raise UserError(
            f"{file}: plan.dp_replicate = {policies.dp_replicate}: method '{scenario.plan.method}' uses dp_shard"
        )
    both = policies.gradients == "reduce-scatter" or policies.push_axis == "dp_replicate"
    axis = {"all-reduce": "dp_replicate", "periodic": "dp_replicate", "push": "dp_shard"}.get(policies.gradients)
    for name in ("dp_replicate", "dp_shard"):
        if axis and not both and name != axis and getattr(policies, name) > 1:
            raise UserError(
                f"{file}: plan.{name} = {getattr(policies, name)}: method '{scenario.plan.method}' uses {axis}"
            )


def _check_pipeline(scenario: Scenario, policies: Policies, file: str) -> None:
    plan = scenario.plan
    if policies.pp == 1:
        if plan.method == "pipeline" and policies.data_ranks > 1:
            raise UserError(f"{file}: plan.pp = 1: method 'pipeline' does not average gradients of replicas; set pp")
        for key in ("schedule", "stages"):
            if getattr(plan, key) is not None:
                raise UserError(f"{file}: plan.{key} = {getattr(plan, key)!r}: there is no pipeline; leave it out")
        if plan.receive_buffers != default_plan(plan.method).receive_buffers:
            raise UserError(
                f"{file}: plan.receive_buffers = {plan.receive_buffers!r}: there is no pipeline; leave it out"
            )
        return
    _check_pipeline_policies(plan, policies, file)
    _check_stages(scenario, policies.pp, file)
    _check_trained_stages(scenario, policies, file)
    if policies.gradients in ("reduce-scatter", "push"):
        _check_sharded_stages(scenario, file)
    for samples in scenario.data_batch_sizes:
        if samples % plan.micro_batches:
            raise UserError(
                f"{file}: plan.micro_batches = {plan.micro_batches}: a replica has {samples} samples; "
                "a pipeline's micro-batches must be equal: torch's stages learn the shape of messages once"
            )


def _check_pipeline_policies(plan: Plan, policies: Policies, file: str) -> None:
    where, replicas = f"{file}: plan.pp = {policies.pp}", policies.replica_ranks
    methods = [name for name, method in METHODS.items() if method.in_pipelines and method.gradients != "local"]
    runs = policies.partition == "data" and policies.gradients in ("local", "all-reduce", "reduce-scatter", "push")
    runs = runs and policies.push_axis == "dp_shard"
    if not runs or (policies.parameters != "replicated") != (policies.gradients == "reduce-scatter"):
        raise UserError(
            f"{where}: method '{plan.method}' cannot run in a pipeline yet; "
            f"allowed today: pipeline, or {', '.join(methods)} for replicas of one"
        )
    if (policies.gradients != "local") != (replicas > 1):
        axis = METHODS[plan.method].axis  # along which the method has several ranks of each stage
        several = f"plan.{axis if axis in DATA_AXES else 'dp_replicate'}"
        wanted = ", ".join(methods) if replicas > 1 else f"pipeline, or {several} of at least 2"
        raise UserError(f"{where}: method '{plan.method}' for {replicas} replica(s) of a pipeline; allowed: {wanted}")
    if policies.gradient_sync != "step":
        raise UserError(
            f"{where}: plan.gradient_sync = '{policies.gradient_sync}': torch's stages let gradients leave in the last "
            "backward alone; allowed: 'step'"
        )


def _check_trained_stages(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse stages that train nothing, to which torch's stages send gradients all the same; and frozen copies."""
    workload = scenario.workload
    name = next((key for key in ("adapters", "frozen") if getattr(workload, key) is not None), None)
    if name is None:
        return
    where, stages = f"{file}: workload.{name}: cannot run yet beside plan.pp = {policies.pp}", scenario.stage_ranges
    whole = unrolled(replace(workload.model, layers=workload.model.whole_layers))
    for tied in tied_parameters(whole, stages):
        if len(tied.stages) > 1:
            raise UserError(f"{where}: several stages would hold copies of {tied.name}; leave one of them out")
    layers = unrolled(workload.model)
    lowest = next(instance.index for instance in layers if instance.layer.parameters)
    below = [each.module for each in layers[:lowest] if each.layer.block and each.layer.frozen_parameters]
    if below and policies.parameters == "sharded":
        raise UserError(
            f"{where}, whose method '{scenario.plan.method}' gathers '{below[-1]}' for a backward that it does not "
            "have; allowed: ddp, zero1, zero2, gs"
        )
    for number, held in enumerate(stages):
        if not any(layers[index].layer.parameters for index in held):
            raise UserError(
                f"{where}: stage {number} would train nothing; allowed: other plan.stages, or fewer frozen layers"
            )


def _check_sharded_stages(scenario: Scenario, file: str) -> None:
    """Refuse what sharded stages of a pipeline cannot do yet."""
    plan = scenario.plan
    where = f"{file}: plan.pp = {plan.pp}: method '{plan.method}'"
    if schedule_of(plan, plan.pp) == "interleaved" and scenario.policies.parameters == "sharded":
        raise UserError(
            f"{where} cannot run yet with plan.schedule = 'interleaved': peaks of blocks that are freed and gathered "
            "ahead are not predicted well enough; allowed: gpipe, 1f1b, or methods zero2 and gs"
        )
    if scenario.policies.gradients == "push":
        if scenario.workload.loss_scale is not None:
            given = f"workload.loss_scale = {scenario.workload.loss_scale}"
            raise UserError(f"{where} cannot run yet with {given}: leave it out, or use ddp")
        if scenario.policies.publish_overlaps:
            raise UserError(
                f"{where} cannot run yet with plan.publish.overlap: stages begin when peers do; leave it out"
            )


def _check_stages(scenario: Scenario, ranks: int, file: str) -> None:
    plan, model = scenario.plan, scenario.workload.model
    held = sum(layer.repeats * layer.module_buffer_bytes for layer in model.layers)
    if held != sum(model.buffer_bytes):
        raise UserError(
            f"{file}: plan.pp = {ranks}: the model file does not list which layers hold the module buffers of "
            f"{sum(model.buffer_bytes)} bytes: trace it again with `gsreal trace`"
        )
    try:
        stages = scenario.stage_ranges
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    try:
        refuse(schedule_of(plan, ranks), ranks=ranks, stages=len(stages), micro_batches=plan.micro_batches)
    except ValueError as error:
        raise UserError(f"{file}: plan.schedule: {error}") from None
    reason = stage_cut_error(unrolled(model), stages)
    if reason:
        raise UserError(f"{file}: plan.pp = {ranks}: the model is no chain that can be cut: {reason}")


def _check_push(scenario: Scenario, policies: Policies, file: str) -> None:
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


def _check_publish(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse thresholds and overlap where parameters are not published by bucket, or not by point-to-point messages."""
    method, rules = scenario.plan.method, scenario.plan.publish
    publishes = policies.gradients == "push" and policies.parameters == "replicated"
    for key in ("threshold", "overlap"):
        value = getattr(rules, key)
        if value is None or value is False:
            continue
        where = f"{file}: plan.publish.{key}"
        if policies.partition == "weight-gradient":
            raise UserError(f"{where} = {value}: cannot run yet with method '{method}'; allowed today: gs, gs_hier")
        if not publishes:
            raise UserError(f"{where}: method '{method}' publishes no parameters; allowed with gs, gs_hier")
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


def _check_recompute(scenario: Scenario, policies: Policies, file: str) -> None:
    recompute = scenario.plan.recompute
    model = scenario.workload.model
    held = model.sliced_layers if policies.tp > 1 else model.context_layers if policies.cp > 1 else model.layers
    if routes_parts(model, policies):
        held = model.expert_sequence_layers
    for layer in held:
        if layer.block and layer.kept_positions(recompute) is None:
            raise UserError(
                f"{file}: plan.recompute = '{recompute}': the model file does not list what the block '{layer.name}' "
                "keeps: trace it again; the output of a matrix product or convolution that is changed in place cannot "
                "be kept"
            )


def _check_shares(scenario: Scenario, policies: Policies, file: str) -> None:
    rules = scenario.plan.shares
    cuts_unevenly = policies.slices == "shares"
    shards_unevenly = policies.gradients == "push" or policies.partition == "weight-gradient" or cuts_unevenly
    if rules.shards != "even" and not shards_unevenly:
        raise UserError(
            f"{file}: plan.shares.shards = {rules.shards!r}: method '{scenario.plan.method}' cannot shard unevenly; "
            "allowed: 'even'"
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
    for rank, samples in enumerate(scenario.data_batch_sizes if micro_batches > 1 else ()):
        if samples < micro_batches:
            raise UserError(
                f"{file}: plan.micro_batches = {micro_batches}: rank {rank} has {samples} samples; "
                "allowed: at most one micro-batch for each sample"
            )


def _check_owners(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse shards by memory or cost unless all ranks are owners that are pushed to directly, and the state fits."""
    wanted = scenario.plan.shares.shards
    one_level = policies.push_axis == "dp_shard"
    if policies.gradients != "push" or policies.tp > 1 or not (one_level or wanted == "memory"):
        raise UserError(
            f"{file}: plan.shares.shards = {wanted!r}: cannot run yet with method '{scenario.plan.method}' and plan.tp "
            f"= {policies.tp}; allowed today: even, compute, or one share per rank (memory: gs, gs_z3, gs_hier; cost: "
            "gs, gs_z3)"
        )
    try:
        _ = scenario.shard_shares
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def _check_maps(scenario: Scenario, file: str) -> None:
    """Refuse linear maps in 8 bits beside fp32, of models that are not of tokens, and on devices without a rate."""
    workload = scenario.workload
    if workload.map_precision is None:
        return
    where = f"{file}: workload.map_precision = '{workload.map_precision}'"
    if workload.precision == "fp32":
        raise UserError(f"{where}: goes with 16 bits elsewhere; allowed: workload.precision = 'bf16' or 'fp16'")
    if not isinstance(workload.model.input, TokenInput):
        raise UserError(f"{where}: is for models of tokens, whose blocks have linear maps; leave it out")
    for name in dict.fromkeys(device.type for device in scenario.cluster.devices):
        device = scenario.cluster.device_types[name]
        if device.float8_ratio is None:
            raise UserError(
                f"{where}: the device type '{name}' has no rate in 8 bits; set "
                f"cluster.device_types.{name}.float8_ratio, or leave it out"
            )
        if any(layer_profile(device, workload, layer) is not None for layer in workload.model.layers):
            raise UserError(f"{where}: layers of '{name}' are measured, in {workload.precision}; leave it out")


def _check_experts(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse expert parallelism of models and workloads for which it cannot run."""
    workload, ranks = scenario.workload, policies.ep
    if ranks == 1:
        if workload.expert_routing == "load":  # a real run routes so even where no rank divides experts
            _check_rows(workload, file, parts=1)
        return
    where = f"{file}: plan.ep = {ranks}"
    _check_expert_load(scenario, ranks, where, file)
    model, in_parts = workload.model, routes_parts(workload.model, policies)
    if model.expert_tensor_ranks != policies.tp and not in_parts:
        cut_for = model.expert_tensor_ranks
        raise UserError(
            f"{where}: cannot run yet with plan.tp = {policies.tp}: the layers with divided experts of '{model.name}' "
            f"are cut for {cut_for} tensor ranks (workload.model.expert_tensor_ranks); allowed: {cut_for}"
        )
    if len(set(scenario.batch_sizes)) > 1:
        raise UserError(
            f"{where}: ranks that divide experts need as many samples each, and have "
            f"{', '.join(map(str, sorted(set(scenario.batch_sizes))))}; allowed: an even split of the batch"
        )
    flat, shards = scenario.plan.zero1_implementation == "megatron", policies.gradients == "reduce-scatter"
    replicated = policies.gradients in ("all-reduce", "local") and policies.optimizer_state == "replicated"
    reduced = None if workload.reduce_precision == workload.precision else workload.reduce_precision
    for name, value, is_known in (
        ("clip_norm", workload.clip_norm, flat or policies.tp == 1 or in_parts),
        ("loss_scale", workload.loss_scale, (policies.tp == 1 or in_parts) and (shards or replicated)),
        ("gradient_precision", workload.gradient_precision, flat or replicated),
        ("reduce_precision", reduced, flat or ((policies.tp == 1 or in_parts) and shards)),
    ):
        if value is not None and not is_known:
            raise UserError(
                f"{where}: workload.{name} = {value!r} cannot run yet with experts divided under method "
                f"'{scenario.plan.method}' and plan.tp = {policies.tp}; leave it out"
            )
    if scenario.run.slowdowns:
        raise UserError(f"{where}: run.slowdowns cannot run yet with divided experts; leave them out")


def _check_layers_of_parts(scenario: Scenario, policies: Policies, where: str, file: str) -> None:
    """Refuse models without layers of cut blocks beside divided experts."""
    model = scenario.workload.model
    if model.expert_sequence_layers:
        return
    cut_for = model.expert_tensor_ranks
    if cut_for > 1:
        raise UserError(
            f"{where}: the layers with divided experts of '{model.name}' are cut for {cut_for} tensor ranks "
            f"(workload.model.expert_tensor_ranks); allowed: {cut_for}"
        )
    if not any(layer.routed_experts for layer in model.expert_layers):
        raise UserError(f"{file}: plan.ep = {policies.ep}: '{model.name}' has no routed experts to divide; allowed: 1")
    uncut = "its blocks cannot be cut so" if any(layer.block for layer in model.layers) else "its layers are no blocks"
    raise UserError(
        f"{where}: the model file of '{model.name}' has no layers with cut blocks and divided experts "
        f"(workload.model.expert_sequence_layers): {uncut}, or it was traced before; allowed: 1, or trace it again "
        "with `gsreal trace`"
    )


def _check_experts_of_parts(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse tensor parallelism beside expert parallelism but of ranks that route their own parts of sequences.

    As torchtitan's `expert_tensor_parallel_degree = 1`, and Megatron-LM's `--expert-tensor-parallel-size 1` with
    `--sequence-parallel`.
    """
    plan, model = scenario.plan, scenario.workload.model
    where = f"{file}: plan.tp = {policies.tp}: beside plan.ep = {policies.ep}"
    _check_layers_of_parts(scenario, policies, where, file)
    if policies.etp != 1:
        raise UserError(
            f"{where}: plan.etp = {plan.etp or policies.tp}: experts that tensor ranks cut besides are not known for "
            f"'{model.name}'; allowed: 1, with which each of these ranks holds experts of its own"
        )
    if not policies.sequence_parallel:
        raise UserError(
            f"{where}: plan.sequence_parallel = false: all tensor ranks would send the same tokens to experts; "
            "allowed: true"
        )
    for key in ("tp_overlap", "async_input_gradients"):
        if getattr(plan, key):
            raise UserError(
                f"{where}: plan.{key} = true: exchanges beside products are not known yet where experts are divided; "
                "leave it out"
            )
    if len(set(scenario.slice_shares)) > 1:
        raise UserError(
            f"{file}: plan.shares.shards = {plan.shares.shards!r}: tensor ranks beside plan.ep = {policies.ep} have "
            "slices of the same size; allowed: 'even'"
        )
    for layer in model.expert_sequence_layers:
        if layer.units and layer.units % policies.tp:
            raise UserError(
                f"{where}: does not divide the {layer.units} units of {layer.name} (heads with keys of their own, and "
                "what else is cut with them); allowed: a divisor"
            )


def _check_expert_load(scenario: Scenario, ranks: int, where: str, file: str) -> None:
    """Refuse models whose experts cannot be divided among so many ranks, and loads that do not fit them."""
    workload = scenario.workload
    every = divided_expert_layers(workload.model, scenario.policies)
    layers = [layer for layer in every if layer.routed_experts]
    if not layers:
        adapted, option = _adapters_in_trace(scenario)
        raise UserError(
            f"{where}: the model file of '{workload.model.name}' has no layers with divided experts{adapted}: it has "
            "no routed experts, or fewer than 4, or they cannot be divided; allowed: 1, or trace it again with "
            f"`gsreal trace{option}`"
        )
    for layer in layers:
        if (experts := layer.routed_experts or 0) % ranks:
            raise UserError(f"{where}: does not divide the {experts} experts of '{layer.name}'; allowed: a divisor")
    _check_rows(workload, file, parts=parts_routed_apart(workload.model, scenario.policies))


def _check_rows(workload: Workload, file: str, *, parts: int) -> None:
    """Refuse a load that does not fit the layers with routed experts; `parts`: of samples that are routed apart."""
    for layer in workload.model.expert_layers:
        for module in layer.modules if layer.experts_per_token and layer.units else ():
            try:
                layer_rows(workload, layer, module, parts=parts)
            except UserError as error:
                raise UserError(f"{file}: {error}") from None


def _adapters_in_trace(scenario: Scenario) -> tuple[str, str]:
    """Return what a model file that lacks layers lacks beside adapters, and the option that traces it; else nothing."""
    return ("", "") if scenario.workload.adapters is None else (" with these adapters", " --adapters")


def _check_slices(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse tensor parallelism of blocks that cannot be cut so."""
    if routes_parts(scenario.workload.model, policies):
        _check_experts_of_parts(scenario, policies, file)
    elif policies.tp > 1:
        _check_units(scenario, policies, file)


def _check_units(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse blocks that are not cut in units, and ranks without one of each."""
    model, ranks = scenario.workload.model, policies.tp
    layers = model.sliced_layers
    if not layers and model.uncut_reason is not None:
        raise UserError(f"{file}: plan.tp = {ranks}: blocks of '{model.name}' cannot be cut: {model.uncut_reason}")
    if not layers:
        adapted, option = _adapters_in_trace(scenario)
        raise UserError(
            f"{file}: workload.model: has no slices of its blocks{adapted} for {ranks} tensor-parallel ranks; "
            f"trace it again with `gsreal trace{option}` (gsreal.methods.tensor_slices tells which blocks can be cut)"
        )
    if any(each.summed for layer in layers for each in layer.parameters):
        _check_equal_owners(scenario, f"{file}: plan.tp = {ranks}")
    for layer in layers:
        if layer.units is None:
            continue
        if layer.units < ranks:
            raise UserError(
                f"{file}: plan.tp = {ranks}: {layer.name} has only {layer.units} units (heads or norm groups) to be "
                f"cut among them; allowed: at most {layer.units} ranks"
            )
        if policies.slices == "even" and layer.units % ranks:
            raise UserError(
                f"{file}: plan.tp = {ranks}: does not divide the {layer.units} units of {layer.name} "
                "(heads or norm groups); allowed: a divisor, or method 'gs_tp'"
            )
        if min(units_of_ranks(layer.units, scenario.slice_shares)) < 1:
            shares = [round(share, 4) for share in scenario.slice_shares]
            raise UserError(
                f"{file}: plan.shares.shards = {shares}: leaves a rank none of the {layer.units} units of {layer.name} "
                "(heads or norm groups); each rank needs one"
            )


def _check_equal_owners(scenario: Scenario, where: str) -> None:
    """Refuse ranks of a tensor group that own other parts of the gradients that they sum after the push."""
    shares, ranks = scenario.shard_shares, scenario.policies.tp
    groups = (shares[first : first + ranks] for first in range(0, len(shares), ranks))
    if scenario.policies.gradients == "push" and any(len(set(group)) > 1 for group in groups):
        raise UserError(
            f"{where}: plan.shares.shards = {scenario.plan.shares.shards!r}: the ranks of a tensor group sum gradients "
            "of norms or adapters, and would own other parts of them; allowed: even, or one share per replica"
        )


def _check_divided_vocabulary(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse to divide the vocabulary where there is nobody to divide it among, or the model's cannot be divided."""
    plan, model = scenario.plan, scenario.workload.model
    reasons = {"embedding_parallel": undivided_embedding_reason, "loss_parallel": undivided_loss_reason}
    asked = [key for key in reasons if getattr(plan, key)]
    for key in asked:
        where = f"{file}: plan.{key} = true"
        if policies.tp == 1:
            raise UserError(f"{where}: there are no tensor-parallel ranks to divide the vocabulary among; set plan.tp")
        if (reason := reasons[key](model)) is not None:
            raise UserError(f"{where}: the vocabulary of '{model.name}' cannot be divided: {reason}; leave it out")
    if len(asked) == 1 and shares_embedding(model):
        (other,) = set(reasons) - set(asked)
        raise UserError(
            f"{file}: plan.{asked[0]} = true: the head of '{model.name}' has the weight of its token embedding, which "
            f"is divided for both; set plan.{other} = true too"
        )


def _check_tensor_overlap(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse to run exchanges of tensor-parallel ranks beside products where there are none, or they go by the host."""
    plan, model, backend = scenario.plan, scenario.workload.model, scenario.cluster.backend
    if not plan.tp_overlap and not plan.async_input_gradients:
        return
    where = f"{file}: plan.{'tp_overlap' if plan.tp_overlap else 'async_input_gradients'} = true"
    layers = model.sequence_layers if policies.sequence_parallel else model.sliced_layers
    gathered = any(each.kind == "all-gather" for layer in layers for each in layer.reductions)
    if plan.tp_overlap and (policies.tp == 1 or not gathered):
        raise UserError(f"{where}: no sequences are gathered beside products; set plan.tp and plan.sequence_parallel")
    if plan.tp_overlap and plan.async_input_gradients:
        raise UserError(f"{where}: reduce-scatters run beside products already; leave out plan.async_input_gradients")
    if policies.tp == 1:
        raise UserError(f"{where}: no tensor-parallel ranks sum gradients of inputs; set plan.tp")
    if backend != "nccl":
        raise UserError(f"{where}: the cluster's backend is '{backend}', which copies by the host; allowed with 'nccl'")


def _check_sequence_parts(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse to divide sequences where there is nobody to divide them among, or gradients leave before their sum."""
    if not policies.sequence_parallel:
        if scenario.plan.gathered_inputs != "kept":
            raise UserError(
                f"{file}: plan.gathered_inputs = '{scenario.plan.gathered_inputs}': without plan.sequence_parallel "
                "nothing is gathered; leave it out"
            )
        return
    where, model = f"{file}: plan.sequence_parallel = true", scenario.workload.model
    if policies.tp == 1:
        raise UserError(f"{where}: there are no tensor-parallel ranks to divide sequences among; set plan.tp")
    _check_equal_owners(scenario, where)
    if scenario.plan.zero1_implementation == "deepspeed":
        raise UserError(
            f"{where}: cannot run yet with plan.zero1_implementation = 'deepspeed'; allowed: 'torch', 'megatron'"
        )
    if not isinstance(model.input, TokenInput):
        raise UserError(f"{where}: the input of '{model.name}' is no sequence; leave it out")
    if not model.sequence_layers and not routes_parts(model, policies):
        adapted, option = _adapters_in_trace(scenario)
        raise UserError(
            f"{where}: workload.model: '{model.name}' is not traced with parts of sequences{adapted}; trace it again "
            f"with `gsreal trace{option}` (gsreal.methods.tensor_slices tells which blocks can run so)"
        )
    if (scenario.workload.sequence_length or 0) % policies.tp:
        raise UserError(
            f"{where}: workload.sequence_length = {scenario.workload.sequence_length}: cannot be divided evenly among "
            f"plan.tp = {policies.tp} ranks; allowed: a multiple"
        )


def _check_context(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse context parallelism of what is no sequence, cannot be divided, or has no way to meet in the attention."""
    if policies.cp == 1:
        return
    plan, workload, model = scenario.plan, scenario.workload, scenario.workload.model
    where, length = f"{file}: plan.cp = {policies.cp}", workload.sequence_length or 0
    if policies.gradients not in ("all-reduce", "reduce-scatter", "push") or policies.compress:
        raise UserError(
            f"{where}: cannot run yet with method '{plan.method}'; allowed today: methods that all-reduce, "
            "reduce-scatter or push gradients in workload.precision (ddp, zero1, zero2, zero3, hsdp, gs, gs_z3, "
            "gs_hier)"
        )
    if plan.shares.replan:
        raise UserError(f"{where}: cannot run yet beside plan.shares.replan = True; allowed today: False")
    if not isinstance(model.input, TokenInput) or model.input.classes is not None:
        raise UserError(f"{where}: '{model.name}' has no loss at each position of a sequence; leave it out")
    if not model.context_layers:
        adapted, option = _adapters_in_trace(scenario)
        raise UserError(
            f"{where}: workload.model: '{model.name}' is not traced on parts of sequences{adapted}; trace it again "
            f"with `gsreal trace{option}` (gsreal.methods.context_parallel tells which models can run so)"
        )
    _check_ring(plan, policies, length, file)
    if policies.ring and any(fused_attention(layer) is None for layer in model.context_layers if layer.units):
        raise UserError(
            f"{where}: plan.context_exchange = 'ring': the attention of '{model.name}' is traced as several "
            "operations, not as one kernel whose blocks can be merged; allowed: 'all-to-all'"
        )
    if length % policies.cp or length < 2 * policies.cp:
        raise UserError(
            f"{where}: workload.sequence_length = {length}: cannot be divided evenly among these ranks; allowed: a "
            "multiple, of at least 2 positions for each"
        )
    if policies.tp > 1 or policies.ep > 1:
        _check_parts_in_context(scenario, policies, where)
    if not policies.ring:
        _check_exchanged_heads(model, policies, where)


def _check_exchanged_heads(model: Model, policies: Policies, where: str) -> None:
    """Refuse to exchange heads that cannot be divided equally; tensor-parallel ranks have divided them before."""
    before = f", and {policies.tp} tensor-parallel ranks before" if policies.tp > 1 else ""
    for layer in (layer for layer in model.context_layers if layer.units):
        heads, rest = divmod(layer.units or 0, policies.tp)
        if heads % policies.cp or rest:
            allowed = f"a divisor of {heads}" if not rest else f"plan.tp a divisor of {layer.units}"
            raise UserError(
                f"{where}: {layer.name} has {layer.units} heads with keys of their own, which the ranks divide among "
                f"them for the attention{before}; allowed: {allowed}, or plan.context_exchange = 'ring'"
            )


def _check_parts_in_context(scenario: Scenario, policies: Policies, where: str) -> None:
    """Refuse parts of sequences beside cut blocks, or divided experts, where the model's layers with both do not follow
    from its trace.
    """
    model, length = scenario.workload.model, scenario.sequence_positions or 0
    beside, cut = f"{where} beside plan.ep = {policies.ep}", model.expert_layers
    if policies.tp > 1:
        beside, cut = f"{where} beside plan.tp = {policies.tp}", model.sliced_layers
        if policies.sequence_parallel:
            cut = model.expert_sequence_layers if policies.ep > 1 else model.sequence_layers
    if (why := uncombined_reason(model, cut)) is not None:
        raise UserError(f"{beside}: workload.model: '{model.name}' {why}")
    if policies.sequence_parallel and length % policies.tp:
        raise UserError(
            f"{beside}: workload.sequence_length = {scenario.workload.sequence_length}: parts of {length} positions "
            "cannot be divided evenly among tensor-parallel ranks (plan.sequence_parallel); allowed: a multiple of "
            "plan.cp * plan.tp"
        )


def _check_ring(plan: Plan, policies: Policies, length: int, file: str) -> None:
    """Refuse a ring's division of sequences without a ring, of other lengths, and what cannot run with a ring yet."""
    if not policies.ring:
        if plan.context_split == default_plan(plan.method).context_split:
            return
        raise UserError(
            f"{file}: plan.context_split = '{plan.context_split}': all-to-alls exchange sequences in their order; "
            "allowed with plan.context_exchange = 'ring'"
        )
    where = f"{file}: plan.cp = {policies.cp}"
    if policies.zigzag and length % (2 * policies.cp):
        raise UserError(
            f"{where}: workload.sequence_length = {length}: cannot be divided into {2 * policies.cp} equal parts, two "
            "for each rank (plan.context_split = 'zigzag'); allowed: a multiple, or 'plain'"
        )


def _refuse_unused_exchange(plan: Plan, policies: Policies, file: str) -> None:
    """Refuse options of context parallelism where there is none."""
    default = default_plan(plan.method)
    for key in ("context_exchange", "context_split") if policies.cp == 1 else ():
        if getattr(plan, key) != getattr(default, key):
            raise UserError(
                f"{file}: plan.{key} = '{getattr(plan, key)}': there are no context-parallel ranks; set plan.cp, or "
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


def _check_weight_gradient_owners(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse options that cannot be combined with weight gradients divided among ranks by layers."""
    rules, model = scenario.plan.shares, scenario.workload.model
    if scenario.workload.fused_loss:
        raise UserError(
            f"{file}: workload.fused_loss = true: cannot run with method '{scenario.plan.method}', under which owners "
            "compute weight gradients: one kernel makes those of the head's weight and input; leave it out"
        )
    if rules.batch != "even":
        raise UserError(
            f"{file}: plan.shares.batch = {rules.batch!r}: method '{scenario.plan.method}' runs the whole batch on "
            "every rank; leave it out"
        )
    if scenario.plan.recompute == "full" and isinstance(model.input, ImageInput):
        raise UserError(
            f"{file}: plan.recompute = 'full': cannot run yet with method '{scenario.plan.method}' and a model of "
            "images: which workspace convolutions take in the backward of a checkpointed block, below which nothing is "
            "trained, is not measured; allowed: none, selective"
        )
    if any(layer.untrained_buffers is None for layer in model.layers):
        raise UserError(
            f"{file}: workload.model: '{model.name}' lacks the costs of its layers with frozen parameters; trace "
            "it again with `gsreal trace` (a layer may use only the output of the one before it, and no parameter of "
            "another's)"
        )
    owners = sum(layer.repeats for layer in model.layers if layer.elements)
    if policies.ranks > owners:
        raise UserError(
            f"{file}: plan: {policies.ranks} ranks for {owners} layers with parameters; each rank must own one"
        )
    if not isinstance(rules.shards, str) and min(rules.shards) == 0:
        raise UserError(f"{file}: plan.shares.shards = {list(rules.shards)}: each rank must own a layer; none may be 0")
