"""`analysis ingest`: profiler traces of GPUs with known sums become exact Results; what is no trace is refused."""

import csv
import gzip
import json
from pathlib import Path

import commands
import pytest
from kineto_traces import Writer, training

from analysis.compare.timeline import read_step
from analysis.ingest import kineto
from analysis.ingest.job import ingest
from gssim.errors import UserError
from gssim.result import Collective, read_result
from gssim.scenario import load_scenario

DEMO = Path(__file__).resolve().parents[2] / "scenarios" / "demo.toml"
NCCL = ("plan.method=ddp", "cluster.backend=nccl")
OPTIONS = ("--scenario", DEMO, *(word for change in NCCL for word in ("--set", change)))
LOADED = load_scenario(DEMO, NCCL)
MS = 1e-3


def two_ranks(folder):
    """The second rank is 1.5 ms late for its all-reduces, and its clock 0.3 s ahead."""
    return [training(0).write(folder), training(1, arrives_us=6500, ahead_us=300_000).write(folder)]


def near(value):
    return pytest.approx(value, rel=1e-6, abs=1e-12)


def test_the_sums_of_a_gpus_training_are_exact(tmp_path):
    ingested = ingest(two_ranks(tmp_path), LOADED)
    result = ingested.result
    assert ingested.notes == ()
    assert (result.source, result.scenario_id) == ("measured", LOADED.scenario.scenario_id)
    assert result.step_times_s == near((10 * MS,) * 3)  # not the first, of 20 ms
    assert result.step_time_s == near(10 * MS)
    assert result.throughput_samples_per_s == near(1600)
    expected = {
        "forward": 3,
        "backward": 3,
        "compression": 0,
        "optimizer": 1,
        "exposed_communication": 1,
        "idle": 1.5,
        "exposed_copies": 0.5,
    }
    assert result.phases_s == near({name: value * MS for name, value in expected.items()})
    assert [rank.phases_s for rank in result.ranks] == [near(result.phases_s)] * 2
    assert result.collectives == (Collective(kind="all-reduce", group=(0, 1), bytes=2000, count=1),)
    (times,) = result.provenance["ingested"]["collectives"]
    assert (times["transfer_s"], times["lateness_s"]) == (near(1.5 * MS), near(1.5 * MS))
    assert result.provenance["ingested"]["clock_offsets_s"] == near([0.0, 0.3])
    assert [(rank.peak_allocated_bytes, rank.peak_reserved_bytes) for rank in result.ranks] == [
        (5_000_002, 9_000_000),
        (5_000_003, 9_000_000),
    ]


def test_the_step_as_a_trace_has_both_ranks_on_one_clock(tmp_path):
    path = tmp_path / "step.json"
    path.write_text(ingest(two_ranks(tmp_path), LOADED).trace)
    step = read_step(path)
    ends = [block.end_s for lane in step.lanes if lane.stream == "communication" for block in lane.blocks]
    assert ends == near([8 * MS, 8 * MS])
    assert (step.scenario_id, step.source) == (LOADED.scenario.scenario_id, "measured")
    again = ingest([path], LOADED)  # what it wrote is a trace with its Result
    assert again.result == ingest(two_ranks(tmp_path), LOADED).result


LOCAL = (*NCCL, "plan.method=local_sgd", "plan.sync_every_steps=4")


def apart(rank, outer):
    """Return a rank's steps of 10 ms of compute; in the `outer` ones an all-reduce takes 4 ms more."""
    made, t = Writer(rank), 0
    for number in range(9):
        length = 14_000 if number in outer else 10_000
        made.step(number, t, t + length)
        made.kernel(t, t + 10_000, launched_us=t + 10)
        if number in outer:
            made.nccl(t + 10_000, t + 14_000, launched_us=t + 20)
        t += length
    return made


def test_steps_of_ranks_that_synchronize_periodically_are_those_of_a_period(tmp_path):
    """Whatever steps were recorded: here one outer step of eight, where every fourth is one."""
    loaded = load_scenario(DEMO, LOCAL)
    result = ingest([apart(rank, {5}).write(tmp_path) for rank in range(2)], loaded).result
    assert result.step_time_s == near(11 * MS)
    assert sum(result.phases_s.values()) == near(11 * MS)
    assert result.phases_s["exposed_communication"] == near(1 * MS)
    assert [rank.phases_s for rank in result.ranks] == [near(result.phases_s)] * 2
    periods = result.periods
    assert (periods.every_steps, periods.inner_step_time_s, periods.outer_step_time_s) == (
        4,
        near(10 * MS),
        near(14 * MS),
    )
    assert result.collectives == (Collective(kind="all-reduce", group=(0, 1), bytes=2000, count=1),)
    assert periods.outer_bytes == 2000


