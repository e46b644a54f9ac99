"""Speed of the simulator by cluster size: `make benchmark`. Times are this machine's; nothing is asserted.

For comparison, a C++ peer's CPU time for the same questions: fully sharded training of a 6.7B model on 256 equal ranks
29 s, on 1,024 ranks 544 s; one ring all-reduce over 1,024 ranks 14 s.
"""

from pathlib import Path

import numpy as np
import pytest

from gssim.cluster.topology import build
from gssim.collectives import Communication
from gssim.engine import Machine
from gssim.network import limited_rates
from gssim.program import Program, Task, TaskId
from gssim.scenario import load_cluster, load_scenario
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
H100_CLUSTER = (
    'cluster={{name="h100s", backend="nccl", nccl="hopper", source="datasheets", device_types={{h100="h100-sxm"}}, '
    'topology={{kind="servers", servers=[{{count={servers}, device="h100", devices=8, inside="nvswitch", '
    'inside_link="nvlink4-h100", nics=8, nic_link="ib-ndr-400", pcie_link="pcie5x16"}}], '
    'fabric={{kind="leaf-spine", servers_per_leaf=32, spines=16, rails=true}}}}}}'
)


def scenario(name: str, *changes: str) -> object:
    return load_scenario(SCENARIOS / f"{name}.toml", list(changes))


@pytest.mark.parametrize("name", ["gpt3-1024-unequal", "gpt3-65536"])
def test_a_model_of_175_billion_parameters(benchmark, name):
    loaded = scenario(name)

    def fresh():
        build.cache_clear()
        return simulate(loaded)

    benchmark.pedantic(fresh, rounds=3)


IN_ZERO1 = ("method=zero1", "tp=8", "pp=16", "dp_replicate=8", "micro_batches=128", "recompute=full")


@pytest.mark.parametrize(
    ("name", "plan"),
    [("gpt3-1024-3d", ()), ("gpt3-1024-a100", IN_ZERO1), ("mt-nlg-280-dgx", ())],
    ids=["gpt3-1024-3d", "gpt3-1024-zero1-in-pipelines", "mt-nlg-280-dgx"],
)
def test_pipelines_in_three_dimensions(benchmark, name, plan):
    loaded = scenario(name, *(f"plan.{each}" for each in plan))
    benchmark.pedantic(lambda: simulate(loaded), rounds=3)


@pytest.mark.parametrize("method", ["gs", "gs_z3", "gs_hier"])
def test_gradient_sharding_on_1024_unequal_devices(benchmark, method):
    loaded = scenario("gpt3-1024-unequal", f"plan.method={method}")
    benchmark.pedantic(lambda: simulate(loaded), rounds=3)


def test_an_optimizer_sharded_over_1024_unequal_devices(benchmark):
    """Each of 1,024 owners broadcasts its tensors: as many rings, which differ in their roots only."""
    loaded = scenario("gpt3-1024-unequal", "plan.method=zero1")
    benchmark.pedantic(lambda: simulate(loaded), rounds=3)


@pytest.mark.parametrize(
    "changes",
    [("gs",), ("gs", "publish.threshold=1e-4"), ("gs_z3",), ("gs_hier",)],
    ids=["gs", "gs-publish", "gs_z3", "gs_hier"],
)
def test_thresholds_on_1024_unequal_devices(benchmark, changes):
    """The model is small: gradients of large ones have not been measured on so many devices."""
    method, *more = changes
    plan = [f"plan.method={method}", "plan.push.threshold=1e-3", *(f"plan.{each}" for each in more)]
    workload = ["global_batch_size=1024", f"gradients={SCENARIOS / 'gradients/gpt-byte-1m-1024.json'}"]
    cluster = f"cluster={SCENARIOS / 'clusters/unequal-1024.toml'}"
    run = ["run.steps=8", "run.warmup_steps=4"]
    loaded = scenario("demo", cluster, *plan, *(f"workload.{each}" for each in workload), *run)
    benchmark.pedantic(lambda: simulate(loaded), rounds=3)


