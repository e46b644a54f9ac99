"""Peers: single collectives take as long as another simulator says, its own conventions taken out.

ASTRA-sim 2.0, analytical and congestion-unaware. How a row is made up: README of the reference figures, "peers".
"""

import csv
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from strategies import built, communication_time_s, topology

from gssim.collectives import Communication

REFERENCE = Path(os.environ.get("GSSIM_REFERENCE") or Path(__file__).resolve().parents[3] / "shared" / "reference")
FIGURES = REFERENCE / "peers" / "astra_collectives.csv"
KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}
TOPOLOGIES = {"Ring": ("ring", "ring"), "FullyConnected": ("fully-connected", "direct")}
"""Kind of topology and algorithm, by the peer's word."""
GIB, MIB = 2**30, 2**20
TOLERANCE = 0.01


@dataclass(frozen=True)
class Case:
    """One row: a collective in `splits` parts, one after another."""

    kind: str
    ranks: int
    part_bytes: float
    """Bytes of each rank's buffer; for an all-gather, of its shard."""
    splits: int
    wired: str
    algorithm: str
    bytes_per_s: float
    hop_s: float
    endpoint_s: float
    memory_bytes_per_s: float
    total_s: float

    @property
    def message_bytes(self) -> float:
        return self.part_bytes if self.kind == "all-gather" else self.part_bytes / self.ranks

    @property
    def full_bytes(self) -> float:
        """As `Communication.size_bytes` counts it."""
        return self.part_bytes * (self.ranks if self.kind == "all-gather" else 1)

    @property
    def steps(self) -> float:
        n = self.ranks
        if self.algorithm == "direct":
            return 2 if self.kind == "all-reduce" else 1
        return {"all-reduce": 2 * (n - 1), "all-to-all": n * (n - 1) / 2}.get(self.kind, n - 1)

    @property
    def transfer_s(self) -> float:
        """Return the peer's time without the overheads at the ends of its messages and without its additions."""
        endpoints = self.steps + 1
        additions = 0
        if self.kind in ("all-reduce", "reduce-scatter"):
            additions = self.ranks - 1 if self.algorithm == "ring" else 1
        addition_s = 3e-9 * (self.message_bytes / self.memory_bytes_per_s * 1e9 // 1)
        return self.total_s - self.splits * (endpoints * self.endpoint_s + additions * addition_s)


def cases() -> list[Case]:
    if not FIGURES.exists():
        return []
    with FIGURES.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [
        Case(
            kind=KINDS[row["coll"]],
            ranks=int(row["n"]),
            part_bytes=float(row["size_mib"]) * MIB / int(row["splits"]),
            splits=int(row["splits"]),
            wired=TOPOLOGIES[row["topo"]][0],
            algorithm=TOPOLOGIES[row["topo"]][1],
            bytes_per_s=float(row["bw"]) * GIB,
            hop_s=float(row["lat"]) * 1e-9,
            endpoint_s=float(row["endpoint"]) * 1e-9,
            memory_bytes_per_s=float(row["lmb"]) * 1e9,
            total_s=float(row["ns_max"]) * 1e-9,
        )
        for row in rows
    ]


def named(case: Case) -> str:
    return f"{case.kind}-{case.wired}-{case.ranks}-{case.splits}x{case.part_bytes / MIB:g}MiB"


@pytest.mark.skipif(not FIGURES.exists(), reason=f"no reference figures at {REFERENCE}; set GSSIM_REFERENCE")
@pytest.mark.parametrize("case", cases(), ids=named)
def test_a_collective_takes_as_long_to_transfer_as_the_peer_says(case):
    link = {"bandwidth": case.bytes_per_s, "latency_s": case.hop_s}
    # a backend whose messages wait for no notices: the peer's do not
    algorithms = {case.kind: case.algorithm}
    cluster = built(topology(case.wired, count=case.ranks, **link), algorithms=algorithms, backend="nccl")
    parts = [Communication(case.kind, range(case.ranks), case.full_bytes)] * case.splits
    assert communication_time_s(cluster, *parts) == pytest.approx(case.transfer_s, rel=TOLERANCE)


@pytest.mark.skipif(not FIGURES.exists(), reason=f"no reference figures at {REFERENCE}; set GSSIM_REFERENCE")
def test_all_of_the_peers_rows_are_compared_and_most_of_them_agree_to_a_thousandth():
    found = cases()
    with FIGURES.open(encoding="utf-8") as file:
        assert len(found) == len(list(file)) - 1 == 64
    near = 0
    for case in found:
        transfer_s = case.splits * case.steps * (case.hop_s + case.message_bytes / case.bytes_per_s)
        near += abs(case.transfer_s / transfer_s - 1) < 1e-3
    assert near >= 0.9 * len(found)