@pytest.mark.parametrize(
    ("changes", "outer", "said"),
    [
        ((), (), r"in none of 8 steps .* plan.sync_every_steps = 4; record a whole period: 5 steps"),
        ((), range(9), r"in all of 8 steps .* plan.sync_every_steps = 4"),
        (("plan.method=streaming_diloco",), {4}, "'streaming_diloco' exchanges fragments in several steps"),
    ],
)
def test_recordings_without_inner_or_outer_steps_are_refused(tmp_path, changes, outer, said):
    loaded = load_scenario(DEMO, (*LOCAL, *changes))
    with pytest.raises(UserError, match=said):
        ingest([apart(rank, outer).write(tmp_path) for rank in range(2)], loaded)


def test_a_host_that_runs_ahead_measures_the_gpus_steps(tmp_path):
    made = Writer(0, 1)
    for number in range(5):
        made.step(number, 1000 * number, 1000 * number + 1000)
        for half in (0, 5000):
            made.kernel(100 + 10_000 * number + half, 5100 + 10_000 * number + half, launched_us=1000 * number + 50)
    loaded = load_scenario(DEMO, ("plan.method=single", "cluster.backend=nccl"))
    result = ingest([made.write(tmp_path)], loaded).result
    assert result.step_times_s == near((10 * MS,) * 4)
    assert result.phases_s["idle"] == near(0.0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"Collective name": "_allgather_base", "Out msg nelems": 2000}, ("all-gather", (0, 1), 4000)),
        ({"Collective name": "_reduce_scatter_base", "Out msg nelems": 500}, ("reduce-scatter", (0, 1), 2000)),
        ({"Collective name": "broadcast", "dtype": "Float"}, ("broadcast", (0, 1), 4000)),
        ({"Collective name": "all_to_allv", "Out msg nelems": 1200}, ("all-to-all", (0, 1), 2400)),
        ({"Collective name": "allreduce", "dtype": "Float8_e4m3fn"}, ("all-reduce", (0, 1), 1000)),
        ({"Collective name": "send", "Dst Rank": 1}, ("send", (0, 1), 2000)),
        ({"Collective name": "barrier"}, ("barrier", (0, 1), 0)),
        ({"Process Group Ranks": "[0, ...]"}, ("all-reduce", (0, 1), 2000)),
    ],
)
def test_the_fields_of_a_kernel_tell_kind_group_and_size(fields, expected, tmp_path):
    made = Writer(0)
    for number in range(3):
        made.step(number, 1000 * number, 1000 * number + 1000)
        made.nccl(1000 * number + 100, 1000 * number + 200, launched_us=1000 * number + 50, **fields)
    path = made.write(tmp_path)
    read = kineto.read_rank(path, kineto.read_document(path))
    assert [(call.kind, call.group, call.size_bytes) for call in read.calls] == [expected] * 3
    assert not read.partial


def test_what_a_trace_lacks_is_said_and_not_guessed(tmp_path):
    made = training(0)
    for event in made.events:
        for field in ("Collective name", "In msg nelems"):
            if event["name"].startswith("nccl"):
                event["args"].pop(field, None)
    paths = [made.write(tmp_path), training(1).write(tmp_path)]
    ingested = ingest(paths, LOADED)
    assert "3 x NCCL's kernels without the fields of record_param_comms" in ingested.notes
    assert "3 x collectives that some of their ranks lack" in ingested.notes
    assert ingested.result.phases_s["exposed_communication"] == near(1 * MS)


def test_kernels_of_amds_library_and_of_msccl_are_communication(tmp_path):
    paths = []
    for rank in range(2):
        made = training(rank)
        kernels = [event for event in made.events if event["name"].startswith("nccl")]
        for number, event in enumerate(kernels):
            event["name"] = (
                "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
                "mscclKernel_Sum_float",
                "void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)",
            )[number % 3]
            event["args"] = {name: value for name, value in event["args"].items() if name == "correlation"}
        paths.append(made.write(tmp_path))
    assert ingest(paths, LOADED).result.phases_s["exposed_communication"] == near(1 * MS)


