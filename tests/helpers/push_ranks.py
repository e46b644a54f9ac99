"""Runs on every rank of a test: pushes known gradients under every policy, and compares with the definition.

A parameter's gradient is whatever it is multiplied by in the loss, so that all ranks know everybody's. The definition
(accumulate, threshold, weigh, divide) is written down densely here, without shards, messages or scratch.
"""

import math
import sys
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from rank_training import cases_in, from_all_ranks, meet, write_found
from torch import Tensor, nn

from gsreal.gradient_sharding import shard_gradients
from gsreal.gradient_sharding.push import PRECISIONS
from gsreal.run.rank import run_on_rank
from gssim.plan import Push

STEPS = 5
SHAPES = ((40, 30), (30,), (300, 7), (2,), (1,))


class Numbers(nn.Module):
    """Parameters of several shapes and nothing else."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES)


class Recorder(torch.optim.SGD):
    """Notes what it is given instead of using it."""

    def __init__(self, shards: list[nn.Parameter]) -> None:
        super().__init__(shards, lr=1.0)
        self.seen: list[list[Tensor]] = []

    def step(self, closure: Any = None) -> None:
        self.seen.append([p.grad.detach().clone() for g in self.param_groups for p in g["params"]])


@cache
def gradients_of(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Return a rank's gradients: of unequal scale by tensor, some of them zeros."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    found = [torch.randn(shape, generator=random) * 10.0**-i for i, shape in enumerate(SHAPES)]
    found[2][::3] = 0
    return [each.to(dtype) for each in found]


def weights_of(case: dict[str, Any], step: int) -> list[float]:
    given: list[list[float]] = case.get("weights") or [[1 / dist.get_world_size()] * dist.get_world_size()]
    return given[step % len(given)]


def pushed(case: dict[str, Any]) -> tuple[Any, list[list[Tensor]]]:
    """Return the sharding and the gradient of every own shard at every step."""
    dtype = getattr(torch, case.get("dtype", "float32"))
    model = Numbers(dtype)
    push = Push(**case["push"])
    sharding = shard_gradients(
        model,
        Recorder,
        push=push,
        shard_shares=[0.5, 0.3, 0.2],
        bucket_bytes=1200,
        first_bucket_bytes=600,
    )
    for step in range(STEPS):
        sharding.weights = tuple(weights_of(case, step))
        loss = [(p * g).sum() for p, g in zip(model.values, gradients_of(dist.get_rank(), step, dtype), strict=True)]
        torch.stack(loss).sum().backward()
        sharding.step()
    return sharding, sharding.optimizer.seen


class Definition:
    """Reference of the elements that one rank sends of a bucket, step by step."""

    def __init__(self, case: dict[str, Any], bucket: Any, own: slice) -> None:
        self.push, self.bucket, self.own = Push(**case["push"]), bucket, own
        self.keeps = bool(self.push.error_feedback)
        self.precision = PRECISIONS[self.push.error_feedback_precision]
        self.kept, self.weight = torch.zeros(bucket.elements, dtype=self.precision), 0.0
        self.estimated: list[float] = []

    def send(self, gradient: Tensor, weight: float, step: int) -> tuple[Tensor, Tensor]:
        """Return the values sent and whether they are; the own range is all there, and never thresholded."""
        everything = torch.ones(len(gradient), dtype=torch.bool)
        if step < self.push.warmup_steps or self.push.threshold is None:
            return gradient, everything
        if not weight:
            return torch.zeros_like(gradient), ~everything
        wide = torch.promote_types(gradient.dtype, torch.float32)
        summed = torch.promote_types(gradient.dtype, self.precision) if self.keeps else gradient.dtype
        total = gradient.to(summed)
        if self.keeps:
            total = total + self.kept.to(summed) * (self.weight / weight if self.weight else 1.0)
            total[self.own] = gradient[self.own].to(summed)
        sent = torch.zeros_like(everything)
        for place, threshold in zip(self.places, self._thresholds(total.to(wide).abs(), step), strict=True):
            sent[place] = total[place].to(wide).abs() >= threshold
        sent[self.own] = True
        self.kept, self.weight = torch.where(sent, 0, total).to(self.precision), weight
        return torch.where(sent, total, 0).to(gradient.dtype), sent

    @property
    def places(self) -> list[slice]:
        return [self.bucket.places[parameter] for parameter in self.bucket.parameters]

    def _thresholds(self, magnitudes: Tensor, step: int) -> list[float]:
        threshold = self.push.threshold
        if self.push.kind == "absolute":
            return [threshold] * len(self.places)
        if self.push.kind == "relative":
            return [threshold * float(magnitudes[place].mean()) for place in self.places]
        # a target is met by what others own
        mine = torch.zeros(len(magnitudes), dtype=torch.bool)
        mine[self.own] = True
        of_others = [magnitudes[place][~mine[place]] for place in self.places]
        if (step - self.push.warmup_steps) % self.push.reestimate_steps == 0 or not self.estimated:
            self.estimated = []
            for values in of_others:
                ordered = values.sort(descending=True).values
                found = float(ordered[max(1, round(threshold * len(ordered))) - 1]) if len(ordered) else 0.0
                self.estimated.append(found or math.inf)
            return self.estimated
        # buckets are smaller than a sample: with the factor, the target fraction of the whole bucket reaches
        pairs = zip(of_others, self.estimated, strict=True)
        ratios = torch.cat([values * (1 / each) for values, each in pairs if each < math.inf])
        factor = float(ratios.sort(descending=True).values[max(1, round(threshold * len(ratios))) - 1])
        return [each * factor for each in self.estimated]


def expected(case: dict[str, Any], sharding: Any) -> tuple[list[list[Tensor]], dict[int, Tensor]]:
    """Return by the definition the gradient of every own shard at every step, and what this rank has kept."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    steps: list[list[Tensor]] = [[] for _ in range(STEPS)]
    kept = {}
    parameters = [p for bucket in sharding.buckets for p in bucket.parameters][::-1]  # the model's order
    for bucket in sharding.buckets:
        senders = [Definition(case, bucket, slice(*bucket.ranges[each])) for each in range(ranks)]
        own = slice(*bucket.ranges[rank])
        for step in range(STEPS):
            weights = weights_of(case, step)
            total = torch.zeros(own.stop - own.start, dtype=bucket.shard.dtype)
            came = torch.zeros_like(total)
            for sender, weight in zip(senders, weights, strict=True):
                by_name = dict(
                    zip(parameters, gradients_of(senders.index(sender), step, bucket.flat.dtype), strict=True)
                )
                flat = torch.cat([by_name[p].reshape(-1) for p in bucket.parameters])
                values, sent = sender.send(flat, weight, step)
                total += weight * values[own].to(total.dtype)
                came += weight * sent[own]
            divides = sender.push.aggregate == "received-weight" and step >= sender.push.warmup_steps
            steps[step].append(torch.where(came > 0, total / came, 0) if divides else total)
        kept[bucket.index] = torch.cat([senders[rank].kept[: own.start], senders[rank].kept[own.stop :]])
    return steps, kept


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    sharding, seen = pushed(case)
    wanted, kept = expected(case, sharding)
    worst, largest = 0.0, 0.0
    for found, right in zip(seen, wanted, strict=True):
        for a, b in zip(found, right, strict=True):
            if a.numel():
                worst, largest = max(worst, float((a - b).abs().max())), max(largest, float(b.abs().max()))
    residuals = [
        float((r.values.double() - kept[i].double()).abs().max())
        for i, r in sharding.pusher.residuals.items()
        if r.values.numel()
    ]
    _, repeated = pushed(case)
    same = all(torch.equal(a, b) for x, y in zip(seen, repeated, strict=True) for a, b in zip(x, y, strict=True))
    return {
        "difference": worst,
        "largest": largest,
        "residual_difference": max(residuals, default=0.0),
        "kept": max(
            (float(r.values.abs().max()) for r in sharding.pusher.residuals.values() if r.values.numel()), default=0.0
        ),
        "identical": same,
        "density": sharding.sent.entries / sharding.sent.offered,
    }


def main(cases_file: str, out: str) -> None:
    meet()
    write_found(from_all_ranks({name: run_case(case) for name, case in cases_in(cases_file).items()}), out)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
