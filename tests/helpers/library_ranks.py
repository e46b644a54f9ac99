"""Strangers' loops with Gradient Sharding, on every rank of a test: each beside the same training on one device.

Of the project, only `gsreal.gradient_sharding` is imported. Arguments: checks by name (all by
default), and the file to write what they showed.
"""

import copy
import dataclasses
import json
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from gsreal.gradient_sharding import shard_gradients
from gsreal.run.rank import run_on_rank
from gssim.plan import Publish, Push

ROWS = 12
SMALL = {"first_bucket_bytes": 2000, "bucket_bytes": 8000}
SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
EXACT = 1e-9


def shares():
    return [0.7, 0.3] if dist.get_world_size() == 2 else [0.5, 0.3, 0.2]


def rows():
    """Return how many of the rows every rank takes: unequal."""
    return [8, 4] if dist.get_world_size() == 2 else [6, 4, 2]


def mlp(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 5)
    ).to(dtype)


def batches(count, dtype=torch.float64, scale=1.0):
    """Yield the whole batches of a training, the same everywhere."""
    random = torch.Generator().manual_seed(7)
    for _ in range(count):
        inputs = torch.randn(ROWS, 16, generator=random, dtype=torch.float64)
        yield (scale * inputs).to(dtype), torch.randint(0, 5, (ROWS,), generator=random)


def own(*tensors):
    """Return this rank's rows."""
    return [tensor.split(rows())[dist.get_rank()] for tensor in tensors]


def sharded(model, factory, **options):
    optimizer = shard_gradients(model, factory, **{"shard_shares": shares(), **SMALL, **options})
    optimizer.weights = tuple(count / ROWS for count in rows())
    return optimizer


def train(model, optimizer, data, mine=True, loss=F.cross_entropy, after=lambda: None):
    """The loop that everybody writes."""
    for inputs, targets in data:
        inputs, targets = own(inputs, targets) if mine else (inputs, targets)
        loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def check_equal(model, reference, tolerance=EXACT):
    trained = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        difference = float((parameter.detach() - trained[name.replace("_orig_mod.", "")].detach()).abs().max())
        assert difference <= tolerance * max(1.0, float(trained[name.replace("_orig_mod.", "")].abs().max())), (
            name,
            difference,
        )


def check_equal_on_all_ranks(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(each == found[0] for each in found), found


def raises(action, *words):
    try:
        action()
    except (RuntimeError, ValueError) as error:
        if all(word in str(error) for word in words):
            return
        raise AssertionError(f"{words} are not in: {error}") from error
    raise AssertionError(f"nothing was raised of {words}")


def a_plain_loop():
    model, reference = mlp(torch.float32), mlp(torch.float32)
    start = [p.detach().clone() for p in reference.parameters()]
    train(model, sharded(model, lambda shard: torch.optim.SGD(shard, **SGD)), batches(6, torch.float32))
    train(reference, torch.optim.SGD(reference.parameters(), **SGD), batches(6, torch.float32), mine=False)
    assert max(float((p.detach() - q).abs().max()) for p, q in zip(reference.parameters(), start, strict=True)) > 0.01
    check_equal(model, reference, 1e-5)


def groups_and_a_schedule():
    def groups(model):
        decayed = [p for p in model.parameters() if p.ndim > 1]
        return [
            {"params": decayed, "lr": 2e-2},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]

    model, reference = mlp(), mlp()
    settings = {"lr": 1e-2, "weight_decay": 0.5}
    optimizer = sharded(model, lambda shards: torch.optim.AdamW(shards, **settings), param_groups=groups(model))
    plain = torch.optim.AdamW(groups(reference), **settings)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, T_max=8) for each in (optimizer, plain)]
    train(model, optimizer, batches(6), after=schedules[0].step)
    train(reference, plain, batches(6), mine=False, after=schedules[1].step)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in plain.param_groups]
    assert 0 < optimizer.param_groups[0]["lr"] < 2e-2
    check_equal(model, reference)
    raises(
        lambda: shard_gradients(mlp(), torch.optim.SGD, param_groups=[{"params": ["0.weight"]}]),
        "in none of param_groups",
    )


def clipping():
    for kind in (2.0, float("inf"), 1.0):
        model, reference = mlp(), mlp()
        optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD))
        plain = torch.optim.SGD(reference.parameters(), **SGD)
        for inputs, targets in batches(4):
            F.cross_entropy(model(own(inputs)[0]), own(targets)[0]).backward()
            F.cross_entropy(reference(inputs), targets).backward()
            norm = optimizer.clip_grad_norm_(0.3, kind)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.3, kind)
            assert abs(float(norm) - float(expected)) <= 1e-12 * float(expected), (kind, norm, expected)
            assert float(norm) > 0.3 or kind == float("inf")
            for each in (optimizer, plain):
                each.step()
                each.zero_grad()
        check_equal(model, reference)


