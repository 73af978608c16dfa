"""Placement: the shard that owns each bucket."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .ids import NUM_BUCKETS, bucket_of


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
    def even(cls, num_shards: int, version: int = 1) -> Placement:
        """Returns contiguous ranges of buckets whose sizes differ by at most one."""
        buckets = np.arange(NUM_BUCKETS, dtype=np.int64)
        return cls(version, num_shards, (buckets * num_shards // NUM_BUCKETS).astype(np.int32))

    def shard_of(self, ids: NDArray[np.int64], salt: int) -> NDArray[np.int32]:
        """Returns the shard that owns each id of the table with this salt, in the shape of `ids`."""
        return self.shard_of_bucket[bucket_of(ids, salt)]
