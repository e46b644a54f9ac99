"""Runs on every rank of a test: trainings that synchronize periodically, beside the same with all replicas in a list.

Arguments: a JSON file of cases {name: {"scenario": FILE, "overrides": [...]}} and the file to write.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_training import CPU, from_all_ranks, full_parameters, largest_difference, scenarios_in, trained, write_found
from torch import Tensor

from gsreal.measure import Timeline
from gsreal.model_files.build import logits_of, loss_of
from gsreal.run.feed import Feed
from gsreal.run.rank import run_on_rank
from gsreal.run.worker import build
from gssim.scenario import Scenario, single_device
from gssim.workload import unrolled

STEPS = 7


def main(cases_file: str, out: str) -> None:
    found = {}
    for name, scenario in scenarios_in(cases_file):
        rank = dist.get_rank()
        together = trained(scenario, rank, steps=STEPS)
        expected = (streamed if scenario.policies.in_fragments else written_out)(scenario)
        replica = rank // scenario.policies.replica_size
        own = largest_difference(together, expected[replica])
        every = from_all_ranks((own, largest_difference(together, expected[(replica + 1) % len(expected)])))
        found[name] = {"differences": [each for each, _ in every], "apart": [each for _, each in every]}
    write_found(found, out)


def written_out(scenario: Scenario) -> list[dict[str, Tensor]]:
    """Return the parameters of every replica after the same steps, with all replicas whole in one process."""
    policies = scenario.policies
    replicas, feeds, shares = replicas_of(scenario)
    outer = [p.detach().clone().requires_grad_() for p in replicas[0].module.parameters()]
    settings = scenario.plan.outer
    outer_optimizer = torch.optim.SGD(
        outer, lr=settings.learning_rate, momentum=settings.momentum, nesterov=settings.momentum > 0
    )
    if policies.outer_optimizer == "sparse":
        outer_optimizer = torch.optim.SGD(outer, lr=scenario.plan.sparse_outer.learning_rate)
    unsent: list[dict[int, Tensor]] = [{} for _ in replicas]
    for step in range(STEPS):
        inner_steps(scenario, replicas, feeds, step)
        if (step + 1) % (policies.sync_every_steps or 1):
            continue
        with torch.no_grad():
            every = [list(each.module.parameters()) for each in replicas]
            means = means_of(every, shares)
            changes = [whole.detach() - mean for whole, mean in zip(outer, means, strict=True)]
            if policies.outer_optimizer == "sparse":
                changes = by_shard(scenario, every, outer, partial(largest_changes, scenario, shares, unsent))
            elif settings.precision == "int8":
                changes = by_shard(scenario, every, outer, partial(rounded_changes, shares))
            for whole, change in zip(outer, changes, strict=True):
                whole.grad = change
            if policies.outer_optimizer:
                outer_optimizer.step()
                means = [whole.detach() for whole in outer]
            for replica in replicas:
                for parameter, mean in zip(replica.module.parameters(), means, strict=True):
                    parameter.copy_(mean)
    return [full_parameters(replica.module) for replica in replicas]


def streamed(scenario: Scenario) -> list[dict[str, Tensor]]:
    """Return the same of Streaming DiLoCo: every fragment is sent after one step, and updated after a later one."""
    every, settings, streaming = scenario.policies.sync_every_steps or 1, scenario.plan.outer, scenario.plan.streaming
    replicas, feeds, shares = replicas_of(scenario)
    layers = [layer for layer in unrolled(scenario.workload.model) if layer.layer.parameters]
    of_layer = [place for place, layer in enumerate(layers) for _ in layer.layer.parameters]
    fragments = []
    for number in range(streaming.fragments):
        own = [i for i, place in enumerate(of_layer) if place % streaming.fragments == number]
        outer = [list(replicas[0].module.parameters())[i].detach().clone().requires_grad_() for i in own]
        optimizer = torch.optim.SGD(
            outer, lr=settings.learning_rate, momentum=settings.momentum, nesterov=settings.momentum > 0
        )
        fragments.append((int((number + 1) * every / streaming.fragments), own, outer, optimizer))
    for step in range(STEPS):
        inner_steps(scenario, replicas, feeds, step)
        for last, own, outer, optimizer in fragments:
            every_own = [[list(replica.module.parameters())[i] for i in own] for replica in replicas]
            if (step + 1 + streaming.delay_steps - last) % every == 0:
                means = zip(outer, means_of(every_own, shares), strict=True)
                changes = [(whole - mean).detach() for whole, mean in means]
                if settings.precision == "int8":
                    changes = by_shard(scenario, every_own, outer, partial(rounded_changes, shares))
                for whole, change in zip(outer, changes, strict=True):
                    whole.grad = change
            if (step + 1 - last) % every == 0:
                optimizer.step()
                with torch.no_grad():
                    for parameter, whole in ((p, w) for ps in every_own for p, w in zip(ps, outer, strict=True)):
                        parameter.copy_(streaming.local_ratio * parameter + (1 - streaming.local_ratio) * whole)
    return [full_parameters(replica.module) for replica in replicas]


def replicas_of(scenario: Scenario) -> tuple[list[Any], list[list[Feed]], list[float]]:
    """Return every replica as one device, the feeds of its ranks, and its share of the batch."""
    policies, sizes = scenario.policies, scenario.batch_sizes
    firsts = range(0, scenario.ranks, policies.replica_size)
    replicas = [build(single_device(scenario), Timeline(0, CPU), CPU) for _ in firsts]
    # ranks that cut blocks among them have the same samples
    own = [range(first, first + policies.replica_size, policies.tp) for first in firsts]
    feeds = [[Feed(scenario, rank, CPU) for rank in ranks] for ranks in own]
    samples = [sum(sizes[rank] for rank in ranks) for ranks in own]
    return replicas, feeds, [each / sum(samples) for each in samples]


def inner_steps(scenario: Scenario, replicas: list[Any], feeds: list[list[Feed]], step: int) -> None:
    """Train every replica on the samples of all its ranks: on the mean over their loss terms."""
    for replica, own_feeds in zip(replicas, feeds, strict=True):
        for feed in own_feeds:
            inputs, targets, weights = feed.at(step)
            own = weights.ranks[feed.rank] / sum(weights.ranks[each.rank] for each in own_feeds)
            (loss_of(logits_of(replica.module(inputs)), targets) * own).backward()
        if scenario.workload.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(replica.module.parameters(), scenario.workload.clip_norm)
        replica.optimizer.step()
        replica.optimizer.zero_grad()


def means_of(replicas: list[list[Any]], shares: list[float]) -> list[Tensor]:
    """Return the weighted mean of every parameter over the replicas; `replicas`: the parameters of each."""
    columns = zip(*replicas, strict=True)
    return [sum((share * p for share, p in zip(shares, each, strict=True)), torch.zeros(())) for each in columns]


Changes = Callable[[int, list[list[Tensor]], list[Tensor]], list[Tensor]]


def by_shard(scenario: Scenario, replicas: list[list[Any]], outer: list[Any], changes: Changes) -> list[Tensor]:
    """Return the sum of changes, computed by shards as the ranks of a replica do: rows of every parameter."""
    shards = scenario.policies.dp_shard

    def rows(parameters: list[Any], number: int) -> list[Tensor]:
        chunks = (each.detach().chunk(shards) for each in parameters)
        return [parts[number] if number < len(parts) else parts[0][:0] for parts in chunks]

    found = [
        changes(number, [rows(each, number) for each in replicas], rows(outer, number)) for number in range(shards)
    ]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def rounded_changes(
    shares: list[float], _shard: int, replicas: list[list[Tensor]], outer: list[Tensor]
) -> list[Tensor]:
    """Return the sum of all ranks' weighted changes, each rounded to 255 levels in blocks of 1024 (one bucket)."""
    total = torch.zeros(sum(whole.numel() for whole in outer), dtype=outer[0].dtype)
    for share, parameters in zip(shares, replicas, strict=True):
        pairs = zip(outer, parameters, strict=True)
        change = torch.cat([(share * (whole - own)).reshape(-1) for whole, own in pairs])
        for block, out in zip(change.split(1024), total.split(1024), strict=True):
            scale = float((block.abs().max() / 127).float())
            if scale:
                out += (block / scale).round() * scale
    parts = total.split([whole.numel() for whole in outer])
    return [part.view_as(whole) for part, whole in zip(parts, outer, strict=True)]


