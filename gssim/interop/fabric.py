"""Fabrics between hosts: Slurm's topology.conf and topology.yaml (topograph writes both), and labels of Kubernetes.

None of them gives rates. Switches are assumed to be as fast as the cards below them, divided by an oversubscription.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gssim.cluster import hosts_in
from gssim.errors import UserError, one_line
from gssim.interop.reading import parsed_json, parsed_yaml

TIER = re.compile(r"^(?:fabric\.topograph\.run|network\.topology\.(?:nvidia\.com|kubernetes\.io))/(?:tier-)?(.+)$")
ORDER = {"accelerator": 0, "leaf": 1, "spine": 2, "core": 3, "block": 1, "datacenter": 4}
"""Levels of labels that have names instead of numbers."""


@dataclass
class Fabric:
    """Switches over hosts."""

    nodes: list[str] = field(default_factory=list)
    """Names of the hosts in the order of the file."""
    above: dict[str, list[str]] = field(default_factory=dict)
    """Switches directly above each host or switch."""
    described: set[str] = field(default_factory=set)
    """Switches of which the file has said what is under them."""
    listed: list[str] = field(default_factory=list)
    """Lines on parts of the file that have no effect."""

    def put(self, child: str, parent: str) -> None:
        """Put a host or switch under a switch."""
        parents = self.above.setdefault(child, [])
        if parent not in parents:
            parents.append(parent)

    @property
    def switches(self) -> list[str]:
        """Names of all switches, lower ones first."""
        switches = list(dict.fromkeys(parent for node in self.nodes for parent in self.above.get(node, [])))
        for switch in switches:  # the list grows while it is walked
            switches += [parent for parent in self.above.get(switch, []) if parent not in switches]
        return switches

    @property
    def tops(self) -> list[str]:
        """Switches that are under no other switch."""
        return [switch for switch in self.switches if not self.above.get(switch)]


def of_fabric_file(path: Path, text: str) -> Fabric:
    """Return the fabric in a file of switches; raise UserError if it is invalid or has unconnected parts."""
    file = str(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        data = parsed_json(text, file=file) if path.suffix == ".json" else parsed_yaml(text, file=file)
        has_items = isinstance(data, Mapping) and isinstance(data.get("items"), list)
        fabric = _of_labels(data["items"], file) if has_items else _of_yaml(data, file)
    else:
        fabric = _of_conf(text, file)
    _check(fabric, file)
    homed = [node for node in fabric.nodes if len(fabric.above[node]) > 1]
    if homed:
        switches = ", ".join(fabric.above[homed[0]])
        fabric.listed.append(
            f"{len(homed)} of {len(fabric.nodes)} hosts are under several switches ({homed[0]}: {switches}): each of "
            "their cards has an equal part of its rate to every one"
        )
    return fabric


def _of_conf(text: str, file: str) -> Fabric:
    """Return the fabric of a topology.conf: lines of SwitchName= or BlockName= with their children."""
    fabric = Fabric()
    blocks = []
    for where, pairs in _lines_of_conf(text, file):
        name = pairs.pop("switchname", None)
        block = pairs.pop("blockname", None)
        nodes, switches = pairs.pop("nodes", None), pairs.pop("switches", None)
        for key in pairs:
            if key not in ("linkspeed", "blocksizes"):
                raise UserError(f"{where}: {one_line(key, 40)}: unknown key; allowed: SwitchName, BlockName and theirs")
            fabric.listed.append(f"{where.removeprefix(f'{file} ')}: {key} = {pairs[key]}: without effect")
        if name is None and block is None:
            if nodes or switches:
                raise UserError(f"{where}: lacks SwitchName or BlockName")
            continue
        if name is not None and block is not None:
            raise UserError(f"{where}: {name}: has SwitchName and BlockName; allowed: one of them")
        if (nodes is None) == (switches is None):
            raise UserError(f"{where}: {name or block}: needs Nodes or Switches, one of them")
        blocks += [block] if block is not None else []
        _hang(fabric, name or str(block), nodes, switches, where)
    _join_blocks(fabric, blocks)
    return fabric


def _lines_of_conf(text: str, file: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the place of every line that says something, and its values by keys in lower case.

    A line that ends in a backslash goes on in the next one.
    """
    before, first = "", 1
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        whole = before + line
        if line.endswith("\\"):
            whole = before = whole[:-1] + " "
            if number < len(lines):
                continue
        where, before, first = f"{file} line {first}", "", number + 1
        pairs: dict[str, str] = {}
        for word in whole.partition("#")[0].split():
            key, _, value = word.partition("=")
            if key.lower() in pairs:
                raise UserError(f"{where}: {one_line(key, 40)}: is there twice")
            pairs[key.lower()] = value
        if pairs:
            yield where, pairs


def _hang(fabric: Fabric, name: str, nodes: str | None, switches: str | None, where: str) -> None:
    if name in fabric.described:
        raise UserError(f"{where}: {name}: is described twice; allowed: all that is under a switch in one place")
    fabric.described.add(name)
    if (nodes or switches or "").upper() == "ALL":  # a word of Slurm, whose other files name them
        kind = "Nodes" if nodes is not None else "Switches"
        example = "node[0-7]" if nodes is not None else "leaf[0-3]"
        raise UserError(f"{where}: {name}: {kind}=ALL: does not say which; allowed: their names, such as {example}")
    for child in hosts_in(nodes or switches or "", file=where):
        if child == name:
            raise UserError(f"{where}: {name}: is its own child")
        if nodes is not None and child not in fabric.above:
            fabric.nodes.append(child)
        fabric.put(child, name)


