"""Speed of a sweep's points, one after another in one process: `make benchmark`. Nothing is asserted."""

from itertools import product
from pathlib import Path

import pytest

from gssim.execution.cache import Shared
from gssim.scenario import Loaded, load_scenario
from gssim.simulation import replay, simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
DENSE = ("ddp", "zero2", "zero3", "gs", "gs_z3")
THRESHOLDED = ("gs", "gs_z3", "gs_hier")
SWITCH = (
    'cluster={{name="gpus", backend="nccl", source="made", device_types={{gpu="a100-sxm-80"}}, topology={{'
    'kind="switch", devices=[{{device="gpu", count={ranks}}}], devices_per_host=2, '
    'link={{bandwidth_bytes_per_s="{rate} Gb/s", latency_s="10 us", source="made"}}}}}}'
)
OF_H100 = (
    'cluster={{name="h100s", backend="nccl", nccl="hopper", source="datasheets", device_types={{h100="h100-sxm"}}, '
    'topology={{kind="servers", servers=[{{count={servers}, device="h100", devices=8, inside="nvswitch", '
    'inside_link="nvlink4-h100", nics=8, nic_link="ib-ndr-400", pcie_link="pcie5x16"}}], fabric={{kind="switch"}}}}}}'
)


def answer(points: list[tuple[Path, list[str]]]) -> None:
    """Answer points as a process of a sweep does."""
    shared = Shared()
    for path, changes in points:
        simulate(load_scenario(path, changes, shared=shared), shared=shared)


@pytest.mark.parametrize("ranks", [2, 16])
def test_methods_on_links_of_many_rates(benchmark, ranks):
    rates, file = (1, 3, 10, 30, 100, 300), SCENARIOS / "demo.toml"
    points = [
        (file, [SWITCH.format(ranks=ranks, rate=rate), f"plan.method={method}"])
        for method, rate in product(DENSE, rates)
    ]
    benchmark.extra_info["points"] = len(points)
    benchmark.pedantic(lambda: answer(points), rounds=3)


@pytest.mark.parametrize("ranks", [2, 16])
def test_thresholds_on_links_of_many_rates(benchmark, ranks):
    thresholds, rates, file = (1e-4, 1e-3, 1e-2), (1, 3, 10, 30, 100, 300), SCENARIOS / "demo.toml"
    points = [
        (
            file,
            [SWITCH.format(ranks=ranks, rate=rate), f"plan.method={method}", f"plan.push.threshold={threshold}"],
        )
        for method, threshold, rate in product(THRESHOLDED, thresholds, rates)
    ]
    benchmark.extra_info["points"] = len(points)
    benchmark.pedantic(lambda: answer(points), rounds=3)


@pytest.mark.parametrize("ranks", [64, 1024])
def test_thresholds_among_many_on_links_of_many_rates(benchmark, ranks):
    statistics = f"workload.gradients={SCENARIOS / 'gradients/gpt-byte-1m-1024.json'}"
    changes = ["plan.push.threshold=1e-3", statistics, "workload.global_batch_size=1024"]
    rates, file = (1, 3, 10, 30, 100, 300), SCENARIOS / "demo.toml"
    steps = ["run.steps=8", "run.warmup_steps=4"]
    points = [(file, [SWITCH.format(ranks=ranks, rate=rate), *changes, *steps]) for rate in rates]
    benchmark.extra_info["points"] = len(points)
    benchmark.pedantic(lambda: answer(points), rounds=3)


@pytest.mark.parametrize("method", THRESHOLDED)
def test_thresholds_of_one_plan_among_1024_unequal_devices(benchmark, method):
    """All but densities is equal, and computed once."""
    statistics = f"workload.gradients={SCENARIOS / 'gradients/gpt-byte-1m-1024.json'}"
    changes = [f"cluster={SCENARIOS / 'clusters/unequal-1024.toml'}", f"plan.method={method}", statistics]
    changes += ["workload.global_batch_size=1024", "run.steps=8", "run.warmup_steps=4"]
    thresholds = (1e-5, 2e-5, 3e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 3e-3, 5e-3)
    points = [(SCENARIOS / "demo.toml", [*changes, f"plan.push.threshold={each}"]) for each in thresholds]
    benchmark.extra_info["points"] = len(points)
    benchmark.pedantic(lambda: answer(points), rounds=3)


def fully_sharded_70_billion_parameters() -> Loaded:
    model = f"workload.model={SCENARIOS / 'models/llama2-70b.toml'}"
    changes = [OF_H100.format(servers=8), model, "plan.method=fsdp", "workload.global_batch_size=64"]
    changes += ["workload.sequence_length=4096", "workload.precision=bf16", "plan.recompute=full", "plan.tp=1"]
    return load_scenario(SCENARIOS / "gpt3-1024-unequal.toml", [*changes, "plan.pp=1", "plan.micro_batches=1"])


def test_fully_sharded_training_of_70_billion_parameters_on_64_devices(benchmark):
    """A plan's step time and memory in less than 0.1 s: what `gssim run --timing` tells as `simulate_s`."""
    loaded = fully_sharded_70_billion_parameters()
    benchmark.pedantic(lambda: simulate(loaded), rounds=15)


def test_what_the_caching_allocator_reserves_for_it(benchmark):
    """The largest part of that: some 61,000 requests of a step and the one after it, one by one."""
    program = simulate(fully_sharded_70_billion_parameters()).typical.machine.program
    benchmark.pedantic(lambda: replay(program, 0), rounds=15)
