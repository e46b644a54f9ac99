"""Attention with dropout on a GPU: the kernel that torch runs, what it keeps in closed form, and on which devices."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'gssim[models]'")

import torch
from pydantic import TypeAdapter
from small_models import whole_layers_alone
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import gssim
from gsreal.model_files.fused_kernels import cuda_kernels
from gsreal.model_files.request import Request, traced_model
from gsreal.model_files.trace import write_model
from gssim.scenario import Scenario, load_model
from gssim.workload import Layer, Model
from gssim.workload.model import FusedKernels, with_fused_kernels

BF16, FP32 = torch.bfloat16, torch.float32
B, H, S = 2, 3, 64
"""Samples, heads and tokens of an attention."""


def attended(dtype: torch.dtype, width: int, mask: str | None = None, dropout: float = 0.1) -> tuple[list, int]:
    """Return (which kernels replaced a CPU's operations, bytes kept for the backward)."""
    kept: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        alive.append(storage)
        return tensor

    with cuda_kernels() as replaced, FakeTensorMode():
        given = [torch.empty(B, H, S, width, dtype=dtype, requires_grad=True) for _ in "qkv"]
        allowed = None
        if mask is not None:
            allowed = torch.ones(B, 1, S, S, dtype=torch.bool if mask == "truth" else dtype)
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            output = F.scaled_dot_product_attention(*given, attn_mask=allowed, dropout_p=dropout)
        assert output.shape == given[0].shape
        output.sum().backward()
    return replaced, sum(kept.values())


def of_kernel(width: int, size: int, state: int) -> int:
    """Return the bytes of queries, keys, values and output, logarithms in fp32, and the random numbers' state."""
    return 4 * B * H * S * width * size + 4 * B * H * S + state


FLASH, EFFICIENT = "flash attention", "memory-efficient attention"
FLASH_STATE, EFFICIENT_STATE = 3 * 8, 2 * 8
"""Bytes of seed and offset: flash attention keeps two in one tensor, and one that is not used."""


@pytest.mark.parametrize(
    ("case", "kernel", "kept"),
    [
        ((BF16, 64), FLASH, of_kernel(64, 2, FLASH_STATE)),
        ((torch.float16, 256), FLASH, of_kernel(256, 2, FLASH_STATE)),
        ((BF16, 36), FLASH, of_kernel(40, 2, FLASH_STATE)),  # heads are padded to a multiple of 8
        ((BF16, 264), EFFICIENT, of_kernel(264, 2, EFFICIENT_STATE)),  # wider than flash attention takes
        ((FP32, 64), EFFICIENT, of_kernel(64, 4, EFFICIENT_STATE)),  # no flash attention in fp32
        ((FP32, 36), EFFICIENT, of_kernel(36, 4, EFFICIENT_STATE)),
        ((BF16, 64, "numbers"), EFFICIENT, of_kernel(64, 2, EFFICIENT_STATE) + 2 * B * S * S),
        ((BF16, 64, "truth"), EFFICIENT, of_kernel(64, 2, EFFICIENT_STATE) + 2 * B * S * S),  # as numbers
    ],
    ids=str,
)
def test_a_gpu_keeps_what_its_kernel_needs(case, kernel, kept):
    """No tensor of scores, and no mask of the dropout."""
    assert attended(*case) == ([kernel], kept)


@pytest.mark.parametrize("case", [(FP32, 37), (torch.float64, 64), (BF16, 36, "numbers")], ids=str)
def test_what_no_kernel_takes_runs_in_parts_with_a_mask_of_bytes(case):
    replaced, kept = attended(*case)
    assert replaced == ["dropout"]
    assert kept > 2 * B * H * S * S * torch.finfo(case[0]).bits / 8 + B * H * S * S


@pytest.mark.parametrize("case", [(FP32, 64), (FP32, 36), (BF16, 64)], ids=str)
def test_without_dropout_the_fused_attention_of_a_cpu_stays(case):
    """It keeps what a GPU's does without dropout, so nothing is replaced."""
    dtype, width = case
    assert attended(dtype, width, dropout=0.0) == ([], of_kernel(width, dtype.itemsize, 0))


def test_without_dropout_a_gpu_pads_heads_in_16_bits():
    assert attended(BF16, 36, dropout=0.0) == ([FLASH], of_kernel(40, 2, FLASH_STATE))


def test_nothing_stays_replaced():
    def kept() -> list[torch.dtype]:
        found = []
        with FakeTensorMode(), saved_tensors_hooks(lambda t: found.append(t.dtype) or t, lambda t: t):
            F.dropout(torch.empty(4, requires_grad=True), 0.1)
        return found

    before = kept()
    with cuda_kernels() as replaced:
        assert kept() == [torch.bool]
    assert replaced == ["dropout"]
    assert kept() == before == [FP32]


# Model files ---------------------------------------------------------------------------------------------------------

WIDTH, HEADS = 64, 4
CONFIG = "n_layer=2 n_embd=64 n_head=4 n_positions=64 vocab_size=256 use_cache=false"


def traced(name: str, *more: str, split: bool = False, **options: object) -> Model:
    """Return a small GPT-2, whose dropouts are 0.1 unless `more` says something else."""
    request = Request(
        model="hf:gpt2",
        arguments=(*CONFIG.split(), *more),
        name=name,
        vocabulary=256,
        maximum_sequence_length=64,
        **options,
    )
    with whole_layers_alone(split=split):
        return traced_model(request)


@pytest.fixture(scope="module")
def gpt2() -> Model:
    return traced("dropout", split=True, other_precisions=("bf16",), autocast=("bf16",))


def block(model: Model) -> Layer:
    return next(layer for layer in model.layers if layer.block)


def other(model: Model) -> Layer:
    """Return the block in bf16."""
    return next(layer for layer in model.other_precisions[0].layers if layer.block)


def test_a_gpus_block_is_that_without_dropout_in_the_attention_but_for_the_random_state(gpt2):
    """So it is in both precisions: FLOP, bytes moved and saved, operations, and every buffer."""
    without = traced("none", "attn_pdrop=0.0", other_precisions=("bf16",))
    fused, plain = with_fused_kernels(gpt2), with_fused_kernels(without)
    for find, state in ((block, EFFICIENT_STATE), (other, FLASH_STATE)):
        ours, theirs = find(fused), find(plain)
        names = ("forward_flop", "backward_flop", "forward_operations", "backward_operations", "output_bytes")
        for name in names:
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("saved_bytes", "forward_bytes", "backward_bytes"):
            kept, without_state = getattr(ours, name), getattr(theirs, name)
            for b, s in ((1, 64), (7, 512)):
                assert kept.at(b=b, s=s) == without_state.at(b=b, s=s) + state, name
        sizes, others = (sorted(str(each.size_bytes) for each in found.buffers) for found in (ours, theirs))
        for of_state in ["8", "8"] if find is block else ["16", "8", "0"]:
            if of_state in sizes and of_state not in others:
                sizes.remove(of_state)
        assert sizes == others


@pytest.mark.parametrize(("b", "s"), [(1, 64), (5, 1024)])
def test_a_cpus_block_keeps_scores_and_masks_of_four_bytes(gpt2, b, s):
    """Scores, mask and probabilities of every head instead of a logarithm, and two masks of the residual's dropouts."""
    ours, gpus = (block(model).saved_bytes.at(b=b, s=s) for model in (gpt2, with_fused_kernels(gpt2)))
    masks = 2 * b * s * WIDTH * (4 - 1)
    assert ours - gpus == 3 * 4 * b * HEADS * s**2 - 4 * b * HEADS * s - EFFICIENT_STATE + masks


def test_eager_attention_stays_in_parts(gpt2):
    """Its dropout has a mask of bytes on a GPU, and its scores are kept on both."""
    eager = traced("eager", "attn_implementation=eager")
    ours, gpus = block(eager), block(with_fused_kernels(eager))
    assert ours.forward_flop == gpus.forward_flop
    for b, s in ((1, 64), (5, 1024)):
        less = ours.saved_bytes.at(b=b, s=s) - gpus.saved_bytes.at(b=b, s=s)
        assert less == (4 - 1) * (b * HEADS * s**2 + 2 * b * s * WIDTH)


@pytest.mark.slow
def test_eager_attention_without_dropout_has_no_layers_of_gpus():
    still = traced("eager", "attn_implementation=eager", "attn_pdrop=0.0", "resid_pdrop=0.0", "embd_pdrop=0.0")
    assert still.has_unfused_attention
    assert still.fused_kernels == FusedKernels()  # a GPU runs the same, which is known
    assert with_fused_kernels(still) is still


def test_a_model_without_dropout_has_no_layers_of_gpus():
    assert traced("off", "attn_pdrop=0.0", "resid_pdrop=0.0", "embd_pdrop=0.0").fused_kernels is None


@pytest.mark.slow
def test_padded_heads_are_traced_for_gpus_without_any_dropout():
    """Heads of 36 are copied to ones of 40. The output without its padding is no view: the next map keeps a copy."""
    width, heads = 72, 2
    off = ("attn_pdrop=0.0", "resid_pdrop=0.0", "embd_pdrop=0.0")
    padded = traced(
        "padded", f"n_embd={width}", f"n_head={heads}", *off, other_precisions=("bf16",), autocast=("bf16",)
    )
    gpus = with_fused_kernels(padded)
    assert gpus.runs_fused_kernels
    assert padded.fused_kernels.layers == ()  # those in fp32 are not traced twice
    assert block(gpus).saved_bytes == block(padded).saved_bytes  # memory-efficient attention pads none in fp32
    assert block(gpus).forward_flop == block(padded).forward_flop
    for b, s in ((1, 64), (5, 1024)):
        more = other(gpus).saved_bytes.at(b=b, s=s) - other(padded).saved_bytes.at(b=b, s=s)
        assert more == 4 * 2 * b * s * heads * 4 + 2 * b * s * width + FLASH_STATE
        flop = other(gpus).forward_flop.at(b=b, s=s) - other(padded).forward_flop.at(b=b, s=s)
        assert flop == 2 * 2 * b * s**2 * heads * 4  # scores and values
    under, cpus = (next(each for each in of.autocast[0].layers if each.block) for of in (gpus, padded))
    assert under.saved_bytes.at(b=2, s=64) > cpus.saved_bytes.at(b=2, s=64)


# Scenarios -----------------------------------------------------------------------------------------------------------

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
CPUS = {"cluster": str(SCENARIOS / "clusters" / "two-cores.toml"), "plan.ranks": 2}


@pytest.fixture(scope="module")
def on_gpus(gpt2: Model, tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    """Return a scenario of the model on GPUs."""
    path = tmp_path_factory.mktemp("fused") / "dropout.toml"
    write_model(path, gpt2)
    assert load_model(path) == gpt2
    changes = {"workload.model": str(path), "workload.sequence_length": 64, "plan.ranks": 2, "plan.method": "ddp"}
    return gssim.load(SCENARIOS / "gpt2-half.toml", changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"workload.precision": "fp32"}, {"workload.precision": "fp32", "workload.autocast": "bf16"}],
    ids=str,
)
def test_devices_decide_which_layers_are_predicted(gpt2, on_gpus, changes):
    """The identity stays that of the file's own layers, so measurements made before are joined."""
    gpus = on_gpus.with_(changes)
    cpus = gpus.with_(CPUS)
    model = gpus.workload.model
    assert model.runs_fused_kernels
    assert not cpus.workload.model.runs_fused_kernels
    assert block(cpus.workload.model).saved_bytes != block(model).saved_bytes
    assert not model.has_unfused_attention
    assert cpus.workload.model.has_unfused_attention
    assert gpus.attention_of_cpu is cpus.attention_of_cpu is None

    older = replace(gpt2, fused_kernels=None)
    before = replace(gpus, workload=replace(gpus.workload, model=older))
    assert block(before.workload.model) == block(cpus.workload.model)  # old files are predicted as they were
    assert before.scenario_id == gpus.scenario_id
    assert "is traced as a CPU runs it" in str(before.attention_of_cpu)

    again = gssim.load(json.loads(json.dumps(gpus.resolved())))
    assert again.scenario_id == gpus.scenario_id
    assert again.workload.model.layers == model.layers
    assert again.resolved() == gpus.resolved()


