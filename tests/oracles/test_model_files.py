"""Published: the standard models have as many parameters as are published; small siblings of each family are traced."""

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

import torch
from real_runs import HELPERS
from small_models import whole_layers_alone
from test_trace import at, counted_peak_bytes, flop_of, real_step, replayed_peak_bytes, request_for
from torch import nn

import gsreal.model_files.trace as tracer
from gsreal.model_files.recorder import Recorder
from gsreal.model_files.repeated import KEPT, with_fewer_blocks
from gsreal.model_files.request import Request, traced_model
from gsreal.model_files.step import Step, record_step
from gssim.errors import UserError
from gssim.scenario import load_model
from gssim.workload import Model, sliced_layer, unrolled

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"

# Published counts ----------------------------------------------------------------------------------------------------

PUBLISHED = {
    "resnet-50": (25_557_032, "25.6M"),  # torchvision, resnet50; He et al. 2016 state no count
    "bert-base": (109_514_298, "110M"),  # released bert-base-uncased, BertForMaskedLM; Devlin et al. 2019, section 3
    "bert-large": (335_174_458, "340M"),  # with pooler and the other head 336.2 million
    "gpt2-124m": (124_439_808, "124M"),  # Radford et al. 2019 as released: the paper's own 117M was corrected
    "gpt2-355m": (354_823_168, "355M"),
    "gpt2-774m": (774_030_080, "774M"),
    "gpt2-1.5b": (1_557_611_200, "1.6B"),  # table 2: 1542M
    "gpt3-175b": (None, "174.6B"),  # Brown et al. 2020, table D.1: 174,600 million
    "mt-nlg-530b": (None, "530B"),  # Smith et al. 2022
    "llama2-7b": (6_738_415_616, "6.7B"),  # Touvron et al. 2023 a, table 2 (as LLaMA); released Llama-2-7b
    "llama2-13b": (13_015_864_320, "13.0B"),
    "llama2-70b": (68_976_648_192, "69.0B"),  # released Llama-2-70b; the paper rounds to 70B
    "llama3-8b": (8_030_261_248, "8.0B"),  # released Meta-Llama-3-8B: 8.03B
    "llama3.1-8b": (8_030_261_248, "8.0B"),  # the same sizes; released Llama-3.1-8B: 8.03B
    "llama3-70b": (70_553_706_496, "70.6B"),  # released Meta-Llama-3-70B: 70.6B
    "llama3.1-70b": (70_553_706_496, "70.6B"),  # the same sizes
    "mixtral-8x7b": (46_702_792_704, "46.7B"),  # released Mixtral-8x7B-v0.1: 46.7B
    "qwen3-30b-a3b": (30_532_122_624, "30.5B"),  # released Qwen3-30B-A3B: 30.5B
}
"""Exact count where weights are released, and as published."""
UNITS = {"M": 1e6, "B": 1e9}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if place % 3 else []) for place, name in enumerate(PUBLISHED)]
)
def test_a_model_has_the_published_number_of_parameters(name):
    exact, stated = PUBLISHED[name]
    model = load_model(MODELS / f"{name}.toml")
    number = stated[:-1]
    digits = len(number.replace(".", "") if "." in number else number.rstrip("0"))
    assert float(f"{model.elements:.{digits}g}") == pytest.approx(float(number) * UNITS[stated[-1]])
    assert exact is None or model.elements == exact


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_file_is_small_for_equal_layers_are_written_once(name):
    path = MODELS / f"{name}.toml"
    model = load_model(path)
    traces = 1 + bool(model.sequence_layers) + bool(model.context_layers)  # of whole sequences, and of parts of them
    traces += bool(model.expert_layers) + bool(model.expert_sequence_layers)
    traces += len(model.autocast) + len(model.other_precisions)
    for each in model.adapted:
        traces += 1 + bool(each.context_layers) + bool(each.sliced_layers) + bool(each.sequence_layers)
        traces += bool(each.expert_layers) + bool(each.expert_sequence_layers)
    if model.partly_trained is not None:  # each way in which ranks divide layers is traced with some of them frozen
        traces += sum(bool(getattr(model.partly_trained, each.name)) for each in fields(model.partly_trained))
    assert path.stat().st_size < traces * 50_000
    assert len(model.layers) <= 13


