"""Lifetimes of a checkpointed block's buffers: its traced buffers, moved as activation checkpointing does.

[Note: checkpoint] This is torch.utils.checkpoint with use_reentrant=False (torch 2.13). In the first forward, autograd
saves placeholders instead of tensors, so only the block's inputs are kept. Everything else is freed with its last
reference, as in a forward that is traced without saving anything. The first backward node of the block that needs a
saved tensor runs the forward again. This second forward stops after the last saved tensor (early_stop); each saved
tensor is then freed by the node that uses it, as without checkpointing. The placeholders keep the inputs, and the state
of the random number generator at the forward, until the last of the block's nodes is done. The phase `r` is the second
forward, with the positions of the first.

[Note: selective] With create_selective_checkpoint_contexts, each output of a compute-heavy operation is kept from the
first forward, whether the backward needs it or not. Such operations are matrix products, convolutions and attention, or
all of these but every second matrix product. The second forward takes over the output instead of running the operation;
it is freed when the recomputed output would have been. Outputs that the second forward does not reach, because it
stops early, are kept as long as the placeholders.

[Note: first needed] Some operations of a block's backward may need only the gradient of the block's output: it is
gathered where ranks divide sequences, and scaled where the block's last map has an adapter. They run before any saved
tensor is needed, and so before the block's forward runs again (`recompute_after`).

[Note: handed on] A block may return several tensors to the next one, such as its output and a residual to which the
next block adds it. The placeholders of the next block keep all of them. If the block's own backward needs one of them
too (`Buffer.handed_on`), there are two copies of it then: the second forward makes another.

[Note: casts] torch.autocast keeps the casts of parameters until its outermost context ends, so that none is cast twice
in a forward. The casts of the first forward stay there: those of all blocks are held until the loss is computed.
(Without checkpointing autograd holds most of them longer.) The second forward has a context of its own (recompute_fn).
It casts the block's parameters once more, and at its end releases the casts that the backward does not need.
"""

from collections.abc import Sequence
from dataclasses import replace

from gssim.memory.lifetimes import FORWARD_END
from gssim.units import Recompute
from gssim.workload import Buffer, Layer, Moment, Polynomial, layer_output, passed_bytes
from gssim.workload.layer import OPERAND_CASTS, REPLACED, layer_input_gradient
from gssim.workload.owned import LAST

CPU_RANDOM_STATE_BYTES = 5056
"""Size of torch.get_rng_state(): kept once for each block from forward to backward, once more during recomputation."""


