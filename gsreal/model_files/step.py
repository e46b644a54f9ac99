"""Records one training step of any `nn.Module` under fake tensors, layer by layer.

A layer begins where a chosen module is entered, and ends where the next chosen module is entered. Its backward begins
when the gradient of its output, which is the next layer's input, is complete.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from gsreal.methods.blocks import SELECTIVE, checkpoint_inside
from gsreal.methods.context_parallel import divide_context
from gsreal.model_files.build import autocast, example_batch, first_line, logits_of, loss_of
from gsreal.model_files.fake_module import Exchanges, divide_experts, fake_module, slice_blocks, without_values
from gsreal.model_files.fit import Shape
from gsreal.model_files.layers import layer_modules
from gsreal.model_files.recorder import NoPolynomialError, Record, Recorder, UnknownOperationError, Work
from gssim.errors import UserError
from gssim.workload import Model


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a rank: what it holds of the model, and what it trains on."""

    batch_size: int
    sequence_length: int | None
    units: int | None = None
    """Units in the rank's slice of each block; None: blocks are whole."""
    parts: int | None = None
    """Ranks that divide sequences between the sliced parts of blocks."""
    context: int | None = None
    """Ranks that divide sequences everywhere (context parallelism)."""
    experts: int = 0
    """Experts that the rank holds, where ranks divide them; 0: they do not."""
    rows: int = 0
    """Rows that these experts process."""
    rank: int = 0
    """Rank of the adapters; 0: there are none."""

    @property
    def shape(self) -> Shape:
        """The sizes that the step's quantities are functions of.

        >>> Step(batch_size=2, sequence_length=64, units=3, parts=4).shape
        Shape(b=2, s=64, u=3, p=16, r=0, e=0, a=0)
        >>> Step(batch_size=2, sequence_length=64, experts=4, rows=96, rank=8).shape
        Shape(b=2, s=64, u=4, p=0, r=96, e=0, a=8)
        """
        divided = self.parts or self.context
        positions = (self.sequence_length or 0) // divided if divided else 0
        u, *others = [size for size in (self.units, self.experts, self.rank) if size] or [0]
        experts = self.experts if self.units else 0
        rank = self.rank if others else 0
        return Shape(self.batch_size, self.sequence_length, u, positions, self.rows, experts, rank)


