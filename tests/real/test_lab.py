"""The lab's data: networks, commands, shares of cores, and what is refused."""

import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from strategies import built, device_type, fabrics, star, topology

from gsreal import cli, compiled
from gsreal.calibrate.bench import Settings
from gsreal.lab import building, calibration, lab, throttle
from gsreal.lab import verify as counters
from gsreal.lab.building import address_commands, node_commands, route_commands, wire_commands
from gsreal.lab.lab import rank_command, rank_environment
from gsreal.lab.network import LEAST_DELAY_S, network_of, shape, wire_bits_per_s
from gsreal.lab.throttle import MOST_OF_THE_CORES, Place, as_variable, cores_of, own_place
from gsreal.lab.verify import Verified, interface_bytes
from gsreal.machine import device_name, usable_cores
from gssim.cluster import Cluster
from gssim.cluster.lab_links import group_bytes
from gssim.errors import RunFailedError, UserError
from gssim.scenario import load_cluster, load_scenario
from gssim.terminal import EndedError, unwinding
from gssim.units import validated

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SHIPPED = sorted(SCENARIOS.glob("lab-*.toml"))


def network(cluster, run_id="7f"):
    return network_of(cluster, run_id, where="test")


def switched(**settings):
    return built(topology("switch", devices=[{"device": "fast", "count": 2}], **settings))


# Networks ------------------------------------------------------------------------------------------------------------


def test_links_of_devices_whose_names_look_like_a_links_are_apart():
    """Both links of the ring that end in `c` or in `b - c` are shown as `a - b - c`; their rates differ."""
    names = ["a", "a - b", "b - c", "c"]
    pairs = {("a - b", "c"): 1e6, ("a", "b - c"): 2e6, ("a", "a - b"): 3e6, ("b - c", "c"): 4e6}
    data = {
        "name": "made",
        "backend": "gloo",
        "source": "made by hand",
        "device_types": {"fast": device_type()},
        "devices": [{"name": name, "type": "fast", "host": name} for name in names],
        "links": [
            {"between": pair, "bandwidth_bytes_per_s": rate, "latency_s": 1e-3, "source": "made"}
            for pair, rate in pairs.items()
        ],
    }
    made = network(validated(Cluster, data, file="cluster"))
    assert {wire.between: wire.ends[0].rate_bytes_per_s for wire in made.wires} == pytest.approx(pairs)
    assert len({wire.name for wire in made.wires}) == len(pairs) - 1


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_device_and_switch_is_a_namespace_and_every_link_a_wire(path):
    cluster = load_scenario(path, gradients_needed=False).scenario.cluster
    made = network(cluster)
    assert [node.name for node in made.nodes] == list(cluster.wiring.names)
    assert len({node.namespace for node in made.nodes}) == cluster.wiring.nodes
    assert 2 * len(made.wires) == cluster.wiring.links
    addresses = [end.address for wire in made.wires for end in wire.ends] + [n.address for n in made.nodes if n.address]
    assert len(set(addresses)) == len(addresses)
    rates = sorted(end.rate_bytes_per_s for wire in made.wires for end in wire.ends)
    assert rates == pytest.approx(sorted(cluster.wiring.bandwidth_bytes_per_s))


def walked(made, start, address):
    """Return the nodes that a message to an address passes, by the routes alone."""
    routes = {(route.namespace, route.destination): route for route in made.routes}
    namespaces = {end.address: end.namespace for wire in made.wires for end in wire.ends}
    passed = [start]
    while (passed[-1], address) in routes:
        assert len(passed) <= len(made.nodes), "a loop"
        passed.append(namespaces[routes[passed[-1], address].via])
    return passed


@given(fabrics(most=6))
def test_routes_lead_from_every_node_to_every_device_by_the_fewest_links(cluster):
    slow = replace(cluster.wiring, bandwidth_bytes_per_s=cluster.wiring.bandwidth_bytes_per_s * 0 + 1e6)
    made = network(Wired(cluster, slow))
    steps = hops(slow)
    for rank in range(len(cluster.devices)):
        for number, node in enumerate(made.nodes):
            passed = walked(made, node.namespace, made.nodes[rank].address)
            assert passed[-1] == made.nodes[rank].namespace
            assert len(passed) - 1 == steps[number][rank]


