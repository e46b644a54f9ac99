"""Axes of a sweep: ranges, linked axes, axes of variants, excluded points, and keys inside files."""

import math
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import write_files

from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.scenario import load_scenario
from gssim.scenario.overrides import as_overrides
from gssim.scenario.sweep import Facts, axis_keys, condition, load_sweep, points_of, values_between

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
BASE = '# Which?\nscenario = "scenario.toml"\n'


def written(folder, text):
    write_files(folder)
    path = folder / "sweep.toml"
    path.write_text(BASE + text)
    return path


def written_beside(folder, text):
    (folder / "sweep.toml").write_text(BASE + text)
    return folder / "sweep.toml"


def points_in(path, overrides=()):
    return points_of(load_sweep(path), file=path, overrides=overrides)


def values_in(path):
    """Return the points' values by key, as tables have them."""
    keys = axis_keys(load_sweep(path))
    return [dict(zip(keys, point.values, strict=True)) for point in points_in(path)]


@given(
    first=st.floats(1e-9, 1e9),
    ratio=st.floats(1.001, 1e6),
    count=st.integers(2, 40),
    scale=st.sampled_from(["linear", "log"]),
)
def test_a_range_begins_and_ends_as_it_says_and_rises_evenly(first, ratio, count, scale):
    last = first * ratio
    found = values_between("a", {"from": first, "to": last, "count": count, "scale": scale}, "")
    assert len(found) == count
    assert (found[0], found[-1]) == (first, last)
    step = (math.log(last) - math.log(first)) / (count - 1) if scale == "log" else (last - first) / (count - 1)
    for i, value in enumerate(found):
        exact = math.exp(math.log(first) + i * step) if scale == "log" else first + i * step
        assert value == pytest.approx(exact, rel=1e-5)


def test_whole_numbers_stay_whole():
    assert values_between("a", {"from": 2, "to": 1024, "count": 10, "scale": "log"}, "") == [2**k for k in range(1, 11)]
    assert values_between("a", {"from": 1, "to": 2**30, "count": 31, "scale": "log"}, "")[29] == 2**29
    assert [type(each) for each in values_between("a", {"from": 1, "to": 4, "count": 3}, "")] == [float] * 3


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("{ from = 1, to = 2 }", r"axes: run.seed.count = None: must be a number of values, at least 2"),
        ("{ from = 1, to = 2, count = 1 }", r"run.seed.count = 1: must be"),
        ("{ from = 2, to = 1, count = 2 }", r"run.seed: from = 2 must be less than to = 1"),
        ("{ from = 0, to = 1, count = 2, scale = 'log' }", r"run.seed: a logarithmic range begins and ends above 0"),
        ("{ from = 1, to = 2, count = 2, scale = 'cubic' }", r"scale = 'cubic': allowed: 'linear', 'log'"),
        ("{ from = 1, too = 2, count = 2 }", r"run.seed.too: unknown key; allowed in a range: from, to, count, scale"),
        ("{ from = '1 s', to = 2, count = 2 }", r"run.seed.from = '1 s': must be a number$"),
        ("{ from = 1, to = inf, count = 2 }", r"run.seed.to = inf: must be a number$"),
        ("7", r"axes: run.seed = 7: must be a list of values, one at least, or a range such as \{ from"),
    ],
)
def test_a_bad_range_is_told(tmp_path, axis, message):
    with pytest.raises(UserError, match=message):
        load_sweep(written(tmp_path, f"[axes]\nrun.seed = {axis}\n"))


def test_ranges_take_units_where_keys_have_them(tmp_path):
    bandwidth = '{ from = "1 Mb/s", to = "100 Mb/s", count = 3, scale = "log" }'
    path = written(tmp_path, f"[axes]\ncluster.links.0.bandwidth_bytes_per_s = {bandwidth}\n")
    found = [point.load().scenario.cluster.links[0].bandwidth_bytes_per_s for point in points_in(path)]
    assert found == [125e3, 1.25e6, 12.5e6]
    path.write_text(path.read_text().replace('"1 Mb/s"', '"1 ms"'))
    with pytest.raises(UserError, match=r'from = .1 ms.: is in seconds, but bytes/s is needed, such as "450 GB/s"'):
        load_sweep(path)


