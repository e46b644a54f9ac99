"""Labs are built, verified and used on this machine, and nothing is left of them, however they end.

They need root, `ip` and `tc`; where these are missing, the reason is said.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import forks
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from strategies import built as cluster_of
from strategies import topology

from gsreal.compiled import compiler
from gsreal.lab.building import LOCKS, built, execute, missing, namespaces_of, runs
from gsreal.lab.lab import emulated_name, unreachable_rank
from gsreal.lab.network import network_of, prepare_process
from gsreal.lab.throttle import Place, as_variable, throttle_library
from gsreal.lab.verify import verify
from gsreal.machine import usable_cores
from gssim.errors import RunFailedError
from gssim.result import read_result
from gssim.scenario import load_scenario
from gssim.simulation import simulate

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(missing() is not None, reason=f"the lab {missing()}"),
    pytest.mark.skipif(compiler() is None, reason="the lab's slow devices need a C++ compiler"),
]

SCENARIO = Path(__file__).resolve().parents[2] / "scenarios" / "lab-2-hosts.toml"
SMALL = ["workload.global_batch_size=4", "workload.sequence_length=32", "run.steps=3", "run.warmup_steps=1"]
LIMIT_S = 120


def switch(**settings):
    return cluster_of(topology("switch", devices=[{"device": "fast", "count": 2}], **settings))


def lab(*words):
    """Return the started command line, which is found again among all processes by its environment."""
    line = [sys.executable, "-c", "from gsreal.cli import main; main()", "lab", *map(str, words)]
    marker = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, "LAB_TEST": marker}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, env=environment, **pipes), marker


def lab_to_its_end(*words, at=None, times=1, by=signal.SIGTERM, forked=False):
    """Return what the command line leaves, and how the ranks that it starts are found.

    It is sent the signal `by` where it has said `at` so many times. `forked`: its ranks are forks.
    """
    marker = f"{os.getpid()}-{time.monotonic_ns()}"
    asked = forks.Command(["lab", *map(str, words)], {"LAB_TEST": marker}, terminated_at=at, times=times, ended_by=by)
    (ended,) = forks.run_commands(replace(asked, slow_ranks_forked=forked))
    return ended, marker


def overrides(changes):
    return [word for change in changes for word in ("--set", change)]


def marked(marker):
    """Return the processes that carry the marker."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"LAB_TEST={marker}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def run_in(line):
    """Return the run id that a lab's line names."""
    return re.match(r"gsreal: lab (\w+): 4 directed links verified", line).group(1)


def soon(condition):
    """Return whether it holds within some seconds."""
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def emulated_devices(cluster):
    """Return the names of a cluster's devices in measurements: they tell whether this machine is the calibrated one."""
    return {emulated_name(cluster, rank) for rank in range(len(cluster.devices))}


def test_a_lab_trains_as_predicted_and_leaves_nothing(tmp_path):
    """Its ranks are forks; those of a lab that is ended, and of the scenarios that ship, are processes of their own."""
    ended, marker = lab_to_its_end(SCENARIO, *overrides(SMALL), "--out", tmp_path, forked=True)
    said = ended.stderr
    assert ended.returncode == 0, said
    (line,) = (line for line in said.splitlines() if "verified" in line)
    (file,) = tmp_path.glob("*.measured.json")
    loaded = load_scenario(SCENARIO, SMALL)
    measured, predicted = read_result(file), simulate(loaded).result
    assert measured.scenario_id == predicted.scenario_id
    assert [entry.key for entry in measured.collectives] == [entry.key for entry in predicted.collectives]
    assert {entry.device for entry in measured.ranks} == emulated_devices(loaded.scenario.cluster)
    for entry in measured.ranks:
        assert entry.peak_allocated_bytes == pytest.approx(predicted.ranks[0].peak_allocated_bytes, rel=0.01)
    # never faster than what the slowest link must carry: all of the gradients, in and out
    carried = sum(entry.bytes * entry.count for entry in measured.collectives)
    assert measured.step_time_s > 0.95 * carried / 12.5e6
    for entry in measured.ranks:  # as the interfaces count, with headers and acknowledgements
        assert entry.bytes_sent == pytest.approx(predicted.ranks[0].bytes_sent, rel=0.05)
        assert entry.bytes_received == pytest.approx(predicted.ranks[0].bytes_received, rel=0.05)
    assert measured.provenance["device_speed_ratio"] > 0
    assert len(measured.provenance["lab"]["links"]) == 4
    assert [device["cpu_share_ratio"] for device in measured.provenance["lab"]["devices"]] == [0.8, 0.8]
    assert run_in(line) not in runs()
    assert marked(marker) == []