class Wired:
    """A cluster with other rates than its own."""

    def __init__(self, cluster, wiring):
        self.devices, self.wiring = cluster.devices, wiring


def hops(wiring):
    """Return the fewest links from each node to each other (Floyd and Warshall)."""
    nodes = range(wiring.nodes)
    found = [[0.0 if a == b else float("inf") for b in nodes] for a in nodes]
    for a, b in zip(wiring.source.tolist(), wiring.target.tolist(), strict=True):
        found[a][b] = 1.0
    for via in nodes:
        for a in nodes:
            for b in nodes:
                found[a][b] = min(found[a][b], found[a][via] + found[via][b])
    return found


def test_a_delay_is_made_where_a_link_has_one_and_small_latencies_are_left_to_the_machine():
    far, near = (network(switched(latency_s=2 * s)) for s in (LEAST_DELAY_S, LEAST_DELAY_S / 2))
    assert {end.delay_s for wire in far.wires for end in wire.ends} == {LEAST_DELAY_S}
    assert {end.delay_s for wire in near.wires for end in wire.ends} == {0.0}
    assert [wire.is_delayed for wire in far.wires + near.wires] == [True] * len(far.wires) + [False] * len(near.wires)


def test_two_labs_share_no_name():
    cluster = star(3)
    first, second = ({node.namespace for node in network(cluster, run_id).nodes} for run_id in ("a", "b"))
    assert not first & second
    assert {building.run_of(name) for name in first} == {"a"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("dgx-a100", "has 2400 Gbit/s: the lab builds"),
        ("torus-4x4x4", "the lab builds up to 64 devices and switches"),
        ("unequal-1024", "the lab builds up to 64 devices and switches"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line_that_says_what_can(path, said):
    with pytest.raises(UserError, match="wired in any way") as refused:
        network(load_cluster(SCENARIOS / "clusters" / f"{path}.toml"))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_link_without_a_way_back_is_refused():
    cluster = star(2)
    links = tuple(replace(link, directed=True) for link in cluster.links)
    with pytest.raises(UserError, match="has no way back, which acknowledgements need"):
        network(replace(cluster, links=links))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("switch-8", "backend = 'nccl': the lab's ranks talk by gloo"),
        ("lab-2-hosts", "kind = 'cuda': the lab's devices are parts of cores: cpu"),
    ],
)
def test_what_is_no_cpu_is_refused(monkeypatch, path, said):
    monkeypatch.setattr(lab, "check_tools", lambda: None)
    cluster = load_cluster(SCENARIOS / "clusters" / f"{path}.toml")
    types = {name: replace(kind, kind="cuda") for name, kind in cluster.device_types.items()}
    with pytest.raises(UserError) as refused:
        lab.lab_of(replace(cluster, device_types=types), where="test")
    assert said in str(refused.value)


def test_devices_apart_are_refused():
    cluster = star(3)
    with pytest.raises(UserError, match="no link leads from 'd0' to 'd2'"):
        network(replace(cluster, links=cluster.links[:2]))


# Commands ------------------------------------------------------------------------------------------------------------


def test_a_star_of_two_takes_these_commands():
    made = network(switched(bandwidth=12.5e6))
    assert node_commands(made)[0] == ("ip", "netns", "add", "gsreal-lab-7f-0")
    assert wire_commands(made.wires)[0] == (
        *("ip", "-n", "gsreal-lab-7f-0", "link", "add", "wire0", "type", "veth"),
        *("peer", "name", "wire0", "netns", "gsreal-lab-7f-2"),
    )
    addresses = address_commands(made)
    assert ("ip", "-n", "gsreal-lab-7f-0", "addr", "add", "10.77.0.1/32", "dev", "rank") in addresses
    assert ("ip", "-n", "gsreal-lab-7f-2", "addr", "add", "10.78.0.6/30", "dev", "wire1") in addresses
    assert (
        *("ip", "-n", "gsreal-lab-7f-0", "route", "add", "10.77.0.2/32"),
        *("via", "10.78.0.2", "dev", "wire0", "src", "10.77.0.1"),
    ) in route_commands(made)


