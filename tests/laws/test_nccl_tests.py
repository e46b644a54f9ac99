"""Logs of nccl-tests: NCCL's constants come back from times that were made with them; other files are refused."""

import tomllib
from dataclasses import replace

import pytest

from gssim.cluster import GENERATIONS, NcclTuning
from gssim.collectives.nccl import Group, times
from gssim.errors import UserError
from gssim.interop import cluster_of
from gssim.interop.nccl_tests import nccl_table
from gssim.scenario import load_cluster

HEAD = """# nThread 1 nGpus 8 minBytes 1024 maxBytes 1073741824 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{ranks}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
MEASURED = {"latency_s": 3e-5, "simple_hop_ratio": 0.35, "pipeline_latency_s": 2e-6, "bandwidth_ratio": 0.7}
TRUE = replace(GENERATIONS["ampere"], **MEASURED)
SIZES = [2**k for k in range(10, 31)]


def log(group: Group, tuning: NcclTuning) -> str:
    """Return a log of nccl-tests in which all-reduces take the times of NCCL's model."""
    ranks = "\n".join(
        f"#  Rank {rank:2} Group  0 Pid 4711{rank} on node0 device {rank} [0x1b] NVIDIA A100"
        for rank in range(group.ranks)
    )
    rows = []
    for size in SIZES:
        us = times(tuning, "all-reduce", float(size), group).time_s * 1e6
        rows.append(f"{size:12} {size // 4:13} float sum -1 {us:10.4f} 1.00 1.75 0 {us * 3:10.4f} 1.00 1.75 0")
    return HEAD.format(ranks=ranks) + "\n".join(rows) + "\n# Out of bounds values : 0 OK\n"


@pytest.mark.parametrize("ranks", [4, 8])
def test_constants_come_back_from_the_times_of_a_log(tmp_path, ranks):
    group = Group(ranks=ranks, bandwidth_bytes_per_s=300e9)
    path = tmp_path / "all_reduce.log"
    path.write_text(log(group, TRUE))
    made = cluster_of([], gpus=["a100"], nccl_tests=path)
    written = tomllib.loads(made.text)["nccl"]
    assert written["generation"] == "ampere"
    assert written["bandwidth_ratio"] == pytest.approx(TRUE.bandwidth_ratio, rel=0.02)
    assert f"21 all-reduces of {ranks} ranks in all_reduce.log: error 0." in made.fitted[0]
    (tmp_path / "made.toml").write_text(made.text)
    tuning = load_cluster(tmp_path / "made.toml").nccl
    for size in SIZES:
        expected_s = times(TRUE, "all-reduce", float(size), group).time_s
        assert times(tuning, "all-reduce", float(size), group).time_s == pytest.approx(expected_s, rel=0.03)


def test_a_csv_file_gives_what_its_log_gives(tmp_path):
    group = Group(ranks=8, bandwidth_bytes_per_s=300e9)
    (tmp_path / "a.log").write_text(log(group, TRUE))
    rows = nccl_table(tmp_path / "a.log").rows
    for header, factor in (("size_bytes,time_us", 1e6), ("size(B),time(ns)", 1e9), ("Size,algbw,time_s", 1.0)):
        middle = ",0" if "algbw" in header else ""
        text = "\n".join([header, *(f"{size:.0f}{middle},{seconds * factor!r}" for size, seconds in rows)])
        (tmp_path / "a.csv").write_text("# measured somewhere\n" + text + "\n")
        found = nccl_table(tmp_path / "a.csv")
        assert found.ranks is None
        assert [size for size, _ in found.rows] == [size for size, _ in rows]
        assert [seconds for _, seconds in found.rows] == pytest.approx([seconds for _, seconds in rows])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no log of nccl-tests"),
        ("size,bandwidth\n1,2\n", "columns 'size, bandwidth'"),
        ("size,time_us\n8,1\n16,2\n32,3\n", "3 sizes with a time: four constants need at least four"),
        ("size,time_us\n8,1\n16,fast\n", "line 3: '16,fast': size and time are numbers"),
        ("# by hand\n\nsize,time_us\n8,1\n16,fast\n", "line 5: '16,fast': size and time are numbers"),
        # they were left out without a word
        *(
            (f"size,time_us\n8,1\n16,2\n32,3\n64,4\n{row}\n", f"line 6: '{row}': sizes are from 0 to 2.60 bytes, times")
            for row in ("-5,3", "5,-3", "5,nan", "1e400,3", "5,1e13")
        ),
        (HEAD.format(ranks=""), "0 sizes with a time"),
        ("size_MB,time_us\n1,10\n2,20\n4,40\n8,80\n", "columns 'size_MB, time_us'"),
        ("size (KiB),time_us\n1,10\n2,20\n4,40\n8,80\n", "columns 'size .KiB., time_us'"),
        ("size_elements,time_us\n1,10\n2,20\n4,40\n8,80\n", "columns 'size_elements, time_us'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    path = tmp_path / "table"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        cluster_of([], gpus=["a100"], nccl_tests=path)


@pytest.mark.parametrize(
    ("reduction", "root", "bus"), [("none", -1, 0.75), ("sum", -1, 0.75), ("none", 0, 1.0), ("sum", 0, 1.0)]
)
def test_a_log_of_another_collective_is_refused(tmp_path, reduction, root, bus):
    rows = [f"{size} {size // 4} float {reduction} {root} {size / 1e4:.2f} 10.00 {10 * bus:.2f} 0" for size in SIZES]
    path = tmp_path / "a.log"
    path.write_text(HEAD.format(ranks="") + "\n".join(rows) + "\n")
    with pytest.raises(
        UserError, match=r"a\.log: is a log of another collective; a log of nccl-tests' all_reduce_perf"
    ):
        nccl_table(path)


def test_a_log_without_roots_has_its_times_in_the_same_column(tmp_path):
    # as old releases wrote it, where times of many microseconds have no decimals
    head = HEAD.format(ranks="").replace("    root", "").replace("#wrong", " error")
    sizes = [2**k for k in range(26, 32)]
    rows = [
        f"{size} {size // 4} float sum {size // 4096} 4.10 7.17 0e+00 {size // 2048} 2.05 3.58 0e+00" for size in sizes
    ]
    path = tmp_path / "old.log"
    path.write_text(head + "\n".join(rows) + "\n")
    assert nccl_table(path).rows == tuple((size, pytest.approx(size / 4096 * 1e-6)) for size in sizes)


def test_a_log_of_more_ranks_than_the_cluster_has_is_refused(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(log(Group(ranks=16, nodes=2, bandwidth_bytes_per_s=300e9, network_bytes_per_s=25e9), TRUE))
    with pytest.raises(UserError, match="16 ranks: the cluster has 8 devices; allowed: 2 to that"):
        cluster_of([], gpus=["a100"], nccl_tests=path)
