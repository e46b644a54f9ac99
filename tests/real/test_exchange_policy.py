"""Exchanges by point-to-point messages or by the backend's collectives: what each moves, holds and takes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_runs import ADAMW64, SGD, assert_collectives, predicted, quick, run_cases, run_module, scenario_file, selected
from real_runs import star as star_toml
from strategies import communication_time_s, loaded_of, scenario_of, star

from gssim import collectives
from gssim.cluster.cluster import BackendCost
from gssim.collectives import Communication
from gssim.errors import UserError
from gssim.plan import Plan, resolve
from gssim.program import lower
from gssim.result import Collective
from gssim.scenario import Scenario
from gssim.simulation import simulate

WAYS = ("point-to-point", "backend")


def trained(method: str, exchange: str | None, *, ranks: int = 2, backend: str = "gloo", **plan: Any) -> Scenario:
    return scenario_of(star(ranks, backend=backend), {"method": method, "exchange": exchange, **plan}, optimizer="sgd")


# The policy ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "backend", "exchange"),
    [
        ("zero2", "gloo", "point-to-point"),
        ("zero3", "gloo", "point-to-point"),
        ("zero3", "nccl", "backend"),
        ("gs", "gloo", "point-to-point"),
        ("gs", "nccl", "point-to-point"),
        ("ddp", "gloo", "backend"),
        ("zero1", "gloo", "backend"),
        ("single", "gloo", "backend"),
    ],
)
def test_what_a_plan_does_not_say_follows_from_method_and_backend(method: str, backend: str, exchange: str):
    assert resolve(Plan(method=method), devices=2, backend=backend).exchange == exchange
    assert resolve(Plan(method=method, exchange="backend"), devices=2, backend=backend).exchange == "backend"


@pytest.mark.parametrize("method", ["ddp", "zero1"])
def test_messages_in_place_of_what_is_always_the_backends_are_refused(method: str):
    with pytest.raises(
        UserError, match=rf": plan.exchange = 'point-to-point': method '{method}' has no exchange of its"
    ):
        trained(method, "point-to-point")
    assert trained(method, "backend").policies.exchange == "backend"


def test_rings_of_messages_on_nccl_are_refused():
    with pytest.raises(UserError, match="nccl's own collectives are rings already; allowed with nccl: 'backend'"):
        trained("zero3", "point-to-point", backend="nccl")


@pytest.mark.parametrize(("method", "before"), [("zero2", "backend"), ("gs", "point-to-point")])
def test_plans_that_say_what_was_done_before_there_was_a_choice_keep_their_identity(method: str, before: str):
    usual = trained(method, None, backend="nccl")  # where nobody needs to say it
    assert trained(method, before, backend="nccl").scenario_id == usual.scenario_id
    assert len({trained(method, exchange).scenario_id for exchange in (None, *WAYS)}) == 2


# What happens --------------------------------------------------------------------------------------------------------


def entries(scenario: Scenario) -> tuple[Collective, ...]:
    return simulate(loaded_of(scenario)).result.collectives


@pytest.mark.parametrize("method", ["zero2", "zero3"])
def test_the_same_collectives_happen_whatever_carries_them(method: str):
    first, second = (entries(trained(method, exchange, ranks=4)) for exchange in WAYS)
    assert first == second


def test_the_backend_publishes_a_bucket_by_a_broadcast_of_every_part():
    shards = {"shards": (0.75, 0.25, 0.0, 0.0)}
    point_to_point, by_backend = (entries(trained("gs", each, ranks=4, shares=shards)) for each in WAYS)
    assert [(e.kind, e.bytes, e.count) for e in point_to_point] == [("all-gather-v", 672, 1), ("all-to-all-v", 2016, 1)]
    assert [(e.kind, e.bytes, e.count) for e in by_backend] == [
        ("all-to-all-v", 2016, 1),
        ("broadcast", 168, 1),
        ("broadcast", 504, 1),  # and nothing of ranks that own nothing
    ]


@given(st.integers(2, 9), st.floats(1, 1e9), st.floats(0, 1e-3), st.sampled_from(["all-gather", "reduce-scatter"]))
def test_a_ring_of_messages_carries_each_part_once_round(ranks: int, size: float, latency_s: float, kind: str):
    """A notice, and (n-1) (latency + size / n / bandwidth), as the uneven form with equal parts.

    Of a reduce-scatter, half of a large part hides the other's latency.
    """
    cluster = star(ranks, bandwidth=1e8, latency_s=latency_s)
    even = Communication(kind, range(ranks), size, carried_as=f"{kind}-v")
    parts = Communication(f"{kind}-v", range(ranks), size, part_bytes=(size / ranks,) * ranks)
    path_s, part_s = 2 * latency_s, size / ranks / 1e8
    hidden_s = part_s / 2 if kind == "reduce-scatter" and size / ranks > 2**20 else 0.0
    later_s = (ranks - 2) * max(0.0, path_s - hidden_s)
    expected = pytest.approx(2 * path_s + later_s + (ranks - 1) * part_s, rel=1e-6)
    assert communication_time_s(cluster, even) == expected
    assert communication_time_s(cluster, parts) == expected


def test_gloos_own_reduce_scatter_takes_twice_as_long_on_the_wire():
    cluster = star(4, bandwidth=1e8, latency_s=0.0)
    stock = Communication("reduce-scatter", range(4), 1e6)
    ring = replace(stock, carried_as="reduce-scatter-v")
    assert communication_time_s(cluster, stock) == pytest.approx(2 * communication_time_s(cluster, ring))


def test_each_way_has_its_own_costs():
    cost = BackendCost(
        overhead_s={"reduce-scatter": 1.0, "reduce-scatter-v": 2.0},
        processor_byte_s={"reduce-scatter": 1.5e-6, "reduce-scatter-v": 2.5e-6},
        source="test",
    )
    cluster = replace(star(2, bandwidth=1e6, latency_s=0.0), backend_cost=cost)
    stock = Communication("reduce-scatter", range(2), 1e6)
    assert communication_time_s(cluster, stock) == pytest.approx(1 + 3)
    assert communication_time_s(cluster, replace(stock, carried_as="reduce-scatter-v")) == pytest.approx(2 + 5 / 2)


@pytest.mark.parametrize(("ranks", "part"), [(2, 0), (3, 100), (4, 75)])
def test_a_ring_takes_a_buffer_of_one_part_where_it_passes_on_what_it_adds_up(ranks: int, part: int):
    reduce = Communication("reduce-scatter", range(ranks), 300, carried_as="reduce-scatter-v")
    gather = Communication("all-gather", range(ranks), 300, carried_as="all-gather-v")
    assert (collectives.staging_bytes(reduce, "gloo"), collectives.staging_bytes(gather, "gloo")) == (part, 0)
    assert collectives.staging_bytes(replace(reduce, carried_as=""), "gloo") == 300


@pytest.mark.parametrize("exchange", WAYS)
def test_fsdp2_on_gloo_blocks_in_either(exchange: str):
    assert {task.stream for task in lower(trained("zero3", exchange)).tasks[0]} == {"compute"}


@pytest.mark.parametrize("threshold", [None, 0.0])
def test_a_push_by_the_backend_leaves_in_memory_what_it_found(threshold: float | None):
    program = lower(trained("gs", "backend", ranks=4, push={"threshold": threshold}))
    for tasks in program.tasks:
        left: dict[str, float] = {}
        for task in tasks:
            for category, size in task.need.kept:
                left[category] = left.get(category, 0.0) + size
        assert {category: size for category, size in left.items() if abs(size) > 1e-6} == {}


# Real ranks ----------------------------------------------------------------------------------------------------------

TOLERANCE = {"sgd": 1e-5, "adamw": 1e-9}


def cases_for(ranks: int) -> dict[str, dict[str, Any]]:
    """Few samples: the peak is inside a collective; with more, in the activations. More cases: test_real_methods."""
    few = ["workload.sequence_length=24", f"workload.global_batch_size={ranks}"]
    more = ["workload.sequence_length=24", "workload.global_batch_size=12"]
    batch, shards = {2: ([0.75, 0.25], [0.7, 0.3]), 3: ([0.5, 0.25, 0.25], [0.6, 0.4, 0.0])}[ranks]
    pushed = ["plan.method=gs", "plan.exchange=backend", f"plan.shares.batch={batch}", f"plan.shares.shards={shards}"]
    found = {
        "zero3 point-to-point sgd": [*few, *SGD, "plan.method=zero3"],
        "gs backend coo adamw": [*more, *ADAMW64, *pushed, "plan.push.threshold=0", "plan.push.encoding=coo"],
    }
    if ranks == 2:
        found["zero2 backend sgd"] = [*few, *SGD, "plan.method=zero2", "plan.exchange=backend"]
        found["zero3 backend adamw"] = [*more, *ADAMW64, "plan.method=zero3", "plan.exchange=backend"]
        found["gs backend sgd"] = [*few, *SGD, "plan.method=gs", "plan.exchange=backend"]
    scenario = scenario_file("small-demo.toml")
    return {name: {"scenario": scenario, "overrides": [star_toml(ranks), *each]} for name, each in found.items()}


@pytest.fixture(scope="module")
def shown(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, str], tuple[dict, dict]]:
    """Run the selected cases of two and of three ranks; return (case, what it showed)."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    wanted = selected(request, {pair: {} for pair in PAIRS})
    found = {}
    for ranks in (2, 3):
        cases = {name: case for name, case in cases_for(ranks).items() if (ranks, name) in wanted}
        if not cases:
            continue
        results = run_cases(tmp_path_factory.mktemp(f"ranks{ranks}"), cases, ranks=ranks)
        found |= {(ranks, name): (cases[name], results[name]) for name in cases}
    return found


