"""Published parameters: thresholds on their change, and the next forward beside them."""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from real_runs import SGD, predicted, run_cases, scenario_file, selected
from real_runs import star as real_star
from strategies import exponential_statistics, loaded_of, scenario_of, star
from tasks import labels_of

from gssim import sparsity
from gssim.errors import UserError
from gssim.plan import Publish
from gssim.program import Program, Task, lower
from gssim.program.messages import OwnedPieces
from gssim.result import Result
from gssim.scenario import Scenario, load_scenario
from gssim.simulation import simulate


def pushed(ranks: int = 2, *, backend: str = "gloo", **plan: Any) -> Scenario:
    if "method" not in plan:
        plan = {"method": "gs", "bucket_bytes": 100, "first_bucket_bytes": 100} | plan
    return scenario_of(star(ranks, backend=backend), plan, optimizer="sgd", global_batch_size=12)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let a tenth of every tensor be published; what statistics make of a threshold is density's affair."""
    monkeypatch.setattr(sparsity, "publish_ratios", lambda *_statistics, **_where: sparsity.Ratios((0.1,)))
    return 0.1


def sparse(ranks: int, encoding: str = "auto", **plan: Any) -> tuple[Scenario, Result]:
    scenario = pushed(ranks, publish={"threshold": 1e-3, "encoding": encoding}, **plan)
    return scenario, simulate(loaded_of(scenario, exponential_statistics())).result


# What is sent --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [[0.5, 0.3, 0.2], [0.0, 0.5, 0.5]])
@pytest.mark.parametrize(("encoding", "entry_bytes", "element_bytes"), [("coo", 8, 0), ("bitmap", 4, 1 / 8)])
def test_a_ring_carries_every_message_once_to_each_and_counts_of_all_buckets_go_before(
    planted, shards, encoding, entry_bytes, element_bytes
):
    scenario, result = sparse(3, encoding, shares={"shards": shards})
    program = lower(scenario, exponential_statistics())
    assert result.density.publish == pytest.approx(planted)
    assert result.density.push is None
    dense = simulate(loaded_of(pushed(3, shares={"shards": shards}))).result
    kinds = {entry.kind: entry for entry in result.collectives}
    assert kinds["all-gather"].bytes == 3 * 8 * len(published(program, "threshold publish"))
    assert {e.key for e in result.collectives} - {e.key for e in dense.collectives} == {kinds["all-gather"].key}
    elements = scenario.workload.model.elements
    payload = sum(entry.payload_bytes or 0 for entry in result.collectives)
    assert payload == pytest.approx(2 * elements * (planted * entry_bytes + element_bytes), abs=2 * 3 * 4)


def published(program: Program, label: str, rank: int = 0) -> list[Task]:
    return [task for task in program.tasks[rank] if task.label.startswith(label)]


def test_a_message_goes_densely_where_that_has_fewest_bytes_and_then_takes_no_buffer(monkeypatch):
    monkeypatch.setattr(sparsity, "publish_ratios", lambda *_statistics, **_where: sparsity.Ratios((0.99,)))
    scenario, result = sparse(2)
    dense = simulate(loaded_of(pushed(2, publish={"threshold": 0}))).result
    assert sum(e.payload_bytes or 0 for e in result.collectives) == scenario.workload.model.elements * 4
    peaks = [[each.peak_allocated_bytes for each in found.ranks] for found in (result, dense)]
    assert set(peaks[0]) == set(peaks[1])


def test_an_owner_keeps_a_master_copy_and_scratch_for_a_threshold_and_nothing_else(planted):
    scenario, result = sparse(2)
    plain = simulate(loaded_of(pushed(2))).result
    held, before = (lower(s, exponential_statistics()).persistent[0] for s in (scenario, pushed(2)))
    assert held.pop("master_copy") == scenario.workload.model.elements / 2 * 4
    assert 0 < held.pop("scratch") < 1000
    assert {category: size for category, size in held.items() if size} == {
        c: size for c, size in before.items() if size
    }
    assert result.step_time_s != plain.step_time_s


def test_a_relative_threshold_is_times_the_learning_rate(monkeypatch):
    asked = []
    ratios = sparsity.Ratios((0.1,))
    monkeypatch.setattr(sparsity, "publish_ratios", lambda _s, publish, **_where: asked.append(publish) or ratios)
    scenario = pushed(publish={"threshold": 0.5, "kind": "relative"})
    lower(scenario, exponential_statistics())
    assert set(asked) == {Publish(threshold=0.5 * scenario.workload.learning_rate)}