def accumulation():
    for synced in (False, True):
        model, reference = mlp(), mlp()
        optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD))
        for inputs, targets in batches(3):
            inputs, targets = own(inputs, targets)
            if synced:  # a push for each
                for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                    (F.cross_entropy(model(x), y) / 2).backward()
            else:
                with optimizer.no_sync():
                    (F.cross_entropy(model(inputs[::2]), targets[::2]) / 2).backward()
                (F.cross_entropy(model(inputs[1::2]), targets[1::2]) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        train(reference, torch.optim.SGD(reference.parameters(), **SGD), batches(3), mine=False)
        check_equal(model, reference)


def what_one_backward_does_not_reach_is_not_lost():
    """A parameter that gets its gradient inside `no_sync` alone."""

    def loss(model, x, y, step):
        hidden = model[0](x) if step == 0 else model[0](x).detach()
        return F.cross_entropy(model[1:](hidden), y) / 2

    model, reference = mlp(), mlp()
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for inputs, targets in batches(3):
        with optimizer.no_sync():
            loss(model, *own(inputs, targets), 0).backward()
        loss(model, *own(inputs, targets), 1).backward()
        for step in range(2):
            loss(reference, inputs, targets, step).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    check_equal(model, reference)


def freezing_for_a_while():
    for kind, settings in ((torch.optim.SGD, SGD), (torch.optim.AdamW, {"lr": 1e-2})):
        model, reference = mlp(), mlp()
        optimizer = sharded(model, partial(kind, **settings))
        plain = kind(reference.parameters(), **settings)
        for frozen in (False, True, False):
            for each in (model, reference):
                each[3].requires_grad_(not frozen)
            before = model[3].weight.detach().clone()
            train(model, optimizer, batches(3))
            train(reference, plain, batches(3), mine=False)
            assert torch.equal(before, model[3].weight) == frozen
            check_equal(model, reference)


class Routed(nn.Module):
    """Experts of which a row of tokens takes one, so that some get no gradient in some steps, or on some ranks."""

    def __init__(self, experts=4):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(experts))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(8, 5)
        self.spare = nn.Linear(3, 3)
        self.double()

    def forward(self, inputs, route):
        hidden = torch.tanh(self.first(inputs))
        parts = [self.experts[expert](hidden[route == expert]) for expert in sorted(set(route.tolist()))]
        if 0 in route:
            parts[0] = parts[0] * self.scale
        return self.last(torch.cat(parts))


ROUTES = ([0, 0], [1, 2], [2, 1], [0, 3], [3, 3], [1, 0], [2, 2])
"""Expert of the first ranks, and that of the last rank, by step."""


def routed_steps():
    """Yield the inputs, the expert of each row and the targets of every step."""
    rest = rows()[-1]
    for (inputs, targets), (first, last) in zip(batches(len(ROUTES)), ROUTES, strict=True):
        yield inputs, torch.tensor([first] * (ROWS - rest) + [last] * rest), targets


def routed_loss(model, inputs, route, targets):
    order = torch.argsort(route, stable=True)  # as the model puts them
    return F.cross_entropy(model(inputs, route), targets[order])


def train_routed(model, optimizer, steps, mine=True, set_to_none=True):
    for inputs, route, targets in steps:
        inputs, route, targets = own(inputs, route, targets) if mine else (inputs, route, targets)
        routed_loss(model, inputs, route, targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


def parameters_without_a_gradient_in_some_steps():
    """As on one device, the optimizer skips them: no momentum, no weight decay, and no step is counted."""
    forms = (
        {},
        {"push": Push(threshold=0.0)},
        {"push": Push(threshold=0.0, encoding="dense")},
        {"parameters": "sharded", "units": lambda model: [model.first, model.last]},
        {"parameters": "gathered", "units": lambda model: [model.last]},
        {"mesh": init_device_mesh("cpu", (1, dist.get_world_size()))},
    )
    kinds = (
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.3}),
        (torch.optim.SGD, SGD),
        (torch.optim.NAdam, {"lr": 1e-2, "foreach": True}),
    )
    for form in forms:
        for number, (kind, settings) in enumerate(kinds[:1] if form else kinds):
            model, reference = Routed(), Routed()
            options = {**form, "units": form["units"](model)} if "units" in form else form
            optimizer = sharded(model, partial(kind, **settings), **options)
            plain = kind(reference.parameters(), **settings)
            train_routed(model, optimizer, routed_steps(), set_to_none=number != 1)
            train_routed(reference, plain, routed_steps(), mine=False, set_to_none=number != 1)
            trained = model.state_dict()
            for name, p in reference.state_dict().items():
                assert float((trained[name] - p).abs().max()) <= EXACT, (form, kind, name)
            whole = {name: each for name, each in optimizer.state_dict()["state"].items() if set(each) != {"master"}}
            states = {name: plain.state[p] for name, p in reference.named_parameters() if plain.state.get(p)}
            assert set(whole) == set(states), (form, kind, set(whole) ^ set(states))
            for name, state in states.items():
                for key, value in state.items():
                    assert float((whole[name][key] - value).abs().max()) <= EXACT, (form, kind, name, key)


def histories_are_saved_by_parameter():
    """Whole and in torch's checkpoints, taken up in another division."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    steps = list(routed_steps())
    for way in ("whole", "sharded"):
        model, other, reference = Routed(), Routed(), Routed()
        factory = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.3)
        optimizer, again = sharded(model, factory), sharded(other, factory, **other_division())
        train_routed(model, optimizer, steps[:3])
        if way == "whole":
            other.load_state_dict(model.state_dict())
            again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        else:
            dcp.save({"model": model, "optimizer": optimizer.sharded()}, checkpoint_id=folder[0])
            dcp.load({"model": other, "optimizer": again.sharded()}, checkpoint_id=folder[0])
        train_routed(other, again, steps[3:])
        train_routed(reference, factory(reference.parameters()), steps, mine=False)
        check_equal(other, reference)
    dist.barrier()


class Averaging(torch.optim.Optimizer):
    """Counts steps in its groups, not by parameter, as schedule-free optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    base = self.state[p].setdefault("base", p.clone())
                    base.sub_(p.grad, alpha=group["lr"])
                    p.lerp_(base, 1 / group["step"])


