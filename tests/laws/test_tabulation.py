"""Sweeps as tables: every point a row, the same bytes however they were made, nothing lost on the way."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from strategies import write_files

from gssim.errors import RunFailedError
from gssim.execution import Alone, RecordStore
from gssim.execution.files import FOLDER_MARK
from gssim.scenario.sweep import Point, load_sweep, points_of
from gssim.sweeps import (
    Fingerprints,
    Unpacked,
    answers,
    by_likeness,
    files_of,
    packed,
    parts_folder,
    tabulation,
)
from gssim.sweeps import inputs as sweep_inputs
from gssim.sweeps import predictions as chunks

SWEEP_TOML = """# Which plan, and which threshold?
scenario = "base/scenario.toml"

[variants]
ddp = { plan.method = "ddp" }
cut = { plan.method = "ddp", plan.tp = 3 }
gs = { plan.method = "gs", axes = { plan.push.threshold = [1e-3, 1e-2, inf] } }

[axes]
cluster = ["base/pair.toml", "base/small.toml"]
run.seed = [0]
"""
"""Two points fit in each cluster or in one of them, one is none."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a working directory with a sweep."""
    (tmp_path / "base").mkdir()
    write_files(tmp_path / "base")
    cluster = (tmp_path / "base" / "pair.toml").read_text().replace('name = "pair"', 'name = "small"')
    (tmp_path / "base" / "small.toml").write_text(cluster.replace('"1 GiB"', '"1 kB"'))
    (tmp_path / "sweep.toml").write_text(SWEEP_TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(out):
    """Return the bytes of a table's two files."""
    return tuple(file.read_bytes() for file in files_of(Path(out)))


def command(*arguments):
    return [sys.executable, "-c", "from gssim.cli.commands import main; main()", "sweep", *map(str, arguments)]


def many(folder, points=300):
    """Make the sweep one of many points."""
    path = folder / "sweep.toml"
    path.write_text(
        SWEEP_TOML.replace("run.seed = [0]", f"run.seed = {{ from = 1, to = {points // 10}, count = {points // 10} }}")
    )
    return path


def points():
    """Return the points of the sweep in this directory."""
    path = Path("sweep.toml")
    return points_of(load_sweep(path), file=path)


def kept_rows(out):
    return sum(file.read_bytes().count(b"\n") for file in parts_folder(Path(out)).glob("*.jsonl"))


def test_every_point_is_a_row_with_its_axes_also_what_does_not_fit_or_is_no_scenario(folder, gssim):
    code, said, err = gssim("sweep", "sweep.toml", "--out", "out/t.parquet", "--jobs", 1)
    assert code == 0, err
    table = pl.read_parquet("out/t.parquet")
    assert table["point"].to_list() == [point.name for point in points()]
    no_plan, fitting = ["fits", "does not fit", "invalid", "invalid"], ["fits"] * 3 + ["does not fit"] * 3
    assert table["status"].to_list() == no_plan + fitting
    assert table["plan.push.threshold"].to_list()[:4] == [None] * 4
    assert set(table["plan.push.threshold"].to_list()[4:]) == {1e-3, 1e-2, float("inf")}
    assert table["variant"].unique(maintain_order=True).to_list() == ["ddp", "cut", "gs"]
    assert table["cluster"].to_list()[:2] == ["pair", "small"]
    invalid = table.row(2, named=True)
    assert "plan" in invalid["reason"]
    assert "scenario.toml" not in invalid["reason"]
    assert invalid["step_time_s"] is None
    assert "lacks" in table["reason"][1]
    assert all(word in said for word in ("Which plan", "does not fit", "invalid"))
    assert sorted(os.listdir("out")) == ["t.csv", "t.parquet"]


def test_a_value_beyond_64_bits_is_an_invalid_point(tmp_path, gssim):
    write_files(tmp_path)
    huge = 10**40
    (tmp_path / "s.toml").write_text(f'scenario = "scenario.toml"\n[axes]\nrun.seed = [0, {huge}]\n')
    code, _, err = gssim("sweep", tmp_path / "s.toml", "--out", tmp_path / "t.csv", "--jobs", 1)
    assert code == 0, err
    table = pl.read_csv(tmp_path / "t.csv", infer_schema=False)
    assert table.select("run.seed", "status").rows() == [("0", "fits"), (str(huge), "invalid")]


def test_the_table_is_the_same_byte_for_byte_however_many_work_at_it(folder, gssim):
    for jobs in (1, 2):
        assert gssim("sweep", "sweep.toml", "--out", f"{jobs}.csv", "--jobs", jobs)[0] == 0
    assert written("1.csv") == written("2.csv")


def test_kept_rows_are_taken_up_where_all_that_they_were_made_from_is_as_it_was(folder, gssim, monkeypatch):
    gssim("sweep", "sweep.toml", "--out", "whole.parquet", "--jobs", 1)
    made, usual = [], tabulation.row_of

    def row_of(point, shared):
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append(point.name)
        return usual(point, shared)

    monkeypatch.setattr(tabulation, "row_of", row_of)
    code, _, err = gssim("sweep", "sweep.toml", "--out", "t.parquet", "--jobs", 1)
    assert code == 130
    assert "interrupted; what is finished is in t.parquet.parts; the same command does the rest" in err
    assert (len(made), kept_rows("t.parquet")) == (4, 4)
    (part,) = parts_folder(Path("t.parquet")).iterdir()
    part.write_bytes(part.read_bytes()[:-9])  # the last row was not finished

    def told(point, shared):
        made.append(point.name)
        return usual(point, shared)

    monkeypatch.setattr(tabulation, "row_of", told)
    assert gssim("sweep", "sweep.toml", "--out", "t.parquet", "--jobs", 1)[0] == 0
    assert len(made) == 4 + 10 - 3
    assert written("t.parquet") == written("whole.parquet")
    assert not parts_folder(Path("t.parquet")).exists()


def test_a_whole_table_is_not_made_again_unless_asked_or_something_is_otherwise(folder, gssim, monkeypatch):
    made, usual = [], tabulation.row_of

    def told(point, shared):
        made.append(point.name)
        return usual(point, shared)

    def points_made(*more):
        made.clear()
        code, printed, _ = gssim("sweep", "sweep.toml", "--out", "t.csv", "--jobs", 1, *more)
        assert code == 0
        return len(made), printed, written("t.csv")

    monkeypatch.setattr(tabulation, "row_of", told)
    first = points_made()
    assert first[0] == 10
    assert points_made() == (0, *first[1:])
    assert points_made("--again") == first
    Path("t.csv").unlink()
    assert points_made() == (0, *first[1:])
    path = folder / "base" / "pair.toml"
    path.write_text(path.read_text().replace('"1 GiB"', '"1.5 GiB"'))
    assert points_made()[0] == 10


def sweep(gssim, *more, out="t.parquet"):
    code, _, err = gssim("sweep", "sweep.toml", "--out", out, "--jobs", 1, *more)
    print(code, err)  # shown where a test fails
    return code, err


def without_work(monkeypatch):
    """Let no point be simulated from now on."""

    def row_of(point, shared):
        raise AssertionError(f"{point.name} is simulated")

    monkeypatch.setattr(tabulation, "row_of", row_of)


def test_a_kill_between_the_two_files_of_a_table_is_mended_by_the_next_run(folder, gssim):
    sweep(gssim, out="whole.csv")
    usual, renamed = Path.replace, []

    def replace(self, target):
        if renamed and self.suffix == ".partial":
            raise SystemExit(9)
        renamed.append(target)
        return usual(self, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        patched.setattr(Path, "unlink", lambda self, **_: None)  # a killed process tidies nothing up
        assert sweep(gssim)[0] == 9
    there = ["base", "sweep.toml", "t.csv", "t.parquet", "whole.csv", "whole.parquet"]
    assert sorted(os.listdir()) != there
    with pytest.MonkeyPatch.context() as patched:
        without_work(patched)
        assert sweep(gssim)[0] == 0
    assert sorted(os.listdir()) == there
    assert written("t.csv") == written("whole.csv")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        ("one byte", "t.csv"),
        ("the end", "t.parquet"),
        ("another table's", "t.csv"),
        pytest.param("one byte", "t.parquet", marks=pytest.mark.slow),
        pytest.param("the end", "t.csv", marks=pytest.mark.slow),
        pytest.param("another table's", "t.parquet", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_file_of_a_table_is_not_kept(folder, gssim, name, damage):
    sweep(gssim)
    whole, path = written("t.csv"), Path(name)
    content = path.read_bytes()
    if damage == "one byte":
        place = content.index(b"gs") + 1
        content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    elif damage == "the end":
        content = content[:-20]
    else:
        sweep(gssim, "--set", "workload.learning_rate=0.5", out="other.csv")
        content = Path(name.replace("t.", "other.")).read_bytes()
    path.write_bytes(content)
    assert sweep(gssim)[0] == 0
    assert written("t.csv") == whole


def test_a_damaged_row_is_made_again(tmp_path):
    parts = RecordStore(tmp_path / "t.parts", {"a", "b"})
    parts.keep("a", {"x": 1.5})
    parts.keep("b", {"x": 2.5})
    parts.close()
    (file,) = (tmp_path / "t.parts").iterdir()
    file.write_bytes(file.read_bytes().replace(b"1.5", b"1.6"))
    again = RecordStore(tmp_path / "t.parts", {"a", "b"})
    assert ("a" in again, "b" in again) == (False, True)


def test_a_folder_of_rows_that_holds_something_else_is_left_with_it(tmp_path):
    parts = RecordStore(tmp_path / "t.parts", ())
    parts.keep("a", {"x": 1.5})
    (tmp_path / "t.parts" / "notes.jsonl").write_text("mine")
    parts.remove()
    assert os.listdir(tmp_path / "t.parts") == ["notes.jsonl"]


@pytest.mark.parametrize(
    ("out", "lock"),
    [
        ("t.parquet", "t.parquet.lock"),
        pytest.param("results", "results/.gssim-sweep.lock", marks=pytest.mark.slow),
    ],
)
def test_of_two_sweeps_into_one_place_the_second_is_refused_by_the_name_of_the_first(folder, gssim, out, lock):
    many(folder, 3000).write_text(Path("sweep.toml").read_text().replace("plan.tp = 3", "plan.tp = 1"))
    process = subprocess.Popen(
        command("sweep.toml", "--out", out, "--jobs", 1), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + 100
        while not (Path(lock).exists() and Path(lock).read_text()) and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.01)
        code, said, err = gssim("sweep", "sweep.toml", "--out", out.replace("parquet", "csv"), "--jobs", 1)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert (code, said) == (2, "")
    (told,) = [line for line in err.splitlines() if line.startswith("gssim: ")]
    assert f"is in use by process {process.pid} on " in told


def test_a_part_of_the_points_does_not_replace_a_table_that_has_others(folder, gssim):
    sweep(gssim)
    whole = written("t.csv")
    code, err = sweep(gssim, "--only", "sweep--gs--*")
    assert code == 2
    assert "--only chooses 6 points, and the table t.parquet has 4 others, such as sweep--ddp--" in err
    assert written("t.csv") == whole
    assert sweep(gssim, "--only", "*")[0] == 0  # all of them
    assert sweep(gssim, "--only", "sweep--gs--*", out="part.csv")[0] == 0
    assert sweep(gssim, out="part.csv")[0] == 0  # of more points
    assert written("part.csv") == whole


def test_the_file_beside_the_one_that_is_named_is_not_replaced_where_it_is_no_table(folder, gssim):
    Path("notes.csv").write_text("my,notes\n")
    code, err = sweep(gssim, out="notes.parquet")
    assert code == 2
    assert "notes.csv: is no table of gssim's" in err
    assert Path("notes.csv").read_text() == "my,notes\n"
    assert not Path("notes.parquet").exists()


def test_fingerprints_tell_what_changes_a_prediction_and_nothing_else(folder):
    def found():
        return [Fingerprints().of_point(point) for point in points()]

    before = found()
    assert len(set(before)) == len(before)
    Path("sweep.toml").write_text(SWEEP_TOML.replace("Which plan", "What plan"))
    assert found() == before
    small = Path("base/small.toml")
    small.write_text(small.read_text().replace("1 MB/s", "2 MB/s"))
    changed = [a != b for a, b in zip(before, found(), strict=True)]
    assert changed == [
        "small" in point.name for point in points_of(load_sweep(Path("sweep.toml")), file=Path("sweep.toml"))
    ]
    model = Path("base/tiny.toml")
    model.write_text(model.read_text() + "\n")
    assert not set(found()) & set(before)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "plan.tp = 3",
            "plan.tpp = 3",
            r"sweep--cut--pair--seed-0: .*plan.tpp: unknown key; did you mean tp\?",
        ),
        ("run.seed", "run.sead", r"run.sead: unknown key; did you mean seed\?"),
        ('"base/small.toml"', '"base/smal.toml"', r"cluster = 'base/smal.toml': no such file"),
        ("[0]", "[]", r"axes: run.seed = \[\]: must be a list of values, one at least, or a range"),
        (
            "[0]",
            "{ from = 1, to = 2e5, count = 200_000 }",
            r"has 2,000,000 points: at most 1,000,000 are",
        ),
        (
            "run.seed = [0]",
            "plan.pp = [7]",
            r"no point is valid: sweep--ddp--pair--pp-7: .* \(and 9 more points\)",
        ),
    ],
)
def test_bad_sweeps_are_refused_in_one_line(folder, gssim, old, new, message):
    Path("sweep.toml").write_text(SWEEP_TOML.replace(old, new))
    code, out, err = gssim("sweep", "sweep.toml", "--out", "t.parquet", "--jobs", 1)
    assert (code, out) == (2, "")
    told = [line for line in err.splitlines() if line.startswith("gssim: ")]
    assert len(told) == 1
    assert re.search(message, told[0]), err
    assert not Path("t.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "t.parquet", "--json"], "--json prints Results, which a table does not keep"),
        (["--out", "t.parquet", "--dask", "tcp://127.0.0.1:1", "--jobs", "2"], "its workers say how many points at a"),
        (["--dask", "tcp://127.0.0.1:1"], "makes a table: name it with --out FILE.parquet"),
        (["--out", "t.parquet", "--dask", "nowhere:what"], "--dask nowhere:what: no scheduler there"),
        (["--out", "sweep.toml/t.parquet"], "sweep.toml is no folder"),
    ],
)
def test_options_that_do_not_go_together(folder, gssim, arguments, message):
    code, out, err = gssim("sweep", "sweep.toml", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_a_point_that_fails_is_a_row_and_the_command_fails(folder, gssim, monkeypatch):
    usual = tabulation.predicted

    def predicted(point, shared, **how):
        if "threshold-0.01" in point.name:
            raise RunFailedError("deadlock: rank 0 waits")
        return usual(point, shared)

    monkeypatch.setattr(tabulation, "predicted", predicted)
    code, _, err = gssim("sweep", "sweep.toml", "--out", "t.parquet", "--jobs", 1)
    assert code == 1
    assert "2 of 10 points failed (see t.parquet): deadlock: rank 0 waits" in err
    failed = pl.read_parquet("t.parquet").filter(pl.col("status") == "failed")
    assert failed["reason"].to_list() == ["deadlock: rank 0 waits"] * 2


@pytest.fixture
def whole(folder, gssim):
    """Return the table of many points, which others must equal; the sweep is in this directory."""
    many(folder)
    if not WHOLE:
        assert gssim("sweep", "sweep.toml", "--out", "whole.parquet", "--jobs", 1)[0] == 0
        WHOLE.append(written("whole.parquet"))
    return WHOLE[0]


WHOLE = []
"""Made once: it does not say in which folder."""


@pytest.mark.slow  # tests/real/test_killed.py interrupts quickly
@pytest.mark.slow  # of a folder in test_sweep, and of a killed sweep's table in test_killed
def test_an_interrupted_sweep_goes_on_to_the_same_table(folder, gssim, whole):
    line = command("sweep.toml", "--out", "t.parquet", "--jobs", 2)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 100
    while kept_rows("t.parquet") < 20 and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130, said
    assert "waiting for points that are under way" in said
    assert "interrupted; what is finished is in t.parquet.parts" in said
    assert "Traceback" not in said
    assert 20 <= kept_rows("t.parquet") < 300
    assert gssim("sweep", "sweep.toml", "--out", "t.parquet", "--jobs", 1)[0] == 0
    assert written("t.parquet") == whole


def test_processes_end_with_the_one_that_was_killed(folder):
    many(folder, 600)
    line = command("sweep.toml", "--out", "t.parquet", "--jobs", 2)
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 100
    while kept_rows("t.parquet") < 20 and time.monotonic() < until:
        time.sleep(0.01)
    process.kill()
    process.wait()
    while _alive(process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(process.pid)


def _alive(group):
    """Return whether a process group has any process."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_a_chunk_has_no_time_for_is_handed_out_again(folder, monkeypatch):
    class Together(Alone):
        in_chunks = True

    monkeypatch.setattr(chunks, "MAX_CHUNK_S", 0.0)
    asked = points()
    order = by_likeness(asked)
    found = list(answers(asked, order, lambda point, shared: point.name, Together()))
    assert found == [(place, asked[place].name) for place in order]


def test_points_that_differ_in_rates_of_links_alone_are_handed_out_together(monkeypatch):
    handed = []

    class Together(Alone):
        in_chunks, at_a_time = True, 2

        def submit(self, work, argument):
            handed.append([point.overrides[0] for point in argument.points])
            return super().submit(work, argument)

    def point(threshold, rate):
        rates = f"cluster.topology.link.bandwidth_bytes_per_s={rate}"
        return Point(f"a--{threshold}-{rate}", Path("s.toml"), (f"plan.push.threshold={threshold}", rates))

    monkeypatch.setattr(chunks, "MAX_CHUNK_POINTS", 7)
    asked = [point(threshold, rate) for rate in range(3) for threshold in range(5)]
    found = list(answers(asked, by_likeness(asked), lambda point, shared: point.name, Together()))
    assert sorted(place for place, _ in found) == list(range(15))
    assert all(len(each) <= 7 for each in handed)
    assert sum(len(set(each)) for each in handed) == 5  # each threshold in one chunk alone


# Dask -----------------------------------------------------------------------------------------------------------------


@contextmanager
def dask_cluster(folder, workers, protocol="tcp"):
    """Give the address of a scheduler, and the processes of its workers, which see nothing of this directory."""
    folder.mkdir()
    address, running = f"{protocol}://127.0.0.1:{_free_port()}", []

    def start(what, *arguments):
        line = [sys.executable, "-W", "ignore", "-m", f"distributed.cli.dask_{what}", *arguments]
        running.append(subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    try:
        place = ("--host", f"{protocol}://127.0.0.1", "--port", address.rpartition(":")[2])
        start("scheduler", *place, "--no-dashboard")
        for number in range(workers):
            start("worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard", "--name", str(number))
        yield address, running[1:]
    finally:
        for process in running:
            process.kill()
            process.wait()


def _free_port():
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


ONE_WORKER = """
import sys
import distributed
from gssim.cli import commands

one = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
with distributed.LocalCluster(protocol="tcp://", host="127.0.0.1", **one) as cluster:
    sys.argv = ["gssim", "sweep", "sweep.toml", "--out", "t.parquet", "--dask", cluster.scheduler_address]
    commands.main()
"""


def test_a_dask_worker_makes_the_same_table(folder, gssim):
    """Scheduler, worker and sweep in one process, but not in this one: their threads stay, and nothing forks then."""
    assert gssim("sweep", "sweep.toml", "--out", "whole.parquet", "--jobs", 1)[0] == 0
    line = [sys.executable, "-W", "ignore", "-c", ONE_WORKER]
    ended = subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert written("t.parquet") == written("whole.parquet")


@pytest.mark.slow
def test_dask_workers_make_the_same_table_and_a_killed_one_loses_nothing(folder, whole):
    with dask_cluster(folder / "elsewhere", 2) as (address, workers):
        line = command("sweep.toml", "--out", "t.parquet", "--dask", address)
        process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 100
        while kept_rows("t.parquet") < 20 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        assert kept_rows("t.parquet") < 300
        workers[0].kill()
        _, said = process.communicate(timeout=100)
        assert process.returncode == 0, said
        assert workers[1].poll() is None
    assert written("t.parquet") == whole


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")
def test_dask_workers_are_reached_by_tls_as_dask_s_own_configuration_says(folder, monkeypatch):
    line = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -keyout key.pem -out cert.pem"
    subprocess.run(line.split(), check=True, capture_output=True)
    monkeypatch.setenv("DASK_DISTRIBUTED__COMM__TLS__CA_FILE", str(folder / "cert.pem"))
    for who in ("CLIENT", "SCHEDULER", "WORKER"):
        for what in ("CERT", "KEY"):
            monkeypatch.setenv(f"DASK_DISTRIBUTED__COMM__TLS__{who}__{what}", str(folder / f"{what.lower()}.pem"))
    with dask_cluster(folder / "elsewhere", 1, "tls") as (address, _):
        line = command("sweep.toml", "--out", "t.parquet", "--dask", address)
        ended = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
        assert ended.returncode == 0, ended.stderr
        plain = command("sweep.toml", "--out", "p.parquet", "--dask", address.replace("tls", "tcp"))
        refused = subprocess.run(plain, capture_output=True, text=True, timeout=200, check=False)
    assert refused.returncode == 2
    assert "no scheduler there" in refused.stderr
    assert len(pl.read_parquet("t.parquet")) == 10


def test_what_points_read_goes_with_them_and_messages_come_back_as_said_at_home(folder):
    there = Unpacked(packed(points()))
    for point in points():
        here = there.localised(point)
        assert here.file.is_relative_to(there.root)
        if point.variant != "cut":
            assert here.load().scenario == point.load().scenario
    root = Path(there.root)
    assert {file.name for file in root.rglob("*") if file.is_file() and file.name != FOLDER_MARK} == {
        "scenario.toml",
        "pair.toml",
        "small.toml",
        "tiny.toml",
        "tiny.json",
    }
    assert there.original_text(f"{there.localised(points()[0]).file}: plan") == "base/scenario.toml: plan"
    del there
    assert not root.exists()


def test_only_files_that_scenarios_refer_to_by_their_keys_go_to_workers(folder):
    """A question that reads like a file's name, or a key that is none, sends nothing of this machine's elsewhere."""
    (folder / "secret.json").write_text('{"password": "x"}')
    (folder / "base" / "secret.toml").write_text('password = "x"')
    scenario = folder / "base" / "scenario.toml"
    scenario.write_text(f'question = "{folder}/secret.json"\nname = "secret.toml"\n' + scenario.read_text())
    pair = folder / "base" / "pair.toml"
    pair.write_text('source = "secret.toml"\n' + pair.read_text().replace('source = "made', 'note = "made', 1))
    asked = [
        Point("p", scenario, ("cluster=base/pair.toml", f"question={folder}/secret.json", "notes=base/secret.toml"))
    ]
    names = {Path(path).name for path in json.loads(zlib.decompress(packed(asked).content))}
    assert names == {"scenario.toml", "pair.toml", "tiny.toml", "tiny.json"}


def test_tables_that_a_cluster_has_in_files_go_with_it_and_all_bytes_stay_as_they_are(folder):
    (folder / "away").mkdir()
    (folder / "away" / "types.toml").write_bytes(b"# \xff\r\n")
    (folder / "base" / "apart.toml").write_text('device_types = "../away/types.toml"\n')
    there = Unpacked(packed([Point("p", folder / "base" / "scenario.toml", ("cluster=base/apart.toml",))]))
    assert (Path(there.root + str(folder)) / "away" / "types.toml").read_bytes() == b"# \xff\r\n"


def test_a_part_of_another_run_is_read_beside_ones_own(tmp_path):
    first = RecordStore(tmp_path / "t.parts", {"a", "b"})
    first.keep("a", {"x": 1.5, "y": None, "z": float("inf")})
    second = RecordStore(tmp_path / "t.parts", {"a", "b"})
    second.keep("b", {"x": 2})
    assert "a" in second
    assert list(second.records(["b", "a"])) == [{"x": 2}, {"x": 1.5, "z": float("inf")}]
    first.close()
    second.remove()
    assert not (tmp_path / "t.parts").exists()


def test_fingerprints_tell_shipped_models_that_were_traced_again(folder, monkeypatch):
    """In a checkout they are no part of the code's digest; before, finished rows of older traces were taken up."""
    shipped = folder / "elsewhere.toml"
    shipped.write_text(Path("base/tiny.toml").read_text())
    monkeypatch.setattr(sweep_inputs, "shipped_models", lambda: {"tiny-model": shipped})
    scenario = Path("base/scenario.toml")
    by_file = points()[0]
    by_override = replace(by_file, overrides=(*by_file.overrides, "workload.model=tiny-model"))
    named = folder / "base" / "named.toml"
    named.write_text(scenario.read_text().replace('"tiny.toml"', '"tiny-model"'))
    in_scenario = replace(by_file, file=named)

    def found():
        return [Fingerprints().of_point(point) for point in (by_file, by_override, in_scenario)]

    before = found()
    shipped.write_text(shipped.read_text() + "\n")
    assert [a != b for a, b in zip(before, found(), strict=True)] == [False, True, True]