def test_parts_of_tensors_are_asked_for_by_their_place(monkeypatch):
    """Owners' ranges cut tensors; what is asked for, all owners together, is every tensor once."""
    asked: dict[str, float] = {}

    entries = OwnedPieces.entries

    def noted(pieces, ratios):
        ranges = pieces.ranges
        for tensor, first, last in zip(ranges.tensor.tolist(), ranges.first, ranges.last, strict=True):
            name = pieces.tensors[tensor]
            asked[name] = asked.get(name, 0.0) + last - first
        return entries(pieces, ratios)

    monkeypatch.setattr(OwnedPieces, "entries", noted)
    lower(pushed(3, publish={"threshold": 1e-3}, shares={"shards": [0.5, 0.3, 0.2]}), exponential_statistics())
    assert asked == pytest.approx(dict.fromkeys(asked, 1.0))
    assert len(asked) == 6


def test_a_plan_that_says_nothing_of_publishing_asks_the_question_that_it_asked_before():
    said = pushed(publish={"encoding": "auto", "kind": "absolute", "overlap": False})
    assert said.scenario_id == pushed().scenario_id
    assert pushed(publish={"encoding": "coo", "threshold": 0}).scenario_id != pushed().scenario_id
    on_gpus = [pushed(backend="nccl", publish={"overlap": overlap}).scenario_id for overlap in (None, True, False)]
    assert on_gpus[0] == on_gpus[2] != on_gpus[1]


# Beside the next forward ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [None, 0])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_each_layer_waits_for_its_own_buckets_which_are_sent_in_the_order_of_the_forward(backend, threshold):
    each_tensor = {"bucket_bytes": 1, "first_bucket_bytes": 1}
    program = lower(pushed(backend=backend, publish={"overlap": True, "threshold": threshold}, **each_tensor))
    tasks = program.tasks[0]
    order = [task.label for task in tasks if task.label.startswith("publish bucket")]
    assert order == [f"publish bucket {i}" for i in (5, 4, 3, 2, 1, 0)]
    waits = {
        label: i
        for i, task in enumerate(tasks)
        for label in labels_of(task.after)
        if label.startswith("publish bucket")
    }
    forwards = {task.label: i for i, task in enumerate(tasks) if task.label.startswith("forward ")}
    for number, layer in enumerate(("head", "h.1", "h.1", "h.0", "h.0", "embedding")):
        reader = f"forward {layer}"
        wait = waits[f"publish bucket {number}"]
        assert tasks[wait].stream == "compute"
        assert wait < forwards[reader]
        assert all(at < wait for at in forwards.values() if at < forwards[reader])
    assert tasks[-1].label == "optimizer"


@pytest.mark.parametrize("publish", [{}, {"threshold": 0, "encoding": "coo"}])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_overlaps_moves_as_much_and_takes_less_time_but_no_less_than_each_alone(backend, publish):
    serial, beside = (
        simulate(loaded_of(pushed(3, backend=backend, publish={"overlap": overlap, **publish}))).result
        for overlap in (False, True)
    )
    assert [entry.key for entry in serial.collectives] == [entry.key for entry in beside.collectives]
    assert sum(link.bytes for link in serial.links) == pytest.approx(sum(link.bytes for link in beside.links))
    saved_s = serial.step_time_s - beside.step_time_s
    assert 0 < saved_s <= serial.phases_s["forward"] * (1 + 1e-9)
    assert saved_s <= serial.phases_s["exposed_communication"]


def test_a_forward_that_is_long_enough_hides_all_but_what_its_first_layer_needs():
    """The last bucket is the embedding's, which is there before anything is computed; all others come behind it."""
    plan = {"bucket_bytes": 1, "first_bucket_bytes": 1}
    slow = [pushed(publish={"overlap": overlap}, **plan) for overlap in (False, True)]
    slow = [replace(s, workload=replace(s.workload, global_batch_size=1200)) for s in slow]
    serial, beside = (simulate(loaded_of(scenario)) for scenario in slow)
    last = max(int(span.label.rsplit(maxsplit=1)[-1]) for span in serial.spans if span.label.startswith("publish"))
    each = [s for s in serial.spans if s.label.startswith("publish bucket") and s.rank == 0]
    hidden_s = sum(s.end_s - s.start_s for s in each if s.label != f"publish bucket {last}")
    assert serial.result.step_time_s - beside.result.step_time_s == pytest.approx(hidden_s, rel=1e-6)


