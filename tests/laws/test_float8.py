"""Linear maps in 8 bits: what they change in a prediction, and where they are refused."""

import pytest

import gssim
from gssim import cost
from gssim.errors import UserError
from gssim.scenario.tensor_slices import context_part

A100 = {"cluster.device_types.gpu.preset": "a100-sxm-80", "cluster.device_types.gpu.float8_ratio": None}
"""Without products in 8 bits."""
GPU = {"cluster.device_types.gpu.float8_ratio": 2.0, "workload.map_precision": "fp8"}


def scenario(**changes):
    device = {"preset": "h100-sxm", "source": "tests"}
    model = "tests/helpers/models/llama.toml"
    return gssim.load(
        {
            "name": "float8",
            "question": "",
            "cluster": {
                "name": "one GPU",
                "backend": "nccl",
                "source": "tests",
                "device_types": {"gpu": device},
                "devices": [{"name": "gpu0", "type": "gpu", "host": "a"}],
            },
            "workload": {"model": model, "global_batch_size": 64, "sequence_length": 24, "precision": "bf16"},
            "plan": {"method": "single"},
        },
        changes,
    )


def times(of, **options):
    """Return the time of a block's passes without what the host takes."""
    block = next(layer for layer in of.workload.model.layers if layer.block)
    device = of.cluster.device_types["gpu"]
    passes = [{"phase": "f"}, {"phase": "b"}, {"phase": "r"}, {"phase": "r", "recompute": "selective"}]
    return [
        cost.layer_time_s(device, of.workload, block, batch_size=10**4, issued=False, **each) for each in passes
    ], block


def test_products_of_blocks_take_less_by_the_ratio_and_casts_are_added():
    """With a memory that takes no time: 2 FLOP an element of each weight matrix and token forward, 4 backward."""
    fast = {"cluster.device_types.gpu.memory_bandwidth_bytes_per_s": "1e18 B/s"}
    (plain, block), (eight, _) = times(scenario(**fast)), times(scenario(**fast, **GPU))
    maps = sum(each.elements for each in block.parameters if len(each.shape) == 2)
    gpu = scenario().cluster.device_types["gpu"]
    rate = gpu.peak_flop_per_s["bf16"] * gpu.efficiency_ratio
    tokens = 10**4 * 24
    assert [one - other for one, other in zip(plain, eight, strict=True)][:2] == pytest.approx(
        [tokens * passes * maps / rate / 2 for passes in (2, 4)], rel=0.02
    )
    assert all(other <= one for one, other in zip(plain, eight, strict=True))
    slow = {"cluster.device_types.gpu.memory_bandwidth_bytes_per_s": "1e9 B/s"}
    assert times(scenario(**slow, **GPU))[0][0] > times(scenario(**slow))[0][0]


def test_parts_of_sequences_save_what_they_have_of_it():
    """With sequences divided over two ranks, products in 8 bits save half as much per rank."""
    fast = {"cluster.device_types.gpu.memory_bandwidth_bytes_per_s": "1e18 B/s"}
    plain, eight = scenario(**fast), scenario(**fast, **GPU)
    whole = [times(each)[0] for each in (plain, eight)]
    block = next(layer for layer in context_part(plain.workload.model, 12).layers if layer.block)
    device = eight.cluster.device_types["gpu"]
    for place, phase in enumerate("fb"):
        half = [
            cost.layer_time_s(device, each.workload, block, phase=phase, batch_size=10**4, positions=12, issued=False)
            for each in (plain, eight)
        ]
        assert half[0] - half[1] == pytest.approx((whole[0][place] - whole[1][place]) / 2, rel=1e-3)


def test_memory_and_all_but_the_time_stay_as_they_are():
    plain, eight = (gssim.simulate(scenario(**each)) for each in ({}, GPU))
    assert plain.ranks[0].peak_allocated_bytes == eight.ranks[0].peak_allocated_bytes
    assert plain.scenario_id != eight.scenario_id


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (A100, "has no rate in 8 bits"),
        ({"workload.precision": "fp32"}, "goes with 16 bits"),
        ({"cluster.device_types.gpu.float8_ratio": 0.5}, "must be at least 1"),
    ],
)
def test_what_has_no_rate_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        scenario(**{key: value for key, value in (GPU | changes).items() if value is not None})
