# ruff: noqa: E501  a fault and its message are one line
"""Sizes that nobody waits for, numbers out of any range, texts that are no plain text: refused, or shown as they are."""

import csv
import io
import json
import re
import threading
import time
import tracemalloc

import numpy as np
import pytest
from strategies import MODEL_TOML, PAIR_TOML, write_files

from gssim import terminal as ending
from gssim.cluster import Cluster
from gssim.cluster.topology import build, size_of
from gssim.collectives import Pairs
from gssim.errors import UserError
from gssim.plan import chosen
from gssim.planner import MAX_LAYER_PASSES, suggested_changes
from gssim.scenario import load_scenario
from gssim.sweeps import csv_of, table_of

LINK = '{ bandwidth_bytes_per_s = "10 MB/s", latency_s = 0, source = "assumed" }'
TYPES = PAIR_TOML[: PAIR_TOML.index("[[devices]]")]
SERVERS = f'servers = [{{ count = 2, device = "fast", devices = 1, nics = 1, nic_link = {LINK}, pcie_link = {LINK} }}]'


def topology(kind, rest):
    return f'{TYPES}\n[topology]\nkind = "{kind}"\n{rest}\n'


TOO_LARGE = [
    (topology("ring", f'devices = [{{ device = "fast", count = 10000000 }}]\nlink = {LINK}'), "10,000,000 devices"),
    (topology("fully-connected", f'devices = [{{ device = "fast", count = 16384 }}]\nlink = {LINK}'), "268,419,072 links"),
    (topology("torus", f'device = "fast"\nshape = [4096, 4096]\nlink = {LINK}'), "16,777,216 devices"),
    (
        topology("servers", f'fabric = {{ kind = "leaf-spine", servers_per_leaf = 1, spines = 1{"0" * 15} }}\n{SERVERS}'),
        "1,000,000,000,000,008 switches",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cluster", "message"), TOO_LARGE, ids=[message for _, message in TOO_LARGE])
def test_a_cluster_that_is_too_large_is_refused_before_it_is_built(gssim, tmp_path, cluster, message):
    began_s = time.process_time()
    code, out, err = gssim("check", write_files(tmp_path, cluster=cluster))
    assert (code, out) == (2, "")
    assert re.search(rf"topology: {message}: at most [\d,]+ are allowed \(--no-limits lifts this\)", err), err
    assert time.process_time() - began_s < 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.global_batch_size=100000000", "100,000,000 samples"),
        ("run.steps=10000000", "10,000,001 steps"),
        ("plan.micro_batches=1000000", "5,000,000 layer passes"),
    ],
)
def test_a_question_that_is_too_large_is_refused(gssim, tmp_path, override, message):
    code, _, err = gssim("check", write_files(tmp_path), "--set", override)
    assert code == 2
    assert f"{message}: at most" in err


def test_limits_are_lifted_on_request_and_for_that_command_alone(gssim, tmp_path):
    path, change = write_files(tmp_path), ("--set", "run.steps=10000000")
    assert gssim("check", path, *change, "--no-limits")[0] == 0
    assert gssim("check", path, *change)[0] == 2


@pytest.mark.parametrize(
    "file", ["ring-8", "fully-connected-8", "torus-4x4x4", "leaf-spine-64", "rail-optimised-128", "two-sites", "dgx-1v"]
)
def test_the_size_that_is_reckoned_is_no_less_than_what_is_built(file):
    from pathlib import Path

    from gssim.scenario import load_cluster

    cluster: Cluster = load_cluster(Path(__file__).parents[2] / f"scenarios/clusters/{file}.toml")
    assert cluster.topology is not None
    built, size = build(cluster.topology), size_of(cluster.topology)
    assert size.devices == len(built.devices)
    assert len(built.switches) <= size.switches <= 2 * len(built.switches) + 4
    assert built.wiring.links <= size.links <= 3 * built.wiring.links


