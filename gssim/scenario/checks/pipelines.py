"""Checks of pipeline parallelism: schedules, stages, and the policies that can run in stages."""

from dataclasses import replace

from gssim.errors import UserError
from gssim.plan import DATA_AXES, METHODS, Plan, Policies, default_plan
from gssim.plan.pipeline_schedule import SPLITTING, refuse
from gssim.scenario.device_rates import reduce_precision
from gssim.scenario.scenario import Scenario
from gssim.scenario.stages import schedule_of, stage_cut_error, tied_parameters
from gssim.units import counted, shown_value
from gssim.workload import unrolled
from gssim.workload.layer import REPLACED


def check_pipeline(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse schedules, stages and policies that cannot run as a pipeline, and keys of pipelines without one."""
    plan = scenario.plan
    if policies.pp == 1:
        if plan.method == "pipeline" and policies.data_ranks > 1:
            raise UserError(f"{file}: plan.pp = 1: method 'pipeline' does not average gradients of replicas; set pp")
        for key in ("schedule", "stages"):
            if getattr(plan, key) is not None:
                raise UserError(
                    f"{file}: plan.{key} = {shown_value(getattr(plan, key))}: there is no pipeline; leave it out"
                )
        if plan.receive_buffers != default_plan(plan.method).receive_buffers:
            raise UserError(
                f"{file}: plan.receive_buffers = {plan.receive_buffers!r}: there is no pipeline; leave it out"
            )
        return
    _check_pipeline_policies(plan, policies, file)
    _check_stages(scenario, policies.pp, file)
    _check_trained_stages(scenario, policies, file)
    if policies.gradients == "push":
        _check_pushing_stages(scenario, policies, file)
    if plan.schedule in SPLITTING:
        _check_split_backwards(scenario, policies, file)
    for samples in scenario.data_batch_sizes:
        if samples % plan.micro_batches:
            raise UserError(
                f"{file}: plan.micro_batches = {plan.micro_batches}: a replica has {counted(samples, 'sample')}; "
                "a pipeline's micro-batches must be equal: torch's stages learn the shape of messages once"
            )


def _check_pipeline_policies(plan: Plan, policies: Policies, file: str) -> None:
    where, replicas = f"{file}: plan.pp = {policies.pp}", policies.replica_ranks
    methods = [name for name, method in METHODS.items() if method.in_pipelines and method.gradients != "local"]
    runs = policies.partition == "data" and policies.gradients in ("local", "all-reduce", "reduce-scatter", "push")
    runs = runs and policies.push_axis == "dp_shard"
    shards = {"reduce-scatter": (True,), "push": (True, False)}.get(policies.gradients, (False,))
    if not runs or (policies.parameters != "replicated") not in shards:
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


def _check_pushing_stages(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse publications that overlap; and, where parameters are sharded, gradients that are pushed after the schedule
    and axes that divide layers beside.
    """
    plan, stages = scenario.plan, scenario.stage_ranges
    where = f"{file}: plan.pp = {policies.pp}: method '{plan.method}' cannot run yet"
    if policies.publish_overlaps:
        raise UserError(f"{where} with plan.publish.overlap: stages begin when peers do; leave it out")
    if policies.parameters == "replicated":
        return
    if len(stages) > policies.pp or schedule_of(plan, policies.pp) in SPLITTING:
        raise UserError(
            f"{where} with plan.schedule = '{schedule_of(plan, policies.pp)}': gradients would be pushed after the "
            "schedule; allowed: gpipe, 1f1b, deepspeed"
        )
    whole = unrolled(replace(scenario.workload.model, layers=scenario.workload.model.whole_layers))
    tied = next((each.name for each in tied_parameters(whole, stages) if len(each.stages) > 1), None)
    if tied is not None:
        raise UserError(
            f"{where} where several stages hold copies of {tied}: gradients would be pushed after the schedule; "
            "allowed: gs"
        )
    for axis in ("tp", "ep"):
        if getattr(policies, axis) > 1:
            raise UserError(f"{where} beside plan.{axis} = {getattr(policies, axis)}; allowed: 1, or method gs")


TRAINED_STAGES = {
    "frozen": "other plan.stages, or fewer frozen layers",
    "adapters": "other plan.stages or a smaller plan.pp, so that every stage has a map with an adapter; or "
    "workload.adapters.targets with maps of every stage",
}
"""What makes every stage train something, by the key that leaves one without."""


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
            raise UserError(f"{where}: stage {number} would train nothing; allowed: {TRAINED_STAGES[name]}")


def _check_split_backwards(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse what cannot run beside split backwards, and models whose parts were not traced."""
    plan, workload = scenario.plan, scenario.workload
    where = f"{file}: plan.schedule = '{plan.schedule}'"
    if policies.gradients == "all-reduce":
        raise UserError(
            f"{where}: method '{plan.method}' all-reduces in autograd's hooks, and torch computes gradients of split "
            "backwards without these; allowed: pipeline, zero2, gs"
        )
    if policies.parameters == "sharded":
        raise UserError(
            f"{where}: method '{plan.method}' frees parameters after a forward, and torch's split backwards look for "
            "those that the forward used; allowed: pipeline, zero2, gs"
        )
    if policies.gradients == "reduce-scatter" and reduce_precision(workload) != workload.precision:
        raise UserError(
            f"{where}: workload.reduce_precision = '{workload.reduce_precision}': when FSDP2 casts gradients of split "
            f"backwards is not modelled yet; allowed: '{workload.precision}', that of workload.precision"
        )
    beside: dict[str, object] = {
        "plan.recompute": plan.recompute != "none" and plan.recompute,
        "plan.receive_buffers": plan.receive_buffers != "micro-batch" and plan.receive_buffers,
        "plan.offload": plan.offload,
        "plan.tp": policies.tp > 1 and policies.tp,
        "plan.cp": policies.cp > 1 and policies.cp,
        "plan.ep": policies.ep > 1 and policies.ep,
        "workload.autocast": workload.autocast,
        "workload.frozen": workload.frozen,
        "workload.adapters": workload.adapters is not None,
        "workload.fused_loss": workload.fused_loss,
        "workload.map_precision": workload.map_precision,
    }
    for key, value in beside.items():
        if value:
            raise UserError(f"{where}: backwards cannot be split yet with {key}; leave out one of the two")
    layers = unrolled(workload.model)
    for index in (index for held in scenario.stage_ranges[1:] for index in held):
        if layers[index].layer.split is None:
            raise UserError(
                f"{where}: '{workload.model.name}' lacks the costs of a split backward of '{layers[index].module}': "
                "`gsreal trace` writes them only if each layer uses the output of the one before alone, and runs the "
                "same operations at every batch size; allowed: every other plan.schedule"
            )


def _check_stages(scenario: Scenario, ranks: int, file: str) -> None:
    plan, model = scenario.plan, scenario.workload.model
    held = sum(layer.repeats * layer.module_buffer_bytes for layer in model.layers)
    if held != sum(model.buffer_bytes):
        raise UserError(
            f"{file}: plan.pp = {ranks}: the model file does not list which layers hold the module buffers of "
            f"{sum(model.buffer_bytes)} bytes: trace it again with `gsreal trace`"
        )
    for layer in model.layers:
        if any(buffer.category == REPLACED for buffer in layer.buffers):
            raise UserError(
                f"{file}: plan.pp = {ranks}: '{layer.name}' keeps a tensor until its next forward in an attribute that "
                "is no buffer (as torch.nn.utils.weight_norm does); a pipeline would keep one for each micro-batch, "
                "which is not supported; use torch.nn.utils.parametrizations.weight_norm"
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
