"""Ranks whose thresholded messages are the same have one role: each does what it does lowered by itself."""

from pathlib import Path

import numpy as np
import pytest

from gssim.program import Steps, messages
from gssim.program.messages import first_of_kinds, owned_pieces
from gssim.result import Result
from gssim.scenario import Loaded, load_scenario
from gssim.simulation import simulate

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
SWITCH = (
    'cluster={{name="gpus", backend="nccl", source="made", device_types={{gpu="a100-sxm-80"}}, topology={{'
    'kind="switch", devices=[{{device="gpu", count={ranks}}}], devices_per_host={per_host}, '
    'link={{bandwidth_bytes_per_s="10 Gb/s", latency_s="10 us", source="made"}}}}}}'
)


def loaded(ranks: int, *changes: str, per_host: int = 1) -> Loaded:
    """Return demo's model on equal GPUs; of its sixteen samples the first sixteen ranks have one each."""
    switch = SWITCH.format(ranks=ranks, per_host=per_host)
    of_batch = "plan.shares.batch=throughput"
    return load_scenario(SCENARIOS / "demo.toml", [switch, of_batch, "plan.push.threshold=1e-3", *changes])


@pytest.mark.parametrize(
    ("changes", "per_host"),
    [
        ((), 1),
        pytest.param(("plan.method=gs_z3",), 1, marks=pytest.mark.slow),
        pytest.param(("plan.publish.threshold=1e-3",), 1, marks=pytest.mark.slow),
        (("plan.method=gs_hier",), 2),
        (("plan.push.aggregate=received-weight", "plan.push.error_feedback=true"), 1),
    ],
)
def test_neighbours_with_the_same_messages_have_one_role(changes, per_host):
    asked = loaded(128, *changes, per_host=per_host)
    together = Steps(asked.scenario, asked.gradients).program(10)
    alone = Steps(asked.scenario, asked.gradients, unfolded=True).program(10)
    assert len(alone.tasks) == 128
    assert len(together.tasks) < 115
    for rank, role in enumerate(together.role_of):
        assert together.tasks[role] == alone.tasks[rank]
        assert together.persistent[role] == alone.persistent[rank]
    assert together.push_density == alone.push_density


@pytest.mark.parametrize(
    ("changes", "per_host"),
    [
        pytest.param((), 1, marks=pytest.mark.slow),
        pytest.param(("plan.method=gs_z3",), 1, marks=pytest.mark.slow),
        (("plan.publish.threshold=1e-3", "plan.push.aggregate=received-weight"), 1),
        pytest.param(("plan.method=gs_hier", "plan.publish.threshold=1e-3"), 2, marks=pytest.mark.slow),
        pytest.param(("plan.shares.shards=memory", "plan.push.encoding=coo"), 1, marks=pytest.mark.slow),
    ],
)
def test_runs_of_owners_are_all_of_their_owners(changes, per_host, monkeypatch):
    asked = loaded(128, *changes, per_host=per_host)
    places = range(per_host)
    together, lows = simulate(asked).result, Steps(asked.scenario, asked.gradients)._at(10)
    assert max(len(owned_pieces(lows[0], place).members) for place in places) < 0.9 * 128 / per_host
    monkeypatch.setattr(messages, "_first_of_runs", lambda ranges, starts: np.ones(ranges.shape[1], dtype=bool))
    apart, lows = simulate(asked).result, Steps(asked.scenario, asked.gradients)._at(10)
    assert all(len(owned_pieces(lows[0], place).members) == 128 / per_host for place in places)
    assert texts(together) == texts(apart)
    assert numbers(together) == pytest.approx(numbers(apart), rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [("plan.method=gs_hier",), pytest.param(("plan.publish.threshold=1e-4",), marks=pytest.mark.slow)],
)
def test_buckets_of_equal_layers_are_all_what_the_first_of_them_is(changes, monkeypatch):
    """Their statistics are transferred, and equal in the inner blocks."""
    switch = SWITCH.format(ranks=8, per_host=2)
    model = [
        f"workload.model={SCENARIOS / 'models/gpt2-124m.toml'}",
        "workload.global_batch_size=8",
        "workload.sequence_length=512",
    ]
    run = ["run.steps=2", "run.warmup_steps=2", "plan.push.threshold=1e-4"]
    asked = load_scenario(SCENARIOS / "gpt3-1024-unequal.toml", [switch, *model, *run, "plan.method=gs", *changes])
    together, (low, *_) = simulate(asked).result, Steps(asked.scenario, asked.gradients)._at(3)
    assert len(first_of_kinds(low)) < len(low.buckets) / 2
    monkeypatch.setattr(messages, "_bucket_kinds", lambda low: (range(len(low.buckets)), low.buckets))
    apart, (low, *_) = simulate(asked).result, Steps(asked.scenario, asked.gradients)._at(3)
    assert len(owned_pieces(low, 0).elements_owned) == len(low.buckets)
    assert texts(together) == texts(apart)
    assert numbers(together) == pytest.approx(numbers(apart), rel=1e-12)


def texts(result: Result) -> dict[str, object]:
    """Return what is no number in a Result, by path."""
    return {path: value for path, value in flat(result).items() if not isinstance(value, float)}


def numbers(result: Result) -> dict[str, float]:
    """Return the numbers in a Result by path."""
    return {path: value for path, value in flat(result).items() if isinstance(value, float)}


def flat(result: Result) -> dict[str, object]:
    """Return the values of a Result by path, and by rank instead of by class of ranks."""
    found: dict[str, object] = {}

    def walk(value: object, path: str) -> None:
        if isinstance(value, dict | list | tuple):
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                walk(each, f"{path}.{key}")
        else:
            found[path] = float(value) if isinstance(value, int) else value

    values = result.to_dict()
    for each in values.pop("ranks"):
        for rank in each["ranks"]:
            walk(each | {"ranks": 1, "count": 1}, f"rank {rank}")
    walk(values, "")
    return found


def test_what_a_step_sends_is_that_of_its_program():
    asked = loaded(64, "plan.publish.threshold=1e-3")
    steps = Steps(asked.scenario, asked.gradients)
    program, sent = steps.program(12), steps.traffic(12)
    named = {name: each.payload_bytes for name, each in program.communications.items() if each.data_dependent}
    assert named == {name: sent.payload_bytes[name] for name in named}
    assert sent.whole_bytes == pytest.approx(sum(named.values()), rel=1e-12)
    assert (sent.push_density, sent.publish_density) == (program.push_density, program.publish_density)
