from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from unittest.mock import patch

import pytest
from strategies import (
    device_type,
    exponential_statistics,
    exponential_tensor,
    loaded_of,
    machine_of,
    scenario_of,
    star,
)

from gssim.engine import Machine
from gssim.network import Network
from gssim.plan import Push
from gssim.program import Steps, lower
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.simulation.allocator_replay import _LiveTensors
from gssim.sparsity import push_ratios
from gssim.workload.gradient_statistics import RankTrace

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
PUSHED = {"method": "gs", "push": {"threshold": 1e-3, "encoding": "coo"}}


def drifting(rms: tuple[float, ...]):
    """Return statistics whose scale differs from step to step."""
    base = exponential_statistics()
    tensors = dict.fromkeys(base.traces[0].tensors, exponential_tensor(*rms))
    traces = (RankTrace(samples=4, tensors=tensors),)
    return replace(base, steps=len(rms), sampled_steps=tuple(range(len(rms))), traces=traces, changes={})


def test_density_and_payload_are_means_over_exactly_the_runs_steps():
    statistics = drifting((9.0, 1e-3, 2e-3, 4e-3, 9.0))
    scenario = scenario_of(star(2), PUSHED, run={"steps": 3, "warmup_steps": 1})
    exact = [
        push_ratios(statistics, Push(threshold=1e-3), samples=4, tensor="h.0.bias", step=step).over(0.0, 1.0)
        for step in (1, 2, 3)
    ]
    result = simulate(loaded_of(scenario, statistics)).result
    assert result.density.push == pytest.approx(fmean(exact))
    (payload,) = [c.payload_bytes for c in result.collectives if c.payload_bytes is not None]
    assert payload == pytest.approx(168 * 8 * fmean(exact))


def test_the_step_time_is_that_of_the_median_step_and_p10_that_of_a_light_one():
    def step_times(*rms):
        scenario = scenario_of(star(2, bandwidth=1e4), PUSHED, run={"steps": len(rms), "warmup_steps": 0})
        result = simulate(loaded_of(scenario, drifting(rms))).result
        return result.step_time_s, result.step_time_p10_s

    light, middle, heavy = (step_times(rms)[0] for rms in (1e-4, 1e-3, 1e-2))
    assert light < middle < heavy
    assert step_times(1e-2, 1e-4, 1e-3) == (middle, light)


def test_steps_of_equal_densities_are_lowered_and_simulated_once():
    statistics = drifting((1e-3, 2e-3, 2e-3, 1e-3))
    scenario = scenario_of(star(2), PUSHED, run={"steps": 4, "warmup_steps": 0})
    steps = Steps(scenario, statistics)
    assert steps.program(0) is steps.program(3) is not steps.program(1) is steps.program(2)
    assert lower(scenario, statistics, step=3) == steps.program(3)
    with patch.object(Machine, "run", autospec=True, side_effect=Machine.run) as runs:
        simulate(loaded_of(scenario, replace(statistics, steps=5, sampled_steps=(0, 1, 2, 3))))
    assert runs.call_count == 1  # the median step and the one at the 10th percentile are light ones


def test_the_timeline_is_one_steady_step_from_zero():
    simulated = simulate(loaded_of(scenario_of(star(2), {"method": "gs"})))
    assert max(span.end_s for span in simulated.spans) == pytest.approx(simulated.result.step_time_s)
    assert sum(span.label == "optimizer" for span in simulated.spans) == 1  # two equal ranks are simulated once
    assert all(span.end_s > 0 for span in simulated.spans)


def test_equal_ranks_are_one_class_and_unequal_ones_are_not():
    types = {"fast": device_type(), "slow": device_type(peak_flop_per_s={"fp32": 5e8})}
    cluster = star(4, types=types, type_names=["fast", "slow", "fast", "slow"])
    classes = simulate(loaded_of(scenario_of(cluster, {"method": "ddp"}))).result.ranks
    assert [(c.ranks, c.count, c.device) for c in classes] == [((0, 2), 2, "fast"), ((1, 3), 2, "slow")]
    assert sum(c.batch_share * c.count for c in classes) == pytest.approx(1)
    assert sum(c.shard_share * c.count for c in classes) == pytest.approx(1)