def recomputed_buffers(
    layer: Layer,
    before: Layer | None,
    following: Sequence[Layer],
    *,
    recompute: Recompute = "full",
    random_state_bytes: int = 0,
    autocast: bool = False,
) -> tuple[Buffer, ...]:
    """Return the buffers of `layer` where each block is checkpointed.

    `before`: the layer before it; `following`: those after it, up to the next block. `recompute`: what runs again; see
    [Note: selective]. `autocast`: whether the forward runs under torch.autocast; see [Note: casts].
    """
    moved = _replaced_buffers(layer)
    kept = layer.kept_positions(recompute) or ()
    again, after = layer.is_recomputed, following[0] if following else None
    handed = _input_of_block(layer, following)
    output = _own_output(layer) if again else None
    passed = _passed_on(layer, after)
    releases = dict(zip(map(id, _saved_buffers(layer)), layer.recompute_releases or (), strict=False))
    positions = [each.born.position for each in layer.buffers if each.born.phase == "f"]
    last = max([*releases.values(), *positions], default=0)
    for buffer in (each for each in layer.buffers if each.category not in (REPLACED, OPERAND_CASTS)):
        is_forward = buffer.born.phase == "f"
        if layer.block and is_forward and buffer.born.position in kept:
            moved.append(replace(buffer, freed=_replacement_release(buffer, layer, before), category="activations"))
        elif again and buffer.is_saved and is_forward and buffer.born.position >= _positions(layer):
            moved.append(buffer)  # saved by an operation between the blocks, outside of the checkpoint
        elif again and buffer.is_saved:
            # older model files lack the release in the first forward: it is then at the forward's end
            end = buffer.handed_on or Moment("f", releases.get(id(buffer), LAST))
            end = _last_use(layer, after) if buffer is output or _is_taken(buffer, after) else end
            end = FORWARD_END if autocast and _is_cached(buffer, end, last) else end
            moved += [replace(buffer, freed=end), replace(buffer, born=replace(buffer.born, phase="r"))]
        elif _is_argument(buffer, layer, following):
            moved.append(replace(buffer, freed=Moment("b", _placeholder_release(following[-1], None), len(following))))
        elif handed is not None and buffer is handed:
            # the last of the layers that follow is the block, whose placeholders hold the buffer
            released = Moment("b", _placeholder_release(following[-1], None), len(following))
            own = (-buffer.freed.layer_offset, buffer.freed.position)
            is_later = buffer.freed.phase == "b" and own > (-len(following), released.position)
            moved.append(replace(buffer, freed=buffer.freed if is_later else released))
        else:
            # beside its output, a layer may leave a tensor to the caller, who drops it once the next block has run
            dropped = buffer.freed.phase == "f" and buffer is not passed
            end = buffer.freed if dropped else _release_moment(buffer.freed, layer, after)
            end = FORWARD_END if again and autocast and _is_cached(buffer, end, last) else end
            moved.append(replace(buffer, freed=end))
            if again and is_forward and buffer.born.position < _positions(layer):  # recomputed too
                freed = _second_forward_release(buffer, layer)
                moved.append(replace(buffer, born=replace(buffer.born, phase="r"), freed=freed, category="temporaries"))
    if layer.block and random_state_bytes:
        size = Polynomial(((random_state_bytes, 0, 0),))
        moved.append(Buffer(Moment("f"), _frame_release(layer, before), "activations", size))
        if again:
            moved.append(Buffer(Moment("r"), Moment("r", LAST), "temporaries", size))
    return tuple(_around_recomputation(buffer, layer, before) for buffer in moved)


def _around_recomputation(buffer: Buffer, layer: Layer, before: Layer | None) -> Buffer:
    """Return a buffer that is released before the block's second forward if only operations before that use it; see
    [Note: first needed].

    What is made in the forward and freed in the backward is an activation. A block's input was traced as a temporary if
    the block's backward does not need it: Llama's norm saves a cast of it.
    """
    block = {0: layer, -1: before}.get(buffer.freed.layer_offset) if buffer.freed.phase == "b" else None
    first = (block.recompute_after or 0) if block is not None and block.is_recomputed else 0
    freed = buffer.freed
    # a gradient that only the last operation before the second forward needs is freed as that operation ends
    last_before = buffer.born.phase == "b" and not freed.layer_offset and freed.position == first > 0
    if last_before and not buffer.summed_in_place:
        freed = replace(freed, position=first - 1)
    kept = buffer.category == "temporaries" and buffer.born.phase == "f" and freed.phase in ("b", "r")
    if freed is buffer.freed and not kept:
        return buffer
    return replace(buffer, freed=freed, category="activations" if kept else buffer.category)


def _passed_on(layer: Layer, after: Layer | None) -> Buffer | None:
    """Return what the layer passes to the next one: if several tensors are as large, one that its backward needs."""
    size = passed_bytes(layer, after)
    needed = [each for each in layer.buffers if each.size_bytes == size and _is_needed(each, 1)]
    return layer_output(needed or layer.buffers, size)


def _is_cached(buffer: Buffer, end: Moment, last: int) -> bool:
    """Return whether a buffer, which a first forward frees at `end`, is the cast of a parameter; `last`: last
    operation.

    Only casts of parameters neither depend on the batch nor are freed by an operation; see [Note: casts]. Buffers
    that exist only for one sample, or only for several, are none of them, although those of one sample have constant
    sizes too.
    """
    constant = not buffer.samples and all(not (i or j) for _, i, j in buffer.size_bytes.terms)
    return constant and buffer.born.phase == end.phase == "f" and end.layer_offset == 0 and end.position >= last


