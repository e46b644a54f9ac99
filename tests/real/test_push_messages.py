"""Finding, packing, keeping and adding what reaches a threshold, on one rank: laws and definitions."""

import math
from types import SimpleNamespace

import pytest
from combinations import each_once
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from gsreal.gradient_sharding.bucket import Bucket  # noqa: E402
from gsreal.gradient_sharding.messages import (  # noqa: E402
    Encoding,
    Scratch,
    Thresholds,
    clip_ranges,
    mark,
    mean_magnitudes,
    quantile,
)
from gsreal.gradient_sharding.push import Accumulated, Residual  # noqa: E402
from gssim.plan import Push, divide, message_bytes  # noqa: E402
from gssim.plan.encodings import CHUNK_ELEMENTS  # noqa: E402

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = (0, 1, 7, 8, 13, 1000, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 3)


def values(size: int, dtype=torch.float32, seed: int = 0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("threshold", "kind", "dtype"), each_once((0.5, 0.0, 3.0, 1e9), ("coo", "bitmap", "dense", "auto"), DTYPES)
)
def test_what_is_packed_arrives_and_nothing_else(dtype, kind, threshold):
    for size in SIZES:
        scratch = Scratch(size, size, dtype, CPU)
        encoding, part = Encoding(kind, dtype, scratch), values(size, dtype)
        before, reached = part.clone(), part.to(scratch.magnitudes.dtype).abs() >= threshold
        half = size // 2
        flags = mark(part, clip_ranges([(slice(0, half), threshold), (slice(half, size), threshold)], 0, size), scratch)
        message, entries = encoding.pack(part, flags, clear=True)
        assert entries == int(reached.sum())
        written = encoding.choose(entries, size)
        assert message.nbytes == message_bytes(written, entries=entries, elements=size, value_bytes=dtype.itemsize)
        assert torch.equal(part, torch.where(reached, 0, before))
        gradient = torch.ones(size, dtype=scratch.magnitudes.dtype)
        received = torch.zeros_like(gradient)
        encoding.add(gradient, message, entries, 0.5, received)
        sent = torch.where(reached, before, 0).to(gradient.dtype)
        assert torch.equal(gradient, 1 + 0.5 * sent)
        counted = reached if written != "dense" or entries == size else sent != 0
        assert torch.equal(received, 0.5 * counted)


def bucket_of(elements: int, shares, rank: int) -> Bucket:
    parameters = [torch.nn.Parameter(torch.zeros(elements))]
    division, owners = divide(elements, by_node=[[share] for share in shares]), SimpleNamespace(rank=rank)
    bucket = Bucket(0, parameters, division, owners=owners)
    bucket.create_shard()
    return bucket


@settings(deadline=None, max_examples=examples(25))
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["coo", "bitmap", "dense", "auto"]),
    st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=4, max_size=4),
    st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    st.integers(0, 2),
)
def test_what_was_sent_and_what_is_kept_are_all_gradients_in_the_weight_that_they_count(
    precision, kind, weights, threshold, rank
):
    """Conservation: sum of weight * sent, plus weight * kept, is the sum of weight * gradient, whatever the weights."""
    bucket = bucket_of(300, [0.5, 0.3, 0.2], rank)
    residual = Residual(bucket.elements, bucket.own, precision, CPU)
    scratch = Scratch(300, 300, torch.float32, CPU)
    encoding = Encoding(kind, torch.float32, scratch)
    arrived, given_ = torch.zeros(300), torch.zeros(300)
    for step, weight in enumerate(weights):
        bucket.gradient = values(300, seed=step)
        given_ += weight * bucket.gradient
        residual.accumulate(bucket.gradient, weight, scratch)
        accumulated = Accumulated(bucket, residual)
        accumulated.release()
        assert (bucket.gradient is None) == (precision == torch.float32)
        for owner, (first, last) in enumerate(bucket.ranges):
            if owner != rank:
                part = accumulated.part(first, last)
                flags = mark(part, [(slice(0, last - first), threshold)], scratch)
                message, entries = encoding.pack(part, flags, clear=True)
                encoding.add(arrived[first:last], message, entries, weight)
        accumulated.finish()
        assert bucket.gradient is None
    rounding = 1e-6 if precision == torch.float32 else len(weights) * 4.0 * 2**-8
    for first, last in residual.places:
        kept = weights[-1] * residual.part(first, last).float()
        assert torch.allclose(arrived[first:last] + kept, given_[first:last], atol=rounding)