def state_before_the_first_step():
    """Reading `sharded` before the first step changes nothing, and returns the optimizer's initial state."""
    kinds = (
        (torch.optim.NAdam, {"lr": 1e-2}),
        (torch.optim.Rprop, {"lr": 1e-2}),
        (torch.optim.ASGD, {"lr": 1e-2, "lambd": 0.1}),
        (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
        (torch.optim.SGD, {**SGD, "dampening": 0.5}),
        (Averaging, {"lr": 1e-1}),
    )
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    for kind, settings in kinds:
        model, other, reference = mlp(), mlp(seed=5), mlp()
        optimizer, again = (sharded(each, partial(kind, **settings)) for each in (model, other))
        path = Path(folder[0], kind.__name__)
        dcp.save({"model": model, "optimizer": optimizer.sharded()}, checkpoint_id=path)
        train(reference, kind(reference.parameters(), **settings), batches(3), mine=False)
        train(model, optimizer, batches(3))
        check_equal(model, reference)
        if kind is Averaging:
            again.load_state_dict(optimizer.state_dict())
            assert again.param_groups[0]["step"] == 3
        if kind is not torch.optim.SGD:  # an empty buffer and none are told apart by dampening alone
            dcp.load({"model": other, "optimizer": again.sharded()}, checkpoint_id=path)
            train(other, again, batches(3))
            check_equal(other, reference)
    dist.barrier()


def frozen_from_the_start():
    model, reference = mlp(), mlp(seed=dist.get_rank())
    for each in (model, reference):
        each[0].requires_grad_(False)
    if dist.get_rank():  # the first rank's values count
        model.load_state_dict(mlp(seed=3).state_dict())
        reference.load_state_dict(mlp().state_dict())
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD))
    train(model, optimizer, batches(3))
    train(reference, torch.optim.SGD(reference.parameters(), **SGD), batches(3), mine=False)
    check_equal(model, reference)
    model[0].requires_grad_(True)
    raises(optimizer.step, "was frozen when shard_gradients was called")


class Tied(nn.Module):
    """An embedding that is the last layer's matrix too, a layer that is used twice, and one that is never used."""

    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.twice, self.spare = nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 8), nn.Linear(3, 3)
        self.out = nn.Linear(8, 50, bias=False)
        if not sparse:
            self.out.weight = self.table.weight
        self.double()

    def forward(self, tokens):
        return self.out(self.twice(torch.tanh(self.twice(self.table(tokens)))))


def tokens(count):
    random = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randint(0, 20, (ROWS,), generator=random), torch.randint(0, 20, (ROWS,), generator=random)


def tied_parameters():
    model, reference = Tied(), Tied()
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1, momentum=0.9))
    train(model, optimizer, tokens(4))
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9), tokens(4), mine=False)
    check_equal(model, reference)
    assert model.out.weight is model.table.weight


def a_sparse_embedding():
    model, reference = Tied(sparse=True), Tied(sparse=True)
    reference.table.sparse = False
    options = {"push": Push(threshold=1e-30, encoding="coo"), "bucket_bytes": 1, "first_bucket_bytes": 1}
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1, momentum=0.9), **options)
    train(model, optimizer, tokens(1))
    buckets = [bucket.index for bucket in optimizer.buckets if model.table.weight in bucket.places]
    sent = optimizer.sent.bytes_of[buckets[0]]
    touched = len(own(next(tokens(1))[0])[0].unique())
    assert 0 <= sent <= touched * 8 * (8 + 4) < 50 * 8 * 8, (sent, touched)  # rows, columns, value and index
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    train(reference, plain, tokens(1), mine=False)
    train(model, optimizer, tokens(3))
    train(reference, plain, tokens(3), mine=False)
    check_equal(model, reference)


class Mixed(nn.Module):
    """Layers of two types, and a matrix that is stored by columns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 12).float(), nn.Linear(12, 8).double()
        self.last = nn.Parameter(torch.randn(5, 8, dtype=torch.float64).t())
        assert not self.last.is_contiguous()

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.float())).double()) @ self.last


def mixed_types_and_strides():
    model, reference = Mixed(), Mixed()
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD), bucket_bytes=1e9)
    assert [bucket.flat.dtype for bucket in optimizer.buckets].count(torch.float32) == 1
    train(model, optimizer, batches(4))
    train(reference, torch.optim.SGD(reference.parameters(), **SGD), batches(4), mine=False)
    check_equal(model, reference, 1e-5)


class Typed(nn.Module):
    """A unit with parameters of three types, one of them complex."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.wide = nn.LayerNorm(16).float(), nn.Linear(16, 8).double()
        self.turn = nn.Parameter(torch.randn(8, 5, dtype=torch.complex128))

    def forward(self, x):
        hidden = torch.tanh(self.wide(self.norm(x.float()).double()))
        return (hidden.to(torch.complex128) @ self.turn).abs()


def types_in_a_unit():
    """Each type keeps its precision: nothing is cast to that of the first parameter."""
    for form in ({}, {"parameters": "sharded"}, {"parameters": "gathered"}):
        model, reference = (nn.Sequential(Typed(), nn.Linear(5, 5).double()) for _ in range(2))
        reference.load_state_dict(model.state_dict())
        options = {**form, "units": list(model)} if form else form
        optimizer = sharded(model, lambda shard: torch.optim.AdamW(shard, lr=1e-2), **options)
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        train(model, optimizer, batches(4))
        train(reference, plain, batches(4), mine=False)
        trained = model.state_dict()
        for name, p in reference.state_dict().items():
            assert trained[name].dtype == p.dtype, (form, name)
            tolerance = 1e-5 if p.dtype == torch.float32 or "0." in name or form else EXACT
            assert float((trained[name] - p).abs().max()) <= tolerance, (form, name)
        if form:
            assert len({unit.flat.dtype for unit in optimizer.buckets if unit.module is model[0]}) == 3
    raises(lambda: shard_gradients(Typed(), torch.optim.SGD, push=Push(threshold=1e-3)), "turn is complex")


def matrices():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in ((16, 32), (32, 24), (24, 8), (8, 5)))).double()