@pytest.mark.slow
@pytest.mark.parametrize("scenario", sorted(SCENARIO.parent.glob("lab-*.toml")), ids=lambda path: path.stem)
def test_every_lab_scenario_runs_with_the_collectives_that_were_predicted(scenario, tmp_path):
    changes = ["run.steps=2", "run.warmup_steps=1"]
    process, _ = lab(scenario, *overrides(changes), "--out", tmp_path)
    said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 0, said
    (file,) = tmp_path.glob("*.measured.json")
    measured, predicted = read_result(file), simulate(load_scenario(scenario, changes)).result
    assert [entry.key for entry in measured.collectives] == [entry.key for entry in predicted.collectives]
    peaks = {rank: entry.peak_allocated_bytes for entry in predicted.ranks for rank in entry.ranks}
    for entry in measured.ranks:
        assert entry.peak_allocated_bytes == pytest.approx(peaks[entry.ranks[0]], rel=0.01)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="interrupted", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, id="terminated", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, id="killed"),
    ],
)
def test_nothing_is_left_of_a_lab_that_is_ended(number):
    process, marker = lab(SCENARIO, *overrides([*SMALL, "run.steps=900000"]))
    try:
        line = next(line for line in process.stderr if "verified" in line)
        run_id = run_in(line)
        assert len(namespaces_of(run_id)) == 3
        assert soon(lambda: len(marked(marker)) >= 3)  # itself and two ranks
        process.send_signal(number)
        process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait()
    assert soon(lambda: marked(marker) == [])
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert len(namespaces_of(run_id)) == 3
        cleaned, _ = lab_to_its_end("--clean")
        assert cleaned.returncode == 0
        assert re.match(r"gsreal: lab: dead runs removed: [1-9]", cleaned.stderr)
    else:
        assert process.returncode == 128 + number
    assert run_id not in runs()
    assert namespaces_of(run_id) == []
    assert not (LOCKS / f"{run_id}.lock").exists()


@pytest.mark.slow
def test_two_labs_stand_beside_each_other_and_links_are_what_they_are_asked_to_be():
    ring = cluster_of(topology("ring", devices=[{"device": "fast", "count": 3}], bandwidth=5e6, latency_s=4e-3))
    first, second = network_of(switch(bandwidth=2.5e6), "test1"), network_of(ring, "test2")
    with built(first), built(second):
        found = verify(first) + verify(second)
    assert len(found) == 4 + 6
    for link in found:
        assert (
            0.6 * link.rate_bytes_per_s < link.measured_bytes_per_s < 1.1 * link.rate_bytes_per_s
        )  # others' work slows
    for link in found[4:]:
        assert 4e-3 < link.measured_delay_s < 40e-3
    assert not {"test1", "test2"} & set(runs())


def test_a_link_that_is_not_as_asked_is_found_out():
    network = network_of(switch(bandwidth=2.5e6), "test3")
    with built(network):
        wires = tuple(
            replace(wire, ends=tuple(replace(end, rate_bytes_per_s=5e6) for end in wire.ends)) for wire in network.wires
        )
        found = verify(replace(network, wires=wires[:1]))
    assert found
    assert all("Mbit/s, not 40 (-" in " ".join(link.faults) for link in found)


def test_a_rank_that_is_cut_off_is_named():
    network = network_of(switch(), "test5")
    devices = [node for node in network.nodes if node.address]
    with built(network):
        assert unreachable_rank(devices) is None
        (end,) = (end for wire in network.wires for end in wire.ends if end.namespace == devices[1].namespace)
        execute([("ip", "-n", end.namespace, "link", "set", end.interface, "down")])
        assert re.match(r"rank [01] \(.*\) cannot be reached from rank [01]: is a link down", unreachable_rank(devices))


