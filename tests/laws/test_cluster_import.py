"""Cluster files from NCCL's XML, nvidia-smi, Slurm, topograph and the machine: the presets' shapes, and bad input."""

import json
import random
import re
import tomllib
from dataclasses import replace
from itertools import combinations, zip_longest
from pathlib import Path

import commands
import pytest
from topologies import nccl_xml, smi_matrix

from gssim.cluster.topology.builders import CUBE_MESH
from gssim.errors import UserError
from gssim.interop import cluster_of
from gssim.interop.detected_host import detected
from gssim.interop.servers import server_of
from gssim.scenario import load_cluster

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "scenarios/clusters"


def made(folder, files, gpu=None, **options):
    """Return the cluster that files make, loaded again, and the notes; `gpu`: of all hosts."""
    paths = []
    for name, text in files.items():
        (folder / name).write_text(text)
        paths.append(folder / name)
    found = cluster_of(paths, **({"gpus": [gpu]} if gpu else {}) | options)
    (folder / "made.toml").write_text(found.text)
    return load_cluster(folder / "made.toml"), found


def edges(cluster):
    """Return the links by their ends: rates and latencies."""
    wiring = cluster.wiring
    names = wiring.names
    return {
        (names[a], names[b]): (rate, round(latency_s, 12))
        for a, b, rate, latency_s in zip(
            wiring.source.tolist(),
            wiring.target.tolist(),
            wiring.bandwidth_bytes_per_s.tolist(),
            wiring.latency_s.tolist(),
            strict=True,
        )
    }


def without_host_memory(cluster):
    """Return a cluster of servers whose hosts' memory is not known, as what NCCL writes does not tell of it."""
    servers = tuple(replace(each, host_memory=False, devices_per_memory_link=1) for each in cluster.topology.servers)
    return replace(cluster, topology=replace(cluster.topology, servers=servers), devices=(), switches=())


def test_hosts_of_several_gpus_have_a_gpu_and_a_network_card_each(tmp_path):
    """Two hosts of A100 and a DGX-1V behind 100 Gbit/s Ethernet: the matrix names neither GPUs nor rates."""
    a100 = smi_matrix(dict.fromkeys(combinations(range(8), 2), "NV12"), nics=2)
    v100 = smi_matrix({pair: f"NV{links}" for pair, links in CUBE_MESH.items()}, nics=1)
    files = {"first.txt": a100, "second.txt": a100, "third.txt": v100}
    cluster, _ = made(tmp_path, files, gpus=["a100", "a100", "v100"], nics=["roce-100"])
    assert [each.type for each in cluster.devices] == ["a100-sxm-80"] * 16 + ["v100-sxm2-32"] * 8
    assert {each.nic_link.bandwidth_bytes_per_s for each in cluster.topology.servers} == {11e9}
    assert [each.nics for each in cluster.topology.servers] == [2, 1]
    cluster, found = made(tmp_path, files, gpus=["a100", "a100", "v100"], nics=["tcp-100g", "tcp-100g", "tcp-25g"])
    assert [each.nic_link.bandwidth_bytes_per_s for each in cluster.topology.servers] == [4.5e9, 2.6e9]
    assert not any("ib-hdr-200" in note for note in found.notes)
    cluster, _ = made(tmp_path, {}, gpus=["a100", "v100"])  # usual servers, a host of each
    assert [each.device for each in cluster.topology.servers] == ["a100-sxm-80", "v100-sxm2-32"]
    assert cluster.name == "1 x a100, 1 x v100"
    _, found = made(tmp_path, {"first.txt": a100}, gpu="a100")
    assert any("ib-hdr-200" in note and "--nic" in note for note in found.notes)
    alone, _ = made(tmp_path, {"alone.txt": smi_matrix(dict.fromkeys(combinations(range(8), 2), "NV12"))}, gpu="a100")
    assert not alone.topology.servers[0].nics
    with pytest.raises(UserError, match="--gpu: 2 GPUs for 3 files"):
        made(tmp_path, files, gpus=["a100", "v100"])
    with pytest.raises(UserError, match="--nic infiniband: no such preset"):
        made(tmp_path, files, gpu="a100", nics=["infiniband"])
    with pytest.raises(UserError, match="--nic: 2 presets for 3"):
        made(tmp_path, files, gpu="a100", nics=["roce-100", "tcp-25g"])


@pytest.mark.parametrize(
    ("shipped", "options"),
    [
        ("dgx-h100", {}),
        ("dgx-a100", {"sm": 80, "links": 12, "speed": "16.0 GT/s PCIe", "mbits": 200000}),
        ("dgx-1v", {"sm": 70, "speed": "8.0 GT/s PCIe", "nics": 4, "mbits": 100000, "target": CUBE_MESH}),
    ],
)
def test_nccl_xml_gives_the_shipped_server(tmp_path, shipped, options):
    cluster, found = made(tmp_path, {"host.xml": nccl_xml(**options)})
    expected = load_cluster(CLUSTERS / f"{shipped}.toml")
    assert edges(cluster) == edges(without_host_memory(expected))
    assert {each.type for each in cluster.devices} == {each.type for each in expected.devices}
    assert any("--gpu" in note for note in found.notes)
    named, found = made(tmp_path, {"host.xml": nccl_xml(**options)}, gpu="h200")
    assert {each.type for each in named.devices} == {"h200-sxm"}
    assert not any("--gpu" in note for note in found.notes)


