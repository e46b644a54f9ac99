"""The description of one collective: kind, group of ranks, size, and the parts or pairs of uneven ones."""

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
    """Size of the full tensor, as in `result.Collective.bytes`; all-to-all: of each rank's input."""
    pair_bytes: Sequence[Sequence[float]] = ()
    """all-to-all-v: bytes from the i-th to the j-th member of the group."""
    part_bytes: tuple[float, ...] = ()
    """all-gather-v and reduce-scatter-v: bytes that each member owns."""
    data_dependent: bool = False
    root: int = 0
    """Position in the group of the root of a broadcast or reduce."""
    beside: tuple[Sequence[int], ...] = ()
    """Other groups of the same size, each with a collective of its own: those along an axis of a mesh."""
    carried_as: str = ""
    """Kind by which its algorithm and costs are looked up, where it differs: an all-gather made of point-to-point
    messages is an all-gather-v to the network, and a push by a collective of the backend an all-to-all."""

    half_precision: str = ""
    """bf16 or fp16, where elements in it are summed: their additions may have costs of their own."""

    @property
    def groups(self) -> tuple[Sequence[int], ...]:
        """All groups, each with a collective of its own."""
        return (self.group, *self.beside)

    @property
    def carried_kind(self) -> str:
        """Kind by which its algorithm and costs are looked up."""
        return self.carried_as or self.kind

    @property
    def payload_bytes(self) -> float:
        """Bytes that all members together send: each pair's of an all-to-all-v; of an all-gather-v each part to all
        members but its owner.
        """
        pairs = self.pair_bytes
        whole = pairs.total if isinstance(pairs, Pairs) else sum(map(sum, pairs))
        return whole + (len(self.group) - 1) * sum(self.part_bytes)

    @property
    def most_sent_bytes(self) -> float:
        """Bytes of the member that sends most in an all-to-all-v."""
        pairs = self.pair_bytes
        return max(pairs.sent if isinstance(pairs, Pairs) else map(sum, pairs))
