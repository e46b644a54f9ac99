"""Cluster files from hosts and a fabric: as a topology if one describes them, else link by link."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from gssim.cluster import Cluster
from gssim.cluster.presets import expanded, presets
from gssim.cluster.topology import build
from gssim.cluster.topology.kinds import Servers
from gssim.errors import UserError, one_line
from gssim.interop.detected_host import detected
from gssim.interop.fabric import Fabric, of_fabric_file
from gssim.interop.hosts import (
    CARD_COUNT_ASSUMED,
    CARDS_ASSUMED,
    Host,
    assumed_cards,
    first_devices,
    matrices_in,
    of_nccl_xml,
    of_server,
    of_smi_matrix,
    refuse_other_reports,
)
from gssim.interop.nccl_tests import fitted_constants, nccl_table
from gssim.interop.reading import read_bounded
from gssim.interop.servers import server_of
from gssim.scenario.overrides import toml
from gssim.units import counted, parse_quantity, validated

T = TypeVar("T")
NETWORKS = ("ib-", "efa-", "roce-", "tcp-")
"""Beginnings of the names of presets of links to network cards."""
NCCL_ORDER = ("volta", "ampere", "hopper", "blackwell")
HOP_LATENCY_S = 0.5e-6
"""Latency of a link between switches, as in topologies: assumed, a switch and its cable."""


class MadeCluster:
    """The text of a cluster file, and notes on what was assumed and what was fitted."""

    def __init__(self, text: str, notes: Sequence[str], fitted: Sequence[str]) -> None:
        self.text, self.notes, self.fitted = text, tuple(notes), tuple(fitted)


def cluster_of(
    paths: Sequence[Path],
    *,
    gpus: Sequence[str] = (),
    nics: Sequence[str] = (),
    nic_counts: Sequence[int] = (),
    hosts: int | None = None,
    devices: Sequence[int] = (),
    detect: bool = False,
    oversubscription: float = 1.0,
    name: str = "",
    nccl_tests: Path | None = None,
) -> MadeCluster:
    """Return the cluster of hosts and switches that files describe.

    `paths`: NCCL's XML or `nvidia-smi topo -m` of one or more hosts, and at most one file of switches. `gpus`: the GPU
    of all hosts, or one for each file of a host; without such files, hosts are usual servers of these or, with
    `detect`, this machine. `nics`: the preset of network cards, and `nic_counts` their number, and `devices` the number
    of devices used: one value for all hosts, or one for each; empty: as described. `hosts`: number of equal hosts, if
    no file gives it. `nccl_tests`: measured all-reduces to which NCCL's constants are fitted. Raises UserError for
    files that are invalid or contradict each other.
    """
    described, fabric, listed = _read(paths, gpus)
    if detect and gpus and not described:
        raise UserError(f"--gpu {gpus[0]}: has no effect beside --detect, which finds this machine's; leave one out")
    if detect:
        described.append(detected())
    are_usual = not described
    if are_usual:
        if not gpus:
            raise UserError("--gpu: missing; without a host's file it names the usual server, such as h100")
        described = [of_server(server_of(gpu)) for gpu in gpus]
    host_count = _host_count(described, fabric, hosts)
    if not 0 < oversubscription < 1000:
        raise UserError(f"--oversubscription {oversubscription}: must be more than 0 and less than 1000")
    if oversubscription != 1 and (fabric is None or fabric.tops == fabric.switches):
        raise UserError(
            f"--oversubscription {oversubscription:g}: no switch is above another here; give a file of switches, or "
            "leave it out"
        )
    used = _of_each("--devices", "numbers", devices, described)
    described = [first_devices(host, count) for host, count in zip(described, used, strict=True)]
    described = _with_cards(described, nics, nic_counts)
    all_hosts = described * host_count if len(described) == 1 else described
    notes = [*listed, *dict.fromkeys(note for host in described for note in host.defaults)]
    if host_count > 1 and are_usual:
        notes.extend(_assumed_cards(described, nic_given=bool(nics), count_given=bool(nic_counts)))
    if host_count > 1 and fabric is None:
        notes.append("fabric: one switch for all hosts; a file of switches tells another")
    if fabric is not None and fabric.tops != fabric.switches:
        notes.append(f"oversubscription = {oversubscription:g}: --oversubscription tells another")
    counts = {gpu: host_count if len(gpus) == 1 else gpus.count(gpu) for gpu in gpus}
    usual = ", ".join(f"{count} x {gpu}" for gpu, count in counts.items())
    title = name or (paths[0].stem if paths else "this machine" if detect else usual)
    data = cluster_tables(all_hosts, one_line(title, 100) or "cluster", fabric, oversubscription)
    cluster = validated(Cluster, data, file=str(paths[0]) if paths else "cluster")
    fitted = _fit_nccl(data, cluster, nccl_tests)
    return MadeCluster(_text(data, notes, fabric, fitted), notes, fitted)


def _host_count(described: Sequence[Host], fabric: Fabric | None, hosts: int | None) -> int:
    """Return the number of hosts: that of the switches' file, else `hosts`, else of the hosts described."""
    count = len(fabric.nodes) if fabric is not None else len(described) if hosts is None else hosts
    if hosts is not None and hosts != count:
        raise UserError(f"--hosts {hosts}: the file of switches names {count}")
    if not 1 <= count <= 100_000:
        raise UserError(f"--hosts {count}: must be from 1 to 100000")
    if len(described) not in (1, count):
        raise UserError(f"{len(described)} files of hosts for {count} hosts: give one for all, or one for each")
    return count


