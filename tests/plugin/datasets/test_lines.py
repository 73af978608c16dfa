"""Lines: parts, joins and batches of them, and where each is from."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.plugin.datasets.lines import Lines, Origin, in_batches, joined, no_lines

Rows = list[tuple[list[int], list[float]]]


def made(rows: Rows, path: str = "file", number: int = 1) -> Lines:
    """Lines with an integer slot and a float slot."""
    starts = [np.cumsum([0, *(len(row[kind]) for row in rows)]) for kind in (0, 1)]
    return Lines(
        2,
        np.array([len(values) for row in rows for values in row], np.int32),
        starts[0],
        np.array([value for row in rows for value in row[0]], np.int64),
        starts[1],
        np.array([value for row in rows for value in row[1]], np.float32),
        (Origin(0, path, number),),
    )


def rows_of(lines: Lines) -> Rows:
    assert lines.counts.tolist() == [
        int(size) for pair in zip(np.diff(lines.id_starts), np.diff(lines.float_starts), strict=True) for size in pair
    ]
    return [
        (
            lines.ids[lines.id_starts[line] : lines.id_starts[line + 1]].tolist(),
            lines.floats[lines.float_starts[line] : lines.float_starts[line + 1]].tolist(),
        )
        for line in range(lines.num_lines)
    ]


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
