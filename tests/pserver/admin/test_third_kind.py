"""A kind of table that only this test knows is saved and loaded without a change in `pserver/admin`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core.criteria import Criterion
from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.engine.shard import Shard
from fleet_sparse.pserver.tables import kinds
from fleet_sparse.pserver.tables.embedding import EmbeddingTable
from fleet_sparse.pserver.tables.mutations import Push
from fleet_sparse.pserver.tables.table import OnChanged, Part, Post, Table, TableContext
from fleet_sparse.snapshot.manifest import Manifest
from fleet_sparse.snapshot.open_snapshot import shards_with
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_writer import RowsWriter
from fleet_sparse.wire.control import TableState
from support.saves import DENSE, loaded, save
from support.shards import SGD, make_shard

COUNTS = TableSpec(name="counts", dim=1, rule="sgd", initializer=constant(0.0))


class CountCut:
    def __init__(self, counts: dict[int, float]) -> None:
        self.counts = counts

    def back_memory(self) -> None: ...

    def release(self) -> None: ...

    def export(self, writer: RowsWriter, post: Post, on_changed: OnChanged | None = None) -> None:
        ids = np.array(list(self.counts), np.int64)
        ids = ids[np.argsort(hash_ids(ids, COUNTS.salt))]
        rows = np.array([self.counts[id_] for id_ in ids.tolist()], np.float32).reshape(-1, 1)
        writer.begin_table(COUNTS, optimizer_step=0, num_days=0)
        writer.write_rows(Rows.of(ids, rows, np.empty((len(ids), 0, 1), np.float32)))
        writer.end_table()

    def end(self, *, kept: bool) -> None: ...


class CountTable(Table):
    """How often each id was pushed, in a dict."""

    spec = COUNTS
    is_selectable = is_incremental = True
    where = "table 'counts'"
    num_bytes = 0

    def __init__(self, context: TableContext) -> None:
        self.optimizer_step = 0
        self.counts: dict[int, float] = {}
        self.changed: set[int] = set()
        self.owned = context.placement.shard_of_bucket == context.shard

    @property
    def state(self) -> TableState:
        return TableState(COUNTS.name, 0, len(self.counts), False)

    def apply(self, push: Push) -> int:
        assert push.ids is not None
        for id_ in push.ids.tolist():
            self.counts[id_] = self.counts.get(id_, 0.0) + 1.0
            self.changed.add(id_)
        return len(push.ids)

    def capture(self, *, only_changed: bool, ends_day: bool, left_out: Sequence[Criterion] = ()) -> CountCut:
        ids = self.changed if only_changed else self.counts.keys()
        cut = CountCut({id_: self.counts[id_] for id_ in ids})
        self.changed = set()
        return cut

    def source_shards(self, manifest: Manifest) -> list[int]:
        return shards_with(manifest, self.owned)

    def load(self, parts: Sequence[Part], *, is_delta: bool, check_active: Callable[[], None]) -> None:
        for file, section in parts:
            for rows in file.rows(section, self.owned):
                self.counts.update(zip(rows.ids.tolist(), rows.rows[:, 0].tolist(), strict=True))


def make(spec: TableSpec, context: TableContext) -> Table:
    if spec != COUNTS:
        return EmbeddingTable(spec, context)
    return CountTable(context)  # type: ignore[abstract]  # a save and a load need no more


def push(shards: Sequence[Shard], *ids: int) -> None:
    every = np.array(ids, np.int64)
    for shard in shards:
        mine = every[Placement.even(len(shards)).shard_of(every, COUNTS.salt) == shard.shard_index]
        shard.commit([], [Push(COUNTS.table_id, mine, np.ones((len(mine), 1), np.float32), 1.0, 1)])


def counts_in(shards: Sequence[Shard]) -> dict[int, float]:
    tables = [shard.tables[COUNTS.table_id].table for shard in shards]
    return {id_: count for table in tables if isinstance(table, CountTable) for id_, count in table.counts.items()}


def test_a_third_kind_of_table_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.KINDS, TableSpec, make)
    before = [make_shard(SGD, DENSE, COUNTS, shard=shard, num_shards=2) for shard in range(2)]
    push(before, *range(100))
    assert save(before, tmp_path, meanwhile=lambda: push(before, 1, 2, 3)).num_rows == 100
    assert save(before, tmp_path, kind="delta", save_id="two").num_rows == 3
    assert counts_in(loaded(tmp_path, 3)) == counts_in(before)
    assert counts_in(before) == {id_: 2.0 if id_ in (1, 2, 3) else 1.0 for id_ in range(100)}