def largest_changes(
    scenario: Scenario,
    shares: list[float],
    unsent: list[dict[int, Tensor]],
    shard: int,
    replicas: list[list[Tensor]],
    outer: list[Tensor],
) -> list[Tensor]:
    """Return the sum of all ranks' largest changes, chunk by chunk, and keep what is not in it (one bucket)."""
    options = scenario.plan.sparse_outer
    total = torch.zeros(sum(whole.numel() for whole in outer), dtype=outer[0].dtype)
    for share, parameters, of_shards in zip(shares, replicas, unsent, strict=True):
        pairs = zip(outer, parameters, strict=True)
        change = torch.cat([share * (whole - own).reshape(-1) for whole, own in pairs])
        kept = of_shards.setdefault(shard, torch.zeros_like(change))
        kept.copy_(options.decay * kept + change)
        for begin in range(0, len(kept), options.chunk_elements):
            chunk = kept[begin : begin + options.chunk_elements]
            # Adam makes many equal magnitudes: which of them are found depends on the processor
            places = chunk.abs().topk(min(options.chunk_entries, len(chunk)), sorted=False).indices
            sent = chunk[places].clone()
            if options.precision == "int2":
                # entries of the padding are zeros, which count as small ones
                sizes = torch.cat([sent.abs(), sent.new_zeros(options.chunk_entries - len(sent))])
                large = sizes > sizes.mean()
                means = [float(sizes[of].mean().float()) if of.any() else 0.0 for of in (~large, large)]
                sent = sent.sign().where(sent != 0, 1.0) * torch.tensor([means[i] for i in large[: len(sent)].int()])
            chunk[places] -= sent
            total[begin : begin + options.chunk_elements][places] += sent
    parts = total.split([whole.numel() for whole in outer])
    return [part.view_as(whole) for part, whole in zip(parts, outer, strict=True)]


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
