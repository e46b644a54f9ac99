"""Entry point of the library: `shard_gradients` takes a model and returns the optimizer of its shards."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.gradient_sharding.bucket import Bucket, BucketPlan, Partition, plan_buckets, trained_parameters
from gsreal.gradient_sharding.guards import (
    OptimizerFactory,
    Parameters,
    assign_param_groups,
    check_callables,
    check_experts,
    check_factory,
    check_flags,
    check_model,
    check_optimizer_tensors,
    check_options,
    check_shares,
    check_sizes,
    check_types,
    describe_model,
    describe_optimizer,
    frozen_parameters,
    shards_by_group,
)
from gsreal.gradient_sharding.hierarchy import Hierarchy, IntraNodeReducer, hierarchy_of
from gsreal.gradient_sharding.point_to_point import backend_of, runs_on_device
from gsreal.gradient_sharding.publish import Publisher, WaitBeforeForward
from gsreal.gradient_sharding.push import Pusher
from gsreal.gradient_sharding.sharded_parameters import make_units, register_gather_hooks
from gsreal.gradient_sharding.sharding import GradientSharding, find_optimizers
from gsreal.gradient_sharding.side_stream import Observer, no_observer
from gssim.plan import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES, Publish, Push, resolved_push


def shard_gradients(
    model: nn.Module,
    optimizer_factory: OptimizerFactory,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    parameters: Parameters = "replicated",
    units: Sequence[nn.Module] = (),
    shard_shares: Sequence[float] | None = None,
    push: Push | None = None,
    publish: Publish | None = None,
    experts: Iterable[str] | None = None,
    expert_group: dist.ProcessGroup | None = None,
    param_groups: Sequence[Mapping[str, Any]] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    skip_nonfinite: bool = False,
    whole_tensors: bool = False,
    point_to_point: bool = True,
    bucket_bytes: float = DDP_BUCKET_BYTES,
    first_bucket_bytes: float = DDP_FIRST_BUCKET_BYTES,
    parameter_order: Sequence[str] | None = None,
    publish_overlaps: bool = False,
    overlap: bool | None = None,
    observe: Observer = no_observer,
) -> GradientSharding:
    """Shard the gradients and optimizer state of `model`, and return the optimizer to call `step` on.

    Parameters are moved into flat buckets (they remain views of them). Parameters and buffers are set to the first
    rank's values once; during training, each rank keeps its own BatchNorm statistics. `optimizer_factory` gets this
    rank's shards and must return an elementwise optimizer of exactly these: it is tried on small tensors first. Assumes
    that the loss is the mean over the rank's own samples; set `.weights` if ranks have unequal batches. Parameters that
    no rank's backward reaches are skipped, as on one device (with a threshold: those that neither their owner reached,
    nor any rank sent elements of).

    `mesh`, `group`: the ranks, all by default. On a mesh of two axes, (nodes, devices of a node), gradients are
    reduce-scattered inside the node first, and pushed across nodes. `parameters`: `sharded`: nothing is published;
    every rank keeps only its shard of the parameters, and those of each of `units` (modules in execution order, such as
    a transformer's blocks) are gathered just before the unit's forward, freed, and gathered again for its backward.
    `gathered`: the same, but parameters stay gathered from the forward to the backward. Parameters outside all units
    stay gathered throughout. Between steps parameters have no values (they read as NaN, and must not be written to);
    `model.state_dict()`, called on all ranks, has them.

    `shard_shares`: each rank's fraction of every bucket (even by default). `push`: which gradient elements are sent,
    and in which encoding; by default all, densely. `publish`: the same for updated parameters; with a threshold, owners
    keep a master copy of their shard in any case. `point_to_point`: exchange by point-to-point messages; else by the
    backend's all_to_all_single and broadcasts.

    `experts`: names of parameters that ranks in a row divide among them (expert parallelism), frozen ones included;
    `expert_group`: the ranks that hold the same ones as this rank. These alone own shards of them, in proportion to
    their shares, and push gradients of them to one another (on a mesh of two axes too, where nothing of them is reduced
    inside the node); a rank that holds them alone owns them whole, and nothing of them is sent. Their gradients are to
    be sums over the tokens of all ranks that divide them, whose `weights` must be equal. Such optimizers have neither a
    `state_dict` nor `sharded` yet.

    `param_groups`: dicts with the model's parameters (or their names) under `params` and options of their own, as
    torch's optimizers take them; the factory then gets the same with shards in their place. `scaler`: the GradScaler
    that scales the loss. Gradients are sent scaled, and thresholds apply to the unscaled values; call `unscale_`,
    `step` and `update` as usual. Costs a scalar all-reduce per backward, so that all ranks skip alike.
    `skip_nonfinite`: without a scaler, skip steps with NaN or infinite gradients (`skipped_steps` counts them); costs a
    scalar all-reduce per step, or nothing if `clip_grad_norm_` is called.

    `whole_tensors`: every parameter has one owner, chosen to match the shares as nearly as possible, who updates it in
    its shape: for optimizers that use whole matrices or norms of layers (Muon, Adafactor, LAMB). Such shards never
    migrate.

    `bucket_bytes`, `first_bucket_bytes`: sizes at which a bucket is closed; units are buckets of their own.
    `parameter_order`: the order in which gradients become ready (reversed registration by default). `overlap`: whether
    gathers and intra-node reductions start early and overlap compute; by default if the backend supports it (nccl).
    False: pushes, too, are awaited as soon as they are started. `publish_overlaps`: let the next forward start while
    published parameters are in flight, each module waiting for its own. Any other code that reads parameters between
    `step` and the forward (a moving average, a norm, `torch.save`) must then call `optimizer.finish()` first, or it
    reads old values; what it writes without that is refused as they arrive.

    Raises ValueError if parameters, units and options do not fit together, or differ between ranks.
    """
    check_types(model=model, mesh=mesh, push=push, publish=publish, scaler=scaler, experts=experts)
    check_types(expert_group=expert_group, units=units, param_groups=param_groups, parameter_order=parameter_order)
    check_flags(skip_nonfinite=skip_nonfinite, whole_tensors=whole_tensors, point_to_point=point_to_point)
    check_flags(publish_overlaps=publish_overlaps, overlap=False if overlap is None else overlap)
    check_callables(optimizer_factory=optimizer_factory, observe=observe)
    check_sizes(bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)
    units, param_groups = tuple(units), param_groups if param_groups is None else tuple(param_groups)
    hierarchy = hierarchy_of(mesh, group, expert_group)
    push, publish = push or Push(), publish or Publish()
    check_options(parameters, units, push, publish, param_groups)
    shares = check_shares(shard_shares, len(hierarchy.ranks), scaler)
    if parameters != "replicated":
        model = getattr(model, "_orig_mod", model)  # the module inside torch.compile is also called and read directly
    trained = trained_parameters(model, parameter_order)
    of_experts = check_experts(model, experts, expert_group, whole_tensors=whole_tensors)
    thresholded = publish.threshold is not None or push.threshold is not None
    previous_optimizers = _previous_optimizers(trained)
    check_model(model, trained, thresholded=thresholded)
    for parameter in trained.values():
        backend_of(hierarchy.inter_node, parameter.device)
    check_factory(optimizer_factory, param_groups, like=next(iter(trained.values())), whole_tensors=whole_tensors)
    for previous in previous_optimizers:
        previous.release_model()
    partition = hierarchy.partition(shares, whole_tensors=whole_tensors)
    partitions = {False: partition, True: hierarchy.expert_partition(shares)}
    sharded_experts = trained.keys() & of_experts
    buckets: Sequence[Bucket]
    if parameters == "replicated":
        sizes = {"first_bytes": first_bucket_bytes, "cap_bytes": bucket_bytes}
        plans = plan_buckets(trained, param_groups, **sizes, experts=sharded_experts)
        buckets = [_make_bucket(i, plan, hierarchy, partitions[plan.of_experts]) for i, plan in enumerate(plans)]
    else:
        apart = {trained[name] for name in sharded_experts}
        order = list(trained.values())
        buckets = make_units(model, units, order, hierarchy, partitions, experts=apart, observe=observe)
    if partition.idle_owners:
        raise ValueError("whole_tensors: some ranks would own no parameter; take fewer ranks, or other shard_shares")
    names = {parameter: name for name, parameter in trained.items()}
    device = buckets[0].flat.device
    settings = {
        "ranks": hierarchy.ranks,
        "parameters": parameters,
        "shard_shares": shares,
        "push": push,
        "publish": publish,
        "scaler": scaler is not None,
        "skip_nonfinite": skip_nonfinite,
        "point_to_point": point_to_point,
        "overlap": overlap,
        "publish_overlaps": publish_overlaps,
        "whole_tensors": whole_tensors,
        "experts": sorted(of_experts),
        "ranks that divide experts": hierarchy.expert_ranks,
    }
    descriptions = {name: repr(value) for name, value in settings.items()}
    hierarchy.check_equal_on_all_ranks(descriptions | describe_model(model, buckets, names), device)
    _set_to_first(model, buckets, trained, of_experts, hierarchy)
    for bucket in buckets:
        bucket.create_shard(master=publish.threshold is not None and bucket.is_published)
    overlaps_compute = runs_on_device(hierarchy.inter_node, device) if overlap is None else overlap
    register_gather_hooks(model, kept=parameters == "gathered", prefetch=overlaps_compute)
    if whole_tensors:
        for bucket in buckets:
            bucket.split_by_parameter()
    optimizer = _made_optimizer(optimizer_factory, buckets, param_groups, hierarchy)
    rules = resolved_push(push, sgd=isinstance(optimizer, torch.optim.SGD))
    pusher = Pusher(
        rules,
        buckets,
        protocol=hierarchy.protocol,
        point_to_point=point_to_point,
        observe=observe,
        overlaps=overlap is not False,
    )
    publisher = Publisher(
        publish, pusher, buckets, overlaps=publish_overlaps, names=names, intra_node=hierarchy.intra_node
    )
    if publish_overlaps and parameters == "replicated":
        WaitBeforeForward(model, list(buckets), publisher)
    reducer = IntraNodeReducer(hierarchy, device, overlap=overlaps_compute, observe=observe)
    parts = (buckets, optimizer, pusher, publisher, hierarchy, reducer)
    return GradientSharding(*parts, model=model, names=names, scaler=scaler, skip_nonfinite=skip_nonfinite)


def _set_to_first(
    model: nn.Module,
    buckets: Sequence[Bucket],
    trained: Mapping[str, nn.Parameter],
    experts: Collection[str],
    hierarchy: Hierarchy,
) -> None:
    """Set parameters, buffers and the model's number to those of the first rank, experts of the first that has them."""
    number = torch.tensor(hierarchy.protocol.model, device=buckets[0].flat.device)
    held: dict[bool, list[Tensor]] = {False: [*model.buffers(), number], True: []}
    for bucket in buckets:
        held[bucket.owners is hierarchy.expert_owners].append(bucket.whole)
    for name, parameter in frozen_parameters(model, trained).items():
        held[name in experts].append(parameter.detach())
    for of_experts, tensors in held.items():
        hierarchy.broadcast_from_first(tensors, of_experts=of_experts)
    hierarchy.protocol.model = int(number)


def _make_bucket(index: int, plan: BucketPlan, hierarchy: Hierarchy, partition: Partition) -> Bucket:
    """Move a plan's parameters into a bucket, divided among the owners."""
    division = partition.divide([parameter.numel() for parameter in plan.parameters])
    owners = hierarchy.expert_owners if plan.of_experts else hierarchy.owners
    assert owners is not None  # checked before
    place = 0 if plan.of_experts else hierarchy.place
    bucket = Bucket(index, plan.parameters, division, owners=owners, place=place)
    bucket.is_published = owners.ranks > 1 or not plan.of_experts
    bucket.group_index = plan.group
    return bucket


def _made_optimizer(
    factory: OptimizerFactory,
    buckets: Sequence[Bucket],
    param_groups: Sequence[Mapping[str, Any]] | None,
    hierarchy: Hierarchy,
) -> torch.optim.Optimizer:
    """Return the factory's optimizer of this rank's shards, and set the buckets' parameter groups.

    Raises ValueError if the optimizer differs between ranks.
    """
    shards = shards_by_group(buckets, param_groups)
    optimizer = factory(shards)
    check_optimizer_tensors(optimizer, shards)
    assign_param_groups(buckets, optimizer)
    hierarchy.check_equal_on_all_ranks(describe_optimizer(optimizer), buckets[0].flat.device)
    return optimizer


def _previous_optimizers(trained: Mapping[str, nn.Parameter]) -> list[GradientSharding]:
    """Return earlier optimizers of the parameters; raise ValueError if they have sharded them, leaving no values."""
    optimizers = find_optimizers(trained.values())
    if any(not bucket.has_values_between_steps for optimizer in optimizers for bucket in optimizer.buckets):
        raise ValueError(
            "an earlier shard_gradients has sharded the model's parameters: load model.state_dict() into another "
            "model, and give it that"
        )
    return optimizers