@contextmanager
def layer_boundaries(
    model: nn.Module,
    modules: list[str],
    *,
    enter: Callable[[int, str], None],
    take: Callable[[Tensor], None] | None = None,
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Call `enter(layer, "f")` and `enter(layer, "b")` where layers begin, for the duration of the context.

    `take`: called with what a layer takes from the one before, if a gradient is computed for it. Layer i begins at
    `modules[i]`; the last layer (index `len(modules)`) is the loss. Yields a function that marks the model's output as
    the loss's input: call the loss on its result.
    """
    handles: list[Any] = []
    inner = dict(model.named_modules())

    def mark(layer: int, tensors: list[Any]) -> None:
        enter(layer, "f")
        carrying = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        if layer > 0 and carrying and torch.is_grad_enabled():
            carrying[0].register_hook(lambda _gradient: enter(layer - 1, "b"))
            if take is not None:
                take(carrying[0])

    def before(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            mark(layer, tree_leaves((args, kwargs)))

        return hook

    def before_loss(output: Tensor) -> Tensor:
        mark(len(modules), [output])
        return output

    try:
        for layer, name in enumerate(modules):
            handles.append(inner[name].register_forward_pre_hook(before(layer), with_kwargs=True))
        yield before_loss
    finally:
        for handle in handles:
            handle.remove()


def record_step(
    model: Model,
    step: Step,
    *,
    where: str,
    like: Record | None = None,
    apart: Record | None = None,
) -> Record:
    """Return the record of one training step, layer by layer. In sliced blocks, routed experts are not sliced.

    Raises UserError if ranks are to divide sequences everywhere and a block cannot.

    `like`: the record of such a step at another shape. What no shape changes is taken from it: the order of the
    modules, which tensors autograd saves, and when the others would be freed if it saved none; for compiled blocks also
    the order of kernels and the buffers that share memory. That saves three of four forwards. `apart`: for the first
    record of compiled blocks, a record at another shape.
    """
    with without_values(model):
        prepared = _prepare_step(model, step, where, like)
        record, module = prepared.record, prepared.module
        try:
            with (
                _run_compiled(model, module, record, prepared.inputs, apart, where) if model.compiled else nullcontext()
            ):
                if like is None or model.compiled:
                    # a compiled block is one node, which needs all saved at once
                    prepared.record_saved(where, needed=not record.kernel_plans)
                prepared.record_operations(where, None if model.compiled else like)
                prepared.record_unsaved(where, like)
                if like is not None:
                    record.before_saved = like.before_saved
        except UnknownOperationError as error:
            raise UserError(f"{where}: {error}") from None
        # a layer that also has parameters of other modules, which run between this block and the next, is not treated
        # as a block: FSDP2 and checkpoints wrap a block's module, which lacks these parameters
        inside = {name: set(module.get_submodule(name).parameters()) for name in record.blocks}
        for name, place in (record.parameters | record.frozen).items():
            layer = record.modules[place[0]]
            if layer in inside and module.get_parameter(name) not in inside[layer]:
                record.blocks.discard(layer)
    if step.context:
        layers = [layer for layer, name in enumerate(record.modules) if name in record.blocks]
        if not layers or any(not record.reductions.get(layer) for layer in layers):
            raise UserError(f"{where}: a block does not attend by torch's scaled_dot_product_attention")
        record.units = dict.fromkeys(layers, gcd(*prepared.heads))
    return record


def record_partial_steps(
    model: Model,
    step: Step,
    *,
    where: str,
    like: Record | None,
    trained: Sequence[AbstractSet[str]],
) -> list[Record]:
    """Return the records of a training step, in each of which only the parameters named in `trained` are trained.

    Other arguments as of `record_step`. Only what a backward changes is recorded: work, storages and collectives.
    """
    with without_values(model):
        prepared = _prepare_step(model, step, where, like)
        return [
            record_trained(
                prepared.module,
                prepared.record.modules,
                names,
                prepared.inputs,
                prepared.targets,
                on_recorder=prepared.stand_in.record_with,
                summed=prepared.record.summed,
            )
            for names in trained
        ]


def record_trained(
    module: nn.Module,
    names: list[str],
    trained: AbstractSet[str],
    inputs: Tensor,
    targets: Tensor,
    *,
    on_recorder: Callable[[Recorder], None] = lambda _recorder: None,
    summed: AbstractSet[str] = frozenset(),
) -> Record:
    """Return the record of a step that trains only the `trained` parameters.

    To be called under fake tensors; it freezes the module's other parameters.

    Args:
        module: the module.
        names: the modules at which layers begin.
        trained: names of the trained parameters.
        inputs: of the step.
        targets: of the step.
        on_recorder: called with the recorder before the step.
        summed: names of the parameters whose gradients are partial sums.
    """
    record = Record(names, blocks=set(), summed=set(summed))
    for name, parameter in module.named_parameters():
        parameter.grad = None
        parameter.requires_grad_(name in trained)
    recorder = Recorder(record, known_storages(module, inputs, targets))
    on_recorder(recorder)
    record_backward(recorder, module, inputs, targets)
    return record


def _prepare_step(model: Model, step: Step, where: str, like: Record | None) -> "_PreparedStep":
    """Return a step of the module, divided as one rank has it; arguments as of `record_step`. Needs fake tensors."""
    module = fake_module(model, where)
    module.train()
    chosen = layer_modules(module)
    sequence_length, context = step.sequence_length, step.context
    length = (sequence_length or 0) // context if context else sequence_length
    inputs, targets = example_batch(model, batch_size=step.batch_size, sequence_length=length)
    longest = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    if sequence_length is not None and isinstance(longest, int) and 0 < longest < sequence_length:
        # fake tensors do not show that a module has no embedding for the last positions; XLNet says -1: it has no limit
        raise UserError(
            f"{where}: the config has max_position_embeddings = {longest}, but sequences of {sequence_length} tokens "
            "are asked for (input.maximum_sequence_length)"
        )
    modules = like.modules if like else _execution_order(module, list(chosen), inputs, targets, model, where)
    blocks = [name for name in modules if chosen[name]]
    record = Record(modules, blocks=set(blocks), autocast=model.traced_autocast)
    record.kernel_plans = like.kernel_plans if like else {}
    stand_in = Exchanges()
    if step.units:
        slice_blocks(record, module, chosen, stand_in, step.units, step.parts, beside_experts=step.experts > 0)
    exchanged = stand_in.context(context) if context else None
    if exchanged is not None:
        divide_context(module, [module.get_submodule(name) for name in blocks], exchanged)
    if step.experts:
        divide_experts(record, module, stand_in, step.experts, step.rows)
    heads = exchanged.heads if exchanged is not None else frozenset[int]()
    return _PreparedStep(record, module, inputs, targets, stand_in, heads)


@contextmanager
def _run_compiled(
    model: Model, module: nn.Module, record: Record, inputs: Tensor, apart: Record | None, where: str
) -> Iterator[None]:
    """Run the module's blocks as torch.compile does, for the duration of the context."""
    from gsreal.model_files.compiled import traced_by_inductor  # inductor takes seconds to import

    if not record.blocks:
        raise UserError(f"{where}: --compile: the module has no stack of blocks, which are compiled one by one")
    blocks = [module.get_submodule(name) for name in record.modules if name in record.blocks]
    for block in blocks if model.compiled_recompute != "none" else ():
        checkpoint_inside(block, model.compiled_recompute)
    with ExitStack() as stack:
        with _as_user_errors(where):
            others = apart.kernel_plans if apart else {}
            stack.enter_context(traced_by_inductor(blocks, lambda: module(inputs), record.kernel_plans, others))
        yield


def _check_logits(logits: Tensor, targets: Tensor, model: Model, where: str) -> None:
    """Raise UserError unless a module has logits for each target, and of all classes.

    Fake tensors do not detect that there are fewer logits than classes.
    """
    source = model.input
    if logits.ndim < 2 or logits.numel() != targets.numel() * logits.shape[-1]:
        raise UserError(
            f"{where}: the module returns {'x'.join(map(str, logits.shape)) or 'a number'}, of {targets.numel()} "
            "targets: the loss is the cross-entropy of one row of logits for each target, and no other can be traced; "
            "wrap the module in one that ends so"
        )
    key = "classes" if source.classes is not None else "vocabulary"
    needed = getattr(source, key)
    if logits.shape[-1] < needed:
        raise UserError(f"{where}: the module has logits for {logits.shape[-1]} classes, but input.{key} = {needed}")


@contextmanager
def _as_user_errors(where: str, what: str = "forward or loss") -> Iterator[None]:
    """Raise exceptions of a module's code, in `what` of a step, as UserErrors."""
    try:
        yield
    except (UserError, UnknownOperationError, NoPolynomialError):
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise UserError(
            f"{where}: what the module does depends on the values of its tensors ({error}), and a trace has none; of "
            "Hugging Face's experts, experts_implementation = 'grouped_mm' does not"
        ) from None
    except Exception as error:
        if "Mixing fake modes" in str(error):
            raise UserError(
                f"{where}: the module's code keeps a tensor between forwards in a cache of its own (in Hugging Face's "
                "BEiT, relative positions), which a trace does not see; compute it in each forward, or make it a buffer"
            ) from None
        raise UserError(f"{where}: the module's {what} fails on the stated input: {first_line(error)}") from error


@contextmanager
def _without_checkpoints(where: str) -> Iterator[None]:
    """Raise UserError if a module checkpoints a part of itself: what that holds in the backward is not traced."""

    def refuse(*_args: Any, **_settings: Any) -> None:
        raise UserError(
            f"{where}: the module checkpoints a part of itself (torch.utils.checkpoint); leave that out: "
            "plan.recompute checkpoints its blocks"
        )

    reentrant = mock.patch.object(torch.utils.checkpoint.CheckpointFunction, "apply", refuse)
    other = mock.patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", refuse)
    with reentrant, other:
        yield


def _execution_order(
    module: nn.Module, chosen: list[str], inputs: Tensor, targets: Tensor, model: Model, where: str
) -> list[str]:
    """Return the chosen modules at which a layer begins, in execution order.

    Modules whose inputs carry no gradient (parallel embeddings) belong to the layer of the first of them. Layers are
    those that the module has when all of it is trained, so frozen parameters require gradients meanwhile.
    """
    order: list[str] = []
    inner = dict(module.named_modules())
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)

    def before(name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            carrying = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs)))
            if carrying or not order:
                order.append(name)

        return hook

    handles = [inner[name].register_forward_pre_hook(before(name), with_kwargs=True) for name in chosen]
    with _as_user_errors(where), _without_checkpoints(where):
        output = module(inputs)
    if model.module.hugging_face is not None and not hasattr(output, "logits"):
        raise UserError(
            f"{where}: module.hugging_face.auto_class = '{model.module.hugging_face.auto_class}': has no head"
        )
    with _as_user_errors(where):
        logits = logits_of(output)
        _check_logits(logits, targets, model, where)
        loss = loss_of(logits, targets)
    if not loss.requires_grad:
        raise UserError(f"{where}: the module has no parameters to train")
    for handle in handles:
        handle.remove()
    for parameter in frozen:
        parameter.requires_grad_(False)
    twice = {name for name in order if order.count(name) > 1}
    # what has no parameters is then part of the layers before its runs, such as two kinds of rotary angles (Gemma 3)
    order = [name for name in order if name not in twice or any(True for _ in inner[name].parameters())]
    twice &= {*order}
    if twice:
        raise UserError(f"{where}: the module {sorted(twice)[0]!r} runs more than once in a forward; not supported")
    return order