OUT_OF_RANGE = [
    ("plan.push.threshold=1e300", "scenario.toml", "plan.push.threshold = 1e+300: must be 0, from 1e-30 to 1e+30, or inf"),
    ("run.slowdowns=[{rank=0, first_step=0, compute_ratio=1e300}]", "scenario.toml", "compute_ratio = 1e+300: must be at most 1e+"),
    ("cluster.links.0.latency_s=1e308", "pair.toml", "links[0].latency_s = 1e+308: must be at most 1e+09"),
    ("cluster.links.0.bandwidth_bytes_per_s=1e-300", "pair.toml", "must be at least 1"),
    ("cluster.device_types.fast.step_jitter_ratio=1e290", "pair.toml", "must be at most 10"),
    ("cluster.device_types.fast.peak_flop_per_s.fp32=1e300", "pair.toml", "peak_flop_per_s.fp32 = 1e+300: must be at most 1e+"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "file", "message"), OUT_OF_RANGE)
def test_a_number_out_of_its_range_is_refused_where_it_enters(gssim, tmp_path, override, file, message):
    code, _, err = gssim("run", write_files(tmp_path), "--set", "plan.method=gs", "--set", override)
    assert code == 2
    assert f"{tmp_path / file}: " in err
    assert message in err


def test_gradients_larger_than_any_are_refused(gssim, tmp_path):
    path = write_files(tmp_path)
    text = (tmp_path / "tiny.json").read_text()
    (tmp_path / "tiny.json").write_text(re.sub(r'"rms": [^,]+', '"rms": 1e97', text, count=1))
    code, _, err = gssim("run", path, "--set", "plan.method=gs", "--set", "plan.push.threshold=1e-3")
    assert code == 2
    assert "rms = 1e+97: must be at most 1" in err


def test_slow_downs_that_come_together_have_the_range_of_one(gssim, tmp_path):
    many = ", ".join(["{rank=0, first_step=0, compute_ratio=1000}"] * 3)
    code, _, err = gssim("check", write_files(tmp_path), "--set", f"run.slowdowns=[{many}]")
    assert code == 2
    assert "together rank 0 takes 1e+09 times as long" in err


def test_texts_of_users_are_shown_as_they_are(gssim, tmp_path):
    cluster = PAIR_TOML.replace("[device_types.fast]", '[device_types."[red]fast[/b] :smile:"]').replace(
        'type = "fast"', 'type = "[red]fast[/b] :smile:"'
    )
    path = write_files(tmp_path, cluster=cluster)
    code, out, _ = gssim("run", path, "--set", r'question="[/b] is \u001b[31mred\u001b[0m \n[link=file:///x]"')
    assert code == 0
    assert r"[/b] is \x1b[31mred\x1b[0m \n[link=file:///x]" in out
    assert "[red]fast[/b] :smile:" in out
    assert "\x1b" not in out


