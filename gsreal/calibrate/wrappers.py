"""Host-time overhead of wrappers: FSDP2, Gradient Sharding, DTensor's dispatch, and sums over ranks."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gsreal.calibrate.bench import Bench, optimizer_alone
from gsreal.gradient_sharding import shard_gradients
from gsreal.lab.throttle import device_time_s
from gsreal.measure import Timeline
from gsreal.methods.cuts import known_cut
from gsreal.methods.tensor_slices import distribute, slices_of
from gsreal.methods.training import Training, Weights
from gsreal.models import TransformerBlock
from gsreal.run.progress import note_progress

BLOCKS, PAIRS, SUMS = 2, 2, 4
"""Consecutive blocks; in each, pairs of maps sliced by columns and by rows, and sums over ranks."""
WIDTH, HEADS, SAMPLES = 128, 4, 8
TOKENS = (1, 64, 256, 512)
"""Tokens of each sample. The more tokens, the less of the host's code and objects remain in the caches after a map."""
BLOCK_WARMUPS, BLOCK_STEPS = 3, 15
"""Plain and sliced steps alternate: slow periods of the machine affect both."""


def cut_block_cost(bench: Bench) -> dict[str, Any]:
    """Return DTensor's own time in forward and backward of a pair of sliced maps, and in a sum over ranks.

    The time of a sum is given by its bytes.

    Blocks are sliced in two, by DTensor and by hand, and run on one rank with a fake peer, whose collectives return
    immediately. The time of a plain call of such a collective is subtracted from a sum's, because the collective's own
    cost includes it. Slices made by this project take as long for a sum: both use torch's functional collectives.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  it makes the backend `fake` known

    group = dist.new_group([0, 1], backend="fake")  # every rank must call it; only rank 0 uses it
    curves: dict[str, Any] | None = bench.alone(lambda: _curves(bench, group))
    return curves or {}


def _curves(bench: Bench, group: Any) -> dict[str, Any]:
    timeline = Timeline(bench.rank, torch.device("cpu"), device_time_s)  # the host's clock, on a GPU too
    mesh = DeviceMesh.from_group(group, bench.device.type)
    plain, cut = _blocks(bench, None, timeline), _blocks(bench, mesh, timeline)
    inputs = [torch.randn(SAMPLES, tokens, WIDTH, device=bench.device, requires_grad=True) for tokens in TOKENS]
    points = [_added_s(bench, (plain, cut), x, group, timeline) for x in inputs]
    sizes = [float(x.numel() * x.element_size()) for x in inputs]
    return {name: {"sizes": sizes, "values": [each[name] for each in points]} for name in points[0]}


def _blocks(bench: Bench, mesh: DeviceMesh | None, timeline: Timeline) -> nn.Sequential:
    """Return blocks sliced to half: by DTensor for a mesh, else by hand, without sums."""
    blocks = nn.Sequential(*(TransformerBlock(WIDTH, HEADS, causal=True) for _ in range(BLOCKS))).to(bench.device)
    for block in blocks:
        cut = known_cut(block)  # CUTS has its class
        units = range(cut.units(block) // 2)
        if mesh is not None:
            distribute(block, cut, units, mesh, timeline)
            continue
        for (path, name), part in slices_of(block, units).items():
            module = block.get_submodule(path)
            module.register_parameter(name, nn.Parameter(part.of(getattr(module, name).detach())))
        cut.resize(block, len(units))
    return blocks


def _added_s(
    bench: Bench, kinds: tuple[nn.Module, nn.Module], x: Tensor, group: Any, timeline: Timeline
) -> dict[str, float]:
    """Return the overhead of slicing in (forward, backward) of a pair of maps, and the host time of a sum."""
    steps: tuple[list[dict[str, float]], ...] = ([], [])
    for step in range(BLOCK_WARMUPS + min(BLOCK_STEPS, bench.settings.link_repeats)):
        for module, of_kind in zip(kinds, steps, strict=True):
            phases = _step_phases(bench, module, x, timeline)
            if step >= BLOCK_WARMUPS:
                of_kind.append(phases)
    plain, cut = ({name: statistics.median(each[name] for each in of_kind) for name in of_kind[0]} for of_kind in steps)
    sum_s = cut["exposed_communication"] / (BLOCKS * SUMS)
    plain_x = x.detach()
    # a functional all-reduce copies too: traces count that
    call_s = bench.time_s(lambda: dist.all_reduce(plain_x.clone(), group=group))
    return {
        "forward_pair_s": max(0.0, (cut["forward"] - plain["forward"]) / (BLOCKS * PAIRS)),
        "backward_pair_s": max(0.0, (cut["backward"] - plain["backward"]) / (BLOCKS * PAIRS)),
        "sum_s": max(0.0, sum_s - call_s),
    }


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


WARMUPS = 4
"""Plain and wrapped steps alternate: slow periods of the machine affect both."""


class _Stack(nn.Module):
    """Units of `tensors` tiny vectors: their compute is negligible beside the host time of their wrapper.

    `memory`: the tensor that the backward reads and writes between two gradients; None: none.
    """

    def __init__(self, units: int, tensors: int, elements: int, memory: Tensor | None = None) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit(tensors, elements, memory) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


class _Unit(nn.Module):
    def __init__(self, tensors: int, elements: int, memory: Tensor | None) -> None:
        super().__init__()
        self.memory = memory
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(elements)) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        for value in self.values:
            x = x + value[:1]
            if self.memory is not None:
                x = _ComputeInBackward.apply(x, self.memory)
        return x


COMPUTED_BYTES = 2**21
"""Memory that compute between two gradients touches: about as much as a core's cache or a layer's activations."""


class _ComputeInBackward(torch.autograd.Function):
    """The identity, whose backward reads and writes some memory."""

    @staticmethod
    def forward(context: Any, x: Tensor, memory: Tensor) -> Tensor:
        context.memory = memory
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context.memory.add_(1.0)
        return gradients[0], None


UNITS = 6
Parts = tuple[float, float, float]
"""Seconds of forward, backward and update."""


def sharded_unit_cost(bench: Bench) -> tuple[dict[str, float], dict[str, float]]:
    """Return FSDP2's own time per unit, per tensor and per byte, and a DTensor's in each optimizer's step.

    Both are differences between wrapped and plain stacks of tiny units, without the time inside collectives. An
    optimizer pays for every operation on a DTensor: AdamW has a dozen, SGD one or two. The time for a byte is measured
    on CPUs alone: on a GPU, whose copies are as fast as any, it would be that of gloo, which goes through the host's
    memory.
    """
    stacks = {
        optimizer: [_wrapped_minus_plain(bench, UNITS, tensors, 64, optimizer) for tensors in (2, 12)]
        for optimizer in dict.fromkeys(["adamw", *bench.settings.optimizers])
    }
    few, many = stacks["adamw"]
    unit = _unit_cost(few, many)
    if bench.device.type == "cpu":
        large = _wrapped_minus_plain(bench, UNITS, 2, 2**17)
        copied_byte_s = (large[0] + large[1] - few[0] - few[1]) / (2 * 2 * 2**17 * 4)
        unit |= {"copied_byte_s": max(0.0, copied_byte_s)}
    added = {optimizer: (many[2] - few[2]) / 10 for optimizer, (few, many) in stacks.items()}
    return unit, {optimizer: max(0.0, seconds) for optimizer, seconds in added.items()}


def flat_unit_cost(bench: Bench) -> dict[str, float]:
    """Return the host's time for a unit of parameters that Gradient Sharding gathers, per unit and tensor."""
    return _unit_cost(*(_wrapped_minus_plain(bench, UNITS, tensors, 64, wrap=_sharded_by_push) for tensors in (2, 12)))


