"""Gradient Sharding: data-parallel training in which every rank owns a shard of the gradients and optimizer state.

    optimizer = shard_gradients(model, lambda shard: torch.optim.AdamW(shard, lr=1e-3), push=Push(threshold=1e-4))
    for inputs, targets in batches:
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

As soon as a bucket of gradients is complete in the backward, each rank sends to the owner of every element its mean
gradient, where its magnitude reaches the threshold (push). Owners add what they receive, weighted by each rank's part
of the batch, to their own gradient, which is never thresholded, and update. The updated parameters go back to
everybody (publish). At threshold 0 this is the same training as on a single device.

Parameters in bf16 or fp16 are replicas: owners keep an fp32 master copy of their shard, add up gradients in fp32, and
update and publish from it.

What is published can be thresholded too (`Publish`): owners then send parameters only once they are far enough from
what was last published of them, keep a master copy in any precision, and everybody trains on what was published.
Parameters are up to date when `step` returns, unless `publish_overlaps` asks for the next forward to begin while they
are under way: then each module waits for its own, and whatever else reads them must call `finish` first.

Where ranks are devices of several nodes (a mesh of two axes), gradients are added up inside the node first, densely,
and the mean over the node's samples is thresholded and pushed across. With `parameters="sharded"` the model is sharded
too: a rank keeps its shard of each unit, which is gathered just before its use and freed behind it; nothing is
published.

Memory beside the model, per rank: optimizer state and one gradient for the own shard, and at most two buckets. Bytes
sent per step and rank, n parameters, own share s: (1-s)*n values densely, or (value + 4) bytes for each element over
the threshold, and (ranks-1)/ranks*n values published (even shares). Where parameters are sharded, a rank holds s*n of
them, and while it computes the root and one unit (beside the compute: two) as well; twice what would be published is
gathered.
"""

from gsreal.gradient_sharding.api import shard_gradients
from gsreal.gradient_sharding.estimate import Needs, memory_and_traffic
from gsreal.gradient_sharding.push import Sent
from gsreal.gradient_sharding.sharding import GradientSharding
from gssim.plan import Publish, Push

__all__ = ["GradientSharding", "Needs", "Publish", "Push", "Sent", "memory_and_traffic", "shard_gradients"]
