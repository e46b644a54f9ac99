"""Real runs of many cases on a few ranks, and their predictions; the ranks themselves are in `ranks.py`."""

import gc
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import forks
import pytest
from kernel_scratch import scratch_profile
from pydantic import TypeAdapter

from gssim.result import Result
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.workload import unrolled
from gssim.workload.gradient_statistics import (
    SKETCH_EDGES,
    BlockTrace,
    FeedbackDensity,
    GradientStatistics,
    RankTrace,
    RelativeDensity,
    Sketch,
    TensorTrace,
)

Cases = dict[str, dict[str, Any]]
"""A scenario's file and what is overridden there, by name of the case."""
HELPERS = Path(__file__).resolve().parent
"""Folder of the modules that ranks run."""
SCENARIOS = HELPERS.parents[1] / "scenarios"
SGD = ["workload.optimizer=sgd-momentum", "workload.learning_rate=0.05", "workload.weight_decay=0.01"]
ADAMW64 = ["workload.optimizer=adamw", "workload.precision=fp64", "workload.learning_rate=1e-3"]
"""Optimizers of cases, as overrides. AdamW is compared in fp64: it normalizes gradients, and so enlarges the rounding
errors of small ones.
"""
ADAPTERS = {
    "query-value": "workload.adapters={rank=4, alpha=8}",
    "all": "workload.adapters={rank=3, targets='all-linear'}",
    "down": "workload.adapters={rank=4, targets=['down_proj']}",
}
"""Low-rank adapters by their name in the names of cases."""


def scenario_file(name: str) -> str:
    """Return the path of a scenario that ships, or of one of the tests' own."""
    return str(HELPERS / name if (HELPERS / name).exists() else SCENARIOS / name)


def slow_where(ranks: int, *values: Any, slow: Sequence[int], few: Collection[str] | None = None) -> Any:
    """Return a test's parameters, marked slow where there are as many ranks as `slow` says: `make test-slow` runs them.

    A machine of two cores takes longest where ranks are more than cores, and shows there what two or four show too.
    `few`: of other numbers of ranks, the cases (first of `values`) that are not slow (as `quick` says); all by default.
    """
    is_slow = ranks in slow or (few is not None and values[0] not in few)
    return pytest.param(ranks, *values, marks=[pytest.mark.slow] if is_slow else [])


def quick(names: Iterable[str], few: Collection[str]) -> list[Any]:
    """Return names of cases as a test's parameters: all but the `few` are marked slow.

    The few hold every mechanism once; what else there is combines them, and `make test-slow` runs it. Raises ValueError
    where one of the few is no case.
    """
    known = list(names)
    if unknown := set(few) - set(known):
        raise ValueError(f"no such cases: {sorted(unknown)}")
    return [pytest.param(name, marks=[] if name in few else [pytest.mark.slow]) for name in known]


def selected(request: pytest.FixtureRequest, cases: Cases, *, by: str = "name", **where: Any) -> Cases:
    """Return those cases that tests of this file, of the parameters `where`, were selected to look at.

    A launch of ranks then runs no slow case unless it is asked for, and `pytest -k` runs one alone. `by`: the
    parameter that names a case.
    """
    parameters = [
        item.callspec.params
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")
    ]
    wanted = {each[by] for each in parameters if by in each and where.items() <= each.items()}
    return {name: case for name, case in cases.items() if name in wanted}


def star(ranks: int, *, bandwidth_bytes_per_s: float = 1e9) -> str:
    """Return a cluster of `ranks` CPU devices behind a switch, as inline TOML."""
    devices = ", ".join(f'{{name="d{i}", type="cpu", host="h"}}' for i in range(ranks))
    links = ", ".join(
        f'{{between=["d{i}", "s"], bandwidth_bytes_per_s={bandwidth_bytes_per_s}, latency_s=1e-5, source="test"}}'
        for i in range(ranks)
    )
    kind = (
        '{cpu={kind="cpu", memory_bytes=1e10, peak_flop_per_s={fp32=1e11, fp64=5e10, bf16=1e11, fp16=1e11}, '
        'memory_bandwidth_bytes_per_s=1e10, source="test"}}'
    )
    return (
        f'cluster={{name="star", backend="gloo", source="test", switches=["s"], device_types={kind}, '
        f"devices=[{devices}], links=[{links}]}}"
    )