@pytest.mark.parametrize("cell", ["NV0", "NV100", "NVX"])
def test_a_matrix_of_no_nvlinks_is_refused_by_its_cell(tmp_path, cell):
    cells = dict.fromkeys(combinations(range(4), 2), cell)
    with pytest.raises(UserError, match=f"topo.txt: GPU0 and GPU1: '{cell}': no such connection"):
        made(tmp_path, {"topo.txt": smi_matrix(cells)}, gpu="h100")


def test_a_gpu_that_is_named_and_is_not_the_files_is_noted(tmp_path):
    """A DGX H100 whose GPUs were named V100 became V100s on NVLinks of an H100 without a word."""
    notes = {gpu: made(tmp_path, {"host.xml": nccl_xml()}, gpu=gpu)[1].notes for gpu in ("v100", "h200", "H100 PCIe")}
    assert [note for note in notes["v100"] if "sm = 90 is of h100, h200, h20: NVLinks" in note]
    assert not [note for gpu in ("h200", "H100 PCIe") for note in notes[gpu] if "sm = 90" in note]


def test_slower_cards_are_not_for_training(tmp_path):
    cluster, found = made(tmp_path, {"host.xml": nccl_xml(more=2)})
    assert len([name for name in cluster.switches if "nic" in name]) == 8
    assert any("of 10 cards" in note for note in found.notes)


def test_all_cards_of_a_gpu_carry_its_messages(tmp_path):
    """Two ports of 200 Gbit/s, and the EFA cards of a p5: four of 100 Gbit/s beside each GPU."""
    for ports, mbits in ((2, 200000), (4, 100000)):
        one = re.compile(r"<nic>(<net [^>]*/>)</nic>")
        text = one.sub(lambda found, ports=ports: f"<nic>{found[1] * ports}</nic>", nccl_xml(mbits=mbits))
        cluster, found = made(tmp_path, {"host.xml": text})
        assert [name.partition("/")[2][:3] for name in cluster.switches].count("nic") == 8
        assert {rate for ends, (rate, _) in edges(cluster).items() if "fabric" in "".join(ends)} <= {50e9}
        assert cluster.topology.servers[0].nic_link.bandwidth_bytes_per_s == 50e9
        assert any(f"{ports} cards" in note for note in found.notes)


def test_a_latency_in_the_file_is_said_not_to_count(tmp_path):
    _, found = made(tmp_path, {"host.xml": nccl_xml().replace('latency="0.0"', 'latency="75.0"')})
    assert any("latency" in note for note in found.notes)
    _, found = made(tmp_path, {"host.xml": nccl_xml()})
    assert not any("latency" in note for note in found.notes)


@pytest.mark.parametrize(
    ("cell", "gpus", "gpu", "rate"),
    [
        ("NV8", 8, "h100", 8 * 25e9),  # H800
        ("NV18", 8, "h100", 18 * 25e9),
        ("NV4", 4, "a100", 12 * 25e9),  # each GPU's twelve links go to the three others
        ("NV8", 8, "a100", 8 * 25e9),  # A800
        ("NV6", 16, "v100", 6 * 25e9),  # DGX-2
    ],
)
def test_the_matrix_tells_how_many_links_lead_to_the_switch(tmp_path, cell, gpus, gpu, rate):
    cluster, _ = made(tmp_path, {"topo.txt": smi_matrix(dict.fromkeys(combinations(range(gpus), 2), cell))}, gpu=gpu)
    assert cluster.topology.servers[0].inside == "nvswitch"
    assert cluster.topology.servers[0].inside_link.bandwidth_bytes_per_s == rate


def test_pairs_of_nvlinks_are_written_link_by_link(tmp_path):
    bridged = {(0, 1): 4, (2, 3): 4}
    text = nccl_xml(gpus=4, nics=1, mbits=100000, sm=80, speed="16.0 GT/s PCIe", target=bridged)
    cluster, _ = made(tmp_path, {"host.xml": text})
    assert cluster.topology is None
    assert edges(cluster)["server0/gpu0", "server0/gpu1"][0] == 4 * 25e9
    assert ("server0/gpu1", "server0/gpu2") not in edges(cluster)


TREE = """# two servers a leaf, as in scenarios/clusters/leaf-spine-64.toml
SwitchName=leaf0 Nodes=a[0-1]
SwitchName=leaf1 Nodes=a[2-3] LinkSpeed=100
SwitchName=leaf2 Nodes=a[4-5]
SwitchName=leaf3 Nodes=a[6-7]
SwitchName=spine0 Switches=leaf[0-3]
SwitchName=spine1 Switches=leaf[0-3]
"""
TREE_YAML = """
- topology: other
  block: {block_sizes: [2], blocks: [{block: b0, nodes: "a[0-7]"}]}
- topology: default
  cluster_default: true
  tree:
    switches:
      - {switch: leaf0, nodes: "a[0-1]"}
      - {switch: leaf1, nodes: "a[2-3]"}
      - {switch: leaf2, nodes: "a[4-5]"}
      - {switch: leaf3, nodes: "a[6-7]"}
      - {switch: spine0, children: "leaf[0-3]"}
      - {switch: spine1, children: "leaf[0-3]"}
"""


