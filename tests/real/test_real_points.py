"""Random scenario points on real ranks: what is predicted happens, and what one executor refuses the other does too.

A point that fails is printed as a scenario file, with its seed; `gsreal run FILE` runs it.
"""

import math
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from examples import examples
from point_checks import modules_of_stages
from points import (
    ADAPTED_LOSSES,
    ADAPTED_PARTS,
    COMBINED,
    EXPERTS_IN_PARTS,
    EXPERTS_OF_TENSOR_RANKS,
    EXPERTS_ON_TWO_LEVELS,
    FROZEN_PARTS,
    LATER,
    PARTED,
    PRODUCTS_BESIDE_EXCHANGES,
    PUSHED_EXPERTS,
    RECOMPUTING,
    SHARDED_REPLICAS,
    SPLIT_BACKWARDS,
    STREAMED,
    SUMMED_EXPERTS,
    SUMS_BESIDE_PRODUCTS,
    UNDER_AUTOCAST,
    random_real_point,
)
from real_runs import planted, predicted, predicted_keys, predicted_peaks, run_cases

from gssim.errors import RunFailedError, UserError
from gssim.scenario import Scenario, load_scenario

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

pytestmark = pytest.mark.real

FEW = (2, (1, LATER + 76), 2)
"""Ranks, the first seeds, and how many points are run of those that are answered and have so many ranks: of small
models, the second with shards of slices (gs_tp) in fp64, whose parameters are compared to rounding. Others take up to
ten times as long."""
MANY = [
    pytest.param(ranks, range(first, first + 400), examples(20), id=f"{ranks}-ranks-from-{first}")
    for ranks in (2, 3, 4)
    for first in (
        1000,
        2000,
        3000,
        LATER,
        LATER + 1000,
        RECOMPUTING,
        STREAMED,
        COMBINED,
        SHARDED_REPLICAS,
        PARTED,
        EXPERTS_IN_PARTS,
        EXPERTS_OF_TENSOR_RANKS,
        PUSHED_EXPERTS,
        SUMMED_EXPERTS,
        EXPERTS_ON_TWO_LEVELS,
        UNDER_AUTOCAST,
        ADAPTED_PARTS,
        SPLIT_BACKWARDS,
        FROZEN_PARTS,
        ADAPTED_LOSSES,
        SUMS_BESIDE_PRODUCTS,
        PRODUCTS_BESIDE_EXCHANGES,
    )
]
"""Seeds of the slow tests: 300 points, 1200 where tests are to be thorough."""
EXACT = {"fp64": 1e-9, "fp32": 1e-5, "fp16": 2**-7, "bf16": 2**-7}
"""By how much of the largest one parameters may differ from one device's, by the least exact of the precisions used."""
PEAK, PEAK_IN_DOUBT = 0.02, 0.04
"""Relative tolerances of peaks. Kernels of convolutions take scratch by shape and processor: between batches that were
measured it is interpolated. Where bytes that are traced in fp32 are scaled to 16 bits, those of experts' indices are
scaled too: in models as narrow as these that is 1 to 2.5 %, and 0.0 % in fp32.
"""
LONGEST_REFUSAL = 300

Case = dict[str, Any]


def refusal_of(path: Path) -> str | None:
    """Return why gsreal refuses a scenario, before it starts a rank; None where it runs it."""
    from gsreal.run.checks import check_real

    try:
        check_real(load_scenario(path, gradients_needed=False))
    except UserError as error:
        return str(error)
    return None


def cases_of(seeds: Sequence[int], folder: Path, *, ranks: int, wanted: int) -> tuple[dict[str, Case], Counter[str]]:
    """Return the first points of so many ranks that both executors take, and how often why one was refused."""
    cases: dict[str, Case] = {}
    refused: Counter[str] = Counter()
    for seed in seeds:
        point = random_real_point(seed)
        if point["plan"].get("ranks", point["cluster"]["topology"]["devices"][0]["count"]) != ranks:
            continue
        path = folder / f"{seed}.toml"
        path.write_text(tomli_w.dumps(point))
        refusal = refusal_of(path)
        if refusal is not None:
            assert len(refusal.removeprefix(str(folder))) <= LONGEST_REFUSAL, refusal
            assert "\n" not in refusal
            refused[refusal.removeprefix(f"{path}: ")[:60]] += 1
            continue
        case: Case = {"scenario": str(path), "overrides": [], "onednn": "sequence_length" not in point["workload"]}
        scenario = load_scenario(path, gradients_needed=False).scenario
        if scenario.policies.pp > 1:  # else peaks' profile of scratch, in which layers take no time, cuts others
            case["overrides"] = [f"plan.stages={modules_of_stages(scenario)}"]
        if scenario.push.selects:
            statistics = planted(folder, str(path), [], density_of(scenario), name=f"{seed}-gradients")
            case["overrides"] += [f'workload.gradients="{statistics}"']
        predicted(case)  # what runs can be predicted
        cases[str(seed)] = case
        if len(cases) == wanted:
            break
    return cases, refused


