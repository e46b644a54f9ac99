"""Times of models without a profile on devices whose kernels were measured by size."""

from dataclasses import replace

import pytest
from strategies import device_type, star, tiny_model

from gssim import cost as costs
from gssim.cluster import DeviceType
from gssim.errors import UserError
from gssim.units import validated
from gssim.workload import Layer, Parameter, Polynomial, Workload

TOKENS = 4 * 8
WORKLOAD = Workload(model=tiny_model(), global_batch_size=4, sequence_length=8)
"""Vocabulary 16; the device does 1 GFLOP/s where nothing else is said."""


def products(*, forward: float = 1e9, input_gradient: float = 1e9, weight_gradient: float = 1e9, odd: float = 1.0):
    rates = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
    return {name: {"sizes": [1], "flop_per_s": [rate], "odd_ratio": odd} for name, rate in rates.items()}


def attention(width: int, causal_forward: float, others: float = 1e9) -> dict:
    curves = {key: [others, others] for key in ("causal_backward", "forward", "backward")}
    return {"head_width": width, "lengths": [1, 1024], "causal_forward": [causal_forward] * 2, **curves}


def device(*, precision: str = "fp32", attend: tuple[dict, ...] = (), **rates: float) -> DeviceType:
    kernels = {"precision": precision, "products": products(**rates), "attention": attend}
    return validated(DeviceType, device_type(kernels=[kernels]), file="d")


def layer(*shapes: str, forward: str, backward: str = "0") -> Layer:
    """Return a block with matrices of these shapes that moves next to nothing."""
    parameters = tuple(Parameter.parse(f"{{}}.w{i} {shape} b0 b1") for i, shape in enumerate(shapes))
    return replace(
        WORKLOAD.model.layers[1],
        parameters=parameters,
        forward_flop=Polynomial.parse(forward),
        backward_flop=Polynomial.parse(backward),
        forward_bytes=Polynomial.parse(0),
        backward_bytes=Polynomial.parse(0),
    )


def time_s(on: DeviceType, what: Layer, phase: str = "f", workload: Workload = WORKLOAD) -> float:
    return costs.layer_time_s(on, workload, what, phase=phase, batch_size=4)


MAPS = layer("8x4", "4x8", forward="128*b*s", backward="256*b*s")


def test_maps_take_the_time_of_their_products():
    assert time_s(device(forward=0.5e9), MAPS) == pytest.approx(2 * 128 * TOKENS / 1e9)
    found = time_s(device(input_gradient=0.5e9, weight_gradient=0.25e9), MAPS, "b")
    assert found == pytest.approx((2 + 4) * 128 * TOKENS / 1e9)


def test_rates_at_another_precision_are_not_taken():
    assert time_s(device(precision="bf16", forward=0.5e9), MAPS) == pytest.approx(128 * TOKENS / 1e9)
    as_bf16 = replace(WORKLOAD, precision="bf16")
    assert time_s(device(precision="bf16", forward=0.5e9), MAPS, workload=as_bf16) == pytest.approx(256 * TOKENS / 1e9)


def test_attention_takes_its_own_rate_with_the_mask_and_the_heads_of_the_model():
    attending = layer("4x4", forward="32*b*s + 16*b*s^2")
    narrow, wide = attention(2, 0.5e9), attention(64, 0.125e9)
    maps_s, scores_s = 32 * TOKENS / 1e9, 16 * 4 * 8**2 / 1e9
    assert time_s(device(attend=(narrow,)), attending) == pytest.approx(maps_s + 2 * scores_s)
    assert time_s(device(), attending) == pytest.approx(maps_s + scores_s)
    cut = replace(attending, parameters=(Parameter.parse("{}.w0 4x2u b0 b1"),), units=2)
    of_two = replace(WORKLOAD, model=replace(WORKLOAD.model, sliced_layers=(cut,)))
    assert time_s(device(attend=(wide, narrow)), attending, workload=of_two) == pytest.approx(maps_s + 2 * scores_s)
    whole = replace(WORKLOAD, model=replace(WORKLOAD.model, input=replace(WORKLOAD.model.input, task="masked-token")))
    assert time_s(device(attend=(narrow,)), attending, workload=whole) == pytest.approx(maps_s + scores_s)