def test_throughput_is_the_batch_over_the_step():
    result = simulate(loaded_of(scenario_of(star(2), {"method": "ddp"}))).result
    assert result.throughput_samples_per_s == pytest.approx(8 / result.step_time_s)


def test_a_plan_that_does_not_fit_is_an_answer_that_names_rank_category_and_excess():
    types = {"big": device_type(), "small": device_type(memory_bytes=3000, context_bytes=100)}
    cluster = star(2, types=types, type_names=["big", "small"])
    result = simulate(loaded_of(scenario_of(cluster, {"method": "ddp"}))).result
    assert not result.fits
    peak = result.ranks[1].peak_allocated_bytes
    assert result.does_not_fit.rank == 1
    assert result.does_not_fit.excess_bytes == peak + 100 - 3000
    categories = result.ranks[1].peak_by_category_bytes
    assert result.does_not_fit.category == max(categories, key=categories.get)


def test_a_plan_fits_up_to_the_last_byte():
    def fits(memory_bytes):
        cluster = star(1, types={"fast": device_type(memory_bytes=memory_bytes, context_bytes=10)})
        return simulate(loaded_of(scenario_of(cluster, {"method": "single"}))).result.fits

    roomy = simulate(loaded_of(scenario_of(star(1), {"method": "single"}))).result
    needed = roomy.ranks[0].peak_allocated_bytes + 10
    assert roomy.fits
    assert fits(needed)
    assert not fits(needed - 1)


def test_a_step_costs_what_all_its_devices_cost_and_nothing_is_said_where_a_price_is_unknown():
    priced = {"fast": device_type(price_usd_per_h=36.0), "free": device_type()}
    result = simulate(loaded_of(scenario_of(star(2, types=priced), {"method": "ddp"}))).result
    assert result.cost_usd_per_step == pytest.approx(2 * 36 * result.step_time_s / 3600)
    mixed = star(2, types=priced, type_names=["fast", "free"])
    assert simulate(loaded_of(scenario_of(mixed, {"method": "ddp"}))).result.cost_usd_per_step is None


def test_a_sparse_push_beats_a_dense_one_on_slow_links_and_loses_on_fast_ones():
    def times(bandwidth):
        cluster = star(4, bandwidth=bandwidth, types={"fast": device_type(operation_overhead_s=1e-5)})
        gradients = exponential_statistics(rms=1e-4)
        return [
            simulate(loaded_of(scenario_of(cluster, plan), gradients)).result.step_time_s
            for plan in ({"method": "gs"}, PUSHED)
        ]

    slow_dense, slow_sparse = times(1e3)
    fast_dense, fast_sparse = times(1e12)
    assert slow_sparse < slow_dense
    assert fast_sparse > fast_dense


def test_provenance_has_versions_and_seed_and_no_clock():
    result = simulate(loaded_of(scenario_of(star(1), {"method": "single"}, run={"seed": 3}))).result
    assert set(result.provenance) == {"gssim", "code", "simpy", "numpy", "scipy", "python", "seed"}
    assert result.provenance["seed"] == 3


def jittery(seed: int, **ratios: float):
    cluster = star(2, bandwidth=1e5, types={"fast": device_type(**ratios)})
    return simulate(loaded_of(scenario_of(cluster, {"method": "ddp"}, run={"seed": seed}))).result


def test_chance_is_drawn_from_the_seed_alone():
    first, again, other = (jittery(seed, step_jitter_ratio=0.1, task_jitter_ratio=0.1) for seed in (1, 1, 2))
    assert first.to_json() == again.to_json()
    assert first.step_time_s != other.step_time_s