def test_a_line_is_one_line_of_300_characters_whatever_it_is_about(gssim, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("x" * 5000, "a\nb\x1b]0;title\x07", "\u202eright to left"):
        code, _, err = gssim("check", name)
        assert code == 2
        assert err.count("\n") == 1
        assert len(err) <= 301
        assert err.rstrip("\n").isprintable()


def test_a_byte_order_mark_is_passed_over(gssim, tmp_path):
    path = write_files(tmp_path)
    for file in tmp_path.glob("*.toml"):
        file.write_text("\ufeff" + file.read_text(), encoding="utf-8")
    assert gssim("check", path)[0] == 0


@pytest.mark.parametrize("arguments", [("check",), ("run", "--json"), ("run",)])
def test_a_full_disk_is_one_line(monkeypatch, capsys, tmp_path, arguments):
    from gssim.cli import commands as cli

    path = write_files(tmp_path)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.argv", ["gssim", arguments[0], str(path), *arguments[1:]])
        monkeypatch.setattr("sys.stdout", full)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "gssim: output cannot be written: No space left on device\n"


def test_what_takes_long_says_what_it_does_and_an_interrupt_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(ending, "SILENT_S", 0.01)
    with ending.activity("gssim: run") as doing:
        doing("simulating 2 ranks")
        time.sleep(0.3)
    assert capsys.readouterr().err == "gssim: run: simulating 2 ranks ...\n"
    monkeypatch.setattr(ending, "SILENT_S", 60)

    def interrupted():
        with ending.activity("gssim: run") as doing:
            doing("simulating 2 ranks")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert capsys.readouterr().err == "gssim: run: interrupted while simulating 2 ranks\n"


def test_what_is_said_of_long_work_is_said_before_the_command_ends(monkeypatch):
    """A line that had begun was written after the end, into a stream that a program in the same process had closed."""
    begun, written = threading.Event(), []

    class Slow(io.StringIO):
        def write(self, text):
            begun.set()
            time.sleep(0.2)
            written.append(text)
            return len(text)

    monkeypatch.setattr(ending, "SILENT_S", 0.01)
    monkeypatch.setattr("sys.stderr", Slow())
    with ending.activity("gssim: run") as doing:
        doing("simulating 2 ranks")
        assert begun.wait(timeout=60)
    assert "".join(written) == "gssim: run: simulating 2 ranks ...\n"


def test_no_cell_of_a_table_is_a_formula():
    texts = ["=1+1", "+cmd", "-2", "@SUM(A1)", "gs", "it's", None]
    frame = table_of([{"name": text, "value": -1.5} for text in texts], {"name": str, "value": float})
    rows = list(csv.DictReader(csv_of(frame).splitlines()))
    assert [row["name"] for row in rows] == ["'=1+1", "'+cmd", "'-2", "'@SUM(A1)", "gs", "it's", ""]
    assert {row["value"] for row in rows} == {"-1.5"}


def test_sums_of_many_pairs_take_no_memory_for_each_pair():
    members = 6000
    pairs = Pairs([np.full(members, 2.0), np.full(members, 3.0)], [place % 2 for place in range(members)])
    tracemalloc.start()
    assert pairs.received[:2] == (5999 * 2.5 + 0.5, 5999 * 2.5 - 0.5)
    assert pairs.sent[:2] == (5999 * 2.0, 5999 * 3.0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < members * members * 8 / 2


def test_remedies_ask_for_no_more_micro_batches_than_can_be_lowered_soon(tmp_path):
    path = write_files(tmp_path, cluster=PAIR_TOML.replace("1 GiB", "1 KiB"))
    loaded = load_scenario(path, ["workload.global_batch_size=1000000"])
    began_s = time.process_time()
    asked = [
        int(number) for each in suggested_changes(loaded) for number in re.findall(r"micro_batches=(\d+)", each.change)
    ]
    assert asked
    assert max(asked) * 5 <= MAX_LAYER_PASSES
    assert time.process_time() - began_s < 20


def test_two_layers_of_one_name_are_refused(gssim, tmp_path):
    code, _, err = gssim("check", write_files(tmp_path, model=MODEL_TOML.replace('name = "head"', 'name = "h"')))
    assert code == 2
    assert "layers: two layers are named 'h'; each needs a name of its own" in err
    code, _, err = gssim("check", write_files(tmp_path, model=MODEL_TOML.replace('"h.1"', '"h.0"')))
    assert code == 2
    assert "two modules are named 'h.0'" in err


def test_a_topology_without_devices_is_refused(gssim, tmp_path):
    code, _, err = gssim("check", write_files(tmp_path, cluster=topology("ring", f"devices = []\nlink = {LINK}")))
    assert code == 2
    assert "devices: at least one is needed" in err


def test_indices_that_int32_cannot_hold_are_never_chosen_and_refused_where_asked_for(gssim, tmp_path):
    sizes = {"entries": 10.0, "value_bytes": 4}
    assert chosen("auto", elements=2.0**31, **sizes) == "coo"
    assert chosen("auto", elements=2.0**31 + 1, **sizes) == "bitmap"
    with pytest.raises(UserError, match="int32 indices"):
        chosen("coo", elements=2.0**31 + 1, **sizes)
    path = write_files(tmp_path, model=MODEL_TOML.replace("16x4 b0 b1", "1000000x5000 b0 b1"))
    options = [
        part
        for each in ("plan.method=gs", "plan.push.threshold=1e-3", "plan.push.encoding=coo")
        for part in ("--set", each)
    ]
    code, _, err = gssim("check", path, *options)
    assert code == 2
    assert "plan.push.encoding = 'coo': has int32 indices, for at most 2,147,483,648 elements" in err


def test_thresholds_of_a_study_are_searched_beside_a_dense_plan(gssim, tmp_path):
    path = write_files(tmp_path)
    study = tmp_path / "convergence.csv"
    study.write_text("control,threshold,kind,loss_change_high\nFalse,0.001,absolute,0.05\n")
    words = ("--jobs", "1", "--study", study, "--most-loss-change", "0.1", "--set", 'search.methods=["gs"]', "--json")
    code, out, err = gssim("search", path, *words)
    assert code == 0, err
    assert any(each["density"]["push"] is not None for each in json.loads(out))
