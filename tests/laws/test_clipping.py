"""Gradient clipping as predicted: three passes over the gradients; an all-reduce where ranks hold different ones."""

from pathlib import Path

import pytest
from strategies import device_type, loaded_of, scenario_of, star, tiny_model

from gssim.errors import UserError
from gssim.scenario import Scenario, check, load_model
from gssim.simulation import simulate
from gssim.workload import Model

BANDWIDTH, LATENCY_S = 1e6, 1e-3
RATES = {"fp32": 1e9, "fp16": 2e9}


GPT = load_model(Path(__file__).resolve().parents[2] / "scenarios" / "models" / "gpt-byte-1m.toml")


TRAINING = {"precision", "loss_scale"}


def made(method: str, clip_norm: float | None, *, model: Model | None = None, ranks: int = 2, **keys) -> Scenario:
    plan = {key: value for key, value in keys.items() if key not in TRAINING}
    scenario = scenario_of(
        star(ranks, bandwidth=BANDWIDTH, latency_s=LATENCY_S, types={"any": device_type(peak_flop_per_s=RATES)}),
        {"method": method} | plan,
        model=model or tiny_model(),
        global_batch_size=8,
        sequence_length=4,
        optimizer="sgd",
        clip_norm=clip_norm,
        **{key: value for key, value in keys.items() if key in TRAINING},
    )
    check(scenario, file="made")
    return scenario


@pytest.mark.parametrize(("method", "held", "summed_bytes"), [("ddp", 1, 0), ("gs", 0.5, 8)])
def test_clipping_reads_gradients_twice_and_writes_them_once_and_sums_one_number(method, held, summed_bytes):
    """3 S / memory bandwidth for S bytes of gradients; an all-reduce of n bytes over two ranks takes two trips of half.

    gloo's sender waits for the receiver's notice, so that each trip has the latency twice.
    """
    clipped, free = (simulate(loaded_of(made(method, norm))).result for norm in (1.0, None))
    passes_s = 3 * 4 * held * tiny_model().elements / 1e9
    links = 2  # of each hop: to the switch and from it
    sum_s = 2 * (2 * links * LATENCY_S + summed_bytes / 2 / BANDWIDTH) if summed_bytes else 0.0
    assert clipped.step_time_s - free.step_time_s == pytest.approx(passes_s + sum_s, rel=1e-6)
    added = [entry for entry in clipped.collectives if entry.key not in {each.key for each in free.collectives}]
    assert [(entry.kind, entry.bytes, entry.count) for entry in added] == [("all-reduce", 8, 1)] * bool(summed_bytes)


@pytest.mark.parametrize("method", ["ddp", "zero1"])
def test_clipping_whole_gradients_in_fp16_is_a_part_of_their_division_by_the_loss_scale(method):
    """Only their norm is added: one pass over 2 bytes an element."""
    clipped_s, free_s = (
        simulate(loaded_of(made(method, norm, precision="fp16", loss_scale=1024.0))).result.step_time_s
        for norm in (1.0, None)
    )
    assert clipped_s - free_s == pytest.approx(2 * tiny_model().elements / 1e9, rel=1e-6)


@pytest.mark.parametrize(("method", "plan"), [("gs_wgrad", {}), ("gs", {"tp": 2, "dp_shard": 1})])
def test_clipping_of_assigned_layers_and_of_pushed_slices_is_refused(method, plan):
    with pytest.raises(UserError, match=r"workload.clip_norm = 1: cannot run yet with method"):
        made(method, 1.0, model=GPT, **plan)


PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("method", "ranks", "plan", "groups"),
    [
        ("tensor", 2, {"tp": 2}, [(0, 1)]),
        ("ddp", 4, {"tp": 2}, [(0, 1), (2, 3)]),
        ("zero3", 4, {"tp": 2}, [(0, 1), (2, 3), (0, 2), (1, 3)]),
        (
            "ddp",
            8,
            {"tp": 2, "pp": 2, "micro_batches": 4},
            [(0, 1), (2, 3), (4, 5), (6, 7), *((n, n + 4) for n in range(4))],
        ),
    ],
)
def test_norms_of_slices_are_summed_over_them_then_over_shards_and_stages(method, ranks, plan, groups):
    clipped, free = (
        simulate(loaded_of(made(method, norm, model=GPT, ranks=ranks, **plan))).result.collectives
        for norm in (1.0, None)
    )
    added = [entry for entry in clipped if entry.key not in {each.key for each in free}]
    assert sorted((tuple(entry.group), entry.bytes, entry.count) for entry in added) == sorted(
        (group, 8, 1) for group in groups
    )
