"""Numbers out of text, line by line. No process that serves needs this: `warm_up` compiles it where it was imported."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.jit import BOOL, FLOAT32S, INT64, INT64S, UINT8S, inlined, kernel

# What `parse_lines` found wrong with a line.
NO_FAULT, NOT_A_NUMBER, TOO_MANY_FIELDS, EMPTY_LINE, NOT_AN_ID = 0, 1, 2, 3, 4

_SPACE, _LINE_END, _PLUS, _MINUS, _POINT = 32, 10, 43, 45, 46
_ZERO, _NINE, _LOWER = 48, 57, 32
_E, _I, _N, _A, _F = 101, 105, 110, 97, 102
_TEN = np.uint64(10)
# One more digit than this could pass 2^64; what a float32 is does not depend on the digits behind it.
_MAX_MANTISSA = np.uint64((1 << 63) // 10)
_MAX_ID_TENTH, _MAX_ID_DIGIT = np.uint64((1 << 64) // 10), np.uint64(5)
_MAX_EXPONENT = 400  # far beyond float32: 0 or infinity
_POWERS = np.array([float(f"1e{k}") for k in range(23)])  # all that float64 has exactly
_MAX_POWER = np.int64(len(_POWERS) - 1)


@inlined
def _is_digit(character: int) -> bool:
    return _ZERO <= character <= _NINE


@inlined
def _scaled(mantissa: np.uint64, exponent: np.int64) -> float:
    """`mantissa * 10^exponent`; rounded once while the mantissa is below 2^53 and the exponent within 22."""
    value, left = np.float64(mantissa), exponent
    while left > 0 and value != 0.0:
        step = min(left, _MAX_POWER)
        value *= _POWERS[step]
        left -= step
    while left < 0 and value != 0.0:
        step = min(-left, _MAX_POWER)
        value /= _POWERS[step]
        left += step
    return value


@inlined
def _word_end(
    text: NDArray[np.uint8], begin: int, end: int, sign: float, values: NDArray[np.float32], index: int
) -> int:
    """As `_float_end`, of "inf" or "nan"."""
    if begin + 3 > end:
        return -1
    first, second, third = text[begin] | _LOWER, text[begin + 1] | _LOWER, text[begin + 2] | _LOWER
    if first == _I and second == _N and third == _F:
        values[index] = np.float32(sign * np.inf)
        return begin + 3
    if first == _N and second == _A and third == _N:
        values[index] = np.float32(np.nan)
        return begin + 3
    return -1


@inlined
def _exponent(text: NDArray[np.uint8], begin: int, end: int) -> tuple[np.int64, int]:
    """The exponent whose "e" is at `begin`, and where it ends, or -1 if there is none; none if there is no "e"."""
    at = begin
    if at == end or (text[at] | _LOWER) != _E:
        return np.int64(0), at
    at += 1
    is_negative = at < end and text[at] == _MINUS
    if at < end and (text[at] == _MINUS or text[at] == _PLUS):
        at += 1
    if at >= end or not _is_digit(text[at]):
        return np.int64(0), -1
    exponent = np.int64(0)
    while at < end and _is_digit(text[at]):
        if exponent < _MAX_EXPONENT:
            exponent = exponent * 10 + np.int64(text[at]) - _ZERO
        at += 1
    return -exponent if is_negative else exponent, at


@inlined
def _float_end(text: NDArray[np.uint8], begin: int, end: int, values: NDArray[np.float32], index: int) -> int:
    """Writes the number that begins at `begin` to `values[index]`; where it ends, or -1 if there is none."""
    at, sign = begin, 1.0
    if text[at] == _MINUS or text[at] == _PLUS:
        sign = -1.0 if text[at] == _MINUS else 1.0
        at += 1
    if at < end and text[at] > _NINE:
        return _word_end(text, at, end, sign, values, index)
    mantissa, scale, has_digit, behind_point = np.uint64(0), np.int64(0), False, False
    while at < end and (_is_digit(text[at]) or (text[at] == _POINT and not behind_point)):
        if text[at] == _POINT:
            behind_point = True
        else:
            has_digit = True
            has_room = mantissa < _MAX_MANTISSA
            if has_room:
                mantissa = mantissa * _TEN + np.uint64(text[at] - _ZERO)
            scale += np.int64(not has_room) - np.int64(behind_point)
        at += 1
    exponent, number_end = _exponent(text, at, end)
    if not has_digit or number_end < 0:
        return -1
    values[index] = np.float32(sign * _scaled(mantissa, exponent + scale))
    return number_end


@inlined
def _id_end(text: NDArray[np.uint8], begin: int, end: int, ids: NDArray[np.int64], index: int) -> int:
    """As `_float_end`, of an unsigned number of 64 bits; those from 2^63 on are the negative ids."""
    at, value = begin, np.uint64(0)
    while at < end and _is_digit(text[at]):
        digit = np.uint64(text[at] - _ZERO)
        if value > _MAX_ID_TENTH or (value == _MAX_ID_TENTH and digit > _MAX_ID_DIGIT):
            return -1
        value = value * _TEN + digit
        at += 1
    if at == begin:
        return -1
    ids[index] = np.int64(value)
    return at


@kernel(UINT8S, INT64, BOOL, INT64, INT64S, FLOAT32S, INT64S, INT64S)
def parse_lines(
    text: NDArray[np.uint8],
    end: int,
    has_id: bool,
    width: int,
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    num_values: NDArray[np.int64],
    found: NDArray[np.int64],
) -> None:
    """Parses whole lines of numbers with one space between them, as many as there is room for in `num_values`.

    Args:
        text: Lines; what follows the last line end is left.
        end: Bytes of it to look at.
        has_id: Whether a line begins with an id: digits, below 2^64.
        width: The most other numbers that a line may have.
        ids: `(n,)`, the id of each line; not used without.
        values: `(n * width,)`; a line's begin at `line * width`, and those that it has not are left as they are.
        num_values: `(n,)`, how many it has.
        found: `(3,)`: lines that were parsed; where the next one begins, or the fault is; the fault, 0 for none.
    """
    at, line = 0, 0
    found[2] = NO_FAULT
    while line < num_values.shape[0]:
        line_end = at
        while line_end < end and text[line_end] != _LINE_END:
            line_end += 1
        if line_end == end:
            break
        position, index = at, 0
        if position == line_end:
            found[2] = EMPTY_LINE
        elif has_id:
            position = _id_end(text, at, line_end, ids, line)
            if position < 0 or (position < line_end and text[position] != _SPACE):
                found[2] = NOT_AN_ID
                position = at
            else:
                position += 1
        while found[2] == NO_FAULT and position < line_end:
            if index == width:
                found[2] = TOO_MANY_FIELDS
                break
            next_position = _float_end(text, position, line_end, values, line * width + index)
            if next_position < 0 or (next_position < line_end and text[next_position] != _SPACE):
                found[2] = NOT_A_NUMBER
                break
            position = next_position + 1
            index += 1
        if found[2] != NO_FAULT:
            at = position
            break
        num_values[line] = index
        line += 1
        at = line_end + 1
    found[0], found[1] = line, at