@pytest.mark.parametrize("model", ["gpt3-1.3b", "gpt3-175b"])
@pytest.mark.parametrize(
    "changes",
    [("gs",), ("gs", "publish.threshold=1e-4"), ("gs_z3",), ("gs_hier",)],
    ids=["gs", "gs-publish", "gs_z3", "gs_hier"],
)
def test_thresholds_of_large_models_on_1024_unequal_devices(benchmark, model, changes):
    """With statistics transferred from small models; error feedback is on, as it is by default."""
    method, *more = changes
    plan = [f"plan.method={method}", "plan.push.threshold=1e-4", *(f"plan.{each}" for each in more)]
    run = ["run.steps=8", "run.warmup_steps=4"]
    loaded = scenario("gpt3-1024-unequal", f"workload.model={SCENARIOS / 'models' / model}.toml", *plan, *run)
    benchmark.pedantic(lambda: simulate(loaded), rounds=1)


@pytest.mark.parametrize(
    "changes", [("gs",), ("gs", "publish.threshold=1e-4"), ("gs_z3",)], ids=lambda each: "-".join(each)
)
def test_thresholds_on_8192_unequal_devices(benchmark, changes):
    method, *more = changes
    plan = [f"plan.method={method}", "plan.push.threshold=1e-4", *(f"plan.{each}" for each in more)]
    workload = ["global_batch_size=8192", f"model={SCENARIOS / 'models/gpt3-1.3b.toml'}"]
    cluster = f"cluster={SCENARIOS / 'clusters/unequal-8192.toml'}"
    run = ["run.steps=8", "run.warmup_steps=4"]
    loaded = scenario("gpt3-1024-unequal", cluster, *plan, *(f"workload.{each}" for each in workload), *run)
    benchmark.pedantic(lambda: simulate(loaded), rounds=1)


@pytest.mark.parametrize("servers", [32, 128])
def test_fully_sharded_training_of_6_7_billion_parameters(benchmark, servers):
    ranks = 8 * servers
    changes = [H100_CLUSTER.format(servers=servers), "workload.model=" + str(SCENARIOS / "models/gpt3-6.7b.toml")]
    loaded = scenario("gpt3-1024-unequal", *changes, f"workload.global_batch_size={ranks}")
    benchmark.pedantic(lambda: simulate(loaded), rounds=3)


def test_unfolded_256_devices(benchmark):
    changes = [H100_CLUSTER.format(servers=32), "workload.global_batch_size=256"]
    loaded = scenario("gpt3-1024-unequal", *changes)
    benchmark.pedantic(lambda: simulate(loaded, unfolded=True), rounds=1)


@pytest.mark.parametrize("ranks", [1024, 65536])
def test_one_ring_all_reduce(benchmark, ranks, tmp_path):
    file = tmp_path / "ring.toml"
    file.write_text(
        'name = "ring"\nbackend = "gloo"\nsource = "made"\n[device_types]\ngpu = "h100-sxm"\n'
        '[topology]\nkind = "ring"\n'
        f'devices = [{{device = "gpu", count = {ranks}}}]\n'
        'link = {bandwidth_bytes_per_s = "50 GB/s", latency_s = "500 ns", source = "made"}\n'
    )
    cluster = load_cluster(file)
    together = TaskId("all-reduce")
    task = Task(together, "exposed_communication", communication=together)
    program = Program(
        ((task,),), {together: Communication("all-reduce", range(ranks), 2**26)}, ({},), roles=(0,) * ranks
    )
    benchmark.pedantic(lambda: Machine(cluster, program).run(1), rounds=3)


@pytest.mark.parametrize("flows", [1_000, 100_000])
def test_fair_shares_of_random_flows(benchmark, flows):
    random = np.random.default_rng(0)
    links, hops = 1_000, 4
    session = np.repeat(np.arange(flows), hops)
    link = random.integers(0, links, flows * hops)
    capacity = random.uniform(1e9, 1e11, links)
    benchmark(lambda: limited_rates(session, link, np.ones(len(link)), capacity, sessions=flows)[0])
