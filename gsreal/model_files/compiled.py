"""Traces blocks as torch.compile runs them, without compiling anything: inductor's own kernels and buffers.

Dynamo captures a block's forward. AOTAutograd derives its backward and decides which tensors are saved for it. Inductor
lowers both graphs, fuses operations into kernels, orders the kernels and plans their buffers. All of this is torch's
own code, under fake tensors. Only the last step is replaced: the program that inductor generates runs with kernels that
only count the bytes they would move, and with buffers that hold no values. Its matrix products, attention and other
library calls are torch's operations, which the recorder sees. Buffers live as long as the program's variables, as in a
real run.

The program is the one for a CPU. On a GPU inductor fuses by the same rules with a few exceptions: it computes the
reductions in a norm's gradients together, in one kernel more or one fewer, and splits large reductions in two.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import convert_frame
from torch._dynamo.eval_frame import set_enable_dynamic
from torch._dynamo.utils import get_metrics_context
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa, memory
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen import wrapper
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import AllocateLine, ReuseLine, buffer_reuse_key
from torch._inductor.compile_fx import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from gsreal.model_files.recorder import NoPolynomialError, active_recorder
from gsreal.model_files.repeated import plain_settings

RANDOM_STATE_BYTES = 5056
"""A CPU generator's state (torch.get_rng_state)."""


@dataclass
class KernelPlan:
    """Inductor's decisions for one graph that depend on the sizes of buffers.

    A model file uses one plan for all shapes, made at the largest traced shape. At another shape inductor might order
    kernels differently, and might share buffers that have the same size only there.
    """

    graph: object = field(repr=False)
    """The graph for which it was made."""
    order: tuple[str, ...] = ()
    """Names of the kernels in their order."""
    reused: dict[str, str] = field(default_factory=dict)
    """Buffer -> the earlier buffer whose memory it reuses."""
    sizes: dict[str, str] = field(default_factory=dict)
    """Buffer -> its size."""


class _Planner:
    """Makes inductor's decisions for the graphs of one step: follows known plans, or records new ones.

    `apart`: plans at another shape. Buffers share memory only if their sizes are equal at that shape too, not by
    chance.
    """

    def __init__(self, plans: dict[int, KernelPlan], apart: dict[int, KernelPlan]) -> None:
        self.plans, self.apart = plans, apart
        self.graphs: list[object] = []
        self.reorder, self.allocate, self.key = memory.reorder_for_peak_memory, AllocateLine.plan, buffer_reuse_key

    def current(self) -> tuple[int, KernelPlan]:
        """Return the number of the graph that is being lowered, and its plan."""
        if not any(graph is V.graph for graph in self.graphs):
            self.graphs.append(V.graph)
        number = next(i for i, graph in enumerate(self.graphs) if graph is V.graph)
        return number, self.plans.setdefault(number, KernelPlan(V.graph))

    def size_key(self, node: Any) -> tuple[Any, ...]:
        """Return a key that buffers must have in common to share memory, in place of inductor's `buffer_reuse_key`."""
        (number, plan), name, key = self.current(), node.get_name(), self.key(node)
        plan.sizes[name] = key[2]
        return (*key, self.apart[number].sizes.get(name)) if number in self.apart else key

    def ordered(self, nodes: list[Any], *others: Any) -> list[Any]:
        """Return kernels in the plan's order, in place of inductor's pass that reorders them for low peak memory."""
        _, plan = self.current()
        if plan.graph is V.graph:
            ordered = self.reorder(nodes, *others)
            plan.order = tuple(node.get_name() for node in ordered)
            return ordered
        named = {node.get_name(): node for node in nodes}
        if set(plan.order) != set(named):
            raise NoPolynomialError("the kernels into which torch fuses a block depend on its sizes")
        return [named[name] for name in plan.order]

    def planned(self, line: Any, state: Any) -> Any:
        """Return how a buffer is allocated, in place of `AllocateLine.plan`."""
        _, plan = self.current()
        name = line.node.get_name()
        self.size_key(line.node)
        if plan.graph is V.graph or name in V.graph.removed_buffers:
            planned = self.allocate(line, state)
            if isinstance(planned, ReuseLine):
                plan.reused[name] = planned.node.get_name()
            return planned
        if name not in plan.reused:
            return line
        free_lines = state.reuse_pool[self.size_key(line.node)]
        free = next((each for each in free_lines if each.node.get_name() == plan.reused[name]), None)
        if free is None:
            raise NoPolynomialError("the buffers that a block's kernels share depend on its sizes")
        free_lines.remove(free)
        free.is_reused = True
        return ReuseLine(line.wrapper, free.node, line.node)


