"""Misuses and unusual uses of Gradient Sharding, on both ranks of a test: right as on one device, or a clear error.

None of them ends a process group or leaves a rank waiting, so that one start serves all. Argument: the file for what
they showed.
"""

import copy
import math
import os
import sys
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.utils.prune
from library_ranks import report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from gsreal.gradient_sharding import memory_and_traffic, shard_gradients
from gsreal.run.rank import run_on_rank
from gssim.plan import Publish, Push

TIMEOUT = timedelta(seconds=20)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
ADAM = partial(torch.optim.AdamW, lr=1e-2)
SMALL = {"first_bucket_bytes": 2000, "bucket_bytes": 8000}
FORMS = (
    {},
    {"push": Push(threshold=0.0)},
    {"push": Push(threshold=0.0, encoding="dense")},
    {"parameters": "sharded", "units": lambda model: [model[0], model[2]]},
)
REPLICATED = FORMS[:3]
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def mlp(seed=0):
    torch.manual_seed(seed)
    layers = (nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    return nn.Sequential(*layers).double()


def batches(steps=3):
    random = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield torch.randn(8, 8, generator=random, dtype=torch.float64), torch.randint(0, 5, (8,), generator=random)


def own(*tensors):
    return [tensor.chunk(2)[dist.get_rank()] for tensor in tensors]


def train(model, optimizer, mine, steps=3):
    for inputs, targets in batches(steps):
        inputs, targets = own(inputs, targets) if mine else (inputs, targets)
        loss(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def loss(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets)


def each_step(action):
    """Return a loop that does the same in every step."""

    def loop(model, optimizer, mine):
        for inputs, targets in batches():
            action(model, optimizer, *(own(inputs, targets) if mine else (inputs, targets)))

    return loop


def alike(loop=train, build=mlp, factory=SGD, forms=FORMS):
    """Check that a loop trains the same as on one device."""
    for form in forms:
        model, reference = build(), build()
        options = {**form, "units": form["units"](model)} if "units" in form else form
        loop(model, shard_gradients(model, factory, **{**SMALL, **options}), True)
        loop(reference, factory(reference.parameters()), False)
        check_same(model, reference, form)


def check_same(model, reference, form=None):
    trained = model.state_dict()
    for name, value in reference.state_dict().items():
        difference = float((trained[name] - value).abs().max()) if value.numel() else 0.0
        assert difference <= 1e-9, (form, name, difference)


def refused(words, action, *arguments, **options):
    try:
        found = action(*arguments, **options)
    except (RuntimeError, ValueError) as error:
        if words in str(error):
            return
        raise AssertionError(f"{words!r} is not in: {error}") from error
    raise AssertionError(f"nothing was raised of {words!r}, but {found!r:.80} returned")


# Options --------------------------------------------------------------------------------------------------------------


@case
def options_that_are_none():
    for shares in ([1.0], [1.5, -0.5], [math.nan, 0.5], [0.7, 0.7], "half", {0: 0.5, 1: 0.5}, 0.5):
        refused("shard_shares must be 2 fractions", shard_gradients, mlp(), SGD, shard_shares=shares)
    for size in (0, -5, math.nan, "25MB", True):
        refused("bucket_bytes must be a number", shard_gradients, mlp(), SGD, bucket_bytes=size)
        refused("first_bucket_bytes must be a number", shard_gradients, mlp(), SGD, first_bucket_bytes=size)
    for name, value in (
        ("push", 0.1),
        ("push", Publish(threshold=0.1)),
        ("publish", Push(threshold=0.1)),
        ("parameters", "shard"),
        ("mesh", "cpu"),
        ("scaler", True),
        ("observe", None),
        ("units", ["0"]),
        ("units", nn.Linear(2, 2)),
    ):
        refused(f"{name} must be", shard_gradients, mlp(), SGD, **{name: value})
    for name in ("overlap", "publish_overlaps", "whole_tensors", "skip_nonfinite", "point_to_point"):
        refused(f"{name} must be True or False, not 'no'", shard_gradients, mlp(), SGD, **{name: "no"})
    for unit in (nn.ModuleList([nn.Linear(2, 2)]), nn.ParameterList([torch.ones(2)])):  # which trained on NaN
        words = f"units has a {type(unit).__name__}, which is never called"
        refused(words, shard_gradients, nn.Sequential(unit), SGD, parameters="sharded", units=[unit])
    refused("model must be", shard_gradients, list(mlp().parameters()), SGD)
    refused("optimizer_factory must be", shard_gradients, mlp(), "adamw")
    refused("optimizer_factory must be", shard_gradients, mlp(), SGD(mlp().parameters()))
    model = mlp()
    refused("must make an optimizer of the tensors", shard_gradients, model, lambda _: SGD(model.parameters()))


@case
def groups_of_parameters():
    for groups, words in (
        ([{"lr": 1.0}], "under 'params'"),
        (["0.weight"], "under 'params'"),
        ([{"params": ["0.wieght"]}], "no parameter that is trained"),
        ([{"params": [torch.zeros(2)]}], "no parameter of the model"),
        ([{"params": ["0.weight", "0.weight"]}], "param_groups[0] and in param_groups[0]"),
        (
            [{"params": [name for name, _ in mlp().named_parameters()] + [nn.Parameter(torch.zeros(3))]}],
            "is not in the model",
        ),
    ):
        refused(words, shard_gradients, mlp(), SGD, param_groups=groups)

    model, reference = mlp(), mlp()
    optimizer = shard_gradients(model, SGD, param_groups=[{"params": list(model.named_parameters()), "lr": 0.2}])
    train(model, optimizer, True)
    train(reference, SGD(reference.parameters(), lr=0.2), False)
    check_same(model, reference)


@case
def a_group_without_this_rank():
    group = dist.new_group([0])
    if dist.get_rank():
        refused("rank 1 is not in the group", shard_gradients, mlp(), SGD, group=group)
    else:
        model, reference = mlp(), mlp()
        train(model, shard_gradients(model, SGD, group=group), False)
        train(reference, SGD(reference.parameters()), False)
        check_same(model, reference)


@case
def experts_that_each_rank_holds_alone():
    """Their gradient is the rank's own, as the sum over the tokens of both ranks; nothing of them is sent or saved."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    levels = {"mesh": init_device_mesh("cpu", (1, 2))}  # of which one is a node: all else is reduced in it
    for form in (*FORMS, levels, levels | {"overlap": True, "bucket_bytes": 64, "first_bucket_bytes": 64}):
        form = form | ({"units": form["units"](model := mlp())} if "units" in form else {"units": ()})
        model = model if form["units"] else mlp()
        with torch.no_grad():
            model[2].weight += dist.get_rank()
        reference = copy.deepcopy(model)
        plain = partial(torch.optim.SGD, lr=0.1)
        optimizer = shard_gradients(model, plain, experts=["2.weight"], expert_group=alone, **form)
        x, targets = next(batches())
        inputs, own_targets = own(x, targets)
        F.cross_entropy(model(inputs), own_targets).backward()
        optimizer.step()
        F.cross_entropy(reference(inputs), own_targets).backward()
        gradients = {name: parameter.grad.div_(2) for name, parameter in reference.named_parameters()}
        for name, gradient in gradients.items():
            if name != "2.weight":
                dist.all_reduce(gradient)
        trained = model.state_dict()
        for name, parameter in reference.named_parameters():
            assert torch.allclose(trained[name], parameter.detach() - 0.1 * gradients[name], atol=1e-12), (name, form)
        refused("ranks divide experts", optimizer.state_dict)
        refused("ranks divide experts", optimizer.sharded)
        refused("shards change owners only where", optimizer.reshard, [0.5, 0.5])
    refused("give both", shard_gradients, mlp(), SGD, experts=["2.weight"])
    refused("give both", shard_gradients, mlp(), SGD, expert_group=alone)
    refused("'3.weight' is no parameter", shard_gradients, mlp(), SGD, experts=["3.weight"], expert_group=alone)
    options = {"experts": ["2.weight"], "expert_group": alone, "whole_tensors": True}
    refused("whole_tensors", shard_gradients, mlp(), torch.optim.SGD, **options)


@case
def experts_named_in_other_ways():
    """Names from a generator or of a compiled module are of the same parameters, which keep each rank's own values."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for named, experts in (
        (lambda model: model, (name for name in ["2.weight"])),
        (partial(torch.compile, backend="eager"), ["_orig_mod.2.weight"]),
    ):
        model = mlp()
        with torch.no_grad():
            model[2].weight.fill_(dist.get_rank())
        shard_gradients(named(model), SGD, experts=experts, expert_group=alone)
        assert torch.all(model[2].weight == dist.get_rank())
    model = mlp()
    train(model, shard_gradients(model, SGD, experts=None), False)
    for experts in ("2.weight", [mlp()[2].weight]):
        words = "is no parameter of the model: list names"
        refused(words, shard_gradients, mlp(), SGD, experts=experts, expert_group=alone)


@case
def experts_whose_ranks_do_not_fit():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    other = [alone, dist.group.WORLD][dist.get_rank()]
    words = "ranks that divide experts: 1 on rank 1, 2 on rank 0"
    refused(words, shard_gradients, mlp(), SGD, experts=["2.weight"], expert_group=other)
    for group in ([0], dist.GroupMember.NON_GROUP_MEMBER):
        refused("expert_group must be", shard_gradients, mlp(), SGD, experts=["2.weight"], expert_group=group)
    optimizer = shard_gradients(mlp(), SGD, experts=["2.weight"], expert_group=alone)
    refused("over the tokens of all of them, and must have equal weights", setattr, optimizer, "weights", [0.75, 0.25])
    assert optimizer.weights == (0.5, 0.5)


@case
def a_group_that_is_destroyed_and_made_again():
    model, reference = mlp(), mlp()
    group = dist.new_group()
    optimizer, plain = shard_gradients(model, SGD, group=group), SGD(reference.parameters())
    train(model, optimizer, True, steps=1)
    saved = optimizer.state_dict()
    dist.destroy_process_group(group)
    for call in (optimizer.step, lambda: loss(model, *own(*next(batches()))).backward()):
        refused("the process group was destroyed", call)
    model.zero_grad()  # of the backward that was refused
    optimizer = shard_gradients(model, SGD, group=dist.new_group())
    optimizer.load_state_dict(saved)
    train(model, optimizer, True)
    train(reference, plain, False, steps=1)
    train(reference, plain, False)
    check_same(model, reference)


@case
def sizes_of_what_is_estimated():
    for rank, ranks in ((5, 2), (-1, 2), (0, 0)):
        refused("rank must be one of", memory_and_traffic, mlp(), SGD, rank=rank, ranks=ranks)
    refused("density must be", memory_and_traffic, mlp(), SGD, rank=0, ranks=2, density=math.nan)
    refused("shard_shares must be", memory_and_traffic, mlp(), SGD, rank=0, ranks=2, shard_shares=[0.5])
    refused("bucket_bytes must be", memory_and_traffic, mlp(), SGD, rank=0, ranks=2, bucket_bytes=0)


@case
def weights_that_are_none():
    optimizer = shard_gradients(mlp(), SGD)
    for weights in ({0: 1.0, 1: 0.0}, 0.5, None, "11", [1.0], [0.5, 0.6], [-1.0, 2.0], [math.nan, 0.5]):
        refused("weights must be 2 fractions", setattr, optimizer, "weights", weights)
    optimizer.weights = [0.75, 0.25] if dist.get_rank() else [0.25, 0.75]
    refused("weights: (0.75, 0.25) on rank 1", optimizer.state_dict)


@case
def options_that_a_factory_chooses_by_shape_or_place():
    def by_shape(tensors):
        matrices = [p for p in tensors if p.dim() > 1]
        groups = [{"params": matrices, "weight_decay": 5e-4}, {"params": [p for p in tensors if p.dim() < 2]}]
        return torch.optim.SGD(groups, lr=0.1)

    def by_place(tensors):
        return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.9999**i} for i, p in enumerate(tensors)])

    refused("chooses weight_decay by a tensor's shape", shard_gradients, mlp(), by_shape)
    refused("chooses lr by a tensor's shape", shard_gradients, mlp(), by_place)


