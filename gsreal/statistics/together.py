"""Trains all ranks of a scenario in one process, in turn and without messages, for studies of losses over many seeds.

The arithmetic is that of the real methods. Gradient Sharding is trained by `gsreal.statistics.training`; compressors
and periodic synchronizations by the classes of real runs, one object for each rank, whose collectives are summed here.
Step times, memory and collectives are not measured: they are a simulation's.
"""

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from gsreal.data.source import Source
from gsreal.measure import Timeline
from gsreal.methods.compressed import LargestCompressor, LowRankCompressor, Pending
from gsreal.methods.optimizers import make_optimizer
from gsreal.methods.periodic import Synchronization
from gsreal.model_files.build import DTYPES, autocast, logits_of, loss_of
from gsreal.run.feed import Feed, HeldOut
from gsreal.run.worker import build
from gsreal.statistics.training import CPU, Gradients, Replica, buckets_of, one_thread
from gssim.errors import UserError
from gssim.execution.files import write_text
from gssim.plan import absolute_threshold, chosen, message_bytes
from gssim.scenario import Scenario, load_scenario, single_device
from gssim.units import PRECISION_BYTES


class Unequal:
    """A source that gives ranks unlike samples: the first part of every batch is sorted, the rest is as drawn.

    Images are sorted by class, texts by their mean token id; the sorted part is `ratio` of the batch. Ranks have
    equally many samples of either part.
    """

    def __init__(self, source: Source, batch_size: int, *, ranks: int, ratio: float) -> None:
        self.source, self.size, self.ranks = source, batch_size, ranks
        self.sorted = round(ratio * batch_size / ranks) * ranks
        self._latest: tuple[int, int, Tensor, Tensor] | None = None

    def batch(self, *, seed: int, step: int, rows: slice) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of these rows of the batch in its new order."""
        if self._latest is None or self._latest[:2] != (seed, step):
            inputs, targets = self.source.batch(seed=seed, step=step, rows=slice(0, self.size))
            keys = (targets if targets.dim() == 1 else inputs.double().mean(1))[: self.sorted]
            parts = keys.argsort(stable=True).view(self.ranks, -1)
            others = torch.arange(self.sorted, self.size).view(self.ranks, -1)
            order = torch.cat([parts, others], 1).flatten()
            self._latest = seed, step, inputs[order], targets[order]
        return self._latest[2][rows], self._latest[3][rows]

    def loss_terms(self, *, seed: int, step: int, rows: Sequence[slice]) -> list[int]:
        """Return the number of loss terms of each of these parts of the batch."""
        return self.source.loss_terms(seed=seed, step=step, rows=rows)


class Pushing(Replica):
    """Gradient Sharding: a replica whose optimizer updates master copies, published where they have changed enough."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, scenario.push)
        self.value_bytes = PRECISION_BYTES[scenario.workload.precision]
        self.pushed_bytes = self.published_bytes = 0.0
        """Bytes of all ranks' messages in the latest step, in the encodings of the plan."""
        self.bucket_of = {
            name: number for number, names in enumerate(buckets_of(scenario, dict(self.parameters))) for name in names
        }
        self.entries: dict[tuple[int, int], Tensor] = {}
        """Number of elements sent to every owner, by bucket and sender."""
        self.elements = torch.zeros(len(set(self.bucket_of.values())), scenario.ranks, dtype=torch.int64)
        """Elements of every owner in every bucket."""
        for name, owners in self.owners.items():
            self.elements[self.bucket_of[name]] += owners.reshape(-1).long().bincount(minlength=scenario.ranks)
        threshold = absolute_threshold(scenario.plan.publish, scenario.workload.learning_rate)
        self.publish_threshold = threshold
        self.kept: Gradients = {}
        """Master copies, where publishing is thresholded."""
        if threshold is not None:
            self.kept = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
            self.optimizer.register_step_pre_hook(self._exchange_masters)
            self.optimizer.register_step_post_hook(self._publish)

    def train(self, step: int) -> None:
        """Train one step."""
        self.entries.clear()
        self.step(step, lambda _rank, _gradients: None)
        ranks = range(self.scenario.ranks)
        encoding = self.push.encoding if self.push.selects and self._selects(step) else "dense"
        self.pushed_bytes = sum(
            self._message(encoding, int(self._entries(bucket, sender)[owner]), elements)
            for bucket, row in enumerate(self.elements.tolist())
            for sender in ranks
            for owner, elements in enumerate(row)
            if owner != sender
        )
        if self.publish_threshold is None:
            self.published_bytes = float(self.elements.sum() * (len(ranks) - 1) * self.value_bytes)

    def _entries(self, bucket: int, sender: int) -> Tensor:
        return self.entries.setdefault((bucket, sender), torch.zeros(self.scenario.ranks, dtype=torch.int64))

    def _message(self, encoding: str, entries: int, elements: int) -> float:
        sizes = {"entries": entries, "elements": elements, "value_bytes": self.value_bytes}
        return message_bytes(chosen(encoding, **sizes), **sizes)

    def _sent(self, step: int, rank: int, name: str, gradient: Tensor) -> Tensor:
        sent = super()._sent(step, rank, name, gradient)
        owners = self.owners[name][sent != 0].long()
        self._entries(self.bucket_of[name], rank).add_(owners.bincount(minlength=self.scenario.ranks))
        return sent

    @torch.no_grad()
    def _exchange_masters(self, *_optimizer_and_arguments: Any) -> None:
        for name, parameter in self.parameters.items():
            published = parameter.detach().clone()
            parameter.copy_(self.kept[name])
            self.kept[name] = published

    @torch.no_grad()
    def _publish(self, *_optimizer_and_arguments: Any) -> None:
        entries = torch.zeros_like(self.elements)
        for name, parameter in self.parameters.items():
            published, master = self.kept[name], parameter.detach().clone()
            far = ((published - master).abs() < (self.publish_threshold or 0.0)).logical_not_()
            parameter.copy_(torch.where(far, master, published))
            self.kept[name] = master
            entries[self.bucket_of[name]] += self.owners[name][far].long().bincount(minlength=self.scenario.ranks)
        encoding, others = self.scenario.plan.publish.encoding, self.scenario.ranks - 1
        pairs = zip(entries.flatten().tolist(), self.elements.flatten().tolist(), strict=True)
        self.published_bytes = others * sum(self._message(encoding, sent, elements) for sent, elements in pairs)


