"""Real runs of many cases on a few ranks, and their predictions; the ranks themselves are in `ranks.py`."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
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


def star(ranks: int) -> str:
    """Return a cluster of `ranks` CPU devices behind a switch, as inline TOML."""
    devices = ", ".join(f'{{name="d{i}", type="cpu", host="h"}}' for i in range(ranks))
    links = ", ".join(
        f'{{between=["d{i}", "s"], bandwidth_bytes_per_s=1e9, latency_s=1e-5, source="test"}}' for i in range(ranks)
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


def predicted(case: dict[str, Any]) -> Result:
    """Return the prediction of a case."""
    return _predicted(case["scenario"], tuple(case["overrides"]))


def predicted_peaks(case: dict[str, Any], *, products: bool = False) -> list[float]:
    """Return the predicted peak of every rank of a case; of residual networks with their kernels' scratch measured.

    `products`: it is measured for transformers in bf16 too, whose products count if a model is small and holds little
    else.
    """
    overrides = list(case["overrides"])
    workload = load_scenario(Path(case["scenario"]), overrides, gradients_needed=False).scenario.workload
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


def assert_predicted_collectives(cases: Cases, found: dict[str, dict[str, Any]]) -> None:
    """Raise AssertionError where the process group saw other collectives than those predicted for a case."""
    for name, case in cases.items():
        assert_collectives(case, found[name])


def assert_collectives(case: dict[str, Any], seen: dict[str, Any]) -> None:
    """Raise AssertionError where the process group saw other collectives in a case than those predicted."""
    entries = json.loads(json.dumps([list(entry.key) for entry in predicted(case).collectives]))
    assert sorted(entries, key=str) == sorted(seen["collectives"], key=str), case["overrides"]