def test_linked_axes_change_together(tmp_path):
    text = "[axes]\nrun.seed = [1, 2]\n[[linked]]\nrun.steps = [2, 3, 4]\nworkload.global_batch_size = [8, 12, 16]\n"
    path = written(tmp_path, text)
    found = [(p.load().scenario.run.steps, p.load().scenario.workload.global_batch_size) for p in points_in(path)]
    assert found == [(2, 8), (3, 12), (4, 16)] * 2
    assert points_in(path)[1].name == "sweep--seed-1--steps-3"
    path.write_text(path.read_text().replace("[8, 12, 16]", "[8, 12]"))
    with pytest.raises(UserError, match=r"linked\[0\]: lists of equal lengths are needed; run.steps has 3"):
        load_sweep(path)
    path.write_text(path.read_text().replace("[8, 12]", "[8, 12, 16]\nrun.seed = [1, 2, 3]"))
    with pytest.raises(UserError, match=r"linked: run.seed is an axis already"):
        load_sweep(path)


def test_a_variant_may_have_axes_of_its_own(tmp_path):
    text = (
        "[variants]\nddp = { plan.method = 'ddp' }\n"
        "gs = { plan.method = 'gs', axes = { plan.push.threshold = [1e-3, 1e-2] } }\n"
    )
    path = written(tmp_path, text)
    assert [point.name for point in points_in(path)] == [
        "sweep--ddp",
        "sweep--gs--threshold-0.001",
        "sweep--gs--threshold-0.01",
    ]
    assert [each["plan.push.threshold"] for each in values_in(path)] == [None, 1e-3, 1e-2]
    path.write_text(path.read_text().replace("[1e-3, 1e-2]", "[]"))
    with pytest.raises(UserError, match=r"variants.gs.axes: plan.push.threshold = \[\]: must be a list"):
        load_sweep(path)


def test_tables_show_what_a_point_has_wherever_that_is_set(tmp_path):
    text = (
        "set = { run.seed = 5 }\n[[groups]]\nname = 'a'\naxes = { run.seed = [1], cluster = ['pair.toml'] }\n"
        "[[groups]]\nname = 'b'\n[[groups]]\nname = 'c'\nset = { run.seed = 6 }\n"
    )
    path = written(tmp_path, text)
    assert values_in(path) == [{"run.seed": n, "cluster": "pair"} for n in (1, 5, 6)]
    keys = axis_keys(load_sweep(path))
    assert [dict(zip(keys, p.values, strict=True))["run.seed"] for p in points_in(path, ["run.seed=9"])] == [9] * 3


@pytest.mark.parametrize(
    ("override", "axis"),
    [
        ("run.steps=9", "run.steps"),
        ("run={steps=9}", "run.seed"),
        ("cluster=pair.toml", "cluster.links.0.latency_s"),
        ("run.warmup_steps=2", None),
        ("cluster.links.0.bandwidth_bytes_per_s=1e6", None),
        ("run.seed=9", None),  # it has one value, and so has the override
    ],
)
def test_an_override_does_not_take_the_place_of_an_axis(tmp_path, override, axis):
    """Its points would keep their names, and a table their values, whatever was predicted."""
    path = written(tmp_path, "[axes]\nrun.seed = [1]\nrun.steps = [2, 3]\ncluster.links.0.latency_s = [1e-5, 1e-4]\n")
    if axis is None:
        assert len(points_in(path, [override])) == 4
        return
    with pytest.raises(UserError, match=rf"takes the place of the sweep's axis {re.escape(axis)}, by whose values"):
        points_in(path, [override])