def _saved_buffers(layer: Layer) -> list[Buffer]:
    """Return the buffers that a layer's forward saves for its backward."""
    return [buffer for buffer in layer.buffers if buffer.is_saved]


def _replaced_buffers(layer: Layer) -> list[Buffer]:
    """Return the buffers that a layer's module keeps until its next forward; a second forward replaces them as well."""
    kept = [buffer for buffer in layer.buffers if buffer.category == REPLACED]
    if not layer.is_recomputed:
        return kept
    again = [each for each in kept if each.born.position < _positions(layer)]
    return [*kept, *(replace(each, born=replace(each.born, phase="r")) for each in again)]


def _is_taken(buffer: Buffer, after: Layer | None) -> bool:
    """Return whether the next block takes a buffer that the block's own backward needs too; see [Note: handed on]."""
    return buffer.handed_on is not None and after is not None and after.is_recomputed


def _positions(layer: Layer) -> int:
    """Return the number of positions of the second forward, which stops after the last saved buffer."""
    if layer.recompute_positions is not None:
        return layer.recompute_positions
    return 1 + max((buffer.born.position for buffer in _saved_buffers(layer)), default=-1)


def rerun_positions(layer: Layer, recompute: Recompute) -> tuple[int, int]:
    """Return the first and last position of the second forward, which stops once all saved tensors exist."""
    if recompute == "selective" and layer.selective_rerun is not None:
        return layer.selective_rerun
    return 0, _positions(layer) - 1


def recomputation_begin(layer: Layer) -> float:
    """Return the place in a checkpointed block's backward at which its forward runs again: between two positions.

    -0.5 if the backward begins with that, see [Note: first needed].
    """
    return (layer.recompute_after or 0) - 0.5


def _second_forward_release(buffer: Buffer, layer: Layer) -> Moment:
    """Return the moment at which a second forward frees a buffer that it does not save."""
    inside = buffer.freed.phase == "f" and buffer.freed.layer_offset == 0
    position = buffer.freed.position if inside and buffer.freed.position < _positions(layer) else LAST
    return Moment("r", position)


def _replacement_release(buffer: Buffer, layer: Layer, before: Layer | None) -> Moment:
    """Return the moment at which a buffer is freed that the first forward keeps until the second replaces it."""
    if buffer.freed.phase == "end" or (buffer.freed.layer_offset > 0 and not layer.is_recomputed):
        return buffer.freed
    if not layer.is_recomputed or buffer.born.position >= _positions(layer):
        return _frame_release(layer, before)
    return buffer.freed if buffer.is_saved else _second_forward_release(buffer, layer)


def _own_output(layer: Layer) -> Buffer | None:
    """Return the layer's output if its own backward saves it (a ReLU's): then the next layer's use of it is not
    traced.
    """
    size = layer.output_bytes
    if any(buffer.size_bytes == size and _reaches_next_layer(buffer) for buffer in layer.buffers):
        return None
    candidates = [buffer for buffer in _saved_buffers(layer) if buffer.size_bytes == size]
    return max(candidates, key=lambda buffer: buffer.born.position, default=None)


def _reaches_next_layer(buffer: Buffer) -> bool:
    """Return whether a buffer is allocated in the forward and last used by the next layer."""
    return buffer.born.phase == "f" and buffer.freed.layer_offset == 1