def test_a_rate_is_that_of_what_is_said_and_headers_come_on_top():
    assert wire_bits_per_s(12.5e6) == pytest.approx(100e6 * 1514 / 1448, abs=1)
    end = network(switched(bandwidth=12.5e6)).wires[0].ends[0]
    whole = shape(end, netem=False)[1]
    assert whole[whole.index("rate") + 1] == whole[whole.index("ceil") + 1] == f"{wire_bits_per_s(12.5e6)}bit"


def test_acknowledgements_have_a_class_that_comes_first():
    end = network(switched(bandwidth=12.5e6)).wires[0].ends[0]
    commands = [" ".join(command) for command in shape(end, netem=False)]
    (data,) = (line for line in commands if "classid 1:10 " in line)
    (small,) = (line for line in commands if "classid 1:20 " in line)
    assert data.endswith("prio 1")
    assert small.endswith("prio 0")
    first = [re.search(r"match u16 (\w+) (\w+) at 2 flowid 1:20$", line) for line in commands if " filter " in line]
    rules = [[int(word, 16) for word in found.groups()] for found in first]
    overtaking = [length for length in range(1501) if any(length & mask == value for value, mask in rules)]
    # with three blocks of selective acknowledgements at most; gloo's notices, of 100, keep their place among the data
    assert overtaking == list(range(81))


def test_netem_delays_where_the_kernel_has_it_and_the_wire_where_it_has_not():
    end = network(switched(latency_s=0.02)).wires[0].ends[0]
    with_netem, without = (" ".join(sum(shape(end, netem=n), ())) for n in (True, False))
    assert with_netem.count("netem delay 10000us") == 2
    assert "netem" not in without


@given(st.floats(1e3, 1e9))
def test_no_group_of_segments_takes_long_on_the_slowest_wire(rate):
    size = group_bytes(rate)
    assert size == 1514 or size / rate <= 1.1e-3
    assert size <= 65536


def test_ranks_are_told_who_they_are():
    made = network(star(2))
    places = [Place("core", core, 0.4, "") for core in (0, 1)]
    assert rank_command(made, 1, "gsreal.run.worker", ["x"])[:2] == ["nsenter", "--net=/run/netns/gsreal-lab-7f-1"]
    said = rank_environment(places, 1)
    assert (said["RANK"], said["WORLD_SIZE"]) == ("1", "2")
    assert said["GLOO_SOCKET_IFNAME"] == "rank"


def test_a_cache_that_the_dynamic_linker_cannot_name_is_refused(tmp_path, monkeypatch):
    """LD_PRELOAD ends at a space: the rank would run with nothing that slows it down."""
    for name in ("a space", "a:colon"):
        monkeypatch.setattr(throttle, "compiled", lambda *_, name=name: tmp_path / name / "throttle.so")
        with pytest.raises(UserError, match="cannot name a path with a space or a colon"):
            throttle.throttle_library()


def test_a_rank_that_nothing_slows_down_fails(tmp_path):
    place = Place("half", usable_cores()[0], 0.5, str(tmp_path / "throttle.so"))
    cores = os.sched_getaffinity(0)
    try:
        with pytest.raises(RunFailedError, match="was not loaded by LD_PRELOAD"):
            throttle.take(place)
    finally:
        os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("share", [1e-300, 1e-9, 0.009])
def test_a_share_that_is_next_to_nothing_is_refused(share):
    with pytest.raises(UserError, match=rf"lab.cpu_share_ratio = {share:g}: the lab's devices have at least 0.01"):
        cores_of([0.4, share], [0, 1], where="test")


@pytest.mark.parametrize("home", ["file", "nowhere"])
def test_a_cache_that_cannot_be_written_is_refused_with_a_remedy(tmp_path, monkeypatch, home):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if home == "file" else "/proc/nowhere")
    with pytest.raises(UserError, match=r"cannot be written: .*; name another folder with XDG_CACHE_HOME") as told:
        compiled.compiled(Path(throttle.__file__).with_name("throttle.cpp"), ["-shared", "-fPIC"])
    assert "\n" not in str(told.value)


