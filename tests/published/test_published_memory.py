"""Published: memory of model states (Rajbhandari et al. 2019) and of activations (Korthikanti et al. 2022)."""

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from strategies import device_type, scenario_of, star

from gssim.errors import UserError
from gssim.memory import CPU_RANDOM_STATE_BYTES, activation_timeline, recomputed_buffers
from gssim.program import lower
from gssim.scenario import Scenario, load_model
from gssim.workload import Layer, Model, Module, Moment, Parameter, Polynomial, TokenInput, unrolled

ROOT = Path(__file__).resolve().parents[2]

# Model states --------------------------------------------------------------------------------------------------------

GPU = device_type(kind="cuda", memory_bytes=1e12, peak_flop_per_s={"bf16": 1e14})
RANKS = 64
TENSORS, ROWS, COLUMNS = 64, 128, 915_527
ELEMENTS = TENSORS * ROWS * COLUMNS
"""7.5 billion, in tensors that 64 ranks share without a remainder, whole (ZeRO-1) or by rows (FSDP2)."""


def billions() -> Model:
    """Return a model of 7.5 billion parameters that computes nothing: blocks of one matrix each."""
    nothing = Polynomial(((0, 0, 0),))
    zeros = ("forward_flop", "backward_flop", "forward_bytes", "backward_bytes", "saved_bytes", "output_bytes")
    matrix = Parameter("{}.weight", (ROWS, COLUMNS), Moment("b", 0), Moment("b", 0))
    blocks = Layer(
        name="h",
        modules=tuple(f"h.{i}" for i in range(TENSORS)),
        block=True,
        parameters=(matrix,),
        forward_operations=1,
        backward_operations=1,
        **dict.fromkeys(zeros, nothing),
    )
    return Model(
        name="7.5 billion",
        source="Rajbhandari et al. 2019, figure 1",
        module=Module(factory="nowhere.at_all"),
        input=TokenInput(kind="tokens", vocabulary=2, maximum_sequence_length=1),
        traced_batch_sizes=(1,),
        layers=(blocks,),
    )


def trained(method: str, *, ranks: int = RANKS, optimizer: str = "adamw", **plan: Any) -> Scenario:
    cluster = star(ranks, types={"gpu": GPU}, backend="nccl")
    workload = {"model": billions(), "global_batch_size": ranks, "sequence_length": 1}
    return scenario_of(cluster, {"method": method, **plan}, precision="bf16", optimizer=optimizer, **workload)


def held_before(scenario: Scenario, label: str) -> dict[str, float]:
    """Return what rank 0 holds, by category, when the task called `label` begins."""
    program = lower(scenario)
    held = defaultdict(float, program.persistent[program.role_of[0]])
    for task in program.tasks[program.role_of[0]]:
        if task.label == label:
            return {category: size for category, size in held.items() if size and category != "input"}
        for category, size in task.need.kept:
            held[category] += size
    raise AssertionError(f"no task is called {label}")


def counters(tensors: int) -> int:
    """Return the bytes of Adam's step counters, which the paper does not count."""
    return 4 * tensors


PSI = ELEMENTS
SHARD = ELEMENTS // RANKS
STATES = {
    "ddp": {"parameters": 2 * PSI, "buckets": 2 * PSI, "master_copy": 4 * PSI, "optimizer": 8 * PSI + counters(64)},
    "zero1": {
        "parameters": 2 * PSI,
        "buckets": 2 * PSI,
        "master_copy": 4 * SHARD,
        "optimizer": 8 * SHARD + counters(1),
    },
    "zero2": {"parameters": 4 * SHARD, "gradients": 4 * SHARD, "optimizer": 8 * SHARD + counters(64)},
    "zero3": {"parameters": 4 * SHARD, "gradients": 4 * SHARD, "optimizer": 8 * SHARD + counters(64)},
    "gs": {
        "parameters": 2 * PSI,
        "gradients": 4 * SHARD,
        "master_copy": 4 * SHARD,
        "optimizer": 8 * SHARD + counters(TENSORS),
    },
}
"""When the update begins. Gradients of ZeRO-1 are DDP's buckets; FSDP2's shards are the master copy themselves; GS adds
up in fp32 what arrives in bf16."""