def _join_blocks(fabric: Fabric, blocks: Sequence[str]) -> None:
    """Put one switch above all blocks, if the file does not connect them."""
    if blocks:
        fabric.listed.append(
            "blocks: a switch of network cards each; NVLinks between hosts of a block are not described (a rack of "
            "GB200 is one host: --gpu gb200)"
        )
    if len(blocks) > 1:
        fabric.listed.append(f"{len(blocks)} blocks: joined by one switch, as the file does not say")
        for block in blocks:
            fabric.put(block, "switch-of-blocks")


def _of_yaml(data: Any, file: str) -> Fabric:
    """Return the fabric of a topology.yaml, a list of topologies; only the cluster's default one counts."""
    entries = data if isinstance(data, list) else [data]
    tables = [entry for entry in entries if isinstance(entry, Mapping) and (entry.get("tree") or entry.get("block"))]
    if not tables:
        raise UserError(f"{file}: holds no tree and no block; allowed: Slurm's topology.yaml, or nodes of Kubernetes")
    table = next((entry for entry in tables if entry.get("cluster_default")), tables[0])
    fabric = Fabric()
    fabric.listed += [f"topology {entry.get('topology')}: another one counts" for entry in tables if entry is not table]
    blocks = []
    kind = "tree" if table.get("tree") else "block"
    listed = "switches" if kind == "tree" else "blocks"
    parts = table[kind].get(listed) if isinstance(table[kind], Mapping) else None
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise UserError(f"{file}: {listed}: must be a list of tables")
    for part in parts:
        name = part.get("switch" if kind == "tree" else "block")
        nodes, children = part.get("nodes"), part.get("children")
        if not isinstance(name, str) or not isinstance(nodes or children, str) or (nodes and children):
            raise UserError(f"{file}: {one_line(str(name), 60)}: needs a name, and nodes or children, one of them")
        blocks += [name] if kind == "block" else []
        _hang(fabric, name, nodes, children, file)
    _join_blocks(fabric, blocks)
    return fabric


def _of_labels(items: Sequence[Any], file: str) -> Fabric:
    """Return the fabric of nodes of Kubernetes (`kubectl get nodes -o json`) by topograph's labels."""
    fabric = Fabric()
    for item in items:
        meta = item.get("metadata") if isinstance(item, Mapping) else None
        labels = meta.get("labels") if isinstance(meta, Mapping) else None
        if not isinstance(labels, Mapping) or not isinstance(meta, Mapping):
            raise UserError(f"{file}: a node has no metadata.labels")
        tiers = {}
        for key, value in labels.items():
            if (match := TIER.match(str(key))) is not None:
                level = int(match[1]) if re.fullmatch(r"[0-9]{1,3}", match[1]) else ORDER.get(match[1], 5)
                tiers[level] = str(value)
        name = str(meta.get("name"))
        if not tiers:
            raise UserError(f"{file}: {one_line(name, 60)}: has no label fabric.topograph.run/tier-0")
        if name in fabric.above:
            raise UserError(f"{file}: {one_line(name, 60)}: is there twice")
        fabric.nodes.append(name)
        path = [name, *(f"tier{level}/{tiers[level]}" for level in sorted(tiers))]
        for child, parent in pairwise(path):
            fabric.put(child, parent)
    return fabric


def _check(fabric: Fabric, file: str) -> None:
    """Raise UserError for cycles, unconnected parts, and switches with nothing below them."""
    if not fabric.nodes:
        raise UserError(f"{file}: names no hosts")
    hosts = set(fabric.nodes)
    mixed = next((switch for switch in fabric.switches if switch in hosts), None)
    if mixed is not None:
        raise UserError(f"{file}: {mixed}: is a host and a switch")
    _check_order(fabric, file)
    below: dict[str, list[str]] = {}
    for child, parents in fabric.above.items():
        for parent in parents:
            below.setdefault(parent, []).append(child)
    reached, waiting = {fabric.nodes[0]}, [fabric.nodes[0]]
    while waiting:
        name = waiting.pop()
        new = [each for each in (*fabric.above.get(name, []), *below.get(name, [])) if each not in reached]
        reached.update(new)
        waiting += new
    islands = [node for node in fabric.nodes if node not in reached]
    if islands:
        first = fabric.nodes[0]
        raise UserError(f"{file}: {first} and {islands[0]} have no switch in common: islands; join their switches")


def _check_order(fabric: Fabric, file: str) -> None:
    """Raise UserError for switches that are below themselves, and for switches without hosts."""
    switches = fabric.switches
    empty = sorted(name for name in fabric.above if name not in {*switches, *fabric.nodes})
    if empty:
        raise UserError(f"{file}: {empty[0]}: no host is under this switch")
    left = {name: len(fabric.above.get(name, [])) for name in switches}
    below: dict[str, list[str]] = {name: [] for name in switches}
    for name in switches:
        for parent in fabric.above.get(name, []):
            below[parent].append(name)
    free = [name for name, parents in left.items() if not parents]
    for name in free:  # grows while it is walked, from the top switches down
        for child in below[name]:
            left[child] -= 1
            if not left[child]:
                free.append(child)
    if len(free) < len(switches):
        looped = next(name for name in switches if name not in set(free))
        raise UserError(f"{file}: {looped}: is under itself")
