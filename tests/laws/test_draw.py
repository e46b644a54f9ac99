"""Drawings of clusters: nodes, counts and labels, every shipped cluster file, refused input."""

import sys
from pathlib import Path

import pytest
from strategies import PAIR_TOML, cluster_of, device_type, ring
from test_topology import ALL, LEAF_SPINE, cluster_with, servers, simple, torus

pytest.importorskip("matplotlib")

from matplotlib.text import Text

from analysis.charts import png
from analysis.cli import main
from analysis.draw.draw import draw, wires_of
from analysis.draw.layout import layout_of
from gssim.scenario import load_cluster

CLUSTERS = Path(__file__).parent.parent.parent / "scenarios" / "clusters"


def texts(figure):
    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["analysis", *map(str, arguments)])
    main()


def overlaps(layout):
    """Return pairs of nodes that cover each other."""
    nodes = sorted(layout.nodes.items(), key=lambda item: item[1].x)
    found = []
    for i, (name, a) in enumerate(nodes):
        for other, b in nodes[i + 1 :]:
            apart = max(abs(a.x - b.x) - (a.width + b.width) / 2, abs(a.y - b.y) - (a.height + b.height) / 2)
            if apart < -1e-9:
                found.append((name, other))
    return found


@pytest.mark.parametrize("topology", ALL.values(), ids=ALL)
def test_small_clusters_are_shown_whole_and_nothing_covers_another(topology):
    cluster = cluster_with(topology)
    layout = layout_of(cluster)
    assert set(layout.nodes) == set(cluster.wiring.names)
    assert len(wires_of(cluster.wiring, layout.nodes)) == cluster.wiring.links // 2
    assert overlaps(layout) == []