def test_what_a_file_or_table_replaces_is_no_value_of_its_points(tmp_path):
    """A cluster of the scenario's own has keys that another group's cluster file replaces."""
    pair = tomllib.loads((written(tmp_path, "").parent / "pair.toml").read_text())
    inline = "\n".join(as_overrides({"cluster": pair}))
    text = (tmp_path / "scenario.toml").read_text().replace('cluster = "pair.toml"', "")
    (tmp_path / "scenario.toml").write_text(f"{inline}\n{text}")
    groups = (
        "[[groups]]\nname = 'own'\naxes = { cluster.backend = ['gloo', 'nccl'] }\n"
        "[[groups]]\nname = 'file'\nset = { cluster = 'pair.toml' }\n"
    )
    path = written_beside(tmp_path, groups)
    assert [each["cluster.backend"] for each in values_in(path)] == ["gloo", "nccl", None]
    chosen = written_beside(tmp_path, "skip = \"plan.method == 'ddp'\"\n")
    assert len(points_in(chosen, ['plan={method="gs"}'])) == 1


# What is left out -----------------------------------------------------------------------------------------------------


def test_conditions_choose_points(tmp_path):
    axes = '[axes]\nplan.method = ["ddp", "gs", "single"]\nrun.steps = [2, 3, 4]\n'
    keep, skip = "keep = 'run.steps > 2'\n", "skip = [\"plan.method == 'gs' and run.steps % 2 == 0\", 'ranks < 2']\n"
    found = [(p.load().scenario.plan.method, p.load().scenario.run.steps) for p in points_in(written(tmp_path, axes))]
    assert len(found) == 9
    chosen = points_in(written(tmp_path, keep + skip + axes))
    assert [(p.load().scenario.plan.method, p.load().scenario.run.steps) for p in chosen] == [
        ("ddp", 3),
        ("ddp", 4),
        ("gs", 3),
    ]


def test_a_point_has_its_size_whatever_else_it_takes_to_be_a_scenario():
    """On 1,024 devices, the base's batch is too small."""
    cluster = (f"cluster={SCENARIOS / 'clusters' / 't4-hosts.toml'}", "cluster.topology.devices.0.count=1024")
    words = (*cluster, "workload.global_batch_size=1024")
    found = Facts("hosts", None, SCENARIOS / "demo.toml", words, Shared()).sizes()
    assert found == {"ranks": 1024, "devices": 1024}
    assert Facts("hosts", None, SCENARIOS / "demo.toml", cluster, Shared()).sizes() is None


def test_conditions_on_ranks_know_those_that_take_part(tmp_path):
    text = "keep = 'ranks < devices'\n[axes]\nplan.ranks = [1, 2]\n"
    assert [point.name for point in points_in(written(tmp_path, text))] == ["sweep--ranks-1"]
    table = "plan={method='ddp', ranks=1}"
    words = ("cluster=pair.toml", table)
    assert Facts("a", None, tmp_path / "scenario.toml", words, Shared()).sizes() == {"ranks": 1, "devices": 2}