@pytest.mark.parametrize("weight", [0.5, 0.25])
def test_owners_that_change_lose_nothing_of_what_was_kept(weight):
    residual = Residual(10, slice(2, 5), torch.float32, CPU)
    residual.values.copy_(torch.arange(1.0, 8.0))
    residual.weight = 0.5
    residual.reshard(slice(4, 8))
    residual.reshard(slice(6, 9))
    gradient = torch.zeros(10)
    residual.add_carried(gradient, weight)
    residual.add_carried(gradient, weight)
    kept = torch.zeros(10)
    for first, last in residual.places:
        kept[first:last] = residual.part(first, last)
    assert (0.5 * kept + weight * gradient).tolist() == [0.5, 1, 0, 0, 0, 1.5, 2, 2.5, 3, 3.5]
    assert gradient[6:9].count_nonzero() == 3 == gradient.count_nonzero()


def test_what_is_no_number_is_sent_so_that_its_owner_sees_it_and_is_not_kept_for_ever():
    part = torch.tensor([0.1, math.nan, 0.2, math.inf])
    scratch = Scratch(4, 4, torch.float32, CPU)
    flags = mark(part, [(slice(0, 4), 1.0)], scratch)
    assert flags.tolist() == [False, True, False, True]
    residual = Residual(4, slice(0, 1), torch.float32, CPU)
    residual.values.copy_(torch.tensor([1.0, math.nan, -math.inf]))
    residual.drop_nonfinite()
    assert residual.values.tolist() == [1, 0, 0]


@given(st.integers(0, 100), st.integers(0, 100), st.floats(0.01, 0.99))
def test_a_threshold_found_does_not_depend_on_where_a_tensor_is_cut(a, b, density):
    tensor, scratch = values(100), Scratch(100, 100, torch.float32, CPU)
    first, last = sorted((a, b))
    pieces = [piece for piece in (tensor[:first], tensor[first:last], tensor[last:]) if piece.numel()]
    found = quantile(pieces, density, scratch)
    assert found == quantile([tensor], density, scratch)
    assert int((tensor.abs() >= found).sum()) == max(1, round(100 * density))
    assert mean_magnitudes([pieces], scratch)[0] == pytest.approx(float(tensor.abs().mean()))


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5])
def test_of_a_large_tensor_a_sample_gives_the_threshold_to_its_standard_error(density):
    tensor = values(20 * CHUNK_ELEMENTS + 5)
    found = quantile([tensor[:77], tensor[77:]], density, Scratch(8, tensor.numel(), torch.float32, CPU))
    realised = float((tensor.abs() >= found).float().mean())
    standard_error = math.sqrt((1 - density) / density / CHUNK_ELEMENTS)
    assert abs(realised / density - 1) < 4 * standard_error


def test_a_tensor_of_which_nothing_is_here_has_no_mean_and_no_threshold():
    scratch = Scratch(8, 8, torch.float32, CPU)
    assert mean_magnitudes([[], [torch.ones(2), -torch.ones(4)], []], scratch) == [0, 1, 0]
    assert mean_magnitudes([[]], scratch) == [0]
    assert quantile([], 0.5, scratch) == math.inf


def test_the_mean_of_a_tensor_of_16_bits_is_found_in_chunks():
    tensor = values(3 * CHUNK_ELEMENTS + 5).half()
    scratch = Scratch(8, tensor.numel(), torch.float16, CPU)
    assert tensor.numel() > scratch.magnitudes.numel()
    expected = float(tensor.double().abs().mean())
    assert mean_magnitudes([[tensor[:7], tensor[7:]]], scratch) == [pytest.approx(expected, rel=1e-5)]


