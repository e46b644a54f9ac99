"""Topologies: rings, switches, tori, servers with fabrics and sites, built into arrays of directed links."""

from gssim.cluster.topology.builders import build, structure_of
from gssim.cluster.topology.kinds import (
    CUBE_MESH_DEVICES,
    FullyConnected,
    LeafSpine,
    LinkType,
    Ring,
    ServerGroup,
    Servers,
    Sites,
    Switch,
    Topology,
    Torus,
    check_size,
    size_of,
)
from gssim.cluster.topology.wiring import Wiring, wiring_of_links
