"""The cluster: devices with measured costs, hosts, directed links, and presets of all of these."""

from gssim.cluster.cluster import BackendCost, Cluster, Device, DeviceType, Emulation, HostMemory, Link, memory_node
from gssim.cluster.contention import communicating_excess, contention_groups, core_shares, dealt, has_contention
from gssim.cluster.host_list import hosts_in
from gssim.cluster.lab_links import (
    FRAME_BYTES,
    SEGMENT_BYTES,
    burst_bytes,
    group_bytes,
    head_start_s,
    shaped_group_bytes,
)
from gssim.cluster.measured import (
    CompressionCost,
    Curve,
    CutBlockCost,
    LayerProfile,
    LowRankCost,
    OptimizerCost,
    PostingCost,
    Profile,
    Scratch,
    ShardedUnitCost,
)
from gssim.cluster.nccl_tuning import GENERATIONS, Algorithm, Array, Joint, Kind, NcclTuning, Protocol
from gssim.cluster.network_faults import Conditions, LinkFault, Traffic, applied, ends_of
from gssim.cluster.presets import expanded, presets

__all__ = [
    "FRAME_BYTES",
    "GENERATIONS",
    "SEGMENT_BYTES",
    "Algorithm",
    "Array",
    "BackendCost",
    "Cluster",
    "CompressionCost",
    "Conditions",
    "Curve",
    "CutBlockCost",
    "Device",
    "DeviceType",
    "Emulation",
    "HostMemory",
    "Joint",
    "Kind",
    "LayerProfile",
    "Link",
    "LinkFault",
    "LowRankCost",
    "NcclTuning",
    "OptimizerCost",
    "PostingCost",
    "Profile",
    "Protocol",
    "Scratch",
    "ShardedUnitCost",
    "Traffic",
    "applied",
    "burst_bytes",
    "communicating_excess",
    "contention_groups",
    "core_shares",
    "dealt",
    "ends_of",
    "expanded",
    "group_bytes",
    "has_contention",
    "head_start_s",
    "hosts_in",
    "memory_node",
    "presets",
    "shaped_group_bytes",
]
