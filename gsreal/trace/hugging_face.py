"""Hugging Face models under fake tensors, as they run on real ones.

They look at values in one place: whether several sequences are packed into one sample, by the numbers of positions.
Fake tensors have no values, and transformers then takes sequences for packed and makes a mask of them, where a real
run of whole sequences has none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

PACKED = "find_packed_sequence_indices"


@contextmanager
def sequences_not_packed() -> Iterator[None]:
    """Let transformers find that every sample is one sequence, by the operations that find it in a real run."""
    try:
        from transformers import masking_utils
    except ImportError:  # not installed: there is no such model
        yield
        return
    original = getattr(masking_utils, PACKED, None)
    if original is None:  # versions before it looked for no packed sequences
        yield
        return
    with mock.patch.object(masking_utils, PACKED, _finding_none(original)):
        yield


def _finding_none(original: Callable[[Tensor], Tensor | None]) -> Callable[..., None]:
    def find(position_ids: Tensor, *_args: Any, **_settings: Any) -> None:
        indices = original(position_ids)
        if indices is not None:
            (indices[:, -1] == 0).all()  # what it would look at

    return find
