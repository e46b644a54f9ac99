"""Caches that points of a sweep share change no prediction, in any order of points."""

import gc
import os
import re
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch
from weakref import ref

import pytest
import tomli_w
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from points import random_point

from gssim.engine import Machine
from gssim.engine.task_groups import task_groups_of
from gssim.errors import UserError
from gssim.execution.cache import Same, Shared
from gssim.program import Lowering, Steps
from gssim.scenario import check, load_scenario
from gssim.scenario.sweep import load_sweep, points_of
from gssim.simulation import simulate
from gssim.sweeps.predictions import predicted

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


def answer(path: Path, overrides: list[str], shared: Shared | None) -> str:
    """Return a point's Result as JSON, or why it has none."""
    try:
        return simulate(load_scenario(path, overrides, shared=shared), shared=shared).result.to_json()
    except UserError as error:
        return f"refused: {error}"


def of(name: str, *overrides: str) -> tuple[Path, tuple[str, ...]]:
    return SCENARIOS / f"{name}.toml", overrides


SMALL = ("workload.model=models/gpt-byte-150k.toml", "workload.sequence_length=64")
SHORT = ("run.steps=2", "run.warmup_steps=1", *SMALL)
FEW = ("run.steps=6",)
POINTS = [
    *(of("lab-unequal-links", *SHORT, f"plan.method={m}") for m in ("ddp", "zero1", "zero2", "zero3", "gs", "gs_z3")),
    *(of("lab-unequal-links", *SHORT, "plan.method=gs", f"plan.push.threshold={t}") for t in (1e-4, 1e-3, "inf")),
    of("lab-unequal-links", *SHORT, "plan.method=gs", "plan.push.threshold=1e-3", "plan.push.error_feedback=true"),
    of("lab-unequal-links", *SHORT, "plan.method=gs", "plan.push.threshold=1e-3", "plan.publish.threshold=1e-3"),
    of("gpt2-unequal-gpus", *FEW),
    of("gpt2-unequal-gpus", "plan.method=zero3"),
    of("gpt2-unequal-gpus", "plan.method=zero3", "plan.recompute=full", "workload.precision=bf16"),
    of("gpt2-unequal-gpus", 'network.faults=[{between=["v100-0", "ethernet"], bandwidth_ratio=0.5}]'),
    of("gpt2-unequal-gpus", 'network.faults=[{between=["v100-0", "ethernet"], bandwidth_ratio=0.25}]'),
    of("gpt2-unequal-gpus", "plan.shares.shards=cost"),
    of("gpt2-unequal-gpus", *FEW, "plan.shares.batch=even", "plan.shares.replan=true"),
    of("gpt2-unequal-gpus", "plan.method=zero2", "workload.global_batch_size=31"),
    of("gpt2-unequal-gpus", "plan.method=pipeline", "plan.micro_batches=4"),
]


@pytest.fixture(scope="module")
def alone() -> dict[int, str]:
    """Answers of points that were asked for with nothing before them."""
    return {}


@settings(max_examples=examples(4), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(0, len(POINTS) - 1), min_size=2, max_size=6), most=st.sampled_from([1, 64]))
def test_what_points_share_changes_no_answer(order, most, alone):
    shared = Shared(most)
    for i in order:
        path, overrides = POINTS[i]
        if i not in alone:
            alone[i] = answer(path, list(overrides), None)
        assert answer(path, list(overrides), shared) == alone[i]


@pytest.mark.parametrize(
    ("seed", "sent"),
    [(109, "push"), (252, "push"), (445, "push"), (10043, "push"), (20019, "push"), (20019, "publish")],
)
def test_thresholds_of_one_plan_share_its_steps_and_keep_their_answers(tmp_path, seed, sent):
    """All methods that push, each kind of threshold, and thresholds of publications."""
    file, shared = tmp_path / "point.toml", Shared()
    file.write_text(tomli_w.dumps(random_point(seed, most_devices=8)))
    asked = [[f"plan.{sent}.threshold={each}"] for each in (0.3, 0.05, 1e-3)]
    with patch.object(Steps, "__init__", autospec=True, side_effect=Steps.__init__) as made:
        together = [answer(file, each, shared) for each in asked]
        assert made.call_count == 1
    assert together == [answer(file, each, None) for each in asked]
    assert len(set(together)) == len(asked)


