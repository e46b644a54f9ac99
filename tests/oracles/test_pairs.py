"""Equal messages of many senders, stored by rows, give the same matrix and sums, to the last digit, as pair by pair."""

from collections.abc import Iterable
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gssim.collectives import Communication, Pairs

SIZES = st.sampled_from([0.0, 0.1, 1 / 3, 7.0, 1e-9, 123456.789])


def added(values: Iterable[float]) -> float:
    """Return a sum taken from the first to the last; Python's own is more exact from 3.12 on."""
    return reduce(add, values, 0.0)


@st.composite
def pairs(draw: st.DrawFn) -> Pairs:
    """Return matrices whose rows have neighbours that are equal, and others that are not."""
    members = draw(st.integers(1, 12))
    rows = draw(st.lists(st.tuples(*[SIZES] * members), min_size=1, max_size=3))
    kinds = draw(st.lists(st.integers(0, len(rows) - 1), min_size=members, max_size=members))
    return Pairs(rows, kinds)


@given(pairs())
def test_it_is_the_matrix_that_its_rows_say(found):
    matrix = [[0.0 if i == j else found.rows[found.kinds[i]][j] for j in range(len(found))] for i in range(len(found))]
    assert [list(row) for row in found] == matrix
    assert np.asarray(found).tolist() == matrix
    assert found == tuple(map(tuple, matrix))


@given(pairs())
def test_sums_are_those_of_the_rows_and_columns_to_the_last_digit(found):
    matrix = [list(row) for row in found]
    assert list(found.sent) == [added(row) for row in matrix]
    assert list(found.received) == [added(column) for column in zip(*matrix, strict=True)]
    assert found.total == pytest.approx(sum(map(sum, matrix)), rel=1e-12)


@given(pairs())
def test_a_collective_tells_the_same_of_both(found):
    by_rows = Communication("all-to-all-v", range(len(found)), 1.0, pair_bytes=found)
    by_pairs = Communication("all-to-all-v", range(len(found)), 1.0, pair_bytes=tuple(found))
    assert by_rows.payload_bytes == pytest.approx(by_pairs.payload_bytes, rel=1e-12)
    assert by_rows.most_sent_bytes == pytest.approx(by_pairs.most_sent_bytes, rel=1e-12)


@st.composite
def two_alike(draw: st.DrawFn) -> tuple[Pairs, Pairs]:
    """Return two matrices of the same rows, which may differ in an entry, a kind, or what stands for the own entry."""
    first = draw(pairs())
    members = len(first)
    rows = [list(row) for row in first.rows]
    kinds = list(first.kinds)
    for member in range(members) if draw(st.booleans()) else ():  # a row for each sender, with another own entry
        rows.append(list(first.rows[first.kinds[member]]))
        rows[-1][member] = draw(SIZES)
        kinds[member] = len(rows) - 1
    if draw(st.booleans()):
        rows[draw(st.integers(0, len(rows) - 1))][draw(st.integers(0, members - 1))] = draw(SIZES)
    columns = np.arange(members) if draw(st.booleans()) else None
    return first, Pairs(rows, kinds, columns)


@given(two_alike())
def test_matrices_are_equal_if_their_entries_are(both):
    first, second = both
    assert (first == second) == (second == first) == (tuple(first) == tuple(second))
    if first == second:
        assert hash(first) == hash(second)


def test_large_matrices_are_compared_without_their_entries(monkeypatch):
    """Those of 1,024 ranks took 0.1 s each, and bounds of a plan with a threshold ten times as long as its run."""
    first, second, other = (Pairs([np.arange(1024.0), np.full(1024, last)], [0, 1] * 512) for last in (1.0, 1.0, 2.0))
    monkeypatch.setattr(Pairs, "__iter__", None)
    assert first == second
    assert first != other


@given(pairs(), st.data())
def test_columns_stand_for_all_members_that_receive_the_same(found, data):
    count = len(found.rows[0])
    columns = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=15))
    kinds = data.draw(st.lists(st.integers(0, len(found.rows) - 1), min_size=len(columns), max_size=len(columns)))
    told = Pairs(found.rows, kinds, np.array(columns))
    full = Pairs([[row[column] for column in columns] for row in found.rows], kinds)
    assert [list(row) for row in told] == [list(row) for row in full]
    assert np.asarray(told).tolist() == np.asarray(full).tolist()
    assert list(told.row(0)) == list(full.row(0))
    assert told.sent == pytest.approx(full.sent, rel=1e-12)
    assert (told.most_sent, full.most_sent) == (max(told.sent), max(full.sent))
    assert told.received == pytest.approx(full.received, rel=1e-12)
    assert told.total == pytest.approx(full.total, rel=1e-12)
    assert (told.most, told.kind_count) == (full.most, full.kind_count)


def test_rows_are_found_by_their_numbers_as_those_of_a_list():
    found = Pairs([(1.0, 2.0)], (0, 0))
    assert (found[0], found[-1], found[:1]) == ((0.0, 2.0), (1.0, 0.0), [(0.0, 2.0)])
    with pytest.raises(IndexError):
        found[2]