def test_a_trace_that_does_not_tell_its_rank_is_refused_by_what_it_lacks(tmp_path):
    """It was said to be of a job of one rank."""
    path = training(1).write(tmp_path)
    data = json.loads(path.read_text())
    del data["distributedInfo"]
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"does not tell its rank \(no distributedInfo\)"):
        ingest([training(0).write(tmp_path), path], LOADED)


def test_a_packed_trace_may_have_any_name(tmp_path):
    path = training(0).write(tmp_path)
    packed = tmp_path / "rank0.pt.trace.json"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert kineto.read_document(packed) == kineto.read_document(path)


def test_kernels_of_a_cuda_graph_have_the_phase_of_its_launch_and_that_is_said(tmp_path):
    """One graph of forward, backward and update: all of it was the forward, without a word."""
    made = training(0)
    for event in made.events:
        if event["name"] == "cudaLaunchKernel":
            event["name"] = "cudaGraphLaunch"
    path = made.write(tmp_path)
    read = kineto.read_rank(path, kineto.read_document(path))
    assert any(what.startswith("kernels of CUDA graphs") for what in read.partial)


def test_a_kernel_that_may_be_an_all_to_all_is_not_called_a_message(tmp_path):
    """Older traces have no fields; NCCL's all-to-alls are of the same kernel as isend and irecv."""
    made = training(0)
    for event in made.events:
        if event["name"].startswith("nccl"):
            event["name"] = "ncclKernel_SendRecv(ncclWorkElem)"
            event["args"] = {"correlation": event["args"]["correlation"]}
    path = made.write(tmp_path)
    read = kineto.read_rank(path, kineto.read_document(path))
    assert any("or an all-to-all" in what for what in read.partial)


def older(made):
    """Older traces have the fields on the operator alone."""
    for number, event in enumerate([event for event in made.events if event["name"].startswith("nccl")]):
        args = event["args"]
        fields = {name: args.pop(name) for name in list(args) if name != "correlation"}
        args["External id"] = number
        made.span(
            "cpu_op", "record_param_comms", 101, 10.0 + number, 11.0 + number, **fields, **{"External id": number}
        )
    return made


def test_the_fields_may_be_on_the_operator_alone(tmp_path):
    paths = [older(training(rank)).write(tmp_path) for rank in range(2)]
    assert ingest(paths, LOADED).result.collectives[0].key == ("all-reduce", (0, 1), 2000, 1)


