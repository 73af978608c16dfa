"""Feeds of lines, against a few lines of Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.errors import DatasetError
from fleet_sparse.plugin.datasets.feeds import FeedMaker
from fleet_sparse.plugin.datasets.lines import Lines
from fleet_sparse.plugin.datasets.parser import LineParser
from fleet_sparse.plugin.datasets.slots import Slot

SHAPES = st.sampled_from([(), (1,), (2,), (-1,), (-1, 2), (2, -1)])


def lines_of(slots: tuple[Slot, ...], rows: list[list[list[int]]]) -> Lines:
    text = "".join(" ".join(str(word) for values in row for word in (len(values), *values)) + "\n" for row in rows)
    (lines,) = LineParser(slots).parse(np.frombuffer(text.encode(), np.uint8), "file", 1)
    return lines


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Slot, ...], list[list[list[int]]], list[bool], list[int]]:
    """Slots, values of each slot of each line, whether lengths are wanted of each slot, and some of the lines."""
    shapes = draw(st.lists(st.tuples(SHAPES, st.booleans(), st.booleans()), min_size=1, max_size=5))
    slots = tuple(Slot(f"slot{number}", is_float, shape) for number, (shape, is_float, _) in enumerate(shapes))
    has_lengths = [wanted for _, _, wanted in shapes]
    rows = []
    for _ in range(draw(st.integers(1, 5))):
        row = []
        for slot, wanted in zip(slots, has_lengths, strict=True):
            num_units = draw(st.integers(0, 3)) if slot.is_padded or wanted else 1
            size = num_units * slot.multiple
            row.append(draw(st.lists(st.integers(-9, 9), min_size=size, max_size=size)))
        rows.append(row)
    which = draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=6))
    return slots, rows, has_lengths, which


def reference(slot: Slot, of_lines: list[list[int]]) -> Any:
    if slot.is_padded:
        width = max(slot.multiple, *map(len, of_lines))
        of_lines = [[*values, *[0] * (width - len(values))] for values in of_lines]
        shape = [len(of_lines), *(width // slot.multiple if size == -1 else size for size in slot.shape)]
    else:
        shape = [-1, *slot.shape]
    return np.array([value for values in of_lines for value in values], slot.dtype).reshape(shape)


@given(cases())
def test_any_lines_have_the_feed_of_a_simple_loop(
    case: tuple[tuple[Slot, ...], list[list[list[int]]], list[bool], list[int]],
) -> None:
    slots, rows, has_lengths, which = case
    lengths = [f"{slot.name}.lengths" for slot, wanted in zip(slots, has_lengths, strict=True) if wanted]
    feed = FeedMaker(slots, {*(slot.name for slot in slots), *lengths}).make(lines_of(slots, rows), np.array(which))
    assert (set(feed), feed.num_lines) == ({*(slot.name for slot in slots), *lengths}, len(which))
    for number, slot in enumerate(slots):
        of_lines = [rows[line][number] for line in which]
        expected = reference(slot, of_lines)
        assert feed[slot.name].dtype == expected.dtype
        np.testing.assert_array_equal(feed[slot.name], expected)
        if has_lengths[number]:
            assert feed[f"{slot.name}.lengths"].tolist() == list(map(len, of_lines))


def test_a_slot_that_is_not_fed_may_have_any_length() -> None:
    slots = (Slot("fed", False, (1,)), Slot("other", False, (1,)))
    lines = lines_of(slots, [[[1], [2, 3]], [[4], []]])
    feed = FeedMaker(slots, {"fed"}).make(lines, np.arange(2))
    assert {name: array.tolist() for name, array in feed.items()} == {"fed": [[1], [4]]}
    with pytest.raises(DatasetError) as caught:
        FeedMaker(slots, {"fed", "other"}).make(lines, np.arange(2))
    assert (caught.value.line_number, caught.value.slot) == (1, "other")
