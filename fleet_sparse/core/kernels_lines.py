"""Kernels on the text and the lines of data sets.

A line of text is, for each slot, a count and as many values: `1 7 2 0.5 1e-3`. Parsed lines lie in flat arrays, line
after line: `counts[line * num_slots + slot]`, and the values of all integer slots in `ids`, of all float slots in
`floats`, those of a line beginning at `id_starts[line]` and `float_starts[line]`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import (
    FLOAT32_IN,
    FLOAT32S,
    INT32_IN,
    INT32S,
    INT64,
    INT64_IN,
    INT64S,
    UINT8_IN,
    inlined,
    kernel,
)


class Fault(IntEnum):
    """Faults of a line. `failure` of `parse_lines` names the slot, the place and the value."""

    NO_COUNT = 1  # there is no count of values, or it is not a number
    MULTIPLE = 2  # the count is no multiple of the number of values that the slot's shape demands
    NO_VALUE = 3  # the line ends before the last value
    NOT_A_NUMBER = 4  # a value is not an integer, or not a number
    RANGE = 5  # a value is outside of 64 bits, or of float32
    TOO_LONG = 6  # there is more text after the last slot
    NO_NAME = 7  # the text at the beginning of the line is not one word


_NO_COUNT, _MULTIPLE, _NO_VALUE, _NOT_A_NUMBER = (
    int(Fault.NO_COUNT),
    int(Fault.MULTIPLE),
    int(Fault.NO_VALUE),
    int(Fault.NOT_A_NUMBER),
)
_RANGE, _TOO_LONG, _NO_NAME = int(Fault.RANGE), int(Fault.TOO_LONG), int(Fault.NO_NAME)
_SPACE, _NEWLINE, _ZERO, _ONE, _NINE, _PLUS, _MINUS, _DOT = (ord(character) for character in " \n019+-.")
_SMALL_E, _TO_SMALL = ord("e"), ord("e") ^ ord("E")
_TEN, _ZERO_64 = np.uint64(10), np.uint64(_ZERO)
_LAST_TENTH, _LAST_DIGIT = np.uint64((2**64 - 1) // 10), np.uint64(5)
_SMALLEST = np.uint64(2**63)
_POWERS = np.array([10.0**power for power in range(23)])
_EXACT_POWER = 22
_MAX_EXPONENT = 100_000  # past it every float32 is 0 or infinite, however many digits there are
_ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103  # as a float32
_MAX_COUNT_DIGITS = 9


@inlined
def _past_spaces(text: Any, position: Any) -> Any:
    while text[position] <= _SPACE and text[position] != _NEWLINE:
        position += 1
    return position


@inlined
def _is_digit(byte: Any) -> Any:
    return _ZERO <= byte <= _NINE


@inlined
def _past_names(text: Any, position: Any, num_names: Any) -> Any:
    """The position after the words at the beginning of a line, and a fault or 0."""
    fault = 0
    for _ in range(num_names):
        position = _past_spaces(text, position)
        if text[position] != _ONE or text[position + 1] != _SPACE:
            fault = _NO_NAME
            break
        position = _past_spaces(text, position + 1)
        if text[position] == _NEWLINE:
            fault = _NO_NAME
            break
        while text[position] > _SPACE:
            position += 1
    return position, fault


@inlined
def _count(text: Any, position: Any) -> Any:
    """A count of values, the position after it, and a fault or 0."""
    begin, count = position, 0
    while _is_digit(text[position]) and position - begin < _MAX_COUNT_DIGITS:
        count = count * 10 + int(text[position]) - _ZERO
        position += 1
    return count, position, _NO_COUNT if position == begin or text[position] > _SPACE else 0


@inlined
def _integer(text: Any, position: Any) -> Any:
    """An integer, the position after it, and a fault or 0."""
    negative, fault = text[position] == _MINUS, 0
    if negative or text[position] == _PLUS:
        position += 1
    begin, value = position, np.uint64(0)
    while _is_digit(text[position]):
        digit = np.uint64(text[position]) - _ZERO_64
        if value > _LAST_TENTH or (value == _LAST_TENTH and digit > _LAST_DIGIT):
            fault = _RANGE
        value = value * _TEN + digit
        position += 1
    if negative and value > _SMALLEST:
        fault = _RANGE
    if position == begin or text[position] > _SPACE:
        fault = _NOT_A_NUMBER
    return -np.int64(value) if negative else np.int64(value), position, fault


@inlined
def _exponent(text: Any, position: Any) -> Any:
    """The exponent that follows a mantissa or 0, the position after it, and a fault or 0."""
    if text[position] | _TO_SMALL != _SMALL_E:
        return 0, position, 0
    position += 1
    negative = text[position] == _MINUS
    if negative or text[position] == _PLUS:
        position += 1
    begin, exponent = position, 0
    while _is_digit(text[position]):
        exponent = min(exponent * 10 + int(text[position]) - _ZERO, _MAX_EXPONENT)
        position += 1
    return -exponent if negative else exponent, position, _NOT_A_NUMBER if position == begin else 0


@inlined
def _scaled(value: Any, exponent: Any) -> Any:
    """value * 10^exponent."""
    if value == 0.0:
        return value
    while exponent > 0 and value < _ROUNDS_TO_INFINITY:
        step = min(exponent, _EXACT_POWER)
        value *= _POWERS[step]
        exponent -= step
    while exponent < 0 and value > 0.0:
        step = min(-exponent, _EXACT_POWER)
        value /= _POWERS[step]
        exponent += step
    return value


@inlined
def _float(text: Any, position: Any) -> Any:
    """A float64, the position after it, and a fault or 0."""
    negative = text[position] == _MINUS
    if negative or text[position] == _PLUS:
        position += 1
    begin, value, num_dropped = position, np.uint64(0), 0
    while _is_digit(text[position]):
        if value < _LAST_TENTH:
            value = value * _TEN + np.uint64(text[position]) - _ZERO_64
        else:
            num_dropped += 1
        position += 1
    num_digits, num_decimals = position - begin, 0
    if text[position] == _DOT:
        position += 1
        begin = position
        while _is_digit(text[position]):
            if value < _LAST_TENTH:
                value = value * _TEN + np.uint64(text[position]) - _ZERO_64
                num_decimals += 1
            position += 1
        num_digits += position - begin
    exponent, position, fault = _exponent(text, position)
    result = _scaled(np.float64(value), exponent + num_dropped - num_decimals)
    if result >= _ROUNDS_TO_INFINITY:
        fault = _RANGE
    if num_digits == 0 or text[position] > _SPACE:
        fault = _NOT_A_NUMBER
    return -result if negative else result, position, fault


@kernel(
    *(UINT8_IN, INT64, INT64, UINT8_IN, INT64_IN, INT32S, INT64S, INT64S, INT64S, FLOAT32S, INT64S),
    result=INT64,
)
def parse_lines(
    text: NDArray[np.uint8],
    end: int,
    num_names: int,
    is_float: NDArray[np.uint8],
    multiples: NDArray[np.int64],
    counts: NDArray[np.int32],
    id_starts: NDArray[np.int64],
    ids: NDArray[np.int64],
    float_starts: NDArray[np.int64],
    floats: NDArray[np.float32],
    failure: NDArray[np.int64],
) -> int:
    """Parses whole lines, up to the first one that is wrong.

    Args:
        text: The last byte before `end` is a newline.
        end: Number of bytes to parse.
        num_names: Number of words at the beginning of each line, each as `1 word`, that are left out.
        is_float: `(num_slots,)`, 1 for float slots and 0 for integer slots.
        multiples: `(num_slots,)`: the counts of a slot must be multiples of it.
        counts: Output, at least `(num_lines * num_slots,)`.
        id_starts: Output, at least `(num_lines + 1,)`.
        ids: Output, at least half the bytes of the text.
        float_starts: Output, at least `(num_lines + 1,)`.
        floats: Output, at least half the bytes of the text.
        failure: Output, `(4,)`: the `Fault` or 0, its slot, its position in the text, the index of the value or, if the
            count is wrong, the count.

    Returns:
        The number of lines before the end, or before the wrong one.
    """
    num_slots = is_float.shape[0]
    position, line, num_ids, num_floats, fault, slot, begin, value = 0, 0, 0, 0, 0, 0, 0, 0
    while position < end:
        id_starts[line], float_starts[line] = num_ids, num_floats
        position, fault = _past_names(text, position, num_names)
        slot, value = 0, 0
        while fault == 0 and slot < num_slots:
            begin, value = _past_spaces(text, position), 0
            count, position, fault = _count(text, begin)
            if fault == 0 and count % multiples[slot] != 0:
                fault, value = _MULTIPLE, count
            counts[line * num_slots + slot] = count
            while fault == 0 and value < count:
                begin = _past_spaces(text, position)
                if text[begin] == _NEWLINE:
                    fault = _NO_VALUE
                elif is_float[slot] == 0:
                    ids[num_ids], position, fault = _integer(text, begin)
                    num_ids += 1
                else:
                    floats[num_floats], position, fault = _float(text, begin)
                    num_floats += 1
                value += 1
            slot += 1
        position = _past_spaces(text, position)
        if fault == 0 and text[position] != _NEWLINE:
            fault, begin = _TOO_LONG, position
        if fault != 0:
            break
        position += 1
        line += 1
    if fault == 0:  # else they are those of the wrong line, of which no value counts
        id_starts[line], float_starts[line] = num_ids, num_floats
    failure[0], failure[1], failure[2] = fault, max(slot - 1, 0), position if fault == _NO_NAME else begin
    failure[3] = value if fault == _MULTIPLE else max(value - 1, 0)
    return line


@kernel(INT32_IN, INT64_IN, INT64S, INT64S, INT64S, INT64S)
def measure_counts(
    counts: NDArray[np.int32],
    lines: NDArray[np.int64],
    smallest: NDArray[np.int64],
    largest: NDArray[np.int64],
    totals: NDArray[np.int64],
    lengths: NDArray[np.int64],
) -> None:
    """Measures the counts of some lines, at least one.

    Args:
        counts: Counts of all lines.
        lines: `(n,)`, indices of the lines.
        smallest: Output, `(num_slots,)`: smallest count of each slot.
        largest: Output, `(num_slots,)`: largest count of each slot.
        totals: Output, `(num_slots,)`: sum of the counts of each slot.
        lengths: Output, `(num_slots * n,)`: the counts, slot after slot.
    """
    num_slots, num_lines = smallest.shape[0], lines.shape[0]
    for slot in range(num_slots):
        smallest[slot] = counts[lines[0] * num_slots + slot]
        largest[slot] = smallest[slot]
        totals[slot] = 0
    for i in range(num_lines):
        for slot in range(num_slots):
            count = np.int64(counts[lines[i] * num_slots + slot])
            smallest[slot] = min(smallest[slot], count)
            largest[slot] = max(largest[slot], count)
            totals[slot] += count
            lengths[slot * num_lines + i] = count


@inlined
def _fill(
    counts: Any,
    lines: Any,
    starts: Any,
    values: Any,
    is_filled: Any,
    widths: Any,
    next_of_slot: Any,
    output: Any,
) -> None:
    num_slots = is_filled.shape[0]
    for i in range(lines.shape[0]):
        line = lines[i]
        source = starts[line]
        for slot in range(num_slots):
            if is_filled[slot] == 0:
                continue
            count = np.int64(counts[line * num_slots + slot])
            target = next_of_slot[slot]
            for j in range(count):
                output[target + j] = values[source + j]
            for j in range(count, widths[slot]):
                output[target + j] = 0
            source += count
            next_of_slot[slot] = target + max(count, widths[slot])


_SHARED = (INT32_IN, INT64_IN, INT64_IN)


@kernel(*_SHARED, INT64_IN, UINT8_IN, INT64_IN, INT64S, INT64S)
def fill_ids(
    counts: NDArray[np.int32],
    lines: NDArray[np.int64],
    starts: NDArray[np.int64],
    values: NDArray[np.int64],
    is_filled: NDArray[np.uint8],
    widths: NDArray[np.int64],
    next_of_slot: NDArray[np.int64],
    output: NDArray[np.int64],
) -> None:
    """Copies the integers of some lines, slot after slot, and pads each line with zeros.

    Args:
        counts: Counts of all lines.
        lines: `(n,)`, indices of the lines.
        starts: Index of the first value of each line in `values`.
        values: Values of all lines.
        is_filled: `(num_slots,)`, 1 for the slots that `values` has.
        widths: `(num_slots,)`: values of each line in the output; 0 pads nothing.
        next_of_slot: `(num_slots,)`: index in `output` of each slot's first value; changed.
        output: The output.
    """
    _fill(counts, lines, starts, values, is_filled, widths, next_of_slot, output)


@kernel(*_SHARED, FLOAT32_IN, UINT8_IN, INT64_IN, INT64S, FLOAT32S)
def fill_floats(
    counts: NDArray[np.int32],
    lines: NDArray[np.int64],
    starts: NDArray[np.int64],
    values: NDArray[np.float32],
    is_filled: NDArray[np.uint8],
    widths: NDArray[np.int64],
    next_of_slot: NDArray[np.int64],
    output: NDArray[np.float32],
) -> None:
    """Copies the floats of some lines, as `fill_ids` does with integers."""
    _fill(counts, lines, starts, values, is_filled, widths, next_of_slot, output)
