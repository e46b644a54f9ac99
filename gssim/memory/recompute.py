"""When the buffers of a checkpointed block live: its traced buffers, moved to where checkpointing puts them.

[Note: checkpoint] What torch.utils.checkpoint does with use_reentrant=False (torch 2.13). In the forward, autograd
saves placeholders instead of tensors, so nothing but the block's inputs is kept: all else goes with the last name for
it, as a forward shows that is traced with nothing saved. The first of the block's backward nodes that needs a saved
tensor runs the forward again, which stops once the last saved tensor is there (early_stop); each is then freed by the
node that uses it, as without checkpointing. The inputs, and the state of the random numbers at the forward, are held by
the placeholders: until the last of the block's nodes is done. The phase `r` is this second forward, with the positions
of the first.

[Note: selective] With create_selective_checkpoint_contexts, each output of a compute-heavy operation (matrix product,
convolution, attention) is kept from the first forward, whether the backward needs it or not. The second forward takes
it from there instead of running the operation, and so makes it its own: it goes when that of a second forward would
have gone. What the second forward does not come to, since it stops early, is kept as long as the placeholders.
"""

from collections.abc import Iterator
from dataclasses import replace

from gssim.workload import Buffer, Layer, Moment, Polynomial

CPU_RANDOM_STATE_BYTES = 5056
"""What torch.get_rng_state() takes: once for each block from forward to backward, once more while it runs again."""
LAST = 2**31
"""Position after every other of a phase `f` or `r`."""


def recomputed_buffers(
    layer: Layer,
    before: Layer | None,
    after: Layer | None,
    *,
    selective: bool = False,
    random_state_bytes: int = 0,
) -> tuple[Buffer, ...]:
    """Return the buffers of `layer` where each block is checkpointed; `before`, `after`: the layers beside it.

    `selective`: the outputs of compute-heavy operations are kept; see [Note: selective].
    """
    found: list[Buffer] = []
    output = _own_output(layer) if layer.block else None
    releases = dict(zip(map(id, _saved(layer)), layer.recompute_releases or (), strict=False))
    for buffer in layer.buffers:
        if layer.block and selective and _is_heavy(buffer, layer):
            found.append(replace(buffer, freed=_handed_over(buffer, layer, before), category="activations"))
        elif layer.block and _is_saved(buffer):
            # older model files do not tell when it goes in the first forward: at the end at the latest
            end = _last_use(layer, after) if buffer is output else Moment("f", releases.get(id(buffer), LAST))
            found += [replace(buffer, freed=end), replace(buffer, born=replace(buffer.born, phase="r"))]
        else:
            found.append(replace(buffer, freed=_moved(buffer.freed, layer, after)))
            if layer.block:
                found += _made_again(buffer, layer)
    if layer.block and random_state_bytes:
        found += _random_states(layer, before, random_state_bytes)
    return tuple(found)


def _is_saved(buffer: Buffer) -> bool:
    """Return whether a buffer is made in the forward, for the backward of the same layer."""
    return buffer.born.phase == "f" and buffer.freed.phase == "b" and buffer.freed.layer_offset <= 0


def _saved(layer: Layer) -> list[Buffer]:
    return [buffer for buffer in layer.buffers if _is_saved(buffer)]


def _positions(layer: Layer) -> int:
    """Return how many positions the second forward has: it stops where the last saved buffer is there."""
    if layer.recompute_positions is not None:
        return layer.recompute_positions
    return 1 + max((buffer.born.position for buffer in _saved(layer)), default=-1)


def last_saved(layer: Layer) -> int:
    """Return the last position of the second forward."""
    return _positions(layer) - 1


def _made_again(buffer: Buffer, layer: Layer) -> Iterator[Buffer]:
    """Give what a second forward makes of a buffer that it does not keep: the same, until it stops."""
    if buffer.born.phase == "f" and buffer.born.position < _positions(layer):
        freed = _freed_again(buffer, layer)
        yield replace(buffer, born=replace(buffer.born, phase="r"), freed=freed, category="temporaries")


def _freed_again(buffer: Buffer, layer: Layer) -> Moment:
    """Return when a second forward gives up a buffer that it does not keep."""
    inside = buffer.freed.phase == "f" and buffer.freed.layer_offset == 0
    position = buffer.freed.position if inside and buffer.freed.position < _positions(layer) else LAST
    return Moment("r", position)


def _is_heavy(buffer: Buffer, layer: Layer) -> bool:
    """Return whether a compute-heavy operation of the forward makes a buffer."""
    return buffer.born.phase == "f" and buffer.born.position in (layer.selective_positions or ())


def _handed_over(buffer: Buffer, layer: Layer, before: Layer | None) -> Moment:
    """Return when a buffer is freed that the second forward takes from the first."""
    if buffer.freed.phase == "end":
        return buffer.freed
    if buffer.born.position >= _positions(layer):
        return Moment("b", _released(layer, before))
    return buffer.freed if _is_saved(buffer) else _freed_again(buffer, layer)


def _own_output(layer: Layer) -> Buffer | None:
    """Return the layer's output where its own backward keeps it (a ReLU's), and so hides how long the next needs it."""
    size = layer.output_bytes
    if any(buffer.size_bytes == size and _crosses(buffer) for buffer in layer.buffers):
        return None
    found = [buffer for buffer in _saved(layer) if buffer.size_bytes == size]
    return max(found, key=lambda buffer: buffer.born.position, default=None)


def _crosses(buffer: Buffer) -> bool:
    """Return whether a buffer is made in the forward, for the next layer."""
    return buffer.born.phase == "f" and buffer.freed.layer_offset == 1


def _moved(freed: Moment, layer: Layer, after: Layer | None) -> Moment:
    """Return when a buffer is freed; the inputs of a checkpointed block are held as long as its placeholders."""
    if after is None or not after.block or freed.layer_offset != 1:
        return freed
    return _last_use(layer, after)


def _last_use(layer: Layer, after: Layer | None) -> Moment:
    """Return when the output of `layer` is needed no more: where the next block's placeholders go.

    A layer that is no block may need it no longer than that, its whole backward: the trace does not tell.
    """
    if after is None:
        return Moment("end")
    position = _released(after, layer) if after.block else _last_position(after)
    return Moment("b", position, 1)


def _released(layer: Layer, before: Layer | None) -> int:
    """Return the position of the backward at which the last of a block's placeholders goes."""
    own = [buffer.freed.position for buffer in _saved(layer) if buffer.freed.layer_offset == 0]
    inputs = [b.freed.position for b in before.buffers if _crosses(b) and b.freed.phase == "b"] if before else []
    return max([*own, *inputs], default=0)


def _last_position(layer: Layer) -> int:
    moments = [moment for buffer in layer.buffers for moment in (buffer.born, buffer.freed)]
    moments += [moment for parameter in layer.parameters for moment in (parameter.born, parameter.ready)]
    return max((m.position for m in moments if m.phase == "b" and m.layer_offset == 0), default=0)


def _random_states(layer: Layer, before: Layer | None, size_bytes: int) -> list[Buffer]:
    size = Polynomial(((size_bytes, 0, 0),))
    held = Moment("b", _released(layer, before))
    return [
        Buffer(Moment("f"), held, "activations", size),
        Buffer(Moment("r"), Moment("r", LAST), "temporaries", size),
    ]
