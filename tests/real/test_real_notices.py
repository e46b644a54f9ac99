"""Over links of the lab with a delay, collectives of gloo's and ours take the delays that are predicted."""

import json
import os

import pytest
from real_runs import HELPERS

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from notice_ranks import preempt_others
from strategies import built as cluster_of
from strategies import communication_time_s, topology

from gsreal.compiled import compiler
from gsreal.lab.building import built, missing
from gsreal.lab.lab import run_ranks
from gsreal.lab.network import network_of
from gsreal.lab.throttle import Place
from gssim.collectives import Communication

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(missing() is not None, reason=f"the lab {missing()}"),
    pytest.mark.skipif(compiler() is None, reason="the lab's delays need a C++ compiler"),
]

RANKS, SIZE = 3, 3 * 2**18
LATENCY_S, RATE = 30e-3, 400e6 / 8


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Return the seconds of every kind of collective, measured on three ranks around a switch."""
    out = tmp_path_factory.mktemp("notices") / "found.json"
    network = network_of(CLUSTER, f"n{os.getpid() % 10**5}")
    places = tuple(Place(device.name, rank % (os.cpu_count() or 1), 1.0, "") for rank, device in enumerate(DEVICES))
    with pytest.MonkeyPatch.context() as patch, built(network) as lab:
        path = os.pathsep.join(p for p in (str(HELPERS), os.environ.get("PYTHONPATH")) if p)
        patch.setenv("PYTHONPATH", path)
        if lab.line is not None:
            preempt_others(lab.line.process.pid)
        run_ranks(network, places, "notice_ranks", [str(out), str(SIZE)], check=lab.check)
    return json.loads(out.read_text(encoding="utf-8"))


CLUSTER = cluster_of(topology("switch", count=RANKS, bandwidth=RATE, latency_s=LATENCY_S))
DEVICES = CLUSTER.devices
CASES = {
    "send": Communication("send", (0, 1), SIZE),
    "all-reduce": Communication("all-reduce", range(RANKS), SIZE),
    "all-gather": Communication("all-gather", range(RANKS), SIZE),
    "all-gather-v": Communication("all-gather", range(RANKS), SIZE, carried_as="all-gather-v"),
    "reduce-scatter-v": Communication("reduce-scatter", range(RANKS), SIZE, carried_as="reduce-scatter-v"),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_collective_over_links_with_a_delay_takes_as_many_delays_as_predicted(kind, measured):
    predicted_s = communication_time_s(CLUSTER, CASES[kind])
    assert predicted_s > 2 * LATENCY_S
    assert predicted_s == pytest.approx(measured[kind], rel=0.1)
