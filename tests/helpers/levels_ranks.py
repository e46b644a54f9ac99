"""Runs on four ranks of a test: cases, then small models sharded by hand, on two levels and at rest.

Arguments: a JSON file of cases as in `ranks`, and the file to write: what these showed, and what every rank saw.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rank_training import cases_in, from_all_ranks, meet, write_found
from ranks import run_case
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from gsreal.gradient_sharding import GradientSharding, shard_gradients
from gsreal.gradient_sharding.sharded_parameters import units_of
from gsreal.measure import MemoryCounter
from gsreal.run.rank import run_on_rank
from gssim.plan import Push, divide

NODES, PLACES, RANKS = 2, 2, 4
BATCHES = (1, 2, 2, 3)
SHARES = (0.1, 0.2, 0.3, 0.4)
WIDTH, THRESHOLD, STEPS = 6, 0.05, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x + torch.tanh(self.linear(self.norm(x))), 0


class Net(nn.Module):
    """Two blocks between maps that share a weight; a block that is left out in odd steps; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.sometimes = Block()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, *, whole: bool = True) -> Tensor:
        x = self.first(x)
        for block in [*self.blocks, *([self.sometimes] if whole else [])]:
            x, _ = block(x)
        return self.last(self.frozen(x))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(step: int, ranks: range) -> Tensor:
    """Return the inputs of some ranks in a step."""
    torch.manual_seed(1 + step)
    return torch.cat([part for i, part in enumerate(torch.randn(sum(BATCHES), WIDTH).split(BATCHES)) if i in ranks])


def loss_of(model: nn.Module, x: Tensor, *, whole: bool = True) -> Tensor:
    return model(x, whole=whole).square().mean()


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


Labels = list[str]


def sharded(labels: Labels | None = None, **settings: Any) -> tuple[Net, GradientSharding]:
    model = net()

    @contextmanager
    def observe(label: str, _phase: str, **_settings: bool) -> Iterator[None]:
        if labels is not None:
            labels.append(label)
        yield

    if settings.get("parameters"):
        settings["units"] = [*model.blocks, model.sometimes]
    optimizer = shard_gradients(model, adam, shard_shares=SHARES, observe=observe, **settings)
    optimizer.weights = tuple(samples / sum(BATCHES) for samples in BATCHES)
    return model, optimizer


def trained(model: Net, optimizer: GradientSharding, *, parts: int = 1, each: bool = False) -> dict[str, Tensor]:
    """Train in a loop of one's own; every other step leaves a block out. Returns all parameters."""
    rank = dist.get_rank()
    for step in range(STEPS):
        x = rows(step, range(rank, rank + 1)).repeat_interleave(parts, dim=0)
        for number in range(parts):
            last = number == parts - 1
            with nullcontext() if each or last else optimizer.no_sync():
                (loss_of(model, x[number::parts], whole=step % 2 == 0) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)  # in between, somebody looks
    return model.state_dict()


