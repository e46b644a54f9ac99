"""Classes of neighbouring ranks whose data-dependent messages are equal.

[Note: neighbours] Under a threshold, the messages of a rank depend on the tensors in each owner's range, so in general
no two ranks are equal. But with many ranks the ranges are small, and neighbouring ranks often own equally many elements
of the same block of one tensor, of which equally many entries are sent. If that holds in every bucket, consecutive
ranks send equal messages to all others and receive equal ones from them, in the same order: each rank leaves out the
message to itself, and what remains is the same row. Such ranks share one role. They must be neighbours, because sums in
another order would differ in the last digits.
"""

import numpy as np

from gssim.program.lowering import Lowering
from gssim.program.messages import is_thresholded, owned_pieces, push_sizes
from gssim.program.publish import published
from gssim.units import Ints


def message_classes(low: Lowering) -> Ints:
    """Return the class of each of the group's ranks, by position: neighbours with equal messages share a class.

    Ranks at different places in their nodes never share one, and neither do ranks that hold different experts.
    """
    classes, *others = (_classes_of(owners) for owners in low.all_owners)
    for each in others:
        classes = np.unique(classes * (int(each.max()) + 1) + each, return_inverse=True)[1]
    return classes


def _classes_of(low: Lowering) -> Ints:
    """Return these classes by the messages of some owners."""
    classes = np.zeros(len(low.group), np.int64)
    first = 0
    for place in range(low.places):
        pieces, sending = owned_pieces(low, place), [each for each in low.micro_batches if each.sends_gradients]
        pushes = [push_sizes(low, micro_batch, place) for micro_batch in sending] if is_thresholded(low) else []
        # what distinguishes runs of owners: elements owned, entries received of each kind of sender, and parts with
        # thresholds of their own, by bucket
        by_run = [pieces.elements_owned]
        by_run += [push.messages.entries.reshape(-1, len(pieces.members)) for push in pushes]
        by_run += [push.parts for push in pushes]
        by_run += [published(low, place).entries] if low.thresholds_publish else []
        values = np.concatenate(by_run)
        differs = np.r_[True, (values[:, 1:] != values[:, :-1]).any(axis=0)]  # each run from the one before
        changes = (pieces.runs[1:] != pieces.runs[:-1]) & differs[pieces.runs[1:]]
        for push in pushes:  # owners of equal runs may be on nodes of different classes
            changes |= push.classes[1:] != push.classes[:-1]
        classes[place :: low.places] = first + np.cumsum(np.r_[0, changes])
        first = int(classes[place :: low.places][-1]) + 1
    return classes