@case
def weights_that_are_set_after_the_backward():
    model, reference = mlp(), mlp()
    optimizer = shard_gradients(model, SGD)
    cut = slice(2, 8) if dist.get_rank() else slice(0, 2)
    inputs, targets = next(batches())
    loss(model, inputs[cut], targets[cut]).backward()
    optimizer.weights = [0.25, 0.75]
    refused("set them before it", optimizer.step)
    optimizer.zero_grad()
    loss(model, inputs[cut], targets[cut]).backward()
    optimizer.step()
    train(reference, SGD(reference.parameters()), False, steps=1)
    check_same(model, reference)


@case
def densities_that_are_no_fractions_and_orders_that_are_none():
    refused("at most 1", shard_gradients, mlp(), SGD, push=Push(threshold=2.0, kind="target-density"))
    refused("parameter_order must be", shard_gradients, mlp(), SGD, parameter_order=5)


@case
def a_model_wrapped_in_inference_mode():
    with torch.inference_mode():
        refused("inference_mode", shard_gradients, mlp(), SGD)


# Models ---------------------------------------------------------------------------------------------------------------


@case
def models_that_are_distributed_already():
    refused("wrapped in DistributedDataParallel", shard_gradients, nn.parallel.DistributedDataParallel(mlp()), SGD)
    refused("is a DTensor", shard_gradients, fully_shard(mlp()), SGD)


