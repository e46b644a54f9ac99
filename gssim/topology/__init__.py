"""How devices are wired: a few lines in a cluster file for each usual kind, and the directed links they stand for."""

from typing import Any

from pydantic import TypeAdapter

from gssim.topology.builders import CUBE_MESH, build
from gssim.topology.kinds import (
    FullyConnected,
    Group,
    LeafSpine,
    LinkType,
    OneSwitch,
    Ring,
    ServerGroup,
    Servers,
    Site,
    Sites,
    Switch,
    Topology,
    Torus,
)
from gssim.topology.sizes import check_size, size_of
from gssim.topology.wiring import Built, Wiring, wiring_of_links

__all__ = [
    "CUBE_MESH",
    "Built",
    "FullyConnected",
    "Group",
    "LeafSpine",
    "LinkType",
    "OneSwitch",
    "Ring",
    "ServerGroup",
    "Servers",
    "Site",
    "Sites",
    "Switch",
    "Topology",
    "Torus",
    "Wiring",
    "build",
    "check_size",
    "size_of",
    "structure_of",
    "wiring_of_links",
]

RATES = frozenset({"oversubscription", "hop_latency_s"})
"""Keys that say how fast, not how: like all that is a link's, no part of the structure."""

_ANY: TypeAdapter[Any] = TypeAdapter(Topology)


def structure_of(topology: Topology) -> dict[str, Any]:
    """Return how a topology wires what, without rates, sources and names: equal where only numbers differ.

    Device types are numbered as ranks first use them.
    """
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(kind for _, kind, _ in build(topology).devices))}
    data: dict[str, Any] = _structure(_ANY.dump_python(topology, mode="json"), kinds)
    return data


def _structure(data: Any, kinds: dict[str, int]) -> Any:
    if isinstance(data, list):
        return [_structure(item, kinds) for item in data]
    if not isinstance(data, dict):
        return data
    kept = {key: value for key, value in data.items() if not key.endswith("link") and key not in RATES | {"name"}}
    return {key: kinds[value] if key == "device" else _structure(value, kinds) for key, value in kept.items()}
