"""What a machine must have for the lab."""

import os
import platform
import shutil
from collections.abc import Sequence

from gsreal.compiled import compiler
from gsreal.lab.namespaces import may_be_made
from gsreal.lab.network import Network
from gssim.units import UserError

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
"""Debian's package of each program."""


def missing() -> str | None:
    """Return what this machine lacks for the lab, and how to get it, in one line; None where it has everything."""
    if platform.system() != "Linux":
        return f"needs Linux (network namespaces), but this is {platform.system()}"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces and shape their links: run it with sudo"
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            return f"needs the program {program}: apt-get install {package}"
    if not may_be_made():
        return "root may not make network namespaces here (in a container: it needs CAP_SYS_ADMIN and CAP_NET_ADMIN)"
    return None


def check_tools() -> None:
    """Raise UserError where this machine cannot be a lab."""
    lacks = missing()
    if lacks:
        raise UserError(f"lab: {lacks}")


def check_compiler(network: Network, shares: Sequence[float]) -> None:
    """Raise UserError where something must be compiled for this lab, and nothing compiles it."""
    if compiler() is not None:
        return
    for needed, reason in (
        (any(share < 1 for share in shares), "to slow devices down (lab.cpu_share_ratio)"),
        (any(wire.is_delayed for wire in network.wires), "to delay links where the kernel has no netem"),
    ):
        if needed:
            raise UserError(f"lab: needs a C++ compiler {reason}: apt-get install g++")
