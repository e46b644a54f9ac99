"""Laws and closed forms: Gradient Sharding beside divided experts, whose owners are the ranks that hold the same."""

from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import pytest
from point_checks import assert_same_as_unfolded
from searching import assert_bounds_below_prediction
from strategies import exponential_statistics, exponential_tensor, loaded_of, scenario_of, star

from gssim.errors import UserError
from gssim.plan import splitting
from gssim.planner.bounds import Bounds
from gssim.program import Steps
from gssim.scenario import load_cluster, load_model
from gssim.simulation import simulate
from gssim.workload import unrolled
from gssim.workload.gradient_statistics import ChangeTrace, RankTrace, TensorTrace

FOLDER = Path(__file__).resolve().parents[2]
MIXTURE = load_model(FOLDER / "scenarios" / "models" / "mixture-byte-1m.toml")
VALUE_BYTES = 4
PARAMETERS = {
    name: prod(parameter.shape)
    for layer in unrolled(MIXTURE)
    for parameter, name in zip(layer.layer.parameters, layer.parameter_names, strict=True)
}
DENSE = sum(size for name, size in PARAMETERS.items() if ".experts." not in name)
EXPERTS = sum(PARAMETERS.values()) - DENSE
LEVELS = {"method": "gs_hier", "dp_replicate": 2, "dp_shard": 2}


def scenario(plan: dict, ranks: int = 4, **workload):
    asked = {"model": MIXTURE, "sequence_length": 32, "global_batch_size": 24} | workload
    return scenario_of(star(ranks), {"method": "gs"} | plan, **asked)


@cache  # whose digest a simulation makes once for each
def statistics(*rms_of_blocks: float):
    """Return statistics in which the elements of each part of an expert's tensor, of as many experts, are so large."""
    every = exponential_tensor(1e-3, 1e-3)
    parts = TensorTrace(blocks=tuple(exponential_tensor(rms, rms).blocks[0] for rms in rms_of_blocks))
    tensors = {name: parts if ".experts." in name else every for name in PARAMETERS}
    published = exponential_statistics().changes
    changes = dict.fromkeys(PARAMETERS, ChangeTrace(blocks=next(iter(published.values())).blocks))
    traces = (RankTrace(samples=4, tensors=tensors), RankTrace(samples=24, tensors=tensors))
    return exponential_statistics(traces=traces, changes=changes, model=MIXTURE.name)


def payloads_of(asked, *kinds: str, gradients=None) -> list[dict[tuple[int, ...], float]]:
    """Return the bytes of the collectives of each kind by group of ranks."""
    found: dict[str, dict[tuple[int, ...], float]] = {kind: {} for kind in kinds}
    for entry in simulate(loaded_of(asked, gradients)).result.collectives:
        if entry.kind in found:
            size = entry.bytes * entry.count if entry.payload_bytes is None else entry.payload_bytes
            of_kind, group = found[entry.kind], tuple(entry.group)
            of_kind[group] = of_kind.get(group, 0) + size
    return list(found.values())


def payloads(asked, kind: str, gradients=None) -> dict[tuple[int, ...], float]:
    """Return the bytes of the collectives of a kind by group of ranks."""
    return payloads_of(asked, kind, gradients=gradients)[0]


@pytest.mark.parametrize(("ranks", "ep"), [(4, 2), (4, 4), (8, 2), (6, 3)])
def test_gradients_of_experts_are_pushed_among_those_that_hold_the_same(ranks, ep):
    """Ranks push (n - 1) * N for N dense elements, and r ranks with the same experts (r - 1) * E / ep for E elements.

    Every element is also published once in the same group.
    """
    rows = payloads(scenario({"method": "ddp", "ep": ep}, ranks), "all-to-all-v")
    pushed, published = payloads_of(scenario({"ep": ep}, ranks), "all-to-all-v", "all-gather-v")
    pushed = {group: size - rows.get(group, 0) for group, size in pushed.items() if size != rows.get(group)}
    everyone, replicas = tuple(range(ranks)), ranks // ep
    assert pushed.pop(everyone) == (ranks - 1) * DENSE * VALUE_BYTES
    assert published.pop(everyone) == DENSE * VALUE_BYTES
    groups = {tuple(range(first, ranks, ep)) for first in range(ep)} if replicas > 1 else set()
    own = EXPERTS // ep * VALUE_BYTES
    assert pushed == dict.fromkeys(groups, (replicas - 1) * own)
    assert published == dict.fromkeys(groups, own)