def known_storages(module: nn.Module, *tensors: Tensor) -> set[int]:
    """Return the storages that exist before a step, by address."""
    known = [*module.parameters(), *module.buffers(), *tensors]
    return {tensor.untyped_storage()._cdata for tensor in known}


@dataclass(frozen=True)
class _PreparedStep:
    """A step that is run several times under fake tensors; each time other facts of it are recorded."""

    record: Record
    module: nn.Module
    inputs: Tensor
    targets: Tensor
    stand_in: Exchanges
    heads: AbstractSet[int]
    """Numbers of heads that the forwards of attentions exchange among ranks; empty where they do not."""

    def recorder(self, record: Record) -> Recorder:
        """Return a recorder into `record`, to which sums over ranks are passed from now on."""
        recorder = Recorder(record, known_storages(self.module, self.inputs, self.targets))
        self.stand_in.record_with(recorder)
        return recorder

    def record_saved(self, where: str, *, needed: bool = False) -> None:
        """Record the unique storages that autograd saves, the work before the last of them, and each layer's output.

        `needed`: also how many storages a layer's backward creates before it needs a saved one. A checkpointed block
        recomputes its forward only at that moment.
        """
        record, module = self.record, self.module
        known = known_storages(module, self.inputs, self.targets)
        seen: set[int] = set()
        numbers: dict[int, int] = {}
        """Index of each storage among those that the forward creates, by its `id`."""
        keep = []
        recorder = self.recorder(Record(record.modules, record.blocks))
        record.saved.clear()
        record.saved_storages.clear()
        record.output.clear()

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage._cdata not in seen:
                seen.add(storage._cdata)
                keep.append(storage)  # so that no other storage gets its address
                record.saved[recorder.layer] += storage.nbytes()
                born = recorder.record.alive
                numbers.update((id(born[number]), number) for number in range(len(numbers), len(born)))
                number = numbers.get(id(recorder.live.get(storage._cdata)), -1)
                record.saved_storages[recorder.layer].append(number)
            if recorder.layer not in record.output:  # the layer's module has not returned yet
                record.until_saved[recorder.layer] = recorder.again()
                record.saved_after[recorder.layer] = len(recorder.record.counted[recorder.layer, "f"])
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            place = (recorder.layer, "b")
            if recorder.phase == "b" and recorder.layer not in record.before_saved:
                created = sum(alive.born[:2] == place for alive in recorder.record.alive)
                record.before_saved[recorder.layer] = created
            return tensor

        boundaries = layer_boundaries(module, record.modules, enter=recorder.enter)
        with recorder, boundaries as out, saved_tensors_hooks(pack, unpack):
            with self.noting_outputs(where), autocast(record.autocast):
                loss = loss_of(out(logits_of(module(self.inputs))), self.targets)
                record.output[len(record.modules)] = loss.numel() * loss.element_size()
            if needed and loss.requires_grad:
                recorder.enter(len(record.modules), "b")
                with _as_user_errors(where, "backward"):
                    loss.backward()
        module.zero_grad(set_to_none=True)

    @contextmanager
    def noting_outputs(self, where: str) -> Iterator[None]:
        """Record the size of each layer's output in a forward within this context; raise its failures as UserError."""

        def note(_module: nn.Module, _args: Any, output: Any, layer: int) -> None:
            tensors = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
            self.record.output[layer] = sum(t.numel() * t.element_size() for t in tensors[:1])

        handles = [
            self.module.get_submodule(name).register_forward_hook(partial(note, layer=layer))
            for layer, name in enumerate(self.record.modules)
        ]
        with _as_user_errors(where):
            yield
        for handle in handles:
            handle.remove()

    def record_operations(self, where: str, like: Record | None) -> None:
        """Record every operation and every storage of one forward and backward.

        `like`: a record at another shape, whose saved storages are taken over; None: `record_saved` has run.
        """
        record, recorder = self.record, self.recorder(self.record)
        # torch asks for a parameter's device when it makes the node that accumulates its gradient, and the recorder
        # counts that: here the nodes exist already
        nodes = [each.view_as(each).grad_fn for each in self.module.parameters() if each.requires_grad]
        if like is None:
            with _as_user_errors(where, "backward"):
                record_backward(recorder, self.module, self.inputs, self.targets)
        else:
            recorder.saved_after = record.saved_after = dict(like.saved_after)
            for layer, operations in like.saved_after.items():
                if not operations:
                    record.until_saved[layer] = {"full": Work(), **dict.fromkeys(SELECTIVE, Work())}
            forward = self.noting_outputs(where)
            record_backward(recorder, self.module, self.inputs, self.targets, forward=forward)
        del nodes
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                layer = recorder.first_use.get(parameter.untyped_storage()._cdata, 0)
                record.frozen[name] = (layer, tuple(parameter.shape))
            elif parameter.grad is None:
                raise UserError(f"{where}: the parameter {name!r} gets no gradient (unused or frozen); not supported")
        if not record.parameters:
            raise UserError(f"{where}: the module has no parameters to train: all are frozen")
        if like is not None:  # last: another forward, where it is needed, drops the gradients
            self._sum_saved(like, where)

    def _sum_saved(self, like: Record, where: str) -> None:
        """Record the bytes of the storages that autograd saves: of the same storages as in `like`, at another shape.

        If the two forwards create different storages, another forward is run to find the saved ones.
        """
        record = self.record
        created, others = ([each for each in of.alive if each.born[1] == "f"] for of in (record, like))
        numbers = like.saved_storages
        if len(created) != len(others) or any(-1 in each for each in numbers.values()):
            self.record_saved(where)
            return
        record.saved_storages = numbers
        for layer, saved in numbers.items():
            record.saved[layer] = sum(created[number].size_bytes for number in saved)

    def record_unsaved(self, where: str, like: Record | None) -> None:
        """Record when a forward's tensors would be freed if autograd saved nothing, or take that from `like`.

        That is the case in the forward of a checkpointed block. Raises UserError if this forward runs other operations
        than the one before.
        """
        record = self.record
        if like is not None:
            if len(like.alive) == len(record.alive):  # else the operations depend on the shape: it cannot be fitted
                for alive, other in zip(record.alive, like.alive, strict=True):
                    alive.unsaved, alive.handed_on = other.unsaved, other.handed_on
            return
        seen = Record(record.modules, record.blocks)
        hooks = saved_tensors_hooks(lambda _tensor: None, lambda _nothing: _nothing)
        recorder, cast = self.recorder(seen), autocast(record.autocast)
        boundaries = layer_boundaries(self.module, record.modules, enter=recorder.enter)
        with recorder, hooks, boundaries as out, self._handed_on_storages(recorder) as handed_on, cast:
            loss_of(out(logits_of(self.module(self.inputs))), self.targets)
        created = [alive for alive in record.alive if alive.born[1] == "f"]
        # positions differ by views, numbers of operations and collectives do not
        if len(created) != len(seen.alive):
            raise UserError(
                f"{where}: the module runs other operations in one forward than in the next of the same input, as one "
                "that skips layers at random; leave that out"
            )
        layers = range(len(record.modules) + 1)
        ours, theirs = ([each.forward_positions(layer) for layer in layers] for each in (record, seen))
        for alive, again in zip(created, seen.alive, strict=True):
            if again.freed is not None and again.freed[1] == "f":
                layer, _, position = again.freed
                operations = bisect_right(theirs[layer], position)
                freed = (layer, "f", ours[layer][operations - 1] if operations else 0)
                if layer == again.born[0]:
                    alive.unsaved = freed[2]
                elif id(again) in handed_on[again.born[0]]:
                    alive.handed_on = freed

    @contextmanager
    def _handed_on_storages(self, recorder: Recorder) -> Iterator[Mapping[int, AbstractSet[int]]]:
        """Yield, by layer, the storages that a block makes and hands on to later layers, if these are several.

        A storage is given by the `id` of its `StorageLife` in `recorder`. A block hands on what it returns; if the next
        layer is a block too, what that takes of it.
        """
        handed_on: dict[int, set[int]] = defaultdict(set)

        def lives(values: Any) -> set[int]:
            storages = (each.untyped_storage() for each in tree_leaves(values) if isinstance(each, Tensor))
            records = [recorder.live.get(storage._cdata) for storage in storages]
            return {id(each) for each in records if each is not None and each.born[0] == recorder.layer}

        def note_returned(_module: nn.Module, _args: Any, output: Any) -> None:
            returned = lives(output)
            if len(returned) > 1:
                handed_on[recorder.layer] = returned

        def note_taken(_module: nn.Module, args: Any, kwargs: Any) -> None:
            taken = handed_on[recorder.layer] & lives((args, kwargs))
            handed_on[recorder.layer] = taken if len(taken) > 1 else set()

        blocks = [self.module.get_submodule(name) for name in self.record.modules if name in self.record.blocks]
        handles = [block.register_forward_hook(note_returned) for block in blocks]
        handles += [block.register_forward_pre_hook(note_taken, with_kwargs=True, prepend=True) for block in blocks]
        yield handed_on
        for handle in handles:
            handle.remove()


