"""Trained shards, saves of several shards together, and the bits of their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_sparse.core.dense_spec import DenseSpec, Segment
from fleet_sparse.core.initializer import constant, uniform
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.admin.snapshot_loader import Loaded, load
from fleet_sparse.pserver.admin.snapshot_writer import Save
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables.dense import DenseTable
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.pserver.tables.table import Post
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.store import SnapshotStore
from fleet_sparse.wire.frame_format import Op

from .cow_views import everything
from .shards import FrameClient, assign, make_shard, push

ADAGRAD = TableSpec(name="adagrad", dim=5, rule="adagrad", initializer=uniform(-1.0, 1.0), seed=3)
ADAM = TableSpec(name="adam", dim=17, rule="adam", initializer=constant(0.0))
EMPTY = TableSpec(name="empty", dim=3, rule="adam", initializer=constant(0.0))
DENSE = DenseSpec("dense", "adam", (), (Segment("w", 0, 70, 1.0), Segment("b", 70, 31, 2.0)))
SPECS: tuple[TableSpec | DenseSpec, ...] = (ADAGRAD, ADAM, EMPTY, DENSE)

Table = dict[int, tuple[bytes, bytes]]
"""Id -> row, states."""
Array = dict[int, tuple[bytes, bytes]]
"""Index of a value -> value, states."""


class Trained:
    """Shards that hold rows and state of several tables, trained by one client.

    Args:
        num_shards: Number of shards.
        num_ids: Number of distinct ids of each table.
        assigned: True if the dense array has values.
    """

    def __init__(self, num_shards: int, *, num_ids: int = 500, assigned: bool = True) -> None:
        self._rng = np.random.default_rng(num_shards)
        self._placement = Placement.even(num_shards)
        self._assigned = assigned
        self._step = 0
        self.ids = self._rng.integers(-(2**63), 2**63, num_ids)
        self.shards = [make_shard(*SPECS, shard=shard, num_shards=num_shards) for shard in range(num_shards)]
        self.clients = [FrameClient(shard) for shard in self.shards]
        for client in self.clients if assigned else []:
            values = self._rng.random(self._dense_size(client.shard), np.float32)
            assert client.ask(Op.ASSIGN, assign(DENSE, values)).error is None

    def step(self, num_pushed: int | None = None) -> None:
        """One push to each table and array on each shard."""
        self._step += 1
        for spec in (ADAGRAD, ADAM):
            some = self._rng.choice(self.ids, num_pushed or len(self.ids) // 2, replace=False)
            shard_of = self._placement.shard_of(some, spec.salt)
            for client in self.clients:
                mine = some[shard_of == client.shard.shard_index]
                grads = self._rng.standard_normal((len(mine), spec.dim)).astype(np.float32)
                assert client.push(push(spec, mine, grads, optimizer_step=self._step)).error is None
        for client in self.clients if self._assigned else []:
            grads = self._rng.random(self._dense_size(client.shard), np.float32)
            assert client.push(push(DENSE, None, grads, optimizer_step=self._step)).error is None

    @staticmethod
    def _dense_size(shard: Shard) -> int:
        begin, end = DENSE.range_of(shard.shard_index, shard.num_shards)
        return end - begin


def trained(num_shards: int, *, num_ids: int = 500, assigned: bool = True, num_steps: int = 3) -> list[Shard]:
    """Returns the shards of a `Trained` after some steps."""
    job = Trained(num_shards, num_ids=num_ids, assigned=assigned)
    for _ in range(num_steps):
        job.step()
    return job.shards


def at_once(task: Callable[[], Any]) -> Future[Any]:
    """Runs a task at once, for a shard without other users."""
    future: Future[Any] = Future()
    try:
        future.set_result(task())
    except Exception as error:
        future.set_exception(error)
    return future


def save(
    shards: Sequence[Shard],
    where: Path | str,
    *,
    kind: str = "full",
    keep_last: int | None = 1,
    save_id: str = "one",
    meanwhile: Callable[[], None] = lambda: None,
    post: Post = at_once,
    clients: Collection[bytes] | None = None,
) -> Manifest:
    """Saves shards together, as `SnapshotCalls` does.

    Args:
        meanwhile: Called between the cut and the writing.
        post: Runs what the writing asks of the shard's thread.
        clients: Ids of the registered workers' clients; None for all that pushed.
    """
    series = SnapshotStore(directory_at(where))
    plan = series.plan(kind, save_id)
    saves = [Save(shard, save_id, base=None if plan.base is None else plan.base.checksum) for shard in shards]
    assert [one.cut(clients) for one in saves] == [True] * len(saves)
    meanwhile()
    files = tuple(one.write(series.target(plan, save_id), post) for one in saves)
    names = saves[0].table_names
    manifest = Manifest(plan.number, plan.kind, plan.base, save_id, "", names, True, files, ())
    series.commit(plan, manifest, keep_last)
    for one in saves:
        one.end(manifest.checksum)
    return manifest


def loaded(where: Path | str, num_shards: int) -> list[Shard]:
    """Returns shards that loaded a snapshot."""
    return [shard for shard, _ in loads(where, num_shards)]


def loads(where: Path | str, num_shards: int) -> list[tuple[Shard, Loaded]]:
    """Returns the same shards, each with the result of its load."""
    shards = [make_shard(shard=shard, num_shards=num_shards, incarnation=99) for shard in range(num_shards)]
    return [(shard, load(shard, directory_at(where))) for shard in shards]


def saved_rows(where: Path, spec: TableSpec, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns `(k, dim)` rows of one pserver that loaded a snapshot."""
    (shard,) = loaded(where, 1)
    out = np.empty((len(ids), spec.dim), np.float32)
    store_of(shard, spec).pull(ids, out)
    shard.close()
    return out


def store_of(shard: Shard, spec: TableSpec) -> TableStore:
    """Returns the rows of a table on a shard."""
    table = shard.tables[spec.table_id].table
    assert isinstance(table, EmbeddingTable)
    return table.store


def rows_in(shards: Sequence[Shard], spec: TableSpec) -> Table:
    """Returns the bits of every row and state."""
    table: Table = {}
    for shard in shards:
        rows = everything(store_of(shard, spec))
        assert (shard.placement.shard_of(np.array(list(rows), np.int64), spec.salt) == shard.shard_index).all()
        table.update({id_: (row.row, row.state) for id_, row in rows.items()})
    return table


def array_in(shards: Sequence[Shard]) -> Array:
    """Returns every value of the dense array, and its states."""
    values: Array = {}
    for shard in shards:
        table = shard.tables[DENSE.table_id].table
        assert isinstance(table, DenseTable)
        dense = table.range
        assert dense.assigned
        states: NDArray[np.float32] = dense.export_states()
        values.update({dense.begin + i: (dense.values[i].tobytes(), states[:, i].tobytes()) for i in range(dense.size)})
    return values