def test_gpus_take_less_memory_and_time(on_gpus):
    """By the scores of every head in each of two blocks, at the peak."""
    samples = {"workload.global_batch_size": 64, "workload.sequence_length": 64}
    gpus = on_gpus.with_({**samples, "workload.precision": "fp32"})
    older = replace(gpus.workload.model.in_file_precision, fused_kernels=None)
    before = replace(gpus, workload=replace(gpus.workload, model=older))
    now, then = gssim.simulate(gpus), gssim.simulate(before)
    assert now.step_time_s < then.step_time_s
    assert "attention_of_cpu" in then.provenance
    assert "attention_of_cpu" not in now.provenance
    b, s = 32, 64
    scores = 2 * (3 * 4 * b * HEADS * s**2 - 4 * b * HEADS * s)
    less = then.ranks[0].peak_allocated_bytes - now.ranks[0].peak_allocated_bytes
    assert less > scores


def test_gpus_beside_a_cpu_are_predicted_as_the_cpu_and_it_is_said(on_gpus):
    cpus = on_gpus.with_(CPUS)
    first, *others = cpus.cluster.devices
    types = cpus.cluster.device_types
    gpu = on_gpus.cluster.device_types["h100-sxm"]
    cluster = replace(cpus.cluster, devices=(replace(first, type="gpu"), *others), device_types={**types, "gpu": gpu})
    mixed = replace(cpus, cluster=cluster)
    assert "is predicted on all as a CPU runs it" in str(mixed.attention_of_cpu)


