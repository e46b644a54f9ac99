from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import PARAMETERS, tiny_model

from gssim.errors import UserError
from gssim.memory import activation_timeline, footprint
from gssim.units import validated
from gssim.workload import Buffer, ImageInput, Module, Moment, Parameter, Polynomial, Workload, gradient_order, unrolled
from gssim.workload.layer import ONE_SAMPLE, SEVERAL_SAMPLES

TERMS = st.tuples(st.integers(-(10**9), 10**9), st.integers(0, 2), st.integers(0, 2))
MOMENTS = st.one_of(
    st.just(Moment("end")),
    st.builds(Moment, st.sampled_from("fb"), st.integers(0, 99), st.integers(-3, 3)),
)


@given(st.lists(TERMS, min_size=1, max_size=5).map(tuple), st.integers(0, 50), st.integers(0, 50))
def test_a_polynomial_survives_its_text_and_is_the_sum_of_its_terms(terms, b, s):
    polynomial = Polynomial(terms)
    assert Polynomial.parse(str(polynomial)) == polynomial
    assert polynomial.at(b=b, s=s) == sum(c * b**i * s**j for c, i, j in terms)


def test_a_polynomial_in_the_rank_of_adapters_survives_its_text():
    for text in ("3*a", "8*b + 3*b*u + 2*b*a + 5*b*u*a"):
        assert str(Polynomial.parse(text)) == text
    for text in ("{}.up 8ux1a b1 b2 summed", "{}.down 1ax6u b1 b2"):
        assert str(Parameter.parse(text)) == text


@given(*[st.lists(TERMS, max_size=3).map(tuple)] * 4, st.integers(1, 9), st.integers(1, 9))
def test_a_polynomial_in_units_and_positions_survives_its_text_and_is_held_in_any_order(
    terms, unit_terms, part_terms, both_terms, units, positions
):
    polynomial = Polynomial(terms or ((1, 0, 0),), unit_terms, part_terms, unit_part_terms=both_terms)
    assert Polynomial.parse(str(polynomial)) == polynomial
    held = polynomial.held(units, positions)
    assert polynomial.held(units, None).held(0, positions).at(b=3, s=5) == held.at(b=3, s=5)
    factors = (
        (1, terms or ((1, 0, 0),)),
        (units, unit_terms),
        (positions, part_terms),
        (units * positions, both_terms),
    )
    assert held.at(b=3, s=5) == sum(factor * c * 3**i * 5**j for factor, each in factors for c, i, j in each)


@pytest.mark.parametrize("text", ["3*u*u", "3*u*r", "3*p*r", "3*b*u*p*p", "3*a*p", "3*a*r"])
def test_units_positions_and_rows_count_once_and_rows_beside_none(text):
    with pytest.raises(ValueError, match="u up to 1, p or a beside it too, or r or e instead"):
        Polynomial.parse(text)


@pytest.mark.parametrize("text", ["", "b", "3*x", "3*b^3", "3 - 2*b", "1.5*b", "3*b*b*b", "3*b^2*b", True, 1.5, None])
def test_what_is_no_polynomial_in_b_and_s_is_refused(text):
    with pytest.raises(ValueError, match=r"polynomial|powers"):
        Polynomial.parse(text)


@given(MOMENTS)
def test_a_moment_survives_its_text(moment):
    assert Moment.parse(str(moment)) == moment


@pytest.mark.parametrize("text", ["", "f", "x3", "f3@1", "f-1", "end@+1", "b3@"])
def test_what_is_no_moment_is_refused(text):
    with pytest.raises(ValueError, match="is not a moment"):
        Moment.parse(text)


@given(
    *(MOMENTS, MOMENTS, st.sampled_from(["input", "activations", "temporaries"]), TERMS, st.integers(0, 4)),
    *(st.sampled_from(["", ONE_SAMPLE, SEVERAL_SAMPLES]), st.none() | MOMENTS),
)
def test_a_buffer_survives_its_text(born, freed, category, term, mark, samples, handed_on):
    marks = dict.fromkeys(("", "fixed", "casts_input", "summed_in_place", "pages")[mark : mark + 1], True)
    marks.pop("", None)
    marks |= {"samples": samples, "handed_on": handed_on}
    buffer = Buffer(born, freed, category, Polynomial((term,)), **marks)
    assert Buffer.parse(str(buffer)) == buffer


def test_memory_of_a_gradient_passes_to_the_sum_that_is_computed_in_place():
    texts = ("b0 b2 temporaries 64*b*s", "b1 b2 temporaries 64*b*s", "b2 b3 temporaries 64*b*s")
    peaks = []
    for mark in ("", " summed-in-place"):
        buffers = tuple(map(Buffer.parse, (texts[0] + mark, *texts[1:])))
        layers = unrolled(
            replace(tiny_model(), layers=(replace(tiny_model().layers[1], modules=("h.0",), buffers=buffers),))
        )
        peaks.append(footprint(activation_timeline(layers, batch_size=2, sequence_length=4).at(0, "b")))
    assert [each.peak_bytes for each in peaks] == [3 * 64 * 8, 2 * 64 * 8]
    assert [each.kept for each in peaks] == [(), ()]


