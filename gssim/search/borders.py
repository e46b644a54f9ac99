"""How fast bytes can get into each host: what bounds the gathering of parameters that others own."""

from collections.abc import Sequence

import networkx as nx

from gssim.topology import Wiring

MOST_HOSTS = 32
"""Of more, none is bounded: it would take longer than it saves."""


def entry_rates(wiring: Wiring, hosts: Sequence[str]) -> dict[str, float]:
    """Return the bytes/s at which the ranks of each host can receive from all others together; `hosts`: of every rank.

    The least cut between them: no way of sending is faster. Empty where there is one host alone, or too many.
    """
    names = list(dict.fromkeys(hosts))
    if not 1 < len(names) <= MOST_HOSTS:
        return {}
    graph: nx.DiGraph[object] = nx.DiGraph()
    ends = zip(wiring.source.tolist(), wiring.target.tolist(), wiring.bandwidth_bytes_per_s.tolist(), strict=True)
    for source, target, rate in ends:
        before = graph.edges[source, target]["capacity"] if graph.has_edge(source, target) else 0.0
        graph.add_edge(source, target, capacity=before + rate)
    found = {}
    for name in names:
        joined = graph.copy()
        for rank, host in enumerate(hosts):
            # an edge without a capacity carries anything
            joined.add_edge(rank, "in") if host == name else joined.add_edge("out", rank)
        found[name] = float(nx.minimum_cut_value(joined, "out", "in"))
    return found