def test_a_file_notes_which_buffers_hold_integers_as_a_fresh_trace_does():
    """Files traced before that was noted halved positions and masks in 16 bits: 4 bytes too few a position.

    A slow test of test_trace.py traces each file whole again.
    """
    file = MODELS / "gpt3-1.3b.toml"
    with whole_layers_alone(split=False, precisions=False):
        again = traced_model(Request(model=str(file), arguments=(), name=None))
    kept = load_model(file)
    assert [layer.buffers for layer in again.layers] == [layer.buffers for layer in kept.layers]
    assert any(buffer.fixed for layer in kept.layers for buffer in layer.buffers)


# Small siblings ------------------------------------------------------------------------------------------------------

OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": "false"}
LLAMA = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 48}
LLAMA |= {"vocab_size": 64, "use_cache": "false"}
SIBLINGS = {
    "llama": ("hf:llama", {**LLAMA, "num_hidden_layers": 6}, "next-token"),
    "short-llama": ("hf:llama", {**LLAMA, "num_hidden_layers": 2}, "next-token"),
    "gpt2": ("hf:gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 6, "vocab_size": 64, **OFF}, "next-token"),
    "bert": (
        "hf:bert",
        {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 6, "intermediate_size": 64, "vocab_size": 64}
        | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "masked-token",
    ),
    "gpt": (
        "gsreal.models.gpt",
        {"width": 32, "heads": 4, "layers": 6, "vocabulary": 64, "tied": "true"},
        "next-token",
    ),
    "resnet": ("hf:resnet", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 3], "num_labels": 5}, None),
}
"""Kinds of the shipped models, all but the short one with more blocks than are traced of equal ones."""


LENGTH = 32
"""Tokens that siblings are traced with; other lengths would take twice the time."""


def sibling(family: str) -> Model:
    model, arguments, task = SIBLINGS[family]
    given = {"arguments": tuple(f"{key}={value}" for key, value in arguments.items()), "auto_class": None}
    if task is None:
        return traced_model(request_for(model, **given, image="3x32x32", classes=5))
    return traced_model(request_for(model, **given, task=task, vocabulary=64, image=None, sequence_length=LENGTH))


@cache
def traced(family: str) -> Model:
    """Return a sibling traced whole and under tensor parallelism."""
    with whole_layers_alone(sliced=True):
        return sibling(family)


SLOW = ("bert", "gpt2", "llama", "short-llama", "resnet")
"""Slow cases; the other ones contain the same kinds of layers."""


def kinds(*without):
    """Return kinds of siblings as a test's parameters, some of them marked slow."""
    return [
        pytest.param(family, marks=[pytest.mark.slow] if family in SLOW else [])
        for family in SIBLINGS
        if family not in without
    ]


@pytest.mark.parametrize("family", kinds())
def test_a_sibling_is_traced_exactly(family):
    model = traced(family)
    shape = (4, LENGTH if model.traced_sequence_lengths else None)
    layers = [instance.layer for instance in unrolled(model)]
    module, _, _ = real_step(model, shape)
    assert model.elements == sum(parameter.numel() for parameter in module.parameters())
    assert sum(at(layer.forward_flop, shape) + at(layer.backward_flop, shape) for layer in layers) == flop_of(
        model, shape
    )


@pytest.mark.parametrize("family", kinds("resnet"))
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_siblings_replayed_peak_is_the_counted_one(family, recompute):
    """Hugging Face's models make no mask for unpadded sequences: one of b s^2 values in a block would show here."""
    model = traced(family)
    shape = (8, LENGTH)
    found = replayed_peak_bytes(model, shape, recompute=recompute)
    assert found == pytest.approx(counted_peak_bytes(model, shape, recompute=recompute), rel=5e-3)