class HeadOf(nn.Linear):
    """A linear map of the outputs of a model that is no part of it."""

    def __init__(self, model):
        super().__init__(5, 5, dtype=torch.float64)
        self.models = [model]

    def forward(self, inputs):
        return super().forward(self.models[0](inputs))


@case
def models_that_a_trainer_distributes_afterwards():
    for form in FORMS[:2]:
        model = mlp()
        optimizer = shard_gradients(model, SGD, **form)
        batch = own(*next(batches()))
        wrapped = nn.parallel.DistributedDataParallel(model)
        refused("wrapped in DistributedDataParallel", wrapped, batch[0])
        loss(model, *batch).backward()
        optimizer.step()
        other = nn.parallel.DistributedDataParallel(copy.deepcopy(model))  # a copy is not trained by this optimizer
        loss(other, *batch).backward()
        head = nn.parallel.DistributedDataParallel(HeadOf(model))  # trains only itself
        loss(head, *batch).backward()
        optimizer.step()
        optimizer.release_model()
        loss(nn.parallel.DistributedDataParallel(model), *batch).backward()


@case
def hooks_of_the_optimizers_state():
    model, calls = mlp(), []
    optimizer = shard_gradients(model, ADAM)
    train(model, optimizer, True, steps=1)
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("before"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: {k: v for k, v in saved.items() if k != "extra"})
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    saved = optimizer.state_dict()
    assert saved["extra"] == 3
    optimizer.load_state_dict(saved)
    assert calls == ["before", "after"]
    optimizer.register_load_state_dict_pre_hook(lambda _, given: given.update(extra=4))
    optimizer.load_state_dict(saved)
    assert saved["extra"] == 3