class LayerwiseSGD(torch.optim.Optimizer):
    """Divides every gradient by its norm: what a name that nobody knows may do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


class GlobalSGD(LayerwiseSGD):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        members = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(p.grad.square().sum()) for p in members) ** 0.5
        for p in members:
            p.sub_(self.param_groups[0]["lr"] * p.grad / norm)


BY_TENSOR = ((torch.optim.Muon, {"lr": 1e-2}), (torch.optim.Adafactor, {"lr": 1e-2}), (LayerwiseSGD, {"lr": 1e-2}))


def whole_tensors():
    """Optimizers that look at a whole matrix equal one device where each has one owner; saved, and taken up."""
    for form in ({}, {"parameters": "sharded", "units": lambda model: list(model)[:2]}):
        for kind, settings in BY_TENSOR:
            model, reference, other = matrices(), matrices(), matrices()
            options = {**form, "units": form["units"](model)} if form else form
            optimizer = sharded(model, partial(kind, **settings), whole_tensors=True, **options)
            plain = kind(reference.parameters(), **settings)
            train(model, optimizer, batches(3))
            again = sharded(other, partial(kind, **settings), whole_tensors=True, **other_division())
            other.load_state_dict(model.state_dict())
            again.load_state_dict(optimizer.state_dict())
            train(other, again, batches(3))
            for _ in range(2):
                train(reference, plain, batches(3), mine=False)
            tolerance = 1e-2 if kind is torch.optim.Muon else EXACT  # it orthogonalises in bf16
            check_equal(other, reference, tolerance)
            held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            found = [None] * dist.get_world_size()
            dist.all_gather_object(found, held)
            assert sum(found) == sum(p.numel() for p in model.parameters()), found
            assert min(found) > 0, found
    raises(lambda: optimizer.reshard(shares()[::-1]), "change owners")
    raises(lambda: again.reshard(shares()[::-1]), "whole_tensors")
    one = nn.Linear(3, 3, bias=False)
    raises(lambda: shard_gradients(one, torch.optim.SGD, whole_tensors=True), "would own no parameter")


def optimizers_that_cannot_be_sharded():
    for kind, settings in BY_TENSOR:
        raises(lambda k=kind, s=settings: shard_gradients(matrices(), partial(k, **s)), "whole_tensors=True")
    raises(lambda: shard_gradients(mlp(), torch.optim.LBFGS), "LBFGS", "all parameters at once")
    raises(lambda: shard_gradients(mlp(), lambda shard: torch.optim.SparseAdam(shard)), "SparseAdam", "dense")
    for whole in (False, True):
        raises(lambda w=whole: shard_gradients(matrices(), partial(GlobalSGD, lr=0.1), whole_tensors=w), "its shard")
    model = mlp()
    raises(lambda: shard_gradients(model, lambda _: torch.optim.SGD(model.parameters())), "of the tensors that it is")
    raises(lambda: shard_gradients(mlp(), lambda shard: torch.optim.SGD(shard[:1])), "lacks")
    raises(lambda: shard_gradients(mlp(), lambda shard: shard), "torch's optimizers")
    elementwise = (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.ASGD),
        torch.optim.Rprop,
    )
    for kind in elementwise:
        for foreach in (False, True):
            model, reference = mlp(), mlp()
            train(model, sharded(model, lambda shard, k=kind, f=foreach: k(shard, lr=1e-2, foreach=f)), batches(1))
            train(reference, kind(reference.parameters(), lr=1e-2, foreach=foreach), batches(1), mine=False)
            check_equal(model, reference)


def batch_norm():
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    model[1].running_mean.fill_(dist.get_rank())
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1))
    assert (model[1].running_mean == 0).all()
    train(model, optimizer, batches(2))
    with torch.no_grad():  # to evaluate changes nothing
        before = [p.clone() for p in model.parameters()]
        model.eval()(next(batches(1))[0])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    check_equal_on_all_ranks([float(p.sum()) for p in model.parameters()])


def backwards_of_all_kinds():
    model, reference = mlp(), mlp()
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for each, opt, mine in ((model, optimizer, True), (reference, plain, False)):
        for inputs, targets in batches(2):
            inputs, targets = own(inputs, targets) if mine else (inputs, targets)
            inputs = inputs.requires_grad_()
            loss = F.cross_entropy(each(inputs), targets)
            loss.backward(retain_graph=True)  # two backwards of one graph add up
            loss.backward()

            def closure(model=each, opt=opt, inputs=inputs, targets=targets):
                loss = F.cross_entropy(model(inputs), targets)
                (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)  # a penalty on the slope
                (loss + slope.square().sum(1).mean() * len(inputs) ** 2).backward()
                return loss

            assert opt.step(closure) > 0
            opt.zero_grad()
    check_equal(model, reference)
    raises(lambda: model(next(batches(1))[0]).sum().backward(create_graph=True), "torch.autograd.grad")


def compiled():
    model, reference = mlp(), mlp()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = sharded(compiled, lambda shard: torch.optim.SGD(shard, **SGD))
    assert "0.weight" in optimizer.names.values()
    train(compiled, optimizer, batches(3))
    train(reference, torch.optim.SGD(reference.parameters(), **SGD), batches(3), mine=False)
    check_equal(model, reference)


@dataclasses.dataclass
class Hidden:
    """Output of a unit of `Wrapped`: a dataclass that is not registered as a pytree node."""

    values: torch.Tensor
    note: str = ""


class Step(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.inner = nn.Linear(width, out)

    def forward(self, x):
        return Hidden(torch.tanh(self.inner(x)))


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Step(16, 32), Step(32, 5)
        self.double()

    def forward(self, x):
        return self.second(self.first(x).values).values


class Checkpointed(nn.Module):
    """Blocks that are computed once more in the backward, to their end."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32)).double()
        self.second = nn.Linear(32, 5).double()

    def forward(self, x):
        with set_checkpoint_early_stop(False):
            hidden = checkpoint(self.first, x.requires_grad_(), use_reentrant=False)
            return checkpoint(self.second, hidden, use_reentrant=False)


def compiled_block():
    """Return a model with a block that is compiled by itself, as many trainings have all of them."""
    torch._dynamo.reset()
    model = mlp()
    model[0] = torch.compile(model[0], backend="aot_eager")
    return model