def all_blocks_of(family: str) -> Model:
    """Return a sibling of which every block is traced."""
    with patch.object(tracer, "with_fewer_blocks", lambda _model, _where: None):
        return sibling(family)


def with_ranks_in_the_loss(model: Model) -> Model:
    """Return a model with the order of the moments in the first part of the loss's split backward as their positions.

    Positions there grow with the number of blocks: the part begins before its operations, with a walk over all nodes.
    """
    split = model.layers[-1].split
    moments = [moment for each in split.buffers for moment in (each.born, each.freed) if moment.phase == "i"]
    order = sorted({moment.position for moment in moments})

    def ranked(moment):
        return replace(moment, position=order.index(moment.position)) if moment.phase == "i" else moment

    buffers = tuple(replace(each, born=ranked(each.born), freed=ranked(each.freed)) for each in split.buffers)
    last = replace(model.layers[-1], split=replace(split, buffers=buffers))
    return replace(model, layers=(*model.layers[:-1], last))


@pytest.mark.slow
def test_repeating_a_middle_block_says_what_tracing_all_blocks_says():
    with whole_layers_alone(sliced=True):
        assert with_ranks_in_the_loss(all_blocks_of("gpt")) == with_ranks_in_the_loss(traced("gpt"))
    assert with_fewer_blocks(traced("gpt"), "here") is not None


def test_the_number_of_blocks_is_found_in_a_config_too():
    model = load_model(HELPERS / "models" / "llama.toml")
    source = model.module.hugging_face
    deep = replace(source, config={**source.config, "num_hidden_layers": 6})
    short, stack = with_fewer_blocks(replace(model, module=replace(model.module, hugging_face=deep)), "here")
    assert short.module.hugging_face.config == {**deep.config, "num_hidden_layers": KEPT}
    assert (stack.path, stack.count) == ("model.layers", 6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "llama", "gpt2", "bert"])
def test_repeating_a_middle_block_says_of_divided_sequences_too_what_tracing_all_blocks_says(family):
    whole = all_blocks_of(family)
    assert with_ranks_in_the_loss(sibling(family)) == with_ranks_in_the_loss(whole)
    assert whole.sequence_layers
    assert whole.context_layers


@pytest.mark.parametrize("family", kinds())
def test_siblings_of_transformers_tell_how_they_are_cut(family):
    """Two query heads of this Llama share a head of keys and values, which is the unit of a slice."""
    units = {layer.units for layer in traced(family).sliced_layers if layer.block}
    assert units == (set() if family == "resnet" else {4})


@pytest.mark.slow  # test_trace.py traces a shipped residual network
def test_a_residual_block_is_a_layer_though_its_convolutions_are_a_stack():
    blocks = [layer.module for layer in unrolled(traced("resnet")) if layer.layer.block]
    assert blocks == [f"resnet.encoder.stages.{i}.layers.{j}" for i, depth in enumerate((2, 3)) for j in range(depth)]


# What must not be repeated -------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, *, every: int, number: int):
        super().__init__()
        self.number, self.group = number, 4
        self.twice = every > 0 and number % every == every - 1
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        y = self.linear(x)
        return x + (y * 2 if self.twice else y)


class Stacked(nn.Module):
    def __init__(self, *, blocks: int, every: int = 0, spare: int = 8, extra: bool = False):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(every=every, number=i) for i in range(blocks))
        self.gates = nn.Parameter(torch.ones(blocks)) if extra else None
        self.head = nn.Linear(16, 10)

    def forward(self, images):
        x = self.first(images.flatten(1, 2)).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x if self.gates is None else x * self.gates.sum())


def stacked(**arguments: object) -> Model:
    given = tuple(f"{key}={str(value).lower()}" for key, value in arguments.items())
    return traced_model(request_for(f"{__name__}.Stacked", arguments=given))


