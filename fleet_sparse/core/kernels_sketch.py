"""Kernels of a sketch: counters that ids share, in lines of 64 bytes. Each id has four counters of one line.

The total of an id is the smallest of its counters: never too small, and too large only if other ids hit all four. A
counter stays at 255 once it is there. The lines of a bucket belong to the shard that owns it, and the number of lines
of a bucket is the same for any number of shards, so that totals do not depend on it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .ids import BUCKET_BITS
from .intrinsics import prefetch_write
from .jit import FLOAT32_IN, FLOAT32S, INT64, INT64_IN, INT64S, UINT8S, inlined, kernel
from .kernels_hash import splitmix64

LINE_BYTES = 64
IDS_PER_LINE = 8
"""Number of ids without a row for which a sketch has a line. Then about 2 % of totals are too large."""

_BUCKET_SHIFT, _LOW = np.uint64(64 - BUCKET_BITS), np.uint64(0xFFFF_FFFF)
_LINE_SHIFT, _LINE, _IN_LINE = np.uint64(32), np.uint64(LINE_BYTES), np.uint64(LINE_BYTES - 1)
_PROBE_BITS, _NUM_PROBES, _AHEAD = np.uint64(6), np.uint64(4), np.uint64(16)
_FULL, _HALF, _LARGEST = np.float32(255), np.float32(0.5), np.uint8(255)


@inlined
def _line_of(h: np.uint64, first_lines: NDArray[np.int64], lines_per_bucket: np.uint64) -> np.uint64:
    within = ((h & _LOW) * lines_per_bucket) >> _LINE_SHIFT
    return np.uint64(first_lines[h >> _BUCKET_SHIFT]) + within


@kernel(INT64_IN, INT64_IN, INT64, INT64S)
def find_lines(
    hashes: NDArray[np.int64],
    first_lines: NDArray[np.int64],
    lines_per_bucket: int,
    lines: NDArray[np.int64],
) -> None:
    """Writes the line of each id.

    Args:
        hashes: Hashes of ids of this shard, `(n,)`.
        first_lines: First line of each bucket, `(NUM_BUCKETS,)`.
        lines_per_bucket: Number of lines of a bucket, below 2^32.
        lines: Output, `(n,)`.
    """
    per_bucket = np.uint64(lines_per_bucket)
    for i in range(np.uint64(hashes.shape[0])):
        lines[i] = _line_of(np.uint64(hashes[i]), first_lines, per_bucket)


@inlined
def _smallest(counters: NDArray[np.uint8], begin: np.uint64, probes: np.uint64) -> np.uint8:
    """Returns the smallest of the counters of an id, whose line begins at `begin`."""
    smallest = np.uint8(255)
    for k in range(_NUM_PROBES):
        smallest = min(smallest, counters[begin + ((probes >> (k * _PROBE_BITS)) & _IN_LINE)])
    return smallest


@inlined
def count_one(counters: NDArray[np.uint8], begin: np.uint64, h: np.uint64) -> np.uint8:
    """Adds 1 to the total of the id with this hash, whose line begins at `begin`, and returns the new total."""
    probes = splitmix64(h)
    smallest = _smallest(counters, begin, probes)
    total = smallest + np.uint8(smallest < _LARGEST)
    for k in range(_NUM_PROBES):
        at = begin + ((probes >> (k * _PROBE_BITS)) & _IN_LINE)
        counters[at] = max(counters[at], total)
    return np.uint8(total)


@kernel(UINT8S, INT64_IN, INT64_IN, FLOAT32S)
def read_totals(
    counters: NDArray[np.uint8],
    hashes: NDArray[np.int64],
    lines: NDArray[np.int64],
    totals: NDArray[np.float32],
) -> None:
    """Writes the total of each id, `(n,)`; `lines` as `find_lines` wrote them."""
    n = np.uint64(hashes.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(counters, np.uint64(lines[i + _AHEAD]) * _LINE)
        begin, probes = np.uint64(lines[i]) * _LINE, splitmix64(np.uint64(hashes[i]))
        totals[i] = _smallest(counters, begin, probes)


@kernel(UINT8S, INT64_IN, INT64_IN, FLOAT32_IN)
def add_counts(
    counters: NDArray[np.uint8],
    hashes: NDArray[np.int64],
    lines: NDArray[np.int64],
    counts: NDArray[np.float32],
) -> None:
    """Adds to the total of each id, `(n,)`. A counter that is above the new total stays as it is."""
    n = np.uint64(hashes.shape[0])
    for i in range(n):
        if i + _AHEAD < n:
            prefetch_write(counters, np.uint64(lines[i + _AHEAD]) * _LINE)
        begin, probes = np.uint64(lines[i]) * _LINE, splitmix64(np.uint64(hashes[i]))
        smallest = _smallest(counters, begin, probes)
        total = np.uint8(min(np.float32(smallest) + counts[i] + _HALF, _FULL))
        for k in range(_NUM_PROBES):
            at = begin + ((probes >> (k * _PROBE_BITS)) & _IN_LINE)
            counters[at] = max(counters[at], total)