def run_cases(folder: Path, cases: dict[str, dict[str, Any]], *, ranks: int) -> dict[str, dict[str, Any]]:
    """Run all cases one after another in one launch of `ranks` ranks; return what each showed."""
    (folder / "cases.json").write_text(json.dumps(cases))
    found: dict[str, dict[str, Any]] = run_module("ranks", [str(folder / "cases.json")], folder, ranks=ranks)
    return found


def run_module(module: str, arguments: list[str], folder: Path, *, ranks: int) -> Any:
    """Run a module of the tests' on `ranks` ranks; return what rank 0 wrote to its last argument."""
    forks.launch(module, [*arguments, str(folder / "found.json")], ranks=ranks)
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def trained_alone(case: dict[str, Any]) -> tuple[float, list[Any]]:
    """Return the counted peak of a case's third step on one device, in this process, and its parameters after it.

    Skips the test where allocations cannot be counted.
    """
    import torch

    from gsreal.measure import MemoryCounter, Timeline
    from gsreal.run.feed import Feed
    from gsreal.run.worker import build

    scenario = load_scenario(Path(case["scenario"]), list(case["overrides"]), gradients_needed=False).scenario
    device = torch.device("cpu")
    counter = MemoryCounter(device)
    if counter.method != "allocator":
        pytest.skip("no C++ compiler here: peaks are not counted exactly")
    gc.collect()
    gc.freeze()  # what other tests have left is not looked through again after every step
    counter._base += counter.alive()
    training, feed = build(scenario, Timeline(0, device), device), Feed(scenario, 0, device)
    peaks = []
    for step in range(3):
        inputs, targets, weights = feed.at(step)
        peaks.append(counter.peak_of(lambda: training.step(inputs, targets, weights, 0), [])[0])  # noqa: B023
        gc.collect()  # torch's first checkpoint leaves a cycle
    return peaks[-1], [parameter.detach() for parameter in training.module.parameters()]


def predicted(case: dict[str, Any]) -> Result:
    """Return the prediction of a case."""
    return _predicted(case["scenario"], tuple(case["overrides"]))


def predicted_peaks(case: dict[str, Any], *, products: bool = False) -> list[float]:
    """Return the predicted peak of every rank of a case; of residual networks with their kernels' scratch measured.

    `products`: it is measured for transformers in bf16 too, whose products count if a model is small and holds little
    else.
    """
    overrides = list(case["overrides"])
    scenario = load_scenario(Path(case["scenario"]), overrides, gradients_needed=False).scenario
    workload = scenario.workload
    if scenario.policies.pp > 1:  # with a profile of layers that take no time, the first stage would have them all
        *sizes, last = map(len, scenario.stage_ranges)
        overrides.append(f"plan.stages={[*sizes, last - 1]}")  # without the loss
    if workload.model.name.startswith("resnet-digits"):
        overrides.append(scratch_profile(workload.precision, workload.model.name))
    elif products and workload.precision == "bf16":
        overrides.append(scratch_profile("bf16", workload.model.name, workload.sequence_length))
    found = {rank: e.peak_allocated_bytes for e in predicted(case | {"overrides": overrides}).ranks for rank in e.ranks}
    return [found[rank] for rank in sorted(found)]


@cache
def _predicted(scenario: str, overrides: tuple[str, ...]) -> Result:
    return simulate(load_scenario(Path(scenario), list(overrides))).result


