"""Bytes that oneDNN keeps of an LSTM's layer for its backward.

torch runs each direction of an LSTM's layer on a CPU as one operation, `mkldnn_rnn_layer`, whose fourth result holds
what its backward needs. oneDNN divides that into parts, and begins each part at a page. The parts are the gates, the
outputs of the steps, and the states and their gradients of each step, for which oneDNN has room for two layers and one
step more. Rows are padded so that they begin at cache lines. Source: oneDNN, src/cpu/rnn/rnn_utils.hpp
(set_workspace_sizes, get_good_ld) and rnn_utils.cpp (set_workspace_offsets).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gssim.workload.layer import PAGE_BYTES

STATES = (5, 6)
"""Places of an LSTM's states among its arguments."""
CACHE_LINE_BYTES = 64
GATES = 4
"""Gates of an LSTM."""
_WORKSPACES: dict[tuple[Any, ...], tuple[int, int]] = {}
"""Bytes of workspace for a sample's first step, and for each further one, by the layer's sizes."""


def workspace_parts(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    """Return the bytes of each part of an LSTM layer's workspace, before each is rounded up to pages.

    The kernel is run on zeros to check their sum. Where it is another, as oneDNN may divide it otherwise in other
    versions or precisions, all is one part, in proportion to the samples.

    Args:
        func: the operation `mkldnn_rnn_layer`.
        args: its arguments; inputs are (steps, samples, features).
    """
    inputs, *others = args
    length, samples = inputs.shape[:2]
    key = (
        inputs.dtype,
        inputs.shape[2:],
        *(each.shape if isinstance(each, Tensor) else str(each) for each in others[:4]),
    )
    if key not in _WORKSPACES:
        _WORKSPACES[key] = _measure_workspace(func, args)
    first, further = _WORKSPACES[key]
    size = int(samples * (first + further * (length - 1)))
    parts = padded_parts(length, samples, inputs.shape[2], others[1].shape[1], inputs.dtype.itemsize)
    return parts if sum(parts) == size else (size,)


def padded_parts(length: int, samples: int, features: int, hidden: int, value_bytes: int) -> tuple[int, ...]:
    """Return the bytes of gates, outputs, states and their gradients of one layer in one direction, in fp32.

    >>> [size // 4 for size in padded_parts(1, 1, 40, 72, 4)]
    [288, 80, 320, 320, 320, 288, 288]
    """
    steps, rows = length * samples, 2 * (length + 1) * samples
    widest = _padded(max(features, hidden), value_bytes)
    elements = [steps * _padded(GATES * hidden, value_bytes), steps * _padded(hidden, value_bytes)]
    elements += [rows * widest] * 3 + [rows * hidden] * 2
    return tuple(value_bytes * count for count in elements)


def _padded(columns: int, value_bytes: int) -> int:
    """Return the length of a row: whole cache lines, and no multiple of 256 elements."""
    line = CACHE_LINE_BYTES // value_bytes
    padded = -(-columns // line) * line
    return padded + line if padded % 256 == 0 else padded


def _measure_workspace(func: Any, args: Sequence[Any]) -> tuple[int, int]:
    """Return the workspace of a sample's first step and of a further one: of as many samples as fill whole pages."""
    inputs, *others = args
    whole = PAGE_BYTES // inputs.dtype.itemsize
    sizes = []
    with unset_fake_temporarily(), torch.enable_grad():  # without gradients nothing is kept
        for steps in (1, 2):
            real = [torch.zeros((steps, whole, *inputs.shape[2:]), dtype=inputs.dtype)]
            real += [
                torch.zeros((whole, each.shape[-1]) if place in STATES else each.shape, dtype=each.dtype)
                if isinstance(each, Tensor)
                else each
                for place, each in enumerate(others, 1)
            ]
            workspace: Tensor | None = func(*real)[3]
            sizes.append(0 if workspace is None else workspace.nbytes // whole)
    return sizes[0], sizes[1] - sizes[0]