PAPER_GB = {"ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.88}
"""Figure 1: 7.5 billion parameters, 64 devices, mixed-precision Adam (K = 12)."""


@pytest.mark.parametrize("method", STATES)
def test_states_before_the_update_are_those_of_the_closed_form(method: str):
    assert held_before(trained(method), "optimizer") == STATES[method]


def test_zero2_holds_gathered_parameters_beside_its_shards_once_the_forward_is_done():
    held = held_before(trained("zero2"), "forward end")
    held.pop("communication")  # flat buffers of two blocks, on their way
    assert held == {
        "parameters": 4 * SHARD,
        "gathered_parameters": 2 * PSI,
        "optimizer": 8 * SHARD + counters(64),
    }


@pytest.mark.parametrize("method", ["ddp", "zero1", "zero3"])
def test_data_parallel_and_stages_1_and_3_take_what_the_paper_says(method: str):
    total = sum(held_before(trained(method), "optimizer").values())
    assert total / 1e9 == pytest.approx(PAPER_GB[method], rel=3e-3)  # the paper's three digits


def test_stage_2_takes_2_bytes_more_of_each_owned_element_than_in_the_paper():
    # the paper's owner keeps its gradients in fp16 (2 + 14/N bytes an element); FSDP2 casts them to its fp32 shard's,
    # GS adds them up in fp32: 2 + 16/N
    paper = 2 * PSI + 14 * SHARD
    assert paper / 1e9 == pytest.approx(PAPER_GB["zero2"], rel=3e-3)
    gathered = held_before(trained("zero2"), "forward end")["gathered_parameters"]
    fsdp2 = gathered + sum(held_before(trained("zero2"), "optimizer").values())
    gs = sum(held_before(trained("gs"), "optimizer").values())
    assert fsdp2 == gs == 2 * PSI + 16 * SHARD + counters(64)
    assert fsdp2 - counters(64) - paper == 2 * SHARD


@pytest.mark.parametrize(("optimizer", "values"), [("sgd", 0), ("sgd-momentum", 1), ("adam", 2), ("adamw", 2)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_optimizer_keeps_its_values_in_fp32(optimizer: str, values: int, ranks: int):
    held = held_before(trained("zero3", ranks=ranks, optimizer=optimizer), "optimizer")
    steps = counters(64) if values == 2 else 0
    assert held.get("optimizer", 0) == 4 * values * PSI // ranks + steps
    assert held["parameters"] == held["gradients"] == 4 * PSI // ranks


def test_uneven_shards_divide_the_states_of_gs_as_they_say():
    scenario = trained("gs", ranks=2, shares={"shards": (0.75, 0.25)})
    held = held_before(scenario, "optimizer")
    assert held["master_copy"] == 3 * PSI
    assert held["optimizer"] == 6 * PSI + counters(64)


# Activations ---------------------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

from small_models import whole_layers_alone  # noqa: E402
from torch import nn  # noqa: E402

from gsreal.model_files.request import Request, traced_model  # noqa: E402


class ClassicBlock(nn.Module):
    """The layer of Korthikanti et al. 2022, figure 2: attention by an explicit softmax, three dropouts, GeLU.

    native_dropout keeps its mask in bytes on every device, as the paper counts it (torch's dropout on a CPU does not).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape

        def dropped(y: torch.Tensor) -> torch.Tensor:
            return torch.native_dropout(y, 0.1, True)[0]

        y = self.attention_norm(x)
        q, k, v = (each(y).view(b, s, self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) * (h / self.heads) ** -0.5
        mixed = dropped(torch.softmax(scores, dim=-1)) @ v
        x = x + dropped(self.out(mixed.transpose(1, 2).reshape(b, s, h)))
        return x + dropped(self.down(nn.functional.gelu(self.up(self.perceptron_norm(x)))))


class Classic(nn.Module):
    """Two classic blocks between an embedding and a head."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(ClassicBlock(width, heads) for _ in range(2))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def block_of(model: Model) -> Layer:
    return next(layer for layer in model.layers if layer.block)


@cache
def traced(factory: str, *, width: int, heads: int) -> Model:
    """Return a model traced in bf16, whose values have the paper's two bytes."""
    arguments = (f"width={width}", f"heads={heads}", *(("layers=2",) if factory.startswith("gsreal") else ()))
    request = Request(
        model=factory,
        arguments=arguments,
        name="traced",
        vocabulary=64,
        maximum_sequence_length=64,
        task="next-token",
        classes=0,
        auto_class="",
        precision="bf16",
    )
    with whole_layers_alone():
        return traced_model(request)


SIZES = [pytest.param(*each, marks=pytest.mark.slow) for each in ((32, 2), (48, 4))]


@pytest.mark.parametrize(("h", "a"), SIZES)
def test_a_classic_layer_keeps_sbh_times_34_and_5as_over_h(h: int, a: int):
    """Section 4.1, equation 1: attention 11sbh + 5as^2b, perceptron 19sbh, two layer norms 4sbh, in bytes.

    Beside it, torch keeps the mean and the reciprocal deviation of both layer norms, which the paper neglects: 4 values
    of each position, in bf16 on a CPU.
    """
    attention = {
        "input of the query, key and value": 2 * h,
        "query and key": 4 * h,
        "value": 2 * h,
        "input of the output projection": 2 * h,
        "dropout mask": h,
    }
    squares = {"softmax": 2 * a, "its dropout's mask": a, "its dropout's output": 2 * a}
    perceptron = {"input of the first": 2 * h, "GeLU's input": 8 * h, "input of the second": 8 * h, "mask": h}
    norms = {"two inputs": 4 * h}
    assert (sum(attention.values()), sum(perceptron.values()), sum(norms.values())) == (11 * h, 19 * h, 4 * h)
    assert sum(squares.values()) == 5 * a
    saved = block_of(traced(f"{__name__}.Classic", width=h, heads=a)).saved_bytes
    for b, s in ((1, 8), (4, 64)):
        paper = s * b * h * (34 + 5 * a * s / h)
        statistics = 4 * 2 * b * s
        assert saved.at(b=b, s=s) == paper + statistics


@pytest.mark.parametrize(("h", "a"), SIZES)
def test_our_layer_keeps_32sbh_for_it_drops_nothing_out_and_keeps_no_square(h: int, a: int):
    """gsreal/models.py, TransformerBlock: flash attention keeps, in place of 5as^2b, a log-sum in fp32 of each head."""
    kept = {
        "x, attention_norm's input": 2 * h,
        "its mean and reciprocal deviation": 4,
        "qkv's input": 2 * h,
        "q, k and v, in qkv's output": 6 * h,
        "logarithms of the softmax's sums": 4 * a,
        "y, out's input and the attention's output": 2 * h,
        "x + attention, perceptron_norm's input": 2 * h,
        "its mean and reciprocal deviation again": 4,
        "up's input": 2 * h,
        "gelu's input": 8 * h,
        "down's input": 8 * h,
    }
    assert sum(kept.values()) == 32 * h + 4 * a + 8
    saved = block_of(traced("gsreal.models.gpt", width=h, heads=a)).saved_bytes
    assert saved.at(b=3, s=40) == sum(kept.values()) * 3 * 40


def test_a_precision_that_nobody_has_is_not_traced_in():
    request = Request(
        model="gsreal.models.gpt",
        arguments=(),
        name="traced",
        vocabulary=64,
        maximum_sequence_length=64,
        task="next-token",
        classes=0,
        auto_class="",
        precision="fp8",
    )
    with pytest.raises(UserError, match="--precision fp8: allowed: fp32, bf16, fp16, fp64"):
        traced_model(request)


@pytest.mark.parametrize("name", ["gpt-byte-1m", "gpt-byte-10m", "gpt3-6.7b", "gpt3-175b"])
def test_shipped_models_keep_the_same_in_fp32(name: str):
    model = load_model(ROOT / "scenarios" / "models" / f"{name}.toml")
    h, a = (model.module.arguments[key] for key in ("width", "heads"))
    for layer in model.layers:
        if layer.block:
            # all in four bytes, the sums too: halved for bf16, these are taken for 2 bytes a head, which is too few
            assert layer.saved_bytes.at(b=1, s=1) == 2 * 32 * h + 4 * a + 16
            scaled, true = layer.saved_bytes.at(b=1, s=1) / 2, 32 * h + 4 * a + 8
            assert true - scaled == 2 * a
            assert (true - scaled) / true < 0.005


@pytest.mark.parametrize(  # replayed peaks of ours, checkpointed: tests/oracles/test_trace.py
    "factory", [pytest.param("gsreal.models.gpt", marks=pytest.mark.slow), f"{__name__}.Classic"]
)
def test_a_checkpointed_layer_keeps_2sbh(factory: str):
    """Section 5: with full recomputation only the input of each layer is kept (and torch's random state)."""
    b, s, h, a = 2, 16, 32, 2
    layers = unrolled(traced(factory, width=h, heads=a))

    def lives(layer: Layer, before: Layer | None, following: Any) -> Any:
        return recomputed_buffers(layer, before, following, random_state_bytes=CPU_RANDOM_STATE_BYTES)

    timeline = activation_timeline(layers, batch_size=b, sequence_length=s, lives=lives)
    first = next(each.index for each in layers if each.layer.block)
    kept = sum(event.size_bytes for event in timeline.at(first, "f"))
    assert kept == 2 * s * b * h + CPU_RANDOM_STATE_BYTES
