"""Ranks that srun or torchrun starts on two nodes (namespaces of this machine) train like those of one launch."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import commands
import forks
import numpy as np
import pytest
from topologies import smi_matrix

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from gsreal.calibrate.bench import Settings
from gsreal.calibrate.cluster_file import write_calibrated, write_cluster
from gsreal.calibrate.communication import Line
from gsreal.calibrate.nodes import nodes_data
from gsreal.lab.building import built, missing
from gsreal.lab.network import ADDRESS_DEVICE, network_of
from gsreal.run import nodes
from gssim.collectives import Hops
from gssim.errors import UserError
from gssim.network import Router
from gssim.result import read_result
from gssim.scenario import load_cluster, read_toml

pytestmark = pytest.mark.real

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SMALL = ["workload.global_batch_size=4", "workload.sequence_length=32", "run.steps=3", "run.warmup_steps=1"]
PROGRAM = [sys.executable, "-c", "from gsreal.cli import main; main()"]
RUN = ["run", str(SCENARIOS / "lab-2-hosts.toml")]
RUN += [word for change in SMALL for word in ("--set", change)]
STEP = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "10.77.0.[1-2]", "SLURM_JOB_ID": "4711"}
LIMIT_S = 120


def task(number, **more):
    return STEP | {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0", "SLURM_NODEID": str(number)} | more


def ended(commands, environments, limit_s=LIMIT_S):
    """Run commands at the same time, as processes of their own; return what each leaves."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    processes = [
        subprocess.Popen(
            command,
            env=plain | more,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=SCENARIOS.parent,
        )
        for command, more in zip(commands, environments, strict=True)
    ]
    try:
        texts = [process.communicate(timeout=limit_s)[1] for process in processes]
        return [forks.Ended(process.returncode, "", text) for process, text in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def two_nodes():
    """Yield (file of the network's namespace, address) of two nodes."""
    if missing() is not None:
        pytest.skip(f"the lab {missing()}")
    network = network_of(load_cluster(SCENARIOS / "clusters" / "lab-2-hosts.toml"), "7e57")
    with built(network, shaped=False):
        yield [(f"/run/netns/{node.namespace}", node.address) for node in network.nodes[:2]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the Result of the launch that starts both ranks itself."""
    folder = tmp_path_factory.mktemp("alone")
    return result_of(forks.run_commands(forks.Command([*RUN, "--out", str(folder)])), folder)


def result_of(outcomes, folder):
    assert [each.returncode for each in outcomes] == [0] * len(outcomes), outcomes
    (file,) = folder.glob("*.json")
    return read_result(file)


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_two_nodes_train_like_one_launch(two_nodes, alone, tmp_path, launcher):
    run = [*RUN, "--interface", ADDRESS_DEVICE, "--timeout", "60", "--out", str(tmp_path)]
    if launcher == "srun":
        asked = [forks.Command(run, task(number), network) for number, (network, _) in enumerate(two_nodes)]
        outcomes = forks.run_commands(*asked)
    else:
        commands = []
        for number, (network, _) in enumerate(two_nodes):
            settings = ["--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", "--no-python"]
            head = ["--master-addr", two_nodes[0][1], "--master-port", "29517"]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *settings, *head]
            commands.append(["nsenter", f"--net={network}", *torchrun, *PROGRAM, *run])
        outcomes = ended(commands, [{}, {}])
    there = result_of(outcomes, tmp_path)
    assert (there.scenario_id, there.collectives) == (alone.scenario_id, alone.collectives)
    assert there.loss == pytest.approx(alone.loss, rel=1e-6)
    peaks = [[each.peak_allocated_bytes for each in result.ranks] for result in (there, alone)]
    assert peaks[0] == pytest.approx(peaks[1], rel=1e-3)


def test_nodes_that_are_not_the_files_are_named_by_every_rank(two_nodes):
    # the file has one host with both devices
    together = ["--set", f"cluster={SCENARIOS / 'clusters' / 'two-cores.toml'}"]
    run = [*RUN, *together, "--interface", ADDRESS_DEVICE, "--timeout", "60"]
    asked = [forks.Command(run, task(number), network) for number, (network, _) in enumerate(two_nodes)]
    for outcome in forks.run_commands(*asked):
        assert outcome.returncode == 2
        assert "cluster.devices: host: ranks 0 and 1 are both of" in outcome.stderr.splitlines()[-1]
        assert "(node 1)" in outcome.stderr.splitlines()[-1]


def test_a_step_of_another_size_is_refused():
    more = task(0, SLURM_NTASKS="4", SLURM_STEP_TASKS_PER_NODE="2(x2)")
    (outcome,) = forks.run_commands(forks.Command(RUN, more))
    assert outcome.returncode == 2
    assert outcome.stderr.splitlines()[-1].endswith("plan: it has 2 ranks, but the launcher started 4 (WORLD_SIZE)")


@pytest.mark.parametrize("node", ["0", "1"])
def test_a_first_node_at_the_loopback_is_refused_by_every_node(monkeypatch, node):
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": node}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(UserError, match="MASTER_ADDR = 'localhost': an address of the loopback here"):
        nodes.check_launcher(2, where="pair.toml")


@pytest.mark.parametrize("addresses", [[], ["127.0.1.1"], ["203.0.113.7"]], ids=["unknown", "loopback", "of another"])
def test_a_host_name_that_others_cannot_reach_needs_an_interface(monkeypatch, addresses):
    """gloo would listen on the loopback instead, and the others wait for it."""
    found = {socket.gethostname(): addresses, "10.77.0.1": ["10.77.0.1"]}
    monkeypatch.setattr(nodes, "_addresses", found.__getitem__)
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.77.0.1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="--interface: missing: this host's name"):
        nodes.check_launcher(2, where="pair.toml")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    nodes.check_launcher(2, where="pair.toml")


@pytest.mark.slow
def test_ranks_that_do_not_meet_end_within_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free, and closed in a moment
    numbers = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    (outcome,) = ended([[*PROGRAM, *RUN, "--timeout", "2"]], [numbers | place])
    assert outcome.returncode == 1
    assert f"2 ranks have not met at 127.0.0.1:{port} within 2.0 s" in outcome.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        (task(1) | {"RANK": "0"}, {}),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {}),  # a batch script: no step
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, {}),
        (task(1), {"RANK": "1", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1"}),
        (
            {"SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
            | {"SLURM_STEP_NODELIST": "gpu[07-09]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"},
            {"RANK": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "gpu07", "GROUP_RANK": "2"},
        ),
        (task(0, MASTER_ADDR="head", MASTER_PORT="1234"), {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}),
    ],
)
def test_numbers_of_a_step_of_slurm(variables, expected):
    found = nodes.srun_environment(variables)
    assert {name: found.get(name) for name in expected} == expected
    assert bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"SLURM_NTASKS": "3"}, "3 tasks on 2 nodes"),
        ({"SLURM_NTASKS": "two"}, "SLURM_NTASKS = 'two': must be a whole number"),
        ({"SLURM_STEP_NODELIST": "n[1-"}, "is no host list"),
    ],
)
def test_a_step_that_cannot_be_read_is_refused(more, message):
    with pytest.raises(UserError, match=message.replace("[", "\\[")):
        nodes.srun_environment(task(0, **more))


# Calibration ---------------------------------------------------------------------------------------------------------


def measured_node(host, ranks=2, name="core"):
    """Return measurements of a node as `gsreal calibrate` takes them, with the costs of a committed calibration."""
    tables = read_toml(SCENARIOS / "clusters" / "two-cores.toml")[1]
    costs = next(iter(tables["device_types"].values()))
    posting = {key: tables["backend_cost"][key] for key in ("overhead_s", "processor_byte_s")}
    return {
        "host": host,
        "name": name,
        "ranks": ranks,
        "memory_counter": "allocator",
        "provenance": {"date": "2026-11-25", "processor": "P", "system": "Linux", "torch": "2", "python": "3"},
        "device": {
            "memory_bytes": 8e9,
            "peak_flop_per_s": 5e10,
            "memory_bandwidth_bytes_per_s": 1e10,
            "operation_overhead_s": 1e-6,
            "workspace_bytes": 0,
        },
        "optimizers": {},
        "compression": costs["compression"],
        "profiles": [],
        "communication": {"latency_s": 2e-5, "bandwidth_bytes_per_s": 4e9, **posting} if ranks > 1 else None,
    }


SETTINGS = Settings((), (2,), 128, "fp32", "cpu")


@pytest.mark.parametrize("ranks", [1, 2])
def test_messages_between_nodes_take_in_the_file_what_they_took(tmp_path, ranks):
    links = {(0, 1): Line(3e-3, 1 / 50e6), (0, 2): Line(4e-3, 1 / 100e6), (1, 2): Line(5e-3, 1 / 50e6)}
    hosts = [measured_node(f"n{i}", ranks) for i in range(3)]
    write_cluster(tmp_path / "made.toml", nodes_data(hosts, links, SETTINGS))
    cluster = load_cluster(tmp_path / "made.toml")
    assert [device.host for device in cluster.devices] == [f"n{i}" for i in range(3) for _ in range(ranks)]
    router = Router(cluster.wiring)
    overhead_s = hosts[0]["communication"]["overhead_s"]["send"] if ranks > 1 else 0.0
    for (a, b), line in links.items():
        hop = Hops.of([(a * ranks, (b + 1) * ranks - 1, 1.0)])
        assert router.rate_bytes_per_s(hop, np.ones(1)) == pytest.approx(1 / line.byte_s, rel=1e-4)
        latency_s = float(router.of(hop).latency_s[0])
        assert overhead_s + 2 * latency_s == pytest.approx(line.fixed_s, rel=1e-3)


def test_devices_of_two_names_have_types_of_their_own(tmp_path):
    links = {(0, 1): Line(3e-3, 1e-8)}
    write_cluster(
        tmp_path / "made.toml", nodes_data([measured_node("same"), measured_node("same", 1, "gpu")], links, SETTINGS)
    )
    cluster = load_cluster(tmp_path / "made.toml")
    assert [(device.host, device.type) for device in cluster.devices] == [
        ("node0", "core"),
        ("node0", "core"),
        ("node1", "gpu"),
    ]


ALL_REDUCES = [[2**k, 2e-5 + 2**k * 4e-12] for k in range(10, 29)]


def described(command, *, usual=subprocess.run, **how):
    """Do what `subprocess.run` does, but run gssim's command line in this process."""
    ours = command[:3] == [sys.executable, "-m", "gssim"]
    return commands.run("gssim", *command[3:]) if ours else usual(command, **how)


@pytest.fixture
def eight_h100(tmp_path, monkeypatch):
    """Let nvidia-smi tell of eight H100 behind NVSwitches, whatever this machine has."""
    monkeypatch.setattr(subprocess, "run", described)
    (tmp_path / "bin").mkdir()
    program, matrix = tmp_path / "bin/nvidia-smi", tmp_path / "bin/matrix"
    matrix.write_text(smi_matrix("NV18", nics=8))
    names = "for i in 1 2 3 4 5 6 7 8; do echo NVIDIA H100 80GB HBM3; done"
    program.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then cat {matrix}; else {names}; fi\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return matrix


def gpu_node(host, ranks=4):
    measured = measured_node(host, ranks, "nvidia-h100-80gb-hbm3") | {"gpus": 8, "nccl_all_reduces": ALL_REDUCES}
    measured["device"] |= {"peak_flop_per_s": 4e14, "memory_bytes": 8e10}
    return measured


@pytest.mark.parametrize("nodes", [1, 2])
def test_gpus_are_calibrated_for_nccl_as_they_are_wired(tmp_path, capsys, eight_h100, nodes):
    measured, out = [gpu_node(f"n{i}") for i in range(nodes)], tmp_path / "here.toml"
    write_calibrated(out, measured, {}, replace(SETTINGS, kind="cuda"))
    cluster = load_cluster(out)
    assert (cluster.backend, len(cluster.devices)) == ("nccl", 4 * nodes)
    assert len({device.host for device in cluster.devices}) == nodes
    device = cluster.type_of(0)
    assert (device.kind, device.peak_flop_per_s["fp32"]) == ("cuda", 4e14)  # as measured, not the preset's
    wired = load_cluster(preset_file(tmp_path, ["--gpu", "h100", "--devices", "4", "--hosts", str(nodes)]))
    router, preset = Router(cluster.wiring), Router(wired.wiring)
    for a, b in ((0, 3), (0, 4 * nodes - 1)):
        hop = Hops.of([(a, b, 1.0)])
        assert router.rate_bytes_per_s(hop, np.ones(1)) == preset.rate_bytes_per_s(hop, np.ones(1))
    said = capsys.readouterr()
    assert "19 all-reduces of 4 ranks" in said.err
    assert "analysis draw" in said.out
    assert {"latency_s", "bandwidth_ratio"} < {*read_toml(out)[1]["nccl"]}
    assert float(said.err.split("error ")[1].split("%")[0]) < 5


def preset_file(folder, words):
    out = folder / "preset.toml"
    assert commands.run("gssim", "cluster", *words, "--out", out).returncode == 0
    return out


@pytest.mark.parametrize("why", ["an unknown GPU", "nodes that differ"])
def test_gpus_that_cannot_be_described_communicate_by_gloo(tmp_path, capsys, eight_h100, why):
    measured = [gpu_node("n0"), gpu_node("n1", 4 if why == "an unknown GPU" else 2)]
    if why == "an unknown GPU":
        program = eight_h100.parent / "nvidia-smi"
        program.write_text(program.read_text().replace("H100 80GB HBM3", "XT9000"))
    plain = nodes_data(measured, {(0, 1): Line(3e-3, 1e-8)}, SETTINGS)
    write_calibrated(tmp_path / "here.toml", measured, plain, SETTINGS)
    assert load_cluster(tmp_path / "here.toml").backend == "gloo"
    assert {"an unknown GPU": "XT9000: no such preset", "nodes that differ": "nodes differ: 4 x"}[why] in (
        capsys.readouterr().err
    )


@pytest.mark.slow
def test_two_nodes_are_calibrated_with_their_link(two_nodes, tmp_path):
    command = [*PROGRAM, "calibrate", "--ranks", "1"]
    command += ["--interface", ADDRESS_DEVICE, "--out", str(tmp_path / "made.toml")]
    tasks = [task(0), task(1)]
    outcomes = ended([["nsenter", f"--net={network}", *command] for network, _ in two_nodes], tasks, 600)
    assert [each.returncode for each in outcomes] == [0, 0], outcomes
    cluster = load_cluster(tmp_path / "made.toml")
    assert len(cluster.devices) == 2
    results = tmp_path / "results"
    run = [*RUN, "--set", f"cluster={tmp_path / 'made.toml'}", "--interface", ADDRESS_DEVICE, "--out", str(results)]
    lines = [["nsenter", f"--net={network}", *PROGRAM, *run] for network, _ in two_nodes]
    there = result_of(ended(lines, tasks), results)
    assert [each.device for each in there.ranks] == [cluster.devices[0].type] * len(there.ranks)