PAIRS = [(ranks, name) for ranks in (2, 3) for name in cases_for(ranks)]
FEW = ("zero3 point-to-point sgd", "zero2 backend sgd", "gs backend coo adamw")
"""Cases of two ranks that are not slow: rings of messages, and the backend's collectives of shards and of pushes."""
NAMES = quick(PAIRS, [(2, name) for name in FEW])
Shown = dict[tuple[int, str], tuple[dict, dict]]


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_training_equals_that_of_one_device_whatever_carries_it(shown: Shown, name: tuple[int, str]) -> None:
    _, found = shown[name]
    assert found["largest_parameter"] > 0.05
    assert found["difference"] <= TOLERANCE[name[1].split()[-1]] * found["largest_parameter"]
    assert found["replicas_equal"]


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_the_predicted_collectives_are_seen(shown: Shown, name: tuple[int, str]) -> None:
    case, found = shown[name]
    assert_collectives(case, found)


@pytest.mark.real
@pytest.mark.parametrize("name", [each for each in NAMES if "coo" in each.values[0][1]], ids=str)
def test_what_the_backend_carries_of_a_push_is_counted_as_its_payload(shown: Shown, name: tuple[int, str]) -> None:
    case, found = shown[name]
    payloads = sum(entry.payload_bytes for entry in predicted(case).collectives if entry.payload_bytes is not None)
    assert payloads > 0
    assert sum(each for each in found["payloads"] if each is not None) == payloads


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES, ids=str)
def test_the_predicted_peak_is_counted(shown: Shown, name: tuple[int, str]) -> None:
    case, found = shown[name]
    peaks = {rank: entry.peak_allocated_bytes for entry in predicted(case).ranks for rank in entry.ranks}
    assert [peaks[rank] for rank in range(len(peaks))] == pytest.approx(found["peaks"], rel=0.01)


