"""Kernels of the cache of rows of a predictor: sets of `WAYS` rows, in which the one used least recently makes room.

The set of an id is chosen by its hash. `stamps` has the time of the last use of each place, 0 for an empty one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .jit import FLOAT32_IN, FLOAT32S, INT64, INT64_IN, INT64S, UINT64, inlined, kernel
from .kernels_hash import splitmix64

WAYS = 8

_WAYS, _ONE, _HALF = np.uint64(WAYS), np.uint64(1), np.uint64(32)


@inlined
def _set_of(id_: np.int64, salt: np.uint64, num_sets: np.uint64) -> np.uint64:
    # The lower half of the hash: its upper bits decide the shard.
    return (((splitmix64(np.uint64(id_) ^ salt) << _HALF) >> _HALF) * num_sets) >> _HALF


@kernel(INT64_IN, UINT64, INT64, INT64S, INT64S, FLOAT32S, INT64, FLOAT32S, INT64S, result=INT64)
def look_up_rows(
    ids: NDArray[np.int64],
    salt: np.uint64,
    now: int,
    held: NDArray[np.int64],
    stamps: NDArray[np.int64],
    rows: NDArray[np.float32],
    dim: int,
    out: NDArray[np.float32],
    missing: NDArray[np.int64],
) -> int:
    """Copies the rows that are held, and lists the indices of the other ids.

    Args:
        ids: `(n,)`.
        salt: The table's.
        now: Time of this use, above 0.
        held: `(num_sets * WAYS,)`, id of each place.
        stamps: `(num_sets * WAYS,)`.
        rows: `(num_sets * WAYS * dim,)`.
        dim: Floats of a row.
        out: `(n * dim,)`; the rows of missing ids are left as they are.
        missing: Output, at least `(n,)`: indices in `ids`, ascending.

    Returns:
        The number of missing ids.
    """
    n, d = np.uint64(ids.shape[0]), np.uint64(dim)
    num_sets = np.uint64(held.shape[0]) // _WAYS
    num_missing = np.uint64(0)
    for i in range(n):
        place = _set_of(ids[i], salt, num_sets) * _WAYS
        end = place + _WAYS
        while place < end and (stamps[place] == 0 or held[place] != ids[i]):
            place += _ONE
        if place == end:
            missing[num_missing] = np.int64(i)
            num_missing += _ONE
        else:
            stamps[place] = now
            out[i * d : (i + _ONE) * d] = rows[place * d : (place + _ONE) * d]
    return int(num_missing)


@kernel(INT64_IN, FLOAT32_IN, UINT64, INT64, INT64S, INT64S, FLOAT32S, INT64)
def insert_rows(
    ids: NDArray[np.int64],
    values: NDArray[np.float32],
    salt: np.uint64,
    now: int,
    held: NDArray[np.int64],
    stamps: NDArray[np.int64],
    rows: NDArray[np.float32],
    dim: int,
) -> None:
    """Holds rows, in place of those of the same ids or of those that were used least recently.

    Args:
        ids: `(n,)`.
        values: Their rows, `(n * dim,)`.
        salt: With the arguments that follow, as in `look_up_rows`.
    """
    n, d = np.uint64(ids.shape[0]), np.uint64(dim)
    num_sets = np.uint64(held.shape[0]) // _WAYS
    for i in range(n):
        begin = _set_of(ids[i], salt, num_sets) * _WAYS
        chosen = begin
        place = begin
        while place < begin + _WAYS:
            if stamps[place] != 0 and held[place] == ids[i]:
                chosen = place
                break
            if stamps[place] < stamps[chosen]:
                chosen = place
            place += _ONE
        held[chosen] = ids[i]
        stamps[chosen] = now
        rows[chosen * d : (chosen + _ONE) * d] = values[i * d : (i + _ONE) * d]


@kernel(INT64_IN, UINT64, INT64S, INT64S)
def drop_rows(ids: NDArray[np.int64], salt: np.uint64, held: NDArray[np.int64], stamps: NDArray[np.int64]) -> None:
    """Holds the rows of some ids no longer; ids that are not held are ignored."""
    num_sets = np.uint64(held.shape[0]) // _WAYS
    for i in range(np.uint64(ids.shape[0])):
        begin = _set_of(ids[i], salt, num_sets) * _WAYS
        for place in range(begin, begin + _WAYS):
            if held[place] == ids[i]:
                stamps[place] = 0
