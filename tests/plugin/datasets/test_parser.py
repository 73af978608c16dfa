"""The parser of multi-slot text, against one in a few lines of Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_sparse.errors import DatasetError
from fleet_sparse.plugin.datasets.lines import Lines, joined, no_lines
from fleet_sparse.plugin.datasets.parser import LineParser
from fleet_sparse.plugin.datasets.slots import Slot

ID, FLOATS, RAGGED = Slot("id", False, (1,)), Slot("floats", True, (2,)), Slot("ragged", False, (-1,))
SLOTS = (ID, FLOATS, RAGGED)
GOOD = b"1 5 2 0.5 -1e-3 2 7 8"


def parsed(text: bytes, slots: Sequence[Slot] = SLOTS, num_names: int = 0) -> Lines:
    return joined([no_lines(len(slots)), *LineParser(slots, num_names).parse(np.frombuffer(text, np.uint8), "file", 1)])


def refused(text: bytes, num_names: int = 0) -> DatasetError:
    with pytest.raises(DatasetError) as caught:
        parsed(text, num_names=num_names)
    return caught.value


def values_of(lines: Lines, slots: Sequence[Slot]) -> list[list[list[float]]]:
    """The values of each slot of each line."""
    found = []
    for line in range(lines.num_lines):
        next_of = {False: int(lines.id_starts[line]), True: int(lines.float_starts[line])}
        of_line = []
        for slot, count in zip(slots, lines.counts[line * len(slots) :][: len(slots)].tolist(), strict=True):
            values = lines.floats if slot.is_float else lines.ids
            of_line.append(values[next_of[slot.is_float] :][:count].tolist())
            next_of[slot.is_float] += count
        found.append(of_line)
    return found


def reference(text: str, slots: Sequence[Slot]) -> list[list[list[float]]]:
    found = []
    for line in text.splitlines():
        words = iter(line.split())
        found.append([[value_of(next(words), slot) for _ in range(int(next(words)))] for slot in slots])
    return found


def value_of(word: str, slot: Slot) -> float:
    return float(np.float32(word)) if slot.is_float else int(np.uint64(int(word) % 2**64).astype(np.int64))


INTEGERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-9, 9)).map(str)
FLOATS32 = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(repr),
    st.floats(-1e30, 1e30, allow_nan=False).map(lambda value: f"{value:.6g}"),
    st.integers(-(10**12), 10**12).map(str),
    st.floats(0, 1e6).map(lambda value: f"+{value:.9f}"),
    st.floats(0, 1e6).map(lambda value: f"{value:E}"),
)
SPACES = st.sampled_from([" ", "  ", "\t", " \t "])


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, tuple[Slot, ...]]:
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    slots = tuple(Slot(f"slot{number}", is_float, (-1,)) for number, is_float in enumerate(kinds))
    lines = []
    for _ in range(draw(st.integers(0, 5))):
        words: list[str] = []
        for slot in slots:
            values = draw(st.lists(FLOATS32 if slot.is_float else INTEGERS, max_size=4))
            words += [str(len(values)), *values]
        lines.append(draw(SPACES).join(words) + draw(st.sampled_from(["", " ", "\r"])) + "\n")
    return "".join(lines), slots


@given(texts())
def test_any_text_has_the_values_of_a_simple_parser(case: tuple[str, tuple[Slot, ...]]) -> None:
    text, slots = case
    lines = parsed(text.encode(), slots)
    np.testing.assert_equal(values_of(lines, slots), reference(text, slots))


def test_floats_have_the_nearest_float32() -> None:
    words = ["0.1", "1e-45", "3.4028235e38", "16777217", "0.30000001192092896", "1e-60", "00001.50", ".5", "7.", "-0.0"]
    lines = parsed(f"{len(words)} {' '.join(words)}\n".encode(), [Slot("x", True, (-1,))])
    assert lines.floats.tobytes() == np.array(words, np.float32).tobytes()


def test_ids_have_all_64_bits() -> None:
    lines = parsed(b"3 18446744073709551615 -9223372036854775808 9223372036854775807\n", [RAGGED])
    assert lines.ids.tolist() == [-1, -(2**63), 2**63 - 1]


@pytest.mark.parametrize("line", ["0\n", "1 5\n", "9 1 2 3 4 5 6 7 8 9\n"])
def test_any_line_may_fill_a_large_text(line: str) -> None:
    lines = parsed(line.encode() * 100_000, [RAGGED])
    assert (lines.num_lines, len(lines.ids)) == (100_000, 100_000 * int(line[0]))


def test_words_before_the_slots_are_left_out() -> None:
    lines = parsed(b"1 user-7 1 page/x=2 1 4\n", [ID], num_names=2)
    assert lines.ids.tolist() == [4]


def test_no_text_has_no_lines() -> None:
    assert parsed(b"").num_lines == 0


@pytest.mark.parametrize(
    ("line", "slot", "names"),
    [
        (b"", "id", ("the end of the line",)),
        (b"x 5", "id", ("'x'",)),
        (b"-1 5", "id", ("'-1'",)),
        (b"12345678901 5", "id", ("'12345678901'",)),
        (b"1 5 3 1 2 3 0", "floats", ("3 values", "2")),
        (b"1", "id", ("0 values",)),
        (b"1 5.0 2 1 2 0", "id", ("value 1", "'5.0'", "integer")),
        (b"1 18446744073709551616 2 1 2 0", "id", ("'18446744073709551616'", "64 bits")),
        (b"1 -9223372036854775809 2 1 2 0", "id", ("'-9223372036854775809'", "64 bits")),
        (b"1 5 2 1 nan 0", "floats", ("value 2", "'nan'", "float32")),
        (b"1 5 2 1 1e39 0", "floats", ("value 2", "'1e39'", "float32")),
        (b"1 5 2 1 1e 0", "floats", ("value 2", "'1e'")),
        (b"1 5 2 . 1 0", "floats", ("value 1", "'.'")),
        (b"1 5 2 1", "floats", ("1 values",)),
        (b"1 5 2 1 2 0 9", "ragged", ("'9'", "3")),
        (b"1 5 2 1 2 1 \xff\xfe", "ragged", ("value 1",)),
    ],
)
def test_malformed_line_is_named_with_its_slot(line: bytes, slot: str, names: tuple[str, ...]) -> None:
    error = refused(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    assert (error.path, error.line_number, error.slot) == ("file", 2, slot)
    assert [name for name in ("'file'", "line 2", f"'{slot}'", *names) if name not in str(error)] == []


def test_line_without_the_words_that_are_left_out_is_refused() -> None:
    assert refused(b"2 a b 1 5 2 1 2 0\n", num_names=1).line_number == 1


def test_lines_before_a_malformed_one_are_yielded() -> None:
    text = GOOD + b"\n1 6 2 1 2 0\n1 7 2 3 x 0\n"
    found: list[Lines] = []
    with pytest.raises(DatasetError) as caught:
        found.extend(LineParser(SLOTS).parse(np.frombuffer(text, np.uint8), "file", 1))
    assert caught.value.line_number == 3
    (lines,) = found
    assert values_of(lines, SLOTS) == reference(GOOD.decode() + "\n1 6 2 1 2 0", SLOTS)
    assert (len(lines.ids), len(lines.floats)) == (4, 4)
