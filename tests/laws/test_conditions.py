from dataclasses import replace

import numpy as np
import pytest
from strategies import cluster_of, communicated, communication_time_s, loaded_of, scenario_of, star

from gssim.cluster import Conditions, Curve, applied
from gssim.cluster.cluster import BackendCost
from gssim.cluster.network_faults import LinkFault, Traffic
from gssim.collectives import Communication
from gssim.errors import UserError
from gssim.scenario import load_scenario
from gssim.simulation import simulate


def step_s(**conditions):
    scenario = scenario_of(star(4, bandwidth=1e6), {"method": "ddp"})
    return simulate(loaded_of(replace(scenario, network=Conditions(**conditions)))).result.step_time_s


def exposed_s(backend="gloo", **conditions):
    scenario = scenario_of(star(4, bandwidth=1e6, backend=backend), {"method": "ddp"})
    result = simulate(loaded_of(replace(scenario, network=Conditions(**conditions)))).result
    return result.phases_s["exposed_communication"]


def test_half_a_link_takes_twice_the_time():
    fault = LinkFault(between=("sw", "d0"), bandwidth_ratio=0.5)
    assert exposed_s("nccl", faults=(fault,)) == pytest.approx(2 * exposed_s("nccl"))


def test_behind_half_a_link_gloos_notices_wait_for_half_of_one_of_the_rings_twelve_messages_too():
    """The other half has gone on over the link while the faster port sent the message."""
    fault = LinkFault(between=("sw", "d0"), bandwidth_ratio=0.5)
    assert exposed_s("gloo", faults=(fault,)) == pytest.approx(2 * exposed_s("gloo") * 12.5 / 12)


def test_added_latency_counts_in_every_step_of_a_ring_for_its_part_of_the_ring():
    fault = LinkFault(between=("d0", "sw"), added_latency_s=1e-3)
    # 6 steps; two of the ring's four paths, to and from d0, are a millisecond longer. Over gloo notices go there too
    assert exposed_s("nccl", faults=(fault,)) - exposed_s("nccl") == pytest.approx(6 * 2 / 4 * 1e-3)


def test_routes_go_round_a_link_that_is_down():
    triangle = cluster_of([("d0", "d1"), ("d1", "d2"), ("d2", "d0")], devices=3)
    down = LinkFault(between=("d0", "d1"), bandwidth_ratio=0)
    assert triangle.wiring.links - applied(triangle.wiring, Conditions(faults=(down,))).links == 2
    whole, cut = (scenario_of(triangle, {"method": "ddp"}, global_batch_size=6), Conditions(faults=(down,)))
    found = simulate(loaded_of(replace(whole, network=cut))).result
    carried = {link.name: link.bytes for link in found.links}
    before = {link.name: link.bytes for link in simulate(loaded_of(whole)).result.links}
    assert "d1 -> d0" not in carried
    assert carried["d1 -> d2"] == carried["d2 -> d0"] == before["d1 -> d0"] > 0 == before["d1 -> d2"]


def test_a_rank_that_is_cut_off_is_named():
    down = LinkFault(between=("d2", "sw"), bandwidth_ratio=0)
    with pytest.raises(UserError, match=r"no path of links from (d1 to d2|d2 to d1)"):
        step_s(faults=(down,))


def test_other_traffic_takes_its_rate_and_never_more_than_a_fair_share():
    alone_s = exposed_s()
    for rate, left in ((2.5e5, 0.75), (5e5, 0.5), (9e5, 0.5)):
        taken = exposed_s(traffic=(Traffic(between=("d1", "d0"), bytes_per_s=rate),))
        assert taken == pytest.approx(alone_s / left, rel=1e-9)


def test_other_traffic_elsewhere_changes_nothing():
    assert exposed_s(traffic=(Traffic(between=("sw", "sw"), bytes_per_s=1e6),)) == pytest.approx(exposed_s())


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"faults": (LinkFault(between=("d0", "d1")),)}, r"network.faults\[0\].between = .*no such link"),
        ({"faults": (LinkFault(between=("d9", "sw")),)}, r"network.faults\[0\].between = 'd9'.*there are d0, d1"),
        ({"traffic": (Traffic(between=("d0", "x"), bytes_per_s=1),)}, r"network.traffic\[0\].between = 'x'"),
    ],
)
def test_names_that_lead_nowhere_are_refused(conditions, message):
    with pytest.raises(UserError, match=message):
        step_s(**conditions)


def test_a_scenario_file_states_its_conditions(tmp_path):
    from strategies import write_files

    path = write_files(tmp_path / "here")
    fault = 'network.faults=[{between=["nowhere", "d0"], bandwidth_ratio=0.5}]'
    with pytest.raises(UserError, match=r"scenario.toml: network.faults\[0\].between = 'nowhere'"):
        load_scenario(path, [fault], gradients_needed=False)
    with pytest.raises(UserError, match=r"network.faults\[0\].bandwidth_ratio"):
        load_scenario(path, [fault.replace("0.5", "1.5")], gradients_needed=False)


def test_conditions_are_part_of_the_question():
    scenario = scenario_of(star(2), {"method": "ddp"})
    slow = replace(scenario, network=Conditions(faults=(LinkFault(between=("d0", "sw"), bandwidth_ratio=0.5),)))
    assert slow.scenario_id != scenario.scenario_id
    assert "network" in slow.resolved()
    assert "network" not in scenario.resolved()


# Measured tables -----------------------------------------------------------------------------------------------------


def measured(sizes, values):
    table = {"all-reduce": Curve(sizes=sizes, values=values)}
    return star(4, backend_cost=BackendCost(measured_s=table, source="measured"))


def test_a_measured_table_takes_the_place_of_the_formula():
    cluster = measured((1e3, 1e5), (1e-3, 1e-2))
    times = [communication_time_s(cluster, Communication("all-reduce", range(4), size)) for size in (1e3, 1e4, 1e5)]
    assert times == pytest.approx([1e-3, np.sqrt(1e-3 * 1e-2), 1e-2])


def test_beyond_its_ends_a_table_is_flat_below_and_proportional_above():
    cluster = measured((1e3, 1e5), (1e-3, 1e-2))
    assert communication_time_s(cluster, Communication("all-reduce", range(4), 8)) == pytest.approx(1e-3)
    assert communication_time_s(cluster, Communication("all-reduce", range(4), 3e5)) == pytest.approx(3e-2)


def test_a_measured_collective_is_still_counted_on_the_links():
    machine = communicated(measured((1e3,), (1e-3,)), Communication("all-reduce", range(4), 1000))
    assert machine.network.carried.tolist() == pytest.approx([1500.0])  # every link is of one class


def test_a_table_of_all_ranks_says_nothing_of_some():
    cluster = measured((1e3,), (7.0,))
    assert communication_time_s(cluster, Communication("all-reduce", range(2), 1000)) < 1
    assert communication_time_s(cluster, Communication("all-gather", range(4), 1000)) < 1