@pytest.mark.parametrize("method", ["gs", "gs_z3", "gs_hier"])
def test_a_step_under_another_threshold_is_the_one_that_is_lowered_anew(method):
    """Of 32 devices of three kinds: what ranks at a place have in common, and where gathers go, is lowered once."""
    counts = [f"cluster.topology.servers.{kind}.count={count}" for kind, count in enumerate((2, 1, 1))]
    workload = [
        "workload.global_batch_size=1024",
        f"workload.gradients={SCENARIOS / 'gradients/gpt-byte-1m-1024.json'}",
    ]
    changes = [f"cluster={SCENARIOS / 'clusters/unequal-1024.toml'}", *counts, *workload, f"plan.method={method}"]
    changes += ["run.steps=8", "run.warmup_steps=4"]
    first, other = (
        load_scenario(SCENARIOS / "demo.toml", [*changes, f"plan.push.threshold={each}"]) for each in (1e-4, 1e-3)
    )
    steps = Steps(first.scenario, first.gradients)
    assert len(set(steps.program(5).role_of)) > 3
    shared = steps.under(other.scenario, other.gradients).program(5)
    anew = Steps(other.scenario, other.gradients).program(5)
    assert shared.tasks == anew.tasks
    assert (shared.role_of, shared.persistent) == (anew.role_of, anew.persistent)
    assert dict(shared.communications) == dict(anew.communications)
    assert shared.tasks != steps.program(5).tasks
    cache = Shared()
    shapes, others = ([group.shape for group in task_groups_of(each, cache)] for each in (steps.program(5), anew))
    assert [*map(id, shapes)] == [*map(id, others)]  # what their walks derive from the order of tasks is found once


def test_a_file_that_has_changed_is_read_again(tmp_path):
    file, shared = tmp_path / "scenario.toml", Shared()
    text = (SCENARIOS / "gpt2-unequal-gpus.toml").read_text()
    text = text.replace('= "clusters/', f'= "{SCENARIOS}/clusters/').replace('= "models/', f'= "{SCENARIOS}/models/')
    file.write_text(text)
    assert load_scenario(file, shared=shared).scenario.run.steps == 30
    file.write_text(text.replace("steps = 30", "steps = 31000"))
    assert load_scenario(file, shared=shared).scenario.run.steps == 31000


RATE = "cluster.topology.link.bandwidth_bytes_per_s"
OF_SWITCH = (
    'cluster={name="gpus", backend="nccl", nccl="volta", source="made", device_types={gpu="t4"}, topology={'
    'kind="switch", devices=[{device="gpu", count=4}], link={'
    'bandwidth_bytes_per_s="1 Gb/s", latency_s="10 us", source="made"}}}'
)
OF_FILE = "cluster=clusters/t4-hosts.toml"


@pytest.mark.parametrize(
    ("cluster", "plan", "is_checked_again"),
    [
        (OF_FILE, (), False),
        (OF_FILE, ("plan.push.threshold=1e-3",), False),
        (OF_FILE, ("plan.shares.shards=cost",), True),
        (OF_FILE, ('network.faults=[{between=["device0", "switch"], bandwidth_ratio=0.5}]',), True),
        (OF_SWITCH, (), True),
    ],
)
def test_points_of_other_rates_share_all_but_their_cluster(cluster, plan, is_checked_again):
    """Their checks too, unless shards are sized by costs, or the network has conditions."""
    file, shared = SCENARIOS / "demo.toml", Shared()
    base = [cluster, "cluster.topology.devices.0.count=4", *plan] if cluster == OF_FILE else [cluster, *plan]
    asked = [[*base, f'{RATE}="{rate} Gb/s"', f'name="of-{rate}"'] for rate in (1, 7, 3)]
    alone = [load_scenario(file, each) for each in asked]
    with patch("gssim.scenario.loading.check", side_effect=check) as checked:
        together = [load_scenario(file, each, shared=shared) for each in asked]
        assert checked.call_count == (3 if is_checked_again else 1)
    for one, same, overrides in zip(alone, together, asked, strict=True):
        assert same.scenario.name == one.scenario.name
        assert same.scenario.identity(shared) == one.scenario.scenario_id
        assert same.calibration(shared) == one.calibration_id
        assert same.scenario.resolved() == one.scenario.resolved()
        assert same.scenario.source.overrides == tuple(overrides)
        assert same.scenario.with_({"run.seed": 5}).resolved() == one.scenario.with_({"run.seed": 5}).resolved()
    assert len({each.calibration_id for each in alone}) == len(asked)