def compiled_units():
    """Torch keeps the forward of a compiled module in the object: such units were refused as never called."""
    train_units(("sharded", compiled_block, lambda model: [model[0], model[3]]))


def units_of_all_kinds():
    """Units that return dataclasses, and that are checkpointed without an early stop."""
    train_units(
        ("sharded", Wrapped, lambda model: [model.first, model.second]),
        ("sharded", Checkpointed, lambda model: [model.first, model.second]),
        ("gathered", Checkpointed, lambda model: [model.first[0], model.first[2]]),
    )


def units_of_all_kinds_in_both_forms():
    """Units of all kinds in both forms, and compiled ones."""
    cases = (
        (Wrapped, lambda model: [model.first, model.second]),
        (Checkpointed, lambda model: [model.first, model.second]),
        (Checkpointed, lambda model: [model.first[0], model.first[2]]),
        (mlp, lambda model: [model[0], model[3]]),
    )
    train_units(*((form, *case) for form in ("sharded", "gathered") for case in cases))


def train_units(*cases):
    """Train models whose units are sharded in a form; those of `mlp` compiled."""
    for form, make, units in cases:
        model, reference = make(), make()
        called = model
        if make is mlp:
            torch._dynamo.reset()
            called = torch.compile(model, backend="aot_eager")
        factory = partial(torch.optim.SGD, **SGD)
        train(called, sharded(called, factory, parameters=form, units=units(model)), batches(3))
        train(reference, factory(reference.parameters()), batches(3), mine=False)
        trained = model.state_dict()
        for name, p in reference.state_dict().items():
            assert float((trained[name] - p).abs().max()) <= EXACT, (form, make, name)
        raises(units(model)[0].state_dict, "of the whole model")


def autocast():
    """The tolerance is bf16's: its significand has 8 bits, and the ranks' sums are rounded in another order."""
    model, reference = mlp(torch.float32), mlp(torch.float32)
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD))
    plain = torch.optim.SGD(reference.parameters(), **SGD)
    for each, opt, mine in ((model, optimizer, True), (reference, plain, False)):
        for inputs, targets in batches(4, torch.float32):
            inputs, targets = own(inputs, targets) if mine else (inputs, targets)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(each(inputs), targets)
            loss.backward()
            opt.step()
            opt.zero_grad()
    check_equal(model, reference, 4 * 2**-8 * SGD["lr"])
    check_equal_on_all_ranks([float(p.sum()) for p in model.parameters()])


def a_scaled_loss():
    """One batch overflows on one rank: all skip, and all scales shrink; thresholds count for unscaled gradients."""
    for push in (None, Push(threshold=1e-30)):
        model, reference = mlp(torch.float32), mlp(torch.float32)
        scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) for _ in range(2)]
        optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD), scaler=scalers[0], push=push)
        plain = torch.optim.SGD(reference.parameters(), **SGD)
        for each, opt, scaler, mine in ((model, optimizer, scalers[0], True), (reference, plain, scalers[1], False)):
            for step, (inputs, targets) in enumerate(batches(6, torch.float32)):
                if step == 2:
                    inputs[-1] = torch.inf  # a row of the last rank
                inputs, targets = own(inputs, targets) if mine else (inputs, targets)
                scaler.scale(F.cross_entropy(each(inputs), targets)).backward()
                scaler.unscale_(opt)
                if mine:
                    opt.clip_grad_norm_(1.0)
                else:
                    nn.utils.clip_grad_norm_(each.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**13
        assert optimizer.skipped_steps == 1
        check_equal(model, reference, 1e-5)
    raises(
        lambda: shard_gradients(
            mlp(), torch.optim.SGD, scaler=scalers[0], shard_shares=[1.0] + [0.0] * (dist.get_world_size() - 1)
        ),
        "every rank must own some",
    )


def a_threshold_is_of_unscaled_gradients():
    sent = []
    for scale in (1.0, 2.0**10):
        model = mlp(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = sharded(
            model, lambda shard: torch.optim.SGD(shard, lr=0.1), scaler=scaler, push=Push(threshold=1e-2)
        )
        for inputs, targets in batches(3, torch.float32):
            scaler.scale(F.cross_entropy(model(own(inputs)[0]), own(targets)[0])).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        sent.append(optimizer.sent.entries)
    assert sent[0] == sent[1] > 0
    assert sent[0] < optimizer.sent.offered


def losses_scaled_without_a_scaler():
    """Owners receive the gradients of an unscaled loss times the factor, which changes; one step is skipped."""
    for push in (None, Push(threshold=0.0), Push(threshold=1e-2, error_feedback=True)):
        model, other = mlp(torch.float32), mlp(torch.float32)
        optimizer, unscaled = (
            sharded(each, lambda shard: torch.optim.Adam(shard), push=push) for each in (model, other)
        )
        for step, (inputs, targets) in enumerate(batches(6, torch.float32)):
            inputs, targets = own(inputs, targets)
            scale = 2.0 ** (step % 3)
            optimizer.set_loss_scale(scale)
            (scale * F.cross_entropy(model(inputs), targets)).backward()
            received = optimizer.received_gradients()
            F.cross_entropy(other(inputs), targets).backward()
            for mine, plain in zip(received, unscaled.received_gradients(), strict=True):
                assert torch.allclose(mine.div_(scale), plain, atol=1e-6)
            if step == 2:
                before = [p.detach().clone() for p in model.parameters()]
                for each in (optimizer, unscaled):
                    each.skip_step()
            for each in (optimizer, unscaled):
                each.step()
            if step == 2:
                assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert optimizer.skipped_steps == 1
        assert {int(state["step"]) for state in optimizer.optimizer.state.values()} == {5}
        check_equal(model, other, 1e-5)


def steps_that_are_not_made():
    """NaN in one row of one rank, in ranges that it owns and does not own."""
    for clipped in (False, True):
        for push in (None, Push(threshold=1e-3)):
            model = mlp()
            optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD), skip_nonfinite=True, push=push)
            for step, (inputs, targets) in enumerate(batches(5)):
                if step in (1, 3):
                    inputs[-1 if step == 1 else 0] = torch.nan
                before = [p.detach().clone() for p in model.parameters()]
                F.cross_entropy(model(own(inputs)[0]), own(targets)[0]).backward()
                if clipped:
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                same = all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
                assert same == (step in (1, 3)), (step, clipped, push)
            assert optimizer.skipped_steps == 2
            assert all(p.isfinite().all() for p in model.parameters())


