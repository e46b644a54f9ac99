"""Reasons for exchanges that end in a time-out: what was called here, and that all ranks must call it."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

BROKEN = re.compile(r"tim(e|ed)[ -]?out|connection (closed|reset|refused)|broken pipe|pair closure", re.IGNORECASE)
"""What backends say of peers that did not come within the group's time-out, or that have gone."""


@contextmanager
def every_rank(call: str) -> Iterator[None]:
    """Say of an exchange inside that fails for lack of a peer which call it belongs to, and who must make it.

    Where such calls are made inside each other, it is the outermost: what the user's own code has called.
    """
    try:
        yield
    except RuntimeError as error:
        reason = error.reason if isinstance(error, NoPeerError) else str(error).partition("\n")[0]
        if not isinstance(error, NoPeerError) and BROKEN.search(str(error)) is None:
            raise
        raise NoPeerError(call, reason) from error


class NoPeerError(RuntimeError):
    """Another rank did not take part in an exchange."""

    def __init__(self, call: str, reason: str) -> None:
        super().__init__(
            f"{call}: every rank of the group must do this, as often and in the same order; another one did not within "
            f"the group's time-out, or has ended ({reason})"
        )
        self.reason = reason


def called_by_torchs_state_dict() -> bool:
    """Return whether a method of an optimizer was called by `torch.distributed.checkpoint.state_dict`.

    That names tensors of param_groups by the model's parameters, and makes state by a step.
    """
    frame = sys._getframe(1).f_back
    for _ in range(4):  # steps are wrapped by torch's profiler and by `no_grad`
        if frame is None:
            break
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back
    return False