def test_a_lab_that_cannot_be_built_is_taken_down_again():
    network = network_of(switch(), "test4")
    broken = replace(network, routes=(replace(network.routes[0], via="10.99.0.1"), *network.routes[1:]))
    with (
        pytest.raises(RunFailedError, match=r"lab: ip -n gsreal-lab-test4-. route add .*via 10\.99"),
        built(broken),
    ):
        pass
    assert "test4" not in runs()


COMPUTES = """
import ctypes, json, sys, time
throttle = ctypes.CDLL(sys.argv[1]).gsreal_throttle
throttle.argtypes = [ctypes.c_double]
assert throttle(float(sys.argv[2])) == 0
waits_s, cpu_s, wall_s = float(sys.argv[3]), 0.0, 0.0
while wall_s < 1.0:
    before = time.perf_counter(), time.thread_time()
    while time.thread_time() < before[1] + 0.02:
        pass
    wall_s += time.perf_counter() - before[0]
    cpu_s += time.thread_time() - before[1]
    time.sleep(waits_s)
print(cpu_s / wall_s)
"""


@pytest.mark.parametrize("waits_s", [0.0, 0.05], ids=["without", "with"])
def test_a_slow_device_gets_its_share_and_no_more_after_waiting(waits_s):
    words = [sys.executable, "-c", COMPUTES, str(throttle_library()), "0.25", str(waits_s)]
    found = subprocess.run(
        words, stdout=subprocess.PIPE, preexec_fn=prepare_process, start_new_session=True, text=True, check=True
    )
    share = json.loads(found.stdout)
    assert 0.15 < share < 0.3


SENDS = """
import ctypes, json, os, sys, tempfile, time
throttle = ctypes.CDLL(sys.argv[1]).gsreal_throttle
throttle.argtypes = [ctypes.c_double]
assert throttle(0.25) == 0
data, found = bytes(2**22), []
with tempfile.TemporaryFile() as file:
    for send in (lambda: os.writev(file.fileno(), [data]), lambda: os.write(file.fileno(), data)):
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        while time.thread_time() < cpu_s + 0.1:
            file.seek(0)
            send()
        found.append((time.thread_time() - cpu_s) / (time.perf_counter() - wall_s))
print(json.dumps(found))
"""


def test_what_the_kernel_does_to_send_is_not_the_slow_device_s_work():
    """gloo sends by `writev`, holding a lock that its other threads wait for; what else is written is work."""
    library = str(throttle_library())
    found = subprocess.run(
        [sys.executable, "-c", SENDS, library],
        stdout=subprocess.PIPE,
        env={**os.environ, **as_variable(Place("a fourth of a core", 0, 0.25, library))},
        preexec_fn=prepare_process,
        start_new_session=True,
        text=True,
        check=True,
    )
    sending, writing = json.loads(found.stdout)
    assert writing < 0.35
    assert sending > 2 * writing


LIVES = """
import json, statistics, sys, time
from gsreal.lab.throttle import device_time_s, own_place, take
take(own_place())
times, ratios, began, lived = [], [], time.perf_counter(), device_time_s()
while (now := time.perf_counter()) < began + 1.5:
    start = device_time_s()
    sum(range(2_000))
    times.append(device_time_s() - start)
    ratios.append(times[-1] / (time.perf_counter() - now))
print(json.dumps([statistics.median(ratios), sum(times), device_time_s() - lived, time.perf_counter() - began]))
"""


def test_a_slow_device_s_own_clock_tells_of_short_calls_what_many_of_them_take():
    """Its sleep falls into few of them: on the wall, most take a fourth of what they cost such a device."""
    place = as_variable(Place("a fourth of a core", usable_cores()[-1], 0.25, str(throttle_library())))
    words = [sys.executable, "-c", LIVES]
    found = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        env={**os.environ, **place},
        preexec_fn=prepare_process,
        start_new_session=True,
        text=True,
        check=True,
    )
    typical_ratio, called_s, lived_s, wall_s = json.loads(found.stdout)
    assert typical_ratio == pytest.approx(4, rel=0.15)
    assert called_s == pytest.approx(lived_s, rel=0.15)
    assert lived_s == pytest.approx(wall_s, rel=0.3)