def two_runs_are_bit_identical():
    found = []
    for _ in range(2):
        model = mlp(torch.float32)
        push = Push(threshold=5e-3)
        train(
            model, sharded(model, lambda shard: torch.optim.AdamW(shard, lr=1e-2), push=push), batches(5, torch.float32)
        )
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


def other_division():
    """Return options by which everything is divided in another way."""
    return {"shard_shares": shares()[::-1], "first_bucket_bytes": 5000, "bucket_bytes": 1500}


def state_by_name():
    """Saved in one division, taken up in another; what stands in it is what one device has."""
    for dtype, tolerance in ((torch.float64, EXACT), (torch.bfloat16, 0.02)):
        model, reference = mlp(dtype), mlp(torch.float64)
        reference.load_state_dict(mlp(dtype).double().state_dict())
        optimizer = sharded(model, lambda shard: torch.optim.AdamW(shard, lr=1e-2))
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        train(model, optimizer, batches(3, dtype))
        train(reference, plain, batches(3), mine=False)
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        expected = dict(
            zip([name for name, _ in reference.named_parameters()], plain.state_dict()["state"].values(), strict=True)
        )
        for name, states in saved["state"].items():
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert states[key].shape == expected[name][key].shape
                difference = float((states[key] - expected[name][key]).abs().max())
                assert difference <= tolerance, (name, key, difference)
        other = mlp(dtype, seed=5)
        again = sharded(other, lambda shard: torch.optim.AdamW(shard, lr=9.0), **other_division())
        other.load_state_dict(weights)
        again.load_state_dict(saved)
        train(model, optimizer, batches(3, dtype))
        train(other, again, batches(3, dtype))
        check_equal(other, model, EXACT)  # the owners' sums have the same order
        raises(partial(again.load_state_dict, {**saved, "param_groups": []}), "param_groups")
        plain_sgd = sharded(mlp(), lambda shard: torch.optim.SGD(shard, **SGD))
        raises(partial(plain_sgd.load_state_dict, saved), "momentum_buffer")


def torchs_checkpoints():
    """Every owner writes its own part; read in another division."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    at_rest = {"parameters": "sharded"}
    for kind, settings, form in (
        (torch.optim.AdamW, {"lr": 1e-2}, {}),
        (torch.optim.SGD, SGD, {}),
        (torch.optim.SGD, SGD, at_rest),
    ):
        path = Path(folder[0], f"{kind.__name__}-{len(form)}")
        model = mlp()
        optimizer = sharded(model, partial(kind, **settings), **form)
        train(model, optimizer, batches(3))
        dcp.save({"model": model, "optimizer": optimizer.sharded()}, checkpoint_id=path)
        other = mlp(seed=5)
        again = sharded(other, partial(kind, **{**settings, "lr": 9.0}), **other_division(), **form)
        dcp.load({"model": other, "optimizer": again.sharded()}, checkpoint_id=path)
        train(model, optimizer, batches(3))
        train(other, again, batches(3))
        found, expected = other.state_dict(), model.state_dict()
        assert all(float((found[name] - value).abs().max()) <= EXACT for name, value in expected.items())
        assert float((found["0.weight"] - mlp().state_dict()["0.weight"]).abs().max()) > 1e-3
    dist.barrier()


def torchs_checkpoints_between_forms():
    """Replicas are taken up as shards, and shards as replicas; what is saved beside training is of one step."""
    take_up(("replicated", "sharded", torch.bfloat16, True), ("sharded", "replicated", torch.float32, True))


def torchs_checkpoints_between_all_forms():
    """Saved beside training or not, with master copies and without."""
    directions = (("replicated", "sharded"), ("sharded", "replicated"))
    kinds = [(dtype, asynchronous) for dtype in (torch.float32, torch.bfloat16) for asynchronous in (False, True)]
    take_up(*((*direction, *kind) for kind in kinds for direction in directions))


def take_up(*cases):
    """Save what was trained in one form, and train it on in another."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    forms = {"replicated": {}, "sharded": {"parameters": "sharded"}}
    factory = partial(torch.optim.AdamW, lr=1e-2)
    wide = dist.new_group(backend="cpu:gloo")
    for written, read, dtype, asynchronous in cases:
        path = Path(folder[0], f"{written}-{dtype}-{asynchronous}")
        model, other, reference = mlp(dtype), mlp(dtype, seed=5), mlp(dtype)
        optimizer = sharded(model, factory, **forms[written])
        again = sharded(other, factory, **other_division(), **forms[read])
        undisturbed = sharded(reference, factory, **forms[written])
        data = list(batches(4, dtype))
        train(model, optimizer, data[:2])
        state = {"model": model, "optimizer": optimizer.sharded()}
        if asynchronous:
            saved = dcp.async_save(state, checkpoint_id=path, process_group=wide)
            train(model, optimizer, data[2:])
            saved.result()
        else:
            dcp.save(state, checkpoint_id=path)
        dcp.load({"model": other, "optimizer": again.sharded()}, checkpoint_id=path)
        train(other, again, data[2:])
        train(reference, undisturbed, data)
        found, expected = other.state_dict(), reference.state_dict()
        for name, value in expected.items():
            assert float((found[name] - value).abs().max()) <= 1e-6, (written, dtype, asynchronous, name)
    dist.barrier()


