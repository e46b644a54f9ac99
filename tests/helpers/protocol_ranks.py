"""Loops in which ranks do not do the same, or something goes wrong, on every rank of a test.

Each ends as one device would, or in an error that says what to do. Arguments: as those of `library_ranks`.
"""

import copy
import io
import sys
import warnings
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from library_ranks import (
    ROWS,
    SGD,
    Tied,
    batches,
    check_equal,
    mlp,
    own,
    raises,
    report,
    rows,
    sharded,
    shares,
    tokens,
    train,
)
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from gsreal.gradient_sharding import shard_gradients
from gsreal.run.rank import run_on_rank
from gssim.plan import Publish, Push

SOON = timedelta(seconds=2)
"""Time after which ranks that wait for each other give up."""
COO = {"encoding": "coo"}
FORMS = (
    {},
    {"overlap": False},
    {"push": Push(threshold=0.0, **COO)},
    {"push": Push(threshold=0.0), "publish": Publish(threshold=0.0, **COO)},
    {"point_to_point": False},
)


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets)


# A rank that does something else than the others ----------------------------------------------------------------------


def a_rank_without_a_backward_pushes_zeros():
    last = dist.get_world_size() - 1
    for form in FORMS:
        model, reference = mlp(), mlp()
        optimizer = sharded(model, partial(torch.optim.SGD, **SGD), **form)
        plain = torch.optim.SGD(reference.parameters(), **SGD)
        for step, (inputs, targets) in enumerate(batches(5)):
            skips = step in (1, 2)
            if not (skips and dist.get_rank() == last):
                loss_of(model, *own(inputs, targets)).backward()
            if step == 2:
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            count = ROWS - rows()[-1] if skips else ROWS
            (loss_of(reference, inputs[:count], targets[:count]) * count / ROWS).backward()
            if step == 2:
                nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            plain.step()
            plain.zero_grad()
        check_equal(model, reference)


