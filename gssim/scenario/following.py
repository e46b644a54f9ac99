"""Shares in the course of a run, where they follow the ranks' pace: what both executors decide after every step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gssim.plan import rebalancing
from gssim.result import Division
from gssim.scenario.scenario import Scenario


@dataclass(frozen=True)
class Following:
    """What is known of the ranks' paces, and the shares of the next step."""

    scenario: Scenario
    watch: rebalancing.Watch
    shard_shares: tuple[float, ...]
    most_samples: tuple[int, ...]
    updates: tuple[tuple[float | None, ...], ...] = ()
    """What updating all parameters would have taken each rank in the last steps; None where it owned nothing."""
    divisions: tuple[Division, ...] = ()

    @property
    def samples(self) -> tuple[int, ...]:
        """Of each rank."""
        return self.watch.batch


def begin(scenario: Scenario) -> Following:
    """Return what is known before the first step."""
    watch = rebalancing.Watch(scenario.batch_sizes)
    return Following(scenario, watch, scenario.shard_shares, scenario.most_samples)


def after_step(following: Following, *, step: int, compute_s: Sequence[float], update_s: Sequence[float]) -> Following:
    """Return what is known after a step (of those that count; negative in the warm-up), and the next step's shares.

    `compute_s`, `update_s`: of every rank, in that step.
    """
    scenario, before = following.scenario, following
    settings, least = scenario.plan.shares.replanning, scenario.plan.micro_batches
    watch = rebalancing.observe(following.watch, compute_s, settings, least=least, most=following.most_samples)
    whole_s = [s / share if share and s else None for s, share in zip(update_s, following.shard_shares, strict=True)]
    updates = (*following.updates, tuple(whole_s))[-settings.minimum_steps :]
    following = replace(following, watch=watch, updates=updates)
    if watch.settled:
        moved = scenario.moved_shards(
            samples=watch.batch,
            owned=following.shard_shares,
            update_s=[_median(each) for each in zip(*updates, strict=True)],
            steps=scenario.run.steps - step - 1,
        )
        if moved is not None:
            room = replace(scenario, plan=scenario.with_shares(before.samples, moved).plan).most_samples
            following = replace(following, shard_shares=moved, most_samples=tuple(map(max, room, watch.batch)))
    if (following.samples, following.shard_shares) == (before.samples, before.shard_shares):
        return following
    new = Division(first_step=step + 1, samples=following.samples, shard_shares=following.shard_shares)
    return replace(following, divisions=(*following.divisions, new))


def _median(seconds: Sequence[float | None]) -> float | None:
    known = [each for each in seconds if each is not None]
    return median(known) if known else None