def torchs_state_dicts():
    """torch functions that look for the model's parameters in the optimizer fail, and name the alternative."""
    for steps in (0, 2):
        model, reference = mlp(), mlp()
        optimizer = sharded(model, lambda shard: torch.optim.AdamW(shard, lr=1e-2))
        train(model, optimizer, batches(steps))
        raises(lambda m=model, o=optimizer: get_optimizer_state_dict(m, o), "optimizer.state_dict()")
        raises(lambda m=model, o=optimizer: get_state_dict(m, o), "optimizer.sharded()")
        assert optimizer.pusher.steps == steps
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        train(reference, plain, batches(steps), mine=False)
        train(model, optimizer, batches(3))
        train(reference, plain, batches(3), mine=False)
        check_equal(model, reference)


def calls_on_one_rank_alone():
    """They fail within the group's timeout, with an error that names the call and says that all ranks must make it."""

    def one_more(model, optimizer):
        train(model, optimizer, batches(1))

    calls = (
        ({}, lambda model, optimizer: optimizer.state_dict(), "the optimizer's state_dict: every rank"),
        ({}, lambda model, optimizer: optimizer.clip_grad_norm_(1.0), "clip_grad_norm_: every rank"),
        ({}, one_more, "a backward, and what it pushes: every rank"),
        ({"parameters": "sharded"}, lambda model, optimizer: model.state_dict(), "are sharded: every rank"),
    )
    checks = []
    for form, call, reason in calls:
        group = dist.new_group(timeout=timedelta(seconds=1.5))
        model = mlp()
        optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1), group=group, **form)
        train(model, optimizer, batches(1))
        checks.append(partial(raises, partial(call, model, optimizer), reason))
    return checks if dist.get_rank() == 0 else []


def other_forms():
    """Parameters sharded at rest, and ranks as devices of one node: clipped, saved, and taken up by replicas."""
    one_node = init_device_mesh("cpu", (1, dist.get_world_size()))
    for form in ("sharded", "gathered", "node"):
        model, reference, other = mlp(), mlp(), mlp(seed=5)
        options = {"mesh": one_node} if form == "node" else {"parameters": form, "units": [model[0], model[3]]}
        optimizer = sharded(model, lambda shard: torch.optim.AdamW(shard, lr=1e-2), **options)
        replicas = sharded(other, lambda shard: torch.optim.AdamW(shard, lr=9.0), **other_division())
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
        for number, (inputs, targets) in enumerate(batches(6)):
            taken_up = number >= 3
            if number == 3:
                weights, whole = model.state_dict(), optimizer.state_dict()
                other.load_state_dict(weights)
                replicas.load_state_dict(whole)
            mine, opt = (other, replicas) if taken_up else (model, optimizer)
            F.cross_entropy(mine(own(inputs)[0]), own(targets)[0]).backward()
            F.cross_entropy(reference(inputs), targets).backward()
            norm = opt.clip_grad_norm_(0.3)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.3)
            assert abs(float(norm) - float(expected)) <= EXACT, (form, number, norm, expected)
            for each in (opt, plain):
                each.step()
                each.zero_grad()
        check_equal(other, reference)
        model.load_state_dict(other.state_dict())  # and back
        optimizer.load_state_dict(replicas.state_dict())
        train(model, optimizer, batches(2))
        train(reference, plain, batches(2), mine=False)
        trained = model.state_dict()
        assert all(float((trained[name] - p).abs().max()) <= EXACT for name, p in reference.state_dict().items()), form


def error_feedback_goes_on():
    """Residuals are restored exactly with the same ranks and shares; without them, training would differ."""
    push = Push(threshold=2e-2, error_feedback=True)
    model = mlp(torch.float32)
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD), push=push)
    train(model, optimizer, batches(4, torch.float32))
    weights, whole = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(optimizer.pusher.state_dict())
    train(model, optimizer, batches(4, torch.float32))
    for exactly in (True, False):
        other = mlp(torch.float32, seed=5)
        again = sharded(other, lambda shard: torch.optim.SGD(shard, **SGD), push=push)
        other.load_state_dict(weights)
        again.load_state_dict(whole)
        if exactly:
            again.pusher.load_state_dict(kept)
        train(other, again, batches(4, torch.float32))
        pairs = zip(other.parameters(), model.parameters(), strict=True)
        assert all(torch.equal(p, q) for p, q in pairs) == exactly


def a_model_that_is_moved():
    """A parameter that was moved, replaced, added or removed after sharding is an error at the next step, by name."""

    def assigned(model):
        model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)

    def replaced(model):
        model[5] = nn.Linear(24, 5).double()

    def emptied(model):
        model.to("meta").to_empty(device="cpu")

    def pointed(model):
        model[5].bias.data = torch.zeros(5, dtype=torch.float64)

    def added(model):
        model[0].register_parameter("scale", nn.Parameter(torch.ones(1)))

    changes = (
        (lambda model: model.float(), "no longer in its bucket"),
        (assigned, "after shard_gradients"),
        (replaced, "5.weight was put into the model"),
        (emptied, "would not train"),
        (pointed, "5.bias is no longer in its bucket"),
        (added, "0.scale was put into the model"),
        (lambda model: setattr(model[0], "bias", None), "0.bias is no longer in the model"),
    )
    inputs, targets = next(batches(1))
    for change, reason in changes:
        for form in ({}, {"parameters": "sharded"}):
            if form and change in (assigned, added):
                continue
            model = mlp()
            optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1), **form)
            change(model)

            def act(model=model, optimizer=optimizer):
                dtype = next(model.parameters()).dtype
                F.cross_entropy(model(own(inputs.to(dtype))[0]), own(targets)[0]).backward()
                optimizer.step()

            raises(act, reason)
    convolution = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 5))
    optimizer = sharded(convolution, lambda shard: torch.optim.SGD(shard, lr=0.1))
    convolution.to(memory_format=torch.channels_last)
    raises(optimizer.step, "0.weight is no longer in its bucket")
    model = mlp()
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1))
    model.add_module("note", nn.Identity())  # nothing to train: no harm
    optimizer.step()
    raises(lambda: optimizer.add_param_group({"params": []}), "groups cannot be added")
    raises(lambda: shard_gradients(nn.ReLU(), torch.optim.SGD), "nothing to shard")
    raises(lambda: shard_gradients(mlp(), torch.optim.SGD, shard_shares=[0.5]), "fractions")
    with torch.device("meta"):
        raises(lambda: shard_gradients(nn.Linear(3, 3), torch.optim.SGD), "on meta")


