"""Checks of the training: optimizer, precisions, clipping, adapters, frozen layers, compiled blocks, recomputation."""

from collections.abc import Iterable

from gssim.errors import UserError
from gssim.plan import METHODS, Policies
from gssim.plan.pipeline_schedule import INTERLEAVED
from gssim.scenario.device_rates import has_master_copy, layer_profile
from gssim.scenario.expert_load import routes_parts
from gssim.scenario.scenario import Scenario
from gssim.scenario.vocabulary_slices import shares_embedding
from gssim.workload import TokenInput, Workload
from gssim.workload.layer import REPLACED
from gssim.workload.optimizers import all_matrices


def check_optimizer_state(workload: Workload, file: str) -> None:
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


def check_muon(scenario: Scenario, policies: Policies, file: str) -> None:
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
        (plan.zero_implementation_key, policies.zero1_implementation, "megatron"),
    )
    for key, value, allowed in refused:
        if value not in (allowed, "torch"):
            hint = "leave it out" if allowed is None else f"allowed: {'torch, ' * (allowed == 'megatron')}{allowed}"
            why = "ranks hold parts of the matrices" if key != "plan.offload" else "AdamW alone updates on the host"
            raise UserError(f"{where}: cannot run yet with {key} = {value}: {why}; {hint}")


PARTLY_TRAINING = ", ".join(
    name
    for name, method in METHODS.items()
    if method.partition == "data" and method.sync_every_steps is None and not method.compressor
)
"""Methods that run beside adapters, frozen layers or autocast, as messages list them."""