def _fit_nccl(data: dict[str, Any], cluster: Cluster, path: Path | None) -> list[str]:
    """Replace NCCL's constants of a generation by constants fitted to measurements; return a note on the fit."""
    if path is None:
        return []
    if cluster.backend != "nccl":
        raise UserError(f"--nccl-tests {path}: the hosts have no GPUs, and communicate by {cluster.backend}")
    data["nccl"], note = fitted_constants(cluster, nccl_table(path), data["nccl"])
    return [note]


def _read(paths: Sequence[Path], gpus: Sequence[str]) -> tuple[list[Host], Fabric | None, list[str]]:
    """Return the hosts and the switches of files, and notes on the latter."""
    described: list[Host] = []
    fabric: Fabric | None = None
    texts = {path: read_bounded(path) for path in paths}
    for path, text in texts.items():
        refuse_other_reports(text, file=str(path))
    are_xml = {path: path.suffix == ".xml" or text.lstrip().startswith("<") for path, text in texts.items()}
    are_hosts = {
        path: are_xml[path] or ("GPU0" in text and path.suffix not in (".yaml", ".yml", ".json", ".conf"))
        for path, text in texts.items()
    }
    count = sum(are_hosts[path] for path in paths)
    if count and len(gpus) not in (0, 1, count):
        raise UserError(f"--gpu: {len(gpus)} GPUs for {count} files of hosts: give one for all, or one for each")
    for path in paths:
        text = texts[path]
        if are_hosts[path]:
            gpu = gpus[min(len(described), len(gpus) - 1)] if gpus else None
            if are_xml[path]:
                described.append(of_nccl_xml(text, file=str(path), gpu=gpu))
            else:
                described += [of_smi_matrix(each, file=str(path), gpu=gpu) for each in matrices_in(text)]
        elif fabric is not None:
            raise UserError(f"{path}: a second file of switches; allowed: one")
        else:
            fabric = of_fabric_file(path, text)
    return described, fabric, fabric.listed if fabric is not None else []


