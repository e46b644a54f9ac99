"""Runs of which not all steps are alike: slow ranks, and batches that follow the pace."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from strategies import cluster_of, device_type, exponential_statistics, scenario_of

from gssim.plan.plan import Replanning, ShareRules
from gssim.result import Result
from gssim.scenario import Loaded, Scenario, load_model
from gssim.scenario.ownership import USABLE_RATIO, held_bytes, owned_bytes
from gssim.simulation import simulate
from gssim.simulation.report import with_phases_of
from gssim.terminal import print_result
from gssim.units import validated

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
FAST_NETWORK = {"bandwidth": 1e9, "latency_s": 1e-6}


def star(ranks: int, **changes):
    return cluster_of([(f"d{i}", "sw") for i in range(ranks)], devices=ranks, **(FAST_NETWORK | changes))


def run_of(method="gs", *, ranks=2, slowdowns=(), shares=None, steps=40, batch=48, **plan):
    scenario = scenario_of(
        star(ranks),
        {"method": method, "shares": shares or {}} | plan,
        run={"steps": steps, "warmup_steps": 2, "slowdowns": list(slowdowns)},
        global_batch_size=batch,
    )
    return Loaded(file="test", scenario=scenario)


def result_of(*arguments, unfolded=False, **settings) -> Result:
    return simulate(run_of(*arguments, **settings), unfolded=unfolded).result


HALF_SPEED = {"rank": 1, "first_step": 10, "steps": 20, "compute_ratio": 2.0}
METHODS = ["ddp", "zero1", "zero2", "zero3", "gs", "gs_z3"]


@pytest.mark.parametrize("method", METHODS)
def test_a_slow_rank_makes_exactly_its_steps_longer(method):
    plain, slow = result_of(method), result_of(method, slowdowns=[HALF_SPEED])
    assert plain.step_times_s == ()
    times = slow.step_times_s
    assert len(times) == 40
    assert times[:10] + times[30:] == pytest.approx([plain.step_time_s] * 20)
    assert len(set(times[10:30])) == 1
    compute_s = sum(plain.phases_s[name] for name in ("forward", "backward", "optimizer"))
    assert times[15] == pytest.approx(plain.step_time_s + compute_s, rel=0.05)
    assert slow.step_time_s == median(times)
    assert sum(slow.phases_s.values()) == pytest.approx(slow.step_time_s)
    assert slow.divisions == ()


@pytest.mark.parametrize("method", [*METHODS, "local_sgd", "diloco"])
def test_phases_of_ranks_and_use_of_links_are_those_of_the_step_that_is_reported(method):
    periods = {"sync_every_steps": 2} if method in ("local_sgd", "diloco") else {}
    always = {"rank": 1, "first_step": 4, "compute_ratio": 2.0}
    plain, slow = result_of(method, **periods), result_of(method, slowdowns=[always], **periods)
    assert slow.step_time_s > 1.3 * plain.step_time_s
    phases = {rank: each.phases_s for each in slow.ranks for rank in each.ranks}
    for own in phases.values():
        assert sum(own.values()) == pytest.approx(slow.step_time_s)
    for name, mean_s in slow.phases_s.items():
        assert mean_s == pytest.approx((phases[0][name] + phases[1][name]) / 2)
    assert phases[1]["forward"] == pytest.approx(2 * phases[0]["forward"], rel=0.01)
    for link in slow.links:
        assert link.utilisation_ratio == pytest.approx(link.bytes / FAST_NETWORK["bandwidth"] / slow.step_time_s)


def test_ranks_whose_times_were_added_up_in_another_order_share_an_entry():
    """0.1 + 0.2 is not 0.3 in floating point, and a phase is a sum of many times."""
    (both,) = result_of("ddp").ranks
    first, second, slow = (
        replace(both, ranks=(rank,), count=1, phases_s=both.phases_s | {"forward": forward_s})
        for rank, forward_s in enumerate((0.1 + 0.2, 0.3, 0.301))
    )
    three = replace(both, ranks=(0, 1, 2), count=3)
    found = with_phases_of([three], [first, second, slow], scale=1.0)
    assert [each.ranks for each in found] == [(0, 1), (2,)]


def test_a_ratio_of_one_changes_nothing_and_overlapping_slow_downs_multiply():
    plain = result_of()
    one = result_of(slowdowns=[HALF_SPEED | {"compute_ratio": 1.0}])
    assert one.step_times_s == pytest.approx([plain.step_time_s] * 40)
    third = {"rank": 1, "first_step": 20, "compute_ratio": 1.5}
    both, three = result_of(slowdowns=[HALF_SPEED, third]), result_of(slowdowns=[HALF_SPEED | {"compute_ratio": 3.0}])
    assert both.step_times_s[25] == pytest.approx(three.step_times_s[25])
    assert both.step_times_s[39] < both.step_times_s[25]


def test_every_step_takes_as_long_as_its_own_messages_and_dense_ones_count_for_no_median():
    push = {"threshold": 1e-2, "warmup_steps": 5}  # three dense ones after the warm-up
    slow = HALF_SPEED | {"first_step": 0, "compute_ratio": 1.0}
    found, dense, sparse = (
        simulate(replace(run_of(steps=5, **plan), gradients=exponential_statistics(samples=(24,)))).result
        for plan in ({"push": push, "slowdowns": [slow]}, {}, {"push": {"threshold": 1e-2}})
    )
    assert sparse.step_time_s != pytest.approx(dense.step_time_s, rel=1e-6)
    expected_s = [dense.step_time_s] * 3 + [sparse.step_time_s] * 2
    assert found.step_times_s == pytest.approx(expected_s, rel=1e-9)
    assert (found.step_time_s, found.step_time_p10_s) == pytest.approx((sparse.step_time_s,) * 2, rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_with_replanning_the_slow_down_is_answered_within_three_steps_and_so_is_its_end(method):
    slow = result_of(method, slowdowns=[HALF_SPEED])
    mended = result_of(method, slowdowns=[HALF_SPEED], shares={"replan": True})
    first, second = mended.divisions
    assert (first.first_step, second.first_step) == (13, 33)
    assert (first.samples, second.samples) == ((32, 16), (24, 24))
    before, during, after = (mended.step_times_s[step] for step in (5, 20, 39))
    assert mended.step_times_s[12] == pytest.approx(slow.step_times_s[12], rel=0.01)
    assert after == pytest.approx(before)
    compute_s = sum(result_of(method).phases_s[name] for name in ("forward", "backward"))
    assert during == pytest.approx(before + compute_s / 3, rel=0.05)  # 2/3 of the work on the fast rank, not 1/2
    assert {entry.batch_share for entry in mended.ranks} == {0.5}


def test_the_host_of_a_slow_gpu_is_as_slow_if_the_gpu_waits_for_what_it_issues():
    gpu = device_type(kind="cuda", operation_overhead_s=1e-3, peak_flop_per_s={"fp32": 1e13})
    cluster = star(2, types={"gpu": gpu}, bandwidth=1e12)
    model = load_model(MODELS / "gpt-byte-1m.toml")
    always = [{"rank": rank, "first_step": 0, "compute_ratio": 3.0} for rank in range(2)]
    plain, slow = (
        simulate(Loaded(file="test", scenario=scenario_of(cluster, {"method": "tensor"}, run=run, model=model)))
        for run in ({"steps": 2}, {"steps": 2, "slowdowns": always})
    )
    for phase in ("forward", "backward"):
        assert slow.result.phases_s[phase] == pytest.approx(3 * plain.result.phases_s[phase], rel=0.02)


TWICE = {"batch": (0.75, 0.25)}
CUT = [
    *({"method": method, "tp": 2} for method in ("ddp", "zero1", "zero2", "zero3", "gs", "gs_z3")),
    {"method": "gs_hier", "tp": 2, "dp_shard": 1},
    *({"method": method} for method in ("tensor", "gs_tp", "gs_wgrad")),
    {"method": "gs_tp", "ranks": 2, "shares": {"shards": (0.7, 0.3)}},
    {"method": "gs_wgrad", "shares": {"shards": (0.4, 0.2, 0.2, 0.2)}},
    {"method": "gs", "tp": 2, "shares": {"shards": (0.7, 0.3)}},
    {"method": "ddp", "tp": 2, "shares": TWICE},
    {"method": "zero3", "tp": 2, "micro_batches": 2, "recompute": "full", "shares": TWICE},
    {"method": "hsdp", "dp_shard": 2},
]


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=[pytest.mark.slow] if place % 3 else []) for place, plan in enumerate(CUT)],
    ids=str,
)
def test_a_slow_rank_changes_nothing_but_times_where_ranks_share_samples(plan):
    def found(*slowdowns):
        model = load_model(MODELS / "gpt-byte-1m.toml")
        run = {"steps": 4, "warmup_steps": 1, "slowdowns": slowdowns}
        workload = {"model": model, "global_batch_size": 8, "sequence_length": 16}
        return simulate(Loaded(file="test", scenario=scenario_of(star(4), plan, run=run, **workload))).result

    plain, slowed = found(), found({"rank": 1, "first_step": 1, "steps": 2, "compute_ratio": 3.0})
    assert slowed.collectives == plain.collectives
    held = [
        {rank: (e.peak_allocated_bytes, e.batch_share, e.shard_share) for e in each.ranks for rank in e.ranks}
        for each in (plain, slowed)
    ]
    assert held[0] == held[1]
    first, *during, last = slowed.step_times_s
    assert (first, last) == pytest.approx((plain.step_time_s,) * 2)
    assert min(during) > 1.1 * plain.step_time_s


def test_all_ranks_tell_their_times_at_the_end_of_each_step():
    plain, told = result_of(), result_of(shares={"replan": True})
    assert told.divisions == ()
    more = {entry.key for entry in told.collectives} - {entry.key for entry in plain.collectives}
    assert more == {("all-gather", (0, 1), 32, 1)}


def test_unequal_devices_find_their_shares_in_the_warm_up_or_soon_after():
    kinds = {
        "fast": device_type(),
        "slow": device_type(peak_flop_per_s={"fp32": 4e8}, memory_bandwidth_bytes_per_s=4e8),
    }
    cluster = cluster_of(
        [("d0", "sw"), ("d1", "sw")], devices=2, types=kinds, type_names=["fast", "slow"], **FAST_NETWORK
    )
    scenario = scenario_of(
        cluster,
        {"method": "gs", "shares": {"replan": True}},
        run={"steps": 20, "warmup_steps": 2},
        global_batch_size=70,
    )
    result = simulate(Loaded(file="test", scenario=scenario)).result
    assert [division.first_step for division in result.divisions] == [3]  # after the first five steps
    assert result.divisions[0].samples == pytest.approx((50, 20), abs=1)
    assert {entry.device: entry.batch_share for entry in result.ranks}["fast"] == pytest.approx(50 / 70, abs=0.02)


@pytest.mark.parametrize("method", ["ddp", "zero3", "gs"])
def test_folded_equals_unfolded_with_slow_ranks(method):
    slowdowns = [HALF_SPEED, {"rank": 3, "first_step": 10, "compute_ratio": 2.0}]
    settings = {"ranks": 6, "slowdowns": slowdowns, "shares": {"replan": True}}
    folded, whole = result_of(method, **settings), result_of(method, **settings, unfolded=True)
    assert folded.divisions == whole.divisions
    assert folded.step_times_s == pytest.approx(whole.step_times_s, rel=1e-9)


def test_a_rank_gets_no_more_samples_than_its_memory_takes():
    roomy = run_of(slowdowns=[HALF_SPEED], shares={"replan": True})
    assert roomy.scenario.most_samples == (48, 48)
    device = roomy.scenario.cluster.device_types["fast"]
    scenario = roomy.scenario
    workload, plan, policies = scenario.workload, scenario.plan, scenario.policies
    need = held_bytes(device, workload, plan, policies, samples=28) + 0.5 * owned_bytes(workload, plan, policies)
    tight = replace(device, memory_bytes=(need + 1) / USABLE_RATIO)
    cluster = replace(scenario.cluster, device_types={"fast": tight})
    scenario = replace(scenario, cluster=cluster)
    assert scenario.most_samples == (28, 28)
    result = simulate(Loaded(file="test", scenario=scenario)).result
    assert result.divisions[0].samples == (28, 20)
    assert result.fits


def test_owners_keep_their_shards_where_the_batch_is_divided_anew():
    shares = {"replan": True, "shards": "memory", "batch": "throughput"}
    scenario = run_of(shares=shares).scenario
    other = scenario.with_shares((40, 8), scenario.shard_shares)
    assert other.batch_sizes == (40, 8)
    assert other.shard_shares == pytest.approx(scenario.shard_shares)


def test_the_controllers_settings_are_obeyed():
    patient = {"replan": True, "replanning": {"drift_limit": 3.0}}
    result = result_of(slowdowns=[HALF_SPEED], shares=patient)
    assert result.divisions[0].first_step == 17  # 0.47 a step beyond noise
    deaf = {"replan": True, "replanning": {"drift_ratio": 2.5}}
    assert result_of(slowdowns=[HALF_SPEED], shares=deaf).divisions == ()


def test_what_is_not_there_leaves_a_scenario_what_it_was():
    plain = run_of().scenario
    settings = replace(plain.plan, shares=ShareRules(replanning=Replanning(ewma_weight=0.5)))
    assert replace(plain, plan=settings).scenario_id == plain.scenario_id
    assert "slowdowns" not in plain.resolved()["run"]
    assert "replanning" not in plain.resolved()["plan"]["shares"]
    slow = run_of(slowdowns=[HALF_SPEED]).scenario
    following = run_of(shares={"replan": True}).scenario
    assert len({plain.scenario_id, slow.scenario_id, following.scenario_id}) == 3
    for scenario in (slow, following):
        again = validated(Scenario, scenario.resolved(), file="test")
        assert again.scenario_id == scenario.scenario_id


def test_a_run_with_events_is_the_same_byte_for_byte():
    settings = {"slowdowns": [HALF_SPEED], "shares": {"replan": True}}
    assert result_of(**settings).to_json() == result_of(**settings).to_json()
    assert json.loads(result_of(**settings).to_json())["divisions"][0]["samples"] == [32, 16]


def test_shards_by_cost_move_away_from_a_rank_that_updates_slowly_and_back():
    shares = {"replan": True, "shards": "cost"}
    slow = HALF_SPEED | {"compute_ratio": 4.0}
    result = result_of(slowdowns=[slow], shares=shares, steps=60)
    answers = [division.first_step for division in result.divisions]
    assert answers == [11, 16, 31, 36]  # the batch at once, shards once five steps have shown what is gained
    _, during, _, after = result.divisions
    assert during.shard_shares == pytest.approx((0.8, 0.2), abs=0.02)
    assert after.shard_shares == pytest.approx((0.5, 0.5), abs=0.02)
    staying = result_of(slowdowns=[slow], shares={"replan": True}, steps=60)
    assert result.step_times_s[20] < staying.step_times_s[20]
    assert result.step_times_s[50] == pytest.approx(staying.step_times_s[50])
    assert {entry.shard_share for entry in result.ranks} == set(after.shard_shares)


def test_people_see_how_the_shares_changed_and_what_that_did(capsys):
    print_result(result_of(slowdowns=[HALF_SPEED], shares={"replan": True}))
    rows = [
        [cell.strip() for cell in line.split("│")[1:4]] for line in capsys.readouterr().out.splitlines() if "│" in line
    ]
    assert rows[:3] == [
        ["0", "as planned", "as planned"],
        ["13", "32, 16", "0.5, 0.5"],
        ["33", "24, 24", "0.5, 0.5"],
    ]