def record_backward(
    recorder: Recorder,
    module: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    forward: AbstractContextManager[None] | None = None,
) -> None:
    """Record a forward, in the context `forward`, and the backward of the parameters that require gradients, if any.

    To be called under fake tensors, with a module whose parameters have no gradients yet. Gradients are not in the
    record's `alive`, but in its `parameters`, with the moments at which each is created and is ready.
    """
    record = recorder.record
    ready: dict[str, tuple[int, str, int]] = {}
    handles = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:

            def note_ready(_parameter: Tensor, name: str = name) -> None:
                ready[name] = recorder.now()

            handles.append(parameter.register_post_accumulate_grad_hook(note_ready))
    with recorder, layer_boundaries(module, record.modules, enter=recorder.enter, take=recorder.take) as out:
        with forward or nullcontext(), autocast(record.autocast):
            loss = loss_of(out(logits_of(module(inputs))), targets)
        record.output[len(record.modules)] = loss.numel() * loss.element_size()
        if handles:
            recorder.enter(len(record.modules), "b")
            loss.backward()
    for handle in handles:
        handle.remove()
    gradients = set()
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            alive = recorder.live[parameter.grad.untyped_storage()._cdata]
            gradients.add(id(alive))
            layer = recorder.first_use.get(parameter.untyped_storage()._cdata, 0)
            record.parameters[name] = (layer, tuple(parameter.shape), alive.born, ready[name])
    record.alive = [alive for alive in record.alive if id(alive) not in gradients]
    del loss
    for alive in record.alive if module.training else ():
        alive.replaced_next = alive.freed is None
