"""Neighbours whose messages depend on the data, but are the same.

[Note: neighbours] What a rank sends under a threshold depends on whose range holds which tensors, so that no two ranks
need be alike. But ranges of many ranks are small: neighbours often own equally many elements of the same block of a
tensor, and what is sent of these is as much. Of ranks in a row for which that is so in every bucket, each sends all
others the same and gets the same from them, one after another: to leave out the one or the other for oneself leaves
the same row. So they have one role. It must be neighbours: sums in another order differ in their last digits.
"""

from collections.abc import Iterator

import numpy as np

from gssim.program.lowering import Lowering
from gssim.program.messages import push_matrix
from gssim.program.publish import messages_of
from gssim.units import Floats, Ints


def neighbours(low: Lowering) -> Ints:
    """Return a number for each of the group's ranks, by position: equal in rows of neighbours with the same messages.

    Places in a node have numbers of their own.
    """
    found = np.zeros(len(low.group), np.int64)
    first = 0
    for place in range(low.places):
        columns = np.array(list(_columns(low, place)))
        changes = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        found[place :: low.places] = first + np.cumsum(np.r_[0, changes])
        first = int(found[place :: low.places][-1]) + 1
    return found


def _columns(low: Lowering, place: int) -> Iterator[Floats]:
    """Give what tells the nodes' ranks at a place apart: what each owns, sends, and is sent by every kind of sender."""
    for bucket in low.buckets:
        yield np.array(low.division(bucket).owned[place], dtype=float)
        for micro_batch in low.micro_batches:
            if micro_batch.leaves:
                entries = push_matrix(low, bucket, micro_batch, place)[1]
                yield np.array(entries.kinds, dtype=float)
                yield from np.array(entries.rows, dtype=float)
        if low.thresholds_publish:
            yield np.array([message.entries for message in messages_of(low, bucket, place)])