def _input_of_block(layer: Layer, following: Sequence[Layer]) -> Buffer | None:
    """Return the output of `layer` that the next block takes as input, if it outlives the layer after `layer`; else
    None.

    It does so if the model holds it to the end of its forward, or if the layers in between pass on something else
    (position codes) or their own input. It has the size of the layer's output. A block adds to its input, so the
    block's output must be as large, or the gradient of its input where it is a stage that returns less; otherwise the
    block takes something else (a part of the sequence).
    """
    size = layer.output_bytes
    if not following or not following[-1].is_recomputed:
        return None
    gradient = layer_input_gradient(following[-1].buffers)
    if size != following[-1].output_bytes and (gradient is None or size != gradient.size_bytes):
        return None
    # a layer between may pass on what it is given, as a dropout of probability zero, and allocate nothing of this size
    as_large = [each for each in following[:-1] if each.output_bytes == size]
    if any(buffer.born.phase == "f" and buffer.size_bytes == size for each in as_large for buffer in each.buffers):
        return None
    crossing = [
        buffer
        for buffer in layer.buffers
        if buffer.born.phase == "f" and buffer.freed.layer_offset >= 1 and buffer.size_bytes == size
    ]
    output = max(crossing, key=lambda each: (_is_needed(each, len(following)), each.born.position), default=None)
    return output if output is not None and output.freed.layer_offset > 1 else None


def _is_needed(buffer: Buffer, layer_offset: int) -> bool:
    """Return whether the backward of a later layer needs a buffer of the forward. Others of its size may be results for
    the caller alone, such as the copy of a stage's output in another layout.
    """
    return (buffer.born.phase, buffer.freed.phase, buffer.freed.layer_offset) == ("f", "b", layer_offset)


def _is_argument(buffer: Buffer, layer: Layer, following: Sequence[Layer]) -> bool:
    """Return whether a buffer is an argument that the model passes to all its blocks: a mask, or position indices.

    Layers before the blocks make it, and the model frees it when its forward returns. Buffers as large as the layer's
    output or the block's, or as one sample's part of these, are not arguments: they are embeddings of tokens or
    positions, which are added up to the blocks' input (if embeddings are narrower, a linear map between them and the
    blocks widens those of tokens). The first block's placeholders keep an argument longest.
    """
    if not following or not following[-1].is_recomputed or layer.block:
        return False
    for output in (layer.output_bytes, following[-1].output_bytes):
        of_one_sample = Polynomial(tuple((c, 0, j) for c, _, j in output.terms))
        if buffer.size_bytes in (output, of_one_sample):
            return False
    return buffer.born.phase == buffer.freed.phase == "f" and buffer.freed.layer_offset > len(following)


def _release_moment(freed: Moment, layer: Layer, after: Layer | None) -> Moment:
    """Return the moment at which a buffer is freed that is freed at `freed` without checkpoints.

    Inputs of a checkpointed block are kept until its placeholders are released.
    """
    if after is None or not after.is_recomputed or freed.layer_offset != 1:
        return freed
    return _last_use(layer, after)


def _last_use(layer: Layer, after: Layer | None) -> Moment:
    """Return the last use of the output of `layer`: the moment at which the next block's placeholders are released.

    If the next layer is not a block, it is assumed to need the output during its whole backward, as its uses are not
    traced.
    """
    if after is None:
        return Moment("end")
    if after.is_recomputed:
        position = _placeholder_release(after, layer)
    else:
        moments = [moment for buffer in after.buffers for moment in (buffer.born, buffer.freed)]
        moments += [moment for parameter in after.parameters for moment in (parameter.born, parameter.ready)]
        position = max((m.position for m in moments if m.phase == "b" and m.layer_offset == 0), default=0)
    return Moment("b", position, 1)


def _frame_release(layer: Layer, before: Layer | None) -> Moment:
    """Return the moment at which a block's placeholders are released: without recomputation, the end of the forward."""
    return Moment("b", _placeholder_release(layer, before)) if layer.is_recomputed else Moment("f", LAST)


def _placeholder_release(layer: Layer, before: Layer | None) -> int:
    """Return the position in a block's backward at which the last of its placeholders is released."""
    own = [buffer.freed.position for buffer in _saved_buffers(layer) if buffer.freed.layer_offset == 0]
    inputs = (
        [b.freed.position for b in before.buffers if _reaches_next_layer(b) and b.freed.phase == "b"] if before else []
    )
    return max([*own, *inputs], default=0)
