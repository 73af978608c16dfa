"""A column is declared in one place: `core.columns.EXTRA`. Everything else follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet_sparse.core import columns
from fleet_sparse.core.columns import Column
from fleet_sparse.core.initializer import constant
from fleet_sparse.core.placement import Placement
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.snapshot.directory import directory_at
from fleet_sparse.snapshot.manifest import FULL, Manifest, file_name
from fleet_sparse.snapshot.reader import open_content
from fleet_sparse.snapshot.rows import Rows
from fleet_sparse.snapshot.rows_writer import RowsWriter
from fleet_sparse.snapshot.store import SnapshotStore
from fleet_sparse.tools.snapshots.diff import diff
from fleet_sparse.tools.snapshots.exchange import FORMATS, export, open_export
from fleet_sparse.tools.snapshots.reshard import reshard
from support.cow_views import all_rows, arranged

SPEC = TableSpec(name="C1", dim=4, rule="adagrad", initializer=constant(0.5))


@pytest.fixture
def stores():
    opened = []
    yield lambda: opened.append(TableStore(SPEC)) or opened[-1]
    for store in opened:
        store.close()


def count_push(counts, row_indices):
    counts[row_indices] += 1


def push(store, ids):
    store.push(np.array(ids), np.ones((len(ids), 4), np.float32), 0.1, 1)


def saved(path: Path, num_shards: int, rows: Rows) -> Path:
    """A snapshot of some rows, as the files of several shards."""
    store, placement = SnapshotStore(directory_at(path)), Placement.even(num_shards)
    plan = store.plan(FULL, "one")
    files = []
    for shard in range(num_shards):
        writer = RowsWriter(
            store.target(plan, "one").create(file_name(shard, num_shards)),
            shard=shard, num_shards=num_shards, cluster_id=1, incarnation=1, placement_version=1, save_id="one",
        )  # fmt: skip
        writer.begin_table(SPEC, optimizer_step=1, num_days=0)
        writer.write_rows(rows.part(placement.shard_of(rows.ids, SPEC.salt) == shard))
        writer.end_table()
        files.append(writer.finish())
    store.commit(plan, Manifest(plan.number, FULL, None, "one", "", ("C1",), True, tuple(files), ()))
    return path


def counts_in(source) -> dict[int, int]:
    blocks = list(source.rows("C1"))
    return {
        id_: n for rows in blocks for id_, n in zip(rows.ids.tolist(), rows.columns["num_pushes"].tolist(), strict=True)
    }


def test_a_new_column_needs_only_its_declaration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stores) -> None:
    num_pushes = Column("num_pushes", np.dtype("<u4"), initial=5, on_push=count_push)
    monkeypatch.setattr(columns, "EXTRA", (*columns.EXTRA, num_pushes))
    store, other = stores(), stores()
    push(store, range(100))
    view = arranged(store.capture())
    push(store, range(50, 150))  # while the view is open
    rows = view.copy(0, 100)
    other.load(rows)
    push(other, [7])
    first, second = saved(tmp_path / "a", 2, rows), saved(tmp_path / "b", 3, all_rows(other))
    with open_content(str(first)) as one, open_content(str(second)) as two:
        assert counts_in(one) == dict.fromkeys(range(100), 6)
        assert diff(one, two).tables[0].columns["num_pushes"].num_different == 1
        reshard(two, directory_at(tmp_path / "c"), 5)
        export(two, directory_at(tmp_path / "e"), FORMATS["parquet"])
    with open_content(str(tmp_path / "c")) as resharded, open_export(str(tmp_path / "e")) as imported:
        assert counts_in(resharded) == counts_in(imported) == dict.fromkeys(range(100), 6) | {7: 7}