def alone() -> dict[str, Tensor]:
    model = net()
    optimizer = adam([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        loss_of(model, rows(step, range(RANKS)), whole=step % 2 == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(found) == set(expected)
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def forms() -> dict[str, dict[str, Any]]:
    grid = init_device_mesh("cpu", (NODES, PLACES))
    line = init_device_mesh("cpu", (RANKS,))
    return {
        "two levels": {"mesh": grid, "first_bucket_bytes": 50, "bucket_bytes": 100},
        "two levels, beside": {"mesh": grid, "first_bucket_bytes": 50, "bucket_bytes": 100, "overlap": True},
        "at rest": {"parameters": "sharded"},
        "at rest, kept": {"parameters": "gathered", "mesh": line},
        "at rest, beside": {"parameters": "sharded", "overlap": True},
    }


def trainings() -> dict[str, float]:
    """Return how far each form's training is from one device's, and from itself."""
    expected, found = alone(), {}
    for name, settings in forms().items():
        first = trained(*sharded(**settings))
        found[name] = worst(first, expected)
        if name in ("two levels", "at rest"):
            found[f"{name}, accumulated"] = worst(trained(*sharded(**settings), parts=2), expected)
            found[f"{name}, accumulated, each"] = worst(trained(*sharded(**settings), parts=2, each=True), expected)
        push = Push(threshold=THRESHOLD)
        runs = [trained(*sharded(**settings, push=push)) for _ in range(2)]
        found[f"{name}, a threshold, again"] = worst(*runs)
        assert worst(runs[0], first) > 1e-4  # it does something
    return found


def thresholded_mean_of_a_node() -> float:
    """Return how far an update is from: the own place's node means, those of other nodes where large enough."""
    model = net()
    grid = init_device_mesh("cpu", (NODES, PLACES))
    optimizer = shard_gradients(
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        mesh=grid,
        push=Push(threshold=THRESHOLD),
        shard_shares=SHARES,
    )
    optimizer.weights = tuple(samples / sum(BATCHES) for samples in BATCHES)
    rank = dist.get_rank()
    loss_of(model, rows(0, range(rank, rank + 1))).backward()
    optimizer.step()
    before, means, weights = flat(net()), [], []
    for node in range(NODES):
        ranks = range(node * PLACES, (node + 1) * PLACES)
        reference = net()
        loss_of(reference, rows(0, ranks)).backward()
        means.append(flat(reference, of=lambda p: p.grad))
        weights.append(sum(BATCHES[each] for each in ranks) / sum(BATCHES))
    (bucket,) = optimizer.buckets
    owner = torch.empty_like(before, dtype=torch.long)
    division = divide(len(before), by_node=[SHARES[node * PLACES : (node + 1) * PLACES] for node in range(NODES)])
    for place in range(PLACES):
        for node, (start, end) in enumerate(division.ranges(place)):
            owner[start:end] = node
    change = torch.zeros_like(before)
    for node, (mean, weight) in enumerate(zip(means, weights, strict=True)):
        change += weight * torch.where((mean.abs() >= THRESHOLD) | (owner == node), mean, 0)
    exact = sum(weight * mean for mean, weight in zip(means, weights, strict=True))
    assert float((change - exact).abs().max()) > THRESHOLD / 4
    return float((bucket.whole - (before - change)).abs().max())


def flat(model: nn.Module, *, of: Callable[[nn.Parameter], Tensor | None] = lambda p: p.detach()) -> Tensor:
    """Return trained parameters, or their gradients, in the order of the default bucket."""
    trained_ones = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([value.reshape(-1) for p in reversed(trained_ones) if (value := of(p)) is not None])


def rest() -> dict[str, Any]:
    """Return what is there of a model sharded at rest between steps, and in its saved state."""
    model, optimizer = sharded(parameters="sharded")
    blocks = [unit for unit in units_of(model) if unit.module is not model]
    peak = []
    model.blocks[1].register_forward_pre_hook(lambda *_: peak.append([unit.is_whole for unit in blocks]))
    saved = trained(model, optimizer)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    bytes_held = sum(unit.flat.untyped_storage().nbytes() for unit in units_of(model))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    values = [bool(p.isnan().all()) for name, p in model.named_parameters() if name in names]
    fresh, its_optimizer = sharded(parameters="sharded")
    fresh.load_state_dict(saved)
    loaded = worst(fresh.state_dict(), saved)
    shards = sum(bucket.shard.numel() for bucket in its_optimizer.buckets)
    return {
        "bytes_held": bytes_held,
        "shapes_kept": shapes == {name: tuple(p.shape) for name, p in net().named_parameters()},
        "no_values": all(values),
        "whole_in_second_block": peak[0],
        "loaded_difference": loaded,
        "shard_elements": shards,
        "units": [(unit.name, unit.elements) for unit in units_of(model)],
    }


def order_beside() -> Labels:
    """Return what is issued and taken, and when, in one step of two blocks that are gathered ahead."""
    labels: Labels = []

    @contextmanager
    def observe(label: str, _phase: str, **_settings: bool) -> Iterator[None]:
        labels.append(label)
        yield

    model = net()
    del model.sometimes
    shard_gradients(model, adam, parameters="sharded", units=[*model.blocks], overlap=True, observe=observe)
    for index, block in enumerate(model.blocks):
        block.register_forward_hook(lambda *_, index=index: labels.append(f"forward block {index}"))
        block.norm.weight.register_hook(lambda _, index=index: labels.append(f"backward block {index}"))
    labels.clear()
    rank = dist.get_rank()
    loss_of(model, rows(0, range(rank, rank + 1)), whole=False).backward()
    kinds = ("issue all", "take", "forward", "backward")
    return [label for label in labels if label.startswith(kinds) and "root" not in label]


def refusals() -> dict[str, str]:
    """Return what is said to settings that do not go together."""
    grid = init_device_mesh("cpu", (NODES, PLACES))
    model = net()
    wrong: dict[str, dict[str, Any]] = {
        "unused units": {"units": [model.blocks[0]]},
        "nested units": {"units": [model.blocks[0], model.blocks[0].norm], "parameters": "sharded"},
        "foreign unit": {"units": [Block()], "parameters": "sharded"},
        "sharded on two levels": {"mesh": grid, "parameters": "sharded"},
        "mesh and group": {"mesh": grid, "group": dist.group.WORLD},
    }
    found = {}
    for name, settings in wrong.items():
        try:
            shard_gradients(model, adam, **settings)
        except ValueError as error:
            found[name] = str(error)
    return found


def main(cases_file: str, out: str) -> None:
    counter = MemoryCounter(torch.device("cpu"))
    meet()
    shown = {name: run_case(case, counter) for name, case in cases_in(cases_file).items()}
    own = {
        "trainings": trainings(),
        "node_mean": thresholded_mean_of_a_node(),
        "rest": rest(),
        "order": order_beside(),
        "refusals": refusals(),
    }
    write_found({"cases": shown, "by_hand": from_all_ranks(own)}, out)


if __name__ == "__main__":
    run_on_rank(main, sys.argv[1:])