@pytest.mark.parametrize(("name", "text"), [("topology.conf", TREE), ("topology.yaml", TREE_YAML)])
def test_a_tree_of_slurm_gives_the_shipped_fat_tree(tmp_path, name, text):
    cluster, found = made(tmp_path, {name: text}, gpu="a100", oversubscription=4.0)
    assert edges(cluster) == edges(load_cluster(CLUSTERS / "leaf-spine-64.toml"))
    assert [note.split(" = ")[0] for note in found.notes if note.startswith("ni")] == ["nic_link", "nics"]
    assert len(found.notes) == 4  # cards; LinkSpeed or the other topology, and the oversubscription


def test_a_tree_of_three_levels(tmp_path):
    text = "".join(f"SwitchName=leaf{i} Nodes=a[{2 * i}-{2 * i + 1}]\n" for i in range(4))
    text += (
        "SwitchName=pod0 Switches=leaf[0-1]\nSwitchName=pod1 Switches=leaf[2-3]\nSwitchName=core Switches=pod[0-1]\n"
    )
    cluster, _ = made(tmp_path, {"topology.conf": text}, gpu="h100", oversubscription=2.0)
    found = edges(cluster)
    assert len(cluster.devices) == 64
    assert cluster.switches[-3:] == ("pod0", "pod1", "core")
    # two servers of eight cards of 50 GB/s below a leaf, halved at every level
    assert found["leaf0", "pod0"][0] == 2 * 8 * 50e9 / 2
    assert found["pod0", "core"][0] == 2 * 8 * 50e9 / 2
    assert found["server0/nic0", "leaf0"][0] == 50e9


def test_unequal_hosts_and_blocks(tmp_path):
    files = {"a.xml": nccl_xml(), "b.xml": nccl_xml(sm=80, links=12, speed="16.0 GT/s PCIe", mbits=200000)}
    files["topology.conf"] = "BlockName=b1 Nodes=x1\nBlockName=b2 Nodes=x2\nBlockSizes=1 \\\n"
    cluster, found = made(tmp_path, files)
    assert [each.type for each in cluster.devices[::8]] == ["h100-sxm", "a100-sxm-80"]
    assert cluster.nccl is not None
    assert any("joined by one switch" in note for note in found.notes)


def test_a_switch_on_two_lines_is_refused_by_the_second_one(tmp_path):
    """They were merged, or the first was forgotten: another network than the file's author meant."""
    (tmp_path / "topology.conf").write_text("SwitchName=a \\\n Nodes=n1\n# SwitchName=a\nSwitchName=a Nodes=n2\n")
    with pytest.raises(UserError, match=r"topology.conf line 4: a: is described twice"):
        cluster_of([tmp_path / "topology.conf"], gpus=["h100"])


@pytest.mark.parametrize("nic", ["nvlink4-h100", "pcie4x16", "upi-spr", "wan-1g", "roce"])
def test_only_links_of_network_cards_are_such_cards(nic):
    with pytest.raises(UserError, match=rf"--nic {nic}: .*allowed: ib-edr-100, .*roce-100.*tcp-100g-a100-80$"):
        cluster_of([], gpus=["h100"], nics=[nic], hosts=2)


@pytest.mark.parametrize("line", ["SwitchName=a Nodes=ALL", "BlockName=a Nodes=all", "SwitchName=a Switches=ALL"])
def test_a_topology_that_does_not_name_its_hosts(tmp_path, line):
    """`Nodes=ALL` was one host of this name."""
    (tmp_path / "topology.conf").write_text(line + "\n")
    with pytest.raises(UserError, match=r"topology.conf line 1: a: (Nodes|Switches)=ALL: does not say which"):
        cluster_of([tmp_path / "topology.conf"], gpus=["h100"])


def test_labels_of_kubernetes(tmp_path):
    labels = [{"tier-0": f"s{i // 2}", "tier-1": "t"} for i in range(4)]
    items = [
        {"metadata": {"name": f"n{i}", "labels": {f"fabric.topograph.run/{k}": v for k, v in each.items()}}}
        for i, each in enumerate(labels)
    ]
    import json

    cluster, _ = made(tmp_path, {"nodes.json": json.dumps({"items": items})}, gpu="h100")
    assert len(cluster.devices) == 32
    assert tomllib.loads((tmp_path / "made.toml").read_text())["topology"]["fabric"]["servers_per_leaf"] == 2


@pytest.mark.parametrize(
    ("cells", "inside"),
    [("NV18", "nvswitch"), ({pair: f"NV{n}" for pair, n in CUBE_MESH.items()}, "cube-mesh"), ("PIX", "pcie")],
)
@pytest.mark.parametrize("escape", [None, "\x1b", ""])  # the header may be underlined; pasted, it lacks the escape
def test_nvidia_smi(tmp_path, cells, inside, escape):
    text = smi_matrix(cells, nics=8)
    if escape is not None:
        text = text.replace("\tGPU0", f"\t{escape}[4mGPU0", 1).replace("NUMA Affinity", f"NUMA Affinity{escape}[0m", 1)
    cluster, found = made(tmp_path, {"topo.txt": text}, gpu="v100" if inside == "cube-mesh" else "h100")
    group = tomllib.loads(found.text)["topology"]["servers"][0]
    assert (group["inside"], group["devices"], group["nics"]) == (inside, 8, 8)
    assert any("usual server" in note for note in found.notes)
    assert len(cluster.devices) == 8