def run_once(
    worlds: dict[int, tuple[Cases, Cases]],
    request: pytest.FixtureRequest,
    cases_for: Callable[[int], Cases],
    folder: Callable[[str], Path],
    *,
    always: Collection[str] = (),
) -> tuple[Cases, Cases]:
    """Return the selected cases of a number of ranks and what they showed: of one launch, at the first call.

    `worlds`: what was run, by number of ranks; `request`: its parameter is that number, `world` in tests; `folder`:
    makes a new folder of a name; `always`: cases that tests look at without a parameter.
    """
    ranks: int = request.param
    if ranks not in worlds:
        every = cases_for(ranks)
        kept = selected(request, every, world=ranks).keys() | set(always)
        cases = {name: case for name, case in every.items() if name in kept}
        worlds[ranks] = cases, run_cases(folder(f"ranks{ranks}"), cases, ranks=ranks)
    return worlds[ranks]


def by_ranks(cases_for: Callable[[int], Cases], *, always: Collection[str] = ()) -> Any:
    """Return the fixture `world` of a module whose tests are parametrized by it and by `name`; see `run_once`."""
    worlds: dict[int, tuple[Cases, Cases]] = {}

    @pytest.fixture(name="world")
    def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cases, Cases]:
        return run_once(worlds, request, cases_for, tmp_path_factory.mktemp, always=always)

    return world


def planted(folder: Path, scenario: str, overrides: list[str], density: float, *, name: str) -> str:
    """Return a file of gradient statistics for a case in which every threshold is reached by the given fraction."""
    loaded = load_scenario(Path(scenario), overrides, gradients_needed=False).scenario
    workload, steps = loaded.workload, loaded.run.warmup_steps + loaded.run.steps
    sketch = Sketch(mean=1.0, rms=1.0, tail_ratios=(density,) * len(SKETCH_EDGES))
    kept = FeedbackDensity(sent_ratios=(density, density))
    relative = RelativeDensity(sent_ratios=(density, density), feedback_ratios=(density, density))
    tensor = TensorTrace(blocks=(BlockTrace(sketches=(sketch,), feedback=(kept,), relative=(relative,)),))
    names = [name for layer in unrolled(workload.model) for name in layer.parameter_names]
    statistics = GradientStatistics(
        model=workload.model.name,
        precision=workload.precision,
        optimizer=workload.optimizer,
        learning_rate=workload.learning_rate,
        global_batch_size=workload.global_batch_size,
        sequence_length=workload.sequence_length,
        seed=0,
        steps=steps,
        sampled_steps=(0,),
        feedback_thresholds=(1e-6, 1e6),
        multiples=(1e-6, 1e6),
        traces=(RankTrace(samples=4, tensors=dict.fromkeys(names, tensor)),),
        source="planted",
    )
    path = folder / f"{name}.json"
    path.write_text(TypeAdapter(GradientStatistics).dump_json(statistics).decode())
    return str(path)


def tolerance_of(name: str, optimizer: str) -> float:
    """Return by what part of the largest parameter a case may differ from one device: design section 10.

    Residual networks are in fp64 whatever the optimizer. In fp32 plain torch on one device differs from itself by 3e-5
    to 7e-5 after five steps where the batch is taken in two to four parts: a sum is rounded another way, and a ReLU
    turns (measured on one kind of processor; on another it did not happen). In fp64 it differs by 2e-16.
    """
    return 1e-9 if optimizer == "adamw" or "resnet" in name else 1e-5


def assert_parameters_of_one_device(found: dict[str, dict[str, Any]]) -> None:
    """Raise AssertionError where a case's parameters differ from one device's, or between replicas.

    `found`: what each case showed; its name ends with the optimizer's.
    """
    for name, seen in found.items():
        assert seen["largest_parameter"] > 0.05
        assert seen["difference"] <= tolerance_of(name, name.split("-")[-1]) * seen["largest_parameter"], name
        assert seen["replicas_equal"], name


def assert_losses_of_one_device(found: dict[str, dict[str, Any]]) -> None:
    """Raise AssertionError where a case's losses differ from one device's."""
    for name, seen in found.items():
        alone = seen["losses_alone"]
        assert seen["losses"][: len(alone)] == pytest.approx(alone[: len(seen["losses"])], rel=1e-5), name