@pytest.mark.parametrize(("nodes", "places", "ep"), [(2, 2, 2), (2, 2, 4), (2, 4, 2), (4, 2, 4), (3, 4, 6)])
def test_on_two_levels_gradients_of_experts_are_pushed_on_one_among_those_that_hold_the_same(nodes, places, ep):
    """Every node reduces all N dense elements; each device pushes its part to its peers in the other nodes."""
    plan, ranks = {"method": "gs_hier", "dp_replicate": nodes, "dp_shard": places, "ep": ep}, nodes * places
    batch = {"global_batch_size": 2 * ranks}
    rows = payloads(scenario({"method": "ddp", "ep": ep}, ranks, **batch), "all-to-all-v")
    asked = scenario(plan, ranks, **batch)
    reduced, pushed, published = payloads_of(asked, "reduce-scatter-v", "all-to-all-v", "all-gather-v")
    pushed = {group: size - rows.get(group, 0) for group, size in pushed.items() if size != rows.get(group)}
    inside = {tuple(range(first, first + places)) for first in range(0, ranks, places)}
    across = {tuple(range(place, ranks, places)) for place in range(places)}
    assert reduced == dict.fromkeys(inside, DENSE * VALUE_BYTES)
    replicas, own = ranks // ep, EXPERTS // ep * VALUE_BYTES
    groups = {tuple(range(first, ranks, ep)) for first in range(ep)} if replicas > 1 else set()
    for sent, of_dense, of_experts in (
        (pushed, (nodes - 1) * DENSE * VALUE_BYTES, (replicas - 1) * own),
        (published, DENSE * VALUE_BYTES + nodes * DENSE * VALUE_BYTES, own),
    ):
        assert set(sent) == groups | across | (inside if sent is published else set())
        assert sum(sent.values()) == pytest.approx(of_dense + ep * of_experts * (replicas > 1), abs=1)
        apart = groups - across
        assert {group: sent[group] for group in apart} == dict.fromkeys(apart, of_experts)


def test_a_bucket_that_is_reduced_beside_the_compute_is_pushed_before_experts_that_are_complete_later():
    """All ranks push in the order of buckets; a bucket of experts needs no reduction, and is pushed at once."""
    small = {"bucket_bytes": 50_000, "first_bucket_bytes": 1000}
    asked = replace(scenario({**LEVELS, "ep": 2, **small}), cluster=star(4, backend="nccl"))
    program = Steps(asked, unfolded=True).program(0)
    labels = [task.label for task in program.tasks[0]]
    pushes = [label for label in labels if label.startswith("push bucket")]
    assert pushes == sorted(pushes, key=lambda label: int(label.split()[2]))
    assert len(pushes) == len({*pushes}) > 4
    (low,) = Steps(asked)._lowerings
    for bucket in low.buckets:
        reduced = [label for label in labels if label.startswith(f"reduce-scatter bucket {bucket.index}")]
        assert bool(reduced) == (not bucket.of_experts)


@pytest.mark.parametrize(("ep", "shares"), [(2, (0.25,) * 4), (4, (0.25,) * 4), (2, (0.4, 0.1, 0.2, 0.3))])
def test_a_rank_updates_its_share_of_what_all_hold_and_of_its_experts(ep, shares):
    asked = scenario({"ep": ep, "shares": {"shards": shares}})
    result = simulate(loaded_of(asked)).result
    held = {rank: each.peak_by_category_bytes["optimizer"] for each in result.ranks for rank in each.ranks}
    for rank, share in enumerate(shares):
        of_experts = share / sum(shares[rank % ep :: ep]) * EXPERTS / ep
        elements = share * DENSE + of_experts
        assert held[rank] == pytest.approx(2 * VALUE_BYTES * elements, rel=1e-3)  # AdamW's, and counts of steps


def test_what_is_not_sent_is_kept_for_what_others_own():
    push = {"threshold": 1e-3, "error_feedback": True}
    program = Steps(scenario({"ep": 2, "push": push}), statistics(1e-3)).program(3)
    assert program.persistent[0]["residuals"] == VALUE_BYTES * (DENSE * 3 / 4 + EXPERTS / 2 / 2)
    alone = Steps(scenario({"ep": 4, "push": push}), statistics(1e-3)).program(3)
    assert alone.persistent[0]["residuals"] == VALUE_BYTES * DENSE * 3 / 4


