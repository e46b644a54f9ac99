"""Frozen weights in few bits under adapters: what they take, send and cost, and what is refused."""

from pathlib import Path

import pytest
from strategies import device_type, loaded_of, scenario_of, star

import gssim
from gssim import cost
from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.simulation import simulate
from gssim.workload import Parameter, unrolled
from gssim.workload.quantized import quantized_weights, stored

GPT = load_model(Path(__file__).resolve().parents[2] / "scenarios/models/gpt-byte-1m.toml")
ADAPTERS = {"rank": 8}
OFFLOADED = Path(__file__).resolve().parents[2] / "scenarios/llama2-13b-offload.toml"
FORMS = ("nf4", "nf4-double", "int8")


def made(method="zero3", ranks=2, **changes):
    settings = {"model": GPT, "global_batch_size": 2 * ranks, "sequence_length": 32, "adapters": ADAPTERS}
    return scenario_of(
        star(ranks, types={"fast": device_type(memory_bytes=2**40)}), {"method": method}, **settings | changes
    )


def test_bits_of_a_weight_are_those_of_the_paper():
    """Dettmers et al. 2023, section 3: scales take 0.5 bits of each parameter, and 0.127 where they have scales too."""
    weight = Parameter.parse("{}.weight 4096x4096 end end")
    bits = {form: 8 * sum(stored(weight, form)) / weight.elements for form in FORMS}
    assert bits["nf4"] == 4.5
    assert bits["nf4-double"] == pytest.approx(4.127, abs=5e-4)
    assert bits["int8"] == 8 + 32 / 4096


def blocks_of(scenario):
    return [each.layer for each in unrolled(scenario.workload.model) if each.layer.block]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["ddp", "zero1", "gs", "zero3", "gs_z3"])
def test_a_rank_holds_quantized_weights_in_few_bits(method, form):
    """Whole, or a shard of the values under FSDP2, and all scales; what is pushed has no owner for what is frozen."""

    def parameters_bytes(scenario):
        return simulate(loaded_of(scenario)).result.ranks[0].peak_by_category_bytes["parameters"]

    whole, few = made(method), made(method, frozen_precision=form)
    weights = [weight for layer in blocks_of(whole) for weight in quantized_weights(layer, form)]
    kept = [stored(weight, form) for weight in weights]
    ranks = 2 if method == "zero3" else 1
    fewer = sum(4 * weight.elements / ranks for weight in weights)
    fewer -= sum(values / ranks + scales for values, scales in kept)
    assert len(weights) == 4 * 4
    assert parameters_bytes(whole) - parameters_bytes(few) == pytest.approx(fewer, abs=ranks * len(weights))


def test_fsdp_gathers_the_values_as_they_are_kept():
    def gathered(scenario):
        found = simulate(loaded_of(scenario)).result.collectives
        return sum(each.count * each.bytes for each in found if each.kind == "all-gather")

    whole, few = made(), made(frozen_precision="nf4")
    elements = sum(weight.elements for layer in blocks_of(whole) for weight in quantized_weights(layer, "nf4"))
    twice = 2 * (4 - 0.5) * elements  # forward and backward
    last = blocks_of(whole)[-1]  # which the backward finds gathered
    once = (4 - 0.5) * sum(weight.elements for weight in quantized_weights(last, "nf4"))
    assert gathered(whole) - gathered(few) in (twice, twice - once)


def test_a_phase_copies_each_weight_and_a_recomputation_those_that_it_multiplies():
    scenario = made("single", 1, frozen_precision="nf4")
    (device,) = scenario.cluster.device_types.values()
    layer = blocks_of(scenario)[1]
    plain = made("single", 1)

    def added_s(phase, recompute="full"):
        few, whole = (
            cost.layer_time_s(device, each.workload, layer, phase=phase, batch_size=2, recompute=recompute)
            for each in (scenario, plain)
        )
        return few - whole

    weights = quantized_weights(layer, "nf4")
    copied_bytes = sum(sum(stored(weight, "nf4")) + 4 * weight.elements for weight in weights)
    copies_s = copied_bytes / device.memory_bandwidth_bytes_per_s
    assert added_s("f") == pytest.approx(copies_s)
    assert added_s("b") == pytest.approx(copies_s)
    assert added_s("r", "selective") == 0
    assert 0 < added_s("r", "full") < copies_s  # the last product is not run again


def test_the_copy_of_the_largest_weight_counts_at_the_peak_and_half_the_bits_hold_no_more():
    peaks = [
        simulate(loaded_of(made("single", 1, frozen_precision=form))).result.ranks[0].peak_allocated_bytes
        for form in (None, "int8", "nf4", "nf4-double")
    ]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4


def test_nothing_is_quantized_that_is_trained():
    with pytest.raises(UserError, match="needs adapters or frozen layers"):
        made(frozen_precision="nf4", adapters=None)
    frozen = made("ddp", adapters=None, frozen=("blocks.0",), frozen_precision="nf4")
    assert [len(quantized_weights(layer, "nf4")) for layer in blocks_of(frozen)] == [4, 0, 0, 0]


@pytest.mark.parametrize(
    "method", ["single", "ddp", "zero1", "zero2", "zero3", "hsdp", "gs", "gs_z3", "gs_hier", "pipeline"]
)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_method_frees_more_than_it_holds(method, micro_batches):
    ranks = 1 if method == "single" else 4
    plan = {"method": method, "micro_batches": micro_batches, "recompute": "full"}
    shape = {"model": GPT, "global_batch_size": 4 * ranks, "sequence_length": 32, "adapters": ADAPTERS}
    cluster = star(ranks, types={"fast": device_type(memory_bytes=2**40)})
    scenario = scenario_of(cluster, plan, **shape, frozen_precision="nf4", precision="bf16")
    for entry in simulate(loaded_of(scenario)).result.ranks:
        assert min(entry.peak_by_category_bytes.values()) >= 0


def test_values_in_the_hosts_memory_are_fetched_as_they_are_kept_and_scales_stay():
    base = ["workload.model=gpt-byte-1m", "workload.sequence_length=64", "workload.adapters.rank=8"]
    base += ["plan.method=zero3", "plan.offload=parameters"]
    whole, few = (
        gssim.simulate(gssim.load(OFFLOADED, [*base, *more])) for more in ((), ("workload.frozen_precision='nf4'",))
    )
    model = gssim.load(OFFLOADED, base).workload.model
    kept = [stored(w, "nf4") for each in unrolled(model) for w in quantized_weights(each.layer, "nf4")]
    ranks = sum(entry.count for entry in few.ranks)
    (held, *_), (unquantized, *_) = few.ranks, whole.ranks
    assert min(held.peak_by_category_bytes.values()) >= 0
    assert held.peak_by_category_bytes["parameters"] == sum(scales for _, scales in kept)
    assert "parameters" not in unquantized.peak_by_category_bytes
    fewer = sum((4 * 2 * values - values) / ranks for values, _ in kept)  # shards are in fp32: 8 times half a byte
    assert unquantized.host_bytes["parameters"] - held.host_bytes["parameters"] == pytest.approx(fewer, rel=0.01)
