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
        columns = np.concatenate(list(_columns(low, place)))
        changes = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        classes[place :: low.places] = first + np.cumsum(np.r_[0, changes])
        first = int(classes[place :: low.places][-1]) + 1
    return classes


def _columns(low: Lowering, place: int) -> Iterator[Floats]:
    """Yield columns that distinguish the nodes' ranks at a place: elements owned, kind of sender, entries received per
    kind, by bucket.
    """
    yield owned_pieces(low, place).elements_owned
    for micro_batch in low.micro_batches:
        if micro_batch.sends_gradients and is_thresholded(low):
            sizes = push_sizes(low, micro_batch, place)
            yield sizes.classes[None].astype(np.float64)
            yield sizes.messages.entries.reshape(-1, low.nodes)
    if low.thresholds_publish:
        yield published(low, place).entries