def density_of(scenario: Scenario) -> float:
    """Return the fraction of gradients that a point of `KNOWN_DENSITIES` sends."""
    push = scenario.push
    return push.threshold if push.kind == "target-density" else float(push.threshold == 0)


def run_all(folder: Path, cases: dict[str, Case], *, ranks: int) -> dict[str, Any]:
    """Return what each case showed, or the failure that it ends in: those of a launch that fails are halved."""
    folder.mkdir(exist_ok=True)
    try:
        return dict(run_cases(folder, cases, ranks=ranks))
    except (RunFailedError, UserError) as error:
        if len(cases) == 1:
            return dict.fromkeys(cases, str(error))
    names = list(cases)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    found: dict[str, Any] = {}
    for number, half in enumerate(halves):
        found |= run_all(folder / str(number), {name: cases[name] for name in half}, ranks=ranks)
    return found


def differences(case: Case, seen: dict[str, Any]) -> Iterator[str]:
    """Yield where a run is not what was predicted, or not the training of one device."""
    scenario = load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False).scenario
    expected = predicted_keys(predicted(case))
    if sorted(seen["collectives"], key=str) != expected:
        yield f"collectives {sorted(seen['collectives'], key=str)}, predicted {expected}"
    total, policies = scenario.workload.global_batch_size, scenario.policies
    taken: dict[int, set[int]] = defaultdict(set)
    for rank, samples in enumerate(seen["samples"]):
        taken[policies.data_rank(rank)].add(samples)
    if any(len(each) > 1 for each in taken.values()) or sum(map(max, taken.values())) != total:
        yield f"ranks take {seen['samples']} samples of {total}"
    if not all(map(math.isfinite, seen["losses"])):
        yield f"losses {seen['losses']}"
    if not seen["replicas_equal"]:
        yield "replicas differ"


def has_norms_in_fp32(scenario: Scenario) -> bool:
    """Return whether a model's norms are in fp32 whatever its precision is: Hugging Face's Llama."""
    return "llama" in scenario.workload.model.name


def freed_early_bytes(case: Case) -> int:
    """Return how many bytes less than predicted a rank may hold: gloo's own buffer of one all-gather.

    gloo's thread allocates it when the gather begins, as large as what is gathered, and frees it at the end. Of two
    gathers of top-k the first may have ended before the second begins. One of Streaming DiLoCo that runs beside steps
    may have ended before these hold most, since messages do not take the time of the scenario's links here.
    """
    scenario = load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False).scenario
    policies, plan = scenario.policies, scenario.plan
    beside_steps = plan.method == "streaming_diloco" and plan.streaming.delay_steps > 0
    if policies.compressor != "topk" and not beside_steps:
        return 0
    kinds_and_bytes = [(entry.key[0], int(entry.key[2])) for entry in predicted(case).collectives]
    return max((size for kind, size in kinds_and_bytes if kind == "all-gather"), default=0)


def differences_of_memory(case: Case, seen: dict[str, Any]) -> Iterator[str]:
    """Yield where a rank's peak is not the predicted one."""
    scenario = load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False).scenario
    if has_norms_in_fp32(scenario) and scenario.workload.precision != "fp32":
        return  # bytes that are traced in fp32 are scaled, those of norms too
    scales_indices = "mixture" in scenario.workload.model.name and scenario.workload.precision in ("bf16", "fp16")
    allowed = PEAK_IN_DOUBT if scenario.workload.model.input.kind == "image" or scales_indices else PEAK
    peaks, freed_bytes = seen["peaks"], freed_early_bytes(case)
    if scenario.policies.compressor == "topk":
        peaks = seen["usual_peaks"]
    for rank, (peak, counted) in enumerate(zip(predicted_peaks(case), peaks, strict=True)):
        if not (1 - allowed) * counted <= peak <= (1 + allowed) * counted + freed_bytes:
            yield f"rank {rank} holds {counted} bytes at most, predicted {peak} ({peak / counted - 1:+.1%})"


