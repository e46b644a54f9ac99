"""What of a step travels together, and what is taken at a time: buckets of gradients, and micro-batches of samples."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from gssim.workload import LayerInstance, Parameter


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients travel together, in the order in which they become ready."""

    index: int
    members: tuple[tuple[LayerInstance, Parameter], ...]

    @cached_property
    def elements(self) -> int:
        """Number of gradient elements."""
        return sum(parameter.elements for _, parameter in self.members)

    def place(self, member: int) -> tuple[int, int]:
        """Return (layer, position) of the backward at which the given member is ready."""
        instance, parameter = self.members[member]
        return instance.index + parameter.ready.layer_offset, parameter.ready.position

    @property
    def complete(self) -> tuple[int, int]:
        """Where in the backward the last member is ready: (layer, position)."""
        return self.place(-1)

    @property
    def started(self) -> tuple[int, int]:
        """Where in the backward the first member is ready."""
        return self.place(0)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each member's elements begin."""
        return tuple(accumulate((parameter.elements for _, parameter in self.members[:-1]), initial=0))

    def inside(self, first: int, last: int) -> Iterator[tuple[LayerInstance, Parameter, int, int]]:
        """Give each member that has elements in [first, last), with the half-open range of its own that are there."""
        for member in range(max(0, bisect_right(self.starts, first) - 1), len(self.members)):
            start = self.starts[member]
            if start >= last:
                break
            instance, parameter = self.members[member]
            begin, end = max(start, first) - start, min(start + parameter.elements, last) - start
            if begin < end:
                yield instance, parameter, begin, end


@dataclass(frozen=True)
class MicroBatch:
    """One of the parts in which a rank's samples are taken."""

    index: int = 0
    count: int = 1
    leaves: bool = True
    """Whether gradients leave the device in it, where the plan lets them leave at all."""
    left: bool = False
    """Whether those of the micro-batches before have left in theirs."""

    @property
    def first(self) -> bool:
        """Whether no other comes before it in the step."""
        return self.index == 0

    @property
    def accumulates(self) -> bool:
        """Whether whole gradients of the micro-batches before are there, to which its own are added."""
        return self.index > 0 and not self.left

    @property
    def suffix(self) -> str:
        """What its labels end in."""
        return f" micro-batch {self.index}" if self.count > 1 else ""
