"""Blocks of device memory, and the pools in which free ones wait."""

from bisect import bisect_left, insort


class Block:
    """A range of device memory, beside its neighbours in the same segment."""

    __slots__ = ("address", "free", "mapped", "next", "pool", "previous", "requested_bytes", "size_bytes")

    def __init__(self, pool: "Pool", address: int, size_bytes: int) -> None:
        self.pool, self.address, self.size_bytes = pool, address, size_bytes
        self.free = True
        self.mapped = True
        """Whether there is memory behind its addresses; always, but in expandable segments."""
        self.requested_bytes = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def is_split(self) -> bool:
        """Whether it is a part of its segment only."""
        return self.previous is not None or self.next is not None

    def cut(self, size_bytes: int) -> "Block":
        """Keep the first `size_bytes`; return the rest as a block behind it."""
        rest = Block(self.pool, self.address + size_bytes, self.size_bytes - size_bytes)
        rest.mapped = self.mapped
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next, self.size_bytes = rest, size_bytes
        return rest

    def swallow(self, other: "Block") -> None:
        """Take in a neighbour."""
        if other is self.previous:
            self.address, self.previous = other.address, other.previous
            if other.previous is not None:
                other.previous.next = self
        else:
            self.next = other.next
            if other.next is not None:
                other.next.previous = self
        self.size_bytes += other.size_bytes


ADDRESS_BITS = 96
"""More than any address has."""


class Pool:
    """Free blocks of one stream, small ones or large ones, by size and then address: one number for both."""

    __slots__ = ("_blocks", "_order", "small", "unmapped")

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self._order: list[int] = []
        self._blocks: dict[int, Block] = {}
        self.unmapped: list[tuple[int, Block]] = []
        """Blocks of expandable segments without memory, by address."""

    @property
    def free(self) -> list[Block]:
        """The blocks that have memory, the smallest first."""
        return [self._blocks[number] for number in self._order]

    def add(self, block: Block) -> None:
        """Let a free block wait; what has no memory waits apart."""
        if block.mapped:
            number = block.size_bytes << ADDRESS_BITS | block.address
            insort(self._order, number)
            self._blocks[number] = block
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        if block.mapped:
            number = block.size_bytes << ADDRESS_BITS | block.address
            del self._order[bisect_left(self._order, number)]
            del self._blocks[number]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def taken(self, size_bytes: int) -> Block | None:
        """Take out the smallest free block that is large enough, of equal ones that with the lowest address; else None.

        The end of an expandable segment counts as large as all the addresses behind it, so that others come first.
        """
        order, blocks = self._order, self._blocks
        place = bisect_left(order, size_bytes << ADDRESS_BITS)
        if place == len(order):
            return None
        if self.unmapped:
            while place + 1 < len(order) and _room_bytes(blocks[order[place + 1]]) < _room_bytes(blocks[order[place]]):
                place += 1
        return blocks.pop(order.pop(place))


def _room_bytes(block: Block) -> int:
    """Return how large a free block can grow without moving."""
    behind = block.next
    return block.size_bytes + (behind.size_bytes if behind is not None and not behind.mapped else 0)