RING = 4
"""Ranks: what is passed on is added to more than once."""


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return how rings of messages compare with torch's collectives."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    return run_module("exchange_ranks", [], tmp_path_factory.mktemp("rings"), ranks=RING)


@pytest.mark.real
def test_rings_of_messages_do_what_torchs_collectives_do(rings: dict[str, Any]) -> None:
    differences = rings["differences"]
    assert len(differences) > 20
    assert {name: found for name, found in differences.items() if found > 2e-6} == {}
    assert [found for name, found in differences.items() if name.startswith("all")] == [0.0] * 16


@pytest.mark.real
def test_rings_of_messages_take_the_predicted_buffers(rings: dict[str, Any]) -> None:
    if rings["taken"] is None:
        pytest.skip("nothing here compiles the counting allocator")
    whole = 4 * 300_000 * RING
    expected = {"reduce-scatter": whole / RING, "all-gather": 0}
    for kind, taken in expected.items():
        communication = Communication(kind, range(RING), whole, carried_as=f"{kind}-v")
        assert taken == collectives.staging_bytes(communication, "gloo")
    assert rings["taken"] == expected


@pytest.mark.real
def test_rings_of_messages_are_seen_as_the_collectives_that_they_are(rings: dict[str, Any]) -> None:
    group, size = list(range(RING)), 16 * RING
    expected = [["all-gather", group, size, 1], ["all-gather", group, size // 4 * 6, 1]]
    expected += [["reduce-scatter", group, size, 1], ["reduce-scatter", group, size // 4 * 5, 1]]
    assert sorted(rings["seen"]) == expected
