"""The exchange of lines between the workers of a job, through the pservers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .lines import Lines, joined, no_lines, taken

Exchange = Callable[[Sequence[bytes]], list[bytes]]
"""Sends a part to each worker; returns those of all workers for this one, by index. All workers call it."""

MAX_WORKER_BYTES = 16 << 20
"""Largest number of bytes that a worker sends in one round."""
MAX_ROUND_BYTES = 256 << 20
"""Largest number of bytes that all workers send in one round, which the pserver holds."""
_LINE_BYTES = 16
"""Bytes of a line's two starts."""


def redistributed(
    lines: Lines,
    targets: NDArray[np.int64],
    worker_index: int,
    num_workers: int,
    exchange: Exchange,
    max_part_bytes: int | None = None,
) -> Lines:
    """Sends every line to its worker, and returns the lines that this one has then, those of worker 0 first.

    It needs memory for both. Where a line is from is forgotten.

    Args:
        lines: Lines of this worker.
        targets: `(num_lines,)`: the worker of each line.
        worker_index: Index of this worker.
        num_workers: Number of workers.
        exchange: Sends parts.
        max_part_bytes: Bytes of a part, which a longer line may exceed; the same on all workers.
    """
    if max_part_bytes is None:
        max_part_bytes = min(MAX_WORKER_BYTES, MAX_ROUND_BYTES // num_workers) // num_workers
    chunks = [
        [] if worker == worker_index else list(_chunks(lines, np.flatnonzero(targets == worker), max_part_bytes))
        for worker in range(num_workers)
    ]
    num_rounds = max(map(len, chunks))
    announced = exchange([num_rounds.to_bytes(8, "little")] * num_workers)
    received: list[list[Lines]] = [[] for _ in range(num_workers)]
    received[worker_index].append(taken(lines, np.flatnonzero(targets == worker_index)))
    for number in range(max(int.from_bytes(each, "little") for each in announced)):
        parts = [_encoded(taken(lines, of[number])) if number < len(of) else b"" for of in chunks]
        for worker, part in enumerate(exchange(parts)):
            if part:
                received[worker].append(_decoded(part, lines.num_slots))
    exchange([b""] * num_workers)  # the pserver drops the last round
    whole = [part for of_worker in received for part in of_worker if part.num_lines]
    return joined(whole)._replace(origins=()) if whole else no_lines(lines.num_slots)


def _chunks(lines: Lines, which: NDArray[np.int64], max_bytes: int) -> Iterator[NDArray[np.int64]]:
    """Splits lines into parts of at most `max_bytes`, but at least one line."""
    num_bytes = (
        lines.counts.itemsize * lines.num_slots
        + lines.ids.itemsize * (lines.id_starts[which + 1] - lines.id_starts[which])
        + lines.floats.itemsize * (lines.float_starts[which + 1] - lines.float_starts[which])
        + _LINE_BYTES
    )
    ends = np.cumsum(num_bytes)
    begin = 0
    while begin < len(which):
        limit = max_bytes + (ends[begin - 1] if begin else 0)
        end = max(begin + 1, int(np.searchsorted(ends, limit, "right")))
        yield which[begin:end]
        begin = end


def _encoded(lines: Lines) -> bytes:
    arrays = (lines.id_starts, lines.float_starts, lines.ids, lines.floats, lines.counts)
    return b"".join([lines.num_lines.to_bytes(8, "little"), *(array.tobytes() for array in arrays)])


def _decoded(part: bytes, num_slots: int) -> Lines:
    num_lines, offset = int.from_bytes(part[:8], "little"), 8

    def read(dtype: Any, count: int) -> NDArray[Any]:
        nonlocal offset
        array: NDArray[Any] = np.frombuffer(part, dtype, count, offset)
        offset += array.nbytes
        return array

    id_starts = read(np.int64, num_lines + 1)
    float_starts = read(np.int64, num_lines + 1)
    ids, floats = read(np.int64, int(id_starts[-1])), read(np.float32, int(float_starts[-1]))
    return Lines(num_slots, read(np.int32, num_lines * num_slots), id_starts, ids, float_starts, floats)