def check_traced_variants(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse adapters, autocast and frozen layers in plans that do not run with them."""
    workload, plan = scenario.workload, scenario.plan
    name = next((key for key in ("adapters", "autocast", "frozen") if getattr(workload, key) is not None), None)
    if name is None:
        return
    where = f"{file}: workload.{name}"
    runs = policies.partition == "data" and policies.sync_every_steps is None and not policies.compressor
    if name == "frozen":
        _check_frozen(scenario, policies, where, runs=runs)
        return
    if not runs:
        raise UserError(f"{where}: cannot run yet with method '{plan.method}'; allowed: methods {PARTLY_TRAINING}")
    if name == "adapters":
        check_adapters(scenario, policies, where)
    elif policies.tp > 1:
        check_autocast(scenario, policies, where)


def _check_frozen(scenario: Scenario, policies: Policies, where: str, *, runs: bool) -> None:
    """Refuse frozen layers where plans divide the model's layers, or methods do not run with them (`runs`)."""
    plan = scenario.plan
    if not runs:
        raise UserError(
            f"{where}: cannot run yet with method '{plan.method}': how it gathers, pushes or compresses beside "
            f"frozen layers is not modelled; allowed: methods {PARTLY_TRAINING}"
        )
    for key, threshold in (("push", scenario.push.threshold), ("publish", plan.publish.threshold)):
        if threshold:
            raise UserError(
                f"{where}: plan.{key}.threshold = {threshold:g}: gradient statistics are of a training of all "
                "layers; leave it out"
            )
    if policies.tp > 1:
        _refuse_beside_slices(
            where,
            policies,
            (
                (
                    "plan.tp_overlap",
                    plan.tp_overlap,
                    False,
                    "frozen weights have fewer products than it counts on",
                ),
                ("plan.async_input_gradients", plan.async_input_gradients, False, "frozen weights have no gradients"),
            ),
        )


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
    refused: tuple[tuple[str, object, object, str], ...] = (
        ("plan.gathered_inputs", plan.gathered_inputs, "kept", "frozen weights need no input for their gradients"),
        ("plan.tp_overlap", plan.tp_overlap, False, "products of frozen weights are fewer than it counts on"),
        ("plan.async_input_gradients", plan.async_input_gradients, False, "frozen weights have no gradients beside it"),
    )
    if policies.tp > 1:
        _refuse_beside_slices(where, policies, refused)


def check_autocast(scenario: Scenario, policies: Policies, where: str) -> None:
    """Refuse what tensor-parallel ranks cannot do yet under autocast."""
    plan, head = scenario.plan, "what a divided head casts is not modelled"
    tied = plan.embedding_parallel and shares_embedding(scenario.workload.model)
    _refuse_beside_slices(
        where,
        policies,
        (
            ("plan.loss_parallel", plan.loss_parallel, False, head),
            ("plan.embedding_parallel", tied, False, f"the head has the weight of the embedding, and {head}"),
            ("plan.gathered_inputs", plan.gathered_inputs, "kept", "maps keep casts of what is gathered"),
            (
                "plan.async_input_gradients",
                plan.async_input_gradients,
                False,
                "gradients are cast between the products and their sums",
            ),
        ),
    )


def _refuse_beside_slices(where: str, policies: Policies, refused: Iterable[tuple[str, object, object, str]]) -> None:
    """Refuse values of keys but the allowed one, beside tensor parallelism; `refused`: key, value, allowed value, why
    others are refused.
    """
    for key, value, allowed, why in refused:
        if value != allowed:
            shown = [f"'{each}'" if isinstance(each, str) else str(each).lower() for each in (value, allowed)]
            raise UserError(
                f"{where}: cannot run yet beside plan.tp = {policies.tp} with {key} = {shown[0]}: {why}; allowed: "
                f"{shown[1]}"
            )


def check_compiled(scenario: Scenario, policies: Policies, file: str) -> None:
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
            plan.schedule in INTERLEAVED,
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
            shown = key if value == "..." else f"{key} = {value!r}"
            raise UserError(f"{where}: {of}, and {shown} cannot run yet with them: {why}")


def check_reduction(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse a precision of reductions where nothing is reduced over replicas or shards, or the plan compresses it."""
    workload, plan = scenario.workload, scenario.plan
    if workload.reduce_precision in (None, workload.precision):
        return
    where = f"{file}: workload.reduce_precision = '{workload.reduce_precision}'"
    if policies.gradients == "push":
        if workload.reduce_precision == "fp32" and has_master_copy(workload):
            return  # owners sum gradients in fp32 anyway
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


def check_loss_scale(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse a scaled loss in other precisions than fp16, and where ranks could skip different steps."""
    workload, method = scenario.workload, scenario.plan.method
    if workload.loss_scale is None:
        return
    where = f"{file}: workload.loss_scale = {workload.loss_scale!r}"
    if "fp16" not in (workload.precision, workload.autocast):
        raise UserError(
            f"{where}: gradients in workload.precision = '{workload.precision}' need no scaled loss; leave it out"
        )
    if policies.partition == "weight-gradient":
        raise UserError(
            f"{where}: cannot run yet with method '{method}': its ranks publish the layers that they update without "
            "agreeing on whether all gradients are finite; leave it out"
        )


def check_clipping(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse gradient clipping where owners do not know which of their gradients other ranks hold too."""
    norm = scenario.workload.clip_norm
    pushes_slices = policies.tp > 1 and policies.gradients == "push"
    if norm is not None and (pushes_slices or policies.partition == "weight-gradient"):
        raise UserError(
            f"{file}: workload.clip_norm = {norm:g}: cannot run yet with method '{scenario.plan.method}' and plan.tp = "
            f"{policies.tp}: owners hold ranges or layers, of slices of some gradients and of the whole of others; "
            "allowed: other methods, or gs and gs_z3 with plan.tp = 1"
        )


def check_recompute(scenario: Scenario, policies: Policies, file: str) -> None:
    """Refuse recomputation of which the model file does not list what each block keeps, or of blocks in no chain.

    A checkpointed block is modelled to recompute its forward where its own backward begins. Blocks that take
    more than the output of the layer before them (two towers side by side, two tensors passed on) run their backwards
    during others'; that shows in their parameters, whose gradients then arise there.
    """
    recompute = scenario.plan.recompute
    if recompute == "none":
        return
    model = scenario.workload.model
    held = model.sliced_layers if policies.tp > 1 else model.context_layers if policies.cp > 1 else model.layers
    if routes_parts(model, policies):
        held = model.expert_sequence_layers
    for layer in held:
        # RecurrentGemma: such a state refers to the operations that made it, so that all tensors of the second forward,
        # which have no lifetime here, stay with it
        states = [each for each in layer.buffers if each.category == REPLACED]
        if layer.block and any(each.bytes_at(b=2, s=1, scale=1) != each.bytes_at(b=3, s=1, scale=1) for each in states):
            raise UserError(
                f"{file}: plan.recompute = '{recompute}': '{layer.name}' keeps a state of its batch to its next "
                "forward, but not as a buffer, and with it all that runs again; not supported; allowed: 'none'"
            )
        if layer.block and layer.kept_positions(recompute) is None:
            raise UserError(
                f"{file}: plan.recompute = '{recompute}': the model file does not list what the block '{layer.name}' "
                "keeps: trace it again; the output of a matrix product or convolution that is changed in place cannot "
                "be kept"
            )
        if layer.block and any(parameter.born.layer_offset for parameter in layer.parameters):
            raise UserError(
                f"{file}: plan.recompute = '{recompute}': '{model.name}' cannot run yet with recomputation: its blocks "
                f"are no chain, as gradients of '{layer.name}' arise in the backward of another layer (a block takes "
                "more than the output of the layer before it); allowed: 'none'"
            )


def check_maps(scenario: Scenario, file: str) -> None:
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