def _with_cards(hosts: Sequence[Host], nics: Sequence[str], counts: Sequence[int]) -> list[Host]:
    """Return hosts with network cards of these presets, and these numbers: one for all hosts, or one for each; none: as
    described.
    """
    cards = [name for name in presets("links") if name.startswith(NETWORKS)]
    for nic in nics:
        if nic not in cards:
            reason = "a link inside of hosts" if nic in presets("links") else "no such preset"
            raise UserError(f"--nic {nic}: {reason}; allowed: {', '.join(cards)}")
    links, numbers = _of_each("--nic", "presets", nics, hosts), _of_each("--nics", "numbers", counts, hosts)
    changed = []
    for host, link, count in zip(hosts, links, numbers, strict=True):
        defaults = host.defaults
        if link is not None:
            defaults = [note for note in defaults if not note.startswith(CARDS_ASSUMED)]
            host = replace(host, nics=host.nics or 1, nic_link=link)
        if count is not None:
            if count < 1 or host.devices % count:
                raise UserError(
                    f"--nics {count}: must be at least 1, and shared evenly by a host's {host.devices} devices"
                )
            if host.nic_link is None:
                raise UserError(f"--nics {count}: {host.source} has no network cards; name them by --nic")
            defaults = [note for note in defaults if not note.startswith(CARD_COUNT_ASSUMED)]
            host = replace(host, nics=count)
        changed.append(replace(host, defaults=defaults))
    return changed


def _assumed_cards(hosts: Sequence[Host], *, nic_given: bool, count_given: bool) -> list[str]:
    """Return notes on the network cards of usual servers: their number and rate, where no option gives them."""
    notes = []
    for host in hosts:
        if not nic_given:
            notes.append(assumed_cards(host.nic_link, host.device))
        if not count_given:
            what = f"{host.nic_link} on each host of {host.devices} {host.device}"
            notes.append(f"{CARD_COUNT_ASSUMED}{host.nics}: of {what}, as in the usual server; --nics changes it")
    return list(dict.fromkeys(notes))


def _of_each(option: str, values: str, given: Sequence[T], hosts: Sequence[Host]) -> Sequence[T | None]:
    """Return an option's value for each description of a host: one for all, or one for each; none given: None."""
    if len(given) not in (0, 1, len(hosts)):
        raise UserError(
            f"{option}: {len(given)} {values} for {counted(len(hosts), 'description')} of hosts: "
            "give one, or one for each"
        )
    return list(given) if len(given) == len(hosts) else [given[0] if given else None] * len(hosts)


def cluster_tables(
    hosts: Sequence[Host], name: str, fabric: Fabric | None = None, oversubscription: float = 1.0
) -> dict[str, Any]:
    """Return the tables of a cluster file of hosts; without a fabric, several hosts are joined by one switch.

    Raises UserError if hosts that are to be joined have no network card.
    """
    first = hosts[0]
    source = "; ".join(dict.fromkeys(host.source for host in hosts))
    if first.inside == "cores":
        return _of_cores(hosts, fabric, name, source)
    generations = [host.nccl for host in hosts]
    slowest = min(generations, key=lambda each: NCCL_ORDER.index(each.partition("-")[0]))
    data: dict[str, Any] = {
        "name": name,
        "backend": "nccl",
        "nccl": slowest,
        "source": f"wiring: {source}; rates as in the presets",
        "device_types": {host.device: host.device for host in hosts},
    }
    needs_network = len(hosts) > 1
    alike = (list(same) for _, same in groupby(hosts, key=lambda host: replace(host, source="", defaults=[])))
    groups = [_group(same[0], len(same), needs_network) for same in alike]
    shape = _shape(fabric, oversubscription) if needs_network else None
    has_pairs = any(host.inside == "links" for host in hosts)
    if not has_pairs and (shape is not None or not needs_network):
        data["topology"] = {"kind": "servers"} | ({"fabric": shape} if shape else {}) | {"servers": groups}
        return data
    return data | _link_by_link(hosts, groups, fabric, oversubscription)


def _group(host: Host, count: int, needs_network: bool) -> dict[str, Any]:
    if needs_network and not host.nics:
        raise UserError(f"{host.source}: has no network card to join its host with others")
    inside = "pcie" if host.inside == "links" else host.inside
    table: dict[str, Any] = {"count": count, "device": host.device, "devices": host.devices}
    if host.devices > 1 and inside != "none":
        table |= {"inside": inside, "inside_link": host.inside_link or host.pcie_link or "pcie4x16"}
    if host.nics:
        table |= {"nics": host.nics, "nic_link": host.nic_link, "pcie_link": host.pcie_link or "pcie4x16"}
    return table