def test_equal_blocks_are_found_by_the_argument_that_counts_them():
    """Another argument may be the same number: a sibling made with that has as many blocks as before."""
    model = stacked(spare=8, blocks=8)
    short, stack = with_fewer_blocks(model, "here")
    assert short.module.arguments == {"spare": 8, "blocks": KEPT}
    assert (stack.path, stack.count) == ("blocks", 8)
    assert [layer.module for layer in unrolled(model)] == ["first", *(f"blocks.{i}" for i in range(8)), "head", "loss"]


@pytest.mark.parametrize("different", [{"every": 4}, pytest.param({"extra": True}, marks=pytest.mark.slow)])
def test_blocks_that_differ_and_models_that_are_no_siblings_are_traced_whole(different):
    """In the first, every fourth block does more; in the second a parameter has an element for each block."""
    model = stacked(blocks=9, **different)
    assert with_fewer_blocks(model, "here") is None
    assert sum(instance.layer.name.startswith("blocks") for instance in unrolled(model)) == 9


def test_blocks_with_two_heads_of_keys_are_cut_in_two():
    """With a single head torch repeats no keys, so that no polynomial fitted one unit and two: the blocks of Qwen2.5's
    smaller models could not be cut at all.
    """
    sizes = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    given = {"arguments": tuple(f"{key}={value}" for key, value in sizes.items()), "vocabulary": 64, "image": None}
    with whole_layers_alone(sliced=True, split=False):
        model = traced_model(request_for("hf:llama", **given, auto_class=None, sequence_length=LENGTH))
    assert {layer.units for layer in model.sliced_layers if layer.block} == {2}
    record = record_step(model, Step(batch_size=2, sequence_length=LENGTH, units=1), where="here")
    for index, instance in enumerate(unrolled(replace(model, layers=model.sliced_layers))):
        own = sliced_layer(instance.layer, 1 if instance.layer.units else 0, None)
        assert own.forward_flop.at(b=2, s=LENGTH) == record.flop[index, "f"]
        assert own.backward_flop.at(b=2, s=LENGTH) == record.flop[index, "b"]
        assert own.saved_bytes.at(b=2, s=LENGTH) == pytest.approx(record.saved[index], rel=0.05)


@pytest.mark.parametrize("name", ["tiny-gpt", pytest.param("tiny-llama", marks=pytest.mark.slow)])
def test_what_a_checkpointed_block_holds_during_a_collective_is_freed_after_it(name, monkeypatch):
    """What a collective sends, and what its callers hold, was freed at the operation before, which sends nothing: with
    selective recomputation and adapters, a stage's peak was predicted 3.5 to 7.4 % too low.
    """
    model = load_model(HELPERS / f"models/of_tests/{name}.toml")
    held: dict[tuple[int, int], list[int]] = {}
    """By block and number of the collective: bytes of the block's storages that exist in it, in each forward."""

    def noted(real):
        def collective(recorder, *given):
            received = real(recorder, *given)
            layer, phase, _ = recorder.now()
            if phase == "f":
                number = sum(at[1] == "f" for at, *_ in recorder.record.reductions[layer]) - 1
                alive = [each for each in recorder.live.values() if each.born[:2] == (layer, "f")]
                held.setdefault((layer, number), []).append(sum(each.size_bytes for each in alive))
            return received

        return collective

    monkeypatch.setattr(Recorder, "receive", noted(Recorder.receive))
    record = record_step(model, Step(batch_size=2, sequence_length=LENGTH, units=2, parts=2), where="here")
    blocks = [layer for layer, module in enumerate(record.modules) if module in record.blocks]
    assert {layer for layer, _ in held} >= {*blocks}
    for (layer, number), seen in held.items():
        position = [at[2] for at, *_ in record.reductions[layer] if at[1] == "f"][number]
        own = [each for each in record.alive if each.born[:2] == (layer, "f") and each.born[2] <= position]
        saved = [each for each in own if each.freed is None or each.freed[:2] != (layer, "f")]
        others = [each for each in own if each.freed is not None and each.freed[:2] == (layer, "f")]
        found = sum(each.size_bytes for each in saved if each.unsaved is None or each.unsaved >= position)
        found += sum(each.size_bytes for each in others if each.freed is not None and each.freed[2] >= position)
        assert found == min(seen)  # of the forward that saves nothing