def test_publishing_overlaps_only_where_it_is_asked_for():
    for backend in ("nccl", "gloo"):
        assert pushed(backend=backend).policies.publish_overlaps is False
        assert pushed(backend=backend, publish={"overlap": True}).policies.publish_overlaps is True
        assert pushed(backend=backend, overlap=False).policies.publish_overlaps is False


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"method": "ddp", "publish": {"overlap": True}}, "publish.overlap: method 'ddp' publishes no parameters"),
        ({"method": "gs_z3", "publish": {"threshold": 0.1}}, "threshold: method 'gs_z3' publishes no parameters"),
        ({"method": "gs_wgrad", "publish": {"threshold": 0.1}}, "cannot run yet with method 'gs_wgrad'"),
        ({"publish": {"overlap": True}, "overlap": False}, "plan.publish.overlap = true: plan.overlap = false"),
        ({"publish": {"overlap": True}, "exchange": "backend"}, "cannot run on gloo with method 'gs' and exchange"),
        ({"publish": {"threshold": 0.1}, "exchange": "backend"}, "allowed with plan.exchange = 'point-to-point'"),
        ({"method": "gs_hier", "dp_shard": 2, "dp_replicate": 1, "publish": {"overlap": True}}, "on gloo with method"),
    ],
)
def test_what_cannot_be_published_so_is_refused(plan, message):
    with pytest.raises(UserError, match=message):
        pushed(**plan)


# The library on one rank ---------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'gssim[real]'")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from gsreal.gradient_sharding import GradientSharding, shard_gradients  # noqa: E402
from gsreal.gradient_sharding.publish import WaitBeforeForward  # noqa: E402