def test_half_of_each_sequence_takes_half_as_long_at_the_same_rates():
    """On 4 of 8 positions maps have half the tokens, and the attention half of its pairs of positions."""
    whole, half = layer("4x4", forward="32*b*s + 16*b*s^2"), layer("4x4", forward="128*b + 64*b*s")
    on = device(forward=0.25e9, attend=(attention(2, 0.5e9),))
    found = costs.layer_time_s(on, WORKLOAD, half, phase="f", batch_size=4, positions=4)
    assert found == pytest.approx(time_s(on, whole) / 2)
    head, of_part = layer(forward=f"{2 * 4 * 16}*b*s"), layer(forward=f"{4 * 2 * 4 * 16}*b")
    own = costs.layer_time_s(device(odd=0.1), WORKLOAD, of_part, phase="f", batch_size=4, positions=4)
    assert own == pytest.approx(time_s(device(odd=0.1), head) / 2)


def test_a_head_that_lists_no_matrix_has_the_vocabularys_and_an_odd_one_is_slow():
    head = layer(forward=f"{2 * 4 * 16}*b*s")
    assert time_s(device(odd=0.1), head) == pytest.approx(128 * TOKENS / 1e9)
    odd = replace(WORKLOAD, model=replace(WORKLOAD.model, input=replace(WORKLOAD.model.input, vocabulary=17)))
    head = layer(forward=f"{2 * 4 * 17}*b*s")
    assert time_s(device(odd=0.1), head, workload=odd) == pytest.approx(10 * 136 * TOKENS / 1e9)


def test_a_rank_without_samples_takes_no_time():
    for what in (MAPS, layer(forward="128*b*s")):
        assert costs.layer_time_s(device(), WORKLOAD, what, phase="f", batch_size=0) == 0.0


def test_frozen_matrices_have_no_gradient_and_are_not_taken_for_a_head():
    trained = layer("8x4", "4x8", forward="128*b*s", backward="128*b*s")
    frozen = replace(trained, parameters=(), frozen_parameters=trained.parameters)
    slow = device(forward=0.5e9, input_gradient=0.25e9, weight_gradient=1e6, odd=0.1)
    odd = replace(WORKLOAD, model=replace(WORKLOAD.model, input=replace(WORKLOAD.model.input, vocabulary=17)))
    assert time_s(slow, frozen, workload=odd) == pytest.approx(2 * 128 * TOKENS / 1e9)
    assert time_s(slow, frozen, "b", workload=odd) == pytest.approx(4 * 128 * TOKENS / 1e9)


def test_flop_beyond_those_of_listed_matrices_are_done_at_the_devices_rate():
    """A router's product, which is listed, says nothing of the experts' own."""
    routed = layer("8x4", forward="1064*b*s")
    assert time_s(device(forward=0.5e9), routed) == pytest.approx((1000 + 2 * 64) * TOKENS / 1e9)


def test_what_is_recomputed_in_part_keeps_the_mean_rate():
    part = replace(MAPS, recompute_flop=Polynomial.parse("64*b*s"), recompute_bytes=Polynomial.parse(0))
    assert time_s(device(forward=0.5e9), part, "r") == pytest.approx(2 * 64 * TOKENS / 1e9)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"products": {"forward": products()["forward"]}}, "products must be forward, input_gradient"),
        ({"products": products() | {"forward": {"sizes": [1, 2], "flop_per_s": [1]}}}, "one rate for each combination"),
        ({"attention": [attention(64, 1.0) | {"lengths": [1, 2, 3]}]}, "one rate for each length"),
    ],
)
def test_incomplete_tables_are_refused(changes: dict, reason: str):
    kernels = {"precision": "fp32", "products": products()} | changes
    with pytest.raises(UserError, match=reason):
        validated(DeviceType, device_type(kernels=[kernels]), file="d")


def test_two_tables_of_one_precision_are_refused():
    kernels = {"precision": "fp32", "products": products()}
    with pytest.raises(UserError, match=r"device_types.fast.kernels: several of precision 'fp32'; allowed: one"):
        star(1, types={"fast": device_type(kernels=[kernels, kernels])})
