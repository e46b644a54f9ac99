"""Closed forms: on idle links, and on one device, simulated times are known exactly.

Algorithms alone are those of a backend without notices of receives; what these add to gloo's: test_notices.
"""

import math
from dataclasses import replace

import pytest
from closed_forms import CLOSED_FORMS, hierarchical_time_s, ring_all_reduce_time_s, torus_time_s
from strategies import (
    built,
    cluster_of,
    communicated,
    communication_time_s,
    device_type,
    link_type,
    loaded_of,
    machine_of,
    ring,
    scenario_of,
    star,
    topology,
)

from gssim import cost
from gssim.cluster.cluster import BackendCost
from gssim.collectives import Communication
from gssim.scenario import Scenario
from gssim.simulation import simulate
from gssim.workload import unrolled

BANDWIDTH, LATENCY_S, SIZE = 1e6, 1e-4, 840_000
RANKS = range(2, 9)


SIZES = (2**10, 2**20, 2**30)
COUNTS = (2, 3, 4, 5, 8, 16, 32, 64)


def group(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_around_a_switch_takes_the_ring_formula_with_two_hops(ranks):
    cluster = star(ranks, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl")
    formula_s = ring_all_reduce_time_s(
        size_bytes=SIZE, ranks=ranks, bandwidth_bytes_per_s=BANDWIDTH, latency_s=2 * LATENCY_S
    )
    assert formula_s == pytest.approx(2 * (ranks - 1) * (2e-4 + 0.84 / ranks))
    assert communication_time_s(cluster, Communication("all-reduce", group(ranks), SIZE)) == pytest.approx(
        formula_s, rel=1e-9
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_all_reduce_in_a_ring_takes_the_ring_formula_with_one_hop(ranks):
    cluster = ring(ranks, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl")
    simulated_s = communication_time_s(cluster, Communication("all-reduce", group(ranks), SIZE))
    assert simulated_s == pytest.approx(2 * (ranks - 1) * (LATENCY_S + SIZE / ranks / BANDWIDTH), rel=1e-9)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("shape", [star, ring])
def test_all_gather_takes_one_chunk_after_another(ranks, shape):
    hops = 2 if shape is star else 1
    cluster = shape(ranks, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl")
    simulated_s = communication_time_s(cluster, Communication("all-gather", group(ranks), SIZE))
    assert simulated_s == pytest.approx((ranks - 1) * (hops * LATENCY_S + SIZE / ranks / BANDWIDTH), rel=1e-9)


@pytest.mark.parametrize(("backend", "passes"), [("gloo", 2), ("nccl", 1)])
@pytest.mark.parametrize("ranks", RANKS)
def test_reduce_scatter_costs_gloo_a_whole_all_reduce_and_nccl_half_of_one(ranks, backend, passes):
    cluster = star(ranks, bandwidth=BANDWIDTH, backend=backend)
    simulated_s = communication_time_s(cluster, Communication("reduce-scatter", group(ranks), SIZE))
    assert simulated_s == pytest.approx(passes * (ranks - 1) * SIZE / ranks / BANDWIDTH, rel=1e-9)


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast_takes_the_depth_of_a_binomial_tree(ranks):
    algorithms = {"broadcast": "binomial"}
    cluster = star(ranks, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl", algorithms=algorithms)
    simulated_s = communication_time_s(cluster, Communication("broadcast", group(ranks), SIZE))
    assert simulated_s == pytest.approx(math.ceil(math.log2(ranks)) * (2 * LATENCY_S + SIZE / BANDWIDTH), rel=1e-9)


@pytest.mark.parametrize("ranks", RANKS)
def test_uneven_all_gather_takes_the_largest_part_in_every_round(ranks):
    parts = (500_000, *range(1000, 1000 * ranks, 1000))
    algorithms = {"all-gather-v": "ring"}
    cluster = star(ranks, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl", algorithms=algorithms)
    simulated_s = communication_time_s(
        cluster, Communication("all-gather-v", group(ranks), sum(parts), part_bytes=parts)
    )
    assert simulated_s == pytest.approx((ranks - 1) * (2 * LATENCY_S + 0.5), rel=1e-9)


def counts_for(name: str, kind: str) -> tuple[int, ...]:
    return (2,) if kind == "send" else COUNTS


@pytest.mark.parametrize(("name", "kind", "wired"), CLOSED_FORMS)
def test_every_algorithm_on_the_topology_it_is_made_for_takes_its_closed_form(name, kind, wired):
    formula, rate, latency_s = CLOSED_FORMS[name, kind, wired], 25e9, 3e-6
    for ranks in counts_for(name, kind):
        specification = topology(wired, count=ranks, bandwidth=rate, latency_s=latency_s)
        cluster = built(specification, algorithms={kind: name}, backend="nccl")
        for size in SIZES:
            simulated_s = communication_time_s(cluster, Communication(kind, range(ranks), size))
            assert simulated_s == pytest.approx(formula(ranks, size, rate, latency_s), rel=1e-6), (ranks, size)


@pytest.mark.parametrize("kind", ["all-reduce", "reduce-scatter", "all-gather"])
@pytest.mark.parametrize("shape", [(2, 2), (4, 4), (3, 5), (4, 4, 4), (2, 2, 4)], ids=str)
def test_a_torus_takes_its_dimensions_one_after_another(shape, kind):
    specification = topology("torus", device="fast", shape=shape, bandwidth=25e9, latency_s=3e-6)
    cluster = built(specification, algorithms={kind: "torus"}, backend="nccl")
    for size in SIZES:
        simulated_s = communication_time_s(cluster, Communication(kind, range(math.prod(shape)), size))
        formula_s = torus_time_s(kind, shape=shape, size_bytes=size, rate=25e9, latency_s=3e-6)
        assert simulated_s == pytest.approx(formula_s, rel=1e-6), size


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize(("servers", "devices"), [(2, 2), (2, 8), (3, 4), (4, 8), (8, 8)])
def test_a_hierarchical_all_reduce_over_servers_takes_both_levels(servers, devices, backend):
    latency_s = 4e-6
    specification = {
        "kind": "servers",
        "fabric": {"kind": "switch"},
        "servers": [
            {
                "count": servers,
                "device": "fast",
                "devices": devices,
                "inside": "nvswitch",
                "inside_link": link_type(200e9, latency_s),
                "nics": devices,
                "nic_link": link_type(25e9, latency_s / 2),  # the other half of the way is over PCIe
                "pcie_link": link_type(50e9, latency_s / 2),
            }
        ],
    }
    cluster = built(specification, algorithms={"all-reduce": "hierarchical"}, backend=backend)
    for size in SIZES:
        simulated_s = communication_time_s(cluster, Communication("all-reduce", range(servers * devices), size))
        formula_s = hierarchical_time_s(
            size_bytes=size,
            inside=devices,
            hosts=servers,
            inside_rate=200e9,
            between_rate=25e9,
            latency_s=2 * latency_s if backend == "gloo" else latency_s,  # every step waits for a notice
        )
        assert simulated_s == pytest.approx(formula_s, rel=1e-6), size


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_pipelined_ring_of_even_parts_is_a_ring(ranks):
    size = 1000 * ranks
    for kind in ("all-gather", "reduce-scatter"):
        cluster = star(ranks, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl")
        uneven = Communication(f"{kind}-v", group(ranks), size, part_bytes=(1000,) * ranks)
        formula_s = CLOSED_FORMS["ring", kind, "switch"](ranks, size, BANDWIDTH, 2 * LATENCY_S)
        assert communication_time_s(cluster, uneven) == pytest.approx(formula_s, rel=1e-9)


@pytest.mark.parametrize("kind", ["all-gather-v", "reduce-scatter-v"])
def test_the_rank_before_the_smallest_part_sets_the_pace_of_a_pipelined_ring(kind):
    parts = (500_000, 1000, 2000, 3000)
    cluster = star(4, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl")
    simulated_s = communication_time_s(cluster, Communication(kind, group(4), sum(parts), part_bytes=parts))
    assert simulated_s == pytest.approx(3 * 2 * LATENCY_S + (sum(parts) - 1000) / BANDWIDTH, rel=1e-9)


def test_an_all_reduce_inside_the_switch_sends_everything_up_once_and_gets_one_part_for_all():
    cluster = star(8, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl", algorithms={"all-reduce": "in-switch"})
    simulated_s = communication_time_s(cluster, Communication("all-reduce", group(8), SIZE))
    assert simulated_s == pytest.approx(2 * 2 * LATENCY_S + (1 + 1 / 8) * SIZE / BANDWIDTH, rel=1e-9)


@pytest.mark.parametrize("slow", [0, 3, 6])
def test_a_ring_is_as_slow_as_its_slowest_link(slow):
    cluster = star(7, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl")
    link = replace(cluster.links[slow], bandwidth_bytes_per_s=BANDWIDTH / 5)
    cluster = replace(cluster, links=(*cluster.links[:slow], link, *cluster.links[slow + 1 :]))
    simulated_s = communication_time_s(cluster, Communication("all-gather", group(7), SIZE))
    assert simulated_s == pytest.approx(6 * (2 * LATENCY_S + 5 * SIZE / 7 / BANDWIDTH), rel=1e-9)


def test_a_stage_is_priced_at_what_it_takes_though_its_messages_begin_at_different_times():
    cluster = star(4, bandwidth=BANDWIDTH, latency_s=LATENCY_S, algorithms={"all-to-all": "direct"})
    links = tuple(replace(link, latency_s=LATENCY_S * (1 + i)) for i, link in enumerate(cluster.links))
    machine = communicated(replace(cluster, links=links), Communication("all-to-all", group(4), SIZE))
    (scheduled,) = machine.schedules.values()
    assert scheduled.alone_s(machine.network) == pytest.approx(machine.env.now)


def test_collectives_of_one_stream_take_their_times_one_after_another():
    cluster = star(4, bandwidth=BANDWIDTH, latency_s=LATENCY_S)
    both = [Communication(kind, group(4), SIZE) for kind in ("all-gather", "broadcast")]
    alone_s = [communication_time_s(cluster, each) for each in both]
    assert communication_time_s(cluster, *both, *both) == pytest.approx(2 * sum(alone_s), rel=1e-9)


@pytest.mark.parametrize("senders", range(1, 8))
def test_in_cast_takes_all_senders_bytes_over_the_receivers_link(senders):
    matrix = ((0.0,) * (senders + 1), *((float(SIZE),) + (0.0,) * senders for _ in range(senders)))
    incast = Communication("all-to-all-v", group(senders + 1), senders * SIZE, pair_bytes=matrix)
    cluster = star(senders + 1, bandwidth=BANDWIDTH, latency_s=LATENCY_S, backend="nccl")
    assert communication_time_s(cluster, incast) == pytest.approx(2 * LATENCY_S + senders * SIZE / BANDWIDTH, rel=1e-9)


@pytest.mark.parametrize("ranks", RANKS)
def test_even_all_to_all_takes_what_one_rank_sends(ranks):
    matrix = tuple(tuple(0.0 if i == j else 1e5 for j in range(ranks)) for i in range(ranks))
    everything = Communication("all-to-all-v", group(ranks), 0, pair_bytes=matrix)
    simulated_s = communication_time_s(star(ranks, bandwidth=BANDWIDTH), everything)
    assert simulated_s == pytest.approx((ranks - 1) * 1e5 / BANDWIDTH, rel=1e-9)


@pytest.mark.parametrize("ranks", range(3, 7))
def test_gathers_go_to_the_next_rank_and_gloos_reductions_to_the_one_before(ranks):
    one_way = ring(ranks, bandwidth=BANDWIDTH, latency_s=0.0, directed=True)
    chunk_s = SIZE / ranks / BANDWIDTH
    gather_s = communication_time_s(one_way, Communication("all-gather", group(ranks), SIZE))
    reduce_s = communication_time_s(one_way, Communication("all-reduce", group(ranks), SIZE))
    assert gather_s == pytest.approx((ranks - 1) * chunk_s, rel=1e-9)
    assert reduce_s == pytest.approx(2 * (ranks - 1) * (ranks - 1) * chunk_s, rel=1e-9)  # the long way round


def test_overhead_processor_time_and_reduction_add_up():
    cost = {
        "overhead_s": {"all-reduce": 1e-3, "default": 5e-3},
        "reduction_bytes_per_s": 1e7,
        "processor_byte_s": {"all-reduce": 0.75 / BANDWIDTH},  # to send, and to receive: slower than the links
        "source": "assumed",
    }
    assert BackendCost(**cost).processor_byte_s == {"all-reduce": 0.75 / BANDWIDTH}
    cluster = star(4, bandwidth=BANDWIDTH, latency_s=0.0, backend_cost=cost)
    chunk = SIZE / 4
    all_reduce_s = communication_time_s(cluster, Communication("all-reduce", group(4), SIZE))
    all_gather_s = communication_time_s(cluster, Communication("all-gather", group(4), SIZE))
    assert all_reduce_s == pytest.approx(1e-3 + 6 * 1.5 * chunk / BANDWIDTH + 3 * chunk / 1e7, rel=1e-9)
    assert all_gather_s == pytest.approx(5e-3 + 3 * chunk / BANDWIDTH, rel=1e-9)


# One device ----------------------------------------------------------------------------------------------------------


def compute_s(scenario: Scenario, rank: int) -> float:
    """Return forward and backward of all layers and the optimizer over all parameters, added up."""
    workload, device = scenario.workload, scenario.cluster.type_of(rank)
    layers_s = sum(
        cost.layer_time_s(device, workload, layer.layer, phase=phase, batch_size=scenario.batch_sizes[rank])
        for layer in unrolled(workload.model)
        for phase in "fb"
    )
    model = workload.model
    tensors = sum(layer.repeats * len(layer.parameters) for layer in model.layers)
    return layers_s + cost.optimizer_time_s(device, workload, elements=model.elements, tensors=tensors)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum", "adamw"])
def test_a_step_on_one_device_is_the_sum_of_its_layers_and_the_optimizer(kind, optimizer):
    cluster = star(1, types={"fast": device_type(kind=kind, operation_overhead_s=1e-5)})
    scenario = scenario_of(cluster, {"method": "single"}, optimizer=optimizer)
    result = simulate(loaded_of(scenario)).result
    assert result.step_time_s == pytest.approx(compute_s(scenario, 0), rel=1e-12)
    assert result.collectives == ()


def test_a_step_on_one_device_computed_by_hand():
    # b*s = 32, at 1 GFLOP/s and 1 GB/s: embedding (32 + 64) kB, two blocks 3 MFLOP, head 1.5 MFLOP, loss 2 kB per
    # token; AdamW, operation by operation, moves 72 B for each of 168 elements.
    layers_s = 32 * (96e3 / 1e9 + 2 * 3e6 / 1e9 + 1.5e6 / 1e9 + 2e3 / 1e9)
    result = simulate(loaded_of(scenario_of(star(1), {"method": "single"}))).result
    assert result.step_time_s == pytest.approx(layers_s + 72 * 168 / 1e9, rel=1e-12)
    assert result.phases_s["forward"] == pytest.approx(32 * (32e3 + 2e6 + 0.5e6 + 1e3) / 1e9, rel=1e-12)
    assert result.phases_s["optimizer"] == pytest.approx(72 * 168 / 1e9, rel=1e-9)


def test_training_on_one_device_does_not_depend_on_links():
    times = {
        simulate(
            loaded_of(scenario_of(star(3, bandwidth=bandwidth, latency_s=latency_s), {"method": "single"}))
        ).result.step_time_s
        for bandwidth in (1.0, 1e6, 1e12)
        for latency_s in (0.0, 10.0)
    }
    unlinked = cluster_of([], devices=1)
    times.add(simulate(loaded_of(scenario_of(unlinked, {"method": "single"}))).result.step_time_s)
    assert len(times) == 1


# Several devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_bucket_cannot_hide_so_ddp_takes_compute_copy_and_all_reduce(ranks):
    scenario = scenario_of(star(ranks, latency_s=1e-4), {"method": "ddp"})
    result = simulate(loaded_of(scenario)).result
    both_s = 2 * 2e-4  # a notice, and a message; later ones are hidden by one of a quarter or an eighth of the tensor
    ring_s = 2 * (both_s + (ranks - 2) * (both_s - 672 / ranks / 2 / 1e6) + (ranks - 1) * 672 / ranks / 1e6)
    assert result.step_time_s == pytest.approx(compute_s(scenario, 0) + 2 * 672 / 1e9 + ring_s, rel=1e-9)
    assert result.phases_s["exposed_communication"] == pytest.approx(ring_s, rel=1e-9)


@pytest.mark.parametrize("bandwidth", [1e4, 3e4, 1e5, 1e7])
def test_overlapped_buckets_form_a_chain_behind_the_backward(bandwidth):
    scenario = scenario_of(star(2, bandwidth=bandwidth), {"method": "ddp", "bucket_bytes": 80})
    _, program = machine_of(scenario)
    clock_s = link_free_s = 0.0
    ended_s = {}
    for task in program.tasks[0]:
        if task.communication is None:
            clock_s = max([clock_s, *(ended_s[each] for each in task.after)]) + task.duration_s
            ended_s[task.id] = clock_s
        else:
            start_s = max([link_free_s, *(ended_s[each] for each in task.after)])
            link_free_s = ended_s[task.id] = start_s + program.communications[task.id].size_bytes / bandwidth
    assert len(program.communications) > 2
    assert simulate(loaded_of(scenario)).result.step_time_s == pytest.approx(clock_s, rel=1e-9)


def test_without_overlap_communication_and_compute_add_up():
    plan = {"method": "ddp", "bucket_bytes": 80, "overlap": False}
    scenario = scenario_of(star(2, bandwidth=1e5), plan)
    step_time_s = simulate(loaded_of(scenario)).result.step_time_s
    assert step_time_s == pytest.approx(compute_s(scenario, 0) + 2 * 672 / 1e9 + 672 / 1e5, rel=1e-9)


@pytest.mark.parametrize(("exchange", "reduced"), [("point-to-point", 672 / 2), ("backend", 672)])
def test_zero2_on_gloo_gathers_and_reduces_every_unit_one_after_another(exchange, reduced):
    scenario = scenario_of(star(2, bandwidth=1e5), {"method": "zero2", "exchange": exchange}, optimizer="sgd")
    result = simulate(loaded_of(scenario)).result
    wire_s = 672 / 2 / 1e5 + reduced / 1e5  # half the bytes for the gathers, all of them for gloo's reduce-scatters
    assert result.phases_s["exposed_communication"] == pytest.approx(wire_s, rel=1e-9)


def test_a_dense_push_and_publish_move_what_a_ring_all_reduce_moves():
    plan = {"method": "gs", "overlap": False}
    scenario = scenario_of(star(4, bandwidth=1e5), plan)
    pushed = simulate(loaded_of(scenario)).result
    reduced = simulate(loaded_of(scenario_of(star(4, bandwidth=1e5), {"method": "ddp"}))).result
    assert pushed.ranks[0].bytes_sent == pytest.approx(reduced.ranks[0].bytes_sent)
    assert pushed.ranks[0].bytes_sent == pytest.approx(2 * 3 / 4 * 672)


def test_a_step_waits_for_the_slowest_rank():
    types = {"fast": device_type(), "slow": device_type(peak_flop_per_s={"fp32": 1e8})}
    cluster = star(2, types=types, type_names=["fast", "slow"], bandwidth=1e12)
    scenario = scenario_of(cluster, {"method": "ddp"}, optimizer="sgd")
    result = simulate(loaded_of(scenario)).result
    assert result.step_time_s == pytest.approx(compute_s(scenario, 1), rel=1e-4)
    waits = {ranks.device: ranks.phases_s["exposed_communication"] for ranks in result.ranks}
    assert waits["fast"] == pytest.approx(compute_s(scenario, 1) - compute_s(scenario, 0), rel=1e-4)
    assert waits["slow"] < 1e-6
