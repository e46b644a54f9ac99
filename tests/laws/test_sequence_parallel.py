"""Laws and closed forms: sequences divided among tensor-parallel ranks; Korthikanti et al. 2022, arXiv 2205.05198."""

from collections import Counter
from math import prod
from pathlib import Path

import pytest
from point_checks import assert_same_as_unfolded
from strategies import device_type, loaded_of, scenario_of, star

from gssim.errors import UserError
from gssim.program import Task, lower, without_messages
from gssim.scenario import load_model
from gssim.scenario.tensor_slices import Slicing, model_slice
from gssim.simulation import simulate
from gssim.workload import Layer, Parameter, Polynomial, Reduction

OLMO2 = Path(__file__).resolve().parents[1] / "helpers" / "models" / "of_tests" / "decoder-olmo2.toml"
MODELS = Path(__file__).resolve().parents[2] / "scenarios" / "models"
HELPERS = Path(__file__).resolve().parents[1] / "helpers"
GPT = load_model(MODELS / "gpt-byte-1m.toml")
WIDTH, HEADS, LAYERS, VALUE_BYTES = 144, 4, 4, 4
DIVIDED = {"method": "tensor", "sequence_parallel": True}


def scenario(plan: dict, ranks: int = 2, **workload):
    return scenario_of(star(ranks), plan, model=GPT, sequence_length=64, global_batch_size=12, **workload)


def block(layers) -> Layer:
    return next(layer for layer in layers if layer.block)


@pytest.mark.parametrize("text", ["8*b*s + 4*b*p", "3*p", "2*b*u + 5*b*p"])
def test_a_polynomial_in_positions_survives_its_text(text):
    assert str(Polynomial.parse(text)) == text


def test_what_depends_on_positions_and_rows_at_once_is_refused():
    with pytest.raises(ValueError, match="u up to 1, p or a beside it too, or r or e instead"):
        Polynomial.parse("3*p*r")