def assert_collectives(case: dict[str, Any], seen: dict[str, Any], *, payload_error: float | None = None) -> Result:
    """Return a case's prediction; raise AssertionError where the process group saw other collectives.

    `payload_error`: relative error that the bytes of all payloads together may have; None: not compared.
    """
    result = predicted(case)
    assert predicted_keys(result) == sorted(seen["collectives"], key=str), case["overrides"]
    if payload_error is not None:
        expected = sum(entry.payload_bytes or 0 for entry in result.collectives)
        sent = sum(each or 0 for each in seen["payloads"])
        assert sent == pytest.approx(expected, rel=payload_error), case["overrides"]
    return result


def assert_predicted_collectives(cases: Cases, found: Cases) -> None:
    """Raise AssertionError where the process group saw other collectives than those predicted for a case."""
    for name, case in cases.items():
        assert_collectives(case, found[name])


def predicted_keys(result: Result) -> list[Any]:
    """Return the keys of a prediction's collectives in the form and order in which ranks' are compared with them."""
    return sorted(json.loads(json.dumps([list(entry.key) for entry in result.collectives])), key=str)


def named_by_model(usual: Sequence[str]) -> Callable[[int, str, list[str], Path], dict[str, Any]]:
    """Return `case_of` of `in_groups` for cases whose names begin with their model's, as `gpt-sgd` does.

    Args:
        usual: overrides of all cases.
    """
    base = {"bert": "small-bert.toml"}
    files = {"llama": "tiny-llama", "lengths": "lengths-llama", "gpt2": "tiny-gpt2"}
    files |= {name: f"decoder-{name}" for name in ("olmo2", "gpt_neox", "phi", "opt", "gemma", "falcon", "qwen3")}

    def case_of(ranks: int, name: str, changes: list[str], _folder: Path) -> dict[str, Any]:
        model = name.split("-")[0]
        traced = [f"workload.model={HELPERS}/models/of_tests/{files[model]}.toml"] if model in files else []
        scenario = scenario_file(base.get(model, "small-demo.toml"))
        return {"scenario": scenario, "overrides": [star(ranks), *traced, *usual, *changes]}

    return case_of


def in_groups(
    on: Mapping[int, Mapping[str, Any] | Callable[[], Mapping[str, Any]]],
    few: Mapping[int, Collection[str]],
    case_of: Callable[[int, str, Any, Path], dict[str, Any]],
) -> Any:
    """Return the fixture `world` of a module: (cases, what they showed), each group of cases in one launch.

    The few that are not slow are one group of a number of ranks, its others are another.

    Args:
        on: by number of ranks, what each case changes, or a function that returns it.
        few: by number of ranks, the cases that are not slow; of other numbers, all are.
        case_of: makes a case of the number of ranks, its name, its changes, and a folder for files of its own.
    """
    groups = {str(ranks): (ranks, True) for ranks in few} | {f"{ranks}-others": (ranks, False) for ranks in on}

    @pytest.fixture(scope="module", name="world", params=quick(groups, [str(ranks) for ranks in few]))
    def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cases, Cases]:
        (ranks, is_few), folder = groups[request.param], tmp_path_factory.mktemp(f"ranks{request.param}")
        made = on[ranks]
        changes, chosen = made() if callable(made) else made, few.get(ranks, ())
        assert set(chosen) <= changes.keys()
        group = {name: each for name, each in changes.items() if (name in chosen) == is_few}
        cases = {name: case_of(ranks, name, each, folder) for name, each in group.items()}
        return cases, run_cases(folder, cases, ranks=ranks)

    return world


