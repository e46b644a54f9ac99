"""Helpers of the tests of `gssim search`: small scenarios, a search in this process, and a check of every bound."""

import math
import random
import tomllib
import weakref
from dataclasses import replace

import pytest
from strategies import device_type, loaded_of, scenario_of, star

from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.planner import PLAN, Search, full_ratio, predict_or_bound
from gssim.planner.bounds import Bounds, LoweredBounds
from gssim.result import Result
from gssim.scenario import SearchSpace, check
from gssim.scenario.search_space import SEARCHED_METHODS
from gssim.simulation import simulate


class InThisProcess:
    """Simulates plans when it is asked for their answers, the latest first."""

    def __init__(self, loaded, at_once=2):
        self.loaded, self.at_a_time = loaded, at_once
        self.answers, self.shared = {}, Shared()
        weakref.finalize(self, self.shared.clear)  # what it keeps refers to it
        self.simulated = 0

    def submit(self, work, request):
        return request

    def ended(self, requests, within_s=0.0):
        return requests[-1:]

    def answer(self, request):
        plan = PLAN.validate_python(tomllib.loads(request.override)["plan"])
        try:
            answer = predict_or_bound(self.with_plan(plan), request.bound, request.limits, self.shared)
        except UserError as error:
            answer = error.with_traceback(None)  # whose frames would keep this
        self.simulated += isinstance(answer, Result)
        return answer

    def with_plan(self, plan):
        """Return the scenario with another plan; raise UserError where it cannot run."""
        scenario = replace(self.loaded.scenario, plan=plan)
        check(scenario, file="made")
        return replace(self.loaded, scenario=scenario)

    def answer_of(self, plan):
        """Return what becomes of a plan, simulated whatever its bounds are."""
        if plan not in self.answers:
            try:
                self.answers[plan] = simulate(self.with_plan(plan), shared=self.shared).result
            except UserError as error:
                self.answers[plan] = error
        return self.answers[plan]


def assert_bounds_below_prediction(scenario, gradients=None):
    """Raise AssertionError where a bound of a scenario's plan exceeds what is predicted; return the bound."""
    result, bounds = simulate(loaded_of(scenario, gradients)).result, Bounds(scenario)
    bound = bounds.closer(scenario.plan, bounds.of(scenario.plan))
    held = [rank.peak_allocated_bytes + sum(rank.outside_bytes.values()) for rank in result.ranks]
    assert 0 < bound.time_s <= result.step_time_s
    assert bound.full_ratio <= max(held) / scenario.cluster.type_of(0).memory_bytes
    return bound


def random_question(seed):
    """Return a small scenario on unequal devices with little memory, and a space of plans for it."""
    chance = random.Random(seed)
    memory = chance.choice([2500, 4000, 6000, 10000])
    types = {
        "fast": device_type(memory_bytes=memory, price_usd_per_h=4.0, busy_power_w=400.0, idle_power_w=80.0),
        "slow": device_type(
            memory_bytes=chance.choice([memory, memory // 2]),
            peak_flop_per_s={"fp32": chance.choice([2e8, 5e8])},
            operation_overhead_s=chance.choice([0.0, 1e-4]),
            price_usd_per_h=1.0,
            busy_power_w=70.0,
            idle_power_w=chance.choice([10.0, 40.0]),
            step_jitter_ratio=chance.choice([0.0, 0.0, 0.1]),
        ),
    }
    devices = chance.choice([2, 2, 3, 4])
    names = [chance.choice(["fast", "slow"]) for _ in range(devices)]
    cluster = star(devices, types=types, type_names=names, bandwidth=chance.choice([1e4, 3e5, 1e7]))
    batch = chance.choice([8, 12])
    scenario = scenario_of(cluster, {"method": "ddp", "shares": {"batch": "throughput"}}, global_batch_size=batch)
    space = SearchSpace(
        objective=chance.choice(["step-time", "cost", "energy"]),
        methods=tuple(chance.sample(SEARCHED_METHODS, 3)),
        micro_batches=tuple(chance.sample([1, 2, 4], 2)),
        recompute=tuple(chance.sample(["none", "full"], chance.choice([1, 2]))),
        shards=tuple(chance.sample(["even", "compute", "memory", "cost"], 2)),
        tp=(1, 2),
        pp=(1, 2),
        schedules=chance.choice([None, None, ("gpipe", "interleaved"), ("1f1b",)]),
    )
    return loaded_of(scenario), space


def value_of(result, objective):
    return {"step-time": result.step_time_s, "cost": result.cost_usd_per_step, "energy": result.energy_j_per_step}[
        objective
    ]


def fullest(loaded, result):
    types = loaded.scenario.cluster.device_types
    return full_ratio(result, {name: device.memory_bytes for name, device in types.items()})


def check_bounds(workers, bounds, candidate, result):
    """Check that no bound of a plan is more than what it really has, and that memory is known before the time is."""
    plan, objective = candidate.plan, bounds.objective
    first = bounds.of(plan)
    last = LoweredBounds(workers.with_plan(plan), objective, workers.shared)
    allocated = last.allocated_bound()
    for bound in (first, bounds.closer(plan, first), allocated, last.with_shared_links(allocated)):
        assert bound.time_s <= result.step_time_s * (1 + 1e-9), candidate.override
        assert bound.objective <= value_of(result, objective) * (1 + 1e-9), candidate.override
        assert bound.full_ratio <= fullest(workers.loaded, result) * (1 + 1e-9), candidate.override
    full = last.with_allocator_overhead(allocated).full_ratio
    assert full == pytest.approx(fullest(workers.loaded, result) if result.fits else math.inf), candidate.override


def small(**changes):
    """Return a scenario on two unequal devices, and a space of few plans."""
    types = {
        "fast": device_type(**({"price_usd_per_h": 9.0, "busy_power_w": 300.0, "idle_power_w": 60.0} | changes)),
        "slow": device_type(peak_flop_per_s={"fp32": 5e8}, price_usd_per_h=1.0, busy_power_w=40.0, idle_power_w=10.0),
    }
    cluster = star(2, types=types, type_names=["fast", "slow"])
    return loaded_of(scenario_of(cluster, {"method": "ddp"})), {"methods": ("single", "ddp", "zero3", "gs")}


def searched(loaded, top=3, **space):
    search = Search(loaded, SearchSpace(**space), top)
    workers = InThisProcess(loaded)
    search.prepare()
    search.run(workers)
    return search.found(), workers
