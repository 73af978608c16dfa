"""FeedMaker: lines of a data set to the feed of one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.kernels_lines import fill_floats, fill_ids, measure_counts
from fleet_sparse.errors import DatasetError

from .lines import Lines
from .slots import Slot, lengths_name


class Feed(dict[str, NDArray[Any]]):
    """Arrays by name of input.

    Attributes:
        num_lines: Number of lines that they are from.
    """

    num_lines = 0


class FeedMaker:
    """Makes feeds: arrays by name of input, one row for each line.

    A slot whose shape is known has that shape. One with an unknown dimension is padded with zeros to the longest line
    of the batch. Where the program has an input `<slot>.lengths`, it is the number of values of each line, `(n,)`
    int64; a slot whose shape is known then has the values of all lines one after the other, as `(total, *shape)`. For
    one thread at a time.

    Args:
        slots: Slots of the lines.
        inputs: Names of the program's inputs; other slots are left out.
    """

    def __init__(self, slots: Sequence[Slot], inputs: Collection[str]) -> None:
        self._slots = slots
        self._is_fed = [slot.name in inputs for slot in slots]
        self._has_lengths = [lengths_name(slot.name) in inputs for slot in slots]
        self._is_float = np.array([slot.is_float for slot in slots], np.uint8)
        self._is_int = 1 - self._is_float
        self._smallest, self._largest, self._totals = (np.empty(len(slots), np.int64) for _ in range(3))

    def make(self, lines: Lines, which: NDArray[np.int64]) -> Feed:
        """Returns the feed of the lines with the indices `which`, at least one. Its arrays are its own.

        Raises:
            DatasetError: A line has not as many values as the shape of a slot says.
        """
        num_lines = len(which)
        lengths = np.empty((len(self._slots), num_lines), np.int64)
        measure_counts(lines.counts, which, self._smallest, self._largest, self._totals, lengths.reshape(-1))
        widths = np.zeros(len(self._slots), np.int64)
        sizes = self._totals.copy()
        for number, slot in enumerate(self._slots):
            if slot.is_padded:
                widths[number] = max(self._largest[number], slot.multiple)
                sizes[number] = num_lines * widths[number]
            elif (self._is_fed[number] and not self._has_lengths[number]) and (
                self._smallest[number] != slot.multiple or self._largest[number] != slot.multiple
            ):
                raise self._error(lines, which, lengths[number], slot)
        feed = Feed()
        feed.num_lines = num_lines
        for is_filled, fill, starts, values in (
            (self._is_int, fill_ids, lines.id_starts, lines.ids),
            (self._is_float, fill_floats, lines.float_starts, lines.floats),
        ):
            feed.update(self._filled(fill, lines, which, is_filled, starts, values, widths, sizes))
        for number, slot in enumerate(self._slots):
            if self._has_lengths[number]:
                feed[lengths_name(slot.name)] = lengths[number]
        return feed

    def _filled(
        self,
        fill: Callable[..., None],
        lines: Lines,
        which: NDArray[np.int64],
        is_filled: NDArray[np.uint8],
        starts: NDArray[np.int64],
        values: NDArray[Any],
        widths: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> dict[str, NDArray[Any]]:
        """The slots of one dtype."""
        ends = np.cumsum(sizes * is_filled)
        begins = ends - sizes * is_filled
        output = np.empty(ends[-1], values.dtype)
        fill(lines.counts, which, starts, values, is_filled, widths, begins.copy(), output)
        return {
            slot.name: output[begins[number] : ends[number]].reshape(self._shape(slot, widths[number], len(which)))
            for number, slot in enumerate(self._slots)
            if is_filled[number] and self._is_fed[number]
        }

    def _shape(self, slot: Slot, width: int, num_lines: int) -> tuple[int, ...]:
        if slot.is_padded:
            return (num_lines, *(width // slot.multiple if size == -1 else size for size in slot.shape))
        return (-1, *slot.shape)

    def _error(self, lines: Lines, which: NDArray[np.int64], lengths: NDArray[np.int64], slot: Slot) -> DatasetError:
        wrong = int(np.flatnonzero(lengths != slot.multiple)[0])
        path, number = lines.where(int(which[wrong]))
        where = f"{path!r}, line {number}, " if path else ""
        padded = [-1, *slot.shape[:-1], -1] if slot.shape else [-1, -1]
        return DatasetError(
            f"{where}slot {slot.name!r}: has {lengths[wrong]} values, should have {slot.multiple}, as the shape "
            f"{[-1, *slot.shape]} of the input says. Give the input shape {padded}, which pads short lines with zeros, "
            f"or add an input {lengths_name(slot.name)!r} of shape [-1] and int64 for the number of values of each "
            "line",
            path=path,
            line_number=number,
            slot=slot.name,
        )
