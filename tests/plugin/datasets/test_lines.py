"""Lines: parts, joins and batches of them, and where each is from."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.plugin.datasets.lines import in_batches, joined, no_lines, taken
from support.dataset_lines import Rows, made, rows_of

ROWS = st.lists(
    st.tuples(st.lists(st.integers(-9, 9), max_size=3), st.lists(st.floats(-2, 2, width=16), max_size=3)), max_size=7
)


@given(st.lists(ROWS, max_size=5), st.integers(1, 6))
def test_batches_have_all_rows_in_their_order(parts: list[Rows], size: int) -> None:
    batches = list(in_batches((made(part) for part in parts), size))
    assert [row for batch in batches for row in rows_of(batch)] == [row for part in parts for row in part]
    assert all(batch.num_lines == size for batch in batches[:-1])
    assert all(0 < batch.num_lines <= size for batch in batches)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(1, 6))
def test_every_line_of_a_batch_knows_where_it_is_from(sizes: list[int], size: int) -> None:
    parts = [made([([line], [])] * num_lines, f"file{line}", 10) for line, num_lines in enumerate(sizes)]
    expected = [(f"file{number}", 10 + line) for number, num_lines in enumerate(sizes) for line in range(num_lines)]
    found = [batch.where(line) for batch in in_batches(parts, size) for line in range(batch.num_lines)]
    assert found == expected


def test_joined_parts_are_freed() -> None:
    parts = [made([([1], [2.0])]), made([([3, 4], [])])]
    whole = joined(parts)
    assert (parts, rows_of(whole)) == ([], [([1], [2.0]), ([3, 4], [])])


def test_no_lines_are_from_nowhere() -> None:
    assert (no_lines(2).num_lines, no_lines(2).where(0)) == (0, ("", 0))


@given(ROWS, st.data())
def test_taken_lines_are_copies_in_the_given_order(rows: Rows, data: st.DataObject) -> None:
    which = data.draw(st.lists(st.integers(0, len(rows) - 1))) if rows else []
    found = taken(made(rows), np.array(which, np.int64))
    assert rows_of(found) == [rows[line] for line in which]
