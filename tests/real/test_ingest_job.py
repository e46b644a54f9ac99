"""A user's own training under torch.profiler, ingested: its steps are those of a stop-watch, its collectives exact."""

import json
from pathlib import Path
from statistics import fmean, median

import commands
import forks
import pytest

from gssim.result import read_result

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "scenarios" / "demo.toml"
OPTIONS = ("--set", "plan.method=ddp")

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Return the folder of two ranks' traces, and of what a stop-watch and the process group saw."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("job")
    forks.launch("profiled_job", [str(folder)], ranks=2)
    return folder


@pytest.fixture(scope="module")
def ingested(job):
    out, step = job / "results" / "measured.json", job / "step.json"
    traces = sorted(job.glob("rank*.json.gz"))
    ended = commands.run(
        "analysis", "ingest", *traces, "--scenario", DEMO, *OPTIONS, "--out", out, "--trace", step, folder=job
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return read_result(out)


def test_the_steps_are_those_of_a_stop_watch(job, ingested):
    watched = [rank[1:] for rank in json.loads((job / "own.json").read_text())["passes_s"]]  # the first is left out
    times_s = [fmean(map(sum, step)) for step in zip(*watched, strict=True)]
    assert len(ingested.step_times_s) == len(times_s)
    assert ingested.step_time_s == pytest.approx(median(times_s), rel=0.02)
    phases_s = ingested.phases_s
    assert sum(phases_s.values()) == pytest.approx(ingested.step_time_s)
    typical = [passes for rank in watched for passes in sorted(rank, key=sum)[1:-1]]  # without the shortest and longest
    forward_s, backward_s, update_s = map(fmean, zip(*typical, strict=True))
    exchanges_s = phases_s["compression"] + phases_s["exposed_communication"]
    assert phases_s["forward"] == pytest.approx(forward_s, rel=0.1)
    assert phases_s["backward"] + exchanges_s == pytest.approx(backward_s, rel=0.1)
    assert phases_s["optimizer"] == pytest.approx(update_s, rel=0.1)
    assert ingested.phases_s["idle"] < 0.1 * ingested.step_time_s


def test_every_collective_is_the_one_that_the_process_group_saw(job, ingested):
    own = json.loads((job / "own.json").read_text())["collectives"]
    assert [
        [kind, list(group), size, count] for kind, group, size, count in (e.key for e in ingested.collectives)
    ] == own
    assert own


def test_it_compares_with_a_prediction_like_a_run_of_ours(job, ingested):
    results = job / "results"
    predicted = commands.run("gssim", "run", DEMO, *OPTIONS, "--out", results, "--trace", job / "predicted.json")
    assert predicted.returncode == 0, predicted.stderr
    compared = commands.run("analysis", "compare", results, "--out", job / "compared")
    assert compared.returncode == 0, compared.stderr
    assert "collectives equal in 1 of 1" in compared.stdout
    drawn = commands.run("analysis", "timeline", job / "predicted.json", job / "step.json", "--out", job / "step.png")
    assert drawn.returncode == 0, drawn.stderr