def test_without_chance_the_seed_changes_nothing_but_the_identity():
    one, two = jittery(1), jittery(2)
    assert one.step_time_s == two.step_time_s
    assert one.scenario_id != two.scenario_id


def test_waiting_for_the_unluckiest_rank_makes_a_step_longer_and_the_lucky_ones_shorter():
    calm, nervous = jittery(0), jittery(0, step_jitter_ratio=0.1)
    assert calm.step_time_s == calm.step_time_p10_s
    assert nervous.step_time_s > calm.step_time_s
    assert nervous.step_time_p10_s < nervous.step_time_s
    assert [c.key for c in nervous.collectives] == [c.key for c in calm.collectives]
    assert [r.bytes_sent for r in nervous.ranks] == pytest.approx(
        [r.bytes_sent for r in calm.ranks] * len(nervous.ranks)
    )


# What is repeated ----------------------------------------------------------------------------------------------------

H100S = (
    'cluster={name="h100s", backend="nccl", nccl="hopper", source="datasheets", device_types={h100="h100-sxm"}, '
    'topology={kind="servers", servers=[{count=2, device="h100", devices=8, inside="nvswitch", '
    'inside_link="nvlink4-h100", nics=8, nic_link="ib-ndr-400", pcie_link="pcie5x16"}], fabric={kind="switch"}}}'
)


def fully_sharded(model: str):
    """Return FSDP2's training of a large model on 16 equal GPUs."""
    plan = ["method=fsdp", "recompute=full", "tp=1", "pp=1", "micro_batches=1"]
    workload = [f"model={SCENARIOS / 'models' / model}.toml", "global_batch_size=16", "precision=bf16"]
    changes = [H100S, *(f"plan.{each}" for each in plan), *(f"workload.{each}" for each in workload)]
    return load_scenario(SCENARIOS / "gpt3-1024-unequal.toml", [*changes, "workload.sequence_length=2048"])


def test_what_equal_layers_ask_of_the_allocator_is_worked_out_once_however_many_there_are():
    worked_out = []
    for model, layers in (("llama2-7b", 32), ("llama2-13b", 40)):
        loaded = fully_sharded(model)
        assert sum(layer.repeats for layer in loaded.scenario.workload.model.layers if layer.block) == layers
        with patch.object(_LiveTensors, "requests_of", autospec=True, side_effect=_LiveTensors.requests_of) as found:
            simulate(loaded)
        worked_out.append(found.call_count)
    assert worked_out[0] == worked_out[1] > 0


def test_what_is_alone_on_its_links_is_never_shared_anew():
    with patch.object(Network, "_share", autospec=True, side_effect=Network._share) as shared:
        result = simulate(fully_sharded("llama2-7b")).result
    assert sum(each.count for each in result.collectives) > 90
    assert not shared.call_count


def test_a_step_takes_as_long_as_each_of_many_where_ranks_slow_down_their_neighbours():
    """The rank that is done first begins its next step, and slows down the other one on its host."""
    types = {"fast": device_type(neighbour_slowdown_ratio=2.0), "slow": device_type(neighbour_slowdown_ratio=2.0)}
    types["slow"]["memory_bandwidth_bytes_per_s"] = 1e7  # its update takes longer
    cluster = star(2, types=types, type_names=["fast", "slow"], bandwidth=1e5)
    scenario = scenario_of(
        replace(cluster, devices=tuple(replace(device, host="one") for device in cluster.devices)), {"method": "ddp"}
    )
    machine, _ = machine_of(scenario, steps=8)
    ends_s = [max(ends) for ends in zip(*machine.ends_s, strict=True)]
    times_s = [end - start for start, end in pairwise(ends_s)]
    assert times_s[-1] < times_s[-2] * 0.999  # nobody begins another step
    assert simulate(loaded_of(scenario)).result.step_time_s == pytest.approx(times_s[-2], rel=1e-12)