def test_integers_are_as_large_in_every_precision():
    """Indices of a router were predicted to shrink and grow with the precision of values."""
    buffers = tuple(map(Buffer.parse, ("f0 b2 activations 64*b*s", "f1 b1 activations 8*b*s fixed")))
    layers = unrolled(
        replace(tiny_model(), layers=(replace(tiny_model().layers[1], modules=("h.0",), buffers=buffers),))
    )
    shape = {"batch_size": 2, "sequence_length": 4}
    for scale in (0.5, 1.0, 2.0):
        kept = dict(footprint(activation_timeline(layers, scale=scale, **shape).at(0, "f")).kept)
        assert kept == {"activations": 8 * (64 * scale + 8)}


@pytest.mark.parametrize(
    "text", ["f0 b1 activations", "f0 b1 gradients 4", "f0 b1 activation 4", "f0 x activations 4", 4]
)
def test_what_is_no_buffer_is_refused(text):
    with pytest.raises(ValueError, match=r"must be|category|moment"):
        Buffer.parse(text)


@given(st.lists(st.integers(1, 99), max_size=4).map(tuple), MOMENTS, MOMENTS)
def test_a_parameter_survives_its_text_and_knows_its_elements(shape, born, ready):
    parameter = Parameter("{}.weight", shape, born, ready)
    assert Parameter.parse(str(parameter)) == parameter
    product = 1
    for size in shape:
        product *= size
    assert parameter.elements == product


@pytest.mark.parametrize("text", ["{}.w 4x b0 b1", "{}.w 4 b0", "{}.w x b0 b1", "w", 3])
def test_what_is_no_parameter_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        Parameter.parse(text)


def test_repeated_layers_are_unrolled_in_forward_order_with_their_own_names():
    layers = unrolled(tiny_model())
    assert [layer.module for layer in layers] == ["embedding", "h.0", "h.1", "head", "loss"]
    assert [layer.index for layer in layers] == [0, 1, 2, 3, 4]
    assert tuple(name for layer in layers for name in layer.parameter_names) == PARAMETERS


def test_the_model_counts_every_repetition():
    assert tiny_model().elements == 64 + 2 * (16 + 4) + 64


def test_gradients_become_ready_from_the_last_layer_to_the_first():
    layers = unrolled(tiny_model())
    names = [layers[i].parameter_names[j] for i, j in gradient_order(layers)]
    assert names == ["head.weight", "h.1.weight", "h.1.bias", "h.0.weight", "h.0.bias", "embedding.weight"]


def test_a_gradient_that_is_ready_in_another_layers_backward_comes_in_that_ones_place():
    model = tiny_model()
    late = Parameter.parse("{}.weight 16x4 b0 b3@-3")
    layers = tuple(replace(layer, parameters=(late,)) if layer.name == "head" else layer for layer in model.layers)
    instances = unrolled(replace(model, layers=layers))
    names = [instances[i].parameter_names[j] for i, j in gradient_order(instances)]
    assert names == ["h.1.weight", "h.1.bias", "h.0.weight", "h.0.bias", "embedding.weight", "head.weight"]


def workload(**changes):
    data = {"model": tiny_model(), "global_batch_size": 4, "sequence_length": 8} | changes
    return validated(Workload, data, file="w.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_length": None}, "sequence_length: missing"),
        ({"sequence_length": 65}, "the model takes at most 64"),
        ({"sequence_length": 0}, "sequence_length = 0"),
        ({"global_batch_size": 0}, "global_batch_size = 0"),
        ({"global_batch_size": 2.5}, "global_batch_size = 2.5"),
        ({"optimizer": "adagrad"}, "optimizer = 'adagrad'"),
        ({"learning_rate": 0}, "learning_rate = 0"),
        ({"momentum": 1}, "momentum = 1"),
    ],
)
def test_a_workload_that_the_model_cannot_take_is_refused(changes, message):
    with pytest.raises(UserError) as error:
        workload(**changes)
    assert message in str(error.value)


def test_a_model_that_is_not_exact_in_the_sequence_takes_only_traced_lengths():
    model = replace(tiny_model(), exact_sequence=False, traced_sequence_lengths=(8, 16))
    assert workload(model=model, sequence_length=16).sequence_length == 16
    with pytest.raises(UserError, match="traced only at 8, 16"):
        workload(model=model, sequence_length=12)


def test_a_model_of_images_takes_no_sequence_length():
    model = replace(tiny_model(), input=ImageInput(kind="image", shape=(1, 8, 8), classes=10))
    assert workload(model=model, sequence_length=None).global_batch_size == 4
    with pytest.raises(UserError, match="takes none"):
        workload(model=model)


@pytest.mark.parametrize("given_", [{}, {"factory": "a.b", "hugging_face": {"model_type": "gpt2"}}])
def test_a_module_comes_from_exactly_one_place(given_):
    with pytest.raises(ValueError, match="exactly one"):
        Module(**given_)