def test_a_cache_that_is_named_by_no_whole_path_is_the_home_s(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert compiled.cache_folder() == tmp_path / ".cache" / "gsreal"


# Shares --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8), st.integers(1, 8))
def test_shares_fit_their_cores_or_are_refused(shares, cores):
    if sum(shares) > MOST_OF_THE_CORES * cores + 1e-6:
        with pytest.raises(UserError, match=r"lab\.cpu_share_ratio: the devices' shares add up to"):
            cores_of(shares, range(cores), where="test")
        return
    try:
        found = cores_of(shares, range(cores), where="test")
    except UserError:
        assert len(shares) > cores  # some must share a core
        return
    assert all(sum(s for s, c in zip(shares, found, strict=True) if c == core) <= 1 + 1e-6 for core in found)


def test_more_than_the_machine_has_is_refused_with_what_would_fit():
    assert cores_of([0.4] * 4, [0, 1], where="test") == (0, 1, 0, 1)
    with pytest.raises(UserError, match=r"add up to 2 cores, .* at most 1.6, such as 0.4 for each of 4"):
        cores_of([0.5] * 4, [0, 1], where="test")


def test_a_rank_finds_its_place_and_says_what_it_emulates(monkeypatch):
    import torch

    assert own_place() is None
    place = Place("a third of a core", 1, 1 / 3, "throttle.so")
    for name, value in as_variable(place).items():
        monkeypatch.setenv(name, value)
    assert own_place() == place
    assert device_name(torch.device("cpu")) == "a third of a core"


def test_a_device_whose_costs_were_measured_elsewhere_has_another_name(monkeypatch):
    cluster = load_cluster(SCENARIOS / "clusters" / "lab-2-hosts.toml")
    kind = cluster.device_types["lab-core-0.8"]
    for processor, name in ((None, "lab-core-0.8"), ("this one", "lab-core-0.8"), ("another", "cpu-core-at-0.8")):
        changed = replace(kind, lab=replace(kind.lab, processor=processor))
        monkeypatch.setattr(lab, "processor_name", lambda: "this one")
        monkeypatch.setattr(lab, "device_name", lambda device: f"{device.type}-core")
        assert lab.emulated_name(replace(cluster, device_types={"lab-core-0.8": changed}), 0) == name


def test_a_share_of_a_core_is_no_other_calibration_where_it_is_not_said():
    loaded = load_scenario(SCENARIOS / "demo.toml")
    said = json.dumps(loaded.scenario.resolved())
    assert '"lab"' not in said
    assert '"lab"' in json.dumps(load_scenario(SHIPPED[0]).scenario.resolved())


# Links that are off --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"measured_bytes_per_s": 11.5e6}, ["92 Mbit/s, not 100 (-8%)"]),
        ({"measured_delay_s": 0.0107}, ["a delay of 10.7 ms, not 10 (+7%)"]),
        ({"delay_s": 0.0, "measured_delay_s": 0.5}, []),
    ],
)
def test_a_link_that_is_off_by_more_than_five_per_cent_is_named(changes, said):
    link = Verified("a -> b", 12.5e6, 12.2e6, 0.01, 0.0101)
    assert replace(link, **changes).faults == said


# What a machine must have --------------------------------------------------------------------------------------------


