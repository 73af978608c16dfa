"""Placement: the shard that owns each bucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .ids import NUM_BUCKETS, bucket_of

EVEN = 1
"""Version of the placement that gives all shards rows and dense values. The number of shards with rows, if others have
the dense values, is in the upper 16 bits of a version."""
_KIND_BITS = 16
_KIND_MASK = (1 << _KIND_BITS) - 1


def version_of(num_shards: int, num_row_shards: int = 0) -> int:
    """Returns the version of a placement.

    Args:
        num_shards: Number of shards.
        num_row_shards: Number of shards, from the first on, that have rows; all others have the dense values. 0 if all
            have both.

    Raises:
        ValueError: There are not as many shards.
    """
    if not 0 <= num_row_shards <= num_shards:
        raise ValueError(f"number of shards with rows is {num_row_shards}, should be 1 to {num_shards}, or 0")
    return EVEN if num_row_shards in (0, num_shards) else EVEN | num_row_shards << _KIND_BITS


def is_known(version: int) -> bool:
    """Returns whether it is a version of `Placement.even`."""
    return version & _KIND_MASK == EVEN


def num_row_shards_of(version: int) -> int:
    """Returns the number of shards with rows if others have the dense values, else 0."""
    return version >> _KIND_BITS


@dataclass(frozen=True, eq=False)
class Placement:
    """The shard of every bucket, the same for all tables of a job.

    Attributes:
        version: Number of the placement. Both sides of a request compare it.
        num_shards: Number of shards, 1 to `NUM_BUCKETS`.
        shard_of_bucket: `(NUM_BUCKETS,)`, each in `[0, num_shards)`; a read-only copy of the argument.

    Raises:
        ValueError: The array has another shape, or a shard is out of range.
    """

    version: int
    num_shards: int
    shard_of_bucket: NDArray[np.int32]

    def __post_init__(self) -> None:
        shards = np.array(self.shard_of_bucket, np.int32)
        if shards.shape != (NUM_BUCKETS,):
            raise ValueError(f"placement {self.version}: shape is {shards.shape}, should be ({NUM_BUCKETS},)")
        if not 1 <= self.num_shards <= NUM_BUCKETS:
            raise ValueError(f"placement {self.version}: num_shards is {self.num_shards}, should be 1 to {NUM_BUCKETS}")
        if shards.min() < 0 or shards.max() >= self.num_shards:
            raise ValueError(
                f"placement {self.version}: shards are {shards.min()} to {shards.max()}, "
                f"should be 0 to {self.num_shards - 1}"
            )
        shards.flags.writeable = False
        object.__setattr__(self, "shard_of_bucket", shards)

    @classmethod
    def even(cls, num_shards: int, version: int = EVEN) -> Placement:
        """Returns contiguous ranges of buckets whose sizes differ by at most one, on the shards with rows."""
        buckets = np.arange(NUM_BUCKETS, dtype=np.int64)
        num_row_shards = num_row_shards_of(version) or num_shards
        return cls(version, num_shards, (buckets * num_row_shards // NUM_BUCKETS).astype(np.int32))

    def shard_of(self, ids: NDArray[np.int64], salt: int) -> NDArray[np.int32]:
        """Returns the shard that owns each id of the table with this salt, in the shape of `ids`."""
        return self.shard_of_bucket[bucket_of(ids, salt)]