def test_a_result_of_gpus_is_predicted_on_cpus_with_the_layers_of_its_models_file(on_gpus):
    stored = json.loads(json.dumps(on_gpus.resolved()))
    assert stored["workload"]["model"]["runs_fused_kernels"]
    cpus = gssim.load(stored, CPUS)
    assert not cpus.workload.model.runs_fused_kernels
    assert cpus.workload.model.has_unfused_attention


def on_devices(on_gpus: Scenario, kind: str, preset: str, **changes: object) -> Scenario:
    """Return a scenario on devices of a preset, of one kind."""
    data = json.loads(json.dumps(on_gpus.with_(changes).resolved()))
    data["cluster"] |= {"device_types": {name: preset for name in data["cluster"]["device_types"]}}
    data["workload"]["model"] = on_gpus.source.overrides[0].partition("=")[2].strip('"')
    found = gssim.load(data)
    assert {each.kind for each in found.cluster.device_types.values()} == {kind}
    return found


def test_amds_gpus_are_predicted_as_nvidias_and_of_tpus_it_is_said_that_they_are_not(on_gpus):
    amd = on_devices(on_gpus, "cuda", "mi300x")
    assert amd.workload.model.runs_fused_kernels
    for preset in ("gaudi2", "tpu-v4-chip"):
        tpus = on_devices(on_gpus, "tpu", preset, **{"workload.precision": "bf16"})
        assert not tpus.workload.model.runs_fused_kernels
        assert "is predicted as a CPU runs it" in str(tpus.attention_of_cpu)
        assert gssim.simulate(tpus).provenance["attention_of_cpu"] == tpus.attention_of_cpu


