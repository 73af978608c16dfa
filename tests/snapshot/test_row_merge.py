from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.core.ids import hash_ids
from fleet_sparse.snapshot.row_merge import DuplicateId, Source, merge, side_by_side
from fleet_sparse.snapshot.rows import Rows
from support.snapshots import SGD, in_order

IDS = st.sets(st.integers(-6, 6))
DIM = SGD.dim


def rows_of(ids: Iterable[int], value: float) -> Rows:
    """Rows that are all `value`, in the order of their hash."""
    ordered = in_order(ids, SGD)
    return Rows.of(
        ordered, np.full((len(ordered), DIM), value, np.float32), np.empty((len(ordered), 0, DIM), np.float32)
    )


def cut(rows: Rows, lengths: Sequence[int]) -> Iterator[Rows]:
    """The rows in blocks of these lengths, over and over; a length may be 0."""
    begin = 0
    for length in itertools.cycle([*lengths, 1]):
        if begin >= len(rows.ids):
            return
        yield rows.part(slice(begin, begin + length))
        begin += length


def values_of(blocks: Iterable[Rows]) -> dict[int, float]:
    return {one: float(row[0]) for rows in blocks for one, row in zip(rows.ids.tolist(), rows.rows, strict=True)}


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=3))
def test_the_newest_row_counts_and_removal_takes_older_ones(
    members: list[tuple[set[int], set[int]]], lengths: list[int]
) -> None:
    sources: list[Source] = []
    expected: dict[int, float] = {}
    for age, (ids, removed) in enumerate(members):
        blocks = (block.ids for block in cut(rows_of(removed, 0), lengths))
        sources += [Source(blocks, 2 * age, 0), Source(cut(rows_of(ids, age), lengths), 2 * age + 1, 0)]
        expected = {one: value for one, value in expected.items() if one not in removed} | dict.fromkeys(ids, age)
    merged = list(merge(sources, SGD.salt))
    assert values_of(merged) == expected
    ids = [one for rows in merged for one in rows.ids.tolist()]
    assert ids == in_order(expected, SGD).tolist()


def test_a_source_is_not_read_before_its_first_hash_is_reached() -> None:
    rows = rows_of(range(100), 1.0)
    half = 50
    begin = int(hash_ids(rows.ids, SGD.salt)[half])
    read = []

    def noted(name: str, part: slice) -> Iterator[Rows]:
        for block in cut(rows.part(part), [10]):
            read.append(name)
            yield block

    high = Source(noted("high", slice(half, None)), 0, begin)
    low = Source(noted("low", slice(None, half)), 0, 0)
    merged = merge([high, low], SGD.salt)
    next(merged)
    assert set(read) == {"low"}
    assert sum(len(block.ids) for block in merged) == 90
    assert set(read) == {"low", "high"}


@given(IDS, IDS, st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3))
def test_side_by_side_an_id_of_both_is_in_one_pair(
    first: set[int], second: set[int], first_lengths: list[int], second_lengths: list[int]
) -> None:
    pairs = list(side_by_side(cut(rows_of(first, 1), first_lengths), cut(rows_of(second, 2), second_lengths), SGD.salt))
    found = [tuple(set() if side is None else set(side.ids.tolist()) for side in pair) for pair in pairs]
    assert set().union(*(one for one, _ in found)) == first
    assert set().union(*(other for _, other in found)) == second
    assert set().union(*(one & other for one, other in found)) == first & second


# Error paths


def test_an_id_of_two_sources_of_one_age_is_told() -> None:
    sources = [Source(cut(rows_of([5, 7], 1), [9]), 3, 0), Source(cut(rows_of([7, 9], 1), [9]), 3, 0)]
    with pytest.raises(DuplicateId, match="id 7 occurs twice") as caught:
        list(merge(sources, SGD.salt))
    assert caught.value.id == 7
