"""Two versions of a table against a dict for each version, at every slice."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_sparse.core.initializer import initial_rows, uniform
from fleet_sparse.core.table_spec import TableSpec
from fleet_sparse.pserver.read_only.versions import VersionedRows, VersionedValues, set_rows

SPEC = TableSpec(name="t", dim=3, rule="read_only", initializer=uniform(-1.0, 1.0), seed=5)
IDS = np.array([-(2**63), -1, 0, 1, 7, 2**63 - 1, 12, 13], np.int64)
Dict = dict[int, NDArray[np.float32]]


def initial(id_: int) -> NDArray[np.float32]:
    ids = np.array([id_], np.int64)
    return initial_rows(SPEC.initializer, ids, dim=SPEC.dim, seed=SPEC.seed, salt=SPEC.salt)[0]


def truth(version: Dict) -> bytes:
    return b"".join(version.get(id_, initial(id_)).tobytes() for id_ in IDS.tolist())


def read(table: VersionedRows, *, is_older: bool) -> bytes:
    out = np.empty((len(IDS), SPEC.dim), np.float32)
    assert table.pull(IDS, out, is_older=is_older) == 0
    return out.tobytes()


change = st.tuples(st.sampled_from(IDS.tolist()), st.sampled_from([0.5, -0.0, 0.0, 2.0, float("nan"), None]))
"""An id and the value of its row; None if it is removed."""
slice_of_changes = st.lists(change, min_size=1, max_size=5, unique_by=lambda each: each[0])
adoptions = st.lists(st.tuples(st.lists(slice_of_changes, max_size=4), st.booleans()), min_size=1, max_size=5)


@settings(deadline=None, max_examples=200)
@given(first=slice_of_changes, steps=adoptions)
def test_each_version_reads_as_its_dict_at_every_slice(first: list, steps: list) -> None:
    table = VersionedRows(SPEC, huge_pages=False)
    newest: Dict = {id_: np.full(3, value, np.float32) for id_, value in first if value is not None}
    set_rows(table.newest, np.array(list(newest), np.int64), np.array([*newest.values()], np.float32).reshape(-1, 3))
    for slices, is_committed in steps:
        table.begin()
        adopted = dict(newest)
        assert read(table, is_older=True) == truth(newest)
        for changes in slices:
            for id_, value in changes:
                if value is None:
                    adopted.pop(id_, None)
                else:
                    adopted[id_] = np.full(3, value, np.float32)
            ids = np.array([id_ for id_, _ in changes], np.int64)
            table.apply(ids, np.array([adopted.get(id_, initial(id_)) for id_ in ids.tolist()], np.float32))
            assert read(table, is_older=True) == truth(newest)
            assert read(table, is_older=False) == truth(adopted)
        if is_committed:
            changed = set(table.changed_ids().tolist())
            assert len(changed) == table.num_changed
            rows = [
                (old.get(i, initial(i)).tobytes(), new.get(i, initial(i)).tobytes())
                for old, new in [(newest, adopted)]
                for i in IDS.tolist()
            ]
            assert {i for i, (old, new) in zip(IDS.tolist(), rows, strict=True) if old != new} <= changed
            newest = adopted
        else:
            table.abandon()
            assert table.num_changed == 0
        assert read(table, is_older=False) == truth(newest)
    table.close()


def test_a_row_that_keeps_its_bits_does_not_count_as_changed() -> None:
    table = VersionedRows(SPEC, huge_pages=False)
    ids = IDS[:2].copy()
    set_rows(table.newest, ids, np.array([[0.0, 0, 0], [1, 2, 3]], np.float32))
    table.begin()
    assert table.apply(ids, np.array([[-0.0, 0, 0], [1, 2, 3]], np.float32)) == 1
    assert table.changed_ids().tolist() == [IDS[0]]
    table.close()


def test_ids_of_other_shards_are_counted_and_not_read() -> None:
    table = VersionedRows(SPEC, huge_pages=False)
    table.begin()
    out = np.zeros((len(IDS), SPEC.dim), np.float32)
    owner = np.ones(1 << 14, np.int32)
    assert table.pull(IDS, out, is_older=True, shard_of_bucket=owner, shard=0) == len(IDS)
    assert not out.any()
    table.close()


def test_dense_values_of_two_versions() -> None:
    values = VersionedValues(np.zeros(2, np.float32))
    values.commit(np.ones(2, np.float32))
    assert values.newest is not None
    assert values.older is not None
    assert (values.newest.tolist(), values.older.tolist()) == ([1, 1], [0, 0])
