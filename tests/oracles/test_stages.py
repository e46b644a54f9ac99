"""Real modules cut into stages: one after another they make what the whole module makes, under the same names."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch
from small_models import whole_layers_alone
from strategies import scenario_of, star, tiny_model
from torch import nn

from gsreal.methods.stage_modules import check_stages, stage_module, tied_names
from gsreal.methods.tensor_slices import check_slices
from gsreal.model_files.build import build_module, example_batch, logits_of
from gsreal.model_files.trace import trace
from gsreal.run.feed import Feed
from gssim.errors import UserError
from gssim.scenario import Scenario, held_layers, load_model
from gssim.scenario.stages import stage_cut_error
from gssim.units import validated
from gssim.workload import Buffer, HuggingFace, ImageInput, Model, Module, Moment, Polynomial, unrolled

MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"


def sequence() -> nn.Module:
    """Return a chain of layers without a method of its own, as a user may write it."""
    return nn.Sequential(nn.Embedding(16, 4), nn.Dropout(0.0), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 16))


def one_piece() -> nn.Module:
    """Return a module that cannot be cut."""
    return nn.Bilinear(4, 4, 16)


def pipeline(model: Model, **changes) -> Scenario:
    length = 12 if model.input.kind == "tokens" else None
    settings = {"model": model, "global_batch_size": 8, "optimizer": "sgd", "sequence_length": length} | changes
    return scenario_of(star(2), {"method": "pipeline", "micro_batches": 2}, **settings)


def with_module(module: Module) -> Model:
    data = {**vars_of(tiny_model()), "module": module}
    return validated(Model, data, file="made")


def vars_of(model: Model) -> dict:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


@pytest.mark.parametrize("name", ["gpt-byte-1m", "bert-byte-1m", "resnet-digits"])
@pytest.mark.parametrize("share", [1, 2, 5, -1])
def test_stages_one_after_another_make_what_the_whole_module_makes(name, share):
    model = load_model(MODELS / f"{name}.toml")
    layers = unrolled(model)
    cut = share % (len(layers) - 1)
    torch.manual_seed(0)
    whole = build_module(model.module, where="test")
    parts = [stage_module(whole, part, shared=True) for part in (layers[:cut], layers[cut:])]
    names = [{name for name, _ in part.named_parameters()} for part in parts]
    assert names[0] | names[1] == {name for name, _ in whole.named_parameters()}
    assert not names[0] & names[1]
    listed = [{n for layer in part for n in layer.parameter_names} for part in (layers[:cut], layers[cut:])]
    assert names == listed
    inputs, _ = example_batch(model, batch_size=2, sequence_length=8)
    assert torch.equal(parts[1](parts[0](inputs)), whole(inputs))


SMALL = sorted((Path(__file__).resolve().parents[1] / "helpers" / "models").glob("*.toml"))
"""Small configurations of the families that ship; `small_models` traces them."""


@pytest.mark.parametrize("file", SMALL, ids=lambda file: file.stem)
def test_stages_of_each_family_make_what_the_whole_model_makes_forward_and_backward(file):
    """Cut before and after every layer: outputs, and gradients of all parameters, those of tied copies as sums."""
    model = load_model(file)
    layers = unrolled(model)
    torch.manual_seed(0)
    # torch multiplies by the matrices of routed experts in 32 bits at most
    precision = torch.float32 if model.expert_layers else torch.float64
    whole = build_module(model.module, where="test").to(precision).train()
    ties = tied_names(whole)
    inputs, _ = example_batch(model, batch_size=2, sequence_length=24)
    inputs = torch.randint_like(inputs, 200) if model.input.kind == "tokens" else torch.rand_like(inputs).to(precision)
    reference = copy.deepcopy(whole)
    expected = logits_of(reference(inputs))
    expected.square().mean().backward()
    cuts = [
        cut for cut in range(1, len(layers) - 1) if not stage_cut_error(layers, (range(cut), range(cut, len(layers))))
    ]
    assert len(cuts) >= len([each for each in layers if each.layer.block])
    for cut in cuts:
        held = held_layers(layers, (range(cut), range(cut, len(layers))))
        first, last = (stage_module(whole, stage, shared=True, model=model) for stage in held)
        passed = first(inputs)
        received = passed.detach().requires_grad_()
        made = last(received)
        assert torch.equal(made, expected)
        made.square().mean().backward()
        passed.backward(received.grad)
        parts = [dict(part.named_parameters()) for part in (first, last)]
        listed = [{n for each in stage for n in each.parameter_names} for stage in held]
        for part, names in zip(parts, listed, strict=True):
            assert {min(ties.get(n, {n})) for n in part} == {min(ties.get(n, {n})) for n in names}
        for name, parameter in reference.named_parameters():
            copies = [part[n].grad for part in parts for n in ties.get(name, {name}) if n in part]
            assert torch.allclose(sum(copies), parameter.grad, rtol=1e-12, atol=1e-15), name


def test_a_chain_of_the_users_needs_no_method_and_what_has_no_parameters_goes_with_the_layer_before_it():
    whole = sequence()
    layers = unrolled(tiny_model())
    named = {"0": layers[0], "2": layers[1], "4": layers[3]}
    parts = [stage_module(whole, [renamed(named[n], n) for n in part], shared=True) for part in (["0"], ["2"], ["4"])]
    assert [[type(child).__name__ for child in part] for part in parts] == [
        ["Embedding", "Dropout", "Identity", "Identity", "Identity"],
        ["Identity", "Identity", "Linear", "ReLU", "Identity"],
        ["Identity", "Identity", "Identity", "Identity", "Linear"],
    ]
    inputs = torch.zeros(2, 3, dtype=torch.int64)
    made = inputs
    for part in parts:
        made = part(made)
    assert torch.equal(made, whole(inputs))


def flattened() -> nn.Module:
    """Return a chain that begins with a module which runs no operation."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 10))