def _shape(fabric: Fabric | None, oversubscription: float) -> dict[str, Any] | None:
    """Return the fabric as a topology of cluster files; None if no topology describes it."""
    if fabric is None or len(fabric.switches) == 1:
        return {"kind": "switch"}
    leafs = [list(same) for _, same in groupby(fabric.nodes, key=lambda node: fabric.above[node])]
    tops = fabric.tops
    flat = all(sorted(fabric.above.get(fabric.above[nodes[0]][0], [])) == sorted(tops) for nodes in leafs)
    single = all(len(fabric.above[node]) == 1 for node in fabric.nodes)
    distinct = len({fabric.above[nodes[0]][0] for nodes in leafs}) == len(leafs)
    equal = all(len(nodes) == len(leafs[0]) for nodes in leafs[:-1]) and len(leafs[-1]) <= len(leafs[0])
    if not (flat and single and distinct and equal and len(fabric.switches) == len(leafs) + len(tops)):
        return None
    return {
        "kind": "leaf-spine",
        "servers_per_leaf": len(leafs[0]),
        "spines": len(tops),
        "oversubscription": oversubscription,
    }


def _link_by_link(
    hosts: Sequence[Host], groups: Sequence[dict[str, Any]], fabric: Fabric | None, oversubscription: float
) -> dict[str, Any]:
    """Return devices, switches and links one by one."""
    several = len(hosts) > 1
    servers = {"kind": "servers", "servers": groups} | ({"fabric": {"kind": "switch"}} if several else {})
    built = build(validated(Servers, servers, file="cluster"))
    wiring = built.wiring
    switches = [name for name in built.switches if name != "switch"]
    above = fabric.above if fabric is not None else {}
    nodes = fabric.nodes if fabric is not None else [""] * len(hosts)
    links, up_bytes_per_s = [], dict[str, float]()
    for a, b, rate, latency_s in zip(
        wiring.source.tolist(),
        wiring.target.tolist(),
        wiring.bandwidth_bytes_per_s.tolist(),
        wiring.latency_s.tolist(),
        strict=True,
    ):
        ends = [wiring.names[a], wiring.names[b]]
        if a >= b:
            continue
        if ends[1] == "switch" and fabric is not None:
            node = nodes[int(ends[0].partition("/")[0].removeprefix("server"))]
            parents = above[node]
            for parent in parents:
                links.append(_link(ends[0], parent, rate / len(parents), latency_s))
                up_bytes_per_s[parent] = up_bytes_per_s.get(parent, 0.0) + rate / len(parents)
        else:
            links.append(_link(ends[0], ends[1], rate, latency_s))
    if fabric is not None:
        for switch in fabric.switches:  # from the lowest up, so that everything below a switch is known
            for parent in above.get(switch, []):
                rate = up_bytes_per_s[switch] / len(above[switch]) / oversubscription
                links.append(_link(switch, parent, rate, HOP_LATENCY_S))
                up_bytes_per_s[parent] = up_bytes_per_s.get(parent, 0.0) + rate
        switches += fabric.switches
    elif several:
        switches.append("switch")
    links += [
        _between(f"server{index}/gpu{a}", f"server{index}/gpu{b}", rate)
        for index, host in enumerate(hosts)
        for a, b, rate in host.pairs
    ]
    devices = [{"name": device, "type": kind, "host": host} for device, kind, host in built.devices]
    return {"devices": devices, "switches": switches, "links": links}


def _link(a: str, b: str, rate: float, latency_s: float) -> dict[str, Any]:
    source = "rates of the presets, latencies of both halves of a way through a switch"
    return {"between": [a, b], "bandwidth_bytes_per_s": rate, "latency_s": latency_s, "source": source}