def test_ranks_send_as_much_of_their_own_experts_as_these_reach_a_threshold():
    """Experts in the second half of each tensor have small gradients: of those the other ranks push less.

    A bitmap has a bit for every element that others own, and the values that are sent.
    """
    push = {"threshold": 2e-3, "error_feedback": False, "encoding": "bitmap"}
    asked, gradients = scenario({"ep": 2, "push": push}), statistics(4e-3, 5e-4)
    found = payloads(asked, "all-to-all-v", gradients)
    step = Steps(asked, gradients)
    densities = []
    for group in ((0, 2), (1, 3)):
        offered = EXPERTS // 2
        densities.append((found[group] - offered / 8) / (offered * VALUE_BYTES))
    assert densities[0] > 5 * densities[1] > 0
    alike = payloads(asked, "all-to-all-v", statistics(4e-3, 4e-3))
    assert alike[0, 2] == alike[1, 3] == pytest.approx(found[0, 2], rel=1e-12)
    assert step.program(3).push_density is not None


THRESHOLD = {"push": {"threshold": 1e-3, "error_feedback": True}}
PUBLISHED = {"publish": {"threshold": 1e-3}}
PLANS = [
    {},
    {"micro_batches": 2, "gradient_sync": "micro-batch", "overlap": False},
    {"exchange": "backend", **THRESHOLD},
    {"shares": {"shards": (0.4, 0.1, 0.2, 0.3)}, "publish": {"overlap": True}},
    {**THRESHOLD, **PUBLISHED, "shares": {"shards": (0.4, 0.1, 0.2, 0.3)}},
    {"push": {"threshold": 1e-3, "aggregate": "received-weight"}, "publish": {"threshold": 1e-3, "overlap": True}},
    {"pp": 2, "micro_batches": 2},
    {"pp": 2, "micro_batches": 2, "schedule": "interleaved", **THRESHOLD, **PUBLISHED},
    {"cp": 2, **THRESHOLD, "shares": {"shards": (0.4, 0.1, 0.2, 0.3)}},
    {"method": "gs_z3", "cp": 2, "context_exchange": "ring"},
    {"method": "gs_z3", "recompute": "full", "micro_batches": 2},
    {"method": "gs_z3", "shares": {"shards": (0.4, 0.1, 0.2, 0.3)}, **THRESHOLD},
    {"method": "gs_z3", "parameters": "gathered", "gradient_sync": "micro-batch", "micro_batches": 2},
    LEVELS,
    {**LEVELS, "shares": {"shards": (0.4, 0.1, 0.2, 0.3)}, **THRESHOLD, **PUBLISHED},
    {**LEVELS, "dp_shard": 1, "cp": 2, "gradient_sync": "micro-batch", "micro_batches": 2},
]


@pytest.mark.parametrize("ep", [2, 4])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_equal_ranks_are_simulated_once_with_the_same_result(plan, ep):
    ranks = 4 * plan.get("pp", 1)
    loaded = loaded_of(scenario(plan | {"ep": ep}, ranks, expert_load={"skew": 0.7}), statistics(4e-3, 5e-4))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


@pytest.mark.parametrize("ep", [2, 4])
def test_what_a_step_sends_is_that_of_its_program(ep):
    asked = scenario({"ep": ep, **THRESHOLD, **PUBLISHED})
    steps = Steps(asked, statistics(4e-3, 5e-4))
    program, sent = steps.program(4), steps.traffic(4)
    by_name = {
        name: each.payload_bytes
        for name, each in program.communications.items()
        if each.data_dependent and name.op in ("push", "publish")
    }
    assert len(by_name) >= (4 if ep == 2 else 2)
    assert by_name == {name: pytest.approx(sent.payload_bytes[name], rel=1e-12) for name in by_name}
    assert (sent.push_density, sent.publish_density) == (program.push_density, program.publish_density)
    other = Steps(asked, statistics(4e-3, 5e-4))
    later = other.traffic(3).whole_bytes, other.traffic(4).whole_bytes
    assert later[1] == pytest.approx(sent.whole_bytes, rel=1e-12)
    assert other.sent_bytes(4) == pytest.approx(sum(by_name.values()), rel=1e-12)