def refusal(monkeypatch, capsys, *words):
    monkeypatch.setattr("sys.argv", ["gsreal", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_without_root_it_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for words in (["lab", SHIPPED[0]], ["lab", "--clean"]):
        assert refusal(monkeypatch, capsys, *words) == (
            "gsreal: lab: needs root, to make network namespaces and shape their links: run it with sudo"
        )


@pytest.mark.parametrize(("program", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")])
def test_a_missing_program_is_named_with_its_package(monkeypatch, capsys, program, package):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else f"/bin/{name}")
    said = refusal(monkeypatch, capsys, "lab", SHIPPED[0])
    assert said == f"gsreal: lab: needs the program {program}: apt-get install {package}"


def test_root_that_may_make_no_namespaces_is_refused(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(building, "can_create_namespaces", lambda: False)
    with pytest.raises(UserError, match="lab: root may not make network namespaces here"):
        building.check_tools()


def test_slow_devices_and_delays_need_a_compiler(monkeypatch):
    monkeypatch.setattr(building, "compiler", lambda: None)
    plain, far = network(star(2)), network(switched(latency_s=0.02))
    building.check_compiler(plain, [1.0, 1.0])
    with pytest.raises(UserError, match=r"to slow devices down \(lab.cpu_share_ratio\): apt-get install g\+\+"):
        building.check_compiler(plain, [1.0, 0.5])
    with pytest.raises(UserError, match=r"to delay links where the kernel has no netem: apt-get install g\+\+"):
        building.check_compiler(far, [1.0, 1.0])


def test_either_a_scenario_or_a_sweep_or_clean(monkeypatch, capsys):
    for words in (["lab"], ["lab", SHIPPED[0], "--clean"], ["lab", SHIPPED[0], "--sweep", "sweep.toml"]):
        assert refusal(monkeypatch, capsys, *words) == "gsreal: lab: give one of these: a scenario, --sweep, --clean"
    assert refusal(monkeypatch, capsys, "lab", SHIPPED[0], "--only", "ddp").startswith("gsreal: lab: --only chooses")


# Dead and alive ------------------------------------------------------------------------------------------------------


def test_a_lock_tells_dead_runs_from_those_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(building, "FOLDER", tmp_path / "netns")
    (tmp_path / "netns").mkdir()
    for name in ("gsreal-lab-dead-0", "gsreal-lab-dead-1", "gsreal-lab-alive-0", "mine"):
        (tmp_path / "netns" / name).touch()
    taken = []
    monkeypatch.setattr(building, "take_down", taken.append)
    with building.claimed("alive") as first, building.claimed("alive") as second:
        assert (first, second) == (True, False)
        assert building.clean() == (["dead"], ["alive"])
        assert taken == ["dead"]
    assert building.namespaces_of("dead") == ["gsreal-lab-dead-0", "gsreal-lab-dead-1"]
    assert not (tmp_path / "locks").exists()


def test_a_signal_to_end_unwinds_the_stack():
    left = []

    def body():
        with unwinding():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                signal.pause()
            finally:
                left.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(EndedError) as ended:
        body()
    assert ended.value.code == 128 + signal.SIGTERM
    assert left == [True]
    assert signal.getsignal(signal.SIGTERM) == before


def test_packages_are_installed_by_continuous_integration():
    script = (SCENARIOS.parent / ".ci" / "run").read_text()
    assert all(package in script for package in set(building.PACKAGES.values()))


# Calibration ---------------------------------------------------------------------------------------------------------


def measured(name):
    """Return what micro-benchmarks might show."""
    return {
        "name": name,
        "ranks": 2,
        "memory_counter": "allocator",
        "provenance": {"date": "2026-11-22", "processor": "P", "system": "Linux", "torch": "2", "python": "3"},
        "device": {
            "memory_bytes": 8e9,
            "peak_flop_per_s": 4e10,
            "memory_bandwidth_bytes_per_s": 1e10,
            "operation_overhead_s": 1e-6,
            "workspace_bytes": 0.0,
        },
        "optimizers": {"sgd": {"tensor_s": 1e-6, "elements_s": {"sizes": [1], "values": [1e-9]}}},
        "compression": {f"{key}_s": 1e-9 for key in ("call", "threshold_element", "pack_element", "scatter_element")},
        "profiles": [],
        "communication": {
            "latency_s": 1.5e-4,
            "bandwidth_bytes_per_s": 1e9,
            "overhead_s": {"all-reduce": 1e-4},
            "processor_byte_s": {"default": 1e-10},
            "posting_s": 1e-5,
            "posting_message_s": 4e-6,
            "posting_byte_s": 1e-10,
            "posting_limit_bytes": 4e6,
        },
    }


def test_types_are_measured_two_by_two_and_the_backend_by_the_fastest(tmp_path, monkeypatch):
    cluster = load_cluster(SCENARIOS / "clusters" / "lab-unequal-devices.toml")
    asked = []

    def measure(some, settings, *, shaped=False):
        asked.append(([device.type for device in some.devices], settings.only, shaped))
        if settings.only == "neighbours":
            return {"beside": {"gpt-byte-1m": 1.04, "resnet-digits": 1.16, "bert-byte-1m": 1.06}}
        if settings.only == "communication":
            return {"beside": {"gpt-byte-1m": [2 * some.links[0].bandwidth_bytes_per_s, 0.1]}}
        return measured(some.devices[0].type)

    monkeypatch.setattr(calibration, "lab_of", lambda some, *, where, on=None: some)
    monkeypatch.setattr(calibration, "_measured", measure)
    monkeypatch.setattr(calibration, "processor_name", lambda: "this one")
    monkeypatch.setattr(calibration, "usable_cores", lambda: [3, 4, 5])
    settings = Settings(("gpt-byte-1m.toml",), (2, 4), 128, "fp32", "cpu")
    path = tmp_path / "devices.toml"
    for types, backend in calibration.calibrate_types(cluster, settings, where="test"):
        calibration.write_types(path, types, backend)
    for share in (0.8, 0.4, 0.2):
        pair, four = ([f"lab-core-{share}"] * count for count in (2, 4))
        crowded = [(four, "neighbours", False)] if share < 0.8 else []
        expected = [(pair, "", False), *crowded, *[(four if crowded else pair, "communication", True)] * 2]
        assert [asked.pop(0) for _ in expected] == expected
    assert not asked
    files = f'device_types = "{path}"\nbackend_cost = "{calibration.backend_path(path)}"\n'
    devices = 'devices = [{name = "a", type = "lab-core-0.2", host = "h"}]\n'
    (tmp_path / "cluster.toml").write_text('name = "c"\nbackend = "gloo"\nsource = "test"\n' + files + devices)
    found = load_cluster(tmp_path / "cluster.toml")
    kind = found.device_types["lab-core-0.2"]
    assert (kind.lab.cpu_share_ratio, kind.lab.processor, kind.lab.cores) == (0.2, "this one", 3)
    assert kind.neighbour_slowdown_ratio == 1.06
    assert kind.memory_bytes == pytest.approx(cluster.device_types["lab-core-0.2"].memory_bytes, rel=1e-4)
    assert found.backend_cost.overhead_s == {"all-reduce": 1e-4}
    assert found.backend_cost.message_s == 150e-6


def test_a_table_in_a_file_that_is_not_there_is_refused(tmp_path):
    (tmp_path / "cluster.toml").write_text('name = "c"\ndevice_types = "nowhere.toml"\n')
    with pytest.raises(UserError, match=r"device_types = 'nowhere\.toml': no such file"):
        load_cluster(tmp_path / "cluster.toml")


def test_calibration_in_the_lab_takes_no_other_way_of_measuring(monkeypatch, capsys):
    words = ["calibrate", "--lab", SCENARIOS / "clusters" / "lab-2-hosts.toml", "--again"]
    assert refusal(monkeypatch, capsys, *words).startswith("gsreal: --lab: measures two ranks of each device type")


# What was carried -----------------------------------------------------------------------------------------------------

COUNTERS = """Inter-|   Receive              |  Transmit
 face |bytes packets errs ...  |bytes packets errs ...
    lo: 7 1 0 0 0 0 0 0 7 1 0 0 0 0 0 0
  rank: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0
  eth0: 100 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0
  eth1:20 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0
"""


def test_what_leaves_a_device_and_comes_to_it_is_counted_at_its_wires(tmp_path, monkeypatch):
    table = tmp_path / "dev"
    table.write_text(COUNTERS)
    assert interface_bytes(table) is None
    for name, value in as_variable(Place("a core", 1, 1.0, "")).items():
        monkeypatch.setenv(name, value)
    assert interface_bytes(table) == (35, 120)


def test_what_is_left_out_between_two_steps_is_not_counted(monkeypatch):
    begin, evaluation, end, last_evaluation = (0, 0), [(10, 20), (1010, 2020)], (1020, 2040), [(1020, 2040), (9e9, 9e9)]
    counted = iter([begin, *evaluation, end, *last_evaluation])
    monkeypatch.setattr(counters, "interface_bytes", lambda: next(counted))
    carried = counters.InterfaceBytes()
    carried.note(last=False)  # a reading takes as much of a slow device's step as a small layer: none between steps
    with carried.left_out():
        pass
    carried.note(last=True)
    with carried.left_out():
        pass
    assert carried.by_step == (10, 20)


def test_outside_the_lab_nothing_is_counted():
    carried = counters.InterfaceBytes()
    carried.note(last=True)
    assert carried.by_step is None


@pytest.mark.parametrize(("name", "emulated"), [("demo", False), ("lab-unequal-devices", True)])
def test_a_real_run_knows_whether_its_devices_are_those_of_the_lab(name, emulated):
    """`gsreal run` measured whole cores under the name of slowed-down ones, and said nothing."""
    assert cli.is_emulated(load_scenario(SCENARIOS / f"{name}.toml").scenario) is emulated
