"""What the host adds where blocks are cut: DTensor's dispatch and propagation of shardings, and to sums over ranks."""

import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.benchmarks.bench import Bench
from gsreal.lab.throttle import device_time_s
from gsreal.measure import Timeline
from gsreal.methods.tensor import distribute
from gsreal.models import TransformerBlock
from gsreal.tensor_slices import cut_of, slices_of

BLOCKS, PAIRS, SUMS = 2, 2, 4
"""Blocks one after another; in each, pairs of maps cut by columns and by rows, and sums over ranks."""
WIDTH, HEADS, SAMPLES = 128, 4, 8
TOKENS = (1, 64, 256, 512)
"""Of each sample. The more there are, the less of the host's code and objects do the caches still have after a map."""
BLOCK_WARMUPS, BLOCK_STEPS = 3, 15
"""Plain and cut steps take turns: a slow second of the machine falls on both."""


def cut_block_cost(bench: Bench) -> dict[str, Any]:
    """Return DTensor's own time in forward and backward of a pair of cut maps, and in a sum over ranks, by its bytes.

    Blocks cut in two, by DTensor and by hand, on one rank, whose peer is made up: its collectives return at once. What
    a plain call of such a collective takes is left out of a sum's time: the collective's own cost has it. Slices of our
    own take as long for a sum: both use torch's functional collectives.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  it makes the backend `fake` known

    group = dist.new_group([0, 1], backend="fake")  # every rank must call it; only rank 0 uses it
    found: dict[str, Any] | None = bench.alone(lambda: _curves(bench, group))
    return found or {}


def _curves(bench: Bench, group: Any) -> dict[str, Any]:
    timeline = Timeline(bench.rank, torch.device("cpu"), device_time_s)  # the host's clock, on a GPU too
    mesh = DeviceMesh.from_group(group, bench.device.type)
    plain, cut = (_blocks(bench, each, timeline) for each in (None, mesh))
    inputs = [torch.randn(SAMPLES, tokens, WIDTH, device=bench.device, requires_grad=True) for tokens in TOKENS]
    found = [_added_s(bench, (plain, cut), x, group, timeline) for x in inputs]
    sizes = [float(x.numel() * x.element_size()) for x in inputs]
    return {name: {"sizes": sizes, "values": [each[name] for each in found]} for name in found[0]}


def _blocks(bench: Bench, mesh: DeviceMesh | None, timeline: Timeline) -> nn.Sequential:
    """Return blocks of which half is left: cut by DTensor for a mesh, else by hand, with no sums."""
    blocks = nn.Sequential(*(TransformerBlock(WIDTH, HEADS, causal=True) for _ in range(BLOCKS))).to(bench.device)
    for block in blocks:
        cut = cut_of(block)
        assert cut is not None  # it is listed there
        held = range(cut.units(block) // 2)
        if mesh is not None:
            distribute(block, cut, held, mesh, timeline)
            continue
        for (path, name), part in slices_of(block, held).items():
            module = block.get_submodule(path)
            module.register_parameter(name, nn.Parameter(part.of(getattr(module, name).detach())))
        cut.resize(block, len(held))
    return blocks


def _added_s(
    bench: Bench, kinds: tuple[nn.Module, nn.Module], x: Tensor, group: Any, timeline: Timeline
) -> dict[str, float]:
    """Return what cutting adds to (forward, backward) of a pair of maps, and the host time of a sum."""
    steps: tuple[list[dict[str, float]], ...] = ([], [])
    for step in range(BLOCK_WARMUPS + BLOCK_STEPS):
        for module, found in zip(kinds, steps, strict=True):
            phases = _step_phases(bench, module, x, timeline)
            if step >= BLOCK_WARMUPS:
                found.append(phases)
    plain, cut = ({name: statistics.median(each[name] for each in found) for name in found[0]} for found in steps)
    sum_s = cut["exposed_communication"] / (BLOCKS * SUMS)
    call_s = bench.time_s(partial(_plain_sum, x.detach(), group))
    return {
        "forward_pair_s": max(0.0, (cut["forward"] - plain["forward"]) / (BLOCKS * PAIRS)),
        "backward_pair_s": max(0.0, (cut["backward"] - plain["backward"]) / (BLOCKS * PAIRS)),
        "sum_s": max(0.0, sum_s - call_s),
    }


def _plain_sum(x: Tensor, group: Any) -> None:
    dist.all_reduce(x.clone(), group=group)  # a functional all-reduce copies too: traces count that


def _step_phases(bench: Bench, module: nn.Module, x: Tensor, timeline: Timeline) -> dict[str, float]:
    bench.finish()
    timeline.restart()
    with timeline.span("forward", "forward"):
        y = module(x)
    gradient = torch.ones_like(y)
    with timeline.span("backward", "backward"):
        y.backward(gradient)
    module.zero_grad(set_to_none=True)
    x.grad = None
    return timeline.phases_since(0)