def nested() -> nn.Module:
    """Return a chain with a stack inside."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)))
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), blocks, nn.Dropout(0.0), nn.Linear(12, 10))


class Stacked(nn.Module):
    """Adds to the output of a stack, so that no stage may have a part of it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        inputs = x
        for block in self.blocks:
            x = block(x)
        return x + inputs


def stacked() -> nn.Module:
    """Return a chain with a stack inside a module that is no chain."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), Stacked(), nn.Linear(12, 10))


def digits(factory: str) -> Model:
    """Return a module of this file, traced on images of 8 by 8."""
    source = ImageInput(kind="image", shape=(1, 8, 8), classes=10)
    blank = replace(load_model(MODELS / "resnet-digits.toml"), module=Module(factory=f"test_stages.{factory}"))
    with whole_layers_alone():
        return trace(replace(blank, input=source, layers=(), sliced_layers=()), where="test")


@pytest.mark.parametrize("factory", ["flattened", "nested"])
def test_chains_cut_before_and_after_every_layer_make_what_the_whole_makes(factory):
    model = digits(factory)
    layers = unrolled(model)
    whole = build_module(model.module, where="test")
    inputs = torch.rand(2, 1, 8, 8)
    for cut in range(1, len(layers) - 1):
        stages = (layers[:cut], layers[cut:])
        first, last = (stage_module(whole, stage, shared=True, model=model) for stage in stages)
        for part, stage in ((first, stages[0]), (last, stages[1])):
            assert {name for name, _ in part.named_parameters()} == {n for each in stage for n in each.parameter_names}
        assert torch.equal(last(first(inputs)), whole(inputs))
    check_stages(pipeline(model), where="file")


def test_a_chain_with_layers_inside_a_module_that_is_no_chain_is_refused():
    assert len(unrolled(digits("stacked"))) > 4  # the blocks of the stack are layers
    with pytest.raises(UserError, match=r"Sequential cannot be cut into stages; allowed: .* in it"):
        check_stages(pipeline(digits("stacked")), where="file")


def renamed(instance, module):
    return replace(instance, layer=replace(instance.layer, modules=(module,)), repetition=0)


def test_what_cannot_be_cut_is_refused_before_ranks_start():
    cases = {
        "Bilinear cannot be cut into stages": Module(factory="test_stages.one_piece"),
        "BertForSequenceClassification needs the tokens in its last layers too": Module(
            hugging_face=HuggingFace(model_type="bert", auto_class="AutoModelForSequenceClassification")
        ),
    }
    for message, module in cases.items():
        with pytest.raises(UserError, match=f"file: plan.pp = 2: {message}.*; allowed: "):
            check_stages(pipeline(with_module(module)), where="file")
    check_stages(pipeline(with_module(Module(factory="test_stages.sequence"))), where="file")
    check_stages(pipeline(load_model(MODELS / "gpt-byte-1m.toml")), where="file")


def test_a_model_of_images_whose_layers_pass_on_more_than_a_tensor_is_refused_before_ranks_start(monkeypatch):
    vit = pytest.importorskip("transformers.models.vit.modeling_vit")
    folder = Path(__file__).resolve().parents[1] / "helpers" / "models"
    check_stages(pipeline(load_model(folder / "resnet.toml")), where="file")
    model = load_model(folder / "vit.toml")
    check_stages(pipeline(model), where="file")
    embed = vit.ViTEmbeddings.forward

    def embedded_and_size(self, pixels, **named):
        """Return what Swin's embeddings do."""
        return embed(self, pixels, **named), (4, 4)

    def with_size(self, pixels, **_named):
        hidden, _size = self.embeddings(pixels)
        for layer in self.layers:
            hidden = layer(hidden)
        return vit.BaseModelOutputWithPooling(last_hidden_state=self.layernorm(hidden))

    monkeypatch.setattr(vit.ViTEmbeddings, "forward", embedded_and_size)
    monkeypatch.setattr(vit.ViTModel, "forward", with_size)
    with pytest.raises(UserError, match=r"cannot be cut into stages: stage 1 .*too many values.*; allowed: "):
        check_stages(pipeline(model), where="file")


