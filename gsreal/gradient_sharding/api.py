"""`shard_gradients`: takes a model and makes the optimizer of its shards."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.gradient_sharding.bucket import Bucket, Partition
from gsreal.gradient_sharding.bucketing import trained_parameters, travelling_together
from gsreal.gradient_sharding.guards import OptimizerFactory, check_factory, check_holds
from gsreal.gradient_sharding.hierarchy import InNode, Levels, levels_of
from gsreal.gradient_sharding.options import (
    Parameters,
    check_callable,
    check_model,
    check_options,
    check_sizes,
    check_types,
    checked_shares,
    described_model,
    described_optimizer,
    find_groups,
    shards_in_groups,
    unowned,
)
from gsreal.gradient_sharding.point_to_point import backend_of, runs_on_device
from gsreal.gradient_sharding.publish import ForwardWaits, Publisher
from gsreal.gradient_sharding.push import Pusher
from gsreal.gradient_sharding.sharded_parameters import gather_just_in_time, make_units
from gsreal.gradient_sharding.sharding import GradientSharding, optimizers_of
from gsreal.gradient_sharding.side_stream import Observer, unobserved
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
    observe: Observer = unobserved,
) -> GradientSharding:
    """Shard the gradients and the optimizer state of `model`, and return what to call `step` on.

    Parameters are moved into flat buckets (they stay views of them) and made equal to the first rank's, and so are
    buffers, once: as each rank trains, its BatchNorm statistics become its own. `optimizer_factory` gets this rank's
    shards and must return an elementwise optimizer of exactly these: it is tried on small tensors first. Assumes that
    the loss is the mean over the rank's own samples; set `.weights` where ranks have unequal batches. Parameters that
    no rank's backward reaches are passed over, as on one device (with a threshold: those that neither their owner
    reached, nor anything was sent of).

    `mesh`, `group`: the ranks, all by default. On a mesh of two axes, (nodes, devices of a node), gradients are
    reduce-scattered inside the node first, and pushed across nodes.
    `parameters`: `sharded`: nothing is published, but every rank keeps its shard of the parameters alone, and those of
    each of `units` (modules, in the order in which they run: a transformer's blocks) are gathered just before its
    forward, freed, and gathered again for its backward. `gathered`: they stay from forward to backward. What no unit
    has stays all the while. Between steps, parameters have no values; `model.state_dict()`, on all ranks, has them.

    `shard_shares`: each rank's fraction of every bucket (even by default). `push`: what is sent, and how; by default
    all, densely. `publish`: the same for updated parameters; with a threshold, owners keep a master copy of their shard
    in any case. `point_to_point`: exchange by point-to-point messages; else by the backend's all_to_all_single and
    broadcasts.

    `param_groups`: dicts with the model's parameters (or their names) under `params` and options of their own, as
    torch's optimizers take them; the factory then gets the same with shards in their place.
    `scaler`: the GradScaler that scales the loss. Gradients travel scaled, and thresholds count for them unscaled;
    then `unscale_`, `step` and `update` as usual. Costs a scalar all-reduce a backward, so that all skip alike.
    `skip_nonfinite`: without a scaler, skip steps with NaN or infinite gradients (`skipped_steps` counts them); costs a
    scalar all-reduce a step, or nothing where `clip_grad_norm_` is called.

    `whole_tensors`: every parameter has one owner, as near to the shares as can be, who updates it in its shape: for
    optimizers that look at whole matrices or norms of layers (Muon, Adafactor, LAMB). Such shards never change owners.

    `bucket_bytes`, `first_bucket_bytes`: when a bucket closes; units are buckets of their own. `parameter_order`: the
    order in which gradients become ready (reversed registration by default). `overlap`: whether gathers and reductions
    inside nodes begin early, to go on beside the compute: by default where they can (nccl). False: pushes, too, are
    waited for where they begin. `publish_overlaps`: let the next forward begin while published parameters are under
    way, each module waiting for its own. Whatever else reads parameters between `step` and the forward (a moving
    average, a norm, `torch.save`) must then call `optimizer.finish()` first, or it finds old values.

    Raises ValueError where parameters, units and options do not fit one another, or differ between ranks.
    """
    check_types(
        model=(model, nn.Module),
        mesh=(mesh, DeviceMesh),
        push=(push, Push),
        publish=(publish, Publish),
        scaler=(scaler, torch.amp.GradScaler),
        units=(units, Iterable),
        param_groups=(param_groups, Iterable),
    )
    check_callable(optimizer_factory=optimizer_factory, observe=observe)
    check_sizes(bucket_bytes=bucket_bytes, first_bucket_bytes=first_bucket_bytes)
    units, param_groups = tuple(units), param_groups if param_groups is None else tuple(param_groups)
    levels = levels_of(mesh, group)
    publish = publish or Publish()
    check_options(parameters, units, publish, param_groups)
    shares = checked_shares(shard_shares, len(levels.ranks), scaler)
    if parameters != "replicated":
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps runs and is read by itself too
    trained = trained_parameters(model, parameter_order)
    thresholded = publish.threshold is not None or (push is not None and push.threshold is not None)
    formers = _formers(trained)
    check_model(model, trained, thresholded=thresholded)
    for parameter in trained.values():
        backend_of(levels.across, parameter.device)
    check_factory(optimizer_factory, param_groups, like=next(iter(trained.values())), whole_tensors=whole_tensors)
    for former in formers:
        former.retire()
    partition = levels.partition(shares, whole_tensors=whole_tensors)
    buckets: Sequence[Bucket]
    if parameters == "replicated":
        found = travelling_together(trained, param_groups, first_bytes=first_bucket_bytes, cap_bytes=bucket_bytes)
        buckets = [_bucket(i, each.parameters, levels, partition) for i, each in enumerate(found)]
        for bucket, each in zip(buckets, found, strict=True):
            bucket.group_index = each.group
    else:
        buckets = make_units(model, units, list(trained.values()), levels, partition, observe=observe)
    if partition.idle_owners:
        raise ValueError("whole_tensors: some ranks would own no parameter; take fewer ranks, or other shard_shares")
    names = {parameter: name for name, parameter in trained.items()}
    device = buckets[0].flat.device
    asked = {
        "ranks": levels.ranks,
        "parameters": parameters,
        "shard_shares": shares,
        "push": push or Push(),
        "publish": publish,
        "scaler": scaler is not None,
        "skip_nonfinite": skip_nonfinite,
        "point_to_point": point_to_point,
        "overlap": overlap,
        "publish_overlaps": publish_overlaps,
        "whole_tensors": whole_tensors,
    }
    said = {name: repr(value) for name, value in asked.items()}
    levels.check_alike(said | described_model(model, buckets, names), device)
    _take_shards(buckets, levels, unowned(model, trained), master=publish.threshold is not None)
    beside = runs_on_device(levels.across, device) if overlap is None else overlap
    gather_just_in_time(model, kept=parameters == "gathered", prefetch=beside)
    if whole_tensors:
        for bucket in buckets:
            bucket.cut_by_parameter()
    shards = shards_in_groups(buckets, param_groups)
    optimizer = optimizer_factory(shards)
    check_holds(optimizer, shards)
    find_groups(buckets, optimizer)
    levels.check_alike(described_optimizer(optimizer), device)
    rules = resolved_push(push or Push(), sgd=isinstance(optimizer, torch.optim.SGD))
    waits = overlap is False
    pusher = Pusher(
        rules,
        levels.across,
        buckets,
        protocol=levels.protocol,
        point_to_point=point_to_point,
        observe=observe,
        overlaps=not waits,
    )
    publisher = Publisher(publish, pusher, buckets, overlaps=publish_overlaps, inside=levels.inside)
    if publish_overlaps and parameters == "replicated":
        ForwardWaits(model, list(buckets), publisher)
    in_node = InNode(levels, device, overlap=beside, observe=observe)
    parts = (buckets, optimizer, pusher, publisher, levels, in_node)
    return GradientSharding(*parts, model=model, names=names, scaler=scaler, skip_nonfinite=skip_nonfinite)


def _formers(trained: Mapping[str, nn.Parameter]) -> list[GradientSharding]:
    """Return the optimizers that own parameters already; raise ValueError where these have no values."""
    found = optimizers_of(trained.values())
    if any(not bucket.holds_values for former in found for bucket in former.buckets):
        raise ValueError(
            "an earlier shard_gradients has sharded the model's parameters: load model.state_dict() into another "
            "model, and give it that"
        )
    return found


def _bucket(index: int, parameters: list[nn.Parameter], levels: Levels, partition: Partition) -> Bucket:
    division = partition.divide([parameter.numel() for parameter in parameters])
    return Bucket(index, parameters, division, node=levels.node, place=levels.place)


def _take_shards(buckets: Sequence[Bucket], levels: Levels, others: Sequence[Tensor], *, master: bool) -> None:
    """Begin with the first rank's values everywhere, those that nobody owns included, and take the own shards."""
    levels.make_equal([*(bucket.whole for bucket in buckets), *others])
    for bucket in buckets:
        bucket.take_shard(master=master)
