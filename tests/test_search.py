"""Search: what it finds is what simulating every plan finds; its bounds are bounds; limits, objectives, interrupts."""

import json
import math
import random
import tomllib
from dataclasses import replace

import pytest
from commands import run
from strategies import (
    SCENARIO_TOML,
    device_type,
    exponential_statistics,
    loaded_of,
    scenario_of,
    star,
    write_files,
)

from gssim.result import Result
from gssim.scenario import check
from gssim.search import Search
from gssim.search.batches import PLAN, Batches
from gssim.search.bounds import Bounds, LoweredBounds
from gssim.search.candidates import candidates
from gssim.search.limits import FRONT_RATIO
from gssim.search.reasons import full_ratio
from gssim.search.workers import judged
from gssim.shared import Shared
from gssim.simulate import simulate
from gssim.space import SEARCHED_METHODS, SearchSpace
from gssim.units import UserError


class InThisProcess:
    """Looks at plans when it is asked for their answers, the latest first."""

    def __init__(self, loaded, at_once=2):
        self.loaded, self.idle, self.busy = loaded, list(range(at_once)), {}
        self.asked, self.answers, self.shared = {}, {}, Shared()
        self.simulated = 0

    def begin(self, number, override, limits):
        place = self.idle.pop()
        self.busy[place], self.asked[number] = number, (override, limits)

    def ended(self):
        place = max(self.busy)
        number = self.busy.pop(place)
        self.idle.append(place)
        override, limits = self.asked[number]
        try:
            answer = judged(self.with_plan(PLAN.validate_python(tomllib.loads(override)["plan"])), limits, self.shared)
        except UserError as error:
            answer = error
        self.simulated += isinstance(answer, Result)
        yield number, answer

    def with_plan(self, plan):
        """Return the scenario with another plan; raise UserError where it cannot run."""
        scenario = replace(self.loaded.scenario, plan=plan)
        check(scenario, file="made")
        return replace(self.loaded, scenario=scenario)

    def answer(self, plan):
        """Return what becomes of a plan, simulated whatever its bounds are."""
        if plan not in self.answers:
            try:
                self.answers[plan] = simulate(self.with_plan(plan), shared=self.shared).result
            except UserError as error:
                self.answers[plan] = error
        return self.answers[plan]


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
    allocated = last.allocated()
    for bound in (first, bounds.closer(plan, first), allocated):
        assert bound.time_s <= result.step_time_s * (1 + 1e-9), candidate.override
        assert bound.objective <= value_of(result, objective) * (1 + 1e-9), candidate.override
        assert bound.full_ratio <= fullest(workers.loaded, result) * (1 + 1e-9), candidate.override
    full = last.reserved(allocated).full_ratio
    assert full == pytest.approx(fullest(workers.loaded, result) if result.fits else math.inf), candidate.override


@pytest.mark.parametrize("seed", range(20))
def test_a_search_finds_what_simulating_every_plan_finds(seed):
    loaded, space = random_question(seed)
    search = Search(loaded, space, top=4)
    workers = InThisProcess(loaded)
    search.run(workers)
    found = search.found()
    bounds = Bounds(loaded.scenario, space.objective)
    every = []
    for each in candidates(loaded.scenario, space, Batches(bounds)):
        result = workers.answer(each.plan)
        if isinstance(result, UserError):
            continue
        check_bounds(workers, bounds, each, result)
        if result.fits:
            every.append((each.index, result))
    best = sorted(every, key=lambda entry: (value_of(entry[1], space.objective), entry[0]))[:4]
    assert [each.candidate.index for each in found.best] == [index for index, _ in best]
    assert [each.result for each in found.best] == [result for _, result in best]
    points = sorted((result.step_time_s, fullest(loaded, result), index) for index, result in every)
    undominated = [
        index
        for time_s, full, index in points
        if time_s <= FRONT_RATIO * points[0][0]
        and not any(
            (t <= time_s and f < full) or (t < time_s and f <= full) or (t == time_s and f == full and i < index)
            for t, f, i in points
        )
    ]
    assert [each.candidate.index for each in found.front] == undominated


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
    search.run(workers)
    return search.found(), workers


def test_bounds_spare_most_simulations():
    loaded, space = small()
    found, workers = searched(loaded, **space)
    assert len(found.best) == 3
    assert workers.simulated < found.plans / 2
    assert found.counts.ruled_out + found.counts.refused + found.counts.simulated == found.plans


def test_no_plan_that_is_shown_exceeds_a_memory_and_where_none_fits_none_is_shown():
    loaded, space = small(memory_bytes=3000)
    found, _ = searched(loaded, **space)
    shown = [*found.best, *found.front]
    assert shown
    assert all(each.result.fits and each.full_ratio <= 1 for each in shown)
    loaded, space = small(memory_bytes=10)
    found, _ = searched(loaded, **space)
    assert not found.best
    assert not found.front
    assert found.results() == []