def test_a_bad_rate_after_a_good_one_is_refused_as_if_it_were_alone():
    file, shared = SCENARIOS / "demo.toml", Shared()
    load_scenario(file, [OF_FILE, f'{RATE}="1 Gb/s"'], shared=shared)
    refusals = []
    for cache in (shared, Shared()):
        with pytest.raises(UserError) as refused:
            load_scenario(file, [OF_FILE, f'{RATE}="1 GB"'], shared=cache)
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]


def test_files_that_have_changed_are_read_again_for_points_of_other_rates(tmp_path):
    shared = Shared()
    for folder in ("clusters", "models", "gradients"):
        (tmp_path / folder).symlink_to(SCENARIOS / folder)
    text = (SCENARIOS / "demo.toml").read_text()
    (tmp_path / "demo.toml").write_text(text)
    cluster = tmp_path / "own.toml"
    written = (SCENARIOS / "clusters" / "t4-hosts.toml").read_text()
    cluster.write_text(written)
    asked = [f"cluster={cluster}", f"{RATE}=1e9"]
    first = load_scenario(tmp_path / "demo.toml", asked, shared=shared).scenario
    cluster.write_text(written.replace("count = 8", "count = 16"))
    later = load_scenario(tmp_path / "demo.toml", [asked[0], f"{RATE}=2e9"], shared=shared).scenario
    assert (first.ranks, later.ranks) == (8, 16)
    (tmp_path / "demo.toml").write_text(text.replace("seed = 0", "seed = 770"))
    again = load_scenario(tmp_path / "demo.toml", [asked[0], f"{RATE}=3e9"], shared=shared).scenario
    assert again.run.seed == 770


def test_a_file_of_device_types_that_has_changed_is_read_again(tmp_path):
    shared, types, cluster = Shared(), tmp_path / "types.toml", tmp_path / "own.toml"
    written = (SCENARIOS / "clusters" / "t4-hosts.toml").read_text()
    cluster.write_text(written.replace('device_types.t4 = "t4"', 'device_types = "types.toml"'))
    types.write_text('t4 = { preset = "t4", source = "made" }')
    asked = [f"cluster={cluster}", f"{RATE}=1e9"]
    load_scenario(SCENARIOS / "demo.toml", asked, shared=shared)
    types.write_text('t4 = { preset = "t4", source = "made", price_usd_per_h = 9 }')
    later = load_scenario(SCENARIOS / "demo.toml", asked, shared=shared).scenario
    assert later.cluster.device_types["t4"].price_usd_per_h == 9


def test_a_file_that_appears_where_one_was_looked_for_first_is_read(tmp_path, monkeypatch):
    """Overrides name files in the working directory or beside the scenario; a file precedes a shipped model's name."""
    shared = Shared()
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder in (beside, working):
        folder.mkdir()
    monkeypatch.chdir(working)
    written = (SCENARIOS / "clusters" / "t4-hosts.toml").read_text()
    (beside / "own.toml").write_text(written)
    text = (SCENARIOS / "lab-tree.toml").read_text().replace("models/gpt-byte-1m.toml", "gpt-byte-1m")
    (beside / "point.toml").write_text(text)

    def loaded(rate):
        return load_scenario(beside / "point.toml", ["cluster=own.toml", f"{RATE}={rate}"], shared=shared).scenario

    assert [loaded(rate).ranks for rate in (1e9, 2e9)] == [8, 8]
    (working / "own.toml").write_text(written.replace("count = 8", "count = 16"))
    assert [loaded(rate).ranks for rate in (1e9, 2e9)] == [16, 16]
    assert loaded(1e9).workload.model.name != "other"
    model = (SCENARIOS / "models" / "gpt-byte-1m.toml").read_text()
    (beside / "gpt-byte-1m").write_text(re.sub(r'(?m)^name = "[^"]*"', 'name = "other"', model, count=1))
    assert [loaded(rate).workload.model.name for rate in (1e9, 3e9)] == ["other", "other"]


