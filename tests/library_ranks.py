"""Strangers' loops with Gradient Sharding, on every rank of a test: each beside the same training on one device.

Of the project, only `gsreal.gradient_sharding` is imported. Arguments: checks by name (all by
default), and the file to write what they showed.
"""

import copy
import json
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from gsreal.gradient_sharding import Push, shard_gradients
from gsreal.rank import run_on_rank

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


def check_alike(value):
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
    model, reference = mlp(), mlp()
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, **SGD))
    plain = torch.optim.SGD(reference.parameters(), **SGD)
    for frozen in (False, True, False):
        for each in (model, reference):
            each[3].requires_grad_(not frozen)
        before = model[3].weight.detach().clone()
        train(model, optimizer, batches(3))
        train(reference, plain, batches(3), mine=False)
        assert torch.equal(before, model[3].weight) == frozen
        check_equal(model, reference)


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
    options = {"push": Push(threshold=1e-300, encoding="coo"), "bucket_bytes": 1, "first_bucket_bytes": 1}
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
    check_alike([float(p.sum()) for p in model.parameters()])


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
    check_alike([float(p.sum()) for p in model.parameters()])


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
    """What a rank has kept goes on exactly with the same ranks and shares, and is not missed by chance."""
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
    model = mlp()
    optimizer = sharded(model, lambda shard: torch.optim.SGD(shard, lr=0.1))
    F.cross_entropy(model(own(next(batches(1))[0])[0]), own(next(batches(1))[1])[0]).backward()
    model.float()
    raises(optimizer.step, "no longer in its bucket")
    raises(lambda: optimizer.add_param_group({"params": []}), "groups cannot be added")
    raises(lambda: shard_gradients(nn.ReLU(), torch.optim.SGD), "nothing to shard")
    raises(lambda: shard_gradients(mlp(), torch.optim.SGD, shard_shares=[0.5]), "fractions")


CHECKS = {
    check.__name__: check
    for check in (
        a_plain_loop,
        groups_and_a_schedule,
        clipping,
        accumulation,
        what_one_backward_does_not_reach_is_not_lost,
        freezing_for_a_while,
        frozen_from_the_start,
        tied_parameters,
        a_sparse_embedding,
        mixed_types_and_strides,
        batch_norm,
        backwards_of_all_kinds,
        compiled,
        autocast,
        a_scaled_loss,
        a_threshold_is_of_unscaled_gradients,
        steps_that_are_not_made,
        two_runs_are_bit_identical,
        state_by_name,
        torchs_checkpoints,
        other_forms,
        error_feedback_goes_on,
        a_model_that_is_moved,
    )
}
ON_THREE = (
    "a_plain_loop",
    "clipping",
    "accumulation",
    "a_scaled_loss",
    "steps_that_are_not_made",
    "two_runs_are_bit_identical",
    "state_by_name",
    "torchs_checkpoints",
    "other_forms",
    "error_feedback_goes_on",
)


def main(*arguments):
    """Run the checks that are named, or all; write what they showed to the file that comes last."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report(CHECKS, *arguments)


def report(checks, *arguments):
    """Run those of the checks that are named, or all; write what they showed to the file that comes last."""
    *names, out = arguments
    found = {}
    for name in names or checks:
        try:
            checks[name]()
            found[name] = "ok"
        except AssertionError as error:
            found[name] = f"{type(error).__name__}: {error}"
            break  # other ranks may be elsewhere
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if dist.get_rank() == 0:
        failed = {name: each[name] for each in every for name in each if each[name] != "ok"}
        Path(out).write_text(json.dumps(dict.fromkeys(names or checks, "not run") | found | failed), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
