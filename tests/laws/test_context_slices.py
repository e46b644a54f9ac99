"""Laws and closed forms: context beside tensor parallelism, tensor ranks inside context ranks inside replicas."""

from pathlib import Path

import pytest
from point_checks import assert_same_as_unfolded
from strategies import loaded_of, scenario_of, star

from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.program import lower
from gssim.scenario import load_model, load_scenario
from gssim.scenario.tensor_slices import held_slice
from gssim.simulation import simulate

FOLDER = Path(__file__).resolve().parents[2]
GPT = load_model(FOLDER / "scenarios" / "models" / "gpt-byte-1m.toml")
LLAMA = load_model(FOLDER / "scenarios" / "models" / "llama3-8b.toml")
WIDTH, HEADS, LAYERS, VALUE_BYTES, SAMPLES, LENGTH = 144, 4, 4, 4, 12, 64
BOTH = {"method": "ddp", "cp": 2, "tp": 2}


def scenario(plan: dict, ranks: int = 4, **workload):
    asked = {"model": GPT, "sequence_length": LENGTH, "global_batch_size": SAMPLES} | workload
    return scenario_of(star(ranks), BOTH | plan, **asked)


def collectives(plan: dict, ranks: int = 4, **workload) -> dict[tuple[str, tuple[int, ...]], dict[float, int]]:
    """Return how often each group makes collectives of so many bytes, by kind and ranks."""
    found: dict = {}
    for each in simulate(loaded_of(scenario(plan, ranks, **workload))).result.collectives:
        sizes = found.setdefault((each.kind, each.group), {})
        sizes[each.bytes] = sizes.get(each.bytes, 0) + each.count
    return found


def groups(found: dict, kind: str) -> set:
    return {group for each, group in found if each == kind}


def test_each_axis_has_its_own_ranks():
    """Tensor ranks are neighbours, context ranks come next; gradients are reduced over context ranks and replicas."""
    found = collectives({}, 8)
    assert groups(found, "all-to-all") == {(0, 2), (1, 3), (4, 6), (5, 7)}
    sums = {group: sizes for (kind, group), sizes in found.items() if kind == "all-reduce"}
    assert set(sums) == {(0, 1), (2, 3), (4, 5), (6, 7), (0, 2, 4, 6), (1, 3, 5, 7)}
    # of every gradient once, over replicas and parts of sequences
    held = sum(layer.elements * layer.repeats for layer in held_slice(scenario({}, 8), 0).layers)
    assert sum(size * n for size, n in sums[0, 2, 4, 6].items()) == held * VALUE_BYTES