def test_each_objective_has_its_own_best():
    loaded, space = small()
    values = {}
    for objective in ("step-time", "cost", "energy"):
        found, _ = searched(loaded, objective=objective, **space)
        values[objective] = [value_of(found.best[0].result, each) for each in ("step-time", "cost", "energy")]
    for place, objective in enumerate(values):
        assert values[objective][place] == min(each[place] for each in values.values())


def test_rivals_are_the_best_of_their_kind():
    loaded, space = small()
    found, _ = searched(loaded, **space)
    rivals = dict(found.rivals)
    assert rivals["the scenario's own plan"].candidate.plan == loaded.scenario.plan
    even = rivals["best with even shares"]
    assert (even.candidate.plan.shares.batch, even.candidate.plan.shares.shards) == ("even", "even")
    assert rivals["best with shares proportional to compute"].candidate.plan.method == "gs"
    assert all(rival.order >= found.best[0].order for rival in rivals.values())


def test_an_interrupted_search_has_the_best_so_far():
    loaded, space = small()
    search, workers = Search(loaded, SearchSpace(**space), 3), InThisProcess(loaded)

    def told(done, plans):
        if workers.simulated == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search.run(workers, told)
    assert 1 <= len(search.found().best) <= 2


def test_a_search_that_is_out_of_time_tells_how_many_plans_are_open():
    loaded, space = small()
    found, workers = searched(loaded, seconds=1e-9, **space)
    assert workers.simulated == 0
    assert found.counts.left > 0
    assert not found.best


def test_thresholds_are_searched_under_the_density_that_is_asked_for():
    scenario = scenario_of(star(2), {"method": "gs"}, gradients="made.json")
    loaded = loaded_of(scenario, exponential_statistics())
    space = {"methods": ("gs",), "recompute": ("none",), "micro_batches": (1,)}
    dense, _ = searched(loaded, **space)
    assert {each.candidate.plan.push.threshold for each in dense.best} == {None}
    sparse, _ = searched(loaded, top=10, least_density=0.2, thresholds=(1e-4, 1e-3, 1e-2), **space)
    densities = [each.result.density.push for each in sparse.best if each.candidate.plan.push.threshold]
    assert densities
    assert all(density >= 0.2 for density in densities)
    assert sparse.counts.unwanted > 0
    assert sparse.best[0].order < dense.best[0].order


SEARCH = """
[search]
methods = ["single", "ddp", "zero3"]
micro_batches = [1, 2]
recompute = ["none"]
"""


def test_the_command_prints_results_in_order_whatever_the_number_of_processes(tmp_path):
    path = write_files(tmp_path / "a", scenario=SCENARIO_TOML + SEARCH)
    outputs = [run("gssim", "search", path, "--top", 2, "--json", "--jobs", jobs) for jobs in (1, 2)]
    assert [ended.returncode for ended in outputs] == [0, 0], outputs[0].stderr
    assert outputs[0].stdout == outputs[1].stdout
    results = json.loads(outputs[0].stdout)
    places = [result["provenance"]["search"] for result in results]
    assert [place["rank"] for place in places][:2] == [1, 2]
    assert all(place["on_front"] for place in places if place["rank"] is None)
    assert results[0]["step_time_s"] <= results[1]["step_time_s"]
    again = run("gssim", "run", path, "--set", places[0]["plan"], "--json")
    assert json.loads(again.stdout)["step_time_s"] == results[0]["step_time_s"]


def test_the_command_tells_people_why(tmp_path):
    ended = run("gssim", "search", write_files(tmp_path / "a", scenario=SCENARIO_TOML + SEARCH), "--top", 1)
    assert ended.returncode == 0, ended.stderr
    for words in ("computes for", "memory:", "front of time and memory", "best with even shares", "gssim run"):
        assert words in ended.stdout, ended.stdout


def test_what_is_searched_makes_no_other_question(tmp_path):
    plain = run("gssim", "run", write_files(tmp_path / "a"), "--json")
    searched_too = run("gssim", "run", write_files(tmp_path / "b", scenario=SCENARIO_TOML + SEARCH), "--json")
    assert plain.stdout == searched_too.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--objective", "speed"], "search.objective = 'speed'"),
        (["--objective", "cost"], "price_usd_per_h is not known"),
        (["--top", "0"], "--top 0: must be at least 1"),
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
        (["--least-density", "2"], "search.least_density = 2"),
        (["--seconds", "0"], "search.seconds = 0"),
        (["--set", "search.thresholds=[1e-3]"], "thresholds: they change the training"),
        (["--set", 'search.methods=["zero4"]'], "search.methods[0] = 'zero4'"),
        (["--set", "search.method=1"], "search.method: unknown key; did you mean methods?"),
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(tmp_path, arguments, said):
    ended = run("gssim", "search", write_files(tmp_path / "a"), *arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1