# A model file traced again -------------------------------------------------------------------------------------------


SMALL = {
    "arguments": ("width=16", "heads=2", "layers=2", "maximum_length=8"),
    "vocabulary": 256,
    "image": None,
    "classes": None,
    "sequence_length": 8,
    "maximum_sequence_length": 8,
}


def test_what_a_model_file_holds_is_traced_again_in_another_precision(tmp_path):
    """It was left out with `--precision`, unless the user said `--adapters` and `--frozen` once more."""
    small = request_for("gsreal.models.gpt", **SMALL)
    others = [name for name in tracer.DIVIDED_STEPS if name != "sliced_layers"]
    unsplit = patch.object(tracer, "with_split_costs", lambda _model, layers, *_given, **_where: layers)
    with patch.dict(tracer.DIVIDED_STEPS, dict.fromkeys(others, lambda *_given: None)), unsplit:
        asked = replace(small, adapters=("down",), frozen=True)
        tracer.write_model(tmp_path / "fp32.toml", traced_model(asked))
        request = replace(asked, model=str(tmp_path / "fp32.toml"), arguments=(), adapters=(), frozen=False)
        request = replace(request, precision="bf16", vocabulary=None)
        again = traced_model(request)
    assert [each.role or each.maps for each in again.adapted] == [("down",)]
    assert again.partly_trained is not None
    assert again.partly_trained.sliced_layers
    fp32 = load_model(tmp_path / "fp32.toml")
    for before, after in zip(fp32.adapted, again.adapted, strict=True):
        saved, half = (sum(layer.saved_bytes.held(2).at(b=2, s=8) for layer in a.layers) for a in (before, after))
        assert 0.4 < half / saved < 0.7  # in bf16, not in the file's precision
    notes: list[str] = []
    with pytest.raises(UserError, match="--frozen: compiled blocks are traced without it"):  # said before it is traced
        traced_model(replace(request, compiled=True, frozen=True), on_note=notes.append)
    assert notes == [
        f"gsreal trace {tmp_path / 'fp32.toml'}: --compile: left out, as compiled blocks are traced without: adapters "
        "at down, frozen layers"
    ]


def test_costs_with_frozen_layers_that_cannot_be_traced_again_are_left_out_with_a_note(tmp_path):
    """A user who traced a file again was told to leave out `--frozen`, which only the file's first trace was given."""
    path, others = tmp_path / "small.toml", dict.fromkeys(tracer.DIVIDED_STEPS, lambda *_given: None)
    with patch.dict(tracer.DIVIDED_STEPS, others):
        small = traced_model(request_for("gsreal.models.gpt", **SMALL, frozen=True))
        arguments = small.module.arguments | {"tied": True}  # the file says so from now on
        tracer.write_model(path, replace(small, module=replace(small.module, arguments=arguments)))
        request = Request(model=str(path), arguments=(), name=None, sequence_length=8)
        notes: list[str] = []
        assert traced_model(request, on_note=notes.append).partly_trained is None
        with pytest.raises(UserError, match=r"--frozen: head shares a parameter .* is not modelled; leave it out"):
            traced_model(replace(request, frozen=True))
    (note,) = notes
    assert "left out: costs with frozen layers, which the file had: head shares a parameter" in note
    assert "--frozen" not in note


def test_maps_that_get_no_adapters_are_named_with_the_option_and_its_value():
    """It is said before the model is traced."""
    small = request_for("gsreal.models.gpt", **SMALL)
    said = r"^gsreal trace gsreal\.models\.gpt: --adapters q_proj,foo: the blocks have the linear maps qkv, out, up, d"
    with patch.object(tracer, "record_steps", side_effect=AssertionError), pytest.raises(UserError, match=said):
        traced_model(replace(small, adapters=("q_proj,foo",)))