@pytest.mark.parametrize(("ep", "load"), [(2, {"skew": 1.0}), (4, "balanced")], ids=str)
@pytest.mark.parametrize(
    "plan",
    [{}, {**THRESHOLD, **PUBLISHED}, {"method": "gs_z3"}, {"cp": 2}, {"pp": 2, "micro_batches": 2}, LEVELS],
    ids=["dense", "thresholded", "sharded", "parts of sequences", "staged", "on two levels"],
)
def test_bounds_of_the_search_are_below_what_is_predicted(plan, ep, load):
    asked = scenario(plan | {"ep": ep}, 4 * plan.get("pp", 1), expert_load=load)
    bound = assert_bounds_below_prediction(asked, statistics(1e-3))
    assert bound.full_ratio > 0 or "pp" in plan  # of stages with divided experts nothing is known


@pytest.mark.parametrize("method", ["ddp", "gs", "gs_z3"])
@pytest.mark.parametrize("overlap", [True, False])
def test_bounds_of_the_search_hold_where_hosts_launch_layers_beside_their_collectives(method, overlap):
    """On GPUs that are faster than their hosts, rows are exchanged while the host launches what follows."""
    cluster = load_cluster(FOLDER / "scenarios" / "clusters" / "dgx-a100.toml")
    plan = {"method": method, "ep": 2, "overlap": overlap}
    asked = scenario_of(cluster, plan, model=MIXTURE, sequence_length=32, global_batch_size=48)
    step_s, bounds = simulate(loaded_of(asked)).result.step_time_s, Bounds(asked)
    first = bounds.of(asked.plan)
    assert 0 < first.time_s <= bounds.closer(asked.plan, first).time_s <= step_s


@pytest.mark.parametrize(("ranks", "ep"), [(4, 2), (4, 4), (6, 3)])
def test_sharded_experts_are_gathered_twice_among_those_that_hold_the_same(ranks, ep):
    """For a block's forward and for its backward; what is outside blocks once, as it stays gathered."""
    plan = {"method": "gs_z3", "ep": ep}
    gathered = payloads(scenario(plan, ranks), "all-gather-v")
    outside = sum(p.elements for each in unrolled(MIXTURE) if not each.layer.block for p in each.layer.parameters)
    assert gathered.pop(tuple(range(ranks))) == (2 * DENSE - outside) * VALUE_BYTES
    groups = {tuple(range(first, ranks, ep)) for first in range(ep)} if ranks > ep else set()
    assert gathered == dict.fromkeys(groups, 2 * EXPERTS // ep * VALUE_BYTES)


@pytest.mark.parametrize("ep", [1, 2])
def test_gradients_of_a_unit_are_collected_while_the_push_before_is_in_flight(ep):
    """A push is waited for when the next begins: until then its bucket is held beside the one that is filled."""
    program = Steps(scenario({"method": "gs_z3", "ep": ep}), unfolded=True).program(0)
    labels = [task.label for task in program.tasks[0]]
    buckets = sum(label.startswith("collect") for label in labels)
    assert buckets > 4
    for bucket in range(1, buckets):
        assert labels.index(f"collect bucket {bucket}") < labels.index(f"add bucket {bucket - 1}")


def test_shares_that_nobody_has_of_some_experts_are_even_there():
    asked = scenario({"ep": 2, "shares": {"shards": (0.5, 0.0, 0.5, 0.0)}})
    (low,) = Steps(asked)._lowerings
    bucket = next(each for each in low.buckets if each.of_experts)
    assert low.owning(bucket).division(bucket).owned[1] == splitting.split(bucket.elements, splitting.even(2))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"tp": 2}, r"cannot run yet with plan\.tp = 2 and method 'gs'"),
        ({"shares": {"shards": "memory"}}, r"plan\.shares\.shards = 'memory'"),
        ({"exchange": "backend", "shares": {"shards": (0.4, 0.1, 0.2, 0.3)}}, "shards that are not even"),
        ({"ep": 3}, "a divisor of these"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(plan, message):
    with pytest.raises(UserError, match=message):
        scenario({"ep": 2} | plan)