@case
def wrapping_again():
    model, reference = mlp(), mlp()
    first = shard_gradients(model, SGD)
    train(model, first, True, steps=1)
    second = shard_gradients(model, SGD)
    for call in (first.step, first.zero_grad, partial(first.clip_grad_norm_, 1.0)):
        refused("called again with this model", call)
    del first
    train(model, second, True)
    train(reference, SGD(reference.parameters()), False, steps=1)
    train(reference, SGD(reference.parameters()), False)
    check_same(model, reference)
    model = mlp()
    part = shard_gradients(model[:3], SGD)
    shard_gradients(model, SGD)
    refused("called again with this model", part.step)
    shard_gradients(sharded := mlp(), SGD, parameters="sharded")
    refused("an earlier shard_gradients has sharded", shard_gradients, sharded, SGD)


@case
def different_parameters_in_the_same_memory():
    model = mlp()
    model.append(nn.Linear(5, 16).double())
    model[2].weight = nn.Parameter(model[5].weight.data.repeat(1, 4)[:, :16])
    model[5].bias = nn.Parameter(model[2].weight.data[0])
    refused("different parameters in the same memory", shard_gradients, model, SGD)
    model = mlp()
    model[0].bias = nn.Parameter(torch.zeros(1).double().expand(16))
    refused("0.bias is expanded", shard_gradients, model, SGD)

    def columns():  # of one matrix, but apart
        model = mlp()
        whole = torch.randn(16, 16, dtype=torch.float64)
        model[0].weight, model[2].weight[:, :8].data[:] = nn.Parameter(whole[:, ::2]), whole[:, 1::2]
        return model

    alike(build=columns, forms=REPLICATED)