def master_copies_take_what_is_written():
    """Loaded after wrapping, clamped in every step: as on one device, and finer than bf16 where nothing was written."""
    factory = partial(torch.optim.SGD, lr=2e-3)

    def clamp(model):
        with torch.no_grad():
            model[3].weight.clamp_(-0.1, 0.1)

    for form in ({}, {"publish": Publish(threshold=1e-9)}, {"parameters": "sharded"}):
        model, reference = mlp(torch.bfloat16), MasterCopied(mlp(torch.bfloat16))
        optimizer = sharded(model, factory, **form)
        pretrained = mlp(torch.bfloat16, seed=9).state_dict()
        for each in (model, reference.model):
            each.load_state_dict(pretrained)
        plain = reference.optimizer(factory)
        clamps = "parameters" not in form
        for inputs, targets in batches(6, torch.bfloat16):
            F.cross_entropy(model(own(inputs)[0]), own(targets)[0]).backward()
            F.cross_entropy(reference.model(inputs), targets).backward()
            for each, opt in ((model, optimizer), (reference.model, plain)):
                opt.step()
                opt.zero_grad()
                if clamps:
                    clamp(each)
                else:
                    values = each.state_dict()
                    values["3.weight"].clamp_(-0.1, 0.1)
                    each.load_state_dict(values)
        trained = model.state_dict()
        for name, p in reference.model.state_dict().items():
            assert float((trained[name] - p).abs().max()) <= 2e-2, (form, name)
        assert float(trained["3.weight"].abs().max()) <= 0.101, form
        assert float((trained["0.weight"] - pretrained["0.weight"]).abs().max()) < 0.1, form
        master = optimizer.state_dict()["state"]["0.weight"]["master"]
        assert not torch.equal(master, master.bfloat16().float()), form  # finer than what is published


class MasterCopied:
    """A model in low precision on one device, with a master copy."""

    def __init__(self, model):
        self.model = model

    def optimizer(self, factory):
        from gsreal.gradient_sharding.master import MasterCopy

        return MasterCopy(self.model.parameters(), lambda groups, **_: factory(groups))


CHECKS = {
    check.__name__: check
    for check in (
        a_plain_loop,
        groups_and_a_schedule,
        clipping,
        accumulation,
        what_one_backward_does_not_reach_is_not_lost,
        freezing_for_a_while,
        parameters_without_a_gradient_in_some_steps,
        histories_are_saved_by_parameter,
        state_before_the_first_step,
        frozen_from_the_start,
        tied_parameters,
        a_sparse_embedding,
        mixed_types_and_strides,
        types_in_a_unit,
        whole_tensors,
        optimizers_that_cannot_be_sharded,
        batch_norm,
        backwards_of_all_kinds,
        compiled,
        compiled_units,
        units_of_all_kinds,
        units_of_all_kinds_in_both_forms,
        autocast,
        a_scaled_loss,
        a_threshold_is_of_unscaled_gradients,
        losses_scaled_without_a_scaler,
        steps_that_are_not_made,
        two_runs_are_bit_identical,
        state_by_name,
        torchs_checkpoints,
        torchs_checkpoints_between_forms,
        torchs_checkpoints_between_all_forms,
        torchs_state_dicts,
        calls_on_one_rank_alone,
        other_forms,
        error_feedback_goes_on,
        a_model_that_is_moved,
        master_copies_take_what_is_written,
    )
}
LONG = {
    *("units_of_all_kinds", "units_of_all_kinds_in_both_forms"),
    *("torchs_checkpoints_between_forms", "torchs_checkpoints_between_all_forms"),
}
"""Run with the slow tests: further combinations of what others hold."""
ON_THREE = (
    "a_plain_loop",
    "clipping",
    "accumulation",
    "a_scaled_loss",
    "losses_scaled_without_a_scaler",
    "steps_that_are_not_made",
    "two_runs_are_bit_identical",
    "parameters_without_a_gradient_in_some_steps",
    "state_by_name",
    "torchs_checkpoints",
    "other_forms",
    "error_feedback_goes_on",
    "units_of_all_kinds_in_both_forms",
)


def main(*arguments):
    """Run the checks that are named, or all; write what they showed to the file that comes last."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))  # where one rank alone fails, others wait for it
    report(CHECKS, *arguments)


def report(checks, *arguments):
    """Run those of the checks that are named, or all; write what they showed to the file that comes last.

    A check may return functions that wait for the time-out of a process group of their own. They are called in threads,
    beside the checks that follow.
    """
    *names, out = arguments
    found, waiting = {}, []
    with ThreadPoolExecutor(16) as threads:
        for name in names or checks:
            found[name], functions = outcome(checks[name])
            if found[name] != "ok":
                break  # other ranks may be elsewhere
            waiting += [(name, threads.submit(outcome, function)) for function in functions or ()]
        for name, thread in waiting:
            said, _ = thread.result()
            found[name] = said if found[name] == "ok" else found[name]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        failed = {name: each[name] for each in every for name in each if each[name] != "ok"}
        Path(out).write_text(json.dumps(dict.fromkeys(names or checks, "not run") | found | failed), encoding="utf-8")
    dist.barrier()


def outcome(check):
    """Return "ok" and what a check returned, or the assertion that failed and None."""
    try:
        return "ok", check()
    except AssertionError as error:
        return f"{type(error).__name__}: {error}", None


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
