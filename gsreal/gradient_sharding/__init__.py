"""Gradient Sharding: data-parallel training in which every rank owns a shard of the gradients and optimizer state.

    optimizer = shard_gradients(model, lambda shard: torch.optim.AdamW(shard, lr=1e-3), push=Push(threshold=1e-4))
    for inputs, targets in batches:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

Push: as soon as the backward has completed a bucket of gradients, each rank sends the elements of its mean gradient
whose magnitude reaches the threshold to their owners. An owner adds what it receives, weighted by each sender's
fraction of the batch, to its own gradient, which is never thresholded, and updates its shard. Publish: the updated
parameters are sent to all ranks. At threshold 0 this is the same training as on a single device.

Parameters in bf16 or fp16 are replicas: owners keep an fp32 master copy of their shard, accumulate gradients in fp32,
and update and publish from the master copy.

Publishing can be thresholded too (`Publish`): an owner then sends a parameter only once it differs from its last
published value by at least the threshold, keeps a master copy in any precision, and all ranks, the owner included,
train on the published values. Parameters are up to date when `step` returns, unless `publish_overlaps` lets the next
forward start while they are in flight: then each module waits for its own parameters, and any other code that reads
parameters must call `finish` first.

If the ranks are devices of several nodes (a mesh of two axes), gradients are reduced densely inside the node first,
and the mean over the node's samples is thresholded and pushed across nodes. With `parameters="sharded"` the model is
sharded too: a rank keeps its shard of each unit, which is gathered just before its use and freed after it; nothing is
published.

Memory in addition to the model, per rank: optimizer state and one gradient for the own shard, and at most two buckets.
Bytes sent per step and rank, with n parameters and own share s: (1-s)*n values densely, or (value + 4) bytes for each
element over the threshold, and (ranks-1)/ranks*n values published (even shares). If parameters are sharded, a rank
holds s*n of them, and during compute also the root and one unit (with overlap: two); twice the published volume is
gathered.
"""

from gsreal.gradient_sharding.api import shard_gradients
from gsreal.gradient_sharding.estimate import Needs, memory_and_traffic
from gsreal.gradient_sharding.push import Sent
from gsreal.gradient_sharding.sharding import GradientSharding
from gssim.plan import Publish, Push

__all__ = ["GradientSharding", "Needs", "Publish", "Push", "Sent", "memory_and_traffic", "shard_gradients"]
