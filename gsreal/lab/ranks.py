"""Starts a rank in every device's namespace, and reports which failed and why."""

import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gsreal.lab.namespaces import FOLDER, in_namespace, prepare_process
from gsreal.lab.network import ADDRESS_DEVICE, Network, Node
from gsreal.lab.throttle import Place, as_variable
from gsreal.run.launch import Guard, Start
from gsreal.run.launch import run_ranks as run_anywhere

ANSWER_S = 1.0
"""Timeout of a device's answer to a reachability test."""
CLOSED_PORT = 9


def run_ranks(
    network: Network,
    places: Sequence[Place],
    module: str,
    arguments: Sequence[str],
    *,
    check: Callable[[], None],
    guard: Guard | None = None,
) -> None:
    """Run `python -m module arguments...` on a rank in each place; raise RunFailedError if one of them fails.

    `check` is called periodically, to raise if the ranks' environment has failed. No process outlives the call, however
    it ends.
    """
    starts = [
        Start(
            rank_command(network, number, module, arguments),
            {**rank_environment(places, number), **as_variable(place)},
            prepare_process,
        )
        for number, place in enumerate(places)
    ]
    nodes = network.nodes[: len(places)]
    run_anywhere(starts, guard or Guard(), check=check, explain=lambda: unreachable_rank(nodes))


def rank_command(network: Network, number: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts a rank inside its namespace.

    `ip netns exec` would mount /sys anew and hide its contents.
    """
    inside = f"--net={FOLDER / network.nodes[number].namespace}"
    return ["nsenter", inside, sys.executable, "-m", module, *arguments]


def rank_environment(places: Sequence[Place], number: int) -> dict[str, str]:
    """Return the environment with a rank's identity and interface."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(len(places)),
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": ADDRESS_DEVICE,
    }


def unreachable_rank(nodes: Sequence[Node]) -> str | None:
    """Return a text that names the rank which others cannot reach; None if all are reachable."""
    pairs = [(a, b) for a in range(len(nodes)) for b in range(len(nodes)) if a != b]
    with ThreadPoolExecutor(max_workers=16) as pool:
        reachable = pool.map(lambda pair: _reaches(nodes[pair[0]], nodes[pair[1]]), pairs)
        cut = [pair for pair, reached in zip(pairs, reachable, strict=True) if not reached]
    if not cut:
        return None
    rank, _ = Counter(end for pair in cut for end in pair).most_common(1)[0]
    others = sorted({end for pair in cut if rank in pair for end in pair} - {rank})
    those = ", ".join(map(str, others))
    return f"rank {rank} ({nodes[rank].name}) cannot be reached from rank {those}: is a link down?"


def _reaches(source: Node, target: Node) -> bool:
    """Return whether a message of one device arrives at another, on a closed port."""

    def connect() -> bool:
        try:
            socket.create_connection((str(target.address), CLOSED_PORT), ANSWER_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return True

    return in_namespace(source.namespace, connect)