def test_pairs_without_nvlinks_have_the_rate_of_pcie(tmp_path):
    """Not that of the NVLinks which the usual server of the GPU has."""
    cells = {(0, 1): "NV4", (0, 2): "PXB", (1, 2): "PXB", (2, 3): "SYS"}
    cluster, found = made(tmp_path, {"topo.txt": smi_matrix(cells, nics=2)}, gpu="a100")
    assert edges(cluster)["server0/gpu0", "server0/gpu1"][0] == 4 * 25e9
    assert {rate for ends, (rate, _) in edges(cluster).items() if "server0/pcie" in ends} == {24e9}
    assert any("between processors" in note for note in found.notes)
    bridged, _ = made(tmp_path, {"topo.txt": smi_matrix({(0, 1): "NV4", (2, 3): "NV4"})}, gpu="rtx3090")
    assert edges(bridged)["server0/gpu0", "server0/gpu1"][0] == 4 * 14.0625e9


@pytest.mark.parametrize("gpu", ["h100-pcie", "a100-pcie-80", "v100-pcie-16"])
def test_cards_have_no_nvlinks(gpu, tmp_path):
    """`--gpu` may name a PCIe card, which has no NVLinks, unlike the SXM board of the same generation."""
    cluster, _ = made(tmp_path, {}, gpu=gpu)
    assert {each.inside for each in cluster.topology.servers} == {"pcie"}
    assert server_of(gpu).inside_link.startswith("pcie")


@pytest.mark.parametrize("gpu", ["t4", "a10", "l4", "l40s", "rtx4090", "rtx6000ada"])
def test_nvlinks_between_cards_that_have_none_are_refused(gpu, tmp_path):
    """A matrix of other GPUs: they got the 300 GB/s of an A100's links."""
    for cells in ("NV12", {(0, 1): "NV12"}):
        with pytest.raises(
            UserError, match=f"topo.txt: GPU0 and GPU1: NV12, but --gpu {gpu} is a card without NVLinks"
        ):
            made(tmp_path, {"topo.txt": smi_matrix(cells)}, gpu=gpu)
    cluster, _ = made(tmp_path, {"topo.txt": smi_matrix("PHB")}, gpu=gpu)
    assert cluster.devices


@pytest.mark.parametrize(("count", "links"), [(2, 1), (4, 4)])
def test_part_of_a_cube_mesh_has_the_links_inside_it(tmp_path, count, links):
    """Four of the six NVLinks of each GPU of a DGX-1V lead to the other GPUs of its half."""
    cells = {pair: f"NV{n}" for pair, n in CUBE_MESH.items()}
    cluster, _ = made(tmp_path, {"topo.txt": smi_matrix(cells, nics=4)}, gpu="v100", devices=[count])
    assert cluster.topology.servers[0].inside_link.bandwidth_bytes_per_s == links * 25e9


def test_usual_servers_say_how_many_network_cards_they_have(tmp_path):
    """Two hosts of A100 and half a DGX-1V behind one card of 25 Gbit/s each, not the eight and four of the presets."""
    gpus, options = ["a100-sxm-40", "a100-sxm-40", "v100"], {"nics": ["tcp-25g"], "devices": [8, 8, 4]}
    cluster, found = made(tmp_path, {}, gpus=gpus, **options)
    assert [(each.count, each.devices, each.nics) for each in cluster.topology.servers] == [(2, 8, 8), (1, 4, 4)]
    said = [note for note in found.notes if note.startswith("nics = ")]
    assert [note.split(",")[0] for note in said] == [
        "nics = 8: of tcp-25g on each host of 8 a100-sxm-40",
        "nics = 4: of tcp-25g on each host of 4 v100-sxm2-32",
    ]
    cluster, found = made(tmp_path, {}, gpus=gpus, nic_counts=[1], **options)
    assert [each.nics for each in cluster.topology.servers] == [1, 1]
    assert not any(note.startswith("nics = ") for note in found.notes)
    cluster, _ = made(tmp_path, {}, gpus=gpus, nic_counts=[2, 2, 1], **options)
    assert [each.nics for each in cluster.topology.servers] == [2, 1]
    _, found = made(tmp_path, {}, gpus=["a100"], hosts=2)
    assert any(note.startswith("nic_link = ib-hdr-200: of the usual server of a100") for note in found.notes)
    with pytest.raises(UserError, match="--devices: 2 numbers for 3 descriptions of hosts"):
        made(tmp_path, {}, gpus=gpus, devices=[8, 4])
    with pytest.raises(UserError, match="--nics 3: must be at least 1, and shared evenly by a host's 8 devices"):
        made(tmp_path, {}, gpus=gpus, nic_counts=[3], **options)


def test_gpus_that_are_offered_are_known():
    with pytest.raises(UserError, match="rtx5090") as refused:
        server_of("rtx5090")
    for name in str(refused.value).split("allowed: ")[1].split(", "):
        assert server_of(name).devices > 0


