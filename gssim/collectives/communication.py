"""One collective as it is handed over to the backend."""

from collections.abc import Sequence
from dataclasses import dataclass

from gssim.collectives.pairs import Pairs

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "broadcast",
    "reduce",
    "all-to-all",
    "send",
    "all-gather-v",
    "reduce-scatter-v",
    "all-to-all-v",
)


@dataclass(frozen=True, slots=True)
class Communication:
    """A collective: kind, group, size; and parts or pairs for the uneven forms."""

    kind: str
    group: Sequence[int]
    """Sorted ranks, a tuple or a range; the first is the sender of a send."""
    size_bytes: float
    """Of the full tensor, as in `result.Collective.bytes`; all-to-all: what each rank hands over."""
    pair_bytes: Sequence[Sequence[float]] = ()
    """all-to-all-v: bytes from the i-th to the j-th member of the group."""
    part_bytes: tuple[float, ...] = ()
    """all-gather-v and reduce-scatter-v: bytes that each member owns."""
    data_dependent: bool = False
    root: int = 0
    """Position in the group of the root of a broadcast or reduce."""
    beside: tuple[Sequence[int], ...] = ()
    """Other groups, as large, each of which carries out the same for itself: those along an axis of a mesh."""
    carried_as: str = ""
    """Kind by which its algorithm and costs are found, where that is another: an all-gather made of point-to-point
    messages is an all-gather-v to the network, and a push by the backend's own call an all-to-all."""

    @property
    def groups(self) -> tuple[Sequence[int], ...]:
        """All groups that carry it out, each for itself."""
        return (self.group, *self.beside)

    @property
    def carried_kind(self) -> str:
        """Kind by which its algorithm and costs are found."""
        return self.carried_as or self.kind

    @property
    def payload_bytes(self) -> float:
        """Bytes that all members together send: of an all-to-all-v each pair's, of an all-gather-v all parts but one's
        own to every member.
        """
        pairs = self.pair_bytes
        whole = pairs.total if isinstance(pairs, Pairs) else sum(map(sum, pairs))
        return whole + (len(self.group) - 1) * sum(self.part_bytes)

    @property
    def most_sent_bytes(self) -> float:
        """Of an all-to-all-v: what the member sends that sends most."""
        pairs = self.pair_bytes
        return max(pairs.sent if isinstance(pairs, Pairs) else map(sum, pairs))