@contextmanager
def traced_by_inductor(
    blocks: Sequence[nn.Module],
    forward: Callable[[], object],
    plans: dict[int, KernelPlan],
    apart: dict[int, KernelPlan],
) -> Iterator[None]:
    """Let blocks run the programs that inductor generates for them, with kernels that only count bytes.

    `forward` runs the whole module. It is called before anything is recorded, to lower every block; identical blocks
    share one program. `plans`: the plan of each graph by its number; an existing plan is followed, a missing one is
    made and added. `apart`: plans at another shape, which show which sizes are equal only by chance. To be entered
    under fake tensors. Raises what torch.compile raises for a forward that it cannot capture as a single graph.
    """
    programs: dict[Any, Callable[..., Any]] = {}
    planner = _Planner(plans, apart)
    with ExitStack() as stack:
        for patch in (
            mock.patch.object(GraphLowering, "compile_to_module", _counting_module),
            mock.patch.object(memory, "reorder_for_peak_memory", planner.ordered),
            mock.patch.object(wrapper, "buffer_reuse_key", planner.size_key),
            mock.patch.object(AllocateLine, "plan", lambda line, state: planner.planned(line, state)),
            mock.patch.object(CppScheduling, "define_kernel", _with_kernel_sizes(CppScheduling.define_kernel)),
            mock.patch.object(AsyncCompile, "cpp_pybinding", return_value=None),  # `_counting_module` sets it
            mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", list),  # it would ask the compiler; fusion is the same
            inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
            functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        ):
            stack.enter_context(patch)
        for block in blocks:
            block.forward = partial(_run, programs, block, block.forward)
        forward()
        torch.compiler.reset()
        yield


def _run(
    programs: dict[Any, Callable[..., Any]], block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any
) -> Any:
    """Run a block's program; it is lowered first unless an identical block was lowered for inputs of the same form."""
    tensors = [tree_map(_input_properties, each) for each in (args, named)]
    # without the index in the stack, which has no effect in training
    inside = [
        (path, type(inner), {key: value for key, value in plain_settings(inner).items() if key != "layer_idx"})
        for path, inner in block.named_modules()
    ]
    own = [(name, _input_properties(tensor)) for name, tensor in (*block.named_parameters(), *block.named_buffers())]
    key = repr((tensors, inside, own))
    if key not in programs:
        assert active_recorder() is None
        programs[key] = _lower(forward, args, named)
    return programs[key](block, *args, **named)


def _input_properties(value: Any) -> Any:
    """Return the properties of a tensor on which a compiled program depends; any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.dtype, tuple(value.shape), value.stride(), value.requires_grad


def _lower(forward: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
    """Compile a method as torch.compile(fullgraph=True) does; the program is a function of its object and arguments."""
    with _disable_current_modes(), get_metrics_context(), set_enable_dynamic(False):
        captured = convert_frame.fullgraph_capture(forward, args, named)
        graph = captured.backend_input
        assert graph is not None  # it uses tensors
        context = TracingContext(graph.fake_mode)
        context.tensor_to_context = graph.tensor_to_context
        with tracing(context):
            try:
                run: Any = compile_fx(graph.graph_module, graph.example_inputs)
            except InductorError as error:
                raise error.inner_exception from None
    function, _ = convert_frame.get_traced_fn(forward)
    program: Callable[..., Any] = captured.forward_callable(compiled_fn=run, extra_globals=function.__globals__)
    return program


def _with_kernel_sizes(original: Callable[..., str]) -> Callable[..., str]:
    """Wrap inductor's `define_kernel` so that it also notes the bytes that each loop of a kernel moves.

    On a CPU inductor puts all loops between two library calls into one function; on a GPU each is a kernel of its own.
    """

    def define(self: Any, source: str, nodes: Sequence[Any], kernel_args: Any = None) -> str:
        name = original(self, source, nodes, kernel_args)
        fused = {id(each): each for node in nodes for each in [self.scheduler.name_to_fused_node[node.get_name()]]}
        sizes = tuple(int(each.get_read_write_buffers_sizes()) for each in fused.values())
        self.scheduler.__dict__.setdefault("gsreal_kernels", {})[name] = sizes
        return name

    return define


def _counting_module(graph: GraphLowering) -> Any:
    """Return the module of a graph's program, like GraphLowering.compile_to_module, with kernels that only count."""
    code, _ = graph.codegen()
    program: dict[str, Any] = {"__name__": "gsreal_traced", **graph.constants}
    source = code.value.replace("torch.ops.higher_order.run_", "run_")  # operations that checkpoints recompute
    exec(compile(source, "<inductor>", "exec"), program)  # code that torch generated from the traced graph
    program["run_and_save_rng_state"] = lambda operation, *args, **named: (
        _empty((RANDOM_STATE_BYTES,), (1,), torch.uint8),  # torch lists the operation as one that draws random numbers
        operation(*args, **named),
    )
    program["run_with_rng_state"] = lambda _state, operation, *args, **named: operation(*args, **named)
    for name, sizes in getattr(graph.scheduler, "gsreal_kernels", {}).items():
        program[name] = _counting_kernel(name, sizes)
    program["empty_strided_cpu"] = _empty
    program["reinterpret_tensor"] = _part
    program["assert_size_stride"] = program["assert_alignment"] = lambda *_arguments: None
    return SimpleNamespace(call=program["call"], runner=None)


def _counting_kernel(name: str, sizes: Sequence[int]) -> Callable[..., None]:
    def launch(*_buffers: Any) -> None:
        recorder = active_recorder()
        if recorder is not None:
            for size in sizes:
                recorder.count_kernel(name, size)

    return launch


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    recorder = active_recorder()
    if recorder is None:
        return torch.empty_strided(size, stride, dtype=dtype)
    with recorder.allocation():
        return torch.empty_strided(size, stride, dtype=dtype)


def _part(whole: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Return a view, like torch._C._dynamo.guards._reinterpret_tensor."""
    return torch.as_strided(whole, size, stride, int(whole.storage_offset()) + offset)
