"""What there is: device types with their costs, devices on hosts, directed links, and the backend's habits."""

from gssim.cluster.cluster import BackendCost, Cluster, Device, DeviceType, Emulation, Link
from gssim.cluster.costs import (
    CompressionCost,
    Curve,
    CutBlockCost,
    LayerProfile,
    OptimizerCost,
    PostingCost,
    Profile,
    ShardedUnitCost,
)
from gssim.cluster.emulated import (
    FRAME_BYTES,
    SEGMENT_BYTES,
    burst_bytes,
    group_bytes,
    head_start_s,
    shaped_group_bytes,
)
from gssim.cluster.neighbours import communicating_excess, core_shares, dealt, is_coupled, neighbourhoods

__all__ = [
    "FRAME_BYTES",
    "SEGMENT_BYTES",
    "BackendCost",
    "Cluster",
    "CompressionCost",
    "Curve",
    "CutBlockCost",
    "Device",
    "DeviceType",
    "Emulation",
    "LayerProfile",
    "Link",
    "OptimizerCost",
    "PostingCost",
    "Profile",
    "ShardedUnitCost",
    "burst_bytes",
    "communicating_excess",
    "core_shares",
    "dealt",
    "group_bytes",
    "head_start_s",
    "is_coupled",
    "neighbourhoods",
    "shaped_group_bytes",
]