def _unit_cost(few: Parts, many: Parts) -> dict[str, float]:
    """Return a unit's costs from the added time of units of 2 and of 12 tiny tensors."""
    tensor = [(m - f) / 10 for m, f in zip(many, few, strict=True)]
    return {
        "forward_unit_s": max(0.0, few[0] - 2 * tensor[0]),
        "forward_tensor_s": max(0.0, tensor[0]),
        "backward_unit_s": max(0.0, few[1] - 2 * tensor[1]),
        "backward_tensor_s": max(0.0, tensor[1]),
    }


Wrap = Callable[["Bench", "_Stack", str, Callable[[], Any]], torch.optim.Optimizer]
"""Wraps a stack, and returns its optimizer of that name; time inside the given context does not count."""


def _fully_sharded(bench: Bench, wrapped: _Stack, optimizer: str, left_out: Callable[[], Any]) -> torch.optim.Optimizer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class AllGather(DefaultAllGather):
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            with left_out():
                _await(super().__call__(*args, **kwargs))

    class ReduceScatter(DefaultReduceScatter):
        def __call__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
            with left_out():
                _await(super().__call__(*args, **kwargs))

    mesh = init_device_mesh(bench.device.type, (bench.ranks,))
    for unit in wrapped.units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        unit.set_custom_all_gather(AllGather())  # type: ignore[operator]
        unit.set_custom_reduce_scatter(ReduceScatter())  # type: ignore[operator]
    fully_shard(wrapped, mesh=mesh, reshard_after_forward=False)
    return optimizer_alone(optimizer, wrapped.parameters(), bench.device)


