"""Classes of neighbouring ranks whose data-dependent messages are equal.

[Note: neighbours] Under a threshold, the messages of a rank depend on the tensors in each owner's range, so that in
general no two ranks are equal. But with many ranks the ranges are small: neighbours often own equally many elements of
the same block of a tensor, of which equally many entries are sent. Consecutive ranks for which that holds in every
bucket send equal messages to all others and receive equal ones from them, in the same order: leaving out the message to
oneself leaves the same row for each. So they share one role. They must be neighbours: sums in another order differ in
the last digits.
"""

from collections.abc import Iterator

import numpy as np

from gssim.program.lowering import Lowering
from gssim.program.messages import is_thresholded, owned_pieces, push_sizes
from gssim.program.publish import published
from gssim.units import Floats, Ints


def message_classes(low: Lowering) -> Ints:
    """Return the class of each of the group's ranks, by position: equal for neighbours with equal messages.

    Classes of different places in a node are distinct.
    """
    classes = np.zeros(len(low.group), np.int64)
    first = 0
    for place in range(low.places):
        runs, values = owned_pieces(low, place).runs, np.concatenate(list(_by_run(low, place)))
        differs = np.r_[True, (values[:, 1:] != values[:, :-1]).any(axis=0)]  # from the run before
        changes = (runs[1:] != runs[:-1]) & differs[runs[1:]]
        for kinds in _senders(low, place):
            changes |= kinds[1:] != kinds[:-1]
        classes[place :: low.places] = first + np.cumsum(np.r_[0, changes])
        first = int(classes[place :: low.places][-1]) + 1
    return classes


def _by_run(low: Lowering, place: int) -> Iterator[Floats]:
    """Yield what distinguishes runs of owners at a place: elements owned, entries received per kind, by bucket."""
    pieces = owned_pieces(low, place)
    yield pieces.elements_owned
    for micro_batch in low.micro_batches:
        if micro_batch.sends_gradients and is_thresholded(low):
            yield push_sizes(low, micro_batch, place).messages.entries.reshape(-1, len(pieces.members))
    if low.thresholds_publish:
        yield published(low, place).entries


def _senders(low: Lowering, place: int) -> Iterator[Ints]:
    """Yield the kind of sender of each node's rank at a place."""
    for micro_batch in low.micro_batches:
        if micro_batch.sends_gradients and is_thresholded(low):
            yield push_sizes(low, micro_batch, place).classes
