"""Cut of a model's chain of layers into pipeline stages: given by the user, or balanced over unequal devices."""

from collections.abc import Sequence

from gssim.cluster import DeviceType
from gssim.errors import UserError
from gssim.plan import Plan, splitting
from gssim.scenario.device_rates import layer_costs_s
from gssim.workload import LayerInstance, Workload, unrolled

INTERLEAVED_STAGES_PER_RANK = 2
"""Default number of stages per rank of an interleaved plan."""


def schedule_of(plan: Plan, ranks: int) -> str:
    """Return the schedule of a pipeline of `ranks`: the plan's, else 1F1B where there are enough micro-batches."""
    return plan.schedule or ("1f1b" if plan.micro_batches >= ranks else "gpipe")


def stages_per_rank(plan: Plan, ranks: int) -> int:
    """Return the number of stages on each of a pipeline's ranks."""
    if plan.stages is not None:
        return max(1, len(plan.stages) // ranks)
    return INTERLEAVED_STAGES_PER_RANK if plan.schedule == "interleaved" else 1


def cut_layers(
    plan: Plan, workload: Workload, devices: Sequence[Sequence[DeviceType]], *, samples: int
) -> tuple[tuple[LayerInstance, ...], ...]:
    """Return the layers of each stage: stage i is on the pipeline's rank i, modulo the number of its ranks.

    `devices`: those of each rank, one in each replica; the slowest counts. `samples`: of a micro-batch. Counts are of
    the unrolled model's layers; the loss, which is in no module, is part of the last stage and is not counted. Raises
    UserError where there are too few layers, or the plan's counts do not fit the model.
    """
    layers = unrolled(workload.model)
    chain = [instance for instance in layers if instance.layer.modules]
    stages = len(devices) * stages_per_rank(plan, len(devices))
    if plan.stages is not None:
        where = f"plan.stages = {list(plan.stages)}"
        if len(plan.stages) % len(devices):
            raise UserError(
                f"{where}: {len(plan.stages)} stages cannot be divided evenly among {len(devices)} ranks (plan.pp)"
            )
        if sum(plan.stages) != len(chain):
            raise UserError(
                f"{where}: sums to {sum(plan.stages)}, but the model has {len(chain)} layers "
                "(every module of the model file, repetitions one by one; the loss is part of the last stage)"
            )
        counts = plan.stages
    elif stages > len(chain):
        raise UserError(f"plan.pp = {len(devices)}: {stages} stages, but the model has {len(chain)} layers (no loss)")
    else:
        rows = [_slowest_layer_times_s(types, workload, chain, samples) for types in devices]
        counts = splitting.balanced_stages([rows[stage % len(rows)] for stage in range(stages)])
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    ends[-1] = len(layers)
    return tuple(layers[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True))


def _slowest_layer_times_s(
    types: Sequence[DeviceType], workload: Workload, layers: Sequence[LayerInstance], samples: int
) -> list[float]:
    """Return each layer's time on the slowest of a rank's devices."""
    distinct = {id(device): device for device in types}.values()
    return [max(times) for times in zip(*(layer_costs_s(t, workload, layers, samples) for t in distinct), strict=True)]


def stage_cut_error(stages: Sequence[Sequence[LayerInstance]], *, value_bytes: int) -> str | None:
    """Return the reason why a model cannot be cut there, or None: a stage may pass one tensor on, and share nothing.

    `value_bytes`: of an element as traced. Tensors that several layers use show in the trace: the gradient of a shared
    parameter is created in one layer and added to in another, and a second tensor outlives the stage boundary.
    """
    home = {instance.index: number for number, stage in enumerate(stages) for instance in stage}
    gradients = {
        (instance.index + parameter.ready.layer_offset, parameter.elements * value_bytes): name
        for stage in stages
        for instance in stage
        for parameter, name in zip(instance.layer.parameters, instance.parameter_names, strict=True)
    }
    for number, stage in enumerate(stages):
        passed = 0
        for instance in stage:
            for buffer in instance.layer.buffers:
                freed_in = instance.index + buffer.freed.layer_offset
                if buffer.freed.phase != "b" or home.get(freed_in, number) == number:
                    continue
                passed += buffer.born.phase == "f" and freed_in > instance.index
                shared = gradients.get((freed_in, buffer.size_bytes.at(b=0, s=0)))
                if buffer.born.phase == "b" and shared:
                    return f"stages {home[freed_in]} and {number} would share the parameter '{shared}'"
        if passed > 1:
            return f"{passed} tensors, not one, go from '{stage[-1].module}' to later layers"
    return None
