import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import device_type, star

from gssim.cluster import Cluster, Curve
from gssim.errors import UserError
from gssim.units import validated


def cluster_data(**changes):
    device = {"name": "a", "type": "fast", "host": "h"}
    return {
        "name": "c",
        "backend": "gloo",
        "device_types": {"fast": device_type()},
        "devices": [device, {**device, "name": "b"}],
        "links": [{"between": ["a", "b"], "bandwidth_bytes_per_s": "1 GB/s", "latency_s": "1 us", "source": "s"}],
        "source": "s",
    } | changes


def refused(data) -> str:
    with pytest.raises(UserError) as error:
        validated(Cluster, data, file="c.toml")
    return str(error.value)


def test_rates_with_units_become_numbers():
    cluster = validated(Cluster, cluster_data(), file="c.toml")
    assert cluster.links[0].bandwidth_bytes_per_s == 1e9
    assert cluster.links[0].latency_s == 1e-6
    assert cluster.type_of(1).memory_bytes == 2**30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": []}, "at least one is needed"),
        ({"switches": ["a"]}, "'a' is named twice"),
        ({"device_types": {"slow": device_type()}}, "'a' has the unknown type 'fast'; allowed: slow"),
        ({"switches": ["sw", "sw"]}, "'sw' is named twice"),
        ({"backend": "mpi"}, "backend = 'mpi'"),
        ({"topology": {"kind": "dragonfly"}}, "c.toml: topology.kind = 'dragonfly': allowed: ring, fully-connected, "),
        ({"topology": {"shape": [4]}}, "c.toml: topology.kind: missing"),
        ({"links": [cluster_data()["links"][0] | {"between": ["a", "x"]}]}, "'x' is neither a device nor a switch"),
        ({"links": [cluster_data()["links"][0] | {"between": ["a", "a"]}]}, "'a' is linked to itself"),
        ({"links": [cluster_data()["links"][0] | {"latency_s": -1}]}, "links[0].latency_s = -1"),
        ({"device_types": {"fast": device_type(efficiency_ratio=1.5)}}, "efficiency_ratio = 1.5"),
        ({"device_types": {"fast": device_type(communicating_slowdown_ratio=0.5)}}, "communicating_slowdown_ratio"),
    ],
)
def test_a_cluster_that_does_not_hold_together_is_refused(changes, message):
    assert message in refused(cluster_data(**changes))


def test_a_curve_passes_through_its_points_and_is_linear_between_and_beyond():
    curve = Curve(sizes=(1, 2, 4), values=(3, 5, 5))
    assert [curve.at(x) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 8)] == [0, 1.5, 3, 4, 5, 5, 5, 5]
    assert Curve(sizes=(2,), values=(6,)).at(5) == 15


@pytest.mark.parametrize(
    ("sizes", "values"), [((), ()), ((1,), (1, 2)), ((2, 1), (1, 2)), ((1, 1), (1, 2)), ((0,), (1,))]
)
def test_a_curve_that_is_no_function_of_the_size_is_refused(sizes, values):
    with pytest.raises(ValueError, match=r"sizes|greater than 0"):
        Curve(sizes=sizes, values=values)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 10)), min_size=1, max_size=5), st.floats(0, 100))
def test_a_curve_with_growing_values_grows_and_is_never_negative(steps, x):
    sizes, values = [], []
    for width, rise in steps:
        sizes.append((sizes[-1] if sizes else 0) + width)
        values.append((values[-1] if values else 0) + rise)
    curve = Curve(sizes=tuple(sizes), values=tuple(values))
    assert 0 <= curve.at(x) <= curve.at(x + 1) * (1 + 1e-9)


def test_ranks_run_on_devices_in_order():
    cluster = star(2, types={"one": device_type(), "two": device_type(kind="cuda")}, type_names=["two", "one"])
    assert [cluster.type_of(rank).kind for rank in (0, 1)] == ["cuda", "cpu"]
