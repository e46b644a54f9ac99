"""Identities of collectives that are unique over all parts of a model, and collectives of equal tensor slices."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gssim.collectives import Communication
from gssim.program.task import Task


@dataclass(eq=False)
class Named:
    """Renames collectives of tasks, and repeats them for equal slices that were not lowered."""

    slices: int
    """Number of slices of the model."""
    copies: int
    """Number of equal slices for which a lowered one stands: its collectives are repeated for each."""
    several: bool
    """Whether several parts of the model are lowered apart, so that identities must name the group as well."""
    _repeated: dict[int, tuple[Communication, Communication]] = field(default_factory=dict)
    """By `id` of a collective: the collective, and its repeated version."""
    _beside: dict[tuple[Sequence[int], ...], tuple[Sequence[int], ...]] = field(default_factory=dict)
    """Groups beside the first one of repeated collectives, by the groups of the collective; equal ones are the same
    objects, which are compared fast.
    """

    @property
    def changes(self) -> bool:
        """Whether any collective gets another identity or more groups."""
        return self.several or self.copies > 1

    def task(self, task: Task) -> Task:
        """Return a task with its collective repeated, under its identity."""
        exchange, name = task.exchange, task.communication
        if exchange is None or name is None:
            return task
        repeated = self.repeated(exchange)
        if repeated is exchange and not self.several:
            return task
        name = name.of_group(exchange.group) if self.several else name
        return task.renamed(task.id, name, task.after, repeated)

    def group(self, exchange: Communication) -> Sequence[int] | None:
        """Return the group in the identity of a collective; None if it has none."""
        return exchange.group if self.several else None

    def repeated(self, exchange: Communication) -> Communication:
        """Return a collective with the same ones of the other slices beside it, if it is between ranks with one."""
        if id(exchange) not in self._repeated:
            self._repeated[id(exchange)] = (exchange, self._in_every_copy(exchange))
        return self._repeated[id(exchange)][1]

    def _in_every_copy(self, exchange: Communication) -> Communication:
        if self.copies == 1 or len({rank % self.slices for rank in exchange.group}) > 1:
            return exchange
        own = exchange.groups
        if own not in self._beside:
            groups = [tuple([rank + copy for rank in group]) for copy in range(self.copies) for group in own]
            self._beside[own] = tuple(groups[1:])
        return exchange.of_groups(exchange.group, *self._beside[own])
