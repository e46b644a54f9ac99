# ruff: noqa: E501  a server of a cluster is one line
"""Random scenario points, simulated: an answer is whole and within bounds, a refusal is one line.

A point that fails is printed as a scenario file, with its seed; `gssim run FILE` shows it.
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import tomli_w
from examples import examples
from point_checks import assert_same_as_unfolded, faster_devices, faster_links, faults_of, slower_by
from points import (
    ADAPTED_LOSSES,
    ADAPTED_PARTS,
    COMBINED,
    EXPERTS_IN_PARTS,
    EXPERTS_OF_TENSOR_RANKS,
    EXPERTS_ON_TWO_LEVELS,
    FROZEN_PARTS,
    LATER,
    PARTED,
    PRODUCTS_BESIDE_EXCHANGES,
    PUSHED_EXPERTS,
    SCENARIOS,
    SHARDED_REPLICAS,
    SPLIT_BACKWARDS,
    STREAMED,
    SUMMED_EXPERTS,
    SUMS_BESIDE_PRODUCTS,
    UNDER_AUTOCAST,
    random_point,
)

from gssim.engine import machine
from gssim.errors import UserError
from gssim.execution.cache import Shared
from gssim.network import Network
from gssim.planner import with_suggested_changes
from gssim.scenario import load_scenario
from gssim.simulation import simulate
from gssim.terminal import print_result

FEW, FEW_DEVICES = (
    (*range(14), *range(LATER, LATER + 8), *range(STREAMED, STREAMED + 4), *range(COMBINED, COMBINED + 4)),
    4,
)
"""Seeds of the small form, and how many devices their points have at most."""
FURTHER = (
    *range(40),
    *range(LATER, LATER + 20),
    *range(STREAMED, STREAMED + 10),
    *range(COMBINED, COMBINED + 5),
    *range(SHARDED_REPLICAS, SHARDED_REPLICAS + 10),
    *range(PARTED, PARTED + 10),
    *range(EXPERTS_IN_PARTS, EXPERTS_IN_PARTS + 10),
    *range(EXPERTS_OF_TENSOR_RANKS, EXPERTS_OF_TENSOR_RANKS + 10),
    *range(PUSHED_EXPERTS, PUSHED_EXPERTS + 10),
    *range(SUMMED_EXPERTS, SUMMED_EXPERTS + 10),
    *range(EXPERTS_ON_TWO_LEVELS, EXPERTS_ON_TWO_LEVELS + 10),
    *range(UNDER_AUTOCAST, UNDER_AUTOCAST + 10),
    *range(ADAPTED_PARTS, ADAPTED_PARTS + 10),
    *range(SPLIT_BACKWARDS, SPLIT_BACKWARDS + 10),
    *range(FROZEN_PARTS, FROZEN_PARTS + 10),
    *range(ADAPTED_LOSSES, ADAPTED_LOSSES + 10),
    *range(SUMS_BESIDE_PRODUCTS, SUMS_BESIDE_PRODUCTS + 10),
    *range(PRODUCTS_BESIDE_EXCHANGES, PRODUCTS_BESIDE_EXCHANGES + 10),
)
"""Seeds of as small points that are no part of the quick tests."""
MANY = [
    range(first, first + max(150, examples(500)))
    for first in (
        *range(1000, 8000, 1000),
        *range(LATER, LATER + 4000, 1000),
        STREAMED,
        COMBINED,
        SHARDED_REPLICAS,
        PARTED,
        EXPERTS_IN_PARTS,
        EXPERTS_OF_TENSOR_RANKS,
        PUSHED_EXPERTS,
        SUMMED_EXPERTS,
        EXPERTS_ON_TWO_LEVELS,
        UNDER_AUTOCAST,
        ADAPTED_PARTS,
        SPLIT_BACKWARDS,
        FROZEN_PARTS,
        ADAPTED_LOSSES,
        SUMS_BESIDE_PRODUCTS,
        PRODUCTS_BESIDE_EXCHANGES,
    )
]
"""Seeds of the large test: 3,000 points, 10,000 where tests are to be thorough."""
USUAL_DEVICES, MOST_DEVICES = 8, 32
"""Largest numbers of devices of four in five points, and of all."""
LONGEST_REFUSAL = 300
SLOWER = 1e-9
NO_PAIR_IN_TURN = mock.patch.object(Network, "latency_s", return_value=math.inf)
"""Patch under which the two messages of a pair in gloo's all-to-alls never follow one another ([Note: pairs] of
`engine.rendezvous`): no notice travels in time. Where a faster rank arrives so much earlier than another that they do,
an exchange takes the sum of both instead of the longer one. More is then not always faster."""


@dataclass
class Seen:
    """Features that the simulated points have covered."""

    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def devices_of(seed: int) -> int:
    """Return how many devices a point of the large form has at most."""
    return USUAL_DEVICES if seed % 5 else MOST_DEVICES


def look_at(seeds: Sequence[int], folder: Path, most_devices: Callable[[int], int]) -> Seen:
    """Simulate the points of these seeds; some of them also unfolded, or with faster devices and links."""
    seen, shared = Seen(), Shared()
    for seed in seeds:
        path = folder / f"{seed}.toml"
        path.write_text(tomli_w.dumps(random_point(seed, most_devices=most_devices(seed))))
        try:
            wrong = list(faults_at(path, seed, shared))
            seen.answered += 1
        except UserError as error:
            said = str(error)
            seen.refused[said.removeprefix(f"{path}: ")[:60]] += 1
            wrong = []
            if len(said.removeprefix(str(folder))) > LONGEST_REFUSAL or "\n" in said:
                wrong.append(f"refused with more than a line: {said}")
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            listed = "\n".join(f"    {line}" for line in wrong)
            seen.failures.append(f"seed {seed}, at most {most_devices(seed)} devices:\n{listed}\n{path.read_text()}")
    return seen


def faults_at(path: Path, seed: int, shared: Shared) -> Iterator[str]:
    """Yield what is wrong with the answer to a scenario; raise UserError where it is refused."""
    loaded = load_scenario(path, shared=shared)
    simulated = simulate(loaded, shared=shared)
    simulated.result.to_json()
    yield from faults_of(loaded, simulated)
    cluster = loaded.scenario.cluster
    for name, faster in (("links", faster_links), ("devices", faster_devices)) if seed % 10 == 1 else ():
        if name == "devices" and loaded.scenario.plan.shares.shards == "compute":
            continue  # the paper's rule gives a faster device more to own, whether or not that is any faster
        slower = slower_by(loaded, faster(cluster), simulated.result.step_time_s)
        if slower > SLOWER:
            with NO_PAIR_IN_TURN:
                slower = slower_by(loaded, faster(cluster), simulate(loaded, spread=False).result.step_time_s)
        if slower > SLOWER:
            yield f"with faster {name} the step is longer by {slower:.3%}"
    if seed % 10 == 3:  # what `gssim run` shows
        result = with_suggested_changes(loaded, simulated.result)
        assert bool(result.remedies) <= (not result.fits)
        with redirect_stdout(StringIO()) as shown:
            print_result(result)
        if re.search(r"\bnan\b", shown.getvalue()):
            yield f"shown is nan: {shown.getvalue()}"
    if seed % 15 == 7:
        assert_same_as_unfolded(simulated.result, simulate(loaded, unfolded=True).result)
    if seed % 15 == 11:  # the fast walks, wherever they can, and SimPy alone
        with mock.patch.object(machine, "MIN_CLASSES_VECTORISED", 1):
            vectorised = simulate(loaded).result
        with mock.patch.multiple(machine, MIN_CLASSES_VECTORISED=math.inf, can_walk_outlines=lambda _machine: False):
            reference = simulate(loaded).result
        assert_same_as_unfolded(simulated.result, reference)
        assert_same_as_unfolded(vectorised, reference)


def assert_all_hold(seen: Seen, points: int) -> None:
    assert not seen.failures, "\n\n".join([f"{len(seen.failures)} of {points} points", *seen.failures[:20]])
    refused = sum(seen.refused.values())
    print(f"{points} points: {seen.answered} answered, {refused} refused: {dict(seen.refused.most_common())}")
    assert seen.answered + refused == points
    assert 3 * seen.answered >= 2 * points


@pytest.mark.parametrize("seeds", [FEW, pytest.param(FURTHER, marks=pytest.mark.slow)], ids=["few", "further"])
def test_random_points_are_answered_within_bounds_or_refused_with_a_line(seeds, tmp_path):
    assert_all_hold(look_at(seeds, tmp_path, lambda seed: FEW_DEVICES), len(seeds))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_many_random_points_are_answered_within_bounds_or_refused_with_a_line(seeds, tmp_path):
    assert_all_hold(look_at(seeds, tmp_path, devices_of), len(seeds))


def test_a_failure_shows_the_seed_and_the_scenario_as_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("test_points.faults_of", lambda loaded, simulated: ["all is wrong"])
    failure, *others = look_at([2], tmp_path, lambda seed: 2).failures
    first, wrong, text = failure.split("\n", 2)
    assert others == []
    assert first.startswith("seed 2,")
    assert wrong.strip() == "all is wrong"
    assert tomllib.loads(text) == random_point(2, most_devices=2)


UNSETTLED = """
plan = { method = "ddp", tp = 4, dp_replicate = 2, micro_batches = 2, shares = { batch = "throughput" } }
run = { steps = 3, warmup_steps = 1 }