def test_a_tensor_of_zeros_reaches_no_threshold_that_is_found():
    scratch = Scratch(8, 8, torch.float32, CPU)
    zeros = torch.zeros(8)
    assert not mark(zeros, [(slice(0, 8), quantile([zeros], 0.5, scratch))], scratch).any()
    assert quantile([zeros], 1.0, scratch) == 0


SCALES = {
    "falls by 5 % a step": lambda step: 0.95**step,
    "rises by 5 % a step": lambda step: 1.05**step,
    "falls as at the start": lambda step: 1 / (1 + step),
    "jumps": lambda step: 1.0 if step < 12 else 3.0,
    "is noisy": lambda step: math.exp(0.3 * math.sin(12.9898 * step * step)),
}


@pytest.mark.parametrize(("scale", "target", "feedback"), each_once(tuple(SCALES), (0.003, 0.1), (True, False)))
def test_a_target_density_is_met_over_any_ten_steps_whatever_gradients_do(scale, target, feedback):
    sizes = {(0, 150_000): 1.0, (150_000, 150_064): 3.0, (150_064, 200_064): 0.01}
    push = Push(kind="target-density", threshold=target, error_feedback=feedback)
    thresholds = Thresholds(push, [slice(*place) for place in sizes])
    elements, random = max(last for _, last in sizes), torch.Generator().manual_seed(3)
    widths = torch.cat([torch.full((last - first,), width) for (first, last), width in sizes.items()])
    scratch = Scratch(elements, elements, torch.float32, CPU)
    common, residual, sent = torch.randn(elements, generator=random), torch.zeros(elements), []
    for step in range(40):
        noise = torch.randn(elements, generator=random)
        held = residual + (0.3 * common + noise) * widths * SCALES[scale](step)
        found = thresholds.find(lambda a, b, held=held: [held[a:b]], scratch, step=step)
        flags = mark(held, found, Scratch(elements, elements, torch.float32, CPU))[:elements]
        sent.append(float(flags.float().mean()) / target)
        residual = held * ~flags if feedback else residual
    means = [sum(sent[at : at + 10]) / 10 for at in range(5, 30)]
    assert 0.85 < min(means) <= max(means) < 1.15


def test_thresholds_follow_between_estimates_without_tensors_of_zeros_and_after_what_is_no_number():
    values = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    values[10_000:] = 0
    thresholds = Thresholds(Push(kind="target-density", threshold=0.1), [slice(0, 10_000), slice(10_000, 20_000)])
    scratch = Scratch(20_000, 20_000, torch.float32, CPU)

    def found(factor: float, step: int) -> list[float]:
        return [each for _, each in thresholds.find(lambda a, b: [values[a:b] * factor], scratch, step=step)]

    first, again = found(1.0, 0), found(7.0, 1)
    assert again[0] == pytest.approx(7 * first[0], rel=0.1)
    assert again[1] > 0
    found(math.nan, 32)
    assert found(2.0, 33)[0] == pytest.approx(2 * first[0], rel=1e-6)


def test_an_infinite_estimate_is_forgotten_but_for_a_tensor_of_which_nothing_is_sent():
    """Until the next estimate nothing finite would have been sent of a tensor whose gradients overflowed once."""
    thresholds = Thresholds(Push(kind="target-density", threshold=0.5), [slice(0, 8), slice(8, 8)])
    scratch = Scratch(8, 8, torch.float32, CPU)

    def found(values: torch.Tensor, step: int) -> list[float]:
        return [each for _, each in thresholds.find(lambda a, b: [values[a:b]], scratch, step=step)]

    finite = torch.arange(8.0)
    assert found(torch.full((8,), math.inf), 3) == [math.inf, math.inf]
    assert found(finite, 4) == [4.0, math.inf]
    assert thresholds.estimated == [4.0, math.inf]
