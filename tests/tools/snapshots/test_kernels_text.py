from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleet_sparse.tools.snapshots.kernels_text import (
    EMPTY_LINE,
    NO_FAULT,
    NOT_A_NUMBER,
    NOT_AN_ID,
    TOO_MANY_FIELDS,
    parse_lines,
)
from fleet_sparse.warm_up import warm_up

WIDTH = 3
FLOATS = st.floats(width=32)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    warm_up()


def parsed(text: bytes, *, has_id: bool = True, max_lines: int = 4) -> tuple[list[int], list[list[float]], list[int]]:
    """Ids, values of each line, and `found`."""
    ids, counts = np.zeros(max_lines, np.int64), np.zeros(max_lines, np.int64)
    values, found = np.zeros(max_lines * WIDTH, np.float32), np.empty(3, np.int64)
    parse_lines(np.frombuffer(bytearray(text), np.uint8), len(text), has_id, WIDTH, ids, values, counts, found)
    num_lines = int(found[0])
    lines = [values[k * WIDTH : k * WIDTH + int(counts[k])].tolist() for k in range(num_lines)]
    return ids[:num_lines].tolist(), lines, found.tolist()


@given(number=FLOATS, form=st.sampled_from(["%g", "%e", "%f", "%.9g", "%.17g", "%+g", "%G"]))
@example(number=1.401298464324817e-45, form="%g")
@example(number=3.4028234663852886e38, form="%f")
@example(number=-0.0, form="%g")
def test_a_number_is_the_float32_that_is_nearest_to_its_text(number: float, form: str) -> None:
    text = form % number
    with np.errstate(over="ignore"):
        expected = np.float32(text)
    (found,), *_ = parsed(f"{text}\n".encode(), has_id=False)[1]
    assert math.isnan(found) if math.isnan(expected) else found == expected
    assert math.isnan(found) or math.copysign(1.0, found) == math.copysign(1.0, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e400", math.inf),
        ("-1e99999999999", -math.inf),
        ("1e-400", 0.0),
        ("5.", 5.0),
        (".5", 0.5),
        ("-INF", -math.inf),
    ],
)
def test_unusual_numbers(text: str, expected: float) -> None:
    assert parsed(f"{text}\n".encode(), has_id=False)[1] == [[expected]]


def test_digits_beyond_those_of_64_bits_still_count_as_places() -> None:
    assert parsed(b"123456789012345678901234567890\n", has_id=False)[1] == [[float(np.float32(1.2345678901e29))]]


@given(number=st.integers(0, 2**64 - 1))
@example(number=2**63)
@example(number=2**64 - 1)
def test_an_id_is_read_modulo_2_to_64(number: int) -> None:
    (found,), _, _ = parsed(f"{number} 1\n".encode())
    assert found == (number if number < 2**63 else number - 2**64)


def test_lines_may_have_fewer_numbers_than_there_is_room_for() -> None:
    assert parsed(b"1 2 3\n4\n5 6 7 8\n") == ([1, 4, 5], [[2, 3], [], [6, 7, 8]], [3, 16, NO_FAULT])


def test_a_line_without_its_end_is_left() -> None:
    assert parsed(b"1 2\n3 4") == ([1], [[2]], [1, 4, NO_FAULT])


def test_lines_beyond_the_room_are_left() -> None:
    assert parsed(b"1 2\n3 4\n5 6\n", max_lines=2)[2] == [2, 8, NO_FAULT]


@pytest.mark.parametrize(
    ("line", "fault", "at"),
    [
        (b"", EMPTY_LINE, 0),
        (b"x 1", NOT_AN_ID, 0),
        (b"-7 1", NOT_AN_ID, 0),
        (b"7.5 1", NOT_AN_ID, 0),
        (b"18446744073709551616 1", NOT_AN_ID, 0),
        (b"7 1 x", NOT_A_NUMBER, 4),
        (b"7 1  2", NOT_A_NUMBER, 4),
        (b"7 1\t2", NOT_A_NUMBER, 2),
        (b"7 1\r", NOT_A_NUMBER, 2),
        (b"7 1 -", NOT_A_NUMBER, 4),
        (b"7 .", NOT_A_NUMBER, 2),
        (b"7 1e", NOT_A_NUMBER, 2),
        (b"7 1e+", NOT_A_NUMBER, 2),
        (b"7 1x", NOT_A_NUMBER, 2),
        (b"7 in", NOT_A_NUMBER, 2),
        (b"7 0x10", NOT_A_NUMBER, 2),
        (b"7 1 2 3 4", TOO_MANY_FIELDS, 8),
    ],
)
def test_a_fault_tells_its_line_and_where_its_field_begins(line: bytes, fault: int, at: int) -> None:
    assert parsed(b"1 2\n" + line + b"\n9 9\n")[2] == [1, 4 + at, fault]


@given(text=st.binary(max_size=60))
def test_any_bytes_are_lines_or_a_fault(text: bytes) -> None:
    _, lines, (num_lines, at, fault) = parsed(text, max_lines=60)
    assert num_lines == len(lines)
    assert 0 <= at <= len(text)
    assert fault or b"\n" not in text[at:]