class _InTurn:
    """Compressor of one of several ranks in a process: its collectives are noted, and done by `_exchange`."""

    def _reduce(self, tensor: Tensor) -> tuple[Tensor, Any]:
        self.asked.append((tensor, None))
        return tensor, None

    def _gather(self, tensor: Tensor) -> tuple[Tensor, Any]:
        gathered = tensor.new_empty(self.ranks * tensor.numel())
        self.asked.append((gathered, tensor))
        return gathered, None

    def _wait(self, *_sums_and_names: Any) -> None:
        """Do nothing: no exchange is in flight."""

    asked: list[tuple[Tensor, Tensor | None]]
    ranks: int


class _LowRank(_InTurn, LowRankCompressor):
    """PowerSGD."""


class _Largest(_InTurn, LargestCompressor):
    """Top-k."""


class Reducing(Replica):
    """Data parallelism: a replica trained by the mean of all ranks' gradients, compressed as the plan says."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario, scenario.push)
        self.buckets = buckets_of(scenario, dict(self.parameters))
        plan, kind = scenario.plan, scenario.policies.compressor
        group: Any = SimpleNamespace(size=lambda: scenario.ranks)
        self.compressors: list[_LowRank | _Largest] = []
        for _ in range(scenario.ranks if kind else 0):
            timeline = Timeline(0, CPU)
            each: _LowRank | _Largest = (
                _Largest(group, timeline, options=plan.topk, overlap=plan.overlap)
                if kind == "topk"
                else _LowRank(group, timeline, options=plan.powersgd, overlap=plan.overlap, seed=scenario.run.seed)
            )
            each.asked = []
            self.compressors.append(each)

    @torch.no_grad()
    def train(self, step: int) -> None:
        """Train one step."""
        ranks = self.scenario.ranks
        with torch.enable_grad():
            of_ranks = [self.gradients(step, rank) for rank in self.feeds]
        for number, names in enumerate(self.buckets):
            flat = [
                torch.cat([gradients[name].reshape(-1) for name in names]).mul_(ranks * weight)
                for gradients, weight in of_ranks
            ]
            compressed = bool(self.compressors) and step >= self.compressors[0].start_step
            mean = self._mean(number, names, flat, compressed=compressed)
            parts = mean.split([self.parameters[name].numel() for name in names])
            for name, part in zip(names, parts, strict=True):
                self.parameters[name].grad = part.view_as(self.parameters[name]).clone()
        self.optimizer.step()

    def _mean(self, number: int, names: Sequence[str], flat: list[Tensor], *, compressed: bool) -> Tensor:
        ranks, dtype = self.scenario.ranks, flat[0].dtype
        if self.scenario.policies.compress:
            flat = [each.to(DTYPES[self.scenario.policies.compress]) for each in flat]
        if not compressed:
            for each in flat:
                each.div_(ranks)
            for each in flat[1:]:
                flat[0].add_(each)
            return flat[0].to(dtype)
        shapes = [self.parameters[name].shape for name in names]
        pending = []
        for each in flat:
            parts = each.split([shape.numel() for shape in shapes])
            views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            done: Future[Tensor] = Future()
            pending.append(Pending(number, each, views, done))
        for compressor, own in zip(self.compressors, pending, strict=True):
            compressor.begin(own)
        for place in range(len(self.compressors[0].rounds())):
            _exchange(self.compressors)
            for compressor, own in zip(self.compressors, pending, strict=True):
                compressor.rounds()[place](own)
        return flat[0]


def _exchange(compressors: Sequence[_LowRank | _Largest]) -> None:
    """Do the collectives that all compressors have asked for."""
    for calls in zip(*(each.asked for each in compressors), strict=True):
        if calls[0][1] is None:
            result = torch.stack([tensor for tensor, _ in calls]).sum(0)
        else:
            result = torch.cat([own for _, own in calls if own is not None])
        for tensor, _ in calls:
            tensor.copy_(result)
    for each in compressors:
        each.asked.clear()


class Apart:
    """Ranks that train apart and synchronize periodically: a module and an optimizer for each."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.modules = [build(single_device(scenario), Timeline(0, CPU), CPU).module for _ in range(scenario.ranks)]
        self.optimizers = [make_optimizer(scenario.workload, each.parameters(), CPU) for each in self.modules]
        self.feeds = {rank: Feed(scenario, rank, CPU) for rank in range(scenario.ranks)}
        pairs = zip(self.modules, self.optimizers, strict=True)
        self.periods = [
            Synchronization(scenario, module, optimizer, Timeline(0, CPU), rank=rank)
            for rank, (module, optimizer) in enumerate(pairs)
        ]
        self.in_flight: dict[int, Tensor] = {}
        """Sums of buckets whose exchange has begun, and has not ended."""

    def train(self, step: int) -> None:
        """Train one step."""
        for rank, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            inputs, targets, _ = self.feeds[rank].at(step)
            optimizer.zero_grad(set_to_none=True)
            with autocast(self.scenario.workload.autocast):
                loss = loss_of(logits_of(module(inputs)), targets)
            loss.backward()
            optimizer.step()
            self.periods[rank].steps += 1
        begun, ended = self.periods[0].due()
        for number in begun:
            parts = [each.offered(number) for each in self.periods]
            self.in_flight[number] = torch.cat(parts) if self.periods[0].gathers else torch.stack(parts).sum(0)
        for number in ended:
            total = self.in_flight.pop(number)
            for each in self.periods:
                each.take(number, total.clone())


