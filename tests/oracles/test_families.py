"""Published and real: of eleven Hugging Face families, what is traced is what is trained, and no operation is lost."""

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

import torch
import transformers
from small_models import whole_layers_alone
from test_trace import UNCOUNTED, at, counted_peak_bytes, real_step, replayed_peak_bytes, request_for
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from gsreal.model_files.build import build_module, training_config
from gsreal.model_files.recorder import ALIASES, FORMULAS, flop_of, is_bound_by_bytes
from gsreal.model_files.request import traced_model
from gsreal.model_files.trace import OperationCounts, counted_table
from gssim.errors import UserError
from gssim.workload import HuggingFace, Model, unrolled

WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = {**WIDE, "vocab_size": 64}
GROUPED = {**TOKENS, "num_key_value_heads": 2}
FAMILIES = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "mistral": GROUPED,
    "gemma": {**GROUPED, "head_dim": 8},
    "gpt_neox": TOKENS,
    "opt": {**TOKENS, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": TOKENS,
    "vit": {**WIDE, "image_size": 16, "patch_size": 4},
    "bert": TOKENS,
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""T5, the eleventh, is refused."""
QUICK = ("mixtral",)
LENGTH, CLASSES = 40, 7
SHAPE = {"vit": (4, None)}


def asked(family: str, **changes: object):
    arguments = tuple(f"{key}={value}" for key, value in FAMILIES[family].items())
    given = {"arguments": arguments, "auto_class": None, "classes": None, **changes}
    if family == "vit":
        return request_for("hf:vit", **{**given, "image": "3x16x16", "classes": CLASSES})
    task = "masked-token" if family == "bert" else "next-token"
    tokens = {"image": None, "vocabulary": 64, "task": task, "sequence_length": LENGTH}
    return request_for(f"hf:{family}", **tokens | given)


COUNTED: dict[str, OperationCounts] = {}


@cache
def traced(family: str) -> Model:
    """Return a family's model: in quick tests its whole layers alone, which are all that these tests look at."""
    with whole_layers_alone() if family in QUICK and not os.environ.get("GSSIM_THOROUGH") else nullcontext():
        return traced_model(asked(family), on_counted=partial(COUNTED.__setitem__, family))


def shape_of(family: str) -> tuple[int, int | None]:
    """Return a shape whose batch size is none of the traced ones."""
    return SHAPE.get(family, (4, LENGTH))


def traced_flop(model: Model, shape: tuple[int, int | None]) -> int:
    layers = [instance.layer for instance in unrolled(model)]
    return sum(at(layer.forward_flop, shape) + at(layer.backward_flop, shape) for layer in layers)


def with_config(model: Model, **config: object) -> Model:
    source = model.module.hugging_face
    changed = replace(source, config={**source.config, **config})
    return replace(model, module=replace(model.module, hugging_face=changed))


def each_family(*, but: tuple[str, ...] = ()):
    names = [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FAMILIES if f not in but]
    return pytest.mark.parametrize("family", names)


# What is trained -----------------------------------------------------------------------------------------------------


@each_family()
def test_parameters_are_as_transformers_counts_them(family):
    model = traced(family)
    config = transformers.AutoConfig.for_model(family, **FAMILIES[family])
    if family == "vit":
        config.num_labels = CLASSES
    real = getattr(transformers, model.module.hugging_face.auto_class).from_config(config)
    assert model.elements == real.num_parameters()


@each_family()
def test_flop_are_those_that_torch_counts_in_a_real_step(family):
    """torch counts nothing for grouped products: its count of experts one by one is complete."""
    model, shape = traced(family), shape_of(family)
    _, _, step = real_step(with_config(model, experts_implementation="eager") if family == "mixtral" else model, shape)
    with FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        step().backward()
    assert traced_flop(model, shape) == pytest.approx(counter.get_total_flops(), rel=0.02)


@each_family()
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_a_real_steps_peak_is_the_predicted_one(family, recompute):
    model, shape = traced(family), shape_of(family)
    if family == "falcon" and recompute == "selective":  # it adds in place to a matrix product
        assert {layer.selective_positions for layer in model.layers if layer.block} == {None}
        return
    found = replayed_peak_bytes(model, shape, recompute=recompute)
    assert found == pytest.approx(counted_peak_bytes(model, shape, recompute=recompute), rel=0.01)


@pytest.mark.slow
def test_a_mamba_whose_peak_is_at_sums_of_gradients_has_the_predicted_one():
    """With a tensor of its own for each sum, its peaks were predicted 5.8, 12.4 and 10.4 % too high."""
    sizes = ("vocab_size=64", "hidden_size=32", "num_hidden_layers=3", "state_size=8", "time_step_rank=4")
    given = {"image": None, "classes": None, "auto_class": None, "vocabulary": 64, "sequence_length": LENGTH}
    with whole_layers_alone():
        model = traced_model(request_for("hf:mamba", arguments=sizes, **given))
    for recompute in ("none", "full", "selective"):
        found = replayed_peak_bytes(model, (4, LENGTH), recompute=recompute)
        assert found == pytest.approx(counted_peak_bytes(model, (4, LENGTH), recompute=recompute), rel=1e-3), recompute


def test_an_encoder_decoder_is_refused_with_the_reason():
    request = request_for("hf:t5", image=None, vocabulary=64, auto_class=None)
    with pytest.raises(UserError, match=r"model_type = 't5': an encoder-decoder takes two sequences"):
        traced_model(request)


@pytest.mark.slow
def test_a_mixture_of_experts_is_traced_in_all_its_parts():
    """Quick tests trace whole layers: those of parts, which are traced after them, change none of these."""
    model = traced_model(asked("mixtral"))
    assert model.layers == traced("mixtral").layers
    assert model.context_layers
    assert model.expert_layers


def test_a_mixture_of_experts_does_six_flop_for_each_active_parameter_and_token():
    model, (batch, length) = traced("mixtral"), shape_of("mixtral")
    config = FAMILIES["mixtral"]
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    elements = {
        name: parameter.elements
        for layer in unrolled(model)
        for name, parameter in zip(layer.parameter_names, layer.layer.parameters, strict=True)
    }
    idle_ratio = 1 - config["num_experts_per_tok"] / config["num_local_experts"]
    idle = idle_ratio * sum(size for name, size in elements.items() if ".experts." in name)
    unmultiplied = sum(size for name, size in elements.items() if "norm" in name or "embed_tokens" in name)
    products = 6 * (sum(elements.values()) - idle - unmultiplied) * batch * length
    attention = 14 * layers * batch * length**2 * width  # 4 forward, 10 backward: scores are made twice
    assert traced_flop(model, (batch, length)) == pytest.approx(products + attention, rel=0.02)


def test_a_config_that_is_trained_keeps_no_cache_nor_do_the_models_inside():
    config = training_config(HuggingFace(model_type="gemma3", config={"text_config": {"num_hidden_layers": 2}}), "here")
    assert config.text_config.use_cache is False
    with pytest.raises(UserError, match=r"config\.use_cache: training keeps no keys and values"):
        training_config(HuggingFace(model_type="llama", config={"use_cache": True}), "here")


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_a_model_of_images_has_the_classes_that_are_asked_for(family, monkeypatch):
    monkeypatch.setattr("gsreal.model_files.request.trace", lambda model, **_settings: model)
    small = {**FAMILIES["vit"], "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]}
    arguments = tuple(f"{key}={value}" for key, value in small.items())
    request = request_for(f"hf:{family}", arguments=arguments, image="3x16x16", classes=1000, auto_class=None)
    module = build_module(traced_model(request).module, where="here")
    assert module(torch.zeros(2, 3, 16, 16)).logits.shape == (2, 1000)


BEYOND = {
    "fewer classes": ({"arguments": ("num_labels=3",)}, "vit", "logits for 3 classes, but input.classes = 7"),
    "a smaller vocabulary": ({"vocabulary": 65}, "llama", "logits for 64 classes, but input.vocabulary = 65"),
    "fewer positions": (
        {"maximum_sequence_length": 4096, "sequence_length": 4096},
        "gpt_neox",
        "max_position_embeddings = 2048, but sequences of 4096 tokens",
    ),
    "no head": ({"auto_class": "AutoModel"}, "bert", "auto_class = 'AutoModel': has no head"),
    "no class of models": ({"auto_class": "pipeline"}, "llama", "auto_class = 'pipeline': is no AutoModel class"),
    "experts one by one": (
        {"arguments": ("experts_implementation=eager",)},
        "mixtral",
        "depends on the values of its tensors",
    ),
}
"""Requests whose error fake tensors do not show, or that would be traced but not trained."""


@pytest.mark.parametrize("fault", BEYOND)
def test_what_cannot_be_trained_so_is_refused_before_it_is_traced(fault):
    changes, family, message = BEYOND[fault]
    request = asked(family, **{k: v for k, v in changes.items() if k != "arguments"})
    extra = changes.get("arguments", ())
    with pytest.raises(UserError, match=message):
        traced_model(replace(request, arguments=request.arguments + extra))


# What is counted -----------------------------------------------------------------------------------------------------


@torch.library.custom_op("gsreal_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _context, gradient: 2 * gradient)


class Own(nn.Module):
    """Has an operation of its own."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return torch.ops.gsreal_test.twice(self.head(images.flatten(1)))


class Distances(Own):
    """Has a compute-heavy operation that torch counts nothing for."""

    def forward(self, images):
        return torch.cdist(self.head(images.flatten(1)), torch.zeros(10, 10), p=1.0)


class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, 10)
        self.deep = nn.Conv2d(8, 8, 3, groups=8, padding=1)

    def forward(self, images):
        return self.head(self.deep(self.conv(images)).mean((2, 3)))


@pytest.mark.parametrize(("factory", "operation"), [("Own", "gsreal_test.twice"), ("Distances", "aten._cdist_forward")])
def test_an_operation_whose_flop_nobody_knows_is_refused_by_name(factory, operation):
    with pytest.raises(UserError, match=rf"the operation {operation} does an unknown number of FLOP"):
        traced_model(request_for(f"{__name__}.{factory}"))


def test_an_operation_whose_flop_are_stated_is_counted():
    packet = torch.ops.gsreal_test.twice
    register_flop_formula(packet)(lambda shape, **_settings: 3 * shape[0] * shape[1])
    try:
        model = traced_model(request_for(f"{__name__}.Own"))
    finally:
        del flop_registry[packet]
    head = unrolled(model)[0].layer
    assert at(head.forward_flop, (4, None)) == 2 * 4 * 64 * 10 + 3 * 4 * 10


def test_the_backward_of_a_convolution_by_channel_does_twice_its_forward():
    """torch's counter takes the weight's gradient for that of a convolution of all channels with all."""
    layers = [layer.layer for layer in unrolled(traced_model(request_for(f"{__name__}.Depthwise")))]
    conv, deep = layers[0], layers[2] if len(layers) > 3 else layers[1]
    both = [layer for layer in layers if at(layer.forward_flop, (4, None)) == 2 * 4 * 36 * 8 * 9]
    assert both[-1].backward_flop.at(b=4, s=1) == 2 * 2 * 4 * 36 * 8 * 9
    assert conv is not deep


def product_flop(a, b, groups):
    x, y = (torch.randn(shape, requires_grad=True) for shape in (a, b))
    offsets = None if groups is None else torch.tensor(groups, dtype=torch.int32)
    result = torch.nn.functional.grouped_mm(x, y, offs=offsets)
    return flop_of(torch.ops.aten._grouped_mm.default, (x, y, offsets), {}, result, [x, y, result])


@pytest.mark.parametrize(
    ("a", "b", "groups", "flop"),
    [
        ((24, 16), (3, 16, 32), (4, 4, 24), 2 * 24 * 16 * 32),
        ((16, 24), (24, 32), (4, 12, 24), 2 * 16 * 24 * 32),
        ((3, 8, 16), (16, 24), (8, 8, 24), 2 * 8 * 16 * 24),
        ((3, 8, 16), (3, 16, 32), None, 2 * 3 * 8 * 16 * 32),
    ],
)
def test_grouped_products_count_each_row_once(a, b, groups, flop):
    assert product_flop(a, b, groups) == flop


def test_no_matrix_product_attention_or_transform_passes_for_one_that_moves_bytes():
    """Over all of torch's operations, by the words in their names."""
    heavy = {"mm", "matmul", "conv", "attention", "linear", "lstm", "gru", "rnn", "fft", "cholesky", "svd"}
    heavy |= {"_qr", "_eig", "solve", "inverse", "cdist", "pdist", "mv", "dot", "trilinear"}
    light = {
        "upsample",
        "fake_quant",
        "grid_sampler",
        "convert",
        "fft_fftfreq",
        "fft_rfftfreq",
        "_foreach_",
        "view",
        "gamma",
        "cumm",
    }
    checked = 0
    for name in torch._C._dispatch_get_all_op_names():
        words = {word for word in heavy | light if word in name}
        if not name.startswith("aten::") or not words or words & light:
            continue
        base, _, overload = name[6:].partition(".")
        packet = getattr(torch.ops.aten, base, None)
        func = getattr(packet, overload or "default", None)
        if func is None or packet in flop_registry or packet in FORMULAS or packet in ALIASES:
            continue
        checked += 1
        assert not is_bound_by_bytes(func), name
    assert checked > 200


def adds_up(model: Model, counted: OperationCounts) -> bool:
    shape = counted.batch_size, counted.sequence_length
    layers = [instance.layer for instance in unrolled(model)]
    moved = sum(at(layer.forward_bytes, shape) + at(layer.backward_bytes, shape) for layer in layers)
    works = counted.operations.values()
    return (sum(w.flop for w in works), sum(w.bytes_moved for w in works)) == (traced_flop(model, shape), moved)


def test_the_table_of_what_was_counted_adds_up_to_the_model_file():
    model = traced("mixtral")
    counted = COUNTED["mixtral"]
    assert adds_up(model, counted)
    assert counted.operations["aten._grouped_mm"].operations == 2 * 2 * 3  # both layers' products, and their gradients
    lines = counted_table(counted).splitlines()
    assert lines[0] == "gsreal: counted in one step of 5 samples of 40 tokens, forward and backward:"
    assert lines[1].split() == ["operation", "calls", "FLOP", "bytes"]
    assert lines[2].split()[0] == "aten._grouped_mm"
    assert len(lines) < 20


@pytest.mark.slow
def test_the_table_is_of_all_blocks_where_a_few_are_traced():
    arguments = ("width=16", "heads=2", "layers=9", "vocabulary=32", "maximum_length=32")
    request = request_for("gsreal.models.gpt", arguments=arguments, vocabulary=32, image=None, sequence_length=24)
    tables: list[OperationCounts] = []
    model = traced_model(request, on_counted=tables.append)
    assert adds_up(model, tables[0])
    assert tables[0].operations["aten.addmm"].operations == 9 * 4  # of a forward; the head has no bias


def test_the_precision_is_the_runs_and_not_the_configs():
    """A run casts parameters to its own, and a trace of others would tell of half the bytes."""
    config = training_config(HuggingFace(model_type="llama", config={"dtype": "bfloat16"}), "here")
    assert config.dtype is None


class Mixed(Own):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10, dtype=torch.bfloat16)


def test_parameters_of_another_type_than_the_runs_are_refused():
    with pytest.raises(UserError, match=r"parameters in torch\.bfloat16, but is traced in fp32, to which a run casts"):
        traced_model(request_for(f"{__name__}.Mixed"))