@pytest.mark.parametrize("preset", ["v100-sxm2-32", "t4"])
def test_gpus_without_products_in_bf16_are_refused_in_it(on_gpus, preset):
    """They would run attention as separate operations then; in fp16 they have memory-efficient attention."""
    assert on_devices(on_gpus, "cuda", preset, **{"workload.precision": "fp16"}).workload.model.runs_fused_kernels
    with pytest.raises(gssim.UserError, match=r"no peak_flop_per_s\.bf16"):
        gssim.simulate(on_devices(on_gpus, "cuda", preset, **{"workload.precision": "bf16"}))


def without(layers: list, place: int) -> list:
    return layers[:place] + layers[place + 1 :]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda fused: fused | {"layers": fused["layers"][:-1]}, "no layer of a module where the model has 'loss'"),
        (lambda fused: fused | {"layers": without(fused["layers"], 0)}, "where the model has 'transformer.wte'"),
        (lambda fused: fused | {"layers": fused["layers"][::-1]}, "'loss' layer of a module where the model has"),
        (lambda fused: fused | {"layers": [*fused["layers"], fused["layers"][0]]}, "where the model has none"),
        (lambda fused: {"sliced_layers": fused["layers"]}, "layers: missing, though sliced_layers is there"),
        (
            lambda fused: fused | {"layers": [fused["layers"][0] | {"parameters": []}, *fused["layers"][1:]]},
            "with other parameters",
        ),
        (
            lambda fused: (
                fused
                | {"other_precisions": [{"precision": "bf16", "layers": fused["other_precisions"][0]["layers"][1:]}]}
            ),
            r"fused_kernels.other_precisions\[0\].layers: ",
        ),
    ],
)
def test_layers_of_gpus_that_are_not_of_the_models_modules_are_refused_in_one_line(on_gpus, gpt2, change, said):
    """Before, some were predicted, without the modules that were left out, and others ended in a traceback."""
    data = json.loads(json.dumps(on_gpus.resolved()))
    model = TypeAdapter(Model).dump_python(gpt2, mode="json", exclude_none=True)
    data["workload"]["model"] = model | {"fused_kernels": change(model["fused_kernels"])}
    with pytest.raises(gssim.UserError, match=said) as refused:
        gssim.load(data)
    assert "\n" not in str(refused.value)
    assert "workload.model.fused_kernels" in str(refused.value)