class Looked(nn.Module):
    """Looks rows up."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(20, 8, **options)
        self.last = nn.Linear(8, 5)
        self.double()

    def forward(self, inputs):
        return self.last(self.rows((inputs.abs() * 5).long().clamp(max=19)[:, 0]))


@case
def embeddings():
    refused("max_norm changes parameters in the forward", shard_gradients, Looked(max_norm=0.5), SGD)
    sgd = partial(torch.optim.SGD, lr=0.1)
    alike(build=partial(Looked, sparse=True), factory=sgd, forms=REPLICATED)
    alike(build=partial(Looked, padding_idx=0), forms=REPLICATED)


@case
def values_that_are_transposed_in_place():
    model = mlp()
    optimizer = shard_gradients(model, SGD)
    model[2].weight.data = model[2].weight.data.t()
    refused("2.weight is no longer in its bucket", train, model, optimizer, True)


@case
def writes_to_parameters_that_have_no_values():
    model = mlp()
    optimizer = shard_gradients(model, SGD, parameters="sharded", units=[model[0], model[2]])
    train(model, optimizer, True, steps=1)
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    train(model, optimizer, True, steps=1)
    nn.init.zeros_(model[2].weight)
    refused("2.weight was written to", train, model, optimizer, True)
    refused("2.weight was written to", model.state_dict)


@case
def writes_to_parameters_that_are_in_flight():
    def action(model, optimizer, inputs, targets, *, finishes=True):
        loss(model, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if finishes and hasattr(optimizer, "finish"):
            optimizer.finish()
        with torch.no_grad():
            model[2].weight.clamp_(-0.2, 0.2)

    forms = [{"publish_overlaps": True}, {"publish_overlaps": True, "publish": Publish(threshold=0.0)}]
    alike(each_step(action), forms=forms)
    for form in forms:
        model = mlp()
        optimizer = shard_gradients(model, SGD, **SMALL, **form)
        words = "2.weight was written to while published parameters were in flight"
        refused(words, each_step(partial(action, finishes=False)), model, optimizer, True)


@case
def reads_of_parameters_that_are_in_flight():
    """In code that calls no module of theirs; torch.compile leaves out hooks that another module of the class lacks."""
    for finishes in (True, False):
        model = mlp()
        optimizer = shard_gradients(model, SGD, publish_overlaps=True, **SMALL)
        train(model, optimizer, True, steps=1)
        if finishes:
            optimizer.finish()
        squares = model[4].weight.square().sum()
        if finishes:
            squares.backward()
        else:
            refused("4.weight was read before its published values had arrived", squares.backward)


@case
def states_that_ranks_load_differently():
    for form in REPLICATED:
        model = mlp()
        optimizer = shard_gradients(model, SGD, **form)
        refused("ranks differ", model.load_state_dict, mlp(seed=dist.get_rank()).state_dict())
        model.load_state_dict(mlp(seed=5).state_dict())
        train(model, optimizer, True)
        copied = copy.deepcopy(model)
        if dist.get_rank():
            copied.load_state_dict(mlp().state_dict())  # a copy is the rank's own
    group = dist.new_group(timeout=timedelta(seconds=2))
    model = mlp()
    optimizer = shard_gradients(model, SGD, group=group)
    words = "every rank of the group must make this call"
    if dist.get_rank():
        return [partial(refused, words, train, model, optimizer, True)]
    return [partial(refused, words, model.load_state_dict, mlp().state_dict())]


@case
def a_part_of_a_sharded_model_called_by_itself():
    model = mlp()
    optimizer = shard_gradients(model, SGD, parameters="sharded", units=iter([model[0], model[2]]))
    inputs = own(next(batches())[0])[0]
    refused("4 was called outside of a forward of the model", lambda: model[2:](inputs.repeat(1, 2)))
    train(model, optimizer, True, steps=1)


@case
def pruning_after_sharding():
    """Masks are made of the largest values, which parameters that are sharded do not have between steps."""
    for form in FORMS:
        model = mlp()
        options = {**form, "units": form["units"](model)} if "units" in form else form
        optimizer = shard_gradients(model, SGD, **options)
        nn.utils.prune.l1_unstructured(model[2], "weight", amount=0.5)
        inputs, targets = own(*next(batches()))
        loss(model, inputs, targets).backward()
        if "units" in form:
            refused("2.weight became 2.weight_orig where its parameters are sharded", optimizer.step)
        else:
            optimizer.step()
            assert (model[2].weight_mask == 0).sum() == 128
    dist.barrier()


# Loops ----------------------------------------------------------------------------------------------------------------


@case
def steps_without_a_backward():
    def loop(model, optimizer, mine):
        optimizer.step()
        for inputs, targets in batches():
            inputs, targets = own(inputs, targets) if mine else (inputs, targets)
            loss(model, inputs, targets).backward()
            for _ in range(2):
                optimizer.step()
                optimizer.zero_grad()
            torch.autograd.grad(loss(model, inputs, targets), list(model.parameters()))
            optimizer.step()

    alike(loop, forms=REPLICATED)
    alike(loop, factory=ADAM, forms=[{"push": Push(threshold=0.0, error_feedback=True)}])


@case
def backwards_of_some_parameters():
    def action(model, optimizer, inputs, targets):
        loss(model, inputs, targets).backward(inputs=[model[0].weight, model[4].bias])
        optimizer.step()
        optimizer.zero_grad()

    alike(each_step(action))


@case
def gradients_of_frozen_and_thawed_parameters():
    def loop(model, optimizer, mine):
        for step, (inputs, targets) in enumerate(batches(4)):
            model[2].requires_grad_(step % 2 == 0)
            found = loss(model, *(own(inputs, targets) if mine else (inputs, targets)))
            model[2].requires_grad_(step < 2)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()

    alike(loop)


@case
def gradients_by_hand_and_several_backwards():
    def action(model, optimizer, inputs, targets):
        gradients = torch.autograd.grad(loss(model, inputs, targets), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()

    def several(model, optimizer, inputs, targets):
        first, second = loss(model, inputs, targets), loss(model, 2 * inputs, targets)
        first.backward(retain_graph=True)
        first.backward()
        with torch.inference_mode():
            model(inputs)
        second.backward()
        with torch.inference_mode():
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    alike(each_step(action), forms=REPLICATED)
    alike(each_step(several))


@case
def gradient_penalty_and_two_models():
    def penalty(model, optimizer, inputs, targets):
        inputs = inputs.clone().requires_grad_()
        found = model(inputs)
        (slope,) = torch.autograd.grad(F.cross_entropy(found, targets, reduction="sum"), inputs, create_graph=True)
        (F.cross_entropy(found, targets) + slope.square().sum(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    alike(each_step(penalty))
    made = [train_against(shard_gradients, True), train_against(lambda model, adam: adam(model.parameters()), False)]
    for one, other in zip(*made, strict=True):
        check_same(one, other)


def train_against(wrap, mine):
    """Train a generator and a model behind it, whose gradients its loss makes too; return both."""
    first, second = mlp()[:1].append(nn.Linear(16, 8).double()), mlp(seed=1)
    of_first, of_second = (wrap(model, ADAM) for model in (first, second))
    for inputs, _ in batches():
        inputs = own(inputs)[0] if mine else inputs
        of_second.zero_grad()
        second(first(inputs).detach()).square().mean().backward()
        of_second.step()
        of_first.zero_grad()
        second(first(inputs)).square().mean().backward()
        of_first.step()
    return first, second


@case
def nested_no_sync():
    def action(model, optimizer, inputs, targets):
        accumulates = getattr(optimizer, "no_sync", nullcontext)
        with accumulates():
            with accumulates():
                loss(model, inputs, targets).backward()
            loss(model, 2 * inputs, targets).backward()
        loss(model, 3 * inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    alike(each_step(action))


@case
def a_graph_from_before_the_step():
    def action(model, optimizer, inputs, targets):
        found = loss(model, inputs, targets)
        found.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        refused("has been modified by an inplace operation", found.backward)
        optimizer.zero_grad()

    alike(each_step(action), forms=[*FORMS, {"publish": Publish(threshold=0.0)}, {"publish_overlaps": True}])


@case
def twins_whose_backwards_ranks_make_in_other_orders():
    group = dist.new_group(timeout=timedelta(seconds=2))
    twins = [mlp(), mlp()]
    optimizers = [shard_gradients(model, SGD, group=group) for model in twins]
    batch = own(*next(batches()))
    order = (1, 0) if dist.get_rank() else (0, 1)

    def check():
        words = "every rank of the group must make this call"
        refused(words, lambda: [loss(twins[i], *batch).backward() for i in order])
        assert any(optimizer.hierarchy.protocol.failed for optimizer in optimizers)

    return [check]


@case
def another_optimizer_beside():
    for factory in (SGD, ADAM, torch.optim.RMSprop):
        model = mlp()
        optimizer, other = shard_gradients(model, SGD), factory(model.parameters())
        loss(model, *own(*next(batches()))).backward()
        refused("is_sparse of a gradient that was pushed", other.step)
        optimizer.step()


@case
def a_forked_process():
    model = mlp()
    optimizer = shard_gradients(model, SGD)
    loss(model, *own(*next(batches()))).backward()
    child = os.fork()
    if not child:
        try:
            refused("was forked from the rank", optimizer.step)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    optimizer.step()


@case
def a_step_that_is_compiled_as_a_whole():
    def loop(model, optimizer, mine):
        def step(inputs, targets):
            loss(model, inputs, targets).backward()
            if mine:
                optimizer.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        if mine:  # one device is compared as it trains without a compiler
            step = torch.compile(step, backend="eager")  # what it traces is what every backend gets
        for inputs, targets in batches():
            step(*(own(inputs, targets) if mine else (inputs, targets)))
        torch.compiler.reset()

    alike(loop, forms=[*FORMS, {"publish_overlaps": True}])


def halve(parameter):
    parameter.grad.mul_(0.5)


@case
def hooks_of_users():
    def hooked():
        model = mlp()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)
            parameter.register_post_accumulate_grad_hook(halve)
        return model

    def normalised():  # by a hook before the forward, which reads parameters
        model = mlp()
        nn.utils.weight_norm(model[2])
        return model

    alike(build=hooked)
    alike(build=normalised, forms=[*FORMS, {"publish_overlaps": True}])
    model = mlp()
    optimizer = shard_gradients(model, SGD)
    handles = [parameter.register_post_accumulate_grad_hook(halve) for parameter in model.parameters()]
    refused("mul_ of a gradient that was pushed", train, model, optimizer, True)
    for handle in handles:
        handle.remove()
    optimizer.zero_grad()


@case
def reading_pushed_gradients():
    model = mlp()
    optimizer = shard_gradients(model, SGD)
    loss(model, *own(*next(batches()))).backward()
    gradient = model[0].weight.grad
    for read in (
        gradient.norm,
        lambda: gradient.detach().float().norm(),
        lambda: gradient.data * 0.1,
        lambda: gradient.clone().mul_(2),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    ):
        refused("of a gradient that was pushed", read)
    optimizer.step()


@case
def torchs_clipping_of_an_optimizers_shards():
    for options in ({}, {"whole_tensors": True}, {"push": Push(threshold=0.0)}):
        model = mlp()
        optimizer = shard_gradients(model, SGD, **options)
        loss(model, *own(*next(batches()))).backward()
        shards = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for foreach in (None, False):
            words = "call the clip_grad_norm_ of what shard_gradients returned"
            refused(words, nn.utils.clip_grad_norm_, shards, 1.0, foreach=foreach)
        optimizer.step()


@case
def clipping_by_impossible_norms():
    model = mlp()
    optimizer = shard_gradients(model, SGD)
    loss(model, *own(*next(batches()))).backward()
    for arguments in ((-1.0,), (math.nan,), (1.0, -3.0), (1.0, 0.0)):
        refused("clip_grad_norm_ takes", optimizer.clip_grad_norm_, *arguments)
    optimizer.step()


@case
def scalers():
    batch = own(*next(batches()))
    for options, unscales in (({}, False), ({}, True), ({"given": True}, False)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        model = mlp()
        optimizer = shard_gradients(model, SGD, scaler=scaler if options else None)
        scaler.scale(loss(model, *batch)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if options:
            refused("call scaler.unscale_(optimizer) before", optimizer.clip_grad_norm_, 1.0)
            refused("call scaler.step(optimizer)", optimizer.step)
        else:
            refused("pass it to shard_gradients", scaler.step, optimizer)


@case
def losses_scaled_by_the_caller():
    model, batch = mlp(), own(*next(batches()))
    optimizer = shard_gradients(model, SGD)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        refused("set_loss_scale takes a finite factor above 0", optimizer.set_loss_scale, scale)
    loss(model, *batch).backward()
    again = shard_gradients(model, SGD, scaler=torch.amp.GradScaler("cpu", init_scale=256.0))
    refused("use the optimizer that it returned", optimizer.received_gradients)
    refused("by the GradScaler", again.set_loss_scale, 2.0)


@case
def edited_param_groups():
    model, reference = mlp(), mlp()
    optimizer, plain = shard_gradients(model, SGD), SGD(reference.parameters())
    for each in (optimizer, plain):
        each.param_groups = [{**each.param_groups[0], "lr": 0.02}]
    train(model, optimizer, True)
    train(reference, plain, False)
    check_same(model, reference)
    optimizer.param_groups[0]["params"].pop()
    refused("the params of param_groups are this rank's shards", train, model, optimizer, True)


@case
def options_that_differ_between_ranks_show_when_state_is_saved():
    model = mlp()
    optimizer = shard_gradients(model, SGD)
    optimizer.param_groups[0]["lr"] /= 1 + dist.get_rank()
    refused("lr of group 0", optimizer.state_dict)
    refused("lr of group 0", optimizer.reshard, [0.7, 0.3])
    optimizer = shard_gradients(mlp(), ADAM)
    optimizer.param_groups[0]["betas"] = (0.9, 0.99 - 0.1 * dist.get_rank())
    refused("betas of group 0", optimizer.state_dict)


@case
def resharding():
    model, reference = mlp(), mlp()
    optimizer, plain = shard_gradients(model, SGD, **SMALL), SGD(reference.parameters())
    for shares in ([1.0], [-1, 2], [math.nan, 1], [0.7, 0.7], "x", 0.5):
        refused("shard_shares must be 2 fractions", optimizer.reshard, shares)
    refused("ranks differ", optimizer.reshard, [0.7, 0.3] if dist.get_rank() else [0.6, 0.4])
    loss(model, *own(*next(batches()))).backward()
    refused("gradients of this step are pending", optimizer.reshard, [0.7, 0.3])
    optimizer.zero_grad()
    for shares in ([1.0, 0.0], [0.3, 0.7]):
        optimizer.reshard(shares)
        train(model, optimizer, True)
        train(reference, plain, False)
    check_same(model, reference)


@case
def states_of_other_optimizers_and_models():
    model, reference = mlp(), mlp()
    optimizer = shard_gradients(model, ADAM)
    train(model, optimizer, True)
    saved = optimizer.state_dict()
    plain = ADAM(reference.parameters())
    train(reference, plain, False)
    refused("by number", optimizer.load_state_dict, plain.state_dict())
    for odd in ({}, None):
        refused("this is no state_dict", optimizer.load_state_dict, odd)
    wider = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    refused("another model", shard_gradients(wider, ADAM).load_state_dict, saved)
    for copied in (torch.save, lambda each, _: each.__reduce_ex__(2)):
        refused("take its state_dict()", copied, optimizer, "/dev/null")


class BlockwiseSGD(torch.optim.SGD):
    """Keeps a scale for every 16 elements of large tensors, as optimizers with moments in 8 bits do."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.numel() > 64:
                self.state[p]["scales"] = torch.ones(-(-p.numel() // 16))
        return super().step()


@case
def state_that_is_not_by_element():
    model, other = mlp(), mlp()
    optimizer = shard_gradients(model, partial(BlockwiseSGD, lr=0.1))
    train(model, optimizer, True, steps=1)
    for call in (optimizer.state_dict, lambda: optimizer.sharded().state_dict(), lambda: optimizer.reshard([0.7, 0.3])):
        refused("state 'scales' has 16 values for a shard of 25", call)
    whole = shard_gradients(other, partial(BlockwiseSGD, lr=0.1), whole_tensors=True)
    train(other, whole, True, steps=1)
    whole.load_state_dict(whole.state_dict())


@case
def one_rank_that_accumulates():
    model, reference = mlp(), mlp()
    optimizer = shard_gradients(model, SGD)
    for inputs, targets in batches():
        with optimizer.no_sync() if dist.get_rank() else nullcontext():
            loss(model, *own(inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(reference, SGD(reference.parameters()), False)
    check_same(model, reference)


@case
def without_a_process_group():
    """The last of all: nothing can be exchanged after that."""
    model = mlp()
    optimizer = shard_gradients(model, SGD)
    dist.destroy_process_group()
    refused("call torch.distributed.init_process_group before", shard_gradients, mlp(), SGD)
    for call in (optimizer.step, lambda: loss(model, *next(batches())).backward()):
        refused("the process group was destroyed", call)


def main(out):
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    last = CASES["without_a_process_group"]
    report({name: run for name, run in CASES.items() if run is not last}, out)
    last()


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
