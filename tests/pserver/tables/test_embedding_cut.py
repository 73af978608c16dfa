from __future__ import annotations

from concurrent.futures import Future
from itertools import accumulate

import numpy as np
import pytest

from fleet_sparse.core.ids import hash_ids
from fleet_sparse.core.initializer import uniform
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.storage import cow_view
from fleet_sparse.pserver.storage.table_store import TableStore
from fleet_sparse.pserver.tables import embedding_cut
from fleet_sparse.pserver.tables.embedding_cut import EmbeddingCut


class Writer:
    """Keeps the ids of each slice, as a writer of rows gets them."""

    def __init__(self):
        self.slices = []

    def begin_table(self, spec, **_): ...

    def write_rows(self, rows):
        self.slices.append(rows.ids)

    def end_table(self): ...


def at_once(task):
    future = Future()
    future.set_result(task())
    return future


def test_slices_of_both_parts_of_a_view_begin_where_blocks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cow_view, "SPLIT_FROM_ROWS", 1000)
    monkeypatch.setattr(embedding_cut, "SLICE_ROWS", 1000)
    spec = TableSpec(name="C1", dim=3, rule="sgd", initializer=uniform(-0.1, 0.1))
    store, writer = TableStore(spec), Writer()
    store.push(np.arange(20_000), np.ones((20_000, 3), np.float32), 0.1, 1)
    cut = EmbeddingCut(store, 1, only_changed=False, ends_day=False)
    cut.export(writer, at_once)
    cut.end(kept=True)
    ends = list(accumulate(len(ids) for ids in writer.slices))
    assert len([end for end in ends if end % 1000]) == 1  # that of the first part
    ids = np.concatenate(writer.slices)
    assert sorted(ids.tolist()) == list(range(20_000))
    assert (np.diff(hash_ids(ids, spec.salt)) > 0).all()
    store.close()
