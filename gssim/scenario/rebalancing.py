"""Rebalancing during a run: batch split and shard shares for each next step, from the ranks' measured times.

Both the simulator and the real backend use it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gssim.plan import rebalancing
from gssim.result import Division
from gssim.scenario.scenario import Scenario


@dataclass(frozen=True)
class RebalancingState:
    """State of rebalancing: the controller, and the shares of the next step."""

    scenario: Scenario
    watch: rebalancing.Watch
    shard_shares: tuple[float, ...]
    most_samples: tuple[int, ...]
    updates: tuple[tuple[float | None, ...], ...] = ()
    """Each rank's time to update all parameters, for the latest steps; None for a rank that owned nothing."""
    divisions: tuple[Division, ...] = ()
    """Changes of the shares so far."""

    @property
    def samples(self) -> tuple[int, ...]:
        """Number of samples of each rank in a step."""
        return self.watch.batch


def begin(scenario: Scenario) -> RebalancingState:
    """Return the state before the first step."""
    watch = rebalancing.Watch(scenario.batch_sizes)
    return RebalancingState(scenario, watch, scenario.shard_shares, scenario.most_samples)


def after_step(
    state: RebalancingState, *, step: int, compute_s: Sequence[float], update_s: Sequence[float]
) -> RebalancingState:
    """Return the state after a counted step (negative in the warm-up), with the shares of the next step.

    `compute_s`, `update_s`: times of every rank in that step.
    """
    scenario, before = state.scenario, state
    settings, least = scenario.plan.shares.replanning, scenario.plan.micro_batches
    watch = rebalancing.observe(state.watch, compute_s, settings, least=least, most=state.most_samples)
    whole_s = [s / share if share and s else None for s, share in zip(update_s, state.shard_shares, strict=True)]
    updates = (*state.updates, tuple(whole_s))[-settings.minimum_steps :]
    state = replace(state, watch=watch, updates=updates)
    if watch.settled:
        moved = scenario.moved_shards(
            samples=watch.batch,
            owned=state.shard_shares,
            update_s=[
                median(known_s) if (known_s := [s for s in rank_s if s is not None]) else None
                for rank_s in zip(*updates, strict=True)
            ],
            steps=scenario.run.steps - step - 1,
        )
        if moved is not None:
            room = replace(scenario, plan=scenario.with_shares(before.samples, moved).plan).most_samples
            state = replace(state, shard_shares=moved, most_samples=tuple(map(max, room, watch.batch)))
    if (state.samples, state.shard_shares) == (before.samples, before.shard_shares):
        return state
    new = Division(first_step=step + 1, samples=state.samples, shard_shares=state.shard_shares)
    return replace(state, divisions=(*state.divisions, new))