def _between(a: str, b: str, rate: Any) -> dict[str, Any]:
    table = expanded("links", rate)
    speed, latency_s = table["bandwidth_bytes_per_s"], table["latency_s"]
    link = _link(a, b, parse_quantity(speed, "bytes/s"), parse_quantity(latency_s, "seconds"))
    return link | {"source": table["source"]}


def _of_cores(hosts: Sequence[Host], fabric: Fabric | None, name: str, source: str) -> dict[str, Any]:
    """Return hosts of CPUs, whose cores are the devices."""
    if fabric is not None and len(fabric.switches) > 1:
        raise UserError("--detect: cores behind several switches cannot be written; allowed: one switch")
    host, rates = hosts[0], replace(hosts[0]).inside_link
    if not isinstance(rates, dict):
        raise UserError("--detect: no rates of the processor")
    kind = {
        "kind": "cpu",
        "memory_bytes": rates["memory_bytes"],
        "memory_bandwidth_bytes_per_s": rates["bandwidth"],
        "peak_flop_per_s": {"fp32": rates["fp32"]},
        "source": f"assumed from {source}; `gsreal calibrate` measures them",
    }
    link = {
        "bandwidth_bytes_per_s": 5e9,
        "latency_s": 50e-6,
        "source": "assumed: loopback; measure by gsreal calibrate",
    }
    if len(hosts) > 1:
        link = dict(expanded("links", host.nic_link or "tcp-10g"))
    return {
        "name": name,
        "backend": "gloo",
        "source": source,
        "device_types": {"core": kind},
        "topology": {
            "kind": "switch",
            "devices": [{"device": "core", "count": host.devices * len(hosts)}],
            "devices_per_host": host.devices,
            "link": link,
        },
    }


def _text(data: dict[str, Any], notes: Sequence[str], fabric: Fabric | None, fitted: Sequence[str]) -> str:
    """Return the tables as TOML, with comments on what was assumed and what was fitted."""
    lines = [
        "# Written by gssim cluster; what its files did not say:",
        *(f"# default: {one_line(note)}" for note in notes),
    ]
    lines += [f"# fitted: {one_line(note)}" for note in fitted]
    if fabric is not None and len(fabric.nodes) <= 64:
        lines.append(f"# server0 to server{len(fabric.nodes) - 1}: {one_line(', '.join(fabric.nodes))}")
    lines += [f"{key} = {toml(data[key])}" for key in ("name", "backend", "nccl", "source") if key in data]
    if "topology" not in data:
        for key in ("devices", "switches", "links"):
            lines += [f"{key} = [", *(f"    {toml(each)}," for each in data[key]), "]"]
    lines += [f"device_types.{key} = {toml(value)}" for key, value in data["device_types"].items()]
    if "topology" in data:
        topology = data["topology"]
        tables = {key: value for key, value in topology.items() if key != "servers"}
        lines += ["", "[topology]", *(f"{key} = {toml(value)}" for key, value in tables.items())]
        for group in topology.get("servers", []):
            lines += ["", "[[topology.servers]]", *(f"{key} = {toml(value)}" for key, value in group.items())]
    return "\n".join(lines) + "\n"


def usual_cluster(gpu: str, count: int) -> dict[str, Any]:
    """Return the tables of a cluster of `count` GPUs in their usual servers, behind one switch.

    Raises UserError if they are not a whole number of servers, or the GPU's usual server is not known.

    >>> usual_cluster("h100", 16)["topology"]["servers"][0]["count"]
    2
    """
    server = server_of(gpu)
    if count < 1 or count > 100_000 or (count > server.devices and count % server.devices):
        raise UserError(f"--count {count}: allowed: up to {server.devices} of {gpu}, or a multiple of {server.devices}")
    host = of_server(server)
    if count < server.devices:
        host = replace(first_devices(host, count), nics=0, nic_link=None, pcie_link=None)
    return cluster_tables([host] * max(1, count // server.devices), f"{count} x {server.device}")