def _await(work: dist.Work | None) -> None:
    """Wait here for a collective that FSDP2 starts on a GPU, and would else await in its own, counted time."""
    if work is not None:
        work.wait()


def _sharded_by_push(
    bench: Bench, wrapped: _Stack, optimizer: str, left_out: Callable[[], Any]
) -> torch.optim.Optimizer:
    """Shard a stack's parameters by Gradient Sharding; its exposed communication is left out."""

    def observe(label: str, phase: str, *, group: dist.ProcessGroup | None = None) -> AbstractContextManager[None]:
        outside: AbstractContextManager[None] = left_out()
        return outside if phase == "exposed_communication" else nullcontext()

    return shard_gradients(
        wrapped,
        lambda shards: optimizer_alone(optimizer, shards, bench.device),
        parameters="sharded",
        units=list(wrapped.units),
        observe=observe,
    )


def _wrapped_minus_plain(
    bench: Bench,
    units: int,
    tensors: int,
    elements: int,
    optimizer: str = "adamw",
    *,
    wrap: Wrap = _fully_sharded,
) -> Parts:
    """Return the overhead of wrapping one unit in (forward, backward, optimizer)."""
    spent = [0.0]

    @contextmanager
    def left_out() -> Any:
        began = device_time_s()
        yield
        spent[0] += device_time_s() - began

    plain, wrapped = (_Stack(units, tensors, elements).to(bench.device) for _ in range(2))
    optimizers = (
        optimizer_alone(optimizer, plain.parameters(), bench.device),
        wrap(bench, wrapped, optimizer, left_out),
    )
    times_s: list[list[list[float]]] = [[[], [], []], [[], [], []]]
    for step in range(WARMUPS + bench.settings.link_repeats):
        for module, updates, parts in zip((plain, wrapped), optimizers, times_s, strict=True):
            bench.displace()  # in training, host code and its objects come back to caches full of the layers' work
            dist.barrier()
            times = _step_parts(bench, module, updates, spent)
            for part, seconds in zip(parts, times, strict=True):
                if step >= WARMUPS:
                    part.append(seconds)
    medians = [[statistics.median(part) for part in parts] for parts in times_s]
    forward, backward, update = ((w - p) / units for p, w in zip(*medians, strict=True))
    return forward, backward, update


def _step_parts(
    bench: Bench, module: nn.Module, optimizer: torch.optim.Optimizer, spent: list[float]
) -> tuple[float, float, float]:
    """Return the seconds of forward, backward and optimizer of one step, without the time in collectives."""

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        bench.finish()
        spent[0] = 0.0
        began = device_time_s()
        result = call()
        bench.finish()
        return device_time_s() - began - spent[0], result

    x = torch.ones(1, device=bench.device, requires_grad=True)
    forward_s, y = timed(lambda: module(x))
    backward_s, _ = timed(lambda: y.sum().backward())
    update_s, _ = timed(optimizer.step)
    optimizer.zero_grad(set_to_none=True)
    return forward_s, backward_s, update_s


def gradient_hook_cost(bench: Bench) -> float:
    """Return the seconds that collecting one gradient adds to a step under Gradient Sharding, without copying.

    That is the hook's time in the backward, and `optimizer.step()` without its update and exchanges.
    """
    group = dist.new_group([0])  # every rank must call it; only rank 0 uses it

    def sharded(module: nn.Module) -> tuple[nn.Module, Callable[[], float]]:
        observed = [0.0]

        @contextmanager
        def left_out(label: str, phase: str, *, group: dist.ProcessGroup | None = None) -> Any:
            bench.finish()
            began = device_time_s()
            yield
            bench.finish()
            observed[0] += device_time_s() - began

        optimizer = shard_gradients(module, lambda shard: torch.optim.SGD(shard, lr=0.1), group=group, observe=left_out)

        def step() -> float:
            observed[0] = 0.0
            optimizer.step()
            return observed[0]

        return module, step

    tensors = 48
    cost_s = bench.alone(lambda: _added_s_by_wrapper(bench, tensors, sharded) / tensors)
    return max(0.0, float(cost_s or 0.0))


LOOP_STEPS, COLD_STEPS = 60, 20


def step_cost(bench: Bench) -> float:
    """Return the host's seconds for a training step besides forward, backward and update: batch, loss, time marks.

    It is the time of a training loop whose model is one tiny linear map, less that of the three alone.
    """
    cost_s = bench.alone(lambda: max(0.0, _loop_step_s(bench) - _bare_step_s(bench)))
    return float(cost_s or 0.0)


