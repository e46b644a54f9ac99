"""Laws and closed forms: sequences divided among context-parallel ranks; Jacobs et al. 2023, arXiv 2309.14509."""

from dataclasses import replace
from pathlib import Path

import pytest
from point_checks import assert_same_as_unfolded
from strategies import device_type, loaded_of, scenario_of, star

from gssim.errors import UserError
from gssim.plan import Mesh
from gssim.program import lower
from gssim.scenario import Scenario, load_model, load_scenario
from gssim.scenario.tensor_slices import context_part
from gssim.simulation import simulate
from gssim.workload import Layer, Reduction

FOLDER = Path(__file__).resolve().parents[2]
GPT = load_model(FOLDER / "scenarios" / "models" / "gpt-byte-1m.toml")
LLAMA = load_model(FOLDER / "scenarios" / "models" / "llama3-8b.toml")
COMPOSED = load_model(FOLDER / "tests" / "helpers" / "models" / "of_tests" / "decoder-stablelm.toml")
"""Its queries and values differ in width, so that torch composes the attention of products and a softmax."""
WIDTH, HEADS, LAYERS, VALUE_BYTES, SAMPLES, LENGTH = 144, 4, 4, 4, 12, 64


def scenario(plan: dict, ranks: int = 2, **workload):
    asked = {"model": GPT, "sequence_length": LENGTH, "global_batch_size": SAMPLES} | workload
    return scenario_of(star(ranks), plan, **asked)


def block(layers) -> Layer:
    return next(layer for layer in layers if layer.block)


def test_the_axis_lies_between_shards_and_tensor_slices():
    mesh = Mesh(dp_shard=2, cp=3, tp=2)
    assert list(mesh.group(0, "cp")) == [0, 2, 4]
    assert [mesh.data_rank(rank) for rank in range(12)] == [0] * 6 + [1] * 6
    assert mesh.replica_ranks == 6


def test_an_all_to_all_survives_its_text():
    assert str(Reduction.parse("f1 all-to-all 4*b*p")) == "f1 all-to-all 4*b*p"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pass_has_four_all_to_alls_of_a_part_of_the_sequence(ranks):
    """Section 3.2: of queries, keys, values and outputs, each of b*s*h/n elements on a rank, and as many backward."""
    entries = {
        each.kind: each
        for each in simulate(loaded_of(scenario({"method": "ddp", "cp": ranks}, ranks))).result.collectives
    }
    assert (entries["all-to-all"].bytes, entries["all-to-all"].count) == (
        SAMPLES * LENGTH // ranks * WIDTH * VALUE_BYTES,
        8 * LAYERS,
    )
    assert len(entries["all-to-all"].group) == ranks