@pytest.mark.parametrize(
    ("cells", "gpu", "devices", "inside", "nics"),
    [
        ("NV18", "h100", 4, "nvswitch", 4),
        ("NV18", "h100", 3, "nvswitch", 3),
        ("PIX", "h100", 2, "pcie", 2),
        ("NV18", "h100", 1, None, 1),
        ({pair: f"NV{n}" for pair, n in CUBE_MESH.items()}, "v100", 4, "nvswitch", 4),
    ],
)
def test_only_the_first_devices_of_a_host_are_used(tmp_path, cells, gpu, devices, inside, nics):
    topology = {"topo.txt": smi_matrix(cells, nics=8)}
    cluster, found = made(tmp_path, topology, gpu=gpu, devices=[devices])
    assert len(cluster.devices) == devices
    group = tomllib.loads(found.text)["topology"]["servers"][0]
    assert (group.get("inside"), group["nics"]) == (inside, nics)
    for wrong in (0, 9):
        with pytest.raises(UserError, match=f"--devices {wrong}: must be from 1 to 8"):
            made(tmp_path, topology, gpu=gpu, devices=[wrong])


def test_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "proc").mkdir()
    cores = "".join(
        f"processor : {i}\nphysical id : {i // 2}\ncore id : {i % 2}\nmodel name : A Processor\ncpu MHz : 2000.0\n"
        "flags : fpu avx2\n\n"
        for i in range(4)
    )
    (tmp_path / "proc/cpuinfo").write_text(cores)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8000000 kB\n")
    card = tmp_path / "sys/class/net/eth0"
    (card / "device").mkdir(parents=True)
    (card / "speed").write_text("10000\n")
    host = detected(proc=tmp_path / "proc", sys=tmp_path / "sys")
    assert (host.devices, host.nic_link, host.inside_link["fp32"]) == (4, "tcp-10g", 2e9 * 32)
    cluster, found = made(tmp_path, {}, detect=True)  # the real one
    assert cluster.backend == "gloo"
    assert any("gsreal calibrate" in note for note in found.notes)


def smi_that_says(folder, names, matrix):
    """Put a program in a folder that answers as nvidia-smi does."""
    (folder / "matrix.txt").write_text(matrix)
    program = folder / "nvidia-smi"
    listed = "".join(f"echo '{name}'\n" for name in names)
    program.write_text(
        f'#!/bin/sh\nif [ $1 = topo ]; then while read -r l; do echo "$l"; done < {folder}/matrix.txt\n'
        f"else\n{listed}fi\n"
    )
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        *(
            (f"NVIDIA {other}", None)
            for other in ("A10G", "L40", "GH200 480GB", "H100 NVL", "A100-PCIE-40GB", "T400 4GB")
        ),
    ],
)
def test_a_detected_gpu_is_the_one_that_its_whole_name_says(tmp_path, monkeypatch, name, device):
    """By parts of names, an L40S was an L4, an A10G an A10, a GH200 an H200, each A100 one of 80 GB and NVLinks."""
    smi_that_says(tmp_path, [name] * 2, smi_matrix({(0, 1): "PHB"}, nics=2))
    monkeypatch.setenv("PATH", str(tmp_path))
    if device is None:
        with pytest.raises(UserError, match="no such preset; save nvidia-smi's matrix") as refusal:
            detected()
        named = str(refusal.value).partition("of the nearest: ")[2].split(", ")
        assert len(named) == len(set(named))
        assert all(server_of(each) for each in named)
    else:
        assert (detected().device, detected().devices) == (device, 2)


def test_gpus_of_several_kinds_and_those_that_nvidia_smi_lacks_are_not_passed_over(tmp_path, monkeypatch):
    """The first GPU stood for all; and GPUs without nvidia-smi left a host of cores, without a word."""
    monkeypatch.setenv("PATH", str(tmp_path))
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    (sys / "class/kfd/kfd/topology/nodes/1/mem_banks/0").mkdir(parents=True)
    proc.mkdir()
    (proc / "cpuinfo").write_text("physical id : 0\ncore id : 0\n")
    (proc / "meminfo").write_text("MemTotal: 8000000 kB\n")
    assert any("GPUs that nvidia-smi does not list" in note for note in detected(proc=proc, sys=sys).defaults)
    smi_that_says(tmp_path, ["NVIDIA A10", "Tesla T4"], smi_matrix({(0, 1): "PHB"}, nics=1))
    with pytest.raises(UserError, match="NVIDIA A10, Tesla T4: a host with GPUs of different kinds"):
        detected(proc=proc, sys=sys)


def test_hosts_under_several_switches_and_cards_that_are_left_out_are_said(tmp_path):
    conf = "SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n[3-4]\nSwitchName=c Switches=a,b\n"
    cluster, found = made(tmp_path, {"t.conf": conf}, gpu="h100")
    assert any(note.startswith("1 of 4 hosts are under several switches (n3: a, b)") for note in found.notes)
    rates = edges(cluster)
    assert rates["server2/nic0", "a"] == rates["server2/nic0", "b"]
    assert rates["server0/nic0", "a"][0] == 2 * rates["server2/nic0", "a"][0]
    _, found = made(tmp_path, {"topo.txt": smi_matrix({(0, 5): "PHB"}, nics=4)}, gpu="l40s")
    assert any(note.startswith("nics = 3: of 4 cards") for note in found.notes)
    _, found = made(tmp_path, {"topo.txt": smi_matrix("PHB", nics=8)}, gpu="l40s")
    assert not any("as many as the GPUs share" in note for note in found.notes)