def differences_of_training(case: Case, seen: dict[str, Any] | str) -> Iterator[str]:
    """Compare with one device where equality can hold: ranks do not train apart, send all of their gradients, and
    Adam's steps of gradients that are all rounding have digits enough.

    Adam with decay in its gradients has not: where a gradient is zero but for rounding (a key's bias), each step takes
    a value p to about -lr decay / eps p, a thousand times as much; sgd, AdamW and Adam without decay of the same
    training differ by 1e-14.
    """
    if isinstance(seen, str):
        yield seen
        return
    scenario = load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False).scenario
    workload = scenario.workload
    whole = scenario.policies.compressor == "topk" and scenario.plan.topk.density_ratio == 1
    if scenario.policies.sync_every_steps or (scenario.policies.compressor and not whole):
        return
    if scenario.push.selects and density_of(scenario) < 1:
        return
    # a load is dealt out to parts of sequences, not to whole
    if scenario.policies.ep > 1 and max(scenario.policies.cp, scenario.policies.tp) > 1:
        return
    rounded = (workload.precision, workload.autocast, scenario.policies.compress, workload.reduce_precision)
    if workload.optimizer.startswith("adam") and {*rounded} - {None} != {"fp64"}:
        return
    if workload.optimizer == "adam" and workload.weight_decay:
        return
    tolerance = max(EXACT[precision] for precision in rounded if precision)
    tolerance = max(tolerance, EXACT["fp32"] if has_norms_in_fp32(scenario) else 0)
    if workload.model.name == "resnet-digits" and workload.precision == "fp32":
        tolerance = 1e-4  # a sum is rounded another way, and a ReLU turns: see `tolerance_of`
    if seen["difference"] > tolerance * seen["largest_parameter"]:
        yield f"parameters differ from one device's by {seen['difference']}, the largest is {seen['largest_parameter']}"
    if seen["losses"] != pytest.approx(seen["losses_alone"], rel=max(tolerance, 1e-6)):
        yield f"losses {seen['losses']}, on one device {seen['losses_alone']}"


def in_fp64(case: Case) -> Case:
    """Return the same point in fp64, without what is of 16 bits."""
    path = Path(case["scenario"])
    point = tomllib.loads(path.read_text())
    point["workload"] |= {"precision": "fp64"}
    for key in ("loss_scale", "autocast", "tf32"):
        point["workload"].pop(key, None)
    exact = path.with_name(f"{path.stem}-fp64.toml")
    exact.write_text(tomli_w.dumps(point))
    return {**case, "scenario": str(exact)}


def precision_of(case: Case) -> str:
    """Return the precision that the case's file says."""
    precision: str = load_scenario(Path(case["scenario"]), gradients_needed=False).scenario.workload.precision
    return precision


def assert_runs_are_as_predicted(folder: Path, ranks: int, seeds: Sequence[int], wanted: int) -> None:
    cases, refused = cases_of(seeds, folder, ranks=ranks, wanted=wanted)
    assert len(cases) == wanted
    assert len(cases) >= sum(refused.values())  # of so few the share varies; of all, see the last test
    found = run_all(folder / "runs", cases, ranks=ranks)
    numbers = {name: list(differences_of_training(case, found[name])) for name, case in cases.items()}
    # a sum that is rounded another way may turn a ReLU: the same plan in fp64 tells whether that is all
    doubted = [name for name, wrong in numbers.items() if wrong and precision_of(cases[name]) != "fp64"]
    exact = {name: in_fp64(cases[name]) for name in doubted}
    repeated = run_all(folder / "exact", exact, ranks=ranks) if exact else {}
    numbers |= {name: list(differences_of_training(exact[name], seen)) for name, seen in repeated.items()}
    failures = []
    for name, case in cases.items():
        seen = found[name]
        wrong = list(numbers[name])
        wrong += [seen] if isinstance(seen, str) else [*differences(case, seen), *differences_of_memory(case, seen)]
        if wrong:
            listed = "\n".join(f"    {line}" for line in wrong)
            failures.append(f"seed {name}:\n{listed}\n{Path(case['scenario']).read_text()}")
    print(f"{ranks} ranks, seeds {', '.join(cases)}; refused: {dict(refused.most_common())}")
    assert not failures, "\n\n".join([f"{len(failures)} of {len(cases)} points", *failures])


def test_random_points_run_as_they_are_predicted(tmp_path: Path) -> None:
    ranks, seeds, wanted = FEW
    assert_runs_are_as_predicted(tmp_path, ranks, seeds, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "seeds", "wanted"), MANY)
def test_many_random_points_run_as_they_are_predicted(
    tmp_path: Path, ranks: int, seeds: Sequence[int], wanted: int
) -> None:
    assert_runs_are_as_predicted(tmp_path, ranks, seeds, wanted)


@pytest.mark.slow
def test_two_thirds_of_all_points_are_answered(tmp_path: Path) -> None:
    answered = refused = 0
    for number, (ranks, seeds, wanted) in enumerate(many.values for many in MANY):
        folder = tmp_path / str(number)
        folder.mkdir()
        cases, refusals = cases_of(seeds, folder, ranks=ranks, wanted=wanted)
        answered, refused = answered + len(cases), refused + sum(refusals.values())
    print(f"{answered} answered, {refused} refused")
    assert answered >= 2 * refused