def test_fewer_heads_of_keys_and_values_are_exchanged_as_such():
    """Llama 3 8B: 32 heads of queries and outputs, 8 of keys and values, each of 128; in bf16."""
    sizes = [each.size_bytes.held(0, 1).at(b=1, s=1) for each in block(LLAMA.context_layers).reductions]
    value_bytes = sizes[0] // (32 * 128)
    few, all_heads = 8 * 128 * value_bytes, 32 * 128 * value_bytes
    assert sizes[:4] == [all_heads, few, few, all_heads]
    assert sorted(sizes[4:]) == [few, few, all_heads, all_heads]


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize("ranks", [2, 4])
def test_work_and_activations_are_the_nth_part(model, ranks):
    b, s = 3, 64
    whole, own = block(model.layers), block(context_part(model, s // ranks).layers)
    for name in ("forward_flop", "backward_flop", "output_bytes"):
        assert getattr(own, name).at(b=b, s=s) * ranks == getattr(whole, name).at(b=b, s=s), name
    # queries, keys and values are kept as exchanged alone; outputs too, and once more as the linear map takes them
    outputs_bytes = whole.output_bytes.at(b=b, s=s)
    assert own.saved_bytes.at(b=b, s=s) * ranks == whole.saved_bytes.at(b=b, s=s) + outputs_bytes


def test_what_ranks_hold_and_move_without_attention_is_the_nth_part_too():
    """The embedding's rows, the norm, the head and the loss of a rank's positions alone."""
    whole, own = GPT.layers[-1], context_part(GPT, 16).layers[-1]
    assert own.name == "loss"
    assert 4 * own.forward_bytes.at(b=2, s=64) == pytest.approx(whole.forward_bytes.at(b=2, s=64), rel=0.01)


def test_activations_shrink_with_the_ranks_and_the_rest_stays():
    def peak(ranks: int) -> float:
        found = simulate(loaded_of(scenario({"method": "ddp", "cp": ranks}, ranks, sequence_length=256))).result.ranks[
            0
        ]
        return found.peak_by_category_bytes["activations"]

    assert peak(2) == pytest.approx(2 * peak(4), rel=0.02)


def test_gradients_are_reduced_over_all_ranks():
    def reduced(plan: dict) -> set:
        found = simulate(loaded_of(scenario(plan, 4))).result.collectives
        return {each for each in found if each.kind != "all-to-all"}

    for method in ("ddp", "zero1", "zero2", "zero3"):
        assert reduced({"method": method, "cp": 2}) == reduced({"method": method}), method


def test_shards_of_replicas_are_those_of_parts_of_sequences_too():
    plan = {"method": "zero3", "dp_replicate": 2, "dp_shard": 1, "cp": 2}
    entries = {(e.kind, e.group) for e in simulate(loaded_of(scenario(plan, 4))).result.collectives}
    assert {group for kind, group in entries if kind == "all-gather"} == {(0, 1), (2, 3)}
    assert {group for kind, group in entries if kind == "all-reduce"} == {(0, 2), (1, 3)}
    assert {group for kind, group in entries if kind == "all-to-all"} == {(0, 1), (2, 3)}


@pytest.mark.parametrize(("cp", "ranks"), [(2, 2), (2, 4), (4, 4)])
def test_parts_of_sequences_push_as_many_bytes_as_parts_of_the_batch(cp, ranks):
    """Each rank sends all gradients that others own: n - 1 times the model in all, to the ranks of all axes."""

    def pushed(plan: dict) -> list[tuple]:
        found = simulate(loaded_of(scenario({"method": "gs"} | plan, ranks))).result.collectives
        return [(each.group, each.bytes * each.count) for each in found if each.kind == "all-to-all-v"]

    assert sorted(pushed({"cp": cp})) == sorted(pushed({}))
    assert {group for group, _ in pushed({"cp": cp})} == {tuple(range(ranks))}
    assert sum(size for _, size in pushed({"cp": cp})) == (ranks - 1) * GPT.elements * VALUE_BYTES


def test_nodes_of_two_levels_hold_parts_of_sequences():
    """Inside, parts of one sequence are reduce-scattered among two ranks; across, each half is pushed between two."""
    plan = {"method": "gs_hier", "dp_replicate": 2, "dp_shard": 1, "cp": 2}
    found = simulate(loaded_of(scenario(plan, 4))).result.collectives
    carried = {kind: {e.group for e in found if e.kind == kind} for kind in ("reduce-scatter-v", "all-to-all-v")}
    assert carried == {"reduce-scatter-v": {(0, 1), (2, 3)}, "all-to-all-v": {(0, 2), (1, 3)}}
    assert sum(e.bytes * e.count for e in found if e.kind == "all-to-all-v") == GPT.elements * VALUE_BYTES


def test_a_part_of_a_sequence_sends_over_a_threshold_what_as_many_tokens_do():
    """A quarter of the sequences sends as much as a quarter of the batch: more than a half, which has less noise."""
    statistics = load_scenario(FOLDER / "scenarios" / "demo.toml", ["plan.push.threshold=1e-3"]).gradients

    def density(ranks: int, **plan: object) -> float:
        asked = scenario({"method": "gs", "push": {"threshold": 1e-3}} | plan, ranks)
        return lower(asked, statistics, step=10).push_density or 0.0

    assert density(4, cp=2) == density(4, cp=4, context_exchange="ring") == density(4)
    assert 0.5 > density(4) > 1.05 * density(2) > 0.01
    levels = {"method": "gs_hier", "dp_replicate": 2, "dp_shard": 1, "cp": 2}  # of a node, whole sequences are summed
    assert density(4, **levels) == pytest.approx(density(2))


@pytest.mark.parametrize("shards", [(0.4, 0.3, 0.2, 0.1), "memory", "compute"], ids=str)
def test_each_part_of_a_sequence_owns_a_shard_of_its_own(shards):
    asked = scenario({"method": "gs", "cp": 2, "shares": {"shards": shards}}, 4)
    wanted = shards if isinstance(shards, tuple) else (0.25,) * 4
    assert asked.shard_shares == pytest.approx(wanted)
    groups = simulate(loaded_of(asked)).result.ranks
    states = {rank: each.peak_by_category_bytes["optimizer"] for each in groups for rank in each.ranks}
    assert [states[rank] / sum(states.values()) for rank in range(4)] == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    "plan",
    [
        {"method": "ddp", "micro_batches": 2},
        {"method": "zero3"},
        {"method": "gs"},
        {"method": "gs_z3", "context_exchange": "ring", "context_split": "plain"},
        {"method": "gs_hier", "dp_replicate": 2, "dp_shard": 1, "context_exchange": "ring"},
        {"method": "zero3", "context_exchange": "gather"},
    ],
    ids=str,
)
def test_equal_ranks_are_simulated_once_with_the_same_result(plan):
    loaded = loaded_of(scenario(plan | {"cp": 2}, 4))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


@pytest.mark.parametrize(("exchange", "kind"), [("all-to-all", "all-to-all"), ("ring", "all-to-all-v")])
def test_groups_with_more_samples_exchange_more(exchange, kind):
    plan = {"method": "ddp", "cp": 2, "shares": {"batch": (0.75, 0.25)}, "context_exchange": exchange}
    found = simulate(loaded_of(scenario(plan, 4))).result.collectives
    sizes = {each.group: each.bytes for each in found if each.kind == kind}
    assert sizes[0, 1] == 3 * sizes[2, 3]


def test_without_the_axis_nothing_changes():
    usual = scenario({"method": "zero3"})
    assert scenario({"method": "zero3", "cp": 1}).scenario_id == usual.scenario_id
    assert scenario({"method": "zero3", "cp": 2}).scenario_id != usual.scenario_id
    assert [task.label for task in lower(usual).tasks[0] if "all-to-all" in task.label] == []


@pytest.mark.parametrize(
    ("plan", "ranks", "workload", "message"),
    [
        ({"method": "gs_tp"}, 2, {}, "cannot run yet with method 'gs_tp'"),
        ({"method": "gs", "shares": {"shards": (0.5, 0.5)}}, 4, {}, "2 shares for 4 ranks"),
        ({"method": "half"}, 2, {}, "cannot run yet with method 'half'"),
        ({"method": "local_sgd"}, 2, {}, "cannot run yet with method 'local_sgd'"),
        ({"method": "ddp"}, 2, {"sequence_length": 63}, "cannot be divided evenly"),
        ({"method": "ddp", "cp": 8}, 8, {}, "4 heads with keys of their own"),
        ({"method": "ddp", "cp": 4}, 4, {"sequence_length": 4}, "at least 2 positions for each"),
        ({"method": "ddp", "cp": 3}, 2, {}, "needs 3 ranks"),
        ({"method": "ddp", "context_exchange": "ring"}, 2, {"sequence_length": 62}, "into 4 equal parts"),
        ({"method": "ddp", "context_split": "plain"}, 2, {}, "all-to-alls exchange sequences in their order"),
        ({"method": "ddp", "cp": 1, "context_exchange": "ring"}, 2, {}, "no context-parallel ranks"),
        ({"method": "ddp", "cp": 1, "context_overlap": False}, 2, {}, "context_overlap = false: there are no context"),
        (
            {"method": "ddp", "context_overlap": False},
            2,
            {},
            "context_overlap = false: all-to-alls overlap with nothing",
        ),
        ({"method": "ddp", "context_exchange": "ring"}, 2, {"model": COMPOSED, "sequence_length": 24}, "as one kernel"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(plan, ranks, workload, message):
    with pytest.raises(UserError, match=message):
        scenario({"cp": 2} | plan, ranks, **workload)


RING = {"method": "ddp", "context_exchange": "ring"}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_moves_keys_and_values_once_forward_and_their_gradients_too_backward(ranks):
    """Liu et al. 2023: n - 1 shifts of keys and values in each pass, and n of their gradients; each of 2*b*s*h/n."""
    found = simulate(loaded_of(scenario(RING | {"cp": ranks}, ranks, sequence_length=48))).result.collectives
    (entry,) = [each for each in found if each.kind == "all-to-all-v"]
    own_bytes = 2 * SAMPLES * 48 // ranks * WIDTH * VALUE_BYTES
    assert (entry.bytes, entry.count) == (ranks * own_bytes, ((ranks - 1) + (2 * ranks - 1)) * LAYERS)
    assert {each.kind for each in found} == {"all-to-all-v", "all-reduce"}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gathered_keys_move_as_often_as_in_a_ring_and_their_gradients_go_around(ranks, backend):
    """torch's context parallelism: an all-gather in each pass, and n shifts of gradients."""
    cluster = star(ranks, backend=backend, types={"fast": device_type(kind="cuda")} if backend == "nccl" else None)
    plan = RING | {"context_exchange": "gather", "cp": ranks}
    asked = scenario_of(cluster, plan, model=GPT, sequence_length=48, global_batch_size=SAMPLES)
    found = {each.kind: each for each in simulate(loaded_of(asked)).result.collectives}
    whole_bytes = 2 * SAMPLES * 48 * WIDTH * VALUE_BYTES
    assert (found["all-gather"].bytes, found["all-gather"].count) == (whole_bytes, 2 * LAYERS)
    assert (found["all-to-all-v"].bytes, found["all-to-all-v"].count) == (whole_bytes, ranks * LAYERS)
    assert {*found} == {"all-gather", "all-to-all-v", "all-reduce"}


@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_gradients_of_keys_go_around_gpus_in_fp32(exchange):
    """torch 2.13, _templated_ring_attention_backward: they are added up in `accum_dtype` and concatenated as such."""
    rates = {"fp32": 1e12, "bf16": 1e12}
    cluster = star(2, backend="nccl", types={"fast": device_type(kind="cuda", peak_flop_per_s=rates)})
    plan = RING | {"context_exchange": exchange, "cp": 2}
    asked = scenario_of(cluster, plan, model=GPT, sequence_length=48, global_batch_size=SAMPLES, precision="bf16")
    found = simulate(loaded_of(asked)).result.collectives
    counts = {each.bytes: each.count for each in found if each.kind == "all-to-all-v"}
    keys_bytes = 2 * SAMPLES * 48 * WIDTH * 2
    assert counts == {2 * keys_bytes: 2 * LAYERS} | ({keys_bytes: 2 * LAYERS} if exchange == "ring" else {})


def test_gathered_keys_hide_behind_one_block_and_stay_for_all_of_them():
    """In a ring the exchange of each block hides behind the block before, and two ranks' keys are held at a time."""
    own_bytes = 2 * SAMPLES * 256 // 4 * WIDTH * VALUE_BYTES

    def asked(exchange: str, bandwidth: float) -> Scenario:
        cluster = star(4, bandwidth=bandwidth, latency_s=0.0)
        plan = RING | {"context_exchange": exchange, "cp": 4}
        return scenario_of(cluster, plan, model=GPT, sequence_length=256, global_batch_size=SAMPLES)

    blocks = [task.duration_s for task in lower(asked("ring", 1e9)).tasks[0] if task.id.op == "attend"]
    at_rate = own_bytes / min(blocks)  # an exchange takes as long as the shortest block
    ring, gather = (simulate(loaded_of(asked(each, at_rate))).result for each in ("ring", "gather"))
    assert gather.step_time_s > ring.step_time_s + 2 * LAYERS * min(blocks)
    attends = [task for task in lower(asked("gather", at_rate)).tasks[0] if task.id.op == "attend"]
    first, *_, last = attends[:4]  # of the first layer's forward
    assert (first.need.events[0].size_bytes, last.need.events[-1].size_bytes) == (4 * own_bytes, -4 * own_bytes)


def test_fewer_heads_of_keys_go_around_as_such():
    """Llama 3 8B: 8 heads of keys and values, each of 128; in bf16."""
    part = block(context_part(LLAMA, 64, ring=True).layers)
    sizes = [each.size_bytes.at(b=1, s=256) for each in part.reductions]
    all_to_all = [each.size_bytes.held(0, 64).at(b=1, s=256) for each in block(LLAMA.context_layers).reductions]
    assert sizes == [all_to_all[1] + all_to_all[2]] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_plain_ring_keeps_its_last_rank_busy_while_others_wait(ranks):
    """Under a causal mask, rank i of n attends to i + 1/2 blocks of keys; balanced, every rank attends to n / 2.

    A block's output is merged into 7 bytes moved per byte of its rows, its gradients are added by 3 per byte. Before,
    queries and what is sent are copied, of a forward, and the gradients that are sent, of a backward.
    """

    def attention_s(split: str) -> list[float]:
        asked = scenario(RING | {"cp": ranks, "context_split": split}, ranks, sequence_length=64)
        out = SAMPLES * 64 // ranks * WIDTH * VALUE_BYTES
        sums_s = []
        for rank, tasks in enumerate(lower(asked, unfolded=True).tasks):
            before, behind = rank, ranks - 1 - rank
            rows, keys = (before + behind / 2, before / 2 + behind) if split == "zigzag" else (before, before)
            moved = LAYERS * out * (2 * (1 + 2) + 7 * rows + 2 * 2 + 3 * (rows + 2 * keys))
            merges_s = moved / asked.cluster.type_of(rank).memory_bandwidth_bytes_per_s
            sums_s.append(sum(task.duration_s for task in tasks if task.id.op == "attend") - merges_s)
        return sums_s

    zigzag, plain = attention_s("zigzag"), attention_s("plain")
    assert zigzag == pytest.approx([zigzag[0]] * ranks)
    assert sum(plain) == pytest.approx(sum(zigzag))
    assert plain == pytest.approx([(2 * rank + 1) * plain[0] for rank in range(ranks)])
    assert max(plain) / zigzag[0] == pytest.approx((2 * ranks - 1) / ranks)


def test_a_ring_overlaps_its_shifts_with_its_blocks():
    """On a fast network nothing of the forward's shifts is exposed; on a slow one the last blocks wait."""

    def step_s(latency_s: float) -> float:
        cluster = star(4, latency_s=latency_s)
        asked = scenario_of(cluster, RING | {"cp": 4}, model=GPT, sequence_length=64, global_batch_size=SAMPLES)
        return simulate(loaded_of(asked)).result.step_time_s

    assert step_s(1e-6) < step_s(1e-2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("exchange", ["ring", "gather"])
def test_exchanges_that_are_waited_for_take_their_whole_time(ranks, exchange):
    """Otherwise they overlap with the blocks' attention, except the last shift of gradients, and gathers.

    Of n ranks a ring has n - 1 exchanges in a forward, and 2n - 1 in a backward.
    """
    own_bytes = 2 * SAMPLES * 256 // ranks * WIDTH * VALUE_BYTES

    def asked(bandwidth: float, *, overlap: bool) -> Scenario:
        cluster = star(ranks, bandwidth=bandwidth, latency_s=0.0)
        plan = RING | {"context_exchange": exchange, "cp": ranks, "context_overlap": overlap, "overlap": False}
        return scenario_of(cluster, plan, model=GPT, sequence_length=256, global_batch_size=SAMPLES)

    blocks = [task.duration_s for task in lower(asked(1e9, overlap=True)).tasks[0] if task.id.op == "attend"]
    whole = (ranks - 1) * own_bytes  # that a rank sends of keys and values in a pass
    sent_bytes = 2 * whole + (ranks - 1) * own_bytes  # both passes' keys, gradients but for their last shift

    def waits_s(rate: float) -> float:
        step_times_s = [simulate(loaded_of(asked(rate, overlap=each))).result.step_time_s for each in (False, True)]
        return step_times_s[0] - step_times_s[1]

    rate = 2 * whole / min(blocks)  # of two, since a host's copies of what it sends do not depend on the rate
    assert waits_s(rate) - waits_s(2 * rate) == pytest.approx(LAYERS * sent_bytes / (2 * rate))


def test_gradients_that_were_waited_for_are_freed_before_the_next_block():
    """The backward then holds a rank's keys and values once less, while it attends to a block."""

    def held(*, overlap: bool) -> list[float]:
        tasks = lower(scenario(RING | {"cp": 4, "context_overlap": overlap}, 4, sequence_length=64)).tasks[0]
        first = next(i for i, task in enumerate(tasks) if task.id.op == "attend" and task.id.during == "backward")
        ring = [task for task in tasks[first:] if task.need.events][:8]
        sizes, sums = [event.size_bytes for task in ring for event in task.need.events], [0.0]
        for size in sizes:
            sums.append(sums[-1] + size)
        return sums

    own_bytes = 2 * SAMPLES * 64 // 4 * WIDTH * VALUE_BYTES
    assert max(held(overlap=True)) - max(held(overlap=False)) == own_bytes


@pytest.mark.parametrize(("changes", "uneven"), [({}, True), ({"cp": 2}, False), ({"recompute": "none"}, False)])
def test_compiled_ranks_that_attend_first_let_the_others_wait_for_all_their_blocks(changes, uneven, monkeypatch):
    """Gradients of the first block are sent when one rank has attended to all n, the others then have n - 1 left."""
    plan = RING | {"context_exchange": "gather", "context_overlap": False, "recompute": "full", "cp": 4} | changes
    cluster = star(plan["cp"], backend="nccl", bandwidth=1e15, types={"fast": device_type(kind="cuda")})
    loaded = loaded_of(scenario_of(cluster, plan, model=GPT, sequence_length=64, global_batch_size=SAMPLES))

    def taken() -> tuple[float, list[float]]:
        ranks = lower(loaded.scenario).tasks
        return simulate(loaded).result.step_time_s, [sum(e.size_bytes for t in r for e in t.need.events) for r in ranks]

    step_s, left_bytes = taken()
    in_backward = [t for t in lower(loaded.scenario).tasks[0] if t.id.op == "attend" and t.id.during == "backward"]
    later_s = sum(task.duration_s for task in in_backward if task.id.part)
    monkeypatch.setattr("gssim.program.ring._attends_first", lambda *_: False)
    even_s, even_left_bytes = taken()
    assert step_s - even_s == pytest.approx(uneven * later_s, rel=0.01, abs=1e-12)
    assert left_bytes == pytest.approx(even_left_bytes)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("split", ["zigzag", "plain"])
def test_equal_ranks_of_rings_are_simulated_once_with_the_same_result(split, overlap):
    plan = RING | {"method": "zero3", "cp": 2, "context_split": split, "recompute": "full", "context_overlap": overlap}
    loaded = loaded_of(scenario(plan, 4))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


def test_images_have_no_sequences():
    model = load_model(FOLDER / "scenarios" / "models" / "resnet-digits.toml")
    with pytest.raises(UserError, match="no loss at each position"):
        scenario({"method": "ddp", "cp": 2}, model=model, sequence_length=None)


@pytest.mark.parametrize(
    ("axis", "model", "names", "slowest"),
    [("cp", "gpt-byte-1m", "fast slow fast slow", 0), ("ep", "mixture-byte-1m", "slow fast slow slow", 1)],
)
def test_members_of_an_exchange_that_starts_pair_by_pair_are_not_equal(axis, model, names, slowest):
    """gloo: a device leaves the exchange once its own messages have arrived, which depends on its rank."""
    fast, slow = (device_type(peak_flop_per_s={"fp32": rate}, memory_bandwidth_bytes_per_s=1e10) for rate in (2e9, 1e9))
    cluster = star(4, types={"fast": fast, "slow": slow}, type_names=names.split(), bandwidth=1e8)
    links = list(cluster.links)
    links[slowest] = replace(links[slowest], bandwidth_bytes_per_s=2e7)
    workload = {"model": load_model(FOLDER / f"scenarios/models/{model}.toml"), "sequence_length": 48}
    asked = scenario_of(
        replace(cluster, links=tuple(links)), {"method": "zero2", axis: 4}, global_batch_size=24, **workload
    )
    assert_same_as_unfolded(simulate(loaded_of(asked)).result, simulate(loaded_of(asked), unfolded=True).result)


def test_groups_that_start_pair_by_pair_with_other_samples_are_told_apart():
    fast, slow = (device_type(peak_flop_per_s={"fp32": rate}) for rate in (2e9, 1e9))
    cluster = star(8, types={"fast": fast, "slow": slow}, type_names=["fast", "slow", "slow", "slow"] * 2)
    plan = {"method": "ddp", "cp": 4, "shares": {"batch": (0.25, 0.75)}}
    asked = scenario_of(cluster, plan, model=GPT, sequence_length=LENGTH, global_batch_size=SAMPLES)
    assert_same_as_unfolded(simulate(loaded_of(asked)).result, simulate(loaded_of(asked), unfolded=True).result)