def test_slices_sum_parts_of_sequences():
    """Shoeybi et al. 2019: four sums in a layer, of b*s*h on whole sequences; here of each rank's own positions."""
    found = collectives({})
    assert found["all-reduce", (0, 1)] == {SAMPLES * LENGTH // 2 * WIDTH * VALUE_BYTES: 4 * LAYERS}


def test_parts_of_sequences_are_exchanged_for_a_rank_s_heads():
    """Jacobs et al. 2023: eight all-to-alls in a layer, of b*s*h/n each; of half the heads, half as much."""
    found = collectives({})
    own = SAMPLES * LENGTH // 2 * WIDTH // 2 * VALUE_BYTES
    assert found["all-to-all", (0, 2)] == found["all-to-all", (1, 3)] == {own: 8 * LAYERS}


def test_keys_and_values_of_a_rank_s_heads_go_around():
    """Liu et al. 2023: n - 1 shifts of keys and values in each pass, and n of their gradients; of half the heads."""
    found = collectives({"context_exchange": "ring"})
    own = 2 * SAMPLES * LENGTH // 2 * WIDTH // 2 * VALUE_BYTES
    assert found["all-to-all-v", (0, 2)] == {2 * own: (1 + 3) * LAYERS}


def test_sequence_parallelism_gathers_a_context_part_alone():
    """Korthikanti et al. 2022, section 4.2.2: gathers and reduce-scatters of what is summed otherwise."""
    found = collectives({"sequence_parallel": True})
    part = SAMPLES * LENGTH // 2 * WIDTH * VALUE_BYTES
    # of the last block's output one gather more, and of its input's gradient
    assert found["all-gather", (0, 1)] == {part: 4 * LAYERS + 2}
    assert found["reduce-scatter", (0, 1)] == {part: 4 * LAYERS}


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize("ring", [False, True], ids=["all-to-all", "ring"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_s_products_are_divided_by_all_ranks(model, ring, sequence_parallel):
    """Whatever the exchange: of its products and its attention each of 2 x 2 ranks has a quarter."""
    exchange = {"context_exchange": "ring"} if ring else {}
    asked = scenario(exchange | {"sequence_parallel": sequence_parallel}, model=model, global_batch_size=4)
    (own, whole) = (
        next(layer for layer in layers if layer.block) for layers in (held_slice(asked, 0).layers, model.layers)
    )
    for name in ("forward_flop", "backward_flop"):
        assert 4 * getattr(own, name).at(b=3, s=LENGTH) == getattr(whole, name).at(b=3, s=LENGTH), name


@pytest.mark.parametrize("method", ["ddp", "zero1", "zero3", "gs"])
def test_gradients_are_reduced_as_among_as_many_replicas(method):
    """Two parts of a sequence reduce what two replicas with the same slices do."""

    def reduced(plan: dict) -> dict:
        found = collectives({"method": method} | plan)
        return {key: sizes for key, sizes in found.items() if key[1] in ((0, 2), (1, 3)) and key[0] != "all-to-all"}

    assert reduced({}) == reduced({"cp": 1}) != {}


def test_shards_are_along_both_axes_and_replicas_beside():
    found = collectives({"method": "zero3", "dp_replicate": 2, "dp_shard": 1}, 8)
    assert groups(found, "all-gather") == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert groups(found, "all-reduce") >= {(0, 4), (1, 5), (2, 6), (3, 7)}


def test_norms_are_summed_over_slices_and_shards():
    plan = {"method": "zero3", "sequence_parallel": True}
    plain, clipped = (collectives(plan, clip_norm=norm) for norm in (None, 1.0))
    more = {key: set(sizes) - set(plain.get(key, ())) for key, sizes in clipped.items()}
    assert {key: sizes for key, sizes in more.items() if sizes} == {
        ("all-reduce", group): {8} for group in ((0, 1), (2, 3), (0, 2), (1, 3))
    }


@pytest.mark.parametrize(
    "plan",
    [
        {"micro_batches": 2, "sequence_parallel": True},
        {"method": "zero3", "context_exchange": "ring", "recompute": "full"},
        {"method": "gs", "context_exchange": "ring", "context_split": "plain"},
        {"shares": {"batch": (0.75, 0.25)}},
    ],
    ids=str,
)
def test_equal_ranks_are_simulated_once_with_the_same_result(plan):
    loaded = loaded_of(scenario(plan, 8))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


def test_activations_shrink_with_the_context_ranks():
    def activations(ranks: int) -> float:
        plan = {"cp": ranks, "sequence_parallel": True, "context_exchange": "ring"}
        asked = scenario(plan, 2 * ranks, sequence_length=256)
        return simulate(loaded_of(asked)).result.ranks[0].peak_by_category_bytes["activations"]

    assert activations(2) == pytest.approx(2 * activations(4), rel=0.01)


def test_plans_that_share_a_cache_do_not_share_activations():
    """Kept activations depend on sequence parallelism, the exchange, and the division of the vocabulary."""
    plans = [
        {},
        {"sequence_parallel": True},
        {"context_exchange": "ring"},
        {"loss_parallel": True},
        {"cp": 1, "loss_parallel": True},
        {"cp": 1},
    ]
    shared = Shared()

    def peaks(cache: Shared | None) -> list[float]:
        return [
            simulate(loaded_of(scenario(plan)), shared=cache or Shared())
            .result.ranks[0]
            .peak_by_category_bytes["activations"]
            for plan in plans
        ]

    assert peaks(shared) == peaks(None)


def test_a_part_s_slice_sends_over_a_threshold_what_a_replica_s_does():
    statistics = load_scenario(FOLDER / "scenarios" / "demo.toml", ["plan.push.threshold=1e-3"]).gradients

    def density(**plan: object) -> float:
        asked = scenario({"method": "gs", "push": {"threshold": 1e-3}} | plan)
        return lower(asked, statistics, step=10).push_density or 0.0

    assert density() == density(cp=1) > 0.01


# Pipelines -----------------------------------------------------------------------------------------------------------

STAGES = {"tp": 1, "pp": 2, "micro_batches": 4}


@pytest.mark.parametrize(("tp", "ranks"), [(1, 4), (2, 8)])
def test_stages_send_the_positions_that_they_have(tp, ranks):
    """A message each way for each micro-batch, of b/m * s/c * h; where tensor ranks divide these too, of their part."""
    found = collectives(STAGES | {"tp": tp, "sequence_parallel": tp > 1}, ranks, global_batch_size=16)
    half = ranks // 2
    sent = {group: sizes for (kind, group), sizes in found.items() if kind == "send"}
    assert sent == {(i, i + half): {4 * LENGTH // 2 // tp * WIDTH * VALUE_BYTES: 2 * 4} for i in range(half)}
    # the exchanges of two blocks of four, in four micro-batches of four samples
    exchanged = {group: sizes for (kind, group), sizes in found.items() if kind == "all-to-all"}
    own = 4 * LENGTH // 2 * WIDTH // tp * VALUE_BYTES
    assert exchanged == {(i, i + tp): {own: 8 * 2 * 4} for i in range(ranks) if i // tp % 2 == 0}


def test_each_stage_reduces_its_gradients_over_parts_of_sequences():
    found = collectives(STAGES | {"dp_replicate": 2}, 8, global_batch_size=16)
    sums = {
        group: sum(size * n for size, n in sizes.items())
        for (kind, group), sizes in found.items()
        if kind == "all-reduce"
    }
    assert set(sums) == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert sum(sums.values()) == GPT.elements * VALUE_BYTES


def test_copies_of_a_tied_weight_are_summed_for_each_shard():
    """The embedding's weight on the first stage is the head's on the last; each shard of either meets its own copy."""
    model = load_model(FOLDER / "tests" / "helpers" / "models" / "gpt-tied.toml")
    found = collectives(STAGES | {"method": "zero3"}, model=model, sequence_length=24, global_batch_size=16)
    alone = collectives(STAGES | {"method": "zero3", "cp": 1}, model=model, sequence_length=24, global_batch_size=16)
    sums = [{key: sizes for key, sizes in each.items() if key[0] == "all-reduce"} for each in (found, alone)]
    assert sums[0] == sums[1] != {}


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        (STAGES | {"context_exchange": "ring", "context_split": "plain"}, 8),
        (STAGES | {"method": "zero3", "tp": 2, "sequence_parallel": True, "recompute": "full"}, 8),
        (STAGES | {"tp": 2, "context_exchange": "ring", "schedule": "interleaved", "method": "zero1"}, 8),
    ],
    ids=str,
)
def test_equal_stages_are_simulated_once_with_the_same_result(plan, ranks):
    loaded = loaded_of(scenario(plan, ranks, global_batch_size=16))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


def test_a_stage_s_activations_shrink_with_the_context_ranks():
    def activations(ranks: int) -> float:
        asked = scenario(STAGES | {"cp": ranks}, 2 * ranks, sequence_length=256, global_batch_size=16)
        return simulate(loaded_of(asked)).result.ranks[0].peak_by_category_bytes["activations"]

    assert activations(2) == pytest.approx(2 * activations(4), rel=0.01)


@pytest.mark.parametrize(
    ("plan", "workload", "message"),
    [
        (
            {"cp": 4},
            {},
            "4 heads with keys of their own, .* and 2 tensor-parallel ranks before; allowed: a divisor of 2",
        ),
        ({"sequence_parallel": True}, {"sequence_length": 62}, "parts of 31 positions cannot be divided evenly"),
        ({"method": "gs_tp", "tp": 1}, {}, "cannot run yet with method 'gs_tp'"),
        (STAGES | {"method": "pipeline", "ranks": 4}, {}, r"method 'pipeline' for 2 replica\(s\) of a pipeline"),
        ({"ep": 2}, {}, "cannot run yet with plan.cp = 2|no layers with divided experts"),
        (
            {},
            {"model": load_model(FOLDER / "tests" / "helpers" / "models" / "gpt2.toml"), "sequence_length": 24},
            "is traced at one sequence length alone",
        ),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(plan, workload, message):
    with pytest.raises(UserError, match=message):
        scenario(plan, 2 * BOTH["tp"] * plan.get("cp", 2), **workload)


def test_rings_of_stages_on_gpus_are_those_of_their_own_ranks():
    """Stages of equal layers share their tasks, but each exchanges keys and values among its own ranks."""
    plan = {"method": "zero2", "pp": 2, "cp": 2, "tp": 2, "micro_batches": 2, "context_exchange": "ring"}
    workload = {"model": "models/llama3.2-1b.toml", "sequence_length": 256, "global_batch_size": 4}
    keys = {"plan": plan | {"recompute": "none"}, "workload": workload}
    overrides = [f"{table}.{key}={value!r}" for table, values in keys.items() for key, value in values.items()]
    loaded = load_scenario(FOLDER / "scenarios" / "llama3-8b-fsdp.toml", overrides)
    folded, unfolded = (simulate(loaded, unfolded=whole).result for whole in (False, True))
    assert {each.group for each in folded.collectives if each.kind == "all-to-all-v"} == {
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
    }
    assert folded.step_time_s == pytest.approx(unfolded.step_time_s, rel=1e-9)
    assert set(folded.collectives) == set(unfolded.collectives)


@pytest.mark.slow
def test_seventy_billion_parameters_take_the_time_of_their_products_and_little_more():
    """6 N T FLOP and 12 h s^2 a layer and sequence for training, a third more for recomputation, on 128 GPUs.

    Attention counts whole squares, as torch counts it, though a causal mask leaves half out. Norms, activations and
    merges of blocks take the rest of the computing; a tenth of the step is exposed communication.
    """
    scenario = load_scenario(FOLDER / "scenarios" / "llama3-70b-context.toml").scenario
    device, workload = scenario.cluster.type_of(0), scenario.workload
    rate = device.peak_flop_per_s["bf16"] * device.efficiency_ratio
    tokens, length = workload.global_batch_size * 131072, 131072
    training = 6 * workload.model.elements * tokens + 12 * 8192 * 80 * length * tokens
    least_s = training * 4 / 3 / 128 / rate
    result = simulate(load_scenario(FOLDER / "scenarios" / "llama3-70b-context.toml")).result
    computing_s = result.phases_s["forward"] + result.phases_s["backward"]
    assert least_s < computing_s < 1.25 * least_s
    assert computing_s < result.step_time_s < 1.15 * computing_s
    assert result.fits


@pytest.mark.parametrize("kind", [{"precision": "bf16"}, {"precision": "fp16"}, {"autocast": "bf16"}])
@pytest.mark.parametrize("plan", [{}, {"sequence_parallel": True, "recompute": "full"}])
def test_padded_heads_are_not_combined_with_cut_blocks(kind, plan):
    """What is exchanged of heads that GPUs pad in 16 bits is not what the attention makes: it was a KeyError."""
    workload = {"model": "gpt-byte-1m", "global_batch_size": SAMPLES, "sequence_length": LENGTH} | kind
    cluster = str(FOLDER / "scenarios/clusters/dgx-h100.toml")
    tables = {"cluster": cluster, "workload": workload, "plan": BOTH | {"ranks": 4} | plan}
    with pytest.raises(UserError, match=r"plan\.cp = 2 beside plan\.tp = 2: .* has heads that GPUs pad in 16 bits"):
        load_scenario(FOLDER / "padded.toml", tables=tables)
    tables["workload"] = {key: value for key, value in workload.items() if key not in kind}
    assert simulate(load_scenario(FOLDER / "padded.toml", tables=tables)).result.step_time_s > 0