def test_collectives_and_summed_gradients_survive_their_text():
    for text in ("f1 all-gather 4*b*s", "b3 reduce-scatter 4*b*s", "f1 4*b"):
        assert str(Reduction.parse(text)) == text
    assert str(Parameter.parse("{}.weight 8 b0 b1 summed")) == "{}.weight 8 b0 b1 summed"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_block_saves_what_korthikanti_and_others_count(ranks):
    """Section 4.2.2, equation 4: s*b*h/t*(34 + 5as/h) bytes at 2 bytes a value, all of a block's activations over t.

    Without dropout its 34 is 32: the inputs of both norms and of both pairs of linear maps (8), and 24 of the tensors
    that tensor parallelism alone divides. torch keeps the gathered inputs of both pairs, where Megatron-LM keeps a
    rank's part and gathers again: s*b*h more, twice, less the parts. Flash attention keeps the logarithm of a sum for
    each row of a head in place of 5as/h; each norm keeps two statistics of each position.
    """
    b, s = 3, 64

    def held(**how) -> Layer:
        return block(model_slice(GPT, (1 / ranks,) * ranks, 0, Slicing(**how), positions=s // ranks).layers)

    def own_bytes(layer: Layer) -> float:  # without its input, which the layer before it makes
        return sum(each.size_bytes.at(b=b, s=s) for each in layer.buffers if each.is_saved)

    published = s * b * WIDTH * 32 / ranks * VALUE_BYTES / 2
    gathered = 2 * s * b * WIDTH * VALUE_BYTES
    statistics = s * b * VALUE_BYTES * (HEADS + 4) / ranks
    saved = held().saved_bytes.at(b=b, s=s)
    assert saved == published + gathered * (1 - 1 / ranks) + statistics
    assert saved - own_bytes(held()) + own_bytes(held(gathers_again=True)) == published + statistics


def test_a_block_has_two_gathers_and_two_reduce_scatters_in_each_pass():
    """Section 4.2.2: in the place of two all-reduces; in a ring they move the same bytes."""
    kinds = [(each.moment.phase, each.kind) for each in block(GPT.sequence_layers).reductions]
    once = ["all-gather", "reduce-scatter"] * 2
    assert kinds == [("f", kind) for kind in once] + [("b", kind) for kind in once]
    assert {each.size_bytes for each in block(GPT.sequence_layers).reductions} == {
        Polynomial.parse(f"{VALUE_BYTES * WIDTH}*b*s")
    }


def test_products_of_matrices_are_those_of_whole_sequences():
    for name in ("forward_flop", "backward_flop"):
        assert getattr(block(GPT.sequence_layers), name) == getattr(block(GPT.sliced_layers), name)


def test_parameters_are_held_as_without():
    for own, usual in zip(GPT.sequence_layers, GPT.sliced_layers, strict=True):
        assert [(p.name, p.shape, p.cut) for p in own.parameters] == [
            (p.name, p.shape, p.cut) for p in usual.parameters
        ]


def test_all_ranks_gather_scatter_and_sum_once_what_they_run_on_parts():
    entries = {entry.kind: entry for entry in simulate(loaded_of(scenario(DIVIDED))).result.collectives}
    whole_bytes = 12 * 64 * WIDTH * VALUE_BYTES
    # two of a block in each pass, and one each at the ends of the stack: its first input's gradient, its norm's output
    assert (entries["all-gather"].bytes, entries["all-gather"].count) == (whole_bytes, 4 * LAYERS + 2)
    assert (entries["reduce-scatter"].bytes, entries["reduce-scatter"].count) == (whole_bytes, 4 * LAYERS)
    norms_bytes = (2 * LAYERS + 1) * 2 * WIDTH * VALUE_BYTES
    assert (entries["all-reduce"].bytes, entries["all-reduce"].count) == (norms_bytes, 1)


@pytest.mark.parametrize(
    ("precision", "gradients", "value_bytes"), [("fp32", None, 4), ("bf16", "fp32", 4), ("bf16", None, 2)]
)
def test_megatrons_distributed_optimizer_sums_norms_in_its_buffer_after_its_reduce_scatter(
    precision, gradients, value_bytes
):
    plan = {"method": "zero1", "tp": 2, "dp_replicate": 2, "sequence_parallel": True}
    plan |= {"zero1_implementation": "megatron", "bucket_bytes": "1024 TiB"}
    workload = {"precision": precision, "gradient_precision": gradients, "reduce_precision": gradients}
    made = scenario(plan, 4, **workload)
    norms = (2 * LAYERS + 1) * 2 * WIDTH
    entries = simulate(loaded_of(made)).result.collectives
    of_slices = [each for each in entries if each.kind in ("all-reduce", "reduce-scatter") and 1 in each.group]
    held = sum(
        each.elements for layer in model_slice(GPT, (0.5, 0.5), 0).layers for each in layer.parameters * layer.repeats
    )
    assert {(each.kind, each.group, each.count, each.bytes) for each in of_slices} >= {
        ("all-reduce", (0, 1), 1, norms * value_bytes),
        ("reduce-scatter", (1, 3), 1, held * value_bytes),
    }
    labels = [task.label for task in lower(made).tasks[0]]
    scattered, summed, updated = (
        labels.index(each) for each in ("wait for all-reduce", "all-reduce partial gradients", "optimizer")
    )
    assert scattered < summed < updated


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_inputs_that_are_gathered_again_take_less_memory_two_more_gathers_of_a_block_and_hardly_time(recompute):
    kept, again = (
        simulate(loaded_of(scenario(DIVIDED | {"recompute": recompute, "gathered_inputs": each}))).result
        for each in ("kept", "gathered-again")
    )
    assert again.ranks[0].peak_allocated_bytes < kept.ranks[0].peak_allocated_bytes
    counts = [next(e.count for e in each.collectives if e.kind == "all-gather") for each in (kept, again)]
    assert counts[1] - counts[0] == 2 * LAYERS
    assert kept.step_time_s < again.step_time_s  # over slow links, which more than fill the time of the products
    fast = star(2, bandwidth=1e15, latency_s=0.0)
    made = (
        scenario_of(fast, DIVIDED | {"gathered_inputs": each}, model=GPT, sequence_length=64, global_batch_size=12)
        for each in ("kept", "gathered-again")
    )
    hidden = [simulate(loaded_of(each)).result.step_time_s for each in made]
    assert hidden[0] == pytest.approx(hidden[1], rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_it_saves_memory(recompute):
    def peak(**plan) -> float:
        table = {"method": "tensor", "recompute": recompute} | plan
        return simulate(loaded_of(scenario(table, 4))).result.ranks[0].peak_allocated_bytes

    assert peak(sequence_parallel=True) < peak()


def test_messages_of_a_pipeline_are_parts_of_sequences():
    def sent(**plan) -> float:
        table = {"method": "pipeline", "tp": 2, "pp": 2, "micro_batches": 4} | plan
        found = simulate(loaded_of(scenario(table, 4))).result.collectives
        return sum(entry.bytes * entry.count for entry in found if entry.kind == "send")

    assert sent(sequence_parallel=True) == sent() / 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("name", "before"), [("gpt-byte-1m", 1), ("tiny-gpt2", 2), ("tiny-llama", 2)])
def test_a_stage_that_begins_with_the_first_block_divides_its_input(name, before, schedule):
    """Messages are whole sequences, of which that stage alone copies parts and gathers gradients."""
    folder = HELPERS / "models/of_tests" if name.startswith("tiny") else MODELS
    model = load_model(folder / f"{name}.toml")
    count = sum(len(each.modules) for each in model.layers)
    plan = {"method": "pipeline", "tp": 2, "pp": 2, "micro_batches": 4, "schedule": schedule}
    shape = {"model": model, "global_batch_size": 12, "sequence_length": 24}

    def simulated(stages):
        cut = scenario_of(star(4), plan | {"sequence_parallel": True, "stages": stages}, **shape)
        return simulate(loaded_of(cut))

    result = simulated((before, count - before))
    for tasks in result.typical.machine.program.tasks:
        left = Counter()
        for part in without_messages(tasks):
            left.update(dict((part.need if isinstance(part, Task) else part.template.need).kept))
        assert not any(left.values())
    counts = Counter((entry.kind, entry.group) for entry in result.result.collectives for _ in range(entry.count))
    inside = simulated((before + 1, count - before - 1)).result
    both = Counter((entry.kind, entry.group) for entry in inside.collectives for _ in range(entry.count))
    of_sequences = [key for key in counts if key[0] == "all-gather"]
    assert {group for _, group in of_sequences} == {(2, 3)}
    assert sum(counts[key] for key in of_sequences) == sum(n for key, n in both.items() if key[0] == "all-gather")
    sent, sent_parts = (
        {entry.bytes for entry in each.collectives if entry.kind == "send"} for each in (result.result, inside)
    )
    assert sent == {2 * size for size in sent_parts}


def test_every_stage_with_blocks_has_the_rotary_angles():
    """The layer that makes them is also that after which sequences are divided: then its outputs depend on samples."""
    model = load_model(HELPERS / "models/of_tests/tiny-llama.toml")
    plan = {"method": "pipeline", "tp": 2, "pp": 2, "micro_batches": 4, "stages": (3, 3), "sequence_parallel": True}
    lowered = lower(scenario_of(star(4), plan, model=model, global_batch_size=12, sequence_length=24))
    for tasks in lowered.tasks:
        named = [task.id.layer for task in tasks if task.id.op == "forward"]
        assert named.count("model.rotary_emb") == 4


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ({"method": "tensor"}, 4),
        ({"method": "ddp", "tp": 2, "dp_replicate": 2, "micro_batches": 2}, 4),
        ({"method": "zero3", "tp": 2, "dp_shard": 2}, 4),
        ({"method": "zero1", "zero1_implementation": "megatron", "tp": 2, "dp_replicate": 2}, 4),
        ({"method": "ddp", "tp": 2, "dp_replicate": 2, "gathered_inputs": "gathered-again", "recompute": "full"}, 4),
        ({"method": "pipeline", "tp": 2, "pp": 2, "micro_batches": 4}, 4),
        ({"method": "gs", "tp": 2, "shares": {"shards": (0.4, 0.6)}}, 4),
        ({"method": "gs_z3", "tp": 2, "micro_batches": 2, "recompute": "full"}, 8),
        ({"method": "gs_hier", "tp": 2, "dp_replicate": 2, "dp_shard": 2}, 8),
    ],
    ids=str,
)
def test_equal_ranks_are_simulated_once_with_the_same_result(plan, ranks):
    loaded = loaded_of(scenario(plan | {"sequence_parallel": True}, ranks))
    assert_same_as_unfolded(simulate(loaded).result, simulate(loaded, unfolded=True).result)


