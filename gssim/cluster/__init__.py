"""The cluster: devices with measured costs, hosts, directed links, and presets of all of these."""

from gssim.cluster.cluster import Cluster, Device, DeviceType, Link, memory_node
from gssim.cluster.contention import contention_groups, has_contention
from gssim.cluster.host_list import hosts_in
from gssim.cluster.measured import Curve, LayerProfile
from gssim.cluster.nccl_tuning import GENERATIONS, Array, Kind, NcclTuning
from gssim.cluster.network_faults import Conditions, applied, ends_of
from gssim.cluster.presets import presets
