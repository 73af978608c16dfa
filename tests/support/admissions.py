"""Shards of a table with an entry policy, and pushes that count their ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.entries import SKETCH, Entry
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.engine.shard import Shard

from .shards import FrameClient, make_shard, push

_client_ids = (number.to_bytes(16, "little") for number in count(1))

FIRST = 0.5
"""First value of each row."""


def table(entry: Entry | None, **changes: Any) -> TableSpec:
    fields = {"name": "emb", "dim": 2, "rule": "sgd", "initializer": constant(FIRST), "entry": entry, **changes}
    return TableSpec(**fields)


def count_filter(threshold: int, *, sketch: bool = False) -> TableSpec:
    """A table whose ids get a row once they were named `threshold` times."""
    entry = Entry("count_filter", (("threshold", threshold),))
    return table(entry._replace(counter=SKETCH, num_ids=1000) if sketch else entry)


class CountedJob:
    """A client that pushes to all shards of a table.

    Args:
        spec: The table.
        shards: All shards; new ones if left out.
        num_shards: Number of new shards.
    """

    def __init__(self, spec: TableSpec, shards: Sequence[Shard] = (), *, num_shards: int = 1) -> None:
        self.spec = spec
        self.shards = shards or [make_shard(spec, shard=index, num_shards=num_shards) for index in range(num_shards)]
        self.placement = Placement.even(len(self.shards))
        self.clients = [FrameClient(shard, next(_client_ids)) for shard in self.shards]

    def push(self, ids: NDArray[np.int64], counts: NDArray[np.uint32] | None = None) -> None:
        """Subtracts 0.25 from the rows of distinct ids, each named as often as `counts` says, or once."""
        counts = np.ones(len(ids), np.uint32) if counts is None else counts
        owners = self.placement.shard_of(ids, self.spec.salt)
        for index, client in enumerate(self.clients):
            mine = owners == index
            grads = np.full((int(mine.sum()), self.spec.dim), 0.25, np.float32)
            block = push(
                self.spec, ids[mine], grads, statistics={"counts": counts[mine]} if self.spec.statistics else {}
            )
            assert client.push(block).error is None

    def value_of(self, id_: int) -> float:
        """Returns the first value of a row, as a pull sees it."""
        (owner,) = self.placement.shard_of(np.array([id_]), self.spec.salt)
        return self.clients[owner].rows(self.spec, id_)[0][0]

    def rows(self, ids: NDArray[np.int64]) -> list[float]:
        """Returns the first value of each row, as a pull sees it."""
        owners = self.placement.shard_of(ids, self.spec.salt)
        values = np.empty(len(ids))
        for index, client in enumerate(self.clients):
            mine = np.flatnonzero(owners == index)
            values[mine] = [row[0] for row in client.rows(self.spec, *ids[mine].tolist())]
        return values.tolist()

    @property
    def num_rows(self) -> int:
        return sum(shard.states()[0].num_rows for shard in self.shards)

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