@pytest.mark.parametrize("method", ["gs", "gs_z3", "gs_hier"])
def test_owners_sum_their_parts_of_the_gradients_of_norms(method):
    """All that ranks run on parts of sequences, once in all: as many bytes as replicas sum whole on each rank."""

    def summed(plan: dict, ranks: int) -> list[tuple[tuple[int, ...], int]]:
        found = simulate(loaded_of(scenario(plan | {"tp": 2, "sequence_parallel": True}, ranks))).result.collectives
        return [(each.group, each.bytes) for each in found if (each.kind, each.count) == ("all-reduce", 1)]

    ((_, whole),) = summed({"method": "tensor"}, 2)
    axes = {"dp_replicate": 2, "dp_shard": 2} if method == "gs_hier" else {"dp_shard": 4}
    owned = summed({"method": method, "shares": {"shards": (0.4, 0.3, 0.2, 0.1)}} | axes, 8)
    assert len(owned) > 1
    assert {group for group, _ in owned} <= {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert sum(size for _, size in owned) == whole


def test_owners_that_would_sum_other_parts_are_refused():
    """Devices of two speeds in a tensor group, whose owners get shards by their speed."""
    kinds = {"slow": device_type(), "fast": device_type(peak_flop_per_s={"fp32": 2e9})}
    cluster = star(4, types=kinds, type_names=["slow", "fast", "fast", "fast"])
    plan = {"method": "gs", "tp": 2, "sequence_parallel": True, "shares": {"shards": "compute"}}
    with pytest.raises(UserError, match="would own other parts of them"):
        scenario_of(cluster, plan, model=GPT, sequence_length=64, global_batch_size=12)


def test_shards_are_reduced_once_a_blocks_whole_backward_is_done():
    program = lower(scenario({"method": "zero3", "tp": 2, "dp_shard": 2, "sequence_parallel": True}, 4))
    labels = [task.label for task in program.tasks[0]]
    last = max(i for i, label in enumerate(labels) if label.startswith("backward blocks.3"))
    assert labels.index(next(each for each in labels if each.startswith("reduce-scatter blocks.3"))) > last


@pytest.mark.parametrize(
    ("plan", "ranks", "message"),
    [
        ({"method": "ddp"}, 2, "there are no tensor-parallel ranks"),
        ({"method": "gs_wgrad"}, 2, "there are no tensor-parallel ranks"),
        ({"method": "zero1", "zero1_implementation": "deepspeed", "tp": 2}, 4, "allowed: 'torch', 'megatron'"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused(plan, ranks, message):
    with pytest.raises(UserError, match=message):
        scenario(plan | {"sequence_parallel": True}, ranks)


def test_inputs_that_nothing_gathers_are_not_gathered_again():
    with pytest.raises(UserError, match="nothing is gathered"):
        scenario({"method": "tensor", "gathered_inputs": "gathered-again"})


def test_a_length_that_ranks_do_not_divide_is_refused():
    with pytest.raises(UserError, match=r"cannot be divided evenly among plan\.tp = 4"):
        scenario_of(star(4), DIVIDED, model=GPT, sequence_length=30, global_batch_size=12)


def test_images_have_no_sequences():
    model = load_model(MODELS / "resnet-digits.toml")
    with pytest.raises(UserError, match="is no sequence"):
        scenario_of(star(2), DIVIDED, model=model, sequence_length=None, global_batch_size=12)


@pytest.mark.parametrize(("ranks", "least_ratio"), [(2, 1.0), (4, 0.9)])
def test_products_hide_their_part_of_an_exchange(ranks, least_ratio):
    """(n - 1) / n of a product's time overlaps its exchange, for all maps of a block, forward and backward.

    At most the part of the pass between two exchanges, whose time is by its operations.
    """
    flop_per_s, tokens = 1e9, 12 * 64

    def step_s(bandwidth: float, **more) -> float:
        made = star(ranks, bandwidth=bandwidth, backend="nccl")
        plan = DIVIDED | more
        return simulate(
            loaded_of(scenario_of(made, plan, model=GPT, sequence_length=64, global_batch_size=12))
        ).result.step_time_s

    products_s = 2 * LAYERS * 2 * tokens * 12 * WIDTH**2 / ranks / flop_per_s
    hidden_ratio = (step_s(1e5) - step_s(1e5, tp_overlap=True)) / ((ranks - 1) / ranks * products_s)
    assert least_ratio - 1e-6 < hidden_ratio < 1 + 1e-6
    assert step_s(1e15) == pytest.approx(step_s(1e15, tp_overlap=True), rel=1e-6)


@pytest.mark.parametrize("key", ["tp_overlap", "async_input_gradients"])
def test_products_that_memory_bounds_hide_as_much_at_any_flop_per_s(key):
    """They took their FLOP at the rate alone: at a higher rate they hid less, and the step was longer."""

    def step_s(flop_per_s: float, **more) -> float:
        slow = device_type(peak_flop_per_s={"fp32": flop_per_s}, memory_bandwidth_bytes_per_s=1e7)
        made = star(2, types={"cpu": slow}, bandwidth=1e5, backend="nccl")
        scenario = scenario_of(made, DIVIDED | more, model=GPT, sequence_length=64, global_batch_size=12)
        return simulate(loaded_of(scenario)).result.step_time_s

    slow_s, fast_s, alone_s = step_s(1e10, **{key: True}), step_s(1e12, **{key: True}), step_s(1e12)
    assert fast_s == pytest.approx(slow_s, rel=1e-9)
    assert fast_s < 0.99 * alone_s


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_on_gloo_rings_carry_each_part_once_and_products_hide_their_part_of_them(ranks):
    """Between slow links, a step is what they carry, and what is computed before and after the exchanges.

    A link carries (n - 1) / n of each tensor that is gathered or scattered: gloo's own reduce-scatter moves twice that.
    The devices copy in no time.
    """
    flop_per_s, tokens = 1e9, 12 * 48
    plan = {"method": "gs_tp", "sequence_parallel": True, "tp_overlap": True}
    plan["shares"] = {"shards": [0.5, 0.25, 0.25] if ranks == 3 else "even"}

    def predicted(bandwidth: float):
        made = star(ranks, bandwidth=bandwidth, types={"cpu": device_type(memory_bandwidth_bytes_per_s=1e15)})
        return simulate(loaded_of(scenario_of(made, plan, model=GPT, sequence_length=48, global_batch_size=12))).result

    slow, slower, fast = map(predicted, (1e5, 5e4, 1e15))
    passes = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
    carried_bytes = sum(passes[each.kind] * (ranks - 1) / ranks * each.bytes * each.count for each in slow.collectives)
    carried_s = slower.step_time_s - slow.step_time_s  # at the higher of the two bandwidths
    assert carried_s == pytest.approx(carried_bytes / 1e5, rel=1e-3)
    hidden_s = fast.step_time_s - (slow.step_time_s - carried_s)
    products_s = 2 * LAYERS * 2 * tokens * 12 * WIDTH**2 * max(1 / 2 if ranks == 3 else 0, 1 / ranks) / flop_per_s
    assert 0.9 < hidden_s / ((ranks - 1) / ranks * products_s) < 1 + 1e-6


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gloo_parts_of_products_are_copied(ranks):
    """An exchange copies what is on the cut side of its maps, beyond the copy of what it carries that it saves.

    Of w values at a position, 3 and 4 w / n are cut of the first maps (queries, keys and values; the perceptron's), and
    w and 4 w / n of the maps that follow. Gradients of the first maps' outputs are copied once more for their weights.
    Gathers of gradients save no copy.
    """
    sides = {"gather": (3, 4), "scatter": (1, 4), "gather gradients": (1, 4), "scatter gradients": (6, 8)}
    saved = {"gather gradients": 0.0}
    widths = sum(max(0.0, side / ranks - saved.get(kind, 1)) for kind, of_maps in sides.items() for side in of_maps)
    kind = device_type(memory_bandwidth_bytes_per_s=1e7)
    made = star(ranks, bandwidth=1e15, types={"cpu": kind})
    after_s, beside_s = (
        simulate(
            loaded_of(scenario_of(made, DIVIDED | more, model=GPT, sequence_length=64, global_batch_size=12))
        ).result.step_time_s
        for more in ({}, {"tp_overlap": True})
    )
    copied_bytes = LAYERS * 12 * 64 * WIDTH * VALUE_BYTES * widths
    assert beside_s - after_s == pytest.approx(2 * copied_bytes / 1e7, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_on_gloo_exchanges_beside_products_are_the_same_exchanges_in_less_time(recompute):
    """They have no buffers outside the allocator, and products slow down beside them where that was measured."""

    def predicted(slowdown_ratio: float = 1.0, **more):
        kind = device_type(communicating_slowdown_ratio=slowdown_ratio)
        made = star(2, bandwidth=1e8, types={"cpu": kind})
        plan = DIVIDED | {"recompute": recompute} | more
        return simulate(loaded_of(scenario_of(made, plan, model=GPT, sequence_length=64, global_batch_size=12))).result

    after, beside, slowed = predicted(), predicted(tp_overlap=True), predicted(1.5, tp_overlap=True)
    assert beside.collectives == after.collectives
    assert beside.step_time_s < slowed.step_time_s < after.step_time_s
    assert all(not each.outside_bytes.get("exchange_buffers") for each in beside.ranks)


@pytest.mark.parametrize(("inputs", "sequences"), [("gathered-again", 12), ("kept", 2 / 4)])
def test_exchanges_beside_products_have_buffers_outside_the_allocator(inputs, sequences):
    """Twelve of a gathered micro-batch in Transformer Engine, two parts of one (of four) in torch."""
    made = star(4, backend="nccl")
    plan = DIVIDED | {"gathered_inputs": inputs, "micro_batches": 3}
    after, beside = (
        simulate(loaded_of(scenario_of(made, plan | more, model=GPT, sequence_length=64, global_batch_size=12))).result
        for more in ({}, {"tp_overlap": True})
    )
    gathered_bytes = 4 * 4 * 64 * WIDTH
    assert [each.outside_bytes.get("exchange_buffers") for each in after.ranks] == [None] * len(after.ranks)
    assert {each.outside_bytes["exchange_buffers"] for each in beside.ranks} == {sequences * gathered_bytes}
    assert [each.peak_allocated_bytes for each in beside.ranks] == [each.peak_allocated_bytes for each in after.ranks]


@pytest.mark.parametrize(
    ("key", "divides", "least_ratio"),
    [("tp_overlap", True, 0.7), ("async_input_gradients", True, 0.8), ("async_input_gradients", False, 0.99)],
)
def test_sums_of_norms_over_all_heads_are_no_exchanges_beside_products(key, divides, least_ratio):
    """OLMo 2's exchanges hide what the products of its maps take, though the sums of its norms are between them.

    All maps' where sequences are gathered (but keys and values of the forward, which follow the sum of the queries'
    norm), else those of the weight gradients of the maps that are cut by columns.
    """
    model, flop_per_s, tokens, ranks = load_model(OLMO2), 1e9, 12 * 24, 2
    columns, rows = 32 * (32 + 16 + 16 + 48 + 48), 32 * (32 + 48)
    elements = 2 * (columns + rows) if key == "tp_overlap" else columns
    hidden_part = (ranks - 1) / ranks if key == "tp_overlap" else 1.0

    def step_s(bandwidth: float, **more) -> float:
        made = star(ranks, bandwidth=bandwidth, backend="nccl")
        return simulate(
            loaded_of(
                scenario_of(
                    made,
                    DIVIDED | {"sequence_parallel": divides} | more,
                    model=model,
                    sequence_length=24,
                    global_batch_size=12,
                )
            )
        ).result.step_time_s

    products_s = 2 * 2 * tokens * elements / ranks / flop_per_s  # of two blocks
    hidden_ratio = (step_s(1e5) - step_s(1e5, **{key: True})) / (hidden_part * products_s)
    assert least_ratio < hidden_ratio < 1 + 1e-6


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_sums_of_a_norm_that_computes_in_fp32_are_as_large_in_every_precision(precision):
    """OLMo 2's norms over all heads: one number a position, of queries and of keys, in two blocks, there and back."""
    rates = device_type(peak_flop_per_s={"fp32": 1e9, "bf16": 1e9, "fp64": 1e9})
    made = scenario_of(
        star(2, types={"cpu": rates}),
        {"method": "tensor"},
        model=load_model(OLMO2),
        sequence_length=24,
        global_batch_size=12,
        precision=precision,
    )
    counts = {entry.bytes: entry.count for entry in simulate(loaded_of(made)).result.collectives}
    assert counts[4 * 12 * 24] == 2 * 2 * 2


@pytest.mark.parametrize(
    ("divides", "cp", "least_ratio"),
    [(False, 1, 1.0), (True, 1, 1.0), (False, 2, 0.9)],
    ids=["all-reduce", "reduce-scatter", "parts-of-sequences"],
)
def test_products_of_weight_gradients_hide_sums_of_input_gradients(divides, cp, least_ratio):
    """If a sum takes longer than the weight gradient's product, that overlaps completely: the maps of queries, keys and
    values, and the first map of the perceptron.

    At most the part of the pass before the sum, as above. Where the sum takes no time, there is nothing to hide.
    """
    flop_per_s, tokens, ranks = 1e9, 12 * 64 / cp, 2
    axes = {"method": "ddp", "tp": 2, "cp": cp, "overlap": False} if cp > 1 else {}

    def step_s(bandwidth: float, **more) -> float:
        made = star(ranks * cp, bandwidth=bandwidth, backend="nccl")
        plan = DIVIDED | {"sequence_parallel": divides} | axes | more
        return simulate(
            loaded_of(scenario_of(made, plan, model=GPT, sequence_length=64, global_batch_size=12))
        ).result.step_time_s

    products_s = LAYERS * 2 * tokens * 7 * WIDTH**2 / ranks / flop_per_s
    hidden_ratio = (step_s(1e5) - step_s(1e5, async_input_gradients=True)) / products_s
    assert least_ratio - 1e-6 < hidden_ratio < 1 + 1e-6
    assert step_s(1e15) == pytest.approx(step_s(1e15, async_input_gradients=True), rel=1e-6)


@pytest.mark.parametrize("divides", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_sums_of_input_gradients_beside_products_slow_these_down_on_gloo(divides):
    """gloo's threads share the rank's cores: the products that run beside a sum take longer by the measured excess.

    The sums are the same, and hide no more than the products do.
    """

    def predicted(slowdown_ratio: float, **more):
        kind = device_type(communicating_slowdown_ratio=slowdown_ratio)
        plan = DIVIDED | {"sequence_parallel": divides} | more
        made = star(2, bandwidth=1e9, types={"cpu": kind})
        return simulate(loaded_of(scenario_of(made, plan, model=GPT, sequence_length=64, global_batch_size=12))).result

    after, beside, slowed = (
        predicted(1.0),
        predicted(1.0, async_input_gradients=True),
        predicted(1.5, async_input_gradients=True),
    )
    assert beside.collectives == after.collectives
    assert beside.step_time_s < slowed.step_time_s < after.step_time_s
    assert predicted(1.5).step_time_s == pytest.approx(after.step_time_s)


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "gathered_inputs": "gathered-again", "recompute": "full"},
        {"method": "zero3", "tp": 2, "dp_shard": 2},
        {"method": "pipeline", "tp": 2, "pp": 2, "micro_batches": 4, "sequence_parallel": False},
        pytest.param({"method": "ddp", "tp": 2, "dp_replicate": 2, "recompute": "selective"}, marks=pytest.mark.slow),
        pytest.param({"method": "pipeline", "tp": 2, "pp": 2, "micro_batches": 4}, marks=pytest.mark.slow),
        pytest.param({"method": "gs", "tp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exchanges_beside_products_are_the_same_exchanges_in_less_time_and_as_much_memory(plan):
    made = star(prod(plan.get(axis, 1) for axis in ("tp", "pp", "dp_replicate", "dp_shard")), backend="nccl")
    after, beside = (
        simulate(
            loaded_of(scenario_of(made, DIVIDED | plan | more, model=GPT, sequence_length=64, global_batch_size=12))
        ).result
        for more in (
            {},
            {"tp_overlap": True} if plan.get("sequence_parallel", True) else {"async_input_gradients": True},
        )
    )
    assert beside.collectives == after.collectives
    assert beside.step_time_s < after.step_time_s
    assert [each.peak_allocated_bytes for each in beside.ranks] == [each.peak_allocated_bytes for each in after.ranks]


@pytest.mark.parametrize(
    ("plan", "backend", "said"),
    [
        ({"tp_overlap": True, "gathered_inputs": "gathered-again"}, "gloo", "gathered inputs are kept"),
        ({"tp_overlap": True, "recompute": "selective"}, "gloo", "no whole outputs that plan.recompute = 'selective'"),
        ({"tp_overlap": True, "sequence_parallel": False}, "nccl", "no sequences are gathered beside products"),
        ({"tp_overlap": True, "async_input_gradients": True}, "nccl", "reduce-scatters run beside products already"),
        (
            {"method": "ddp", "tp": 1, "sequence_parallel": False, "async_input_gradients": True},
            "nccl",
            "no tensor-par",
        ),
    ],
)
def test_exchanges_that_nothing_can_hide_are_refused(plan, backend, said):
    with pytest.raises(UserError, match=said):
        scenario_of(star(2, backend=backend), DIVIDED | plan, model=GPT, sequence_length=64, global_batch_size=12)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_checkpointed_block_gathers_its_outputs_gradient_before_its_forward_runs_again(recompute):
    """The gather needs no tensor that autograd saved, and the first operation that needs one runs the forward again.

    Its buffers beside what the second forward makes would raise a stage's peak by a gathered tensor.
    """
    tasks = lower(scenario(DIVIDED | {"recompute": recompute})).tasks[0]
    labels = [task.label for task in tasks]
    for number in range(LAYERS):
        name = f"blocks.{number}"
        of_block = [label for label in labels if label.split(" part ")[0].endswith(name) and "forward" not in label]
        gather, again = of_block.index(f"all-gather sequence backward {name}"), of_block.index(f"recompute {name}")
        assert of_block.index(f"backward {name}") < gather < again
        rest = [label for label in of_block[again:] if label.startswith(f"backward {name} part ")]
        assert rest
        assert of_block.index(rest[0]) > max(i for i, label in enumerate(of_block) if "recompute" in label)


def test_rows_that_ranks_do_not_divide_evenly_are_refused_where_owners_sum_gradients_of_norms():
    """The owners of tensor ranks would own other parts of a bucket, and wait for one another for ever.

    With one replica, and so one owner of all, each rank sums all of them.
    """
    plan = {"method": "gs", "tp": 2, "sequence_parallel": True, "embedding_parallel": True, "loss_parallel": True}
    sizes = {"model": load_model(MODELS / "bert-byte-1m.toml"), "sequence_length": 64, "global_batch_size": 12}
    with pytest.raises(UserError, match=r"2 tensor-parallel ranks do not divide the 257 entries .* evenly"):
        loaded_of(scenario_of(star(4), plan | {"dp_shard": 2}, **sizes))
    assert simulate(loaded_of(scenario_of(star(2), plan, **sizes))).result.step_time_s > 0