def test_a_model_of_tokens_whose_blocks_return_more_than_a_tensor_is_refused_before_ranks_start(monkeypatch):
    """Ranks ended with a traceback: an RWKV's blocks return states too, an ALBERT's stack an output with a name."""
    gpt2 = pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    model = load_model(Path(__file__).resolve().parents[1] / "helpers/models/of_tests/tiny-gpt2.toml")
    check_stages(pipeline(model, sequence_length=24), where="file")
    run = gpt2.GPT2Block.forward

    def with_states(self, hidden, *_given, **_named):
        return run(self, hidden), None, None

    def through_blocks(self, tokens=None, *_given, inputs_embeds=None, **_named):
        hidden = self.wte(tokens) if inputs_embeds is None else inputs_embeds
        for block in self.h:
            hidden, _state, _attention = block(hidden)
        return gpt2.BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.ln_f(hidden))

    monkeypatch.setattr(gpt2.GPT2Block, "forward", with_states)
    monkeypatch.setattr(gpt2.GPT2Model, "forward", through_blocks)
    with pytest.raises(UserError, match=r"cannot be cut into stages: stage .*too many values.*; allowed: "):
        check_stages(pipeline(model, sequence_length=24), where="file")


def test_dropout_is_refused_before_ranks_that_cut_blocks_start():
    model = load_model(Path(__file__).resolve().parents[1] / "helpers" / "models" / "gpt2.toml")
    data = vars_of(model)
    module, config = data["module"], data["module"].hugging_face.config
    dropping = replace(module.hugging_face, config={**config, "resid_pdrop": 0.1})
    data["module"] = replace(module, hugging_face=dropping)
    of_model = {"global_batch_size": 8, "optimizer": "sgd", "sequence_length": 24}
    for plan in ({"method": "gs_tp"}, {"method": "tensor"}):
        scenario = scenario_of(star(2), plan, model=validated(Model, data, file="made"), **of_model)
        with pytest.raises(UserError, match=r"file: plan.method = .* so that dropout would .*; allowed: dropout of 0"):
            check_slices(scenario, where="file")
        check_slices(scenario_of(star(2), plan, model=model, **of_model), where="file")


def test_a_rank_is_fed_what_its_stage_needs_and_only_the_last_counts_in_the_loss():
    scenario = scenario_of(
        star(4),
        {
            "method": "ddp",
            "pp": 2,
            "dp_replicate": 2,
            "micro_batches": 2,
            "shares": {"batch": [0.75, 0.25]},
        },
        model=load_model(MODELS / "gpt-byte-1m.toml"),
        sequence_length=12,
    )
    fed = [Feed(scenario, rank, torch.device("cpu")).at(0) for rank in range(4)]
    assert [len(inputs) for inputs, _, _ in fed] == [6, 2, 0, 0]
    assert [len(targets) for _, targets, _ in fed] == [0, 0, 6, 2]
    assert {weights.ranks for _, _, weights in fed} == {(0.0, 0.0, 0.75, 0.25)}
    assert {weights.micro_batches for _, _, weights in fed} == {(0.5, 0.5)}


def test_a_tensor_of_the_size_of_a_gradient_is_no_shared_parameter():
    """DeBERTa's relative positions have the size of its queries' gradient in 16 bits, and were said to be these."""
    layers = unrolled(load_model(MODELS / "gpt-byte-1m.toml"))
    own = layers[1].layer.parameters
    place = max(range(len(own)), key=lambda each: (sum(own[each].elements == p.elements for p in own) == 1, each))
    parameter = own[place]
    size = Polynomial(((2 * parameter.elements, 0, 0),))

    def error(position):
        crossing = Buffer(Moment("b"), Moment("b", position, -1), "temporaries", size)
        second = replace(layers[2].layer, buffers=(*layers[2].layer.buffers, crossing))
        changed = [*layers[:2], replace(layers[2], layer=second), *layers[3:]]
        return stage_cut_error(changed, (range(2), range(2, len(layers))))

    name = layers[1].parameter_names[place]
    assert error(parameter.born.position + 1) == f"stages 0 and 1 would share the parameter '{name}'"
    other = error(parameter.born.position + 90)
    assert "share" not in other
    assert (
        f"a tensor of {2 * parameter.elements} bytes, whatever the batch, goes from '{layers[2].module}' to " in other
    )