def test_the_command_writes_a_result_that_compare_and_timeline_read(tmp_path):
    out, step = tmp_path / "out" / "measured.json", tmp_path / "step.json"
    ended = commands.run("analysis", "ingest", *two_ranks(tmp_path), *OPTIONS, "--out", out, "--trace", step)
    assert ended.returncode == 0, ended.stderr
    assert "1.50 ms" in ended.stdout  # idle, transfer
    assert read_result(out).step_time_s == near(10 * MS)
    predicted = commands.run(
        "gssim", "run", DEMO, *OPTIONS[2:], "--out", tmp_path / "out", "--trace", tmp_path / "predicted.json"
    )
    assert predicted.returncode == 0, predicted.stderr
    compared = commands.run("analysis", "compare", tmp_path / "out", "--out", tmp_path / "compared")
    assert compared.returncode == 0, compared.stderr
    with (tmp_path / "compared" / "comparison.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["collectives_equal"], row["peak_measured_bytes"]) == ("false", "5000002.0")
    assert float(row["exposed_copies_measured_s"]) == near(0.5 * MS)
    drawn = commands.run("analysis", "timeline", tmp_path / "predicted.json", step, "--out", tmp_path / "step.png")
    assert drawn.returncode == 0, drawn.stderr


# Refusals -------------------------------------------------------------------------------------------------------------


def changed(change):
    """Return a writer of rank 0's trace with a change to its data."""

    def write(folder):
        data = training(0).data()
        change(data)
        path = folder / "rank0.json"
        path.write_text(json.dumps(data))
        return path

    return write


def written(content):
    def write(folder):
        path = folder / "rank0.json"
        path.write_bytes(content)
        return path

    return write


def set_in_event(**keys):
    return lambda data: data["traceEvents"][3].update(keys)


def zipped(content, name="rank0.json.gz"):
    def write(folder):
        (folder / name).write_bytes(content)
        return folder / name

    return write


def a_step_less(data):
    data["traceEvents"] = [event for event in data["traceEvents"] if event["name"] != "ProfilerStep#12"]


def no_steps(data):
    data["traceEvents"] = [event for event in data["traceEvents"] if "ProfilerStep" not in event["name"]]


WHOLE = json.dumps(training(0).data()).encode()
REFUSED = {
    "truncated": (written(WHOLE[: len(WHOLE) // 2]), "not a JSON file"),
    "truncated-zip": (zipped(gzip.compress(WHOLE)[:-40]), "cannot be read"),
    "no-zip": (zipped(WHOLE), "cannot be read"),
    "nested": (written(b"[" * 200_000), "not a JSON file"),
    "list": (written(b"[]"), "not a trace of torch.profiler"),
    "no-steps": (changed(no_steps), "a trace without steps"),
    "fewer-steps": (changed(a_step_less), "9 to 11 (3)"),
    "category": (changed(set_in_event(cat="hpu_op")), "cat = 'hpu_op': unknown event"),
    "phase": (changed(set_in_event(ph="?")), "unknown event"),
    "no-event": (changed(lambda data: data["traceEvents"].insert(3, 7)), "traceEvents[3]: unknown event: 7"),
    "time": (changed(set_in_event(ts="soon")), "ts = 'soon'"),
    "nan": (changed(set_in_event(ts=float("nan"))), "ts = nan"),
    "huge": (changed(set_in_event(dur=10**400)), "must be a finite number"),
    "negative": (changed(set_in_event(dur=-1)), "must not be negative"),
    "no-duration": (changed(lambda data: data["traceEvents"][3].pop("dur")), "dur = None: must be a finite number"),
    "args": (changed(set_in_event(args=[])), "args that are an object"),
    "rank": (changed(lambda data: data["distributedInfo"].update(rank="0")), "distributedInfo.rank = '0'"),
    "same-rank": (changed(lambda data: data["distributedInfo"].update(rank=1)), "rank 1 again"),
    "ranks": (changed(lambda data: data["distributedInfo"].update(world_size=4)), "of a job of 4 ranks"),
    "missing": (lambda folder: folder / "none.json", "no such file"),
    "folder": (lambda folder: folder, "a folder; name its files"),
    "old-torch": (changed(set_in_event(cat="Operator")), "cat = 'Operator': a category of PyTorch before 2023"),
    "nsight": (zipped(b"SQLite format 3\0" + bytes(range(256)), "report1.sqlite"), "as Nsight Systems exports it"),
    "nsight-report": (zipped(bytes(range(256)), "report1.nsys-rep"), "a report of Nsight Systems; record"),
    "chakra": (zipped(bytes(range(256)), "chakra.0.et"), "an execution trace (Chakra); record"),
    "execution-trace": (written(b'{"schema": "1.1.1-chakra.0.0.4", "nodes": []}'), "an execution trace (Execution"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_trace_is_refused_in_one_line_and_nothing_is_written(case, tmp_path):
    write, said = REFUSED[case]
    other = training(1).write(tmp_path)
    out = tmp_path / "out" / "measured.json"
    ended = commands.run("analysis", "ingest", write(tmp_path), other, *OPTIONS, "--out", out)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert said in ended.stderr
    assert not out.parent.exists()


def test_a_large_trace_is_refused_also_if_it_is_small_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto, "MOST_BYTES", 10**6)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 10**7))
    with pytest.raises(UserError, match="larger than 1 MB uncompressed"):
        kineto.read_document(path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "cluster.backend=gloo"), "collectives of nccl"),
        (("--set", "plan.method=single"), "a job of 2 ranks; "),
        (("--out", "measured.csv"), "must end in .json"),
    ],
)
def test_another_scenario_than_the_jobs_is_refused(options, said, tmp_path):
    out = tmp_path / "measured.json"
    ended = commands.run("analysis", "ingest", *two_ranks(tmp_path), *OPTIONS, "--out", out, *options)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert not out.exists()


def test_a_rank_without_a_trace_is_named(tmp_path):
    with pytest.raises(UserError, match="no trace of rank 1"):
        ingest([training(0).write(tmp_path)], LOADED)