[workload]
model = "MODEL"
global_batch_size = 32
sequence_length = 32
precision = "fp32"
optimizer = "sgd"

[cluster]
name = "unequal"
source = "made"
backend = "nccl"
nccl = "ampere"

[cluster.device_types]
h100-sxm = { preset = "h100-sxm" }
h200-sxm = { preset = "h200-sxm" }

[cluster.topology]
kind = "servers"
fabric = { kind = "switch" }
servers = [
    { count = 7, device = "h100-sxm", devices = 1, nics = 1, inside = "none", nic_link = "ib-hdr-200", pcie_link = "pcie4x16" },
    { count = 1, device = "h200-sxm", devices = 1, nics = 1, inside = "none", nic_link = "roce-100", pcie_link = "pcie4x16" },
]
"""


def test_phases_of_ranks_that_wait_for_each_other_through_others_alone_sum_to_the_step(tmp_path):
    path = tmp_path / "unsettled.toml"
    path.write_text(UNSETTLED.replace("MODEL", str(SCENARIOS / "models/bert-byte-1m.toml")))
    assert list(faults_at(path, 0, Shared())) == []


def test_a_faster_rank_is_slower_only_where_the_messages_of_pairs_then_follow_one_another(tmp_path):
    seed = 21351  # three ranks that exchange experts' rows, of which the first then arrives earlier than the others
    path = tmp_path / "three.toml"
    path.write_text(tomli_w.dumps(random_point(seed, most_devices=devices_of(seed))))
    loaded = load_scenario(path)
    alike_s = simulate(loaded, spread=False).result.step_time_s
    assert slower_by(loaded, faster_devices(loaded.scenario.cluster), alike_s) > SLOWER
    assert list(faults_at(path, seed, Shared())) == []
