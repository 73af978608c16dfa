"""Lines of a sketch: how many a bucket has, and the ids under which a store holds them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ids import BUCKET_BITS, GOLDEN_GAMMA, NUM_BUCKETS
from ..kernels_cow_view import unhash
from ..kernels_sketch import IDS_PER_LINE

_SHIFT = np.uint64(64 - BUCKET_BITS)


def lines_per_bucket(num_ids: int) -> int:
    """Returns the number of lines of each bucket of a sketch that is made for this many ids."""
    return max(-(-num_ids // (IDS_PER_LINE * NUM_BUCKETS)), 1)


def ids_of_lines(buckets: NDArray[np.int64], num_lines: int, salt: int) -> NDArray[np.int64]:
    """Returns the id of each line of buckets `(n,)`, bucket by bucket, `(n * num_lines,)`.

    The hash of each is in its bucket, and the lower bits of the hashes spread over the index of a store.

    Args:
        buckets: Numbers of the buckets.
        num_lines: Lines of a bucket.
        salt: Salt of the table.
    """
    numbers = np.arange(num_lines, dtype=np.uint64) << np.uint64(BUCKET_BITS)
    of_bucket = buckets.astype(np.uint64)[:, None]
    below = ((numbers | of_bucket) * GOLDEN_GAMMA) & ((np.uint64(1) << _SHIFT) - np.uint64(1))
    ids = ((of_bucket << _SHIFT) | below).view(np.int64).reshape(-1)
    unhash(ids, np.uint64(salt))
    return ids
