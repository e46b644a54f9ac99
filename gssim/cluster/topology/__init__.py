"""Topologies: rings, switches, tori, servers with fabrics and sites, built into arrays of directed links."""

from gssim.cluster.topology.builders import Wiring, build, structure_of, wiring_of_links
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