class AsPredicted:
    """Tests that a module's class inherits: of the cases of its fixture `world`, see `in_groups`."""

    def peak_error(self, name: str, case: dict[str, Any]) -> float | None:
        """Return the relative error that the peaks of a case may have; None: they are not predicted."""
        return 0.001

    def test_the_predicted_collectives_are_the_ones_that_the_process_group_saw(
        self, world: tuple[Cases, Cases]
    ) -> None:
        assert_predicted_collectives(*world)

    def test_the_predicted_peak_of_every_rank_is_the_counted_one(self, world: tuple[Cases, Cases]) -> None:
        for name, case in world[0].items():
            if (error := self.peak_error(name, case)) is not None:
                assert predicted_peaks(case) == pytest.approx(world[1][name]["peaks"], rel=error), name


class TrainsAsOneDevice(AsPredicted):
    """The same, where parameters and losses are those of one device."""

    def test_parameters_after_five_steps_equal_those_of_one_device(self, world: tuple[Cases, Cases]) -> None:
        assert_parameters_of_one_device(world[1])

    def test_losses_are_those_of_one_device(self, world: tuple[Cases, Cases]) -> None:
        assert_losses_of_one_device(world[1])


class TrainsAdapters(TrainsAsOneDevice):
    """The same of low-rank adapters, whose parameters are small: the names of cases say which, see `adapters_of`."""

    def test_what_training_changes_is_that_of_one_device(self, world: tuple[Cases, Cases]) -> None:
        for name, seen in world[1].items():
            assert seen["difference_ratio"] < 1e-3, name


def adapters_of(name: str) -> tuple[str, str]:
    """Return the model and the adapters of a case, the latter as an override, from its name `MODEL-ADAPTERS-...`."""
    return next((name.split("-")[0], override) for kind, override in ADAPTERS.items() if f"-{kind}-" in name)


class RoutesAsPredicted(AsPredicted):
    """The same of routed experts, whose rows and peaks are predicted where a load routes them.

    Names of cases say whether the model's router does, `-router-`, or a load, `-load-`. A load is dealt out to each
    part of a sequence, on one device to the whole.
    """

    def test_parameters_and_losses_with_the_models_own_router_equal_those_of_one_device(
        self, world: tuple[Cases, Cases]
    ) -> None:
        by_router = routed(world[1], "router")
        assert by_router
        assert_parameters_of_one_device(by_router)
        assert_losses_of_one_device(by_router)

    def test_parameters_are_equal_on_all_ranks(self, world: tuple[Cases, Cases]) -> None:
        assert all(seen["replicas_equal"] for seen in world[1].values())

    def test_the_predicted_rows_are_the_ones_that_were_sent(self, world: tuple[Cases, Cases]) -> None:
        by_load = routed(world[1], "load")
        assert by_load
        for name, seen in by_load.items():
            rows = [each.payload_bytes for each in predicted(world[0][name]).collectives if each.kind == "all-to-all-v"]
            sent = zip(seen["collectives"], seen["payloads"], strict=True)
            payloads = [payload for key, payload in sent if key[0] == "all-to-all-v"]
            assert sorted(filter(None, rows)) == sorted(filter(None, payloads)), name  # those of a ring have none
            assert sum(filter(None, payloads)) > 0


def routed(cases: Cases, kind: str) -> Cases:
    """Return those cases, or what they showed, whose experts are chosen by `router` or by `load`."""
    return {name: each for name, each in cases.items() if f"-{kind}-" in f"-{name}"}


class PushesAsPredicted(AsPredicted):
    """The same of Gradient Sharding: cases with `-some-` in their names push a part of the gradients, others all."""

    def test_where_all_is_sent_training_equals_that_of_one_device(self, world: tuple[Cases, Cases]) -> None:
        for name, seen in world[1].items():
            if "-some-" in name:
                assert seen["replicas_equal"], name
                assert seen["difference"] > 1e-5 * seen["largest_parameter"], name
            else:
                assert_parameters_of_one_device({name: seen})
                assert_losses_of_one_device({name: seen})

    def test_the_predicted_payloads_are_the_ones_that_were_sent(self, world: tuple[Cases, Cases]) -> None:
        for name, case in world[0].items():
            assert_collectives(case, world[1][name], payload_error=0.08 if "-some-" in name else 0)