def what_adds_up_in_no_sync_alone_is_pushed_by_the_step():
    model, reference = mlp(), mlp()
    optimizer = sharded(model, partial(torch.optim.SGD, **SGD))
    for step, (inputs, targets) in enumerate(batches(3)):
        if (step + dist.get_rank()) % 2:
            with optimizer.no_sync():
                loss_of(model, *own(inputs, targets)).backward()
        else:
            loss_of(model, *own(inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(reference, torch.optim.SGD(reference.parameters(), **SGD), batches(3), mine=False)
    check_equal(model, reference)
    inputs, targets = own(*next(batches(1)))
    loss_of(model, inputs, targets).backward()
    with optimizer.no_sync():
        loss_of(model, inputs, targets).backward()
    raises(optimizer.step, ": its gradient was not pushed", "outside no_sync")


def uneven_backwards_end_in_an_error_and_corrupt_nothing():
    """The first rank pushes twice where the others push once: nobody takes the second push for what is published."""
    (inputs, targets), (more, others) = batches(2)
    checks = []
    for form in ({}, {"publish_overlaps": True}, {"push": Push(threshold=0.0)}):
        model = mlp()
        group = dist.new_group(timeout=SOON)
        optimizer = sharded(model, partial(torch.optim.SGD, lr=0.01), group=group, shard_shares=None, **form)
        train(model, optimizer, [(inputs, targets)])
        optimizer.finish()
        before = [p.detach().clone() for p in model.parameters()]

        def turn(model=model, optimizer=optimizer):
            loss_of(model, *own(more, others)).backward()
            if dist.get_rank() == 0:
                loss_of(model, *own(more, others)).backward()
            optimizer.step()
            optimizer.finish()

        def check(turn=turn, model=model, optimizer=optimizer, before=before):
            raises(turn, "equally many backwards outside no_sync")
            raises(optimizer.step, "has failed")
            for parameter, old in zip(model.parameters(), before, strict=True):
                assert float((parameter.detach() - old).abs().max()) < 0.02, "a gradient was taken for parameters"

        checks.append(check)
    return checks


def what_differs_between_ranks_is_named_when_the_model_is_wrapped():
    class Wider(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.first, self.second = nn.Linear(4, width), nn.Linear(width, 2)

    rank = dist.get_rank()
    sgd = partial(torch.optim.SGD, lr=0.1)
    frozen = mlp()
    frozen[0].requires_grad_(not rank)
    buffered = mlp()
    buffered.register_buffer("seen", torch.zeros(3 + rank))
    uneven = [shares(), shares()[::-1]][bool(rank)]
    cases = [
        (Wider(8 + rank), sgd, {}, ("'first.weight'", "(9, 4)", "(8, 4)", "on rank 1", "on rank 0")),
        (mlp(torch.float32 if rank else torch.float64), sgd, {}, ("float32", "float64")),
        (frozen, sgd, {}, ("frozen parameter '0.weight'", "nothing on rank 0")),
        (buffered, sgd, {}, ("buffer 'seen'", "(4,)")),
        (mlp(), sgd, {"shard_shares": uneven}, ("shard_shares", "0.3")),
        (mlp(), sgd, {"push": Push(threshold=1e-3 * rank)}, ("push", "threshold=0.0")),
        (mlp(), sgd, {"publish": Publish(threshold=1e-3) if rank else None}, ("publish",)),
        (mlp(), sgd, {"skip_nonfinite": bool(rank)}, ("skip_nonfinite: True on rank 1, False on rank 0",)),
        (mlp(), sgd, {"first_bucket_bytes": 1e3 + 1e6 * rank}, ("in bucket",)),
        (mlp(), partial(torch.optim.SGD, lr=0.1 + rank), {}, ("lr of group 0: 1.1 on rank 1, 0.1 on rank 0",)),
        (mlp(), torch.optim.AdamW if rank else torch.optim.SGD, {}, ("optimizer: AdamW on rank 1",)),
    ]
    for model, factory, options, words in cases:
        raises(partial(shard_gradients, model, factory, **options), "ranks differ", *words)
    for kind in ("sharded", "replicated"):
        model = mlp()
        raises(
            partial(shard_gradients, model, sgd, parameters=kind if rank else "gathered", units=[]),
            "parameters: ",
            "'gathered' on rank 0",
        )


# A backward or a batch that does not count ----------------------------------------------------------------------------


class Breaks(torch.autograd.Function):
    """Raises an error in the backward."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise ArithmeticError("it broke")


def broken_loss(model, at, inputs, targets):
    """Return a loss whose backward breaks where a layer's inputs' gradients are reached."""
    hidden = Breaks.apply(model[:at](inputs)) if at else model[0](Breaks.apply(inputs.requires_grad_()))
    return F.cross_entropy(model[max(at, 1) :](hidden), targets)


def an_exception_in_a_backward_can_be_recovered_from():
    """By all ranks, at the same place, at several, or on one of them alone."""
    rank = dist.get_rank()
    for places in ((3,), (3, 5, 0), (5, None, None)):
        at = places[rank % len(places)]
        for form in FORMS[:3]:
            model, reference = mlp(), mlp()
            optimizer = sharded(model, partial(torch.optim.SGD, **SGD), **form)
            train(model, optimizer, batches(2))
            inputs, targets = own(*next(batches(1)))
            if at is None:
                loss_of(model, inputs, targets).backward()
            else:
                try:
                    broken_loss(model, at, inputs.clone(), targets).backward()
                except ArithmeticError:
                    pass
                else:
                    raise AssertionError("nothing broke")
                told = ("an exception has ended the last backward", "zero_grad()")
                raises(optimizer.step, *told)
                raises(partial(optimizer.clip_grad_norm_, 1.0), *told)
                raises(loss_of(model, inputs, targets).backward, *told)
            optimizer.zero_grad()
            train(model, optimizer, batches(2))
            plain = torch.optim.SGD(reference.parameters(), **SGD)
            for _ in range(2):
                train(reference, plain, batches(2), mine=False)
            check_equal(model, reference)


def reentrant_checkpointing_is_refused():
    model = mlp()
    optimizer = sharded(model, partial(torch.optim.SGD, **SGD))
    inputs, targets = own(*next(batches(1)))

    def backward(reentrant):
        hidden = checkpoint(model[:3], inputs.clone().requires_grad_(), use_reentrant=reentrant)
        F.cross_entropy(checkpoint(model[3:], hidden, use_reentrant=reentrant), targets).backward()

    raises(partial(backward, True), "a backward inside a backward", "use_reentrant=False")
    optimizer.zero_grad()
    with optimizer.no_sync():  # nothing is pushed there
        backward(True)
    optimizer.zero_grad()
    optimizer.reset_counts()
    backward(False)
    assert optimizer.sent.offered == sum(b.elements - b.shard.numel() for b in optimizer.buckets)
    reference = mlp()
    optimizer.step()
    F.cross_entropy(reference(next(batches(1))[0]), next(batches(1))[1]).backward()
    torch.optim.SGD(reference.parameters(), **SGD).step()
    check_equal(model, reference)


def the_models_own_zero_grad_discards_what_was_pushed():
    for to_none in (True, False):
        for make in (mlp, lambda: nn.Linear(16, 5, bias=False).double()):
            torch.manual_seed(0)
            model = make()
            reference = copy.deepcopy(model)
            optimizer = sharded(model, partial(torch.optim.SGD, **SGD))
            plain = torch.optim.SGD(reference.parameters(), **SGD)
            for step, (inputs, targets) in enumerate(batches(4)):
                if step in (1, 2):
                    for _ in range(step):  # discarded
                        loss_of(model, *own(3 * inputs, targets)).backward()
                    model.zero_grad(set_to_none=to_none)
                loss_of(model, *own(inputs, targets)).backward()
                optimizer.step()
                model.zero_grad(set_to_none=to_none)
                loss_of(reference, inputs, targets).backward()
                plain.step()
                plain.zero_grad()
            check_equal(model, reference)
            for each, opt in ((model, optimizer), (reference, plain)):
                loss_of(each, *own(*next(batches(1)))).backward()
                each.zero_grad(set_to_none=to_none)
                opt.step()  # zeros go on with momentum and decay, None does not
            check_equal(model, reference)
    model = mlp()
    optimizer = sharded(model, partial(torch.optim.SGD, **SGD))
    loss_of(model, *own(*next(batches(1)))).backward()
    model[3].bias.grad = None
    raises(optimizer.step, "3.bias: its gradient was removed")


def torchs_clipping_is_refused():
    model = mlp()
    optimizer = sharded(model, partial(torch.optim.SGD, **SGD))
    for _ in range(2):
        loss_of(model, *own(*next(batches(1)))).backward()
        for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
            raises(partial(clip, model.parameters(), 1.0), "was pushed", "clip_grad_norm_ of what shard_gradients")
        raises(lambda: sum(p.grad.norm() for p in model.parameters()), "was pushed")
        assert float(optimizer.clip_grad_norm_(1.0)) > 0
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())


def weights_that_do_not_sum_to_one_are_refused():
    optimizer = sharded(mlp(), partial(torch.optim.SGD, **SGD))
    ranks = dist.get_world_size()
    odd = ([32] * ranks, [1.0], [2.0, -1.0] + [0.0] * (ranks - 2), [float("nan")] * ranks, [0.0] * ranks)
    for weights in odd:
        raises(partial(setattr, optimizer, "weights", weights), f"weights must be {ranks} fractions that sum to 1")
    optimizer.weights = [1.0 / ranks] * ranks
    assert optimizer.weights == (1.0 / ranks,) * ranks


def sparse_gradients_of_several_pushes_add_up():
    model, reference = Tied(sparse=True), Tied(sparse=True)
    reference.table.sparse = False
    optimizer = sharded(model, partial(torch.optim.SGD, lr=0.1))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in tokens(3):
            loss_of(model, *own(inputs, targets)).backward()
            loss_of(reference, inputs, targets).backward()
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    check_equal(model, reference)


# Parameters that are read after a step --------------------------------------------------------------------------------


def parameters_are_there_when_step_returns():
    """Unless asked for otherwise; then they are behind `finish`, and copies before that are refused."""
    for overlaps in (False, True):
        for form in ({}, {"push": Push(threshold=0.0), "publish": Publish(threshold=0.0, **COO)}):
            model, reference = mlp(), mlp()
            optimizer = sharded(model, partial(torch.optim.SGD, **SGD), publish_overlaps=overlaps, **form)
            means = [AveragedModel(each, avg_fn=lambda mean, new, _: (mean + new) / 2) for each in (model, reference)]

            def after(overlaps=overlaps, model=model, optimizer=optimizer, mean=means[0]):
                if overlaps:
                    for copied in (copy.deepcopy, partial(torch.save, f=io.BytesIO())):
                        raises(partial(copied, model), "call optimizer.finish()")
                    optimizer.finish()
                mean.update_parameters(model)

            train(model, optimizer, batches(3), after=after)
            plain = torch.optim.SGD(reference.parameters(), **SGD)
            train(reference, plain, batches(3), mine=False, after=partial(means[1].update_parameters, reference))
            twins = [copy.deepcopy(model), io.BytesIO()]
            torch.save(model, twins[1])
            twins[1].seek(0)
            twins[1] = torch.load(twins[1], weights_only=False)
            for twin in twins:
                check_equal(twin, reference)
                loss_of(twin, *own(*next(batches(1)))).backward()  # on this rank alone: nothing is pushed
                assert all(p.grad.norm() > 0 for p in twin.parameters())
    resting = mlp()
    shard_gradients(resting, partial(torch.optim.SGD, lr=0.1), parameters="sharded")
    for copied in (copy.deepcopy, partial(torch.save, f=io.BytesIO())):
        raises(partial(copied, resting), "take model.state_dict()")


CHECKS = {
    check.__name__: check
    for check in (
        uneven_backwards_end_in_an_error_and_corrupt_nothing,
        a_rank_without_a_backward_pushes_zeros,
        what_adds_up_in_no_sync_alone_is_pushed_by_the_step,
        what_differs_between_ranks_is_named_when_the_model_is_wrapped,
        an_exception_in_a_backward_can_be_recovered_from,
        reentrant_checkpointing_is_refused,
        the_models_own_zero_grad_discards_what_was_pushed,
        torchs_clipping_is_refused,
        weights_that_do_not_sum_to_one_are_refused,
        sparse_gradients_of_several_pushes_add_up,
        parameters_are_there_when_step_returns,
    )
}


def main(*arguments):
    """Run the checks that are named, or all; write what they showed to the file that comes last."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(timeout=timedelta(seconds=60))
    report(CHECKS, *arguments)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
