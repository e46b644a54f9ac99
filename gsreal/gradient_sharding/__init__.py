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

Memory beside the model, per rank: optimizer state and one gradient for the own shard, and at most two buckets. Bytes
sent per step and rank, n parameters, own share s: (1-s)*n values densely, or (value + 4) bytes for each element over
the threshold, and (ranks-1)/ranks*n values published (even shares).
"""

from gsreal.gradient_sharding.sharding import GradientSharding, shard_gradients
from gssim.plan import Push

__all__ = ["GradientSharding", "Push", "shard_gradients"]