Trainer = Pushing | Reducing | Apart


def trainer_of(scenario: Scenario, *, unequal_ratio: float = 0.0) -> Trainer:
    """Return what trains all ranks of the scenario; raise UserError for what it cannot train."""
    kinds: dict[str, type[Pushing] | type[Reducing] | type[Apart]] = {
        "push": Pushing,
        "all-reduce": Reducing,
        "periodic": Apart,
    }
    policies, workload = scenario.policies, scenario.workload
    kind = kinds.get(policies.gradients)
    refused = {
        f"plan.cp = {policies.cp}": policies.cp > 1,
        f"plan.dp_shard = {policies.dp_shard}": policies.shards_replicas,
        f"plan.method = '{scenario.plan.method}'": kind is None or policies.data_ranks < policies.ranks,
        f"workload.precision = '{workload.precision}'": workload.precision not in ("fp32", "fp64"),
        f"plan.micro_batches = {scenario.plan.micro_batches}": scenario.plan.micro_batches > 1,
        f"workload.clip_norm = {workload.clip_norm}": workload.clip_norm is not None,
        "plan.shares.replan = true": scenario.plan.shares.replan,
        f"workload.global_batch_size = {workload.global_batch_size}": len(set(scenario.batch_sizes)) > 1,
        "a model with buffers": bool(workload.model.buffer_bytes),
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise UserError(f"{scenario.name}: {what}: cannot be trained with all ranks in one process")
    assert kind is not None
    trainer = kind(scenario)
    if unequal_ratio:
        inner = next(iter(trainer.feeds.values())).source
        source = Unequal(inner, workload.global_batch_size, ranks=scenario.ranks, ratio=unequal_ratio)
        for feed in trainer.feeds.values():
            feed.source = source
    return trainer


def trained(scenario: Scenario, unequal_ratio: float = 0.0) -> dict[str, Any]:
    """Train the scenario's steps; return evaluations, and the densities and bytes of data-dependent messages."""
    trainer = trainer_of(scenario, unequal_ratio=unequal_ratio)
    steps, every = scenario.run.warmup_steps + scenario.run.steps, scenario.run.evaluate_every_steps
    held_out = [HeldOut(scenario, rank, CPU) for rank in range(scenario.ranks)]
    evaluations, densities, sent_bytes = [], [], []

    def evaluate(step: int) -> None:
        modules = trainer.modules if isinstance(trainer, Apart) else [trainer.module] * scenario.ranks
        sums = torch.stack([each.sums(module) for each, module in zip(held_out, modules, strict=True)]).sum(0)
        evaluation = held_out[0].evaluation(sums, step=max(1, step))  # a real run has none before its first step
        evaluations.append(asdict(evaluation) | {"step": step})

    evaluate(0)
    for step in range(steps):
        trainer.train(step)
        if isinstance(trainer, Pushing):
            if trainer.offered_elements:
                densities.append(trainer.sent_elements / trainer.offered_elements)
            sent_bytes.append((trainer.pushed_bytes + trainer.published_bytes) / scenario.ranks)
        if (every and (step + 1) % every == 0) or step + 1 == steps:
            evaluate(step + 1)
    return {"evaluations": evaluations, "densities": densities, "sent_bytes": sent_bytes}


def main(jobs_file: str) -> None:
    """Train every job of a JSON list of {"file", "overrides", "unequal_ratio", "out"}; write its result to `out`.

    A result holds the job with all its keys, by which it is recognized when it is reused.
    """
    warnings.filterwarnings("ignore")
    jobs = json.loads(Path(jobs_file).read_text(encoding="utf-8"))
    with one_thread():
        for number, job in enumerate(jobs):
            scenario = load_scenario(Path(job["file"]), job["overrides"], gradients_needed=False).scenario
            what = f"{scenario.name}, seed {scenario.run.seed}"
            print(f"gsreal: training {number + 1} of {len(jobs)}: {what}", file=sys.stderr, flush=True)
            write_text(Path(job["out"]), json.dumps({"job": job} | trained(scenario, job["unequal_ratio"])))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except UserError as error:
        sys.exit(f"gsreal: {error}")
