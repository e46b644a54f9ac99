"""Requests whose effect on the caching allocator is known: it is what serving them one by one does."""

from random import Random

import pytest

from gssim.memory import (
    Block,
    CachingAllocator,
    KnownRequests,
    RepeatedRequests,
    Request,
    known_effects,
    rounded_bytes,
)

SIZES = [700, 3_000, 600_000, 3 * 2**20, 9 * 2**20, 21 * 2**20]
KINDS = [("activations", 0, float(size)) for size in SIZES] + [("temporaries", 1, float(size)) for size in SIZES]


class Replay:
    """An allocator, and the live blocks by kind."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator()
        self.lists: dict[tuple[str, int, float], list[Block]] = {kind: [] for kind in KINDS}

    def requests(self, part: list[tuple[int, bool, int]]) -> list[Request]:
        """Return the requests of a part: for each the number of its kind, whether it frees, and how many blocks."""
        found: list[Request] = []
        for number, frees, count in part:
            kind = KINDS[number]
            size = rounded_bytes(kind[2])
            pool, place = self.allocator.pool_of(size, ""), -1 if kind[0] == "activations" else 0
            found.append((self.lists[kind], pool, 0 if frees else size, int(kind[2]), place, count))
        return found

    def known(self, part: list[tuple[int, bool, int]]) -> KnownRequests:
        """Return the same, as requests whose effect is looked up."""
        of_lists = {id(blocks): kind for kind, blocks in self.lists.items()}
        repeated = RepeatedRequests(self.requests(part), of_lists, self.allocator.pools)
        return self.bound(repeated)

    def bound(self, repeated: RepeatedRequests) -> KnownRequests:
        """Return requests of another replay as those of this one."""
        return KnownRequests(repeated, [self.lists[kind] for kind in repeated.kinds], self.allocator)

    def state(self) -> object:
        """Return everything that later requests, or a report, depend on."""
        own = self.allocator
        peaks = own.peak_requested_bytes, own.peak_allocated_bytes, own.peak_reserved_bytes, own.reserved_bytes
        blocks = [[block[:3] for block in self.lists[kind]] for kind in KINDS]
        return own.state(), peaks, blocks


def random_part(random: Random, live: list[int]) -> list[tuple[int, bool, int]]:
    """Return requests that free no more than is live, whose changes are made in `live`."""
    part = []
    for _ in range(random.randint(3, 25)):
        number, count = random.randrange(len(KINDS)), random.choice([1, 1, 1, 3])
        frees = live[number] >= count and random.random() < 0.55
        live[number] += -count if frees else count
        part.append((number, frees, count))
    return part


@pytest.mark.parametrize("seed", range(30))
def test_a_known_effect_is_that_of_the_requests(seed, monkeypatch):
    """The second replay repeats the first one at other addresses: all of its effects are known."""
    monkeypatch.setattr(known_effects, "MOST_MISSES", 10**6)
    applied = []
    apply = KnownRequests._apply
    monkeypatch.setattr(KnownRequests, "_apply", lambda *arguments: applied.append(apply(*arguments)))
    random = Random(seed)
    live = [0] * len(KINDS)
    forward = random_part(random, live)
    # frees what the forward leaves, so that both can be repeated
    backward = [(number, True, 1) for number, count in enumerate(live) for _ in range(count)]
    random.shuffle(backward)
    first = Replay()
    shared = [first.known(part)._repeated for part in (forward, backward)]
    before = random_part(random, [0] * len(KINDS))  # blocks that stay
    order = [random.random() < 0.5 for _ in range(60)]
    for further in (0, 3):  # blocks that move the addresses of all others
        looked_up, plain = Replay(), Replay()
        for replay in (looked_up, plain):
            for _ in range(further):
                replay.allocator.allocate(40 * 2**20)
            replay.allocator.serve(iter(replay.requests(before)))
        in_flight = 0
        for may_be_forward in order:
            is_forward = in_flight == 0 or may_be_forward
            in_flight += 1 if is_forward else -1
            part, repeated = (forward, shared[0]) if is_forward else (backward, shared[1])
            assert looked_up.bound(repeated).serve()
            plain.allocator.serve(iter(plain.requests(part)))
            assert looked_up.state() == plain.state()
    assert len(applied) >= len(order)