def test_a_point_that_is_no_scenario_is_not_left_out_by_what_it_does_not_have(tmp_path):
    text = "skip = 'ranks == 1'\n[axes]\nplan.tp = [1, 7]\nplan.method = ['single', 'tensor']\n"
    assert [point.name for point in points_in(written(tmp_path, text))][-1] == "sweep--tp-7--tensor"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("keep = 'plan.methud == 1'", r"'plan.methud == 1': nothing sets plan.methud; did you mean plan.method\?"),
        (
            "keep = 'plan.method >'",
            r"keep: 'plan.method >': ends too early; allowed: keys, facts, numbers, \"texts\", ",
        ),
        ("skip = ['1', '(ranks']", r"skip: '\(ranks': character 1: '\(' is not closed"),
        ("skip = 'ranks ; 1'", r"skip: 'ranks ; 1': character 7: '; 1' cannot be read"),
        ("skip = 'ranks ranks'", r"'ranks ranks': character 7: 'ranks' is not allowed here; allowed: "),
        ("skip = '__import__(\"os\")'", r"\"os\"\)': character 11: '\(' is not allowed here; allowed: "),
        ("skip = 'ranks in [1, 2,]'", r"character 15: ',' is not allowed here"),
        ("skip = 'ranks in []'", r"character 10: '\[' is not allowed here"),
        ('skip = \'plan.method in ["ddp" or "gs"]\'', r"character 17: '\"ddp\"' is not allowed here"),
        ('skip = \'plan.method == "d" "dp"\'', r"character 20: '\"dp\"' is not allowed here"),
        ("skip = 'ranks ** 2 == 4'", r"character 7: '\*' is not allowed here"),
        ("keep = 'plan.method > 3'", r"'plan.method > 3': plan.method = '\w+': these cannot be compared"),
        ("keep = '1 / 0'", r"'1 / 0': : division by zero"),
        ("keep = 'ranks > 99'", r"keep and skip leave out all of 1 points"),
        ("keep = 3", r"keep = 3: must be an array"),
        (f"keep = '{'(' * 5000}'", r"keep: '\(+\.\.\.': nested too deep"),
    ],
)
def test_a_bad_condition_is_told(tmp_path, line, message):
    with pytest.raises(UserError, match=message) as told:
        points_in(written(tmp_path, line + "\n"))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("a == 2 and b == 'x' or false", True),
        ("not a == 2 or not (b == 'x')", False),
        ("1 < a <= 2 < inf", True),
        ("a in [1, 2, 3] and b not in ['y']", True),
        ("a * 3 - 2 / 2 + 7 % 4 == 8", True),
        ("-a < 0", True),
        ("c > 1", False),
        ("c <= 1", False),
        ("c == absent and a != absent", True),
        ("c + 1 > 0", False),
        ("link.bandwidth_bytes_per_s < '1 Gb/s'", True),
        ("'1 Mb/s' < link.bandwidth_bytes_per_s", True),
        ("link.bandwidth_bytes_per_s in ['10 Mb/s', '100 Mb/s']", True),
        ("servers.0.nic-count == 1_000", True),
        ("t == 1e-3", True),
    ],
)
def test_what_conditions_mean(text, holds):
    values = {"a": 2, "b": "x", "link.bandwidth_bytes_per_s": 1.25e6, "servers.0.nic-count": 1000, "t": 0.001}
    assert condition(text).holds(values) is holds


# Keys inside of files -------------------------------------------------------------------------------------------------


def test_what_is_in_a_file_that_the_scenario_names_can_be_overridden(tmp_path):
    path = write_files(tmp_path)
    before = load_scenario(path).scenario
    changes = ["cluster.links.0.latency_s=1 ms", "workload.model.name=other", "cluster=pair.toml"]
    after = load_scenario(path, changes).scenario
    assert after.cluster.links[0].latency_s == 1e-3 != before.cluster.links[0].latency_s
    assert after.cluster.links[0].bandwidth_bytes_per_s == before.cluster.links[0].bandwidth_bytes_per_s
    assert after.workload.model.name == "other"
    assert load_scenario(path).scenario == before


def test_a_preset_can_be_overridden_in_part(tmp_path):
    path = write_files(tmp_path)
    cluster = (tmp_path / "pair.toml").read_text()
    cluster = re.sub(r"(?s)\[\[links\]\].*", "", re.sub(r"(?s)\[\[devices\]\].*?(?=\[\[links\]\])", "", cluster))
    topology = '[topology]\nkind = "ring"\nlink = "pcie4x16"\n[[topology.devices]]\ndevice = "DEVICE"\ncount = 4\n'
    device = re.search(r"\[device_types\.([\w-]+)", cluster)[1]
    (tmp_path / "pair.toml").write_text(cluster + topology.replace("DEVICE", device))
    found = load_scenario(path, ["cluster.topology.link.latency_s=1e-3", "cluster.topology.devices.0.count=2"])
    link = found.scenario.cluster.topology.link
    assert (link.latency_s, link.bandwidth_bytes_per_s) == (1e-3, 24e9)
    assert len(found.scenario.cluster.devices) == 2