def _loop_step_s(bench: Bench) -> float:
    module = nn.Linear(8, 8).to(bench.device)
    timeline = Timeline(bench.rank, bench.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    training = Training(module, optimizer, timeline, scale=1.0, loss=lambda logits, _targets: logits.sum())
    batch, weights = torch.ones(2, 2, 8), Weights((1.0,) * bench.ranks)
    inputs, targets = batch.pin_memory() if bench.device.type == "cuda" else batch
    losses = []

    def step() -> None:
        training.slow_down(1.0)
        on_device = [each.to(bench.device, non_blocking=True) for each in (inputs, targets)]
        loss = training.step(on_device[0], on_device[1], weights, bench.rank)
        losses.append(loss * weights.ranks[bench.rank])
        note_progress("a step of the loop done")

    timeline.restart()
    return _median_step_s(bench, step)


def _bare_step_s(bench: Bench) -> float:
    module = nn.Linear(8, 8).to(bench.device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = torch.ones(2, 8, device=bench.device)

    def step() -> None:
        module(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return _median_step_s(bench, step)


def _median_step_s(bench: Bench, step: Callable[[], None]) -> float:
    """Return the median time of a step: on a CPU with cold caches, as a model's compute leaves them.

    On a GPU, it is the median of many steps in a row, none of which waits for the device.
    """
    if bench.device.type == "cpu":
        return bench.cold_time_s(step, repeats=COLD_STEPS)
    moments = []
    for _ in range(LOOP_STEPS):
        step()
        moments.append(device_time_s())
    bench.finish()
    return statistics.median(after - before for before, after in pairwise(moments))


FEW_TENSORS, MANY_TENSORS = 8, 48


def replica_costs(bench: Bench) -> dict[str, float]:
    """Return the seconds that DistributedDataParallel adds for each gradient and each forward, without all-reduces."""
    group = dist.new_group([0])

    def replicated(module: nn.Module) -> tuple[nn.Module, None]:
        return nn.parallel.DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True), None

    def hook_s() -> float:
        few_s, many_s = (_added_s_by_wrapper(bench, tensors, replicated) for tensors in (FEW_TENSORS, MANY_TENSORS))
        return max(0.0, (many_s - few_s) / (MANY_TENSORS - FEW_TENSORS))

    def forward_s() -> float:
        plain, wrapped = (_Stack(1, FEW_TENSORS, 64).to(bench.device) for _ in range(2))
        modules = (plain, replicated(wrapped)[0])
        times_s: tuple[list[float], ...] = ([], [])
        for step in range(WARMUPS + bench.settings.link_repeats):
            for module, of_module in zip(modules, times_s, strict=True):
                bench.displace()
                bench.finish()
                began = device_time_s()
                result = module(torch.ones(1, device=bench.device))
                bench.finish()
                if step >= WARMUPS:
                    of_module.append(device_time_s() - began)
                result.sum().backward()
        before_s, after_s = map(statistics.median, times_s)
        return max(0.0, after_s - before_s)

    costs = bench.alone(lambda: {"replica_hook_s": hook_s(), "replica_forward_s": forward_s()})
    return costs or {}


Wrapper = Callable[[nn.Module], tuple[nn.Module, Callable[[], float] | None]]
"""Returns the wrapped module and, if its step is more than the backward, a function that runs the rest of the step and
returns the seconds that do not count."""
BACKWARDS, BACKWARD_WARMUPS = 25, 5


def _added_s_by_wrapper(bench: Bench, tensors: int, wrap: Wrapper) -> float:
    """Return by how many seconds a wrapper, with the rest of its step, lengthens the backward of `tensors` tensors.

    Backwards with and without the wrapper alternate, so that slow periods of the machine affect both. On a CPU, compute
    between the gradients evicts the hooks' code from the caches, as a model's layers do; a hook whose code is in the
    caches takes half as long.
    """
    memory = torch.ones(COMPUTED_BYTES // 4) if bench.device.type == "cpu" else None
    plain, inner = (_Stack(1, tensors, 64, memory).to(bench.device) for _ in range(2))
    wrapped, finish = wrap(inner)
    modules: tuple[nn.Module, ...] = (plain, wrapped)
    times: tuple[list[float], ...] = ([], [])
    for step in range(BACKWARDS):
        for module, rest, of_module in zip(modules, (None, finish), times, strict=True):
            total = module(torch.ones(1, device=bench.device)).sum()
            bench.displace()
            bench.finish()
            began = device_time_s()
            total.backward()
            left_out_s = rest() if rest else 0.0
            bench.finish()
            if step >= BACKWARD_WARMUPS:
                of_module.append(device_time_s() - began - left_out_s)
            module.zero_grad(set_to_none=True)
    before_s, after_s = map(statistics.median, times)
    return after_s - before_s
