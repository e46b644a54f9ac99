"""Automatic mixed precision and TF32: saved bytes against torch's autocast, rates by device, refusals."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from real_runs import star

import gssim
from gssim.errors import UserError
from gssim.memory import LAST, activation_timeline, recomputed_buffers, traced_buffers
from gssim.program.stage_boundary import stage_timeline, stages_of
from gssim.scenario import load_model
from gssim.scenario.device_rates import achieved_flop_per_s
from gssim.scenario.layer_costs import layer_roofline_s, work_of
from gssim.workload import unrolled
from gssim.workload.layer import OPERAND_CASTS
from gssim.workload.model import under_autocast

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SMALL = SCENARIOS.parent / "tests/helpers/models/of_tests"
BATCH, LENGTH = 3, 24
MIXTURE = SMALL / "divided-autocast-mixture.toml"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_saved_bytes_are_those_of_torchs_autocast(family: str, precision: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.model_files.build import DTYPES, build_module, loss_of

    model = under_autocast(load_model(SMALL / f"autocast-{family}.toml"), precision)  # type: ignore[arg-type]
    module = build_module(model.module, where="test")
    tokens = torch.zeros((BATCH, LENGTH), dtype=torch.int64)
    known = {t.untyped_storage()._cdata for t in [*module.parameters(), *module.buffers(), tokens]}
    saved = {}

    def pack(tensor):  # type: ignore[no-untyped-def]
        if tensor.untyped_storage()._cdata not in known:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", DTYPES[precision]):
        loss = loss_of(module(tokens), tokens)
    ours = sum(each.layer.saved_bytes.at(b=BATCH, s=LENGTH) for each in unrolled(model))
    assert ours == sum(storage.nbytes() for storage in saved.values())
    assert loss.requires_grad


def predicted(device: str, *changes: str) -> gssim.Result:
    devices = f'device_types={{gpu="{device}"}}, devices=[{{name="d", type="gpu", host="h"}}], links=[]'
    cluster = f'cluster={{name="one", backend="nccl", source="test", {devices}}}'
    usual = [cluster, "plan.method=single", "workload.sequence_length=128", "workload.global_batch_size=64"]
    return gssim.simulate(gssim.load(SCENARIOS / "demo.toml", [*usual, *changes]))


def test_autocast_keeps_fp32_states_and_messages_and_halves_most_activations() -> None:
    usual, amp = (predicted("a100-sxm-80", *changes) for changes in ([], ["workload.autocast=bf16"]))
    before, after = (each.ranks[0].peak_by_category_bytes for each in (usual, amp))
    assert after["parameters"] == before["parameters"]
    assert after["optimizer"] == before["optimizer"]
    assert 0.5 < after["activations"] / before["activations"] < 0.8


def test_checkpointed_blocks_leave_the_casts_of_their_parameters_until_the_forward_is_over() -> None:
    model = under_autocast(load_model(SMALL / "autocast-gpt.toml"), "bf16")
    layers = unrolled(model)
    lives = partial(recomputed_buffers, autocast=True)
    timeline = activation_timeline(layers, batch_size=BATCH, sequence_length=LENGTH, lives=lives)
    # all linear maps are cast, weights and biases: what norms and embeddings have is not
    cast = [p for each in layers if each.layer.block for p in each.layer.parameters if "norm" not in p.name]
    released = [
        event for event in timeline.at(layers[-1].index, "f") if event.position == LAST and event.size_bytes < 0
    ]
    assert -sum(event.size_bytes for event in released) == sum(2 * p.elements for p in cast)


def test_copies_of_operands_are_those_that_a_cpu_makes() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.measure import MemoryCounter
    from gsreal.model_files.operand_casts import operand_casts

    counter = MemoryCounter(torch.device("cpu"))
    if counter.method != "allocator":
        pytest.skip("no C++ compiler here: allocations are not counted exactly")
    single, of_rows = torch.ones(64, 48), torch.ones(48, dtype=torch.bfloat16)
    half, is_true, number = single.bfloat16(), single.bool(), single.long()
    ops, every, fp32 = torch.ops.aten, 64 * 48, 4
    copied = [  # operation, operands, bytes of copies
        *((op, (single, half), every * fp32) for op in (ops.add.Tensor, ops.mul.Tensor, ops.div.Tensor, ops.gt.Tensor)),
        *((op, (half, single), every * fp32) for op in (ops.sub.Tensor, ops.maximum.default, ops.rsub.Tensor)),
        (ops.add.Tensor, (single, of_rows), 48 * fp32),
        (ops.add.Tensor, (single, of_rows.expand(64, 48)), every * fp32),
        (ops.add.Tensor, (single[:, ::2], half[:, ::2]), every // 2 * fp32),
        (ops.mul.Tensor, (single, is_true), every * fp32),
        (ops.mul.Tensor, (half, is_true), every * 2),
        (ops.add.Tensor, (number, 1.5), every * fp32),
        (ops.add_.Tensor, (single, half), every * fp32),
        (ops.mul_.Tensor, (half, single), 2 * every * fp32),  # what it reads, and what it writes
        (ops.addcmul.default, (single, half, half), 2 * every * fp32),
        (ops.where.self, (is_true, single, half), every * fp32),
        (ops.sum.default, (is_true,), every * 8),
        (ops.cumsum.default, (is_true, -1), every * 8),
        (ops.mean.dim, (half, [-1]), (every + 64) * fp32),
        (ops.exp.default, (number,), every * fp32),
    ]
    copied += [  # of one data type, or converted while it is read
        *((op, (single, single), 0) for op in (ops.add.Tensor, ops.mul_.Tensor, ops.copy_.default)),
        *((op, (half, 2.0), 0) for op in (ops.mul.Tensor, ops.pow.Tensor_Scalar, ops.lt.Scalar)),
        (ops.copy_.default, (single, half), 0),
        (ops.masked_fill.Scalar, (half, is_true, 0.0), 0),
        (ops.where.ScalarOther, (is_true, half, 0.0), 0),
        (ops.sum.dim_IntList, (half, [-1]), 0),
        (ops.mul.Tensor, (half, torch.ones(())), 0),
    ]
    for operation, operands, size in copied:
        before = counter.alive()
        counter.reset()
        result = operation(*operands)
        taken = counter.peak() - max(before, counter.alive())
        assert taken == pytest.approx(size, abs=63), operation  # numbers take less
        assert sum(operand_casts(operation, operands, [result])) == size, operation
        del result  # before the next is counted


def test_a_cpu_alone_copies_operands_of_another_precision() -> None:
    """The sum of the residual stream and a perceptron's output in 16 bits was the peak of a first stage, and the copy
    of the latter missing: 0.74 % of it.
    """
    model = SMALL / "divided-autocast-llama.toml"
    block = next(layer for layer in under_autocast(load_model(model), "bf16").layers if layer.block)
    casts = [each for each in block.buffers if each.category == OPERAND_CASTS]
    output_bytes = block.output_bytes.at(b=2, s=24)
    assert [each.size_bytes.at(b=2, s=24) for each in casts if each.born.phase == "f"][-1] == output_bytes
    changes = ["plan.method=pipeline", "plan.pp=2", "plan.tp=2", "plan.micro_batches=6", "workload.autocast=bf16"]
    changes += ["workload.optimizer=sgd-momentum"]
    usual = [f"workload.model={model}", "workload.sequence_length=24", "workload.global_batch_size=12", *changes]

    def share_of_copies(cluster: str) -> float:
        scenario = gssim.load(SCENARIOS / "demo.toml", [cluster, *usual])
        workload = scenario.workload
        cut = tuple(
            replace(layer, buffers=tuple(each for each in layer.buffers if each.category != OPERAND_CASTS))
            for layer in workload.model.sliced_layers
        )
        without = replace(scenario, workload=replace(workload, model=replace(workload.model, sliced_layers=cut)))
        peak, before = (gssim.simulate(each).ranks[0].peak_allocated_bytes for each in (scenario, without))
        return peak / before - 1

    assert share_of_copies(star(4)) == pytest.approx(0.0074, abs=1e-4)
    assert share_of_copies(star(4).replace('kind="cpu"', 'kind="cuda"')) == 0


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_stage_casts_what_it_receives_once(recompute: Any) -> None:
    """BERT's queries, keys and values each cast the block's input, unless it is a leaf, whose cast torch keeps: every
    stage but the first was predicted to hold two casts too many for each micro-batch.
    """
    first, *_, block, head, loss = unrolled(under_autocast(load_model(SMALL / "divided-autocast-bert.toml"), "bf16"))
    stages = stages_of([[first], [block, head, loss]])
    lives = traced_buffers if recompute == "none" else partial(recomputed_buffers, recompute=recompute, autocast=True)
    shape: dict[str, Any] = {"batch_size": BATCH, "sequence_length": LENGTH, "scale": 1.0}
    whole, once = (stage_timeline(stages[1], lives=lives, input_is_leaf=is_leaf, **shape) for is_leaf in (False, True))
    cast_bytes = block.layer.output_bytes.at(b=BATCH, s=LENGTH) / 2
    for phase in ("f",) if recompute == "none" else ("f", "r"):
        before, after = ([e.size_bytes for e in each.at(0, phase)].count(cast_bytes) for each in (whole, once))
        assert before - after == 2
    kept = [sum(e.size_bytes for n in range(3) for e in each.at(n, "f")) for each in (whole, once)]
    assert kept[0] - kept[1] == (2 * cast_bytes if recompute == "none" else 0)  # a checkpointed block keeps none
    freed = [sum(e.size_bytes for n in range(3) for p in "fbr" for e in each.at(n, p)) for each in (whole, once)]
    assert freed[0] == freed[1]
    head_only = stages_of([[first, block], [head, loss]])[1]  # casts its input once anyway
    alike = [stage_timeline(head_only, lives=lives, input_is_leaf=each, **shape) for each in (False, True)]
    assert alike[0] == alike[1]


def test_casts_of_a_layers_input_are_told_from_other_casts() -> None:
    model = under_autocast(load_model(SMALL / "divided-autocast-bert.toml"), "bf16")
    block = next(layer for layer in model.layers if layer.block)
    casts = [each for each in block.buffers if each.casts_input]
    assert len(casts) == 3
    assert {str(each.size_bytes) for each in casts} == {"2304*b"}  # of 24 tokens of 48 values in 16 bits
    norms_first = under_autocast(load_model(SMALL / "divided-autocast-gpt.toml"), "bf16")
    assert not any(each.casts_input for layer in norms_first.layers for each in layer.buffers)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_checkpointed_step_under_autocast_takes_less_memory_and_more_time(recompute: str) -> None:
    usual, again = (
        predicted("a100-sxm-80", "workload.autocast=bf16", f"plan.recompute={each}") for each in ("none", recompute)
    )
    assert again.ranks[0].peak_allocated_bytes < usual.ranks[0].peak_allocated_bytes
    assert again.step_time_s > usual.step_time_s


@pytest.mark.parametrize(
    ("device", "faster"),
    [("a100-sxm-80", True), pytest.param("v100-pcie-16", False, marks=pytest.mark.slow), ("t4", False)],
)
def test_tf32_changes_the_time_of_products_where_a_device_has_it_and_nothing_else(device: str, faster: bool) -> None:
    wide = ["workload.model=gpt2-124m", "workload.sequence_length=1024", "workload.global_batch_size=16"]
    fp32, tf32 = (predicted(device, *wide, *changes) for changes in ([], ["workload.tf32=true"]))
    assert tf32.ranks[0].peak_allocated_bytes == fp32.ranks[0].peak_allocated_bytes
    assert (tf32.step_time_s < 0.8 * fp32.step_time_s) if faster else tf32.step_time_s == fp32.step_time_s


@pytest.mark.parametrize("device", ["v100-sxm2-32", "v100-pcie-16", "t4"])
def test_gpus_of_volta_and_turing_train_in_fp16_and_have_no_bf16(device: str) -> None:
    assert predicted(device, "workload.precision=fp16", "workload.loss_scale=dynamic").step_time_s > 0
    assert predicted(device, "workload.autocast=fp16", "workload.loss_scale=dynamic").step_time_s > 0
    with pytest.raises(UserError, match=r"no peak_flop_per_s\.bf16"):
        predicted(device, "workload.precision=bf16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["workload.autocast=bf16", "workload.precision=bf16"], r"autocast = 'bf16': needs precision = 'fp32'"),
        (["workload.tf32=true", "workload.precision=bf16"], r"tf32 = true: for matrix products in fp32"),
        (["workload.autocast=bf16", "plan.method=diloco"], r"workload\.autocast: cannot run yet with method 'diloco'"),
        (
            ["workload.autocast=bf16", "plan.tp=2", "plan.loss_parallel=true"],
            r"workload\.autocast: cannot run yet beside plan\.tp = 2 with plan\.loss_parallel = true: .*allowed: false",
        ),
        (
            ["workload.autocast=bf16", "workload.model=gpt2-124m", "plan.tp=2", "plan.embedding_parallel=true"],
            r"plan\.embedding_parallel = true: the head has the weight of the embedding, .*allowed: false",
        ),
        (
            [
                *("workload.autocast=bf16", "plan.tp=2", "plan.sequence_parallel=true"),
                "plan.gathered_inputs=gathered-again",
            ],
            r"plan\.gathered_inputs = 'gathered-again': maps keep casts of what is gathered; allowed: 'kept'",
        ),
        (
            ["workload.autocast=bf16", "workload.model=gpt2-355m"],
            r"not traced under it; `gsreal trace FILE --autocast bf16 --out NEW`",
        ),
        (["workload.autocast=bf16", "workload.loss_scale=2"], r"workload\.loss_scale = 2"),
    ],
)
def test_what_autocast_cannot_do_is_refused_in_one_line(changes: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        gssim.load(SCENARIOS / "demo.toml", ["plan.method=ddp", *changes])
    assert "\n" not in str(refused.value)


PARTS = {
    "sliced_layers": (["plan.tp=2"], "no slices of its blocks under autocast"),
    "context_layers": (["plan.cp=2"], "is not traced on parts of sequences under autocast"),
    "sequence_layers": (["plan.tp=2", "plan.sequence_parallel=true"], "with parts of sequences under autocast"),
    "expert_layers": (["plan.ep=2"], "no layers with divided experts under autocast"),
    "expert_sequence_layers": (
        ["plan.tp=2", "plan.ep=2", "plan.etp=1", "plan.sequence_parallel=true"],
        "no layers with cut blocks and divided experts under autocast",
    ),
}
"""Layers of a model that ranks divide, and plans that need them."""


@pytest.mark.parametrize("name", PARTS)
def test_a_file_without_divided_layers_under_autocast_is_refused_there_alone(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
    from gsreal.model_files.trace import write_model

    plan, message = PARTS[name]
    model = load_model(MIXTURE if "expert" in name else SMALL / "divided-autocast-gpt.toml")
    lacking: dict[str, Any] = {name: ()}
    older = replace(model, autocast=tuple(replace(each, **lacking) for each in model.autocast))
    write_model(tmp_path / "older.toml", older)
    assert load_model(tmp_path / "older.toml") == older
    changes = [star(4), f"workload.model={tmp_path / 'older.toml'}", "workload.sequence_length=24", "plan.method=ddp"]
    gssim.load(SCENARIOS / "demo.toml", [*changes, *plan])
    gssim.load(SCENARIOS / "demo.toml", [*changes, "workload.autocast=bf16"])
    with pytest.raises(UserError, match=rf"{message}.*`gsreal trace --autocast bf16`") as refused:
        gssim.load(SCENARIOS / "demo.toml", [*changes, *plan, "workload.autocast=bf16"])
    assert "\n" not in str(refused.value)


def test_casts_of_cut_parameters_end_with_their_layers_as_those_of_whole_ones_do() -> None:
    """Otherwise blocks would differ by their distance from the loss, and a deep model would have no cut blocks."""
    model = under_autocast(load_model(SMALL / "divided-autocast-gpt.toml"), "bf16")
    for layers in (model.layers, model.sliced_layers, model.sequence_layers):
        blocks = [instance.layer for instance in unrolled(replace(model, layers=layers)) if instance.layer.block]
        freed = [each.freed for block in blocks for each in block.buffers if each.born.phase == each.freed.phase == "f"]
        assert max(moment.layer_offset for moment in freed) <= 1


def test_a_sum_of_outputs_is_exchanged_in_16_bits_and_of_gradients_of_inputs_in_32() -> None:
    model = load_model(SMALL / "divided-autocast-gpt.toml")
    wide, narrow = (
        next(layer for layer in layers if layer.block).reductions
        for layers in (model.sliced_layers, under_autocast(model, "bf16").sliced_layers)
    )
    sizes = [
        (a.size_bytes.at(b=1, s=LENGTH), b.size_bytes.at(b=1, s=LENGTH)) for a, b in zip(wide, narrow, strict=True)
    ]
    assert [before / after for before, after in sizes] == [2, 2, 1, 1]
    assert [each.moment.phase for each in narrow] == ["f", "f", "b", "b"]


def test_products_of_routed_experts_run_at_the_rate_of_fp32_because_torch_does_not_cast_them() -> None:
    model = load_model(MIXTURE)
    block = next(layer for layer in under_autocast(model, "bf16").layers if layer.block)
    (token,) = block.forward_uncast_flop.terms  # type: ignore[union-attr]
    experts = next(each for each in model.layers if each.block).parameters
    chosen, (held, *_) = 2, next(each.shape for each in experts if each.name.endswith("gate_up_proj"))
    elements = sum(each.elements for each in experts if len(each.shape) == 3)
    assert token == (2 * chosen * elements // held, 1, 1)
    assert all(
        layer.forward_uncast_flop is None
        for layer in under_autocast(load_model(SMALL / "divided-autocast-gpt.toml"), "bf16").layers
    )
    changes = [star(1), "plan.method=single", f"workload.model={MIXTURE}", "workload.sequence_length=24"]
    scenario = gssim.load(SCENARIOS / "demo.toml", [*changes, "workload.autocast=bf16"])
    stated = {"fp32": 1e11, "bf16": 8e11}
    endless = {"operation_overhead_s": 0.0, "memory_bandwidth_bytes_per_s": 1e18, "peak_flop_per_s": stated}
    device = replace(scenario.cluster.device_types["cpu"], **endless)
    seconds = layer_roofline_s(device, scenario.workload, block, work_of(block, "f"), "f", 8)
    uncast, whole = (each.at(b=8, s=24) for each in (block.forward_uncast_flop, block.forward_flop))  # type: ignore[union-attr]
    rates = [achieved_flop_per_s(device, each) for each in ("fp32", "bf16")]
    assert seconds == pytest.approx(uncast / rates[0] + (whole - uncast) / rates[1], rel=1e-6)


def test_layers_under_autocast_are_traced_with_one_sample_too() -> None:
    """Peaks that runs showed over those of such marks were those of oneDNN, which copies matrices in 16 bits."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")
    from small_models import whole_layers_alone

    from gsreal.model_files.request import Request, traced_model

    settings = "n_layer=1 n_embd=16 n_head=2 vocab_size=32 max_position_embeddings=16 use_cache=false"
    request = Request(
        model="hf:gpt2",
        arguments=tuple(settings.split()),
        name="dropout",
        vocabulary=32,
        maximum_sequence_length=16,
        sequence_length=12,
        autocast=("bf16",),
    )
    with whole_layers_alone(split=False):
        model = traced_model(request)
    marked = [any(each.samples for layer in of.layers for each in layer.buffers) for of in (model, *model.autocast)]
    assert marked == [True, True]


def test_gradients_of_a_shared_weight_are_added_in_place_under_autocast_alone() -> None:
    """torch adds the embedding's gradient to the head's, which is a cast there and a view in fp32: with a third tensor
    for the sum, a BERT with one sample on two tensor-parallel ranks was predicted to have a peak 7.5 % too high.
    """
    model = load_model(SMALL / "divided-autocast-bert.toml")
    most = []
    for each in (model, under_autocast(model, "bf16")):
        embedding, *_ = layers = unrolled(each)
        weight = next(p for p in embedding.layer.parameters if p.name.endswith("word_embeddings.weight"))
        size, last = 4 * weight.elements, weight.born.position
        of_weight = [b for layer in layers for b in layer.layer.buffers if str(b.size_bytes) == str(size)]
        at_sum = [b for b in of_weight if b.freed.phase == "b" and b.released_at >= last]
        most.append(1 + sum(b.born.phase == "b" for b in at_sum))
    assert most == [3, 2]
