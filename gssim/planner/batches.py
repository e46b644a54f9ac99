"""Batch splits for candidate plans: by the rules of the search space, and by what fits the devices' memory."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from gssim.errors import UserError
from gssim.execution.cache import Same
from gssim.plan import Plan, Policies, splitting
from gssim.planner.bounds import Bounds
from gssim.scenario import check

PLAN = TypeAdapter(Plan)
USABLE_RATIOS = (1.0, 0.9)
"""Fractions of a device's memory that the lower bound of a split may fill; the rest is left for memory that the bound
does not include. A split counts only if its plan fits when simulated.
"""


class Batches:
    """Batch splits of one workload."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.total = bounds.parts.workload.global_batch_size

    def refusal(self, table: Mapping[str, Any]) -> str | None:
        """Return why a method cannot run on a mesh with so many micro-batches; None if, by its bounds, it can."""
        try:
            if table["method"] == "gs_wgrad":  # splits no batch
                check(replace(self.bounds.parts.scenario, plan=PLAN.validate_python(table)), file="search")
            else:
                self.bounds.of(PLAN.validate_python({**table, "shares": {"batch": "throughput"}}))
        except UserError as error:
            return str(error).removeprefix("search: ")
        return None

    def shares(self, table: Mapping[str, Any], owned: str, rules: Sequence[str]) -> Iterator[str | list[float]]:
        """Yield the batch splits that the rules give for a plan with this table, without duplicates."""
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
        """Yield the batch splits of one rule, in the form of a plan's key, each with its sizes in samples."""
        if rule == "even":
            if self.total % policies.data_ranks == 0:
                yield rule, (self.total // policies.data_ranks,) * policies.data_ranks
        elif rule == "throughput":
            wanted = replace(plan, shares=replace(plan.shares, batch="throughput"))
            yield rule, self.bounds.parts.batch_sizes(wanted, policies)
        elif self._are_alike(policies) and self.total % (policies.data_ranks * plan.micro_batches) == 0:
            yield "even", (self.total // policies.data_ranks,) * policies.data_ranks
        else:
            yield from self._that_fit(plan, policies)

    def _are_alike(self, policies: Policies) -> bool:
        """Return whether the ranks of every part of the batch are, one by one, on the same types of device."""

        def found() -> bool:
            types: list[list[str]] = [[] for _ in range(policies.data_ranks)]
            for rank in range(policies.ranks):
                types[policies.data_rank(rank)].append(self.bounds.parts.names[rank])
            return all(each == types[0] for each in types)

        return self.bounds.parts.once(("alike parts", policies.mesh), found)

    def _that_fit(self, plan: Plan, policies: Policies) -> Iterator[tuple[list[float], tuple[int, ...]]]:
        """Yield the batch splits that fit the fractions of memory `USABLE_RATIOS`."""
        parts: list[list[int]] = [[] for _ in range(policies.data_ranks)]
        for rank in range(policies.ranks):
            parts[policies.data_rank(rank)].append(rank)
        usual = max(1, self.total // (policies.data_ranks * plan.micro_batches))
        sample_s = self.bounds.parts.once(
            ("sample times", Same(policies), usual, plan.recompute),
            lambda: [
                max(self.bounds.compute.micro_batch_s(rank, usual, plan.recompute) for rank in part) / usual
                for part in parts
            ],
        )
        key = ("rooms", Same(policies), plan.shares.shards, plan.micro_batches, plan.recompute, plan.offload)
        most_samples = self.bounds.parts.once(
            key, lambda: self.bounds.memory.most_samples(plan, policies, USABLE_RATIOS)
        )
        for of_ranks in most_samples:
            most = [min(of_ranks[rank] for rank in part) for part in parts]
            for unit in dict.fromkeys((1, plan.micro_batches)):
                sizes = self._sizes_that_fit(most, sample_s, plan.micro_batches, unit)
                if sizes is not None:
                    yield [size / self.total for size in sizes], sizes

    def _sizes_that_fit(
        self, most_samples: Sequence[int], sample_s: Sequence[float], micro_batches: int, unit: int
    ) -> tuple[int, ...] | None:
        """Return batch sizes that fit memory, in multiples of `unit` with at least one sample per micro-batch; None if
        there are none.

        Of all such splits, the slowest part is as fast as possible. `most_samples`, `sample_s`: for each part of the
        batch, the most samples that fit, and the time of one.
        """
        if self.total % unit:
            return None
        most_units = [most // unit for most in most_samples]
        least_units = micro_batches // unit if unit > 1 else micro_batches
        if (
            min(most_units) < least_units
            or sum(most_units) * unit < self.total
            or least_units * len(most_units) * unit > self.total
        ):
            return None
        sizes = splitting.balance_batch(
            self.total // unit,
            sample_s=[unit * each for each in sample_s],
            least=least_units,
            most=most_units,
        )
        return tuple(unit * each for each in sizes)