QUICK = (
    *("dgx-h100", "four-unequal-gpus", "fully-connected-8", "lab-ring", "lab-tree", "lab-two-sites"),
    *("leaf-spine-64", "torus-4x4x4", "two-cores", "rail-optimised-128", "a100-4-hosts-links"),
)
"""Clusters whose pictures are not slow: every topology once, with links by hand, on one host, and of many devices."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.slow)
        for path in sorted(CLUSTERS.glob("*.toml"))
    ],
)
def test_every_shipped_cluster_has_a_picture_that_tells_its_name_and_devices(path):
    cluster = load_cluster(path)
    layout = layout_of(cluster)
    assert overlaps(layout) == []
    assert set(layout.nodes) <= set(cluster.wiring.names)
    assert len(layout.nodes) <= 300
    shown = texts(draw(cluster, file=path.name))
    assert cluster.name in shown
    counted = next(text for text in shown if path.name in text)
    for kind in {device.type for device in cluster.devices}:
        assert f"{sum(device.type == kind for device in cluster.devices):,} \u00d7 {kind}" in counted
        assert any(text.startswith(f"{kind}: ") for text in shown)


def test_the_same_cluster_gives_the_same_bytes():
    cluster = cluster_with(ALL["rails"])
    assert png(draw(cluster)) == png(draw(cluster))


@pytest.mark.parametrize(
    ("path", "more"), [pytest.param("gpus-65536", 8188, marks=pytest.mark.slow), ("rail-optimised-128", 12)]
)
def test_servers_that_are_left_out_are_counted(path, more):
    shown = texts(draw(load_cluster(CLUSTERS / f"{path}.toml")))
    assert any(f"{more:,} more\nlike these" in text for text in shown)


def test_each_kind_of_server_is_shown_and_its_rest_counted():
    cluster = load_cluster(CLUSTERS / "unequal-1024.toml")
    layout = layout_of(cluster)
    kinds = {device.name: device.type for device in cluster.devices}
    assert {kinds[name] for name in layout.nodes if name in kinds} == set(cluster.device_types)
    counts = [int(box.text.split()[1]) for box in layout.boxes if box.kind == "more"]
    assert sum(counts) + sum(box.kind == "server" for box in layout.boxes) == 128
    assert "\u2026 5 more leafs" in [text for _, _, text in layout.notes]


def test_the_name_of_a_server_is_within_its_box():
    """A server of one device was narrower than its name."""
    alone = {"count": 2, "device": "a100-sxm-80", "devices": 1, "nics": 1}
    figure = draw(cluster_with(servers(alone, fabric={"kind": "switch"}), device_types={"a100-sxm-80": device_type()}))
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [patch.get_window_extent() for patch in axes.patches]
    names = [text.get_window_extent() for text in axes.texts if text.get_text().startswith("server")]
    assert len(names) == 2
    assert all(any(box.x0 < name.x0 and name.x1 < box.x1 for box in boxes) for name in names)


@pytest.mark.parametrize("inside", ["nvswitch", "pcie"])
def test_the_name_of_what_joins_two_devices_is_within_its_bar(inside):
    """A bar was as wide as its devices; below two of them, the name was wider."""
    pair = {"count": 3, "device": "a100-sxm-80", "devices": 2, "nics": 1, "inside": inside}
    cluster = cluster_with(servers(pair, fabric={"kind": "switch"}), device_types={"a100-sxm-80": device_type()})
    figure = draw(cluster)
    figure.canvas.draw()
    (axes,) = figure.axes
    bars = [patch.get_window_extent() for patch in axes.patches]
    names = [text.get_window_extent() for text in axes.texts if text.get_text() in ("NVSwitch", "PCIe")]
    assert len(names) == 3
    for name in names:
        x, y = (name.x0 + name.x1) / 2, (name.y0 + name.y1) / 2
        bar = min((box for box in bars if box.contains(x, y)), key=lambda box: box.height)
        assert bar.x0 < name.x0
        assert name.x1 < bar.x1


def test_long_rings_and_tori_are_cut_and_counted():
    assert any("77 more" in text for text in texts(draw(cluster_with(simple("ring", 100)))))
    assert any("144 more of 20 \u00d7 20" in text for text in texts(draw(cluster_with(torus(20, 20)))))


def test_a_torus_shows_its_wrapped_links_as_open_ends():
    layout = layout_of(cluster_with(torus(4, 3)))
    assert len(layout.ends) == 2 * (4 + 3)
    assert len(layout.hidden) == 4 + 3
    assert layout_of(cluster_with(torus(2, 2))).ends == []
    assert len(layout_of(cluster_with(torus(4, 4, 4))).planes) == 4


def test_tori_of_more_dimensions_than_paper_has_are_drawn_as_graphs():
    assert len(layout_of(cluster_with(torus(2, 2, 2, 2))).nodes) == 16


def test_double_links_of_a_cube_mesh_are_told_apart():
    cluster = cluster_with(ALL["cube-mesh"])
    kinds = [wire.kind for wire in wires_of(cluster.wiring, layout_of(cluster).nodes)]
    assert kinds.count("device and device") == kinds.count("device and device, double") == 8


def test_the_legend_gives_rates_and_oversubscription_and_the_wide_area_link_its_own():
    cluster = cluster_with(servers({"count": 4}, fabric=LEAF_SPINE | {"oversubscription": 4}))
    assert "leaf and spine: 24 B/s each way, 500 ns; 4 : 1 oversubscribed" in texts(draw(cluster))
    shown = texts(draw(load_cluster(CLUSTERS / "two-sites.toml")))
    assert "1.15 GB/s\n10 ms" in shown
    assert {"site north", "site south"} <= set(shown)


@pytest.mark.parametrize("inside", [simple("switch", 2), servers({"count": 1}, fabric={"kind": "switch"})])
def test_nothing_covers_the_name_of_a_site_and_no_device_is_on_the_link_to_its_gateway(inside):
    link = {"bandwidth_bytes_per_s": 10, "latency_s": 1, "source": "t"}
    sites = [{"name": name, "topology": inside} for name in ("north", "south")]
    cluster = cluster_with({"kind": "sites", "link": link, "sites": sites})
    nodes = layout_of(cluster).nodes
    gateway, switch = nodes["north/gateway"], nodes["north/switch"]
    devices = [node for name, node in nodes.items() if name.startswith("north/") and node.kind == "device"]
    assert devices
    assert all(abs(node.x - gateway.x) > node.width / 2 for node in devices if switch.y < node.y < gateway.y)
    figure = draw(cluster)
    figure.canvas.draw()
    (name,) = [text for text in figure.findobj(Text) if text.get_text() == "site north"]
    box = name.get_window_extent()
    others = [text for text in figure.findobj(Text) if text.get_text() and text is not name]
    assert not any(box.overlaps(text.get_window_extent()) for text in others)
    (axes,) = figure.axes
    left, right = (axes.transData.inverted().transform((x, 0))[0] for x in (box.x0, box.x1))
    low, high = (axes.transData.inverted().transform((0, y))[1] for y in (box.y0, box.y1))
    over = [n for n in nodes.values() if abs(n.x - (left + right) / 2) < (n.width + right - left) / 2]
    assert not any(abs(node.y - (low + high) / 2) < (node.height + high - low) / 2 for node in over)


def test_explicit_clusters_carry_their_rates_beside_the_links():
    shown = texts(draw(ring(3, bandwidth=1e9, latency_s=5e-6)))
    assert shown.count("1 GB/s\n5 us") == 3
    assert {"d0", "d1", "d2"} <= set(shown)


def test_a_link_of_one_direction_has_an_arrow():
    cluster = cluster_of([("d0", "d1")], devices=2, directed=True)
    (wire,) = wires_of(cluster.wiring, layout_of(cluster).nodes)
    assert not wire.both_ways
    draw(cluster)


def test_a_name_with_dollars_starts_no_formula():
    figure = draw(cluster_with(simple("ring", 3), name="5 $ and 6 $"))
    figure.canvas.draw()
    assert r"5 \$ and 6 \$" in texts(figure)


def test_the_command_writes_a_picture_and_says_where(monkeypatch, capsys, tmp_path):
    (tmp_path / "pair.toml").write_text(PAIR_TOML)
    out = tmp_path / "new" / "pair.png"
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "draw", tmp_path / "pair.toml", "--out", out)
    assert ended.value.code == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{out}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("= 3", "not valid TOML"),
        (PAIR_TOML.replace('kind = "cpu"', 'kind = "abacus"'), "device_types.fast.kind = 'abacus'"),
    ],
)
def test_a_cluster_file_that_is_wrong_is_one_line_and_writes_nothing(monkeypatch, capsys, tmp_path, content, message):
    path, out = tmp_path / "c.toml", tmp_path / "c.png"
    if content:
        path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "draw", path, "--out", out)
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    assert stderr.startswith(f"analysis: {path}: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "pair.toml").write_text(PAIR_TOML)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "draw", tmp_path / "pair.toml", "--out", tmp_path / "pair.toml" / "x.png")
    assert ended.value.code == 2
    assert "cannot be written" in capsys.readouterr().err
