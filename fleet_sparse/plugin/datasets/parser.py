"""LineParser: text of a data set to lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_lines import Fault, parse_lines
from fleet_sparse.errors import DatasetError

from .lines import Lines, Origin
from .slots import Slot, multiples_of

_MAX_SHOWN = 40


class LineParser:
    """Parses text whose lines have, for each slot, a count and as many values. For one thread at a time.

    Args:
        slots: Slots of a line, in the order of the text.
        num_names: Number of words at the beginning of each line, each as `1 word`, that are left out.
        after: What wrote the text from the file, for messages: ", after pipe_command ..."; or empty.
    """

    def __init__(self, slots: Sequence[Slot], num_names: int = 0, after: str = "") -> None:
        self._slots = slots
        self._num_names = num_names
        self._after = after
        self._is_float = np.array([slot.is_float for slot in slots], np.uint8)
        self._multiples = multiples_of(slots)
        self._failure = np.zeros(4, np.int64)
        self._capacity = 0  # bytes of text that the scratch arrays can hold
        self._reserve(1 << 16)

    def parse(self, text: NDArray[np.uint8], path: str, first_number: int) -> Iterator[Lines]:
        """Yields the lines of a text that ends with a newline, without use of its memory: all, or those before a fault.

        Args:
            text: Whole lines.
            path: The file, for messages.
            first_number: Number of the first line.

        Raises:
            DatasetError: A line is malformed. The lines before it were yielded.
        """
        self._reserve(len(text))
        num_lines = parse_lines(
            text,
            len(text),
            self._num_names,
            self._is_float,
            self._multiples,
            self._counts,
            self._id_starts,
            self._ids,
            self._float_starts,
            self._floats,
            self._failure,
        )
        error = self._error(text, path, first_number + num_lines) if self._failure[0] else None
        if num_lines:
            yield self._parsed(num_lines, Origin(0, path, first_number))
        if error is not None:
            raise error

    def _parsed(self, num_lines: int, origin: Origin) -> Lines:
        id_starts, float_starts = self._id_starts[: num_lines + 1], self._float_starts[: num_lines + 1]
        return Lines(
            len(self._slots),
            self._counts[: num_lines * len(self._slots)].copy(),
            id_starts.copy(),
            self._ids[: id_starts[-1]].copy(),
            float_starts.copy(),
            self._floats[: float_starts[-1]].copy(),
            (origin,),
        )

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes <= self._capacity:
            return
        self._capacity = num_bytes
        # A count or value takes at least a digit and what separates it from the next one.
        num_words = num_bytes // 2 + 1
        num_lines = num_words // len(self._slots) + 1
        self._counts = np.empty(num_words + len(self._slots), np.int32)
        self._id_starts = np.empty(num_lines + 1, np.int64)
        self._ids = np.empty(num_words, np.int64)
        self._float_starts = np.empty(num_lines + 1, np.int64)
        self._floats = np.empty(num_words, np.float32)

    def _error(self, text: NDArray[np.uint8], path: str, number: int) -> DatasetError:
        code, slot_index, position, value = self._failure.tolist()
        slot = self._slots[slot_index]
        raw = text[position : position + 4 * _MAX_SHOWN].tobytes().split(b"\n")[0]
        words = raw.decode("utf-8", "replace").split()
        shown = repr(words[0][:_MAX_SHOWN]) if words else "the end of the line"
        kind = "a float32" if slot.is_float else "an integer of 64 bits"
        last = len(self._slots) - 1
        is_what = {
            Fault.NO_COUNT: f"is {shown}, should be the number of its values",
            Fault.MULTIPLE: f"has {value} values, should have {self._should_have(slot)}, as its shape says",
            Fault.NO_VALUE: f"has {value} values, and the line ends there; its count says more",
            Fault.NOT_A_NUMBER: f"value {value + 1} is {shown}, should be {kind}",
            Fault.RANGE: f"value {value + 1} is {shown}, which is out of range; it should be {kind}",
            Fault.TOO_LONG: f"the line continues with {shown} after this slot, which is the last of {last + 1}",
            Fault.NO_NAME: f"the line begins with {shown}, should begin with {self._num_names} times '1 word'",
        }[Fault(code)]
        return DatasetError(
            f"{path!r}, line {number}{self._after}, slot {slot.name!r}: {is_what}. Correct the file or its "
            "pipe_command, or make use_var the slots of the text, in the same order",
            path=path,
            line_number=number,
            slot=slot.name,
        )

    def _should_have(self, slot: Slot) -> str:
        return f"a multiple of {slot.multiple}" if slot.is_padded else str(slot.multiple)
