"""Shares of the batch that suit a plan: what the scenario's rules say, and what memory leaves room for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from gssim.errors import UserError
from gssim.plan import Plan, Policies, splitting
from gssim.planner.bounds import Bounds

PLAN = TypeAdapter(Plan)
USABLE_RATIOS = (1.0, 0.9)
"""Of a device's memory, as samples fill it up to what they need at least: the rest is left to all that is not in that
bound. The plan counts that fits when simulated."""


class Batches:
    """Divisions of one workload's batch."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.total = bounds.parts.workload.global_batch_size

    def refusal(self, table: Mapping[str, Any]) -> str | None:
        """Return why a method cannot run on a mesh with so many micro-batches, as far as bounds tell; None: it can."""
        try:
            self.bounds.of(PLAN.validate_python({**table, "shares": {"batch": "throughput"}}))
        except UserError as error:
            return str(error)
        return None

    def shares(self, table: Mapping[str, Any], owned: str, rules: Sequence[str]) -> Iterator[str | list[float]]:
        """Give the shares by each rule for a plan with that table; those alike are given once."""
        plan = PLAN.validate_python({**table, "shares": {"shards": owned}})
        try:
            policies = self.bounds.parts.policies(plan)
        except UserError:
            return
        seen: set[tuple[int, ...]] = set()
        for rule in rules:
            for given, sizes in self._by_rule(plan, policies, rule):
                enough = min(sizes) >= plan.micro_batches or plan.micro_batches == 1
                even = policies.pp == 1 or not any(size % plan.micro_batches for size in sizes)
                if sizes not in seen and enough and even:
                    seen.add(sizes)
                    yield given

    def _by_rule(
        self, plan: Plan, policies: Policies, rule: str
    ) -> Iterator[tuple[str | list[float], tuple[int, ...]]]:
        """Give shares as a plan has them, and what they come to in samples."""
        if rule == "even":
            if self.total % policies.data_ranks == 0:
                yield rule, (self.total // policies.data_ranks,) * policies.data_ranks
        elif rule == "throughput":
            wanted = replace(plan, shares=replace(plan.shares, batch="throughput"))
            yield rule, self.bounds.parts.batch_sizes(wanted, policies)
        else:
            for ratio in USABLE_RATIOS:
                for unit in dict.fromkeys((1, plan.micro_batches)):
                    sizes = self._fitted(plan, policies, ratio, unit)
                    if sizes is not None:
                        yield [size / self.total for size in sizes], sizes

    def _fitted(self, plan: Plan, policies: Policies, ratio: float, unit: int) -> tuple[int, ...] | None:
        """Return samples, in multiples of `unit`, at least one a micro-batch and no more than fit; None if too few do.

        Among these, the slowest part is as fast as can be.
        """
        if self.total % unit:
            return None
        parts: list[list[int]] = [[] for _ in range(policies.data_ranks)]
        for rank in range(policies.ranks):
            parts[policies.data_rank(rank)].append(rank)
        usual = max(1, self.total // (policies.data_ranks * plan.micro_batches))
        sample_s = [
            max(self.bounds.compute.micro_batch_s(rank, usual, plan.recompute) for rank in part) / usual
            for part in parts
        ]
        room = self._room(plan, policies, ratio)
        most = [min(room[rank] for rank in part) // unit for part in parts]
        least = plan.micro_batches // unit if unit > 1 else plan.micro_batches
        if min(most) < least or sum(most) * unit < self.total or least * len(parts) * unit > self.total:
            return None
        found = splitting.balance_batch(
            self.total // unit,
            sample_s=[unit * each for each in sample_s],
            fixed_s=[0.0] * len(parts),
            least=least,
            most=most,
        )
        return tuple(unit * each for each in found)

    def _room(self, plan: Plan, policies: Policies, ratio: float) -> list[int]:
        """Return for how many samples a part of each rank's memory has room at most."""
        key = ("rooms", policies, plan.shares.shards, plan.micro_batches, plan.recompute, ratio)
        memory, ranks = self.bounds.memory, range(policies.ranks)
        return self.bounds.parts.once(key, lambda: [memory.room(plan, policies, rank, ratio) for rank in ranks])
