"""Training with parameters replicated on every rank: a single device, and DistributedDataParallel."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook

from gsreal.measure import Timeline
from gsreal.methods.optimizers import make_optimizer, replica_optimizer_of
from gsreal.methods.training import Training, data_group
from gssim.plan import DDP_BUCKET_BYTES, MIB
from gssim.scenario import Scenario
from gssim.workload import Workload


def train_single_device(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Train on a single device, without communication."""
    optimizer = make_optimizer(scenario.workload, module.parameters(), device)
    return Training(module, optimizer, timeline, scale=1.0)


def all_reduce_gradients(scenario: Scenario, module: nn.Module, timeline: Timeline, device: torch.device) -> Training:
    """Train with DistributedDataParallel, gradients as views of its buckets.

    Its optimizer state replicated, or sharded. If the plan compresses gradients, buckets are all-reduced by torch's own
    hook for the format. If it disables overlap, each bucket's all-reduce is awaited as soon as it starts.
    """
    last: list[Any] = []

    def note(_parameter: Tensor) -> None:
        if wrapped.require_backward_grad_sync:
            last[:] = [timeline.mark()]

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    cap = scenario.plan.bucket_bytes
    options: dict[str, Any] = {} if cap == DDP_BUCKET_BYTES else {"bucket_cap_mb": cap / MIB}
    options["process_group"] = data_group(scenario.policies, device, "dp_replicate")
    wrapped = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, **options)
    replicas = options["process_group"] or dist.group.WORLD
    assert replicas is not None
    compress = scenario.policies.compress
    if compress:
        hook = _compressed_all_reduce(compress, replicas, timeline, overlap=scenario.plan.overlap)
        wrapped.register_comm_hook(None, hook)
    elif not scenario.plan.overlap:
        wrapped.register_comm_hook(None, _blocking_all_reduce(replicas, timeline))
    if scenario.policies.optimizer_state == "sharded":
        optimizer = shard_optimizer_state(scenario.workload, wrapped, timeline, device, group=wrapped.process_group)
    else:
        optimizer = make_optimizer(scenario.workload, wrapped.parameters(), device)

    def syncing(leaves: bool) -> AbstractContextManager[None]:
        return nullcontext() if leaves else wrapped.no_sync()

    return Training(
        wrapped,
        optimizer,
        timeline,
        # DDP itself takes the mean, and so do torch's compression hooks
        scale=float(scenario.policies.data_ranks) if scenario.plan.overlap or compress else 1.0,
        last_gradient=last,
        replicas=replicas,
        sync_each=scenario.policies.gradient_sync == "micro-batch",
        syncing=syncing,
    )


Hook = Callable[[object, Any], torch.futures.Future[Tensor]]
COMPRESSION_HOOKS = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
"""torch's hooks by format: they cast a bucket, divide it by the number of replicas, all-reduce it, and cast it back."""


def _compressed_all_reduce(precision: str, group: dist.ProcessGroup, timeline: Timeline, *, overlap: bool) -> Hook:
    """Return a DistributedDataParallel hook that all-reduces a bucket in a 16-bit format, and records its spans."""

    # DDP reads these annotations
    def compressed(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        with timeline.span(f"compress bucket {bucket.index()}", "compression"):
            pending = COMPRESSION_HOOKS[precision](group, bucket)
        if not overlap:
            with timeline.span(f"all-reduce bucket {bucket.index()}", "exposed_communication", group):
                pending.wait()
        return pending

    return compressed


def _blocking_all_reduce(group: dist.ProcessGroup, timeline: Timeline) -> Hook:
    """Return a DistributedDataParallel hook that all-reduces a bucket before the backward continues."""

    # DDP reads these annotations
    def summed(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
        with timeline.span(f"all-reduce bucket {bucket.index()}", "exposed_communication", group):
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            assert work is not None
            work.wait()
        return work.get_future().then(lambda done: done.value()[0])

    return summed


def shard_optimizer_state(
    workload: Workload,
    module: nn.Module,
    timeline: Timeline,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
) -> torch.optim.Optimizer:
    """Return ZeroRedundancyOptimizer: each rank of the group updates its own tensors, then broadcasts them one by one.

    The group is everybody by default.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class ObservedZeroRedundancyOptimizer(ZeroRedundancyOptimizer):
        def _sync_params(self) -> None:
            with timeline.span("broadcast parameters", "exposed_communication", group or dist.group.WORLD):
                super()._sync_params()  # type: ignore[misc]

    kind, settings = replica_optimizer_of(workload, device)
    return ObservedZeroRedundancyOptimizer(module.parameters(), kind, process_group=group, **settings)
