"""Muon's FLOP, memory and ownership of whole matrices, with torch as the oracle and by closed forms."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_runs import scenario_file
from strategies import device_type, scenario_of
from strategies import star as small_star

import gssim
from gssim import cost
from gssim.cluster import DeviceType
from gssim.errors import UserError
from gssim.plan import splitting
from gssim.planner import PLAN, full_ratio
from gssim.planner.bounds import Bounds
from gssim.program import Lowering
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.workload import Workload, optimizer_state_bytes, unrolled
from gssim.workload.optimizers import (
    NEWTON_SCHULZ_STEPS,
    OPERATIONS_PER_MATRIX,
    elements_of,
    elementwise_bytes,
    is_matrix,
    largest_temporaries,
    newton_schulz_products,
    optimizer_temporary_bytes,
)

SIDES = st.integers(1, 40)
DEMO = scenario_file("demo.toml")


def muon_of(**plan: object):
    overrides = ["workload.optimizer=muon", *(f"plan.{key}={value}" for key, value in plan.items())]
    return load_scenario(Path(DEMO), overrides, gradients_needed=False).scenario


def lowering_of(ranks: int, **plan: object) -> Lowering:
    layered = load_scenario(Path(DEMO), [], gradients_needed=False).scenario
    model, length = layered.workload.model, layered.workload.sequence_length
    scenario = scenario_of(
        small_star(ranks),
        {"method": "zero1", **plan},
        model=model,
        sequence_length=length,
        global_batch_size=2 * ranks,
        optimizer="muon",
    )
    return Lowering(scenario, None, 0, range(scenario.ranks))


def newton_schulz_flop(rows: int, columns: int) -> int:
    return NEWTON_SCHULZ_STEPS * sum(flop for flop, _ in newton_schulz_products(rows, columns))


# Closed forms --------------------------------------------------------------------------------------------------------


@given(SIDES, SIDES)
def test_flop_are_those_of_the_shorter_side(rows: int, columns: int):
    m, n = min(rows, columns), max(rows, columns)
    assert newton_schulz_flop(rows, columns) == 5 * (4 * m * m * n + 2 * m**3) == newton_schulz_flop(columns, rows)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_time_is_that_of_products_in_bf16_of_what_is_moved_and_of_adamw_for_the_rest(kind: str):
    bandwidth, overhead_s = 1e9, 1e-6
    rates = {"fp32": 1e6, "bf16": 2e6}  # so slow that every product is bound by it
    device = DeviceType(**device_type(kind=kind, peak_flop_per_s=rates, operation_overhead_s=overhead_s))
    workload = muon_of(method="single").workload
    matrices = [(8, 24), (24, 8), (16, 16)]
    found = cost.optimizer_time_s(device, workload, elements=elements_of(matrices) + 100, tensors=5, matrices=matrices)
    adamw = replace(workload, optimizer="adamw")
    rest_s = cost.optimizer_time_s(device, adamw, elements=100, tensors=2)
    rate = rates["bf16"] * device.efficiency_ratio
    busy_s = sum(newton_schulz_flop(*each) / rate for each in matrices)
    busy_s += sum(elementwise_bytes(*each, value_bytes=4) for each in matrices) / bandwidth
    issue_s = 3 * OPERATIONS_PER_MATRIX * overhead_s
    assert found - rest_s == pytest.approx(busy_s + issue_s if kind == "cpu" else busy_s)


def test_a_gpu_waits_for_its_host_where_matrices_are_small():
    device = DeviceType(**device_type(kind="cuda", peak_flop_per_s={"bf16": 1e15}, operation_overhead_s=1e-3))
    workload = muon_of(method="single").workload
    found = cost.optimizer_time_s(device, workload, elements=64, tensors=1, matrices=[(8, 8)])
    assert found == OPERATIONS_PER_MATRIX * 1e-3


def test_matrices_of_blocks_have_one_value_and_all_else_two():
    scenario = muon_of(method="single")
    (rank,) = simulate(load_scenario(Path(DEMO), ["workload.optimizer=muon", "plan.method=single"])).result.ranks
    members = [(each.layer, p) for each in unrolled(scenario.workload.model) for p in each.layer.parameters]
    own = [p.elements for layer, p in members if is_matrix(layer, p)]
    rest = [p.elements for layer, p in members if not is_matrix(layer, p)]
    assert len(own) == 16
    assert rank.peak_by_category_bytes["optimizer"] == 4 * (sum(own) + 2 * sum(rest) + len(rest))


# Who updates what ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["torch", "megatron"])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_every_matrix_is_updated_whole_by_one_rank(ranks: int, implementation: str):
    low = lowering_of(ranks, zero1_implementation=implementation)
    every = [m for place in range(len(low.parameters)) for m in low.matrices_at(place)]
    assert sorted(m for rank in low.group for m in low.matrices(rank)) == sorted(every)


def test_parts_of_the_flat_buffer_hold_the_most_matrices_that_a_rank_has():
    low = lowering_of(3, zero1_implementation="megatron")
    most = max(elements_of(low.matrices(rank)) for rank in low.group)
    rest = sum(p.elements for _, p in low.parameters) - sum(elements_of(low.matrices(rank)) for rank in low.group)
    assert low.flat_part == most + 2 * -(-rest // 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["plan.method=zero2"], r"workload\.optimizer = 'muon': .* method 'zero2' shards them; allowed: single, ddp"),
        (["plan.method=zero3"], "method 'zero3' shards them"),
        (["plan.method=gs"], "method 'gs' shards them"),
        (["plan.method=gs", "plan.shares.shards=cost"], "method 'gs' shards them"),
        (["plan.method=gs_wgrad"], "method 'gs_wgrad' shards them"),
        (["plan.method=tensor", "plan.tp=2"], r"plan\.tp = 2: ranks hold parts of the matrices; allowed: 1"),
        (["plan.method=zero1", "plan.zero1_implementation=deepspeed"], "deepspeed: .* allowed: torch, megatron"),
    ],
    ids=str,
)
def test_plans_that_shard_a_matrix_are_refused_in_one_line(changes: list[str], message: str):
    with pytest.raises(UserError, match=message) as refused:
        gssim.load(DEMO, ["workload.optimizer=muon", *changes])
    assert "\n" not in str(refused.value)


def test_the_search_leaves_out_plans_that_shard_a_matrix():
    names = ["single", "ddp", "zero1", "zero2", "gs"]
    asked = ["workload.optimizer=muon", "plan.method=ddp", f"search.methods={names}", "search.micro_batches=[1]"]
    asked += ['search.recompute=["none"]', "run.steps=2", "run.warmup_steps=1"]
    found = gssim.search(gssim.load(DEMO, asked), top=9, jobs=1)
    told = found[0].provenance["search"]["left_out"]
    assert {name for each in told for name in each["methods"]} == {"gs", "zero2"}
    assert all("'muon'" in each["reason"] for each in told)


def test_models_without_matrices_in_blocks_are_refused():
    with pytest.raises(UserError, match=r"workload\.optimizer = 'muon': blocks of 'resnet-digits' have no matrices"):
        gssim.load(scenario_file("resnet-digits.toml"), ["workload.optimizer=muon", "plan.method=ddp"])


@pytest.mark.parametrize("implementation", ["torch", "megatron"])
@pytest.mark.parametrize("plan", [{"method": "ddp"}, {"method": "zero1"}, {"method": "zero1", "pp": 2}], ids=str)
def test_no_plan_needs_less_memory_than_its_bound(plan: dict[str, object], implementation: str):
    asked = ["workload.optimizer=muon", "workload.global_batch_size=64", "plan.method=ddp"]
    loaded = load_scenario(Path(scenario_file("gpt2-muon.toml")), asked, gradients_needed=False)
    in_stages = {"micro_batches": 4, "dp_replicate": 8} if "pp" in plan else {}
    if plan["method"] == "zero1":
        plan = plan | {"zero1_implementation": implementation}
    wanted = PLAN.validate_python({**plan, **in_stages})
    bounds = Bounds(loaded.scenario)
    found = bounds.closer(wanted, bounds.of(wanted))
    result = simulate(replace(loaded, scenario=replace(loaded.scenario, plan=wanted))).result
    held = {name: device.memory_bytes for name, device in loaded.scenario.cluster.device_types.items()}
    assert 0 < found.full_ratio <= full_ratio(result, held)
    assert 0 < found.time_s <= result.step_time_s


# Against torch -------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from gsreal.measure.memory import _StorageTracker  # noqa: E402
from gsreal.methods.optimizers import make_optimizer, mark_matrices  # noqa: E402
from gsreal.run.checkpoint import Elements  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (48, 48), (8, 40)])
def test_torch_counts_as_many_flop(shape: tuple[int, int]):
    parameter = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.Muon([parameter])
    parameter.grad = torch.randn(shape)
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert counter.get_total_flops() == newton_schulz_flop(*shape)


@pytest.mark.parametrize("value_bytes", [4, 8])
@pytest.mark.parametrize("shapes", [[(32, 96)], [(96, 32)], [(48, 48), (32, 96), (40, 8)]], ids=str)
def test_torch_holds_as_many_bytes(shapes: list[tuple[int, int]], value_bytes: int):
    """Only tensors are counted: on a CPU, kernels of bf16 products also pack an operand."""
    parameters = [
        nn.Parameter(torch.randn(shape, dtype={4: torch.float32, 8: torch.float64}[value_bytes])) for shape in shapes
    ]
    optimizer = torch.optim.Muon(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        kept = [*parameters, *(p.grad for p in parameters)]
        kept += [state["momentum_buffer"] for state in optimizer.state.values()]
        with _StorageTracker(kept) as tracker:
            optimizer.step()
    own = elements_of(shapes) * value_bytes
    held = sum(largest_temporaries(shapes, value_bytes=value_bytes))
    assert 0 <= tracker.peak_bytes - 3 * own - held <= 64  # norms


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_torch_keeps_as_many_bytes_of_state(precision: str):
    scenario = muon_of(method="single")
    workload = replace(scenario.workload, precision=precision)
    from gsreal.model_files.build import DTYPES, build_module

    module = build_module(workload.model.module, where="demo").to(DTYPES[precision])
    mark_matrices(workload, module)
    optimizer = make_optimizer(workload, module.parameters(), CPU)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    kept = sum(each.nbytes for state in optimizer.state.values() for each in state.values())
    members = [(each.layer, p) for each in unrolled(workload.model) for p in each.layer.parameters]
    matrices = [(p.shape[0], p.shape[1]) for layer, p in members if is_matrix(layer, p)]
    elements = sum(p.elements for _, p in members)
    assert kept == optimizer_state_bytes(
        "muon", elements=elements, tensors=len(members), value_bytes=4, matrices=matrices
    )


@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=12), st.lists(SIDES, max_size=8), st.integers(1, 5))
def test_whole_tensors_are_dealt_out_as_zero_redundancy_optimizer_does_it(shapes, vectors, ranks):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    tensors = [torch.empty(each, device="meta") for each in (*shapes, *vectors)]
    groups = [{"params": tensors[: len(shapes)]}, {"params": tensors[len(shapes) :]}]
    optimizer = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)  # its constructor needs a process group
    optimizer.world_size, optimizer.param_groups = ranks, [group for group in groups if group["params"]]
    optimizer._partition_parameters_cache = []
    place = {id(tensor): position for position, tensor in enumerate(tensors)}
    expected = tuple(
        tuple(place[id(tensor)] for group in of_rank for tensor in group["params"])
        for of_rank in optimizer._partition_parameters()
    )
    numbers = [0] * len(shapes) + [1] * len(vectors)
    assert splitting.greedy([each.numel() for each in tensors], ranks, numbers) == expected


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_the_peak_is_muons_or_that_of_adamw_behind_it(implementation: str):
    matrices, rest = [(8, 8)], [10, 2000]
    found = optimizer_temporary_bytes(
        "muon",
        implementation=implementation,  # type: ignore[arg-type]
        tensor_elements=[64, *rest],
        value_bytes=4,
        matrices=matrices,
    )
    of_adamw = {"for-loop": 4 * (10 + 2 * 2000), "foreach": 4 * 2010, "fused": 0}[implementation]
    assert found == max(of_adamw, (4 + 4) * 64 + 4 * 64)


def small_workload() -> Workload:
    overrides = ["workload.optimizer=muon", "plan.method=single"]
    return load_scenario(Path(scenario_file("small-demo.toml")), overrides).scenario.workload


def made_twice(precision: str) -> tuple[nn.Module, nn.Module, list[str]]:
    """Return a small module twice, with matrices marked in the first, and the names of these."""
    from gsreal.model_files.build import DTYPES, build_module

    workload = small_workload()
    torch.manual_seed(0)
    first, second = (build_module(workload.model.module, where="demo").to(DTYPES[precision]) for _ in range(2))
    second.load_state_dict(first.state_dict())
    mark_matrices(workload, first)
    return first, second, [name for name, each in first.named_parameters() if each.by_muon]


def test_it_is_torchs_own_muon_for_matrices_of_blocks_and_adamw_for_all_else():
    workload = replace(small_workload(), weight_decay=0.1, momentum=0.8, learning_rate=1e-2)
    module, by_hand, names = made_twice("fp32")
    assert len(names) == 4 * 2  # of two blocks
    assert all(name.startswith("blocks.") for name in names)
    own = dict(by_hand.named_parameters())
    apart = [
        torch.optim.Muon([own[name] for name in names], 1e-2, 0.1, 0.8, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([each for name, each in own.items() if name not in names], lr=1e-2, weight_decay=0.1),
    ]
    optimizer = make_optimizer(workload, module.parameters(), CPU)
    for step in range(3):
        for each, other in zip(module.parameters(), by_hand.parameters(), strict=True):
            each.grad = (each.detach() * (step + 1)).cos()
            other.grad = (other.detach() * (step + 1)).cos()
        optimizer.step()
        for each in apart:
            each.step()
    for each, other in zip(module.parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(each, other)


def test_a_checkpoint_has_the_momentum_of_matrices_and_the_moments_of_all_else():
    workload = replace(small_workload(), precision="bf16")
    module, _, names = made_twice("bf16")
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    found = Elements(module, make_optimizer(workload, module.parameters(), CPU)).state_dict()["optimizer"]
    for name, state in found.items():
        kept = {"momentum_buffer"} if name in names else {"exp_avg", "exp_avg_sq", "step"}
        assert set(state) == {"master", *kept}
        assert all(each.eq(0).all() for key, each in state.items() if key != "master")
    assert all(torch.equal(before[name], each) for name, each in module.named_parameters())