def test_a_rack_of_gb200_is_one_domain_of_nvlinks(tmp_path):
    """A block of Slurm's plugin is such a domain too: its file has network cards alone, and says so."""
    cluster, _ = made(tmp_path, {}, gpu="gb200", hosts=2)
    assert [(each.count, each.devices, each.inside) for each in cluster.topology.servers] == [(2, 72, "nvswitch")]
    _, found = made(tmp_path, {"t.conf": "BlockName=b0 Nodes=n[0-1]\nBlockSizes=2\n"}, gpu="b200")
    assert any("NVLinks between hosts of a block are not described" in note for note in found.notes)


BAD = {
    "laughs.xml": '<!DOCTYPE l [<!ENTITY a "x"><!ENTITY b "&a;&a;">]><system>&b;</system>',
    "truncated.xml": nccl_xml()[:900],
    "other.xml": "<html/>",
    "empty.xml": "<system/>",
    "speed.xml": nccl_xml(speed="Unknown"),
    "kinds.xml": nccl_xml().replace('sm="90"', 'sm="80"', 1),
    "number.xml": nccl_xml().replace('sm="90"', 'sm="ninety"', 1),
    "guess.xml": nccl_xml(sm=89, target="none"),
    "deep.xml": "<system>" + "<a>" * 500 + "</a>" * 500 + "</system>",
    "islands.conf": "SwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\n",
    "cycle.conf": "SwitchName=a Nodes=n1\nSwitchName=b Switches=a,c\nSwitchName=c Switches=b\n",
    "names.conf": "BlockName=a SwitchName=b Nodes=n1\n",
    "twice.conf": "SwitchName=a Nodes=n1 Nodes=n2\n",
    "twice.yaml": "tree: {switches: [{switch: a, nodes: n1}, {switch: a, nodes: n2}]}\n",
    "twice.json": json.dumps(
        {"items": [{"metadata": {"name": "n1", "labels": {"network.topology.nvidia.com/leaf": "a"}}}] * 2}
    ),
    "itself.conf": "SwitchName=a Switches=a\n",
    "range.conf": "SwitchName=a Nodes=n[1-999999999]\n",
    "product.conf": "SwitchName=a Nodes=n[1-999][1-999][1-999]\n",
    "brackets.conf": "SwitchName=a Nodes=n[1-2\n",
    "unknown.conf": "SwitchName=a Nodez=n1\n",
    "nothing.conf": "# only a comment\n",
    "both.conf": "SwitchName=a Nodes=n1 Switches=b\n",
    "tree.yaml": "tree: 3\n",
    "laughs.yaml": "a: &a [x]\nb: [*a, *a]\n",
    "matrix.txt": smi_matrix("NV18").replace("NV18", "NV17", 1),
    "rows.txt": "\n".join(smi_matrix("NV18").splitlines()[:5]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(tmp_path, name):
    with pytest.raises(UserError) as caught:
        made(tmp_path, {name: BAD[name]}, gpu=None if name == "guess.xml" else "h100")
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


NODES = """NodeName=gpu01 Arch=x86_64 CoresPerSocket=32
   Gres=gpu:a100:4(S:0-1)
   RealMemory=1031000 Sockets=2

NodeName=gpu02 Arch=x86_64 CoresPerSocket=32
   Gres=gpu:a100:4(S:0-1)
"""
REPORTS = {
    "nodes.txt": (NODES, "--gpu a100 --devices 4 --hosts 2"),
    "slurm.conf": ("NodeName=DEFAULT Gres=gpu:1\nNodeName=g[1-3] Gres=gpu:v100:2\n", "v100 --devices 2"),
    "gres.conf": ("NodeName=g[1-3] Name=gpu Type=h100 File=/dev/nvidia[0-7]\n", "--devices 8 --hosts 3"),
    "mig.conf": ("NodeName=g[1-3] Gres=gpu:1g.5gb:7\n", "give topology.conf"),
    "mixed.conf": ("NodeName=g1 Gres=gpu:a100:4\nNodeName=g2 Gres=gpu:v100:4\n", "give topology.conf"),
    "sinfo.txt": ("PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\n", "sinfo"),
    "nodes.json": ('{"nodes": [{"name": "g1", "gres": "gpu:a100:4"}]}', "Slurm's nodes"),
    "query.txt": ("\n====NVSMI LOG====\n\nAttached GPUs : 2\n", "nvidia-smi topo -m"),
    "query.xml": ('<!DOCTYPE nvidia_smi_log SYSTEM "n.dtd">\n<nvidia_smi_log/>', "nvidia-smi topo -m"),
    "lstopo.xml": ('<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology version="2.0"/>', "nvidia-smi topo -m"),
    "ibstat.txt": ("CA 'mlx5_0'\n\tCA type: MT4123\n", "--nic"),
    "fabric.txt": ("#\nvendid=0x2c9\nswitchguid=0x1(1)\n", "topograph"),
    "reduce.log": (
        "# nThread 1 nGpus 8\n#       size         count      type   redop\n  1024 256 float\n",
        "--nccl-tests",
    ),
    "lspci.txt": ("07:00.0 3D controller: NVIDIA Corporation GA100\n", "nvidia-smi topo -m"),
    "rocm.txt": ("== ROCm System Management Interface ==\n       GPU0   GPU1\nGPU0   0      XGMI\n", "cluster file"),
    "gaudi.txt": ("| HL-SMI Version:  hl-1.14.0  |\n", "cluster file"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_without_links_are_refused_with_what_to_give(tmp_path, name):
    """They were taken for a topology.conf or a matrix: `line 1: nodename: unknown key`."""
    text, said = REPORTS[name]
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        made(tmp_path, {name: text}, gpu="a100")
    assert "\n" not in str(caught.value)
    assert "unknown key" not in str(caught.value)
    assert "no such connection" not in str(caught.value)


def test_a_matrix_among_other_output_is_read(tmp_path):
    text = "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15 |\n" + smi_matrix("NV18", nics=8)
    cluster, _ = made(tmp_path, {"all.txt": text}, gpu="h100")
    assert cluster.topology.servers[0].inside == "nvswitch"


@pytest.mark.parametrize("card", ["mlx4_", "mlx5_bond_", "bnxt_re", "hfi1_", "rdmap"])
def test_cards_have_names_of_their_own_in_older_matrices(tmp_path, card):
    """Only NIC0 and mlx5_0 were counted: other hosts had no card, without a word."""
    tabs = smi_matrix("NV18", nics=4).replace("NIC", card)
    for text in (tabs, tabs.replace("\t", "    ")):
        cluster, _ = made(tmp_path, {"topo.txt": text}, gpu="h100")
        assert cluster.topology.servers[0].nics == 4


def test_gpus_of_rccl_are_not_those_of_nvidia_with_the_same_number(tmp_path):
    """RCCL's sm = 90 is an MI200 or older: it became an H100."""
    text = nccl_xml(target="none").replace('sm="90"', 'sm="90" gcn="gfx90a"')
    with pytest.raises(UserError, match="gcn = 'gfx90a': RCCL's topology is not read"):
        made(tmp_path, {"host.xml": text})


def test_nvlinks_of_cards_that_drive_displays(tmp_path):
    """The class of an A40 or an RTX 3090 is 0x030000, not 0x030200: their bridges were left out."""
    text = nccl_xml(gpus=2, nics=1, mbits=100000, sm=86, speed="16.0 GT/s PCIe", target={(0, 1): 4})
    cluster, _ = made(tmp_path, {"host.xml": text.replace("0x030200", "0x030000")}, gpu="rtx3090")
    assert edges(cluster)["server0/gpu0", "server0/gpu1"][0] == 4 * 14.0625e9


def test_a_gpu_that_lacks_its_nvlinks_is_named(tmp_path):
    """A broken record of one GPU made PCIe of all NVLinks of its host."""
    broken = re.sub(r"( *<nvlink [^>]*/>\n){4}", "", nccl_xml(), count=1)
    with pytest.raises(UserError, match=re.escape("NVLinks to switches = [0, 18, 18")):
        made(tmp_path, {"host.xml": broken})


def test_widths_that_a_virtual_machine_hides_are_those_of_nccl(tmp_path):
    cluster, found = made(tmp_path, {"host.xml": nccl_xml(width=0)})
    assert edges(cluster) == edges(made(tmp_path, {"host.xml": nccl_xml()})[0])
    assert any("link_width = 0" in note for note in found.notes)


def test_a_card_that_is_listed_below_each_processor_is_one(tmp_path):
    card = '<nic><net name="eth0" dev="0" speed="10000" port="0" guid="0x0" gdr="0"/></nic></cpu>'
    text = nccl_xml(nics=0).replace("</cpu>", card)
    cluster, _ = made(tmp_path, {"host.xml": text})
    assert cluster.topology.servers[0].nics == 1


def test_cards_of_aws_have_the_latency_of_efa(tmp_path):
    text = nccl_xml().replace("mlx5_", "rdmap")
    cluster, _ = made(tmp_path, {"host.xml": text})
    assert cluster.topology.servers[0].nic_link.latency_s == 100e-6


@pytest.mark.parametrize(("sm", "said"), [(89, "several GPUs have it; name yours"), (103, "no preset has it")])
def test_capabilities_that_name_no_gpu(tmp_path, sm, said):
    with pytest.raises(UserError, match=said):
        made(tmp_path, {"host.xml": nccl_xml(sm=sm, target="none")})


def test_damaged_topologies_are_read_or_refused(tmp_path):
    random_ = random.Random(0)
    files = {"h.xml": nccl_xml(gpus=2, nics=2), "t.conf": TREE, "t.yaml": TREE_YAML, "m.txt": smi_matrix("NV18", 2)}
    refused = 0
    for _ in range(150):
        name = random_.choice(sorted(files))
        text = files[name]
        for _ in range(random_.randint(1, 3)):
            at, length = random_.randrange(len(text)), random_.randint(1, 9)
            piece = random_.choice(["", text[at : at + length] * 2, "[", "<", "-1", "9" * 20, "=", "\x00"])
            text = text[:at] + piece + text[at + length :]
        try:
            made(tmp_path, {name: text}, gpu="h100")
        except UserError as error:
            refused += "\n" not in str(error)
    assert 0 < refused < 150


def test_the_command_ends_with_how_to_draw(tmp_path):
    (tmp_path / "topology.conf").write_text(TREE)
    arguments = ("cluster", "topology.conf", "--gpu", "h100", "--out", "c.toml")
    ended = commands.run("gssim", *arguments, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "python -m analysis draw c.toml --out c.png"
    assert "default: oversubscription" in ended.stderr
    (tmp_path / "bad.conf").write_text(BAD["islands.conf"])
    ended = commands.run("gssim", "cluster", "bad.conf", "--gpu", "h100", "--out", "d.toml", folder=tmp_path)
    assert (ended.returncode, len(ended.stderr.splitlines()), (tmp_path / "d.toml").exists()) == (2, 1, False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu": "h100", "hosts": 2, "oversubscription": 4.0}, "--oversubscription 4: no switch is above another"),
        ({"gpu": "h100", "detect": True}, "--gpu h100: has no effect beside --detect"),
        ({"gpu": "h100", "hosts": 0}, "--hosts 0: must be from 1 to 100000"),
    ],
)
def test_options_without_effect_are_refused(tmp_path, options, said):
    """Before, they were ignored silently, or an error named a file of switches that was not given."""
    with pytest.raises(UserError, match=re.escape(said)):
        made(tmp_path, {}, **options)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H20", "h20"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA RTX A6000", "rtxa6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("MI325X", "mi325x"),
    ],
)
def test_gpus_are_known_by_the_names_of_their_tools(name, preset, tmp_path):
    cluster, _ = made(tmp_path, {}, gpu=name, hosts=2)
    assert set(cluster.device_types) == {preset}


@pytest.mark.parametrize("name", ["AMD Instinct MI250X", "HL-225", "gaudi3"])
def test_devices_whose_servers_have_other_shapes_are_presets_of_cluster_files(name, tmp_path):
    with pytest.raises(UserError, match=r"describe them in a cluster file .* device_types.a = .(mi250x-gcd|gaudi[23])"):
        made(tmp_path, {}, gpu=name)


def test_a_part_of_a_mesh_has_a_part_of_its_links(tmp_path):
    """Two of eight MI300X have one of seven links: 48 GB/s were measured where all eight reached 313."""
    whole, found = made(tmp_path, {}, gpu="mi300x")
    assert any("RCCL" in note for note in found.notes)
    rates = [whole.topology.servers[0].inside_link.bandwidth_bytes_per_s]
    for count in (4, 2):
        part, _ = made(tmp_path, {}, gpu="mi300x", devices=[count])
        rates.append(part.topology.servers[0].inside_link.bandwidth_bytes_per_s)
    assert [rate / rates[0] for rate in rates] == pytest.approx([1, 3 / 7, 1 / 7])


def test_matrices_of_several_hosts_in_a_file_are_as_many_hosts(tmp_path):
    """The last host's rows stood below the first one's header: two hosts were one."""
    first, second = smi_matrix("NV18", nics=8), smi_matrix("NV18", nics=4)
    lines = {name: [f"{name}: {line}" for line in text.splitlines()] for name, text in (("a", first), ("b", second))}
    in_turn = [line for pair in zip_longest(*lines.values(), fillvalue="") for line in pair]  # as pdsh prints them
    headed = f"==== host-a ====\n{first}\n==== host-b ====\n{second}"
    texts = (headed, "\n".join([*lines["a"], *lines["b"]]), "\n".join(in_turn))
    for text in texts:
        cluster, _ = made(tmp_path, {"topo.txt": text}, gpu="h100")
        assert [(each.count, each.devices, each.nics) for each in cluster.topology.servers] == [(1, 8, 8), (1, 8, 4)]
    alike, _ = made(tmp_path, {"topo.txt": first + first}, gpu="h100")
    assert [(each.count, each.nics) for each in alike.topology.servers] == [(2, 8)]


def test_topologies_of_several_hosts_in_a_file_are_refused_by_what_they_are(tmp_path):
    """It was: not valid XML: junk after document element."""
    text = nccl_xml()
    with pytest.raises(UserError, match="holds topologies of 2 hosts; give each a file of its own"):
        made(tmp_path, {"host.xml": f"{text}\n{text}"})


def test_sockets_over_infiniband_have_the_rate_of_tcp(tmp_path):
    """ib0 is the card's interface for TCP, which NCCL uses where it has no verbs: it was InfiniBand of 200 Gbit/s."""
    card = '<net name="ib0" dev="0" speed="200000" port="0" guid="0x0" latency="0.0" gdr="0"/>'
    text = re.sub(r"<net [^>]*/>", card, nccl_xml(nics=1))
    assert card in text
    cluster, found = made(tmp_path, {"host.xml": text})
    assert cluster.topology.servers[0].nic_link.bandwidth_bytes_per_s == 4.5e9
    assert any("network card ib0: sockets over InfiniBand" in note for note in found.notes)
    verbs, found = made(tmp_path, {"host.xml": text.replace('guid="0x0"', 'guid="0x5a2b"')})
    assert verbs.topology.servers[0].nic_link.bandwidth_bytes_per_s == 25e9
    assert not any("sockets" in note for note in found.notes)
