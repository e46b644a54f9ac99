"""How tensors are grouped into buckets, as PyTorch does."""

from collections.abc import Sequence

from gssim.plan.plan import DDP_BUCKET_BYTES, Plan
from gssim.plan.policies import Policies


def bucket_limits(plan: Plan, policies: Policies) -> tuple[float, float]:
    """Return (first, further) bucket limits in bytes.

    DistributedDataParallel closes its first bucket early only where its cap is the default one.
    """
    if policies.gradients == "all-reduce" and plan.bucket_bytes != DDP_BUCKET_BYTES:
        return plan.bucket_bytes, plan.bucket_bytes
    return plan.first_bucket_bytes, plan.bucket_bytes


def assign_buckets(sizes_bytes: Sequence[float], *, first_bytes: float, cap_bytes: float) -> list[list[int]]:
    """Return tensors (by position in `sizes_bytes`, the order in which gradients become ready) grouped into buckets.

    PyTorch's rule: a bucket closes once it holds at least its limit, `first_bytes` for the first, then `cap_bytes`.
    Source: torch/csrc/distributed/c10d/reducer.cpp, compute_bucket_assignment_by_size, as rebuilt after step one.

    >>> assign_buckets([3, 3, 3, 3], first_bytes=4, cap_bytes=100)
    [[0, 1], [2, 3]]
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    held = 0.0
    limit = first_bytes
    for position, size in enumerate(sizes_bytes):
        current.append(position)
        held += size
        if held >= limit:
            buckets.append(current)
            current, held, limit = [], 0.0, cap_bytes
    if current:
        buckets.append(current)
    return buckets
