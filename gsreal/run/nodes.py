"""Ranks that torchrun or srun has started, on one or several nodes: their numbers, and whether nodes fit the plan.

torchrun gives each rank its number in the variables that torch reads; plain `srun` has names of its own. Ranks on
several nodes find each other at MASTER_ADDR: a loopback address there would make each node wait for itself. So would a
node's own host name that gloo cannot bind to.
"""

import ipaddress
import os
import re
import socket
from collections import defaultdict
from collections.abc import Mapping

import torch

from gsreal.machine import device_name
from gsreal.run.rank import STORE, gather_json
from gssim.cluster import Cluster, hosts_in
from gssim.errors import UserError

FIRST_PORT, PORTS = 29500, 10_000
"""Ports at which rank 0 of a step of Slurm is found: steps that run at the same time differ."""


def srun_environment(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch reads, for a task that srun has started; empty for every other process.

    torchrun's own variables come first, and a step of one task starts its ranks itself. Raises UserError if the number
    of this node's tasks cannot be known.

    >>> step = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
    >>> environment = srun_environment(step)
    >>> environment["RANK"], environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"], environment["MASTER_ADDR"]
    ('3', '1', '2', 'n1')
    """
    tasks = _number(slurm, "SLURM_STEP_NUM_TASKS", _number(slurm, "SLURM_NTASKS", 1))
    if "RANK" in slurm or tasks == 1 or not {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= set(slurm):
        return {}
    nodes = hosts_in(slurm["SLURM_STEP_NODELIST"], file="SLURM_STEP_NODELIST")
    per_node = [
        int(count)
        for count, _, repeats in re.findall(r"(\d+)(\(x(\d+)\))?", slurm.get("SLURM_STEP_TASKS_PER_NODE", ""))
        for _ in range(int(repeats or 1))
    ]
    node = _number(slurm, "SLURM_NODEID", 0)
    if len(per_node) == len(nodes) and sum(per_node) == tasks and node < len(nodes):
        here = per_node[node]
    elif tasks % len(nodes) == 0:
        here = tasks // len(nodes)
    else:
        raise UserError(
            f"SLURM_STEP_TASKS_PER_NODE = {slurm.get('SLURM_STEP_TASKS_PER_NODE')!r}: {tasks} tasks on {len(nodes)} "
            "nodes: must say how many each node has, as srun sets it"
        )
    port = FIRST_PORT + (_number(slurm, "SLURM_JOB_ID", 0) * 16 + _number(slurm, "SLURM_STEP_ID", 0)) % PORTS
    return {
        "RANK": slurm["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": slurm.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "GROUP_RANK": str(node if "SLURM_NODEID" in slurm else _number(slurm, "SLURM_PROCID", 0) // here),
        "MASTER_ADDR": slurm.get("MASTER_ADDR", nodes[0]),
        "MASTER_PORT": slurm.get("MASTER_PORT", str(port)),
    }


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise UserError(f"{name} = {text!r}: must be a whole number, as srun sets it")
    return int(text)


def has_several_nodes() -> bool:
    """Return whether a launcher has started this rank's group on more than one node."""
    return STORE not in os.environ and os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")


def own_node() -> tuple[int, int]:
    """Return (this node's number, number of nodes) of a launcher's group."""
    return int(os.environ["GROUP_RANK"]), int(os.environ["GROUP_WORLD_SIZE"])


def check_launcher(ranks: int, *, where: str) -> None:
    """Raise UserError if torchrun or srun has started other than `ranks` ranks, or nodes cannot reach each other."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != ranks:
        raise UserError(f"{where}: plan: it has {ranks} ranks, but the launcher started {started} (WORLD_SIZE)")
    if has_several_nodes():
        check_addresses()


def check_addresses() -> None:
    """Raise UserError if rank 0's address, or this node's own name, is one that other nodes cannot reach."""
    first = os.environ.get("GROUP_RANK", "0") == "0"
    head = os.environ.get("MASTER_ADDR", "")
    own_name = socket.gethostname()
    head_addresses = [ipaddress.ip_address(address) for address in _addresses(head)]
    is_loopback = bool(head_addresses) and all(address.is_loopback for address in head_addresses)
    # the first node may know its own name as an address of the loopback, which serves to reach itself
    if is_loopback and not (first and head.split(".")[0] == own_name.split(".")[0]):
        raise UserError(
            f"MASTER_ADDR = {head!r}: an address of the loopback here, so that this node would wait for itself; name "
            "the first node by an address that the others reach"
        )
    listens = any(os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
    if not listens and not _can_bind(own_name):
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise UserError(
            f"--interface: missing: this host's name, {own_name!r}, is no address that other nodes reach; allowed: "
            f"{names}"
        )


def _addresses(name: str) -> list[str]:
    try:
        return [str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _can_bind(name: str) -> bool:
    """Return whether a host name is an address of this machine other than the loopback's: gloo listens there."""
    for address in _addresses(name):
        if ipaddress.ip_address(address).is_loopback:
            continue
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as bound:
                bound.bind((address, 0))
        except OSError:
            continue
        return True
    return False


def check_nodes(cluster: Cluster, device: torch.device, *, where: str) -> None:
    """Raise UserError on every rank if nodes or devices of a run on several nodes are not the cluster file's.

    Ranks of one host in the file run on one node, ranks of two hosts on two, and ranks of one device type on devices of
    one name. A collective; nothing is checked on a single node, which may stand for any cluster.
    """
    if not has_several_nodes():
        return
    node = f"{socket.gethostname()} (node {os.environ.get('GROUP_RANK', '0')})"
    nodes: list[list[str]] = gather_json([node, device_name(device)])
    devices = cluster.devices[: len(nodes)]
    for title, in_file, real, both_ways in (
        ("host", [each.host for each in devices], [each[0] for each in nodes], True),
        ("type", [each.type for each in devices], [each[1] for each in nodes], False),
    ):
        _check_alike(f"{where}: cluster.devices: {title}", in_file, real)
        if both_ways:
            _check_alike(f"{where}: cluster.devices: {title}", real, in_file)


def _check_alike(where: str, groups: list[str], values: list[str]) -> None:
    """Raise UserError if ranks of one group have several values."""
    ranks_of: defaultdict[str, list[int]] = defaultdict(list)
    for rank, group in enumerate(groups):
        ranks_of[group].append(rank)
    for group, ranks in ranks_of.items():
        other = next((rank for rank in ranks if values[rank] != values[ranks[0]]), None)
        if other is not None:
            raise UserError(
                f"{where}: ranks {ranks[0]} and {other} are both of {group}, but one is of {values[ranks[0]]}, the "
                f"other of {values[other]}: start ranks in the order of the file's devices, or mend the file"
            )