RATE = 0.25


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Join a process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(publish: Publish, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, GradientSharding]:
    """Return a model of 64 zeros, and its optimizer."""
    model = nn.Linear(64, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    return model, shard_gradients(model, partial(torch.optim.SGD, lr=RATE), publish=publish)


def step(model: nn.Linear, optimizer: GradientSharding, gradient: torch.Tensor) -> None:
    model(gradient.to(model.weight.dtype)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_published_waits_in_the_master_until_it_has_grown_enough(alone, dtype):
    """An element that moves by m a step is published every ceil(threshold / m) steps: nothing is lost."""
    threshold = 1.0
    model, optimizer = sharded(Publish(threshold=threshold, encoding="coo"), dtype)
    moves = torch.tensor([1.0, 0.5, 0.25, 0.0] * 16)
    (bucket,) = optimizer.buckets
    for number in range(1, 9):
        step(model, optimizer, moves / RATE)
        replica, master = model.weight.detach().float().view(-1), bucket.shard.detach()
        assert torch.equal(master, -number * moves)
        assert float((master - replica).abs().max()) < threshold
        every = torch.where(moves > 0, torch.ceil(threshold / moves), math.inf)
        assert torch.equal(replica, -(number // every) * torch.nan_to_num(every * moves))
    assert optimizer.published.entries == 16 * (8 + 4 + 2)
    assert optimizer.published.offered == 8 * 64


def test_a_threshold_that_nothing_reaches_leaves_the_replica_as_it_was(alone):
    model, optimizer = sharded(Publish(threshold=1e30))
    step(model, optimizer, torch.ones(64))
    assert torch.equal(model.weight, torch.zeros(1, 64))
    assert torch.equal(optimizer.buckets[0].shard.detach(), torch.full((64,), -RATE))


def test_a_relative_threshold_follows_the_learning_rate_of_now(alone):
    model, optimizer = sharded(Publish(threshold=2.0, kind="relative"))
    step(model, optimizer, torch.ones(64))
    assert not model.weight.any()
    optimizer.optimizer.param_groups[0]["lr"] = 1e-3
    step(model, optimizer, torch.ones(64))
    assert torch.equal(model.weight, optimizer.buckets[0].shard.detach().view(1, 64))


def test_what_is_no_number_is_published_whatever_the_threshold(alone):
    model, optimizer = sharded(Publish(threshold=1e30))
    step(model, optimizer, torch.tensor([math.nan] + [1.0] * 63))
    assert model.weight.isnan().view(-1).tolist() == [True] + [False] * 63


@pytest.mark.parametrize("kind", ["coo", "bitmap", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_putting_a_packed_message_gives_the_values_that_were_packed(dtype, kind):
    from gsreal.gradient_sharding.messages import Encoding, Scratch

    elements = 2**17 + 13
    scratch = Scratch(elements, elements, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(elements, generator=generator).to(dtype)
    flags = torch.rand(elements, generator=generator) < 0.05
    message, entries = Encoding(kind, dtype, scratch).pack(values, flags.clone())
    target = torch.full_like(values, 7)
    Encoding(kind, dtype, scratch).overwrite(target, message, entries)
    assert torch.equal(target, torch.where(flags, values, torch.full_like(values, 7)))


class Borrower(nn.Module):
    """Reads the weight of a module that it never calls, beside one that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.lent = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(x) @ self.lent.weight


class Parts:
    """Stands for a bucket: all that the hooks ask for is its parameters."""

    def __init__(self, *parameters: nn.Parameter) -> None:
        self.parameters = parameters


def test_modules_wait_for_their_own_buckets_and_for_those_of_modules_that_nobody_calls():
    model = nn.Sequential(Borrower(), nn.Linear(4, 4))
    buckets = {name: Parts(*each.parameters()) for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    names = {bucket: name for name, bucket in buckets.items()}
    waited: list[str] = []
    ended: list[bool] = []
    arrivals = Mock(wait=lambda b: waited.append(names[b]), finish=lambda: ended.append(True), in_flight=False)
    waits = WaitBeforeForward(model, list(buckets.values()), arrivals)
    x = torch.ones(1, 4)
    model(x)
    assert set(waited) == set(buckets)
    waited.clear()
    seen: list[list[str]] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append(list(waited)))
    model[1].register_forward_pre_hook(lambda *_: seen.append(list(waited)))
    model(x)
    assert [set(each) for each in seen] == [{"0.lent"}, {"0.lent", "0.called", "1"}]
    assert waits.called == set(model.modules()) - {model[0].lent}
    model.state_dict()
    assert ended
    waited.clear()
    copy.deepcopy(model)(x)
    assert not waited
    arrivals.in_flight = True
    with pytest.raises(RuntimeError, match=r"call optimizer\.finish\(\)"):
        copy.deepcopy(model)


# On ranks ------------------------------------------------------------------------------------------------------------

GPT = ["workload.sequence_length=24", "workload.global_batch_size=12", *SGD]
FEW = [*SGD, "workload.sequence_length=4", "workload.global_batch_size=6"]  # messages, not activations, make the peak
ALL, COO, BITMAP = "plan.publish.threshold=0", "plan.publish.encoding=coo", "plan.publish.encoding=bitmap"
BESIDE, BF16 = "plan.publish.overlap=true", "workload.precision=bf16"
SMALL_BUCKETS = ["plan.bucket_bytes=300000", "plan.first_bucket_bytes=100000"]
SHARDS = {2: "plan.shares.shards=[0.7, 0.3]", 3: "plan.shares.shards=[0.6, 0.3, 0.1]"}
SOME = "plan.publish.threshold=2e-4"
UNCHANGED = "plan.publish.threshold=1e30"

CASES = {
    2: {
        "auto": [*FEW, ALL],
        "coo": [*FEW, ALL, COO, SHARDS[2], *SMALL_BUCKETS],
        "bf16-bitmap": [*FEW, ALL, BITMAP, BF16, SHARDS[2]],
        "push-too": [*FEW, ALL, COO, "plan.push.threshold=0", "plan.push.encoding=bitmap"],
        "beside": [*GPT, BESIDE, *SMALL_BUCKETS],
        "beside-coo": [*FEW, BESIDE, ALL, COO, SHARDS[2]],
        "accumulated-beside": [*FEW, BESIDE, ALL, "plan.micro_batches=2"],
        "some": [*FEW, SOME, COO, SHARDS[2]],
        "unchanged": [*FEW, UNCHANGED],
        "one-node-coo": [*FEW, ALL, COO, "plan.method=gs_hier", "plan.dp_shard=2", "plan.dp_replicate=1"],
    },
    3: {
        "coo": [*FEW, ALL, COO, SHARDS[3]],
        "beside-bf16": [*FEW, BESIDE, ALL, BITMAP, BF16, SHARDS[3]],
    },
}
SLOW = ((2, "coo"), (2, "beside"), (2, "accumulated-beside"), (3, "coo"), (3, "beside-bf16"))
"""Others publish COO entries, also beside compute, and bitmaps in bf16 and by uneven shards."""
PAIRS = [(ranks, name) for ranks, cases in CASES.items() for name in cases]


def each_case(*but: str) -> pytest.MarkDecorator:
    """Return the parameters of a test that looks at all cases but those with one of some words in their names."""
    wanted = [pair for pair in PAIRS if not any(word in pair[1] for word in but)]
    marks = [[pytest.mark.slow] if pair in SLOW else [] for pair in wanted]
    return pytest.mark.parametrize(
        ("ranks", "name"), [pytest.param(*pair, marks=slow) for pair, slow in zip(wanted, marks, strict=True)]
    )


def case_of(ranks: int, name: str) -> dict[str, Any]:
    overrides = [real_star(ranks), "plan.method=gs", *CASES[ranks][name]]
    # of the larger demo: what oneDNN's kernels take in 16 bits for matrices of other shapes is not profiled, and a
    # fraction of fewer elements varies more
    is_large = "bf16" in name or name == "some"
    return {"scenario": scenario_file("demo.toml" if is_large else "small-demo.toml"), "overrides": overrides}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict]]:
    """Run the selected cases, those of one number of ranks in one launch; return what they showed."""
    found = {}
    for ranks, cases in CASES.items():
        wanted = selected(request, {name: case_of(ranks, name) for name in cases}, ranks=ranks)
        found[ranks] = run_cases(tmp_path_factory.mktemp(f"ranks{ranks}"), wanted, ranks=ranks)
    return found


def prediction(ranks: int, name: str, monkeypatch: pytest.MonkeyPatch, published: float) -> Result:
    """Return the prediction of a case, given the density of what is published where a threshold decides on it."""
    case = case_of(ranks, name)
    if ALL in case["overrides"] or BESIDE in case["overrides"]:
        return predicted(case)
    monkeypatch.setattr(sparsity, "publish_ratios", lambda *_statistics, **_where: sparsity.Ratios((published,)))
    loaded = load_scenario(Path(case["scenario"]), case["overrides"], gradients_needed=False)
    return simulate(replace(loaded, gradients=exponential_statistics())).result


def realised(seen: dict[str, Any]) -> float:
    """Return the density of a case of two ranks that publishes COO entries of 8 bytes: of 4 as values of fp32."""
    sent = [(entry, payload) for entry, payload in zip(seen["collectives"], seen["payloads"], strict=True) if payload]
    return sum(payload for _, payload in sent) / 8 / (sum(e[2] * e[3] for e, _ in sent) / 4) if sent else 0.0


@pytest.mark.real
@each_case()
def test_a_real_run_exchanges_and_holds_what_is_predicted(runs, ranks, name, monkeypatch):
    seen = runs[ranks][name]
    result = prediction(ranks, name, monkeypatch, realised(seen))
    assert seen["replicas_equal"]
    assert json.loads(json.dumps([list(entry.key) for entry in result.collectives])) == seen["collectives"]
    payloads = [
        [size or 0.0 for size in each] for each in ([e.payload_bytes for e in result.collectives], seen["payloads"])
    ]
    # where a threshold decides, all tensors are predicted by the one density of all of them together
    assert payloads[0] == pytest.approx(payloads[1], rel=0.05 if name == "some" else 1e-5)
    peaks = {rank: entry.peak_allocated_bytes for entry in result.ranks for rank in entry.ranks}
    for rank, measured in enumerate(seen["peaks"]):
        assert 0.99 <= peaks[rank] / measured <= 1.01, (rank, peaks[rank], measured)


@pytest.mark.real
@each_case("some", "unchanged", "bf16")
def test_a_threshold_of_zero_trains_as_one_device_does_and_so_does_publishing_beside_the_forward(runs, ranks, name):
    seen = runs[ranks][name]
    assert seen["largest_parameter"] > 0.05
    assert seen["difference"] <= 1e-5 * seen["largest_parameter"]


@pytest.mark.real
def test_a_threshold_publishes_some_and_one_that_nothing_reaches_leaves_all_replicas_as_they_were(runs):
    assert 0.001 < realised(runs[2]["some"]) < 0.9
    assert 0 < runs[2]["some"]["difference_ratio"] < 0.5
    assert runs[2]["unchanged"]["difference_ratio"] == 1.0  # it has not come anywhere