def test_a_relative_path_is_another_file_in_another_working_directory(tmp_path, monkeypatch):
    """Of the same size, and written at the same time."""
    shared, steps = Shared(), []
    text = (SCENARIOS / "demo.toml").read_text()
    text = text.replace('= "clusters/', f'= "{SCENARIOS}/clusters/').replace('= "models/', f'= "{SCENARIOS}/models/')
    for count in (11, 12):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "point.toml").write_text(re.sub(r"(?m)^steps = \d+", f"steps = {count}", text))
        os.utime(folder / "point.toml", ns=(10**18, 10**18))
        monkeypatch.chdir(folder)
        steps.append(load_scenario(Path("point.toml"), shared=shared, gradients_needed=False).scenario.run.steps)
    assert steps == [11, 12]


def test_an_override_stays_with_its_own_point():
    shared = Shared()
    path = SCENARIOS / "gpt2-unequal-gpus.toml"
    assert load_scenario(path, ["plan.push.encoding=coo"], shared=shared).scenario.plan.push.encoding == "coo"
    assert load_scenario(path, shared=shared).scenario.plan.push.encoding == "auto"


def test_files_are_read_once():
    shared = Shared()
    first, second = (load_scenario(SCENARIOS / "demo.toml", shared=shared) for _ in range(2))
    assert first.scenario.cluster is second.scenario.cluster
    assert first.scenario.workload.model is second.scenario.workload.model


def test_what_was_not_asked_for_longest_goes_first():
    shared, made = Shared(2), []
    for n in (1, 2, 1, 3, 1, 2):
        assert shared.once("n", n, lambda n=n: made.append(n) or n) == n
    assert made == [1, 2, 3, 2]


def test_what_failed_is_not_kept():
    shared = Shared()
    with pytest.raises(ZeroDivisionError):
        shared.once("ratio", 0, lambda: 1 / 0)
    assert shared.once("ratio", 0, lambda: 1) == 1


def test_kinds_do_not_mix():
    shared = Shared()
    assert [shared.once(kind, 1, lambda kind=kind: kind) for kind in ("a", "b")] == ["a", "b"]


def test_equal_values_are_not_the_same():
    first, second = (1, "x"), tuple([1, "x"])
    assert Same(first) != Same(second)
    assert {Same(first): 1}[Same(first)] == 1


def test_a_point_has_the_same_digits_whatever_point_of_other_rates_was_predicted_before():
    """Times on idle links are cached for all rates of the same proportions; they were rounded at those of the first."""
    file = SCENARIOS / "sweeps" / "thresholds-by-topology.toml"
    begin = "hosts--gs--switch--count-8--bandwidth_bytes_per_s-"
    points = {point.name.removeprefix(begin): point for point in points_of(load_sweep(file), file=file)}
    first, later = (points[f"{rate}--threshold-0.0001"] for rate in ("51053000.0", "18347500.0"))
    shared = Shared()
    predicted(first, shared)
    assert predicted(later, shared).to_json() == predicted(later, Shared()).to_json()


@pytest.mark.parametrize(
    "asked",
    [("demo", "plan.method=gs"), ("gpt2-muon",), ("gpt3-1024-3d", "plan.micro_batches=8")],
    ids=["pushes", "vectorised", "chunk by chunk"],
)
def test_what_a_simulation_made_is_freed_with_its_result(asked):
    """Programs, and the machine with all recorded times, were in cycles, which the garbage collector alone frees."""
    name, *changes = asked
    loaded = load_scenario(SCENARIOS / f"{name}.toml", changes)
    made = []

    def noting(cls):
        begin = cls.__init__

        def noted(self, *given, **named):
            begin(self, *given, **named)
            made.append(ref(self))

        return patch.object(cls, "__init__", noted)

    gc.disable()
    try:
        with ExitStack() as stack:
            for cls in (Lowering, Machine):
                stack.enter_context(noting(cls))
            simulate(loaded)
        assert len(made) > 1
        assert {each() for each in made} == {None}
    finally:
        gc.enable()
